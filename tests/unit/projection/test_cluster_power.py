"""A cluster's power from a node's, against sums of nodes drawn one by one."""

import time

import numpy as np
import pytest
from node_loads import load_of_phases

from wattune.analysis.signals.energy_grid import GRID_S
from wattune.arrays import Floats
from wattune.projection.cluster_power import Checkpoints, NodeLoad, cluster_power, training_w

STEP_S = 0.5


def node_w(rng: np.random.Generator, late_s: float, noise_w: float, seconds: float) -> Floats:
    """Draws a device with a sinusoidal step and white noise of its own."""
    time_s = np.arange(round(seconds / GRID_S)) * GRID_S - late_s
    return 500.0 + 100.0 * np.sin(2 * np.pi * time_s / STEP_S) + noise_w * rng.standard_normal(len(time_s))


@pytest.mark.parametrize("jitter_s", [0.0, 0.05])
def test_a_sum_of_nodes_drawn_one_by_one_swings_as_foretold(jitter_s: float) -> None:
    rng = np.random.default_rng(1)
    measured = NodeLoad(parts_w=np.array([node_w(rng, 0.0, 80.0, 60.0) for _ in range(8)]), step_s=STEP_S)
    foretold_w = training_w(measured, 32, jitter_s)
    drawn_w = sum(node_w(rng, rng.normal(0.0, jitter_s), 80.0, 60.0) for _ in range(256))
    assert foretold_w.mean() == pytest.approx(np.mean(drawn_w), rel=1e-3)
    assert foretold_w.std() == pytest.approx(np.std(drawn_w), rel=0.1 if jitter_s else 0.02)


def test_as_many_nodes_as_were_measured_are_what_was_measured() -> None:
    rng = np.random.default_rng(2)
    parts_w = np.array([node_w(rng, 0.0, 80.0, 20.0) for _ in range(4)])
    again_w = training_w(NodeLoad(parts_w=parts_w, step_s=STEP_S, num_nodes=2), 2, 0.0)
    assert np.allclose(again_w, parts_w.sum(axis=0))


def test_a_square_wave_has_the_swing_and_the_lines_of_its_series() -> None:
    found = cluster_power(load_of_phases([(0.4, 700.0), (0.6, 100.0)]), 10, jitter_s=0.0)
    harmonics = np.arange(1, 21)
    rms_w = np.sqrt(2) * 6000.0 * np.abs(np.sin(0.4 * np.pi * harmonics)) / (np.pi * harmonics)
    assert found["cluster_power_mean_w"] == pytest.approx(3400.0)
    assert found["cluster_swing_rms_w"] == pytest.approx(np.sqrt((rms_w**2).sum()), rel=1e-3)
    strongest = np.argsort(rms_w)[::-1][:3]
    assert [found[f"cluster_line_{n}_hz"] for n in (1, 2, 3)] == pytest.approx(list(harmonics[strongest]), abs=1e-3)
    assert [found[f"cluster_line_{n}_rms_w"] for n in (1, 2, 3)] == pytest.approx(list(rms_w[strongest]), rel=2e-3)
    assert found["cluster_power_peak_100ms_w"] == pytest.approx(7000.0)
    assert found["cluster_power_peak_1s_w"] == pytest.approx(3400.0, rel=1e-6)
    assert found["cluster_power_ramp_100ms_w_per_s"] == pytest.approx(60_000.0)


def test_checkpoints_and_failures_count_by_their_time() -> None:
    saves = Checkpoints(every_steps=60, duration_s=15.0, node_w=100.0, edge_s=1.0)
    load = load_of_phases([(1.0, 700.0)])
    found = cluster_power(load, 4, checkpoints=saves)
    assert found["cluster_power_mean_w"] == pytest.approx((60 * 2800.0 + 15 * 400.0) / 75)
    assert (found["cluster_power_p5_w"], found["cluster_power_p95_w"]) == pytest.approx((400.0, 2800.0))
    assert found["cluster_power_ramp_1s_w_per_s"] == pytest.approx(0.75 * 2400.0, rel=1e-2)
    assert found["cluster_power_range_1s_w"] == pytest.approx(2400.0)
    # Two edges in a cycle have 2 (A / 2 pi f)^2 sinc^2 of one-sided energy each: the sum over harmonics of the cycle.
    hz = np.arange(1, 20 * 75) / 75
    rms_w = np.sqrt(2) * 2400 * np.abs(np.sin(np.pi * hz * 15) * np.sinc(hz)) / (np.pi * hz * 75)
    assert found["cluster_swing_rms_w"] == pytest.approx(np.sqrt((rms_w[hz >= 0.1] ** 2).sum()), rel=0.01)
    down = cluster_power(load, 4, checkpoints=saves, down_w=60.0, down_frac=0.1)
    assert down["cluster_power_mean_w"] == pytest.approx(0.9 * found["cluster_power_mean_w"] + 0.1 * 240.0)
    assert down["cluster_power_ramp_1s_w_per_s"] == pytest.approx(2800.0 - 240.0)


def test_a_long_cycle_has_the_mean_of_all_of_it() -> None:
    saves = Checkpoints(every_steps=1e6, duration_s=40.0, node_w=100.0)
    found = cluster_power(load_of_phases([(0.5, 700.0), (0.5, 500.0)]), 1, checkpoints=saves)
    assert found["cluster_power_mean_w"] == pytest.approx((1e6 * 600 + 40 * 100) / (1e6 + 40))
    assert found["cluster_power_range_1s_w"] == pytest.approx(500.0, rel=1e-3)


def test_a_sensor_of_means_shows_no_peak_below_its_mean() -> None:
    load = NodeLoad(parts_w=np.full((1, 4000), 600.0), step_s=1.0, period_s=0.1, averaged_s=1.0)
    found = cluster_power(load, 2, checkpoints=Checkpoints(every_steps=20, duration_s=9.0, node_w=100.0))
    assert "cluster_power_peak_1s_w" in found and "cluster_power_peak_100ms_w" not in found
    assert found["cluster_power_ramp_1s_w_per_s"] == pytest.approx(750.0, rel=0.01), "a mean of means"


def test_ten_days_of_1024_nodes_take_seconds() -> None:
    load = NodeLoad(parts_w=np.random.default_rng(3).normal(600, 50, (8, 60_000)), step_s=2.0)
    start = time.process_time()
    cluster_power(load, 1024, checkpoints=Checkpoints(every_steps=900, duration_s=60.0, node_w=900.0), down_w=700.0)
    assert time.process_time() - start < 10.0

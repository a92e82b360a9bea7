"""A projected job over its days: what stops and failures take, and how far intervals reach."""

import pytest

from wattune.catalog.hardware import parse_cluster_label
from wattune.intervals import Interval
from wattune.projection.cluster_power import load_of_phases
from wattune.projection.failures import RESTART_S, best_work_s, failures_apart_s, goodput_frac
from wattune.projection.operation import operated

CLUSTER = parse_cluster_label("1024x8 h100_sxm")
LOAD = load_of_phases([(0.5, 5600.0), (0.5, 2400.0)])
"""Of 1 s and 4,000 W."""


def near(value: float, frac: float = 0.0) -> Interval:
    return Interval(value=value, low=value * (1 - frac), high=value * (1 + frac), method="projected", num_runs=1)


FIGURES = {"step_time_s": near(1.2), "node_device_power_mean_w": near(4400.0), "energy_per_token_j": near(2.0)}


def test_a_job_costs_what_its_stops_and_failures_say() -> None:
    found = operated(FIGURES, LOAD, CLUSTER, apart_h=6.0, every_steps=None, checkpoint_s=30.0)
    useful = goodput_frac(6 * 3600.0, best_work_s(6 * 3600.0, 30.0), 30.0, RESTART_S)
    assert found["goodput_frac"].value == pytest.approx(useful)
    assert found["cluster_power_mean_w"].value < 1024 * 4400.0
    ratio = found["cluster_power_mean_w"].value / (1024 * 4400.0)
    assert found["energy_per_useful_token_j"].value == pytest.approx(2.0 * ratio / useful)
    assert found["cluster_power_peak_100ms_w"].value == pytest.approx(1024 * 5600 * 1.1, rel=0.01)
    assert found["cluster_line_1_hz"].value == pytest.approx(1 / 1.2, rel=0.01), "the line is at the projected step"


def test_intervals_hold_the_range_of_failures_and_of_the_step() -> None:
    sure = operated(FIGURES, LOAD, CLUSTER, apart_h=None, every_steps=400, checkpoint_s=30.0)
    wide = {name: near(one.value, 0.1) for name, one in FIGURES.items()}
    unsure = operated(wide, LOAD, CLUSTER, apart_h=None, every_steps=400, checkpoint_s=30.0)
    for apart_h, end in ((29_538, sure["goodput_frac"].low), (82_051, sure["goodput_frac"].high)):
        apart_s = failures_apart_s(8192, apart_h)
        assert goodput_frac(apart_s, 480.0, 30.0, RESTART_S) == pytest.approx(end, rel=1e-4)
    for name, one in sure.items():
        assert one.low <= one.value <= one.high, name
        if name == "goodput_frac":  # a longer step has fewer checkpoints an hour, and loses more with each failure
            continue
        assert unsure[name].low <= one.low * (1 + 1e-9) and one.high <= unsure[name].high * (1 + 1e-9), name
    assert unsure["cluster_power_mean_w"].half_width_frac > 0.09


def test_without_power_nothing_is_said() -> None:
    figures = {"step_time_s": near(1.2)}
    assert operated(figures, LOAD, CLUSTER, apart_h=None, every_steps=None) == {}

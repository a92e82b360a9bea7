"""Excursions that were planted, and the hysteresis that counts them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.analysis.metrics.excursion import excursion_metrics, stretches_inside, time_above_frac
from wattune.analysis.metrics.power import powers_together
from wattune.analysis.signals.align import align
from wattune.analysis.signals.energy_grid import GRID_S
from wattune.analysis.signals.series import series

GPU = ("n0", "gpu0")
TWIN = ("n0", "gpu1")
LIMITS = {"n0": {"devices": {"gpu0": {"power_limit_w": 700.0}, "gpu1": {"power_limit_w": 700.0}}}}


def plateau(time_s):
    """600 W, and twice 800 W: from 5 to 6 s and from 10 to 10.5 s; edges in the middle between samples."""
    inside = ((time_s > 5) & (time_s < 6)) | ((time_s > 10) & (time_s < 10.5))
    return np.where(inside, 800.0, 600.0)


def metrics_of(bench, waves, manifests=LIMITS, **ring):
    aligned = align({"ring": bench.ring(waves, start_s=-1.01, **ring)}, bench.steps(list(waves)), manifests)
    found, together = powers_together(aligned)
    sensors = together.sensors
    return excursion_metrics(found, [one.excursions for one in sensors], [one.above_limit_frac for one in sensors])


def test_planted_excursions_are_found_with_their_closed_forms(bench):
    metrics = metrics_of(bench, {GPU: plateau})
    # The mean over 100 ms passes 735 W 67.5 % into an edge and 700 W half way: 17.5 ms less than the plateau.
    lengths_s = (1.0 - 0.0175) + (0.5 - 0.0175)
    assert metrics["excursion_count"] == 2
    assert metrics["excursion_time_frac"] == pytest.approx(lengths_s / 19.9, abs=1e-3)
    # Half a joule is missing at each end, where power comes down over one interval of 20 ms.
    assert metrics["excursion_energy_j"] == pytest.approx(100.0 * lengths_s - 2 * 0.5, abs=2 * 100.0 * GRID_S)
    assert metrics["excursion_peak_over_limit_frac"] == pytest.approx(1 / 7)
    assert metrics["over_limit_20ms_time_frac"] == pytest.approx(1.5 / 20, rel=1e-3)


def test_a_load_flat_at_its_limit_has_no_excursion(bench):
    metrics = metrics_of(bench, {GPU: lambda t: np.full(len(t), 700.0)})
    assert metrics == {
        "excursion_count": 0.0,
        "excursion_time_frac": 0.0,
        "excursion_energy_j": 0.0,
        "excursion_peak_over_limit_frac": pytest.approx(0.0, abs=1e-9),
        "over_limit_20ms_time_frac": 0.0,
    }


def test_a_rise_of_less_than_5_percent_is_none_but_shows_in_the_peak(bench):
    metrics = metrics_of(bench, {GPU: lambda t: np.where((t > 5) & (t < 6), 730.0, 600.0)})
    assert metrics["excursion_count"] == 0
    assert metrics["excursion_peak_over_limit_frac"] == pytest.approx(30 / 700)
    assert metrics["over_limit_20ms_time_frac"] > 0


def test_a_quiet_device_halves_the_share_of_device_time(bench):
    alone = metrics_of(bench, {GPU: plateau})
    both = metrics_of(bench, {GPU: plateau, TWIN: lambda t: np.full(len(t), 100.0)})
    assert both["excursion_count"] == alone["excursion_count"]
    assert both["excursion_time_frac"] == pytest.approx(alone["excursion_time_frac"] / 2)
    assert both["over_limit_20ms_time_frac"] == pytest.approx(alone["over_limit_20ms_time_frac"] / 2)


def test_without_a_limit_or_with_a_coarse_sensor_nothing_is_said(bench):
    assert metrics_of(bench, {GPU: plateau}, {}) == {}
    assert metrics_of(bench, {GPU: plateau}, period_s=0.1) == {}


def inside(values, begin, end, **before):
    found = np.zeros(len(values), bool)
    for first, last in zip(*stretches_inside(np.array(values), begin, end, **before), strict=True):
        assert not found[first:last].any()
        found[first:last] = True
    return found.tolist()


def test_hysteresis_begins_above_and_ends_below():
    values = np.array([100, 104, 106, 101, 99.9, 104, 106, 107.0])
    assert inside(values, 105, 100) == [False, False, True, True, False, False, True, True]


@given(st.lists(st.floats(0, 2), max_size=50), st.booleans())
def test_hysteresis_agrees_with_a_loop(values, state):
    before, expected = state, []
    for value in values:
        state = value > 1.05 or (state and value >= 1.0)
        expected.append(state)
    assert inside(values, 1.05, 1.0, inside=before) == expected


def test_time_above_interpolates_crossings():
    triangle = series(np.array([0.0, 1.0, 2.0]), np.array([0.0, 10.0, 0.0]))
    assert time_above_frac(triangle, 5.0) == pytest.approx(0.5)
    assert time_above_frac(triangle, 7.5) == pytest.approx(0.25)
    assert time_above_frac(triangle, 10.0) == 0.0
    assert time_above_frac(triangle, -1.0) == 1.0

"""Excursions that were planted, and the hysteresis that counts them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.analysis.metrics.excursion import (
    ExcursionFinder,
    moving_means,
    stretches_inside,
    time_above_frac,
)
from wattune.analysis.metrics.power import excursion_metrics, powers_together
from wattune.analysis.signals.align import align
from wattune.analysis.signals.series import Series, series

GPU = ("n0", "gpu0")
TWIN = ("n0", "gpu1")
LIMITS = {"n0": {"devices": {"gpu0": {"power_limit_w": 700.0}, "gpu1": {"power_limit_w": 700.0}}}}


def plateau(time_s):
    """600 W, and twice 800 W: from 5 to 6 s and from 10 to 10.5 s; edges in the middle between samples."""
    inside = ((time_s > 5) & (time_s < 6)) | ((time_s > 10) & (time_s < 10.5))
    return np.where(inside, 800.0, 600.0)


def metrics_of(bench, waves, manifests=LIMITS, **ring):
    aligned = align({"ring": bench.ring(waves, start_s=-1.01, **ring)}, bench.steps(list(waves)), manifests)
    return excursion_metrics(powers_together(aligned))


def test_planted_excursions_are_found_with_their_closed_forms(bench):
    metrics = metrics_of(bench, {GPU: plateau})
    # The mean over 100 ms passes 735 W 67.5 % into an edge and 700 W half way: 17.5 ms less than the plateau.
    lengths_s = (1.0 - 0.0175) + (0.5 - 0.0175)
    assert metrics["excursion_count"] == 2
    assert metrics["excursion_time_frac"] == pytest.approx(lengths_s / 19.9, rel=1e-6)
    # Half a joule is missing at each end, where power comes down over one interval of 20 ms.
    assert metrics["excursion_energy_j"] == pytest.approx(100.0 * lengths_s - 2 * 0.5, rel=1e-6)
    assert metrics["excursion_peak_over_limit_frac"] == pytest.approx(1 / 7)
    assert metrics["over_limit_20ms_time_frac"] == pytest.approx(1.5 / 20, rel=1e-3)


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


@given(st.lists(st.floats(0, 2), max_size=50), st.booleans())
def test_hysteresis_agrees_with_a_loop(values, state):
    before, expected = state, []
    for value in values:
        state = value > 1.05 or (state and value >= 1.0)
        expected.append(state)
    assert inside(values, 1.05, 1.0, inside=before) == expected


def some_power(seed, count=150):
    """A walk about 700 W, sampled every 7 to 46 ms as the H200's ring is."""
    rng = np.random.default_rng(seed)
    walk = np.convolve(rng.normal(0, 120, count + 4), np.ones(5) / 2, "valid")
    return Series(np.cumsum(rng.uniform(0.007, 0.046, count)), 700.0 + walk)


def found(power, limit_w=700.0):
    finder = ExcursionFinder(limit_w)
    for means in moving_means(power):
        finder.add(means)
    return finder.found


def brute_force(power, limit_w, step_s=2e-6):
    """Count, seconds, energy and peak, by sums over a grid of 2 us and a loop."""
    time_s = np.arange(power.time_s[0], power.time_s[-1], step_s)
    watts = np.interp(time_s, power.time_s, power.value)
    energy_j = np.concatenate([[0.0], np.cumsum((watts[1:] + watts[:-1]) / 2 * step_s)])
    width = round(0.1 / step_s)
    mean_w = (energy_j[width:] - energy_j[:-width]) / 0.1
    events = np.flatnonzero((mean_w > 1.05 * limit_w) | (mean_w < limit_w))
    state, count, seconds, joules, since = False, 0, 0.0, 0.0, 0
    for at in [*events[np.flatnonzero(np.diff(mean_w[events] > limit_w, prepend=2))], len(mean_w) - 1]:
        above = mean_w[at] > limit_w and at != len(mean_w) - 1
        if above and not state:
            state, count, since = True, count + 1, at
        elif state and not above:
            state, seconds = False, seconds + (at - since) * step_s
            joules += float((watts[since + width // 2 : at + width // 2] - limit_w).sum()) * step_s
    return count, seconds, joules, float(mean_w.max())


@pytest.mark.parametrize("seed", range(6))
def test_excursions_agree_with_brute_force(seed):
    power = some_power(seed)
    count, seconds, joules, peak_w = brute_force(power, 700.0)
    exact = found(power)
    assert exact.count == count > 0
    assert (exact.end_s - exact.start_s).sum() == pytest.approx(seconds, abs=4e-6 * (count + 1))
    assert exact.energy_j.sum() == pytest.approx(joules, abs=1e-3)
    assert exact.peak_w.max() == pytest.approx(peak_w, abs=0.01)
    assert exact.time_frac == pytest.approx(seconds / (power.span_s - 0.1), rel=1e-3)


@given(st.integers(0, 1000), st.floats(0.1, 10.0), st.floats(-50.0, 50.0), st.integers(2, 60))
def test_excursions_scale_shift_and_do_not_depend_on_blocks(seed, factor, shift_s, block):
    power = some_power(seed, 80)
    one = found(power)
    other = found(Series(power.time_s + shift_s, factor * power.value), factor * 700.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wattune.analysis.metrics.excursion._BLOCK", block)
        cut = found(power)
    for found_too, scale, moved_s in ((other, factor, shift_s), (cut, 1.0, 0.0)):
        assert found_too.start_s == pytest.approx(one.start_s + moved_s, abs=1e-9)
        assert found_too.end_s == pytest.approx(one.end_s + moved_s, abs=1e-9)
        assert found_too.energy_j == pytest.approx(scale * one.energy_j, abs=1e-6 * scale)
        assert found_too.peak_w == pytest.approx(scale * one.peak_w)
        assert found_too.time_frac == pytest.approx(one.time_frac, abs=1e-9)


def test_a_series_as_short_as_the_window_has_no_mean():
    assert list(moving_means(Series(np.array([0.0, 0.1]), np.array([1.0, 2.0])))) == []


def test_time_above_interpolates_crossings():
    triangle = series(np.array([0.0, 1.0, 2.0]), np.array([0.0, 10.0, 0.0]))
    assert time_above_frac(triangle, 5.0) == pytest.approx(0.5)
    assert time_above_frac(triangle, 7.5) == pytest.approx(0.25)
    assert time_above_frac(triangle, 10.0) == 0.0
    assert time_above_frac(triangle, -1.0) == 1.0

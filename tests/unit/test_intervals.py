"""Intervals: their coverage where truth is known, drift that was planted, and what single runs borrow."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.intervals import DRIFT_MATTERS_FRAC, interval, of_series, reference, t_cumulative, t_quantile


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423)]
)
def test_t_agrees_with_the_printed_table(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, abs=5e-5)
    assert t_cumulative(quantile, freedom) == pytest.approx(0.975, abs=1e-5)
    assert t_cumulative(-quantile, freedom) == pytest.approx(0.025, abs=1e-5)
    assert t_cumulative(1.959964, None) == pytest.approx(0.975, abs=1e-6)


def test_two_repeats_have_the_textbook_interval():
    # Mean 101, standard deviation sqrt 2, standard error 1, one degree of freedom.
    found = interval([100.0, 102.0])
    assert (found.value, found.method, found.num_runs) == (101.0, "repeats", 2)
    assert (found.low, found.high) == pytest.approx((101 - 12.7062, 101 + 12.7062), abs=1e-3)
    assert found.probability_at_most(101.0) == pytest.approx(0.5)
    # P(T <= 1) with one degree of freedom: 3/4.
    assert found.probability_at_most(102.0) == pytest.approx(0.75)
    assert found.probability_at_least(102.0) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("phi", "steps", "least"), [(0.0, 20, 0.93), (0.0, 200, 0.93), (0.5, 200, 0.92), (0.8, 1000, 0.9)]
)
def test_intervals_from_steps_cover_the_mean_although_neighbours_resemble_each_other(phi, steps, least):
    rng, runs = np.random.default_rng(1), 400
    noise = rng.normal(size=(runs, steps + 100))
    series = np.zeros_like(noise)
    for index in range(1, noise.shape[1]):
        series[:, index] = phi * series[:, index - 1] + noise[:, index]
    found = [of_series(10.0 + one[100:]) for one in series]
    assert np.mean([one.low <= 10.0 <= one.high for one in found]) >= least
    # Blind to the resemblance, an interval is too narrow by sqrt((1 + phi) / (1 - phi)).
    blind = 1.96 * np.sqrt(1 / (1 - phi**2) / steps)
    assert np.median([(one.high - one.low) / 2 for one in found]) >= 0.85 * blind * np.sqrt((1 + phi) / (1 - phi))


def test_a_series_too_short_or_without_scatter():
    assert of_series([1.0] * 7) is None
    found = of_series([2.0] * 40)
    assert (found.low, found.high) == (2.0, 2.0)


def test_an_anchor_without_trend_gives_its_scatter_and_does_not_drift():
    values = [100.0, 101.0, 99.0, 100.5, 99.5, 100.0]
    found = reference(values, [0, 60, 120, 180, 240, 300])
    assert found.spread_frac == pytest.approx(np.std(values, ddof=1) / 100.0)
    assert not found.drifts
    assert found.drift_low_frac < 0 < found.drift_high_frac
    assert found.corrected(50.0, 300.0) == 50.0


def test_a_planted_drift_is_found_and_taken_off():
    rng = np.random.default_rng(2)
    at_s = np.arange(0.0, 3600.0, 300.0)
    values = 1000.0 * (1 - 0.04 * at_s / 3300.0) * (1 + 0.001 * rng.normal(size=len(at_s)))
    found = reference(values, at_s)
    assert found.drifts
    assert found.drift_frac == pytest.approx(-0.04 / 0.98, abs=0.004)
    assert found.spread_frac == pytest.approx(0.001, abs=6e-4)
    corrected = [found.corrected(value, time_s) for value, time_s in zip(values, at_s, strict=True)]
    assert np.std(corrected) < 0.1 * np.std(values)
    # Beyond the reference trial's own runs the trend is not carried on.
    assert found.corrected(1.0, 1e9) == found.corrected(1.0, 3300.0) == pytest.approx(1 / (1 + found.drift_frac / 2))
    assert found.corrected(1.0, -1e9) == found.corrected(1.0, 0.0) == pytest.approx(1 / (1 - found.drift_frac / 2))


def test_a_drift_too_small_to_matter_is_left_alone():
    at_s = np.arange(12.0)
    found = reference(100.0 * (1 + 0.5 * DRIFT_MATTERS_FRAC * at_s / 11), at_s)
    assert found.drift_low_frac > 0
    assert not found.drifts


def test_what_no_anchor_can_be_made_of():
    assert reference([], []) is None
    assert reference([5.0], [0.0]) is None
    assert reference([0.0, 0.0], [0.0, 1.0]) is None
    assert reference([1.0, math.nan], [0.0, 1.0]) is None
    three = reference([1.0, 1.1, 0.9], [0.0, 1.0, 2.0])
    assert three.drift_frac is None and not three.drifts


def test_a_single_run_takes_the_wider_of_the_anchors_scatter_and_its_own_steps():
    known = reference([100.0, 101.0, 99.0, 100.5, 99.5], range(5))
    assert interval([50.0]).method == "none"
    assert interval([50.0]).probability_at_most(60.0) is None
    from_reference = interval([50.0], reference=known, steps_frac=1e-4)
    assert from_reference.method == "reference"
    assert from_reference.half_width_frac == pytest.approx(t_quantile(4) * known.spread_frac)
    from_steps = interval([50.0], reference=known, steps_frac=0.2)
    assert (from_steps.method, from_steps.half_width_frac) == ("steps", pytest.approx(0.2))


def test_repeats_are_pooled_with_the_anchor():
    known = reference([100.0, 101.0, 99.0, 100.5, 99.5], range(5))
    lucky = interval([50.0, 50.0], reference=known)
    assert lucky.method == "pooled"
    # Two equal values do not mean no scatter: 4 of 5 degrees of freedom are the reference trial's.
    error = known.spread_frac * 50.0 * math.sqrt(4 / 5) / math.sqrt(2)
    assert lucky.high - 50.0 == pytest.approx(t_quantile(5) * error)
    assert interval([50.0, 50.5], reference=known).half_width_frac < interval([50.0, 50.5]).half_width_frac


@given(st.lists(st.floats(1, 1e6), min_size=2, max_size=8), st.floats(0.1, 10))
def test_intervals_hold_their_value_and_scale_with_the_unit(values, factor):
    found, scaled = interval(values), interval([factor * value for value in values])
    assert found.low <= found.value <= found.high
    assert scaled.low == pytest.approx(factor * found.low, rel=1e-6, abs=1e-6 * factor * found.value)
    assert scaled.high == pytest.approx(factor * found.high, rel=1e-6)
    assert found.to_json()["method"] == "repeats"

"""Student's t against its printed table, and the coverage of intervals from steps."""

import math

import numpy as np
import pytest

from wattune.intervals import of_series, t_cumulative, t_quantile


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423)]
)
def test_t_agrees_with_the_printed_table(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, abs=5e-5)
    assert t_cumulative(quantile, freedom) == pytest.approx(0.975, abs=1e-5)
    assert t_cumulative(-quantile, freedom) == pytest.approx(0.025, abs=1e-5)
    assert t_cumulative(1.959964, math.inf) == pytest.approx(0.975, abs=1e-6)


@pytest.mark.parametrize(("freedom", "quantile"), [(2.5, 3.5582), (4.5, 2.6605), (150, 1.9759), (1e9, 1.96)])
def test_t_between_whole_degrees_and_of_many(freedom, quantile):
    assert quantile - 1e-3 <= t_quantile(freedom) < 1.03 * quantile, "on the wide side"
    assert t_cumulative(quantile, freedom) == pytest.approx(0.975, abs=0.002)
    assert t_quantile(freedom) >= t_quantile(freedom + 1)


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

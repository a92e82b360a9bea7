"""Confidence intervals of figures, Student's t, and the interval of a series' mean.

Intervals of trials come from the scatter between all runs of a study (`wattune.ranking.scatter`). The interval of one
run's own steps is computed here. Every interval has the same confidence, `CONFIDENCE_FRAC`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import Final

import numpy as np

from wattune.arrays import Floats
from wattune.units import format_change, format_quantity

CONFIDENCE_FRAC: Final = 0.95
NORMAL_95: Final = 1.959964
"""Standard deviations from the middle of a normal distribution to the end of its 95 % interval."""

MOST_BATCHES: Final = 30
LEAST_BATCHES: Final = 8
"""Batches of a series: more than 30 gain nothing, fewer than some 10 widen the interval (Schmeiser 1982)."""

MOST_LEFT: Final = 0.7
"""Largest correlation of batch means that is used: among eight batches, more comes from chance or a trend."""


MANY_DEGREES: Final = 200
"""Degrees of freedom from which Student's t is computed by its expansion about the normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure with the confidence interval of its true value, at `CONFIDENCE_FRAC`."""

    value: float
    low: float
    high: float
    method: str
    """Source of the scatter: `repeats` of the trial and all others, `pooled` scatter of other trials' repeats, the
    `prior` alone, or `steps` of one run."""
    num_runs: int
    confidence_frac: float = CONFIDENCE_FRAC

    @property
    def half_width_frac(self) -> float:
        """Half the interval over the value; infinite for a value of 0 with a non-zero interval."""
        half = (self.high - self.low) / 2
        return half / abs(self.value) if self.value else math.inf if half else 0.0

    def shown(self, metric: str) -> str:
        """Formats the value of a metric with its unit, and with its half width if that is known."""
        if self.high <= self.low:
            return format_quantity(metric, self.value)
        half = (self.high - self.low) / 2
        share = math.isfinite(self.half_width_frac) and not metric.endswith("_c")
        percent = 100 * self.half_width_frac
        relative = f" ±{percent:,.0f} %" if percent > 99 else f" ±{percent:.2g} %"
        off = relative if share else f" ±{format_change(metric, half)}"
        return format_quantity(metric, self.value) + off


def of_series(values: Sequence[float] | Floats) -> Interval | None:
    """Computes the interval of the mean of a series with correlated neighbours, such as the steps of one run.

    Batch means (Schmeiser 1982, "Batch size effects in the analysis of simulation output"): the series is cut into
    equally long batches. Their means are nearly independent, and the interval is t over those. The number of batches
    starts at `MOST_BATCHES` and falls until neighbouring means are no longer correlated (lag 1 below its standard
    error) or `LEAST_BATCHES` is reached. A remainder that does not fill a batch is left out at the front. None below
    `LEAST_BATCHES` values.
    """
    each = np.asarray(values, np.float64)
    if len(each) < LEAST_BATCHES:
        return None
    mean, count = float(each.mean()), min(MOST_BATCHES, len(each))
    means = _batch_means(each, count)
    while count > LEAST_BATCHES and _lag_1(means) > 1 / math.sqrt(count):
        count = max(LEAST_BATCHES, count * 3 // 4)
        means = _batch_means(each, count)
    # The remaining correlation, corrected for its bias at small numbers (Kendall 1954), widens the interval as in an
    # autoregressive series of first order.
    left = min(max((count * _lag_1(means) + 1) / (count - 4), 0.0), MOST_LEFT)
    error = float(means.std(ddof=1)) / math.sqrt(count) * math.sqrt((1 + left) / (1 - left))
    reach = t_quantile(count - 1) * error
    return Interval(value=mean, low=mean - reach, high=mean + reach, method="steps", num_runs=1)


def _batch_means(values: Floats, count: int) -> Floats:
    size = len(values) // count
    means: Floats = values[len(values) - count * size :].reshape(count, size).mean(axis=1)
    return means


def _lag_1(values: Floats) -> float:
    """Returns the correlation of neighbours; 0 for a constant series."""
    apart = values - values.mean()
    total = float((apart**2).sum())
    return float((apart[1:] * apart[:-1]).sum()) / total if total > 0 else 0.0


def t_cumulative(value: float, degrees_of_freedom: float) -> float:
    """Computes P(T <= value) of Student's t; see `t_cumulatives`."""
    return float(t_cumulatives(np.array([value]), np.array([degrees_of_freedom]))[0])


def t_cumulatives(value: Floats, degrees_of_freedom: Floats) -> Floats:
    """Computes P(T <= value) of Student's t for each pair of a value and its degrees of freedom.

    Exact for whole degrees of freedom (finite sums: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3,
    26.7.4). Between two whole ones it is linear in their inverse. From `MANY_DEGREES` on the normal approximation
    26.7.8 holds to 1e-6. There is at least one degree. A pair's result does not depend on the pairs beside it.
    """
    found = np.empty(len(value))
    is_many = degrees_of_freedom >= MANY_DEGREES
    if is_many.any():
        many, x = degrees_of_freedom[is_many], value[is_many]
        squares = np.array([one**2 for one in x.tolist()])
        shrunk = np.where(np.isinf(many), x, x * (1 - 1 / (4 * many)) / np.sqrt(1 + squares / (2 * many)))
        found[is_many] = 0.5 * (1.0 + np.array(list(map(math.erf, (shrunk / math.sqrt(2.0)).tolist()))))
    few = np.where(is_many, 0.0, degrees_of_freedom)
    wholes = np.floor(few)
    for number in np.unique(wholes[~is_many]).tolist():
        here = np.flatnonzero(wholes == number)
        x, degrees, whole = value[here], few[here], int(number)
        low = _whole_t_cumulative(x, whole)
        part = degrees != number
        if part.any():
            high = _whole_t_cumulative(x[part], whole + 1)
            low[part] += (1 / whole - 1 / degrees[part]) / (1 / whole - 1 / (whole + 1)) * (high - low[part])
        found[here] = low
    return found


def _whole_t_cumulative(value: Floats, degrees_of_freedom: int) -> Floats:
    angles = list(map(math.atan2, np.abs(value).tolist(), repeat(math.sqrt(degrees_of_freedom))))
    sine, cosines = np.array(list(map(math.sin, angles))), list(map(math.cos, angles))
    angle, cosine, squares = np.array(angles), np.array(cosines), np.array([one**2 for one in cosines])
    odd = degrees_of_freedom % 2
    term, total = cosine if odd else np.ones(len(value)), np.zeros(len(value))
    for step in range(2 + odd, degrees_of_freedom + 1, 2):
        total = total + term
        term = term * (squares * (step - 1) / step)
    inside = np.minimum(2 / math.pi * (angle + sine * total) if odd else sine * total, 1.0)
    return (1 + np.copysign(inside, value)) / 2


def t_quantile(degrees_of_freedom: float) -> float:
    """Returns the two-sided quantile of |T| at `CONFIDENCE_FRAC`: 12.706 for one degree of freedom."""
    if degrees_of_freedom >= MANY_DEGREES:
        return _whole_t_quantile(MANY_DEGREES)  # 0.6 % wider than the normal distribution's at most
    whole = int(degrees_of_freedom)
    low = _whole_t_quantile(whole)
    if whole == degrees_of_freedom:
        return low
    between = (1 / whole - 1 / degrees_of_freedom) / (1 / whole - 1 / (whole + 1))
    return low + between * (_whole_t_quantile(whole + 1) - low)


@cache
def _whole_t_quantile(degrees_of_freedom: int) -> float:
    target, low, high = (1 + CONFIDENCE_FRAC) / 2, 0.0, 16.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cumulative(middle, degrees_of_freedom) < target else (low, middle)
    return (low + high) / 2

"""Confidence intervals of figures: from repeats, from the steps of one run, or from the reference trial's repeats.

A study runs most configurations once, and one configuration, the reference trial, many times. The scatter of the
reference trial's repeats is then the best estimate of the scatter of any single run. A trend among them is drift of the
machine (temperature of the room, other load), not of a configuration. Spreads are fractions, so that they carry over
from one configuration to another. Every interval has the same confidence, `CONFIDENCE_FRAC`.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from statistics import NormalDist
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from wattune.units import format_quantity

Floats: TypeAlias = npt.NDArray[np.float64]

CONFIDENCE_FRAC: Final = 0.95

DRIFT_MATTERS_FRAC: Final = 0.005
"""Change of the reference trial over a study that is ignored, however certain: the bound of energy's own error."""

LEAST_RUNS_FOR_DRIFT: Final = 4
"""A line through three points leaves one degree of freedom: its interval says nothing."""

MOST_BATCHES: Final = 30
LEAST_BATCHES: Final = 8
"""Batches of a series: more than 30 gain nothing, fewer than some 10 widen the interval (Schmeiser 1982)."""

MOST_LEFT: Final = 0.7
"""Largest correlation of batch means that is used: among eight batches, more comes from chance or a trend."""

_NORMAL: Final = NormalDist()
_QUANTILE: Final = _NORMAL.inv_cdf((1 + CONFIDENCE_FRAC) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure with the confidence interval of its true value, at `CONFIDENCE_FRAC`."""

    value: float
    low: float
    high: float
    method: str
    """`repeats`, `pooled`, `reference`, `steps`, or `none` for unknown scatter: then `low` and `high` are `value`."""
    num_runs: int
    confidence_frac: float = CONFIDENCE_FRAC
    standard_error: float = field(default=0.0, repr=False)
    degrees_of_freedom: int | None = field(default=None, repr=False)
    """Degrees of freedom of the t distribution; None for the normal one."""

    @property
    def half_width_frac(self) -> float:
        """Half the interval over the value; infinite for a value of 0 with a non-zero interval."""
        half = (self.high - self.low) / 2
        return half / abs(self.value) if self.value else math.inf if half else 0.0

    def shown(self, metric: str) -> str:
        """Formats the value of a metric with its unit, and with its half width if that is known."""
        off = f" ±{100 * self.half_width_frac:.2g} %" if self.high > self.low else ""
        return format_quantity(metric, self.value) + off

    def probability_at_most(self, bound: float) -> float | None:
        """Returns the probability that the true value is at most a bound; None if the scatter is unknown."""
        if self.method == "none":
            return None
        if self.standard_error == 0.0:
            return float(self.value <= bound)
        return t_cumulative((bound - self.value) / self.standard_error, self.degrees_of_freedom)

    def probability_at_least(self, bound: float) -> float | None:
        """Returns the probability that the true value is at least a bound; None if the scatter is unknown."""
        if self.method != "none" and self.standard_error == 0.0:
            return float(self.value >= bound)
        below = self.probability_at_most(bound)
        return None if below is None else 1.0 - below

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One metric of the reference trial: its scatter from run to run, and its drift over the study."""

    num_runs: int
    mean: float
    spread_frac: float
    """Standard deviation of one run over the mean; about the trend if the reference trial drifts."""
    degrees_of_freedom: int
    drift_frac: float | None
    """Change over the study by a straight line, over the mean; None below `LEAST_RUNS_FOR_DRIFT` runs."""
    drift_low_frac: float | None
    drift_high_frac: float | None
    start_s: float
    """Time of the first run."""
    span_s: float
    """From the first to the last run."""
    middle_s: float
    """Mean time of the runs, at which the trend has the mean."""
    drifts: bool
    """True if the drift is significant (its interval excludes 0) and matters (more than `DRIFT_MATTERS_FRAC`)."""

    def corrected(self, value: float, at_s: float) -> float:
        """Returns a figure corrected to `middle_s`; unchanged unless the reference trial drifts.

        Times outside the reference trial's own runs use the correction of the nearest run: a trend is not extrapolated.
        """
        if not self.drifts or self.drift_frac is None:
            return value
        nearest_s = min(max(at_s, self.start_s), self.start_s + self.span_s)
        return value / (1.0 + self.drift_frac * (nearest_s - self.middle_s) / self.span_s)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        return asdict(self)


def reference(values: Sequence[float], at_s: Sequence[float]) -> Reference | None:
    """Computes scatter and drift of a metric from repeats of one configuration.

    The line is least squares. Its interval is that of the slope, t with n - 2 degrees of freedom (Draper and Smith,
    Applied Regression Analysis, section 1.4).

    Args:
        values: The metric of every run.
        at_s: Time of each run, on any one clock.

    Returns:
        The reference, None below two runs or if their mean is 0, of which there are no fractions.
    """
    value, time_s = np.asarray(values, np.float64), np.asarray(at_s, np.float64)
    good = np.isfinite(value) & np.isfinite(time_s)
    value, time_s = value[good], time_s[good]
    mean = float(value.mean()) if len(value) else 0.0
    if len(value) < 2 or mean == 0.0:
        return None
    span_s, middle_s = float(np.ptp(time_s)), float(time_s.mean())
    freedom, spread = len(value) - 1, float(value.std(ddof=1))
    drift: tuple[float, float, float] | None = None
    drifts = False
    if len(value) >= LEAST_RUNS_FOR_DRIFT and span_s > 0:
        apart_s = time_s - middle_s
        slope = float((apart_s * value).sum() / (apart_s**2).sum())
        residual = float(np.sqrt(((value - mean - slope * apart_s) ** 2).sum() / (len(value) - 2)))
        reach = t_quantile(len(value) - 2) * residual / float(np.sqrt((apart_s**2).sum()))
        low, change, high = sorted(each * span_s / mean for each in (slope - reach, slope, slope + reach))
        drift = low, change, high
        drifts = (low > 0 or high < 0) and abs(change) > DRIFT_MATTERS_FRAC
        if drifts:
            freedom, spread = len(value) - 2, residual
    return Reference(
        num_runs=len(value),
        mean=mean,
        spread_frac=spread / abs(mean),
        degrees_of_freedom=freedom,
        drift_frac=None if drift is None else drift[1],
        drift_low_frac=None if drift is None else drift[0],
        drift_high_frac=None if drift is None else drift[2],
        start_s=float(time_s.min()),
        span_s=span_s,
        middle_s=middle_s,
        drifts=drifts,
    )


def interval(
    values: Sequence[float], *, reference: Reference | None = None, steps_frac: float | None = None
) -> Interval:
    """Computes the interval of a metric's true value, from all data there is.

    Several repeats have the t interval of their mean. With a reference trial its scatter is pooled with theirs, both as
    fractions, because two or three repeats alone give a poor estimate of scatter (pooled variance; Box, Hunter and
    Hunter, Statistics for Experimenters, section 3.2). A single run has the wider interval of two: from the reference
    trial's scatter, or from its own steps. Steps of one run do not show run-to-run variation, and a trial may scatter
    more than the reference trial.

    Args:
        values: The metric over the repeats that count; one or more.
        reference: The study's reference for the same metric.
        steps_frac: Half width of the interval from the run's own steps over the value; only used for a single run.
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count > 1:
        # Plain Python: for two or three values numpy's calls cost more than the sums, and rankings have thousands.
        freedom, method = count - 1, "repeats"
        variance = math.fsum((value - mean) ** 2 for value in values) / freedom
        if reference is not None:
            borrowed = (reference.spread_frac * mean) ** 2
            total = freedom + reference.degrees_of_freedom
            variance = (freedom * variance + reference.degrees_of_freedom * borrowed) / total
            freedom, method = total, "pooled"
        return _interval(mean, math.sqrt(variance / count), freedom, method, count)
    found: list[Interval] = []
    if reference is not None:
        found.append(_interval(mean, reference.spread_frac * abs(mean), reference.degrees_of_freedom, "reference", 1))
    if steps_frac is not None:
        found.append(_interval(mean, steps_frac * abs(mean) / _QUANTILE, None, "steps", 1))
    if not found:
        return Interval(value=mean, low=mean, high=mean, method="none", num_runs=count)
    return max(found, key=lambda one: one.high - one.low)


def _interval(value: float, error: float, freedom: int | None, method: str, count: int) -> Interval:
    reach = (t_quantile(freedom) if freedom else _QUANTILE) * error
    return Interval(
        value=value,
        low=value - reach,
        high=value + reach,
        method=method,
        num_runs=count,
        standard_error=error,
        degrees_of_freedom=freedom,
    )


def of_series(values: Sequence[float] | Floats) -> Interval | None:
    """Computes the interval of the mean of a series with correlated neighbours, such as the steps of one run.

    Batch means (Schmeiser 1982, "Batch size effects in the analysis of simulation output"): the series is cut into
    equally long batches. Their means are nearly independent, and the interval is t over those. The number of batches
    starts at `MOST_BATCHES` and falls until neighbouring means are no longer correlated (lag 1 below its standard
    error) or `LEAST_BATCHES` is reached.

    Args:
        values: The series in order; a remainder that does not fill a batch is left out at its front.

    Returns:
        The interval about the mean of all values, None below `LEAST_BATCHES` values.
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
    return _interval(mean, error, count - 1, "steps", 1)


def _batch_means(values: Floats, count: int) -> Floats:
    size = len(values) // count
    means: Floats = values[len(values) - count * size :].reshape(count, size).mean(axis=1)
    return means


def _lag_1(values: Floats) -> float:
    """Returns the correlation of neighbours; 0 for a constant series."""
    apart = values - values.mean()
    total = float((apart**2).sum())
    return float((apart[1:] * apart[:-1]).sum()) / total if total > 0 else 0.0


def t_cumulative(value: float, degrees_of_freedom: int | None) -> float:
    """Computes P(T <= value) of Student's t, exactly; None degrees of freedom mean the normal distribution.

    Finite sums for whole degrees of freedom: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3, 26.7.4.
    """
    if degrees_of_freedom is None:
        return _NORMAL.cdf(value)
    angle = math.atan2(abs(value), math.sqrt(degrees_of_freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees_of_freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for step in range(2 + odd, degrees_of_freedom + 1, 2):
        total += term
        term *= cosine**2 * (step - 1) / step
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    inside = min(inside, 1.0)
    return (1 + math.copysign(inside, value)) / 2


@cache
def t_quantile(degrees_of_freedom: int, *, confidence_frac: float = CONFIDENCE_FRAC) -> float:
    """Returns the two-sided quantile of |T|: 12.706 for one degree of freedom and 0.95.

    Args:
        degrees_of_freedom: At least 1.
        confidence_frac: The probability that |T| is smaller.
    """
    target, low, high = (1 + confidence_frac) / 2, 0.0, 1.0
    while t_cumulative(high, degrees_of_freedom) < target:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cumulative(middle, degrees_of_freedom) < target else (low, middle)
    return (low + high) / 2

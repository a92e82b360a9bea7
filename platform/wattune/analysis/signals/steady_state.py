"""Start of the steady state, found from step times and temperatures instead of a fixed number of steps."""

import math
from itertools import pairwise
from typing import Final

import numpy as np

from wattune.analysis.signals.series import Series
from wattune.arrays import Floats

LEAST_STEPS: Final = 8
"""Fewest steps in which a transient can be separated from scatter."""

LEAST_LEFT: Final = 10
"""Fewest steps whose scatter is used, unless half of all are fewer."""

LEAST_SCATTER_FRAC: Final = 1e-4
"""Least scatter of step times that is assumed: steps that are nearly equal differ by rounding alone."""

TRANSIENT_SCATTERS: Final = 2.0
"""`TRANSIENT_FRAC` in standard deviations of the rest: quiet steps among noisy ones are not a steady state."""

FLAT_FACTOR: Final = 1.25
"""The minimum is flat after the transient: the first step within this factor of it ends the transient."""

LATER_FRAC: Final = 0.5
"""The second half's best counts only below this share of the first half's: few steps may scatter little by chance."""

TRANSIENT_FRAC: Final = 0.02
"""Least deviation of the left-out steps' median from that of the rest. A smaller transient stays: its bias is below the
bound of `unsteady_steps`, and one slow step is never taken for warm-up."""

TREND_LEVEL: Final = 2.807
"""Standard errors beyond which a trend of many steps is not chance: 0.5 % of runs without one, by the normal
distribution."""

FEW_STEPS_LEVELS: Final = (1.25, 19.5)
"""Level of few steps: the first number plus the second over the root of their number, if that is above `TREND_LEVEL`.
The correlation of few steps is known badly. Ours, by simulation: of autoregressive series of first order with
correlations up to 0.8 and 8 to 200 steps, at most 5 % exceed it (`tests/unit/analysis/signals/test_steady_state.py`).
"""

JUMP_SHARE: Final = 0.85
"""Level of a difference of halves, as a share of that of a line: series without either exceed it as rarely."""

MOST_LEFT: Final = 0.9
"""Largest correlation of neighbouring steps that is used: more comes from the trend itself."""

WINSORIZED: Final = 3.0
"""Robust standard deviations at which residuals are cut off, so that single slow steps do not hide a trend."""

_MOST_PLACES: Final = 64
"""Places in front of a minimum at which steps are compared, each with two medians over all of them."""

_MOST_POINTS: Final = 512
"""Steps compared pair by pair; longer runs are averaged to as many."""

SETTLED_C_PER_MIN: Final = 1.0
"""Change of temperature that counts as settled: readings are whole degrees, so a minute does not show less."""

S_PER_MIN: Final = 60.0

LEAST_SETTLED_S: Final = 60.0
"""Shortest time that shows settled temperatures."""

_TEMPERATURE_BINS: Final = 512


def steady_from(times_s: Floats) -> int | None:
    """Finds the first step of the steady state.

    Marginal standard error rule (MSER; White, Cobb and Spratt 2000, "A comparison of five steady-state truncation
    heuristics for simulation"): the number d of left-out steps minimizes the standard error of the rest's mean, for n
    steps sum (x - mean)² / (n - d)². It is the change point that a cumulative sum test finds (Wang and Glynn 2014).
    At most half is left out: a minimum beyond that means that no steady state was reached. Only steps count that differ
    from the rest (`TRANSIENT_FRAC`). If the first d do not, the best smaller number counts whose steps do.

    Returns the steps to leave out, 0 without a transient that matters; None if the steady state does not begin in the
    first half, or if the steps that are left still drift (`drift_frac`), by more than `TRANSIENT_FRAC` over as many
    steps as there are.
    """
    count = len(times_s)
    if count < LEAST_STEPS:
        return 0
    left = count - np.arange(count)
    # Relative to the overall mean, so that the difference below is not one of two large, nearly equal sums.
    apart = times_s - times_s.mean()
    total, squares = (np.cumsum(each[::-1])[::-1] for each in (apart, apart**2))
    scatter = np.maximum(squares - total**2 / left, left * (LEAST_SCATTER_FRAC * times_s.mean()) ** 2)
    spread = scatter / left.astype(np.float64) ** 2
    half, furthest = count // 2, max(min(3 * count // 4, count - LEAST_LEFT), count // 2)
    least = int(np.argmax(spread[: half + 1] <= FLAT_FACTOR * spread[: half + 1].min()))
    later = half + 1 + int(np.argmin(spread[half + 1 : furthest + 1])) if furthest > half else half
    if spread[later] < spread[least] * LATER_FRAC and _apart(times_s, later):
        return None
    left_out = least
    if least and not _apart(times_s, least):
        # Chance put the minimum behind the transient, where the median of all steps before it is that of the rest.
        edges = np.unique(np.geomspace(1, least + 1, _MOST_PLACES).astype(np.int64))
        best = [first + int(np.argmin(spread[first:end])) for first, end in pairwise(edges.tolist())]
        before = [at for at in best if spread[at] * FLAT_FACTOR < spread[0] and _apart(times_s, at)]
        flat = FLAT_FACTOR * min((spread[at] for at in before), default=0.0)
        left_out = next((at for at in before if spread[at] <= flat), 0)
    # A line left to itself would seem to settle: of its later half, the halves differ half as much.
    drift = (drift_frac(times_s[left_out:]) or 0.0) * count / (count - left_out)
    return None if drift > TRANSIENT_FRAC else left_out


def drift_frac(times_s: Floats) -> float | None:
    """Computes by how much the later half of the steps differs from the earlier one; 0 where it may be chance.

    A slow change is a line, a sudden one two levels. The larger of both counts:

    - The slope of Theil (1950) and Sen (1968), the median over all pairs of steps, times half the length of the run.
    - The difference of the halves' medians.

    Either counts beyond a level of its standard errors. Those are of least squares, with extremes cut off
    (`WINSORIZED`). Neighbouring steps resemble each other, so both variances grow by (1 + r) / (1 - r) for their
    correlation r, as in an autoregressive series of first order. A sawtooth of many periods does not drift: its scatter
    is in the uncertainty of the mean.

    It is a share of the median, never negative; None below `LEAST_STEPS`.
    """
    if len(times_s) < LEAST_STEPS:
        return None
    size = -(-len(times_s) // _MOST_POINTS)
    points = times_s[len(times_s) % size :].reshape(-1, size).mean(axis=1)
    count, median = len(points), float(np.median(points))
    first, second = np.triu_indices(count, 1)
    slope = float(np.median((points[second] - points[first]) / (second - first)))
    left = _correlation_about_trend(points, slope)
    # Standard error of the difference of two means of count / 2 points each, for a standard deviation of 1.
    error = 2 / math.sqrt(count) * math.sqrt((1 + left) / (1 - left))
    level = max(TREND_LEVEL, FEW_STEPS_LEVELS[0] + FEW_STEPS_LEVELS[1] / math.sqrt(count))
    line_s = abs(slope) * count / 2
    # A slope of least squares has sqrt(12 / n**3) of the standard deviation, so half the run has sqrt(3 / n).
    line_error_s = error * math.sqrt(3) / 2 * _spread(points - slope * np.arange(count))
    halves = points[: count // 2], points[count // 2 :]
    jump_s = abs(float(np.median(halves[1]) - np.median(halves[0])))
    # Standard error of a median is 1.25 times that of a mean.
    jump_error_s = 1.2533 * error * _spread(np.concatenate([half - np.median(half) for half in halves]))
    found_s = (
        line_s if line_s > level * line_error_s else 0.0,
        jump_s if jump_s > JUMP_SHARE * level * jump_error_s else 0.0,
    )
    return max(found_s) / median


def _spread(residuals: Floats) -> float:
    """Returns the standard deviation of residuals about two fitted numbers, with extremes cut off."""
    apart = residuals - np.median(residuals)
    most = WINSORIZED * 1.4826 * float(np.median(np.abs(apart)))  # scaled to that of a normal distribution
    kept = np.clip(apart, -most, most)
    return math.sqrt(float(((kept - kept.mean()) ** 2).sum()) / (len(kept) - 2))


def _correlation_about_trend(points: Floats, slope: float) -> float:
    """Estimates the correlation of neighbours about a line or about two levels, whichever fits better.

    It is corrected for its bias at small numbers (Kendall 1954) and lies between 0 and `MOST_LEFT`.
    """
    count = len(points)
    apart = points - points.mean()
    about_line = apart - slope * (np.arange(count) - (count - 1) / 2)
    cut = np.arange(2, count - 1)
    before = np.cumsum(apart)[cut - 1]
    at = int(cut[np.argmax(before**2 / cut + before**2 / (count - cut))])
    about_levels = np.concatenate([part - part.mean() for part in np.split(apart, [at])])
    about = min((about_line - about_line.mean(), about_levels), key=lambda each: float((each**2).sum()))
    total = float((about**2).sum())
    lag_1 = float((about[1:] * about[:-1]).sum()) / total if total > 0 else 0.0
    return min(max((count * lag_1 + 1) / (count - 4), 0.0), MOST_LEFT)


def _apart(times_s: Floats, at: int) -> bool:
    """Returns true if steps before `at` differ from the rest by `TRANSIENT_FRAC` and by `TRANSIENT_SCATTERS`."""
    before, after = float(np.median(times_s[:at])), float(np.median(times_s[at:]))
    # The median absolute deviation, scaled to the standard deviation of a normal distribution.
    scatter = 1.4826 * float(np.median(np.abs(times_s[at:] - after)))
    return abs(before - after) > max(TRANSIENT_FRAC * after, TRANSIENT_SCATTERS * scatter)


def settled_from_s(temperature: Series) -> float | None:
    """Finds when a temperature settled: from there on no minute's mean differs by a degree from the next one's.

    If the series is shorter than two minutes, its halves replace the minutes, and the degree shrinks with them.

    None where the last two minutes still differ or there is less than `LEAST_SETTLED_S`.
    """
    if temperature.span_s < LEAST_SETTLED_S:
        return None
    width_s = min(S_PER_MIN, temperature.span_s / 2)
    start_s = np.linspace(temperature.time_s[0], temperature.time_s[-1] - 2 * width_s, _TEMPERATURE_BINS)
    area = np.split(temperature.cumulative(np.concatenate([start_s + shift * width_s for shift in (0, 1, 2)])), 3)
    change_c = np.abs(area[2] - 2 * area[1] + area[0]) / width_s
    moving = np.flatnonzero(change_c > SETTLED_C_PER_MIN * width_s / S_PER_MIN)
    if not len(moving):
        return float(start_s[0])
    return float(start_s[moving[-1] + 1]) if moving[-1] + 1 < len(start_s) else None

"""Where steady state begins, found from step times and temperatures themselves instead of from a count."""

from typing import Final

import numpy as np

from wattune.analysis.signals.series import Floats, Series

LEAST_STEPS: Final = 8
"""Below, no transient can be told from scatter."""

LEAST_LEFT: Final = 10
"""Steps whose scatter is looked at, at least, unless half of all are fewer."""

LEAST_SCATTER_FRAC: Final = 1e-4
"""Scatter of step times that is taken for granted: steps that are equal to the last digit differ by rounding alone."""

TRANSIENT_SCATTERS: Final = 2.0
"""The same in standard deviations of the rest: where steps scatter more, quiet ones are no steady state."""

FLAT_FACTOR: Final = 1.25
"""The minimum is flat behind the transient: the first step within this factor of it ends the transient."""

LATER_FRAC: Final = 0.5
"""How much less the second half's best has to be for the first half's to be none: few steps have little scatter by
chance too."""

TRANSIENT_FRAC: Final = 0.02
"""How far the median of what is left out must be from that of the rest: less is left in, as a bias below the bound that
`unsteady_steps` has, and so that one slow step is never taken for warm-up and cut away."""

SETTLED_C_PER_MIN: Final = 1.0
"""Change of temperature that counts as none: with whole degrees, less cannot be told within a minute."""

S_PER_MIN: Final = 60.0

LEAST_SETTLED_S: Final = 60.0
"""Shortest time in which temperatures can be seen not to move."""

_TEMPERATURE_BINS: Final = 512


def steady_from(times_s: Floats) -> int | None:
    """The first step of the steady state.

    Marginal standard error rule (MSER; White, Cobb and Spratt 2000, "A comparison of five steady-state truncation
    heuristics for simulation"): what is left out at the front is what makes the standard error of the rest's mean
    least, n steps less d having sum (x - mean)² / (n - d)². It is the change point a cumulative sum test finds (Wang
    and Glynn 2014). At most half is left out: a least beyond that says no steady state was reached.

    Args:
        times_s: Step times in order.

    Returns:
        Steps to leave out, 0 where there is no transient that matters; None where none of the first half will do.
    """
    count = len(times_s)
    if count < LEAST_STEPS:
        return 0
    left = count - np.arange(count)
    # Around the overall mean, so that the difference of two large sums is not one of nearly equal numbers.
    apart = times_s - times_s.mean()
    total, squares = (np.cumsum(each[::-1])[::-1] for each in (apart, apart**2))
    scatter = np.maximum(squares - total**2 / left, left * (LEAST_SCATTER_FRAC * times_s.mean()) ** 2)
    spread = scatter / left.astype(np.float64) ** 2
    half, furthest = count // 2, max(min(3 * count // 4, count - LEAST_LEFT), count // 2)
    least = int(np.argmax(spread[: half + 1] <= FLAT_FACTOR * spread[: half + 1].min()))
    later = half + 1 + int(np.argmin(spread[half + 1 : furthest + 1])) if furthest > half else half
    if spread[later] < spread[least] * LATER_FRAC and _apart(times_s, later):
        return None
    return least if least and _apart(times_s, least) else 0


def _apart(times_s: Floats, at: int) -> bool:
    """Whether what is before a step is unlike what follows, by `TRANSIENT_FRAC` and by `TRANSIENT_SCATTERS`."""
    before, after = float(np.median(times_s[:at])), float(np.median(times_s[at:]))
    # The median absolute deviation, as that of a normal distribution's standard deviation.
    scatter = 1.4826 * float(np.median(np.abs(times_s[at:] - after)))
    return abs(before - after) > max(TRANSIENT_FRAC * after, TRANSIENT_SCATTERS * scatter)


def settled_from_s(temperature: Series) -> float | None:
    """When a temperature came to rest: from there on no minute's mean differs by a degree from the next one's.

    Where the series is shorter than two minutes its halves stand for minutes, and the degree shrinks with them.

    Args:
        temperature: Degrees over the window.

    Returns:
        The earliest such time, None where the last two minutes still differ or there is less than `LEAST_SETTLED_S`.
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

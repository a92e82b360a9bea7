"""Start of the steady state, found from step times and temperatures instead of a fixed number of steps."""

from typing import Final

import numpy as np

from wattune.analysis.signals.series import Floats, Series

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
    At most half is left out: a minimum beyond that means that no steady state was reached.

    Args:
        times_s: Step times in order.

    Returns:
        Steps to leave out, 0 without a transient that matters; None if the steady state does not begin in the first
        half.
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
    return least if least and _apart(times_s, least) else 0


def _apart(times_s: Floats, at: int) -> bool:
    """Returns true if steps before `at` differ from the rest by `TRANSIENT_FRAC` and by `TRANSIENT_SCATTERS`."""
    before, after = float(np.median(times_s[:at])), float(np.median(times_s[at:]))
    # The median absolute deviation, scaled to the standard deviation of a normal distribution.
    scatter = 1.4826 * float(np.median(np.abs(times_s[at:] - after)))
    return abs(before - after) > max(TRANSIENT_FRAC * after, TRANSIENT_SCATTERS * scatter)


def settled_from_s(temperature: Series) -> float | None:
    """Finds when a temperature settled: from there on no minute's mean differs by a degree from the next one's.

    If the series is shorter than two minutes, its halves replace the minutes, and the degree shrinks with them.

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

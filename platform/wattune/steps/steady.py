"""The steady part of step times while they are measured: the same test as the loop of the built-in engines."""

import statistics
from collections.abc import Sequence
from typing import Final

STABLE_FRAC: Final = 0.05
"""Warm-up ends when the medians of a round's halves differ by less than this share."""

ROUND_STEPS: Final = 5
"""Steps of a round unless a study says otherwise."""

LEAST_STEPS: Final = 4
"""Fewest steps whose halves can be compared."""


def is_stable(times_s: Sequence[float]) -> bool:
    """Returns True where the two halves of a round of step times have medians within `STABLE_FRAC` of each other.

    Fewer than four steps are too few to decide; they count as not stable.
    """
    if len(times_s) < LEAST_STEPS:
        return False
    half = len(times_s) // 2
    first, second = statistics.median(times_s[:half]), statistics.median(times_s[half:])
    return abs(second - first) <= STABLE_FRAC * second


def steady_from(step_times_s: Sequence[float], *, round_steps: int = ROUND_STEPS) -> int | None:
    """Finds the end of the warm-up: whole rounds of steps, until one is stable.

    Args:
        step_times_s: Step times in order, in seconds, from the program's first step.
        round_steps: Steps of a round, at least `LEAST_STEPS`.

    Returns:
        Index of the first step after the warm-up; None where no whole round is stable yet.
    """
    size = max(round_steps, LEAST_STEPS)
    for start in range(0, len(step_times_s) - size + 1, size):
        if is_stable(step_times_s[start : start + size]):
            return start + size
    return None

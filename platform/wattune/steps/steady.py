"""The end of warm-up, by one test for built-in engines, commands and recordings: whole rounds until one is stable."""

import statistics
from collections.abc import Sequence
from typing import Final

STABLE_FRAC: Final = 0.05
"""Warm-up ends when the medians of a round's halves differ by less than this share."""

ROUND_STEPS: Final = 5
"""Steps of a round unless a study says otherwise."""

LEAST_STEPS: Final = 4
"""Fewest steps whose halves can be compared."""

MOST_WARMUP_ROUNDS: Final = 4
"""Rounds after which a trial is measured although its step time is not stable."""


def is_stable(times_s: Sequence[float]) -> bool:
    """Returns True where the two halves of a round of step times have medians within `STABLE_FRAC` of each other.

    Fewer than four steps are too few to decide; they count as not stable.
    """
    if len(times_s) < LEAST_STEPS:
        return False
    half = len(times_s) // 2
    first, second = statistics.median(times_s[:half]), statistics.median(times_s[half:])
    return abs(second - first) <= STABLE_FRAC * second


def warmup(
    times_s: Sequence[float], round_steps: int = ROUND_STEPS, most_rounds: int | None = MOST_WARMUP_ROUNDS
) -> tuple[int | None, bool]:
    """Finds the end of warm-up.

    Args:
        times_s: Times of all steps so far in order, from the program's first one.
        round_steps: Steps of a round: the fewest of warm-up.
        most_rounds: Rounds after which it ends anyhow; None goes on until one is stable.

    Returns:
        Steps of warm-up, None while it goes on, and whether step time was stable at its end.
    """
    size = max(round_steps, 1)
    whole = len(times_s) // size
    for number in range(1, (whole if most_rounds is None else min(whole, most_rounds)) + 1):
        if is_stable(times_s[(number - 1) * size : number * size]):
            return number * size, True
    return (None, False) if most_rounds is None or whole < most_rounds else (most_rounds * size, False)

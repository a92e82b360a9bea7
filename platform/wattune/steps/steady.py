"""The end of warm-up, by one test for built-in engines, commands and recordings: a window slides until it is stable.

Its steps are the first measured ones: steps that are steady are no warm-up.
"""

import statistics
from collections.abc import Sequence
from typing import Final

STABLE_FRAC: Final = 0.05
"""Steps are stable where the medians of a window's halves differ by less than this share, and so do every other's."""

WINDOW_STEPS: Final = 4
"""Steps that are judged, the latest ones. The first step of all is never among them: it compiles, and starts NCCL."""

MOST_TIMES: Final = 4
"""Times the least warm-up, or as many judged steps, after which a trial is measured though its steps are not stable."""

MOST_PROFILED: Final = 2
PROFILED_S: Final = 0.2
"""Steps that run under the profiler on GPUs unless a study says otherwise: as many as take so long, one or two. A step
of 0.72 s (H200) divides into the same shares as the next one, to 0.0003, one of 0.25 s to 0.006: repeats of a plan
differ by 0.01 to 0.02."""


def num_profiled(step_time_s: float) -> int:
    """Returns the steps that run under the profiler where a study names no number."""
    return 1 if step_time_s >= PROFILED_S else MOST_PROFILED


def is_stable(times_s: Sequence[float]) -> bool:
    """Returns True where halves, and every other step, have medians alike; fewer than `WINDOW_STEPS` never do."""
    if len(times_s) < WINDOW_STEPS:
        return False
    half = len(times_s) // 2
    return _alike(times_s[:half], times_s[half:]) and _alike(times_s[::2], times_s[1::2])


def _alike(some_s: Sequence[float], others_s: Sequence[float]) -> bool:
    first, second = statistics.median(some_s), statistics.median(others_s)
    return abs(second - first) <= STABLE_FRAC * second


def least_warmup(asked: int) -> int:
    """Returns the fewest steps of warm-up: as many as asked for, and at least the first one."""
    return max(asked, 1)


def most_warmup(asked: int) -> int:
    """Returns the number of steps after which a trial is measured in any case."""
    return MOST_TIMES * max(asked, 1 + WINDOW_STEPS)


def warmup(times_s: Sequence[float], asked: int = 0, *, endless: bool = False) -> tuple[int | None, bool]:
    """Finds the end of warm-up in the times of all steps so far, from the program's first one.

    Returns the steps of warm-up, None while it goes on, and whether step time was stable after them. It ends after
    `most_warmup` steps anyhow, unless it is `endless`.
    """
    most = len(times_s) if endless else most_warmup(asked)
    for number in range(least_warmup(asked), min(len(times_s), most) - WINDOW_STEPS + 1):
        if is_stable(times_s[number : number + WINDOW_STEPS]):
            return number, True
    return (None, False) if endless or len(times_s) < most else (most, False)

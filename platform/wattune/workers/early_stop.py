"""Early stop of a measurement: whether the steps so far prove that a trial loses.

A trial loses where its mean step time is above a bar that the study sets from its best trial
(`wattune.orchestrate.scheduling.early_stop`). The proof is the 95 % interval of this run's own steps, by batch means,
as the result states it afterwards (`wattune.intervals.of_series`).
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from wattune.intervals import of_series

LEAST_STEPS: Final = 18
"""Fewest measured steps before a stop. The analysis may take half of them for warm-up, and the interval of what is left
needs eight times from step to step."""


def steps_to_look(num_measured: int, min_steps: int) -> int:
    """Returns the steps to run until the ranks look whether the trial loses.

    They look after `min_steps` (at least `LEAST_STEPS`), then whenever the number of steps has doubled. A study of 100
    steps looks three times at most, so that few chances to stop wrongly add up.
    """
    first = max(min_steps, LEAST_STEPS)
    return first - num_measured if num_measured < first else num_measured


def loses(starts_s: Sequence[float], stop_above_s: float) -> str | None:
    """Returns the proof that the mean time of measured steps is above a bar; None while they do not prove it."""
    interval = of_series(np.diff(np.asarray(starts_s, np.float64)))
    if interval is None or interval.low <= stop_above_s:
        return None
    return f"a step takes {interval.low:.4g} s or more, and above {stop_above_s:.4g} s it loses"

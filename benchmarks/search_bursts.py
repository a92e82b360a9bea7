"""Bursts in the replay of `search_regret.py`: what one costs, what it measures, and the ladder that promotes the best.

Measured tables hold no bursts. Its cost is that of its trial with a shorter window. What it measures is drawn from the
full measurement and `BURST_ERRORS`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from wattune.fidelity import BURST, FIDELITY, FIRST_BURST_REPEAT
from wattune.objective import Question
from wattune.orchestrate.scheduling.ladder import Ladder
from wattune.run import Run
from wattune.search.search_entry import Burst, LadderSettings
from wattune.units import NS_PER_S

BURST_STEPS: Final = 3
BURST_S: Final = 1.5
"""Least length of a burst: the defaults of `search.ladder.burst`."""
PROMOTE_FRAC: Final = 0.25
"""Share of the bursts that is measured in full: the default of `search.ladder.promote`."""
BURST_ERRORS: Final = {
    "tokens_per_s": (0.005, 0.02),
    "tokens_per_s_per_device": (0.005, 0.02),
    "step_time_s": (-0.005, 0.02),
    "node_device_power_peak_1s_w": (-0.007, 0.006),
    "device_temp_max_c": (-0.085, 0.02),
    "memory_peak_bytes": (0.0, 0.0),
    "memory_headroom_frac": (0.0, 0.0),
}
"""Bias and standard deviation of log(burst / full) by metric, measured on two trials of four H200s: too few for more
than one digit (`benchmarks/results/search_ladder.md`)."""
OTHER_ERROR: Final = (0.0, 0.02)
SYNTHETIC_WARMUP_STEPS: Final = 5
"""Of the 15 steps of a synthetic trial, those that a burst runs too before its window."""
LADDERED: Final = ("random", "tpe", "model_guided")
"""Strategies that are replayed with a ladder too."""
SUFFIX: Final = ", ladder"
"""Ending of the name of a strategy that is replayed with a ladder."""


def costs_s(row: Mapping[str, Any], window_s: float | None) -> tuple[float, float]:
    """Computes what a run and a burst in its place take, from build to end. A run that failed takes as long as a burst.

    Args:
        row: A row of a table of trials.
        window_s: Seconds of a full window; None leaves the row's own. A window has one step at least.

    Returns:
        Seconds of the run, and of the burst.
    """
    took_s, step_s = (row["end_wall_ns"] - row["start_wall_ns"]) / NS_PER_S, row.get("step_time_s")
    if step_s is None:
        return took_s, took_s
    numbers = json.loads(row["numbers"])
    warmup_s = SYNTHETIC_WARMUP_STEPS * step_s
    own_s = numbers["window_s"] if "window_s" in numbers else took_s - numbers["build_time_s"] - warmup_s
    full_s = own_s if window_s is None else max(window_s, step_s)
    return took_s - own_s + full_s, took_s - own_s + max(BURST_S, BURST_STEPS * step_s)


def make_ladder(question: Question, promote_frac: float) -> Ladder:
    """Makes a study's own ladder, with bursts of the default length."""
    burst = Burst(min_steps=BURST_STEPS, min_seconds=BURST_S)
    return Ladder(LadderSettings(burst=burst, promote=promote_frac), question)


def burst_of(result: Run, dice: np.random.Generator) -> Run:
    """Draws the result that a burst in the place of a full run would have had."""
    errors = {name: BURST_ERRORS.get(name, OTHER_ERROR) for name in result.metrics}
    metrics = {
        name: value * math.exp(errors[name][0] + errors[name][1] * dice.standard_normal())
        for name, value in result.metrics.items()
    }
    return replace(result, repeat=FIRST_BURST_REPEAT, metrics=metrics, tags={FIDELITY: BURST})

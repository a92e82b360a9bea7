"""Fidelity: how much of a trial a result measured, and what for.

A burst measured a few steps, and never passes as a full result. The role of a run shows in the number of its repeat,
its tags and its numbers.
"""

from collections.abc import Sequence
from typing import Final, Literal

from wattune.run import Run

Role = Literal["trial", "burst", "reference", "race", "finalist"]
"""The purpose of a run: its own result, a few steps that decide whether it is worth one, a check for drift, a repeat
that tells the best apart, or a longer run because it is among the best."""

FIDELITY: Final = "fidelity"
"""Tag of a result that measured less or more than its study's settings ask of a trial."""

BURST: Final = "burst"
"""Value of that tag, and quality reason, of a few steps that decide whether a trial is worth a full measurement."""

LEAST_BURST_STEPS: Final = 2
"""Fewest steps of a burst: a measurement of fewer is invalid (`wattune.analysis.quality`, `few_steps`)."""

STOPPED_EARLY: Final = "stopped_early"
"""Tag, with the proof, and quality reason of a measurement that ended once its steps proved that the trial loses."""

DECIDED_BY_STEP_TIME: Final = ("tokens_per_s", "tokens_per_s_per_device", "step_time_s")
"""Objectives that step time alone decides, so that ranks can tell a loser while they measure it."""

FIRST_REFERENCE_REPEAT: Final = 1000
"""Repeats from this number on are of a reference trial: the same trial measured again and again to see drift."""

LAST_REFERENCE_REPEAT: Final = 1999

FIRST_BURST_REPEAT: Final = 2000
"""The repeat of a trial's burst: a few steps that decide whether it is worth a full measurement."""

FIRST_SOAK_REPEAT: Final = 3000
"""Repeats from this number on are long runs of finalists."""


_SOAK: Final = "soak"

_TAGS: Final[dict[Role, dict[str, str]]] = {
    "reference": {"reference": "true"},
    "finalist": {_SOAK: "true"},
    "burst": {FIDELITY: BURST},
}


UNPROFILED: Final = "left out: an earlier run of its plan was profiled, and did not wait for its host"
"""Value of the tag `profile` of such a run."""


def measuring(runs: Sequence[Run], metric: str) -> Sequence[Run]:
    """Returns the runs that were to measure a metric: of figures of a profiled pass, those that had one."""
    if len(runs) == 1:
        return runs
    asked = [run for run in runs if metric in run.metrics or not is_unprofiled(run)]
    return runs if len(asked) in (0, len(runs)) else asked


def is_unprofiled(result: Run) -> bool:
    """Returns true for a run without a profiled pass whose figures nothing would read."""
    return result.tags.get("profile") == UNPROFILED


def role_tags(role: Role) -> dict[str, str]:
    """Returns the tags of a run with a role."""
    return dict(_TAGS.get(role, {}))


def role_of(result: Run) -> Role:
    """Returns the role of a run, also of one that was cut off before it had its tags."""
    if is_burst(result) or result.repeat == FIRST_BURST_REPEAT:
        return "burst"
    if is_soak(result) or result.repeat >= FIRST_SOAK_REPEAT:
        return "finalist"
    if is_reference_repeat(result.repeat):
        return "reference"
    return "race" if is_of_race(result) else "trial"


def is_reference_repeat(repeat: int) -> bool:
    """Returns whether a repeat of this number is one of a reference trial."""
    return FIRST_REFERENCE_REPEAT <= repeat <= LAST_REFERENCE_REPEAT


def is_of_race(result: Run) -> bool:
    """Returns true for a repeat of the race of finalists."""
    return result.numbers.race_until_probability is not None


def is_soak(result: Run) -> bool:
    """Returns true for the long run of a finalist: a measurement of a hot machine."""
    return result.tags.get(_SOAK) == "true"


def is_burst(result: Run) -> bool:
    """Returns true for a burst. A burst that failed tells as much of its trial as a full run that failed."""
    return result.tags.get(FIDELITY) == BURST


def by_length(counted: Sequence[Run]) -> dict[bool, list[Run]]:
    """Returns ordinary runs by false and long ones by true, each only where there are some."""
    found: dict[bool, list[Run]] = {}
    for run in counted:
        found.setdefault(is_soak(run), []).append(run)
    return found


def ordinary(counted: Sequence[Run]) -> Sequence[Run]:
    """Returns the runs that count for the objective: no long ones, unless there are no others."""
    return [result for result in counted if not is_soak(result)] or counted

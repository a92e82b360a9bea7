"""Recordings in a ranking: commands whose work is not known, each recorded once.

A recording is assessed as a trial is: its figures as intervals, its bounds at a stated risk. Nothing says that two
commands do the same work, or that a command line does the same as before. So every recording is a row of its own, its
scatter is the prior's, and the ranking says in words what its rows do not share.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from wattune.run import Recorded, Run, RunStatus

_OF_STEPS: Final = ("energy_per_token_j", "energy_per_step_j")
"""Metrics that are asked for where recordings have them, best first: they hold for any length of a run."""

_ENERGY: Final = "total_energy_j"
_OF_ALL_WORK: Final = (_ENERGY, "window_s")
"""Metrics that are smaller where a command did less."""


def usual_metric(runs: Sequence[Run]) -> str:
    """Returns the metric to minimize where nobody asks, which all have: energy of a token, a step, else the command."""
    return next((name for name in _OF_STEPS if runs and all(name in one.metrics for one in runs)), _ENERGY)


def judged(run: Run, needed: Collection[str]) -> Run:
    """Returns a run that has failed where it is of a command that did, and energy or time of all work is needed."""
    recorded = run.recorded
    if recorded is None or not recorded.failure or not set(needed) & set(_OF_ALL_WORK):
        return run
    return replace(run, status=RunStatus.CRASHED, reason=f"{recorded.failure}: it may not have done its work")


def differences(recorded: Mapping[str, Recorded], metric: str) -> list[str]:
    """Describes what recordings do not share, so that nobody ranks different work without knowing."""
    lines = []
    commands = {one.command for one in recorded.values()}
    if len(commands) > 1:
        lines.append(
            f"{len(commands)} different commands: wattune does not know what they do. An order by {metric} is one of "
            "different work, unless you know that they do the same"
        )
    elif commands == {()}:
        lines.append(
            f"no command is known: wattune does not know what ran. An order by {metric} is one of different work, "
            "unless you know that it was the same"
        )
    elif len(recorded) > 1:
        lines.append(
            "one command line, recorded several times: what differs between the runs (code, data, environment) is not "
            "known. Each is a row of its own"
        )
    machines = {name: ", ".join(map(" ".join, one.machine.items())) for name, one in recorded.items()}
    if len(set(machines.values())) > 1:
        listed = "; ".join(f"{name}: {text}" for name, text in machines.items())
        lines.append(f"recorded on different machines: {listed}")
    return lines + [f"{name}: {one.failure}" for name, one in recorded.items() if one.failure]

"""The part of a recorded command that its figures describe: chosen by a person, or found from its steps."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

import numpy as np

from wattune.analysis.signals.steady_state import LEAST_STEPS as LEAST_TO_JUDGE
from wattune.analysis.signals.steady_state import steady_from
from wattune.errors import PlanError
from wattune.steps.files import Step
from wattune.steps.steady import warmup
from wattune.units import NS_PER_S, ns_to_s, s_to_ns
from wattune.workers.command.program_run import ProgramOutcome, StepsByRank

STEADY: Final = "steady"
"""The window where none was chosen."""

FORMS: Final = "steady, command, a time such as 10s:50s or 10s:, or steps such as steps:20:100"

_TIME: Final = re.compile(r"(?:([0-9.]{1,18})s)?:(?:([0-9.]{1,18})s)?")
_STEPS: Final = re.compile(r"steps:([0-9]{0,15}):([0-9]{0,15})")

LEAST_STEPS: Final = 2
"""Fewest steps that make a window: one step has no rate."""


def parse_window(text: str) -> tuple[Literal["steady", "command", "time", "steps"], float, float | None]:
    """Reads a choice: `steady`, `command`, `10s:50s`, `10s:`, `:50s`, `steps:20:100` or `steps:20:`.

    Steps are counted from 0, and the end is left out, as in Python. Returns its kind; start and end, in seconds from
    the command's start or as numbers of steps; None is the command's end. Raises `PlanError` where it is none of these,
    or ends before it begins.
    """
    if text == STEADY:
        return "steady", 0.0, None
    if text == "command":
        return "command", 0.0, None
    if (found := _TIME.fullmatch(text) or _STEPS.fullmatch(text)) is not None and any(found.groups()):
        try:
            start, end = (float(each) if each else None for each in found.groups())
        except ValueError:
            raise _refused(text) from None
        if end is not None and end <= (start or 0.0):
            raise PlanError(f'--window: got "{text}", which ends before it begins; give the end after the start')
        return "time" if found.re is _TIME else "steps", start or 0.0, end
    raise _refused(text)


def _refused(text: str) -> PlanError:
    return PlanError(f'--window: got "{text[:80]}"; allowed: {FORMS}')


def with_window(outcome: ProgramOutcome, text: str = STEADY) -> ProgramOutcome:
    """Finds the window of a command that ran from its start to its end, among its steps.

    Where the choice (`parse_window`) cannot be kept, as of steps that were never told, it is the whole command, and
    `window_why` says so.
    """
    kind, start, end = parse_window(text)
    common = _of_all_ranks(outcome.steps)
    if kind == "command":
        return _whole(outcome)
    if kind == "time":
        return _by_time(outcome, common, start, end)
    if len(common) < LEAST_STEPS:
        if kind == "steps":
            return _whole(outcome, f"{len(common)} steps were found, and steps were asked for")
        return _whole(outcome, "a single step was found" if common else "")
    if kind == "steps":
        first, last = int(start), len(common) if end is None else min(int(end), len(common))
        if last - first < LEAST_STEPS:
            return _whole(outcome, f"only {len(common)} steps were found, and those from {first} on were asked for")
        return _of_steps(outcome, common, first, last, "as asked for")
    return _steady(outcome, common)


def _whole(outcome: ProgramOutcome, problem: str = "") -> ProgramOutcome:
    why = f"the whole command{': ' if problem else ''}{problem}"
    return replace(outcome, window_mono_ns=(outcome.start_mono_ns, outcome.end_mono_ns), window_why=why)


def _of_all_ranks(steps: StepsByRank) -> list[Step]:
    """Returns each step that all ranks finished, from the earliest start to the latest end over the ranks."""
    told = [{step.index: step for step in each} for each in steps.values() if each]
    shared = sorted(set.intersection(*(set(each) for each in told))) if told else []
    return [
        Step(at, min(each[at].start_mono_ns for each in told), max(each[at].end_mono_ns for each in told))
        for at in shared
    ]


def _of_steps(outcome: ProgramOutcome, common: Sequence[Step], first: int, end: int, why: str) -> ProgramOutcome:
    chosen = common[first:end]
    return replace(
        outcome,
        first_index=chosen[0].index,
        end_index=chosen[-1].index + 1,
        window_mono_ns=(chosen[0].start_mono_ns, max(step.end_mono_ns for step in chosen)),
        window_why=f"steps {chosen[0].index} to {chosen[-1].index} of {len(common)}: {why}",
    )


def _by_time(outcome: ProgramOutcome, common: Sequence[Step], start: float, end: float | None) -> ProgramOutcome:
    begun_ns, ended_ns = outcome.start_mono_ns, outcome.end_mono_ns
    start_ns = begun_ns + s_to_ns(start)
    asked = f"{start:g} s to {'the end' if end is None else f'{end:g} s'} of the command"
    if start_ns >= ended_ns:
        return _whole(outcome, f"it ended after {ns_to_s(ended_ns - begun_ns):.1f} s, before the {asked}")
    end_ns = ended_ns if end is None else min(begun_ns + s_to_ns(end), ended_ns)
    inside = [at for at, step in enumerate(common) if step.start_mono_ns >= start_ns and step.end_mono_ns <= end_ns]
    if len(inside) >= LEAST_STEPS:
        return _of_steps(outcome, common, inside[0], inside[-1] + 1, f"whole steps inside {asked}")
    return replace(outcome, window_mono_ns=(start_ns, end_ns), window_why=asked)


def _steady(outcome: ProgramOutcome, common: Sequence[Step]) -> ProgramOutcome:
    """Leaves out the steps before the steady state. A step's time is that of its slowest rank.

    Two tests, the sharper first: the marginal standard error rule over all steps
    (`wattune.analysis.signals.steady_state`), which finds a steady state that begins in their first half, then that of
    measured runs (`wattune.steps.steady`), which also finds a later one.
    """
    told = [{step.index: step.duration_ns for step in each} for each in outcome.steps.values() if each]
    # Not from the first start to the last end: ranks may be any constant time apart.
    times_s = np.array([max(each[step.index] for each in told) for step in common], np.float64) / NS_PER_S
    every, number = (outcome, common), len(common)
    if number < LEAST_TO_JUDGE:
        return _of_steps(*every, 0, number, "all of them, too few to find a steady part")
    first = steady_from(times_s)
    if first is None:
        first, _ = warmup(times_s.tolist(), endless=True)
    if first is None or number - first < LEAST_STEPS:
        return _of_steps(*every, 0, number, "all of them, since no steady part was found")
    return _of_steps(*every, first, number, "the steady part, found by itself")

"""The part of a recorded command that its figures describe: chosen by a person, or found from its steps."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from wattune.analysis.signals.steady_state import LEAST_STEPS as LEAST_TO_JUDGE
from wattune.analysis.signals.steady_state import steady_from
from wattune.errors import PlanError
from wattune.steps import steady
from wattune.steps.files import Step
from wattune.units import NS_PER_S, ns_to_s, s_to_ns

Kind = Literal["steady", "command", "time", "steps"]

FORMS: Final = "steady, command, a time such as 10s:50s or 10s:, or steps such as steps:20:100"

_TIME: Final = re.compile(r"(?:([0-9.]{1,18})s)?:(?:([0-9.]{1,18})s)?")
_STEPS: Final = re.compile(r"steps:([0-9]{0,15}):([0-9]{0,15})")

LEAST_STEPS: Final = 2
"""Fewest steps that make a window: one step has no rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowChoice:
    """A choice of the window."""

    kind: Kind = "steady"
    start: float = 0.0
    """Seconds from the command's start, or the number of the first step."""
    end: float | None = None
    """The same for the end, which is left out; None is the end of the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The part that was chosen."""

    start_mono_ns: int
    end_mono_ns: int
    first_index: int | None
    """First measured step; None where the figures are of no steps."""
    end_index: int | None
    """Step after the last measured one."""
    why: str
    """The choice in words, for the manifest."""


def parse_window(text: str) -> WindowChoice:
    """Reads a choice: `steady`, `command`, `10s:50s`, `10s:`, `:50s`, `steps:20:100` or `steps:20:`.

    Steps are counted from 0, and the end is left out, as in Python.

    Raises:
        PlanError: It is none of these, or ends before it begins.
    """
    if text in ("steady", "command"):
        return WindowChoice(kind="command" if text == "command" else "steady")
    for kind, form in (("time", _TIME), ("steps", _STEPS)):
        found = form.fullmatch(text)
        if found is None or not any(found.groups()):
            continue
        try:
            start, end = (float(each) if each else None for each in found.groups())
        except ValueError:
            break
        if end is not None and end <= (start or 0.0):
            raise PlanError(f'--window: got "{text}", which ends before it begins; give the end after the start')
        return WindowChoice(kind="time" if kind == "time" else "steps", start=start or 0.0, end=end)
    raise PlanError(f'--window: got "{text[:80]}"; allowed: {FORMS}')


def choose(choice: WindowChoice, steps: Mapping[int, Sequence[Step]], start_mono_ns: int, end_mono_ns: int) -> Window:
    """Finds the window.

    Args:
        choice: What was asked for.
        steps: Steps of every rank, from `wattune.steps.reader.StepReader.poll`; empty without a source.
        start_mono_ns: Start of the command on its node's monotonic clock.
        end_mono_ns: Its end.

    Returns:
        The window. Where the choice cannot be kept, as of steps that were never told, it is the whole command, and
        `why` says so.
    """
    whole = Window(
        start_mono_ns=start_mono_ns, end_mono_ns=end_mono_ns, first_index=None, end_index=None, why="the whole command"
    )
    if choice.kind == "command":
        return whole
    common = _of_all_ranks(steps)
    if choice.kind == "time":
        return _by_time(choice, common, whole)
    if len(common) < LEAST_STEPS:
        if choice.kind == "steps":
            return _instead(whole, f"{len(common)} steps were found, and steps were asked for")
        return whole if not common else _instead(whole, "a single step was found")
    if choice.kind == "steps":
        first, end = int(choice.start), len(common) if choice.end is None else min(int(choice.end), len(common))
        if end - first < LEAST_STEPS:
            return _instead(whole, f"only {len(common)} steps were found, and those from {first} on were asked for")
        return _of_steps(common, first, end, "as asked for")
    return _steady(common, steps)


def _instead(whole: Window, problem: str) -> Window:
    return Window(
        start_mono_ns=whole.start_mono_ns,
        end_mono_ns=whole.end_mono_ns,
        first_index=None,
        end_index=None,
        why=f"the whole command: {problem}",
    )


def _of_all_ranks(steps: Mapping[int, Sequence[Step]]) -> list[Step]:
    """Returns each step that all ranks finished, from the earliest start to the latest end over the ranks."""
    told = [{step.index: step for step in each} for each in steps.values() if each]
    shared = sorted(set.intersection(*(set(each) for each in told))) if told else []
    return [
        Step(at, min(each[at].start_mono_ns for each in told), max(each[at].end_mono_ns for each in told))
        for at in shared
    ]


def _of_steps(common: Sequence[Step], first: int, end: int, why: str) -> Window:
    chosen = common[first:end]
    return Window(
        start_mono_ns=chosen[0].start_mono_ns,
        end_mono_ns=max(step.end_mono_ns for step in chosen),
        first_index=chosen[0].index,
        end_index=chosen[-1].index + 1,
        why=f"steps {chosen[0].index} to {chosen[-1].index} of {len(common)}: {why}",
    )


def _by_time(choice: WindowChoice, common: Sequence[Step], whole: Window) -> Window:
    start_ns = whole.start_mono_ns + s_to_ns(choice.start)
    end_ns = whole.end_mono_ns if choice.end is None else whole.start_mono_ns + s_to_ns(choice.end)
    asked = f"{choice.start:g} s to {'the end' if choice.end is None else f'{choice.end:g} s'} of the command"
    if start_ns >= whole.end_mono_ns:
        took_s = ns_to_s(whole.end_mono_ns - whole.start_mono_ns)
        return _instead(whole, f"it ended after {took_s:.1f} s, before the {asked}")
    end_ns = min(end_ns, whole.end_mono_ns)
    inside = [at for at, step in enumerate(common) if step.start_mono_ns >= start_ns and step.end_mono_ns <= end_ns]
    if len(inside) >= LEAST_STEPS:
        return _of_steps(common, inside[0], inside[-1] + 1, f"whole steps inside {asked}")
    return Window(start_mono_ns=start_ns, end_mono_ns=end_ns, first_index=None, end_index=None, why=asked)


def _steady(common: Sequence[Step], steps: Mapping[int, Sequence[Step]]) -> Window:
    """Leaves out the steps before the steady state. A step's time is that of its slowest rank.

    Two tests, the sharper first: the marginal standard error rule over all steps
    (`wattune.analysis.signals.steady_state`), which finds a steady state that begins in their first half, then that of
    the measuring loop (`wattune.steps.steady`), which also finds a later one.
    """
    told = [{step.index: step.duration_ns for step in each} for each in steps.values() if each]
    # Not from the first start to the last end: ranks may be any constant time apart.
    times_s = np.array([max(each[step.index] for each in told) for step in common], np.float64) / NS_PER_S
    if len(common) < LEAST_TO_JUDGE:
        return _of_steps(common, 0, len(common), "all of them, too few to find a steady part")
    first = steady_from(times_s)
    if first is None:
        first = steady.steady_from(times_s.tolist())
        if first is None or len(common) - first < LEAST_STEPS:
            return _of_steps(common, 0, len(common), "all of them, since no steady part was found")
    return _of_steps(common, first, len(common), "the steady part, found by itself")

"""One node's part of a command trial: start, watch, measure, end, and say how it went.

Node 0 leads: it measures, and its end is the trial's. The other nodes run the same command beside it until they are
told that enough was measured.
"""

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from wattune.errors import NodeError
from wattune.steps.launch import environment as with_steps
from wattune.steps.process.writer import FOLDER_VARIABLE
from wattune.steps.reader import Step, StepReader
from wattune.steps.source import StepSource
from wattune.steps.table import tokens_per_step
from wattune.trial import Measure, TrialStatus
from wattune.units import ns_to_s
from wattune.workers.command.failure import Told, failure, killed_from_outside
from wattune.workers.command.measuring import LEAST_MEASURED, Look, Measuring, warmup
from wattune.workers.command.output import Output
from wattune.workers.command.process import GRACE_S, CommandProcess
from wattune.workers.last_words import num_oom_kills

TICK_S: Final = 0.1
"""Seconds between two looks at the steps."""

PIDS_EVERY_S: Final = 2.0
"""Seconds between two looks at the command's processes: `/proc` of a large node takes milliseconds."""

STALL_STEPS: Final = 10
"""A command hangs when a step takes longer than this many times its longest recent step, and than `measure.stall_s`."""

_RECENT_STEPS: Final = 20

ABORT_GRACE_S: Final = 1.5
"""Grace time of a trial that is stopped: whoever stops a study may kill what takes longer than three seconds."""

PEER_S: Final = 3.0
"""Time that word of the trial's end may take to a node whose command failed because the others had gone."""

_NOT_HERE: Final = frozenset((errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ENOEXEC))

Steps = Mapping[int, Sequence[Step]]


@dataclass(frozen=True, slots=True)
class Order:
    """An order to leave the trial."""

    kind: str
    """`finish`: enough was measured. Anything else stops the trial."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything that one node needs to run its part of a trial."""

    arguments: Sequence[str]
    """The program and its arguments, filled."""
    environment: Mapping[str, str]
    """All variables it has, without those that steps need."""
    steps_folder: Path
    """Empty folder that its processes write their steps to."""
    source: StepSource
    measure: Measure
    leads: bool
    """True on node 0."""
    stop_above_s: float | None = None
    grace_s: float = GRACE_S
    cwd: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutcome:
    """Outcome of a node's part of a trial."""

    status: TrialStatus
    reason: str = ""
    steps: Steps = field(default_factory=dict)
    """Steps of the node's ranks, numbered from the program's first; of warm-up too."""
    look: Look = Look(part="build", done=0, total=1)  # noqa: RUF009 - it is frozen
    """State of the measurement at the end."""
    start_mono_ns: int = 0
    end_mono_ns: int = 0
    """Time at which the command ended, or was told to."""
    over_mono_ns: int = 0
    """Time at which nothing of it was left."""
    exit_code: int | None = None
    source: str = "none"
    """Source of the steps, in words."""
    problems: tuple[str, ...] = ()
    """Steps that could not be read, and processes that would not end."""
    peaks: Mapping[int, int] = field(default_factory=dict)
    """Peak memory in bytes by rank, where told."""
    headers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Facts that each rank's process told of itself."""
    pids: tuple[int, ...] = ()
    """Its processes, as far as they were seen."""
    tokens_per_step: float = 0.0
    """Tokens that the node's ranks told of a measured step; 0 where none did."""
    output: str = ""

    @property
    def startup_s(self) -> float | None:
        """Seconds from the start of the command to its first step; None without steps."""
        starts_ns = [each[0].start_mono_ns for each in self.steps.values() if each]
        return ns_to_s(max(min(starts_ns) - self.start_mono_ns, 0)) if starts_ns else None

    @property
    def measured_s(self) -> float:
        """Seconds of measured steps."""
        counted = [
            step
            for each in self.steps.values()
            for step in each
            if self.look.first_index <= step.index < self.look.end_index
        ]
        if not counted or not self.look.num_measured:
            return 0.0
        return ns_to_s(max(s.end_mono_ns for s in counted) - min(s.start_mono_ns for s in counted))

    @property
    def run_s(self) -> float:
        """Seconds from the start of the command until nothing of it was left."""
        return ns_to_s(self.over_mono_ns - self.start_mono_ns)


Orders = Callable[[float], Order | None]
"""Waits at most so many seconds for an order."""

Progress = Callable[[str, int, int], None]
"""Is told of the part, and of the steps done and to do in it."""


def run_command(
    launch: Launch,
    *,
    orders: Orders,
    progress: Progress = lambda *_: None,
    show: Callable[[Steps], None] = lambda _: None,
    finishing: Callable[[], None] = lambda: None,
) -> CommandOutcome:
    """Runs a node's part of a trial, and ends all of it. Call it from a thread that outlives it.

    Args:
        launch: The part.
        orders: Asked for orders of the trial's owner, which also paces the looks.
        progress: Told on the leading node, about once a second.
        show: Given the steps so far, about once a second.
        finishing: Called on the leading node once enough is measured, before anything is stopped: the others' commands
            may fail as soon as this one's ends.

    Raises:
        NodeError: The program cannot be started on this node.
    """
    return _Run(launch, orders, progress, show, finishing).until_over()


class _Run:
    def __init__(
        self,
        launch: Launch,
        orders: Orders,
        progress: Progress,
        show: Callable[[Steps], None],
        finishing: Callable[[], None],
    ) -> None:
        self._launch, self._orders, self._progress, self._show = launch, orders, progress, show
        self._finishing = finishing
        self._output = Output()
        self._waiting: deque[tuple[str, int]] = deque()
        self._reader = StepReader(launch.steps_folder, launch.source)
        self._measuring = Measuring(launch.measure, launch.stop_above_s)
        self._look = Look(part="build", done=0, total=1)
        self._steps: Steps = {}
        self._pids: set[int] = set()
        self._oom_kills = num_oom_kills()
        environment = {"PYTHONUNBUFFERED": "1", **with_steps(launch.steps_folder, launch.environment)}
        self._process = CommandProcess(
            launch.arguments,
            environment=environment,
            on_line=self._take,
            mark=f"{FOLDER_VARIABLE}={environment[FOLDER_VARIABLE]}",
            cwd=launch.cwd,
            grace_s=launch.grace_s,
        )

    def until_over(self) -> CommandOutcome:
        end: tuple[TrialStatus, str] | None = None
        end_ns = 0
        try:
            end = self._watch()
            end_ns = self._process.end_mono_ns or time.monotonic_ns()
        finally:
            left = self._process.close()
        if not self._look.finished:  # else all that counts was read when it was
            self._read()
        if end is None:
            end = self._ended()
        if not self._launch.leads:  # it measures nothing, and its steps have to be steady nevertheless
            times_s = [ns_to_s(step.duration_ns) for step in self._leading()]
            self._look = replace(self._look, steady=warmup(times_s, self._launch.measure.warmup_steps)[1])
        return self._outcome(end, end_ns, left)

    def _take(self, line: str, mono_ns: int) -> None:
        # From a thread: steps are read where they are judged.
        self._waiting.append((line, mono_ns))

    def _read(self) -> None:
        for _ in range(len(self._waiting)):  # the thread adds at the other end meanwhile
            line, mono_ns = self._waiting.popleft()
            self._output.add(line)
            self._reader.feed(line, mono_ns, None)
        self._steps = self._reader.poll()

    def _watch(self) -> tuple[TrialStatus, str] | None:
        """Returns how the trial ended; None where the command ended by itself."""
        start_ns, next_s, next_pids_s = self._process.start_mono_ns, 0.0, 0.0
        while not self._process.has_ended:
            order = self._orders(TICK_S)
            now_s = time.monotonic()
            self._read()
            if now_s >= next_pids_s:
                self._pids |= set(self._process.pids())
                next_pids_s = now_s + PIDS_EVERY_S
            if order is not None:
                return self._ordered(order)
            if self._launch.leads:
                self._look = self._measuring.look(self._leading())
                if self._look.finished:
                    self._finishing()
                    return TrialStatus.COMPLETED, ""
            if now_s >= next_s:
                self._progress(self._look.part, self._look.done, self._look.total)
                self._show(self._steps)
                next_s = now_s + 1.0
            if reason := self._hung(ns_to_s(time.monotonic_ns() - start_ns)):
                # A rank that failed and whose launcher has not ended yet is no hang.
                return (
                    self._failure(None) if self._reader.first_failed() is not None else (TrialStatus.TIMED_OUT, reason)
                )
        return None

    def _leading(self) -> Sequence[Step]:
        """Returns the steps of the lowest rank that tells any, as far as all ranks that do have told theirs.

        It stands for all when the trial is paced. Only steps of all ranks count in the end, so a rank that tells its
        steps later decides when there are enough.
        """
        told = [each for _, each in sorted(self._steps.items()) if each]
        last = min((each[-1].index for each in told), default=-1)
        return [step for step in told[0] if step.index <= last] if told else ()

    def _ordered(self, order: Order) -> tuple[TrialStatus, str]:
        if order.kind == "finish":
            return TrialStatus.COMPLETED, ""
        self._process.stop(min(self._launch.grace_s, ABORT_GRACE_S))
        return TrialStatus.ABORTED, f"it was stopped: {order.reason}"

    def _hung(self, run_s: float) -> str:
        """Returns the reason it counts as hung; before the first step only the time-out can tell."""
        measure = self._launch.measure
        if run_s > measure.timeout_s:
            return f"longer than measure.timeout_s = {measure.timeout_s:g}{self._last_words()}"
        told = [each for each in self._steps.values() if each]
        if not told:
            return ""
        waited_s = ns_to_s(time.monotonic_ns() - max(each[-1].end_mono_ns for each in told))
        longest_s = max(ns_to_s(step.duration_ns) for each in told for step in each[-_RECENT_STEPS:])
        if waited_s <= max(measure.stall_s, STALL_STEPS * longest_s):
            return ""
        return (
            f"no step finished for {waited_s:.0f} s (its longest recent step took {longest_s:.3g} s; measure.stall_s = "
            f"{measure.stall_s:g}){self._last_words()}"
        )

    def _last_words(self) -> str:
        last = next((line.strip() for line in reversed(self._output.lines) if line.strip()), "")
        return f"; its last line: {last[:200]}" if last else ""

    def _ended(self) -> tuple[TrialStatus, str]:
        """Returns the ending of a command that ended by itself."""
        process, measure = self._process, self._launch.measure
        if process.failed_to_start is not None:
            number, program = process.failed_to_start, self._launch.arguments[0]
            words = os.strerror(number) if number > 0 else "it could not be started"
            where = "" if number not in _NOT_HERE else ", or give its path: the job's working directory and PATH decide"
            raise NodeError(f'program "{program}" does not run on this node ({words}); install it there{where}')
        code = process.exit_code
        if code == 0:
            if not self._launch.leads:
                return TrialStatus.COMPLETED, ""
            self._look = self._measuring.look(self._leading(), ended=True)
            if not self._steps or self._look.num_measured >= LEAST_MEASURED:
                return TrialStatus.COMPLETED, ""
            needs = measure.warmup_steps + max(measure.min_steps, LEAST_MEASURED)
            return TrialStatus.CRASHED, (
                f"ended after {len(self._leading())} steps, needs {needs} or more: {measure.warmup_steps} of warm-up "
                f"and {measure.min_steps} measured; let the command run longer, or lower measure.warmup_steps"
            )
        if not self._launch.leads:  # the leading node may have ended it, and word of that is still on its way
            order = self._orders(PEER_S)
            if order is not None:
                return self._ordered(order)
        return self._failure(code)

    def _failure(self, code: int | None) -> tuple[TrialStatus, str]:
        kills = num_oom_kills() - self._oom_kills
        told = Told(
            errors=self._reader.errors(),
            out_of_memory=self._reader.out_of_memory(),
            first_failed=self._reader.first_failed(),
        )
        status, reason = failure(code, self._output.lines, told, num_oom_kills=max(kills, 0))
        if status is TrialStatus.CRASHED and (who := killed_from_outside(code, self._output.lines, told)):
            return TrialStatus.INFRA_FAILED, f"killed from outside: {who}"
        return status, reason

    def _outcome(self, end: tuple[TrialStatus, str], end_ns: int, left: int) -> CommandOutcome:
        status, reason = end
        problems = [*self._reader.problems]
        if left:
            problems.append(f"{left} of its processes would not end")
        look, process = self._look, self._process
        tokens = tokens_per_step(self._steps, first_index=look.first_index, end_index=look.end_index or None)
        return CommandOutcome(
            status=status,
            reason=reason,
            steps=self._steps,
            look=look,
            start_mono_ns=process.start_mono_ns,
            end_mono_ns=end_ns,
            over_mono_ns=time.monotonic_ns(),
            exit_code=process.exit_code,
            source=self._reader.source,
            problems=tuple(problems),
            peaks=self._reader.peaks(),
            headers=self._reader.headers(),
            pids=tuple(sorted(self._pids)),
            tokens_per_step=tokens,
            output=self._output.text,
        )

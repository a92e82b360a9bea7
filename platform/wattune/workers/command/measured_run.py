"""One node's part of a command trial: start, watch, measure, end, and say how it went.

Node 0 leads: it measures, and its end is the trial's. The other nodes run the same command beside it until they are
told that enough was measured.
"""

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil

from wattune.clock import ClockAnchor
from wattune.errors import NodeError
from wattune.run import RunStatus
from wattune.steps.files import Step
from wattune.steps.source import StepSource
from wattune.steps.steady import warmup
from wattune.trial import Measure
from wattune.units import ns_to_s
from wattune.workers.command.causes import PLAN, Kind
from wattune.workers.command.failure import failure
from wattune.workers.command.measuring import LEAST_MEASURED, Look, Measuring
from wattune.workers.command.process import GRACE_S
from wattune.workers.command.program_run import ProgramOutcome, ProgramRun, StepsByRank
from wattune.workers.last_words import num_oom_kills
from wattune.workers.watchdog import RECENT_STEPS, Order, Progress, stall

TICK_S: Final = 0.1
"""Seconds between two looks at the steps."""

PIDS_EVERY_S: Final = 2.0
"""Seconds between two looks at the command's processes: `/proc` of a large node takes milliseconds."""

ABORT_GRACE_S: Final = 1.5
"""Grace time of a trial that is stopped: whoever stops a study may kill what takes longer than three seconds."""

PEER_S: Final = 3.0
"""Time that word of the trial's end may take to a node whose command failed because the others had gone."""

STARVED_FRAC: Final = 0.03
"""Share of the memory that is left below which SIGKILL is for memory: earlyoom and systemd-oomd tell no kernel."""

_NOT_HERE: Final = frozenset((errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ENOEXEC))


Orders = Callable[[float], Order | None]
"""Waits at most so many seconds for an order."""


class MeasuredRun:
    """A node's part of a trial. Make it in a thread that outlives it."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        steps_folder: Path,
        source: StepSource,
        measure: Measure,
        leads: bool,
        orders: Orders,
        progress: Progress = lambda *_: None,
        show: Callable[[StepsByRank], None] = lambda _: None,
        finishing: Callable[[], None] = lambda: None,
        stop_above_s: float | None = None,
        grace_s: float = GRACE_S,
        cwd: Path | None = None,
        others: Callable[[], list[int]] = list,
    ) -> None:
        """Starts a program with its arguments, filled, and all of its variables but those that steps need.

        Its processes write their steps to `steps_folder`, which is empty. Waiting for `orders` paces the looks; `show`
        is called about once a second, and on node 0, which `leads`, `progress`. `finishing` is called there once enough
        is measured, before anything is stopped: the others' commands may fail as soon as this one's ends. Above a mean
        step time of `stop_above_s` the trial loses. `others` finds processes of it that came of others, as of a warm
        command.
        """
        self._program, self._measure, self._leads, self._grace_s = arguments[0], measure, leads, grace_s
        self._orders, self._progress, self._show, self._finishing = orders, progress, show, finishing
        self._run = ProgramRun(steps_folder, source)
        self._measuring = Measuring(measure, stop_above_s)
        self._look = Look(part="build", done=0, total=1)
        self._steps: StepsByRank = {}
        self._pids: set[int] = set()
        self._oom_kills = num_oom_kills()
        self._least_memory_frac = 1.0
        self._awaits_steps, self._quiet_s = leads and source.kind != "none", 0.0
        self._anchor = ClockAnchor.now()
        self._process = self._run.supervised(arguments, environment, cwd=cwd, grace_s=grace_s)
        self._process.others = others

    def until_over(self) -> ProgramOutcome:
        """Watches it to its end, and ends all of it. Raises `NodeError`: the program cannot be started on this node."""
        end: tuple[Kind, str] | None = None
        end_ns = 0
        try:
            end = self._watch()
            end_ns = self._process.end_mono_ns or time.monotonic_ns()
        finally:
            left = self._process.close()
        if self._process.unheard is not None:
            raise self._process.unheard
        if not self._look.finished:  # else all that counts was read when it was
            self._steps = self._run.steps()
        if end is None:
            end = self._ended()
        if not self._leads:  # it measures nothing, and its steps have to be steady nevertheless
            times_s = [ns_to_s(step.duration_ns) for step in self._leading()]
            self._look = replace(self._look, steady=warmup(times_s, self._measure.warmup_steps)[1])
        look, found = self._look, self._run.outcome(self._steps)
        return replace(
            found,
            status=end[0].status,
            reason=end[1],
            cause=end[0].cause,
            start_mono_ns=self._process.start_mono_ns,
            end_mono_ns=end_ns,
            over_mono_ns=time.monotonic_ns(),
            wall_minus_mono_ns=self._anchor.to_wall_ns(0),
            exit_code=self._process.exit_code,
            first_index=look.first_index,
            end_index=look.end_index if look.num_measured else None,
            steady=look.steady,
            stopped_early=look.stopped_early,
            problems=(*found.problems, *([f"{left} of its processes would not end"] if left else [])),
            pids=tuple(sorted(self._pids)),
        )

    def _watch(self) -> tuple[Kind, str] | None:
        """Returns how the trial ended; None where the command ended by itself."""
        start_ns, next_s, next_pids_s = self._process.start_mono_ns, 0.0, 0.0
        life = SignsOfLife()
        while not self._process.has_ended:
            order = self._orders(TICK_S)
            now_s = time.monotonic()
            self._steps = self._run.steps()
            if now_s >= next_pids_s:
                pids = self._process.pids()
                self._pids |= set(pids)
                memory = psutil.virtual_memory()
                self._least_memory_frac = min(self._least_memory_frac, memory.available / memory.total)
                if self._awaits_steps and not any(self._steps.values()):
                    self._quiet_s = life.quiet_s(pids, self._run.num_heard)
                next_pids_s = now_s + PIDS_EVERY_S
            if order is not None:
                return self._ordered(order)
            if self._leads:
                self._look = self._measuring.look(self._leading())
                if self._look.finished:
                    self._finishing()
                    return Kind(RunStatus.COMPLETED), ""
            if now_s >= next_s:
                self._progress(self._look.part, self._look.done, self._look.total)
                self._show(self._steps)
                next_s = now_s + 1.0
            if reason := self._hung(ns_to_s(time.monotonic_ns() - start_ns)):
                # A rank that failed and whose launcher has not ended yet is no hang.
                return self._failure(None) if self._run.reader.errors() else (Kind(RunStatus.TIMED_OUT), reason)
        return None

    def _leading(self) -> Sequence[Step]:
        """Returns the steps of the lowest rank that tells any, as far as all ranks that do have told theirs.

        It stands for all when the trial is paced. Only steps of all ranks count in the end, so a rank that tells its
        steps later decides when there are enough.
        """
        told = [each for _, each in sorted(self._steps.items()) if each]
        last = min((each[-1].index for each in told), default=-1)
        return [step for step in told[0] if step.index <= last] if told else ()

    def _ordered(self, order: Order) -> tuple[Kind, str]:
        if order.kind == "finish":
            return Kind(RunStatus.COMPLETED), ""
        self._process.stop(min(self._grace_s, ABORT_GRACE_S))
        return Kind(RunStatus.ABORTED), f"it was stopped: {order.reason}"

    def _hung(self, run_s: float) -> str:
        """Returns the reason it counts as hung; empty while it does not."""
        measure = self._measure
        if run_s > measure.timeout_s:
            return f"longer than measure.timeout_s = {measure.timeout_s:g}{self._last_words()}"
        told = [each for each in self._steps.values() if each]
        if not told:
            if self._quiet_s <= measure.start_stall_s:
                return ""
            signs = "no output, work or new memory"
            key = f"measure.start_stall_s = {measure.start_stall_s:g}"
            return (
                f"no sign of life for {self._quiet_s:.0f} s before its first step ({signs}; {key}){self._last_words()}"
            )
        waited_s = ns_to_s(time.monotonic_ns() - max(each[-1].end_mono_ns for each in told))
        recent_s = [ns_to_s(step.duration_ns) for each in told for step in each[-RECENT_STEPS:]]
        reason = stall(waited_s, recent_s, measure.stall_s)
        return reason and f"{reason}{self._last_words()}"

    def _last_words(self) -> str:
        last = next((line.strip() for line in reversed(self._run.lines()) if line.strip()), "")
        return f"; its last line: {last[:200]}" if last else ""

    def _ended(self) -> tuple[Kind, str]:
        """Returns the ending of a command that ended by itself."""
        process, measure = self._process, self._measure
        if process.failed_to_start is not None:
            number, program = process.failed_to_start, self._program
            words = os.strerror(number) if number > 0 else "it could not be started"
            where = "" if number not in _NOT_HERE else ", or give its path: the job's working directory and PATH decide"
            raise NodeError(f'program "{program}" does not run on this node ({words}); install it there{where}')
        code = process.exit_code
        if code == 0:
            if not self._leads:
                return Kind(RunStatus.COMPLETED), ""
            self._look = self._measuring.look(self._leading(), ended=True)
            if not self._steps or self._look.num_measured >= LEAST_MEASURED:
                return Kind(RunStatus.COMPLETED), ""
            needs = measure.warmup_steps + max(measure.min_steps, LEAST_MEASURED)
            return PLAN, (
                f"ended after {len(self._leading())} steps, needs {needs} or more: {measure.warmup_steps} of warm-up "
                f"and {measure.min_steps} measured; let the command run longer, or lower measure.warmup_steps"
            )
        if not self._leads:  # the leading node may have ended it, and word of that is still on its way
            order = self._orders(PEER_S)
            if order is not None:
                return self._ordered(order)
        return self._failure(code)

    def _failure(self, code: int | None) -> tuple[Kind, str]:
        kills = num_oom_kills() - self._oom_kills
        starved = self._least_memory_frac < STARVED_FRAC
        return failure(code, self._run.lines(), self._run.reader.errors(), num_oom_kills=max(kills, 0), starved=starved)


LEAST_CPU_FRAC: Final = 0.05
"""Share of a processor that is work: threads that only look whether something has come take less."""

LEAST_CPU_S: Final = 0.5
LEAST_BYTES: Final = 2**20
"""Bytes of memory, or of files read and written, since the last sign of life."""


class SignsOfLife:
    """Looks for signs of life. Of processes elsewhere, as behind `docker run` or `srun`, it sees the output alone."""

    def __init__(self) -> None:
        """Counts from now."""
        self._since_s, self._num_lines = time.monotonic(), 0
        self._before: dict[int, tuple[float, int]] = {}

    def quiet_s(self, pids: Iterable[int], num_lines: int) -> float:
        """Looks at the processes and the number of lines of output; returns the seconds since the last sign."""
        now_s, used = time.monotonic(), {pid: _used(pid) for pid in pids}
        quiet_s = now_s - self._since_s
        least_cpu_s = LEAST_CPU_S + LEAST_CPU_FRAC * quiet_s
        alive = num_lines != self._num_lines
        for pid, (cpu_s, num_bytes) in used.items():
            cpu_before_s, bytes_before = self._before.get(pid, (0.0, 0))
            alive |= cpu_s - cpu_before_s > least_cpu_s or num_bytes - bytes_before > LEAST_BYTES
        if alive:
            self._since_s, self._num_lines, self._before = now_s, num_lines, used
        return time.monotonic() - self._since_s


def _used(pid: int) -> tuple[float, int]:
    """Returns the processor time of a process, and the bytes of its memory and of all it has read and written."""
    cpu_s, num_bytes = 0.0, 0
    with suppress(psutil.Error):  # it has ended since, or is another user's
        process = psutil.Process(pid)
        with process.oneshot():
            cpu_s, num_bytes = sum(process.cpu_times()[:2]), process.memory_info().rss
            files = process.io_counters()
            num_bytes += files.read_chars + files.write_chars
    return cpu_s, num_bytes

"""One run of a user's program on a node: how it starts, what it prints, the steps it tells, and what came of them.

`wattune record` and a trial run a program in this one way. A recording runs it in its terminal and looks for the window
afterwards (`wattune.recording.window`). A trial runs it under a supervisor and measures meanwhile
(`wattune.workers.command.measured_run`).
"""

import contextlib
import json
import os
import shutil
import threading
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from wattune.clock import ClockAnchor
from wattune.run import Cause, RunStatus
from wattune.steps.files import Step
from wattune.steps.launch import environment as with_steps
from wattune.steps.lines import LONGEST_LINE
from wattune.steps.process.writer import FOLDER_VARIABLE, line_of
from wattune.steps.reader import StepReader
from wattune.steps.source import StepSource
from wattune.steps.table import spans_of, tokens_per_step
from wattune.units import ns_to_s
from wattune.workers.command.process import SupervisedProcess, TerminalProcess

LINES: Final = "output.lines"
"""File of the lines of output that tell steps, each with its arrival and a checksum as in step files."""

StepsByRank = Mapping[int, Sequence[Step]]
"""Steps by rank, numbered from the program's first; of warm-up too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOutcome:
    """Outcome of a program on one node."""

    status: RunStatus = RunStatus.COMPLETED
    reason: str = ""
    cause: Cause | None = None
    """The part of the cluster that failed it, or what surrounds it, with status `infra_failed`."""
    start_mono_ns: int = 0
    end_mono_ns: int = 0
    """Time at which it ended, or was told to; of an open recording that up to which the sensors were read."""
    over_mono_ns: int = 0
    """Time at which nothing of it was left."""
    wall_minus_mono_ns: int = 0
    """The node's wall clock minus its monotonic one."""
    exit_code: int | None = None
    steps: StepsByRank = field(default_factory=dict)
    source: str = "none"
    """Source of the steps, in words."""
    confidence: str = ""
    """Degree of certainty; see `wattune.steps.reader.StepReader.confidence`."""
    per_device: bool = False
    """True where the tokens of its steps are those of one device."""
    first_index: int = 0
    """Index of the first step that counts: steps of warm-up before it."""
    end_index: int | None = None
    """Index after the last step that counts; None where no steps do."""
    window_mono_ns: tuple[int, int] = (0, 0)
    """Start and end of the part that a recording's figures are of."""
    window_why: str = ""
    """The choice of that part in words."""
    steady: bool = False
    """True where step time was stable when measuring began."""
    stopped_early: str = ""
    """The proof that the trial loses, where that ended the measurement."""
    problems: Sequence[str] = ()
    """Steps that could not be read, and processes that would not end."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Exceptions that ended ranks, where their processes told them."""
    peaks: Mapping[int, int] = field(default_factory=dict)
    """Peak memory in bytes by rank, where told."""
    headers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Facts that each rank's process told of itself."""
    pids: tuple[int, ...] = ()
    """Its processes, as far as they were seen."""
    output: str = ""
    """Its output, bounded."""

    @property
    def num_measured(self) -> int:
        """Steps that count."""
        return 0 if self.end_index is None else self.end_index - self.first_index

    @property
    def tokens_per_step(self) -> float:
        """Tokens that the node's ranks told of a step that counts, of one device where `per_device`; 0 if none did."""
        return tokens_per_step(self.steps, first_index=self.first_index, end_index=self.end_index)

    @property
    def startup_s(self) -> float | None:
        """Seconds from the start of the program to its first step; None without steps."""
        starts_ns = [each[0].start_mono_ns for each in self.steps.values() if each]
        return ns_to_s(max(min(starts_ns) - self.start_mono_ns, 0)) if starts_ns else None

    @property
    def import_s(self) -> float | None:
        """Seconds from the start of the program until its libraries that train were loaded; None where none told."""
        told_ns = [header.get("loaded_mono_ns") or 0 for _, header in sorted(self.headers.items())]
        loaded_ns = next((each for each in told_ns if isinstance(each, int) and each > self.start_mono_ns), None)
        return None if loaded_ns is None else ns_to_s(loaded_ns - self.start_mono_ns)

    @property
    def measured_s(self) -> float:
        """Seconds of the steps that count."""
        every = (step for each in self.steps.values() for step in each)
        counted = [step for step in every if self.first_index <= step.index < (self.end_index or 0)]
        return ns_to_s(max(s.end_mono_ns for s in counted) - min(s.start_mono_ns for s in counted)) if counted else 0.0

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds by part, as of a rank (`wattune.workers.outcome.RankOutcome.parts_s`); they sum to `run_s`."""
        steps = next((each for _, each in sorted(self.steps.items()) if each), ())
        ends = {"build": steps[0].start_mono_ns, "compile": steps[0].end_mono_ns} if steps else {}
        counted = [step for step in steps if self.first_index <= step.index < (self.end_index or 0)]
        if counted:
            ends |= {"warmup": counted[0].start_mono_ns, "measure": counted[-1].end_mono_ns}
        ends |= {} if steps else {"measure": self.end_mono_ns}
        ends["close"] = self.over_mono_ns
        parts_s, since_ns = {}, self.start_mono_ns
        for part, end_ns in ends.items():
            parts_s[part] = ns_to_s(max(end_ns - since_ns, 0))
            since_ns = max(since_ns, end_ns)
        return parts_s

    @property
    def run_s(self) -> float:
        """Seconds from the start of the program until nothing of it was left."""
        return ns_to_s(self.over_mono_ns - self.start_mono_ns)

    @property
    def overhead_frac(self) -> float | None:
        """Share of the run outside of the steps that count; None without such steps."""
        counts = self.run_s > 0 and self.measured_s > 0
        return max(1 - self.measured_s / self.run_s, 0.0) if counts else None

    def told_devices(self, names: Mapping[str, str]) -> dict[int, str]:
        """Returns the name of the device that each rank told itself, where it did.

        `names`: telemetry's names of the node's devices by UUID, as NVML (`GPU-...`) or torch writes it.
        """
        by_uuid = {_plain(uuid): name for uuid, name in names.items()}
        uuids = {rank: _plain(str(header.get("device_uuid"))) for rank, header in self.headers.items()}
        return {rank: by_uuid[uuid] for rank, uuid in uuids.items() if uuid in by_uuid}

    def devices(self, expected: Mapping[int, str], names: Mapping[str, str]) -> dict[int, str]:
        """Returns the devices that ranks told where all of them did, else those expected; programs may choose."""
        told = self.told_devices(names)
        believed = told.keys() >= expected.keys() and len({told[rank] for rank in expected}) == len(expected)
        return {rank: told[rank] if believed else name for rank, name in expected.items()}

    def spans(self, *, node: str, devices: Mapping[int, str], anchor: ClockAnchor) -> pa.Table:
        """Makes spans of its steps: warm-up is negative, and steps after the last that counts are left out.

        A rank of `devices` without steps has those of the lowest one with some. Names are those of telemetry.
        """
        first, end = self.first_index, self.end_index
        return spans_of(self.steps, node=node, devices=devices, anchor=anchor, first_index=first, end_index=end)


def _plain(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-")


class ProgramRun:
    """One run of a program, from before its start to after its end."""

    def __init__(self, folder: Path, source: StepSource, *, keeps_lines: bool = False) -> None:
        """Starts nothing yet.

        Its processes write their steps to `folder`, which is private. With `keeps_lines` the lines of output that tell
        steps are copied there too, for when this process is killed.
        """
        self._folder, self._source, self._keeps_lines = folder, source, keeps_lines
        self.reader = StepReader(folder, source)
        self.output = Output()
        self.num_heard = 0
        """Lines of its output so far."""
        self._kept: int | None = None
        """Descriptor of the copy; None before its first line."""
        self._lock = threading.Lock()

    def in_terminal(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        *,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> TerminalProcess:
        """Starts it as if it had been started alone, with `variables` beside those of this process.

        Its output is heard only where steps are looked for in it.
        """
        kind, base = self._source.kind, {**os.environ, **variables}
        heard, told = kind not in ("none", "spans", "optimizer"), kind != "none"
        return TerminalProcess(
            arguments,
            stdout=stdout,
            stderr=stderr,
            environment=with_steps(self._folder, base, hooks=kind != "pattern", unbuffered=heard) if told else base,
            on_line=self.hear if heard else None,
        )

    def supervised(
        self, arguments: Sequence[str], environment: Mapping[str, str], *, cwd: Path | None, grace_s: float
    ) -> SupervisedProcess:
        """Starts it under a supervisor, and hears all of its output. Call it from a thread that outlives it."""
        variables = with_steps(self._folder, environment)
        mark = f"{FOLDER_VARIABLE}={variables[FOLDER_VARIABLE]}"
        return SupervisedProcess(
            arguments, environment=variables, on_line=self.hear, mark=mark, cwd=cwd, grace_s=grace_s
        )

    def hear(self, line: str, mono_ns: int) -> None:
        """Takes a line of its output; each stream has a thread that calls it."""
        with self._lock:
            self.output.add(line)
            self.num_heard += 1
            if not line:
                return
            if self.reader.feed(line, mono_ns) and self._keeps_lines:
                with contextlib.suppress(OSError):  # without the copy the steps are here all the same
                    self._keep(line, mono_ns)

    def _keep(self, line: str, mono_ns: int) -> None:
        if self._kept is None:
            self._kept = os.open(self._folder / LINES, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(self._kept, line_of(json.dumps([mono_ns, line[:LONGEST_LINE]])))

    def hear_kept(self) -> None:
        """Takes the lines that a run in this folder kept before its process was killed."""
        try:
            data = (self._folder / LINES).read_bytes()
        except FileNotFoundError:
            return
        for body, _, digest in (line.rpartition(b" ") for line in data.splitlines()):
            if digest == b"%08x" % zlib.crc32(body):  # the last line may not be whole yet
                mono_ns, line = json.loads(body)
                self.reader.feed(str(line), int(mono_ns))

    def steps(self) -> StepsByRank:
        """Reads on, and returns every rank's steps so far."""
        with self._lock:
            return self.reader.poll()

    def lines(self) -> list[str]:
        """Returns the lines of its output that are kept."""
        with self._lock:
            return self.output.lines

    def outcome(self, steps: StepsByRank) -> ProgramOutcome:
        """Returns what it told; `steps` are those of its steps that can count."""
        return ProgramOutcome(
            steps=steps,
            source=self.reader.source,
            confidence=self.reader.confidence,
            per_device=self.reader.per_device,
            problems=self.reader.problems,
            errors=self.reader.errors(),
            peaks=self.reader.peaks(),
            headers=self.reader.headers(),
            output=self.output.text,
        )

    def discard(self) -> None:
        """Removes what its processes wrote."""
        if self._kept is not None:
            os.close(self._kept)
        shutil.rmtree(self._folder, ignore_errors=True)


HEAD_BYTES: Final = 256 * 1024
"""Bytes kept from the beginning: versions, arguments, the first warnings."""

TAIL_BYTES: Final = 768 * 1024
"""Bytes kept from the end."""

LONGEST_KEPT: Final = 16 * 1024
"""Characters of a line that are kept; a progress bar may write megabytes without an end of line."""


class Output:
    """Lines of a running command, bounded: the beginning, and the end that says what went wrong."""

    def __init__(self, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES) -> None:
        """Starts empty; keeps so many bytes from the beginning and from the end."""
        self._head: list[str] = []
        self._head_left, self._tail_left = head_bytes, tail_bytes
        self._tail: deque[str] = deque()
        self._overwritten = ""
        self.num_left_out = 0
        """Lines between beginning and end that are not kept."""

    def add(self, line: str) -> None:
        """Takes a line without its end; a carriage return at its end says that the next one overwrites it."""
        before, self._overwritten = self._overwritten, ""
        if line.endswith("\r"):
            self._overwritten = line[:LONGEST_KEPT].rstrip("\r") or before
            return
        line = line[:LONGEST_KEPT] or before  # nothing follows: a line feed ended the line after all
        size = len(line) + 1
        if not self._tail and size <= self._head_left:
            self._head.append(line)
            self._head_left -= size
            return
        self._tail.append(line)
        self._tail_left -= size
        while self._tail_left < 0 and len(self._tail) > 1:
            self._tail_left += len(self._tail.popleft()) + 1
            self.num_left_out += 1

    @property
    def lines(self) -> list[str]:
        """Every line that is kept, in order."""
        return [*self._head, *self._tail, *filter(None, [self._overwritten])]

    @property
    def text(self) -> str:
        """All of it as a text; where lines are left out, it says how many."""
        gap = [f"... {self.num_left_out} lines left out ..."] if self.num_left_out else []
        lines = [*self._head, *gap, *self._tail]
        return "".join(f"{line}\n" for line in lines)

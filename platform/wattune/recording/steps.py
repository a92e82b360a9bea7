"""Steps of a recorded command: asked for before it starts, read when it has ended, kept as spans of its devices."""

import contextlib
import json
import os
import shutil
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from wattune.clock import ClockAnchor
from wattune.recording.command import Listener
from wattune.recording.window import Window, WindowChoice, choose, parse_window
from wattune.schema import BOUNDS
from wattune.steps.files import MOST_TOKENS
from wattune.steps.launch import environment
from wattune.steps.pattern import LONGEST_LINE, found_in
from wattune.steps.process.writer import line_of
from wattune.steps.reader import StepReader
from wattune.steps.source import AUTO, KINDS, NONE, PRESETS, StepSource, parse_source
from wattune.steps.table import spans_of, tokens_per_step
from wattune.telemetry.host import HOST

FOLDER: Final = "steps"
"""Folder of the recording that the command's processes write their steps to; gone once they are spans."""

LINES: Final = "output.lines"
"""File in `FOLDER` of the lines of output that tell steps, each with its arrival and a checksum as in step files."""

MOST_PROBLEMS: Final = 20
"""Most problems that the manifest keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsAsked:
    """A choice of a command's steps and of the window."""

    source: StepSource = AUTO
    window: WindowChoice = field(default_factory=WindowChoice)
    window_text: str = "steady"
    """The window as it was written."""
    tokens_per_step: float | None = None
    """Tokens of a step over all ranks, for programs that do not tell them."""

    @classmethod
    def of(
        cls, source: StepSource = AUTO, window: str = "steady", tokens_per_step: float | None = None
    ) -> "StepsAsked":
        """Reads it as a command line or a manifest gives it.

        Raises:
            PlanError: The window cannot be read.
        """
        return cls(source=source, window=parse_window(window), window_text=window, tokens_per_step=tokens_per_step)


class CommandSteps:
    """The steps of one command, from before its start to after its end."""

    def __init__(self, recording: Path, asked: StepsAsked) -> None:
        """Makes the folder for them, which only this user reads.

        Args:
            recording: Folder of the recording.
            asked: What is asked for.
        """
        self._folder, self._asked = recording / FOLDER, asked
        self._reader = StepReader(self._folder, asked.source)
        self._kept: int | None = None
        """Descriptor of the file of lines that tell steps; None before the first one."""
        self._lock = threading.Lock()
        if self.wanted:
            self._folder.mkdir(mode=0o700, exist_ok=True)

    @property
    def wanted(self) -> bool:
        """Returns True unless steps are not asked for."""
        return self._asked.source.kind != "none"

    @property
    def environment(self) -> Mapping[str, str] | None:
        """The environment of the command; None is that of this process."""
        if not self.wanted:
            return None
        of_output = self._asked.source.kind == "pattern"
        return environment(self._folder, os.environ, hooks=not of_output, unbuffered=of_output)

    @property
    def listener(self) -> Listener | None:
        """Hears the command's output where a pattern is looked for. Otherwise the output is nobody's business."""
        return self._hear if self._asked.source.kind == "pattern" else None

    def _hear(self, line: str, mono_ns: int) -> None:
        with self._lock:  # both streams of the command have a thread
            self._reader.feed(line, mono_ns, None)
            if found_in(line, self._asked.source):
                # A copy, should this process be killed. Without it the steps are here all the same.
                with contextlib.suppress(OSError):
                    self._keep(line, mono_ns)

    def hear_again(self, lines: Sequence[tuple[int, str]]) -> None:
        """Takes lines that were kept, with their arrival."""
        for mono_ns, line in lines:
            self._reader.feed(line, mono_ns, None)

    def _keep(self, line: str, mono_ns: int) -> None:
        if self._kept is None:
            self._kept = os.open(self._folder / LINES, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            source = self._asked.source
            os.write(self._kept, line_of(json.dumps([source.pattern, source.unit, source.preset])))
        os.write(self._kept, line_of(json.dumps([mono_ns, line[:LONGEST_LINE]])))

    def read(
        self,
        *,
        node: str,
        devices: Mapping[str, Mapping[str, Any]],
        start_mono_ns: int,
        end_mono_ns: int,
        ended: bool = True,
    ) -> tuple[pa.Table | None, Window, dict[str, Any]]:
        """Reads the steps, and finds the window among them.

        Args:
            node: The node, by the name its telemetry uses.
            devices: The manifest's facts of each of its devices.
            start_mono_ns: Start of the command.
            end_mono_ns: Its end, or the time up to which the sensors were read where that was not seen.
            ended: False where its end was not seen: its steps may go on behind `end_mono_ns`, and do not count there.

        Returns:
            Spans of every device, None where the figures are of no steps; the window; what the manifest keeps.
        """
        steps = self._reader.poll() if self.wanted else {}
        if not ended:
            steps = {rank: [step for step in each if step.end_mono_ns <= end_mono_ns] for rank, each in steps.items()}
        window = choose(self._asked.window, steps, start_mono_ns, end_mono_ns)
        tokens = self._asked.tokens_per_step
        if tokens is None:
            tokens = tokens_per_step(steps, first_index=window.first_index or 0, end_index=window.end_index) or None
        peaks = self._reader.peaks()
        headers = self._reader.headers()
        places = devices_of_ranks(sorted(steps), headers, devices)
        unnamed = [name for rank, name in places.items() if rank not in steps] if headers else []
        problems, errors = list(self._reader.problems), self._reader.errors()
        if unnamed and window.first_index is not None:
            problems.insert(0, _also_of(unnamed))
        found: dict[str, Any] = {
            "source": self._reader.source,
            "num_steps": min((len(each) for each in steps.values()), default=0),
            "ranks": sorted(steps),
            **({} if tokens is None else {"tokens_per_step": tokens}),
            **({} if not peaks else {"memory_peak_bytes": max(peaks.values())}),
            **({} if not problems else {"problems": problems[:MOST_PROBLEMS]}),
            **({} if not errors else {"errors": {str(rank): text for rank, text in errors.items()}}),
        }
        if window.first_index is None:
            return None, window, found
        spans = spans_of(
            steps,
            node=node,
            devices=places,
            anchor=ClockAnchor.now(),
            first_index=window.first_index,
            end_index=window.end_index,
        )
        return spans, window, found

    def discard(self) -> None:
        """Removes what the processes wrote."""
        if self._kept is not None:
            os.close(self._kept)
        shutil.rmtree(self._folder, ignore_errors=True)


def devices_of_ranks(
    ranks: Sequence[int], headers: Mapping[int, Mapping[str, Any]], devices: Mapping[str, Mapping[str, Any]]
) -> dict[int, str]:
    """Returns the device of every rank, and a number of its own for every device that no rank told.

    A recording is of all devices that were sampled: who uses one that no rank named is not known. So it has the steps
    too, and counts as in a recording without steps.

    Args:
        ranks: Ranks that told steps.
        headers: What each told of itself.
        devices: Facts of each device that was sampled, by name.
    """
    names = sorted((name for name in devices if name != HOST), key=lambda name: (len(name), name))
    if not names:
        return dict.fromkeys(ranks, HOST)
    by_uuid = {_plain(str(facts.get("uuid"))): name for name, facts in devices.items() if facts.get("uuid")}
    found: dict[int, str] = {}
    for rank in ranks:
        header = headers.get(rank, {})
        place = header.get("local_rank")
        own = by_uuid.get(_plain(str(header.get("device_uuid"))))
        found[rank] = own or names[(rank if place is None else int(place)) % len(names)]
    left = [name for name in names if name not in found.values()]
    return found | dict(enumerate(left, start=max(ranks, default=-1) + 1))


def _also_of(devices: Sequence[str]) -> str:
    return (
        f"power and energy are also of devices that no rank named ({', '.join(devices)}): idle ones and others' work "
        "count"
    )


def _plain(uuid: str) -> str:
    """Returns a UUID as both NVML (`GPU-...`) and torch write it."""
    return uuid.lower().removeprefix("gpu-")


def told_steps(
    told: CommandSteps, facts: Mapping[str, Any], manifest: Mapping[str, Any], last_mono_ns: int | None = None
) -> tuple[pa.Table | None, dict[str, Any]]:
    """Returns the spans of a recording's steps, and the facts that follow from them.

    Args:
        told: The command's steps.
        facts: The recording's facts, whose `window` is the command's.
        manifest: The manifest of the node's sampler.
        last_mono_ns: The time up to which the sensors were read, where the command's end was not seen.
    """
    ran = facts["window"]
    spans, window, found = told.read(
        node=facts["node"],
        devices=manifest.get("devices", {}),
        start_mono_ns=int(ran["start_mono_ns"]),
        end_mono_ns=int(ran.get("end_mono_ns") or last_mono_ns or ran["start_mono_ns"]),
        ended=bool(ran.get("end_mono_ns")),
    )
    chosen = {"start_mono_ns": window.start_mono_ns, "end_mono_ns": window.end_mono_ns}
    return spans, {"window": chosen, "window_why": window.why, "command_window": ran, "steps": found}


def steps_of_open(
    recording: Path, facts: Mapping[str, Any], manifest: Mapping[str, Any], last_mono_ns: int
) -> tuple[pa.Table | None, dict[str, Any]]:
    """Returns what `told_steps` does, of a recording that was killed or still records; nothing without steps.

    Of lines of output those count that the recorder heard.

    Args:
        recording: Folder of the recording.
        facts: Its facts.
        manifest: The manifest of the node's sampler.
        last_mono_ns: The time up to which the sensors were read. Steps that end later do not count.
    """
    asked, ran = facts.get("steps_asked"), facts.get("window")
    if not isinstance(asked, dict) or not isinstance(ran, dict) or not (recording / FOLDER).is_dir():
        return None, {}
    source, tokens = asked.get("source"), asked.get("tokens_per_step")
    pattern, lines = _kept_lines(recording / FOLDER / LINES)
    told = CommandSteps(
        recording,
        StepsAsked.of(
            pattern or (parse_source(source) if source in KINDS and source != "pattern" else NONE),
            str(asked.get("window")),
            float(tokens) if isinstance(tokens, int | float) else None,
        ),
    )
    told.hear_again(lines)
    return told_steps(told, facts, manifest, last_mono_ns)


def _kept_lines(path: Path) -> tuple[StepSource | None, list[tuple[int, str]]]:
    """Returns the pattern of a recording, None without one, and the lines with their arrival that it was found in."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None, []
    bodies = [line.rpartition(b" ") for line in data.splitlines()]
    # The last line may not be whole yet.
    whole = [json.loads(body) for body, _, digest in bodies if digest == b"%08x" % zlib.crc32(body)]
    if not whole:
        return None, []
    (pattern, unit, preset), *lines = whole
    source = PRESETS.get(preset) or parse_source({"pattern": pattern, "unit": unit})
    return source, [(int(at_ns), str(line)) for at_ns, line in lines]


def told_tokens(facts: Mapping[str, Any]) -> float | None:
    """Returns the tokens of a step that a recording's facts have; None without."""
    tokens = (facts.get("steps") or {}).get("tokens_per_step")
    return float(tokens) if isinstance(tokens, int | float) and 0 < tokens < MOST_TOKENS else None


def window_chosen(facts: Mapping[str, Any]) -> bool:
    """Returns True where the steps of a recording are those of its window, so that no figure leaves out more."""
    return bool(facts.get("window_why"))


def told_memory(facts: Mapping[str, Any]) -> list[int]:
    """Returns the peak memory of the rank that used most, as a recording's facts have it; empty without."""
    peak = (facts.get("steps") or {}).get("memory_peak_bytes")
    return [peak] if isinstance(peak, int) and 0 < peak < BOUNDS["memory_used_bytes"].most else []

"""Steps of a running command: from the files of its processes and from its output."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from wattune.steps.files import Step as Step
from wattune.steps.files import StepFile
from wattune.steps.pattern import MOST_TOLD_FRAC, PatternSteps
from wattune.steps.process.writer import EVENTS, SUFFIX
from wattune.steps.source import AUTOMATIC_PRESETS, HOOKS, PRESETS, StepSource

_IN_WORDS: Final[Mapping[str, str]] = {
    "spans": "spans (told by the program)",
    "transformers": "transformers (callback of its Trainer)",
    "lightning": "lightning (callback of its Trainer)",
    "optimizer": "optimizer (hook after each step of torch's optimizers)",
}


_PREFIX: Final = re.compile(r"\s*\[(?:rank|default)(\d{1,9})\]:")
"""Beginning of a line to which torchrun with --tee adds its rank."""

_NO_PREFIX: Final = 10**9
"""In place of a rank, above all of them."""


class StepReader:
    """Reads a command's steps while it runs, and once more when it has ended."""

    def __init__(self, folder: Path, source: StepSource) -> None:
        """Reads nothing yet of the folder that processes write to; `auto` takes the best source that is there."""
        self._folder, self._wanted = folder, source
        self._files: dict[Path, StepFile] = {}
        patterns = [source] if source.kind == "pattern" else []
        if source.kind == "auto":
            patterns = [PRESETS[name] for name in AUTOMATIC_PRESETS]
        self._patterns = patterns
        self._streams: dict[tuple[int, str, int], PatternSteps] = {}
        """By rank, preset, and the rank that a launcher put before the line."""
        self._problems: list[str] = []
        self._told: Mapping[int, StepFile] = {}
        self.source = "none"
        """The source that is used now, in words."""

    def feed(self, line: str, mono_ns: int, rank: int | None) -> None:
        """Takes a line of the command's output as `OutputLines` gives it, with its arrival on the monotonic clock.

        The rank is the one that wrote it, None where one stream holds the output of all.
        """
        prefix = _PREFIX.match(line)
        for source in self._patterns:
            key = (0 if rank is None else rank, source.preset, _NO_PREFIX if prefix is None else int(prefix[1]))
            if key not in self._streams:
                self._streams[key] = PatternSteps(source)
            self._streams[key].feed(line.rstrip("\r"), mono_ns)

    def poll(self) -> Mapping[int, Sequence[Step]]:
        """Reads on, and returns every rank's steps so far, of the best source; empty without any."""
        self._read_on()
        kinds = HOOKS if self._wanted.kind == "auto" else tuple(kind for kind in HOOKS if kind == self._wanted.kind)
        for kind in kinds:
            files = self._told = self._of_ranks(kind)
            if files:
                self.source = _IN_WORDS[kind]
                return {rank: tuple(file.steps) for rank, file in sorted(files.items())}
        for source in self._patterns:
            # All ranks may print a step. Where a launcher says which, the lowest rank is taken, as it stands for all.
            found: dict[int, PatternSteps] = {}
            for (rank, preset, _), stream in sorted(self._streams.items(), key=lambda each: each[0]):
                if preset == source.preset and stream.steps:
                    found.setdefault(rank, stream)
            if found:
                self.source = f"{source} (lines of its output, by their arrival)"
                self._problems = [_overtold(each) for each in found.values() if each.told_frac > MOST_TOLD_FRAC]
                return {rank: tuple(each.steps) for rank, each in found.items()}
        self.source = "none"
        return {}

    @property
    def problems(self) -> Sequence[str]:
        """Damaged lines, hooks that failed, and processes that claim one rank: a line each."""
        said = [problem for file in self._files.values() for problem in file.problems]
        said += [str(one["text"]) for _, one in self._events("problem")]
        return [*said, *self._problems]

    def peaks(self) -> Mapping[int, int]:
        """Returns every rank's peak memory in bytes, by the process that told its steps; else by any of its processes.

        It is what torch's allocator held of the device, without a device the resident set of the process.
        """
        found: dict[int, tuple[bool, int]] = {}
        for file in self._files.values():
            for one in file.events if self._told.get(file.rank, file) is file else ():
                device, host = (int(one.get(name) or 0) for name in ("device_bytes", "host_bytes"))
                if one.get("event") == "peak" and (device or host):
                    # Processes of one rank without a device, such as a launcher, may need more memory than that has.
                    found[file.rank] = max(found.get(file.rank, (False, 0)), (device > 0, device or host))
        return {rank: peak for rank, (_, peak) in found.items()}

    def errors(self) -> Mapping[int, str]:
        """Returns the exception that ended each rank, where its process told it: class, message and place."""
        return {rank: str(one["text"]) for rank, one in sorted(self._events("error"), key=_last_first)}

    def out_of_memory(self) -> Sequence[int]:
        """Returns the ranks whose last exception means that memory ran out."""
        return sorted({rank for rank, one in self._events("error") if one.get("out_of_memory")})

    def first_failed(self) -> int | None:
        """Returns the rank that failed first; None where no process told an exception."""
        failed = sorted((int(one.get("mono_ns", 0)), rank) for rank, one in self._events("error"))
        return failed[0][1] if failed else None

    def headers(self) -> Mapping[int, Mapping[str, Any]]:
        """Returns what each rank's process told of itself: `local_rank`, `world_size`, `device_uuid` and more."""
        best = sorted(self._files.values(), key=lambda file: len(file.steps))
        return {file.rank: file.header for file in best if file.header and file.source != EVENTS}

    def _read_on(self) -> None:
        try:
            paths: Iterable[Path] = sorted(self._folder.glob(f"*{SUFFIX}"))
        except OSError:
            paths = ()
        for path in paths:
            self._files.setdefault(path, StepFile(path)).read_on()

    def _of_ranks(self, kind: str) -> dict[int, StepFile]:
        """Returns the file with most steps of each rank, all of one run; others are named among the problems."""
        found: dict[int, list[StepFile]] = {}
        for file in self._files.values():
            if file.source == kind and file.steps:
                found.setdefault(file.rank, []).append(file)
        several = {rank: files for rank, files in sorted(found.items()) if len(files) > 1}
        self._problems = [
            f"rank {rank}: {len(files)} processes told steps ({', '.join(file.path.name for file in files)}); "
            "the one with most steps counts" + ("" if rank == min(found) else f", of those beside rank {min(found)}'s")
            for rank, files in several.items()
        ]
        if not several:
            return {rank: files[0] for rank, files in found.items()}
        # A command that trains twice has two files a rank: steps of one run never count with those of another.
        first = max(found[min(found)], key=lambda file: len(file.steps))
        beside = {rank: [file for file in files if _together_ns(file, first) > 0] for rank, files in found.items()}
        beside[first.rank] = [first]
        return {rank: max(files, key=lambda file: len(file.steps)) for rank, files in beside.items() if files}

    def _events(self, name: str) -> list[tuple[int, Mapping[str, Any]]]:
        return [(file.rank, one) for file in self._files.values() for one in file.events if one.get("event") == name]


def _overtold(stream: PatternSteps) -> str:
    return (
        f"lines of output tell {stream.told_frac:.1f} times the time that passed, so steps are too many and too short: "
        "let one rank print them, or add the group step to the pattern"
    )


def _together_ns(one: StepFile, other: StepFile) -> int:
    """Returns how long two processes told steps side by side; not above 0 where one ended before the other began."""
    ends_ns = min(one.steps[-1].end_mono_ns, other.steps[-1].end_mono_ns)
    return ends_ns - max(one.steps[0].start_mono_ns, other.steps[0].start_mono_ns)


def _last_first(event: tuple[int, Mapping[str, Any]]) -> int:
    """Orders events so that each rank's first one is taken last, and stays."""
    return -int(event[1].get("mono_ns", 0))

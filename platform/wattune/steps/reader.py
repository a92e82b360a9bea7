"""Steps of a running command: from the files of its processes and from its output."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from wattune.steps.files import Step as Step
from wattune.steps.files import StepFile
from wattune.steps.output import OutputSteps
from wattune.steps.process.writer import EVENTS, SUFFIX
from wattune.steps.source import HOOKS, StepSource
from wattune.units import ns_to_s

_IN_WORDS: Final[Mapping[str, str]] = {
    "spans": "spans (told by the program)",
    "transformers": "transformers (callback of its Trainer)",
    "lightning": "lightning (callback of its Trainer)",
    "optimizer": "optimizer (hook after each step of torch's optimizers)",
}


DIFFER_FRAC: Final = 0.25
"""Share of a step's time by which the output's steps are others than those of optimizers."""


class StepReader:
    """Reads a command's steps while it runs, and once more when it has ended."""

    def __init__(self, folder: Path, source: StepSource) -> None:
        """Reads nothing yet of the folder that processes write to; `auto` takes the best source that is there."""
        self._folder, self._wanted = folder, source
        self._files: dict[Path, StepFile] = {}
        self._output = OutputSteps(source)
        self._problems: list[str] = []
        self._told: Mapping[int, StepFile] = {}
        self.source = "none"
        """The source that is used now, in words."""
        self.confidence = ""
        """Degree of certainty: `high`, `medium` or `low`; empty without steps."""
        self.per_device = False
        """True where the tokens of its steps are those of one device."""

    def feed(self, line: str, mono_ns: int) -> bool:
        """Takes a line of the command's output as `OutputLines` gives it, with its arrival on the monotonic clock.

        Returns True where the line tells anything of steps.
        """
        return self._output.feed(line, mono_ns)

    def poll(self) -> Mapping[int, Sequence[Step]]:
        """Reads on, and returns every rank's steps so far, of the best source; empty without any."""
        try:
            paths: Iterable[Path] = sorted(self._folder.glob(f"*{SUFFIX}"))
        except OSError:
            paths = ()
        for path in paths:
            self._files.setdefault(path, StepFile(path)).read_on()
        kinds = HOOKS if self._wanted.kind == "auto" else tuple(kind for kind in HOOKS if kind == self._wanted.kind)
        for kind in kinds:
            files = self._told = self._of_ranks(kind)
            if files:
                self.source, self.confidence, self.per_device = _IN_WORDS[kind], "high", False
                if kind == "optimizer":
                    self._compare(min(files.items())[1].steps)
                return {rank: tuple(file.steps) for rank, file in sorted(files.items())}
        found, output = self._output.find(), self._output
        self.source, self.confidence, self._problems = output.name, output.confidence, output.problems
        self.per_device = found is not None and found.per_device
        return {} if found is None else {0: tuple(found.steps)}

    def _compare(self, steps: Sequence[Step]) -> None:
        """Says where the output has other steps: several optimizers, or one that runs in turns, make more of them."""
        said = self._output.find()
        durations_ns = [step.duration_ns for step in steps]
        # Single steps scatter where the host runs ahead, and an evaluation is part of one: either of the two is right.
        mean_s, step_s = ns_to_s(statistics.fmean(durations_ns)), ns_to_s(statistics.median(durations_ns))
        if said is not None and all(abs(said.step_s - each_s) > DIFFER_FRAC * each_s for each_s in (mean_s, step_s)):
            self.confidence = "low"
            self._problems.append(
                f"optimizers have steps of {step_s:.3g} s, {self._output.name} of {said.step_s:.3g} s: give --steps one"
            )

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
        """Returns the exception that ended each rank, where its process told it: class, message and place.

        The rank that failed first comes first.
        """
        found: dict[int, str] = {}
        for rank, one in sorted(self._events("error"), key=lambda event: (int(event[1].get("mono_ns", 0)), event[0])):
            found.setdefault(rank, str(one["text"]))
        return found

    def headers(self) -> Mapping[int, Mapping[str, Any]]:
        """Returns what each rank's process told of itself: `local_rank`, `world_size`, `device_uuid` and more."""
        best = sorted(self._files.values(), key=lambda file: len(file.steps))
        return {file.rank: file.header for file in best if file.header and file.source != EVENTS}

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


def _together_ns(one: StepFile, other: StepFile) -> int:
    """Returns how long two processes told steps side by side; not above 0 where one ended before the other began."""
    ends_ns = min(one.steps[-1].end_mono_ns, other.steps[-1].end_mono_ns)
    return ends_ns - max(one.steps[0].start_mono_ns, other.steps[0].start_mono_ns)

"""Steps of a running command: from the files of its processes and from its output."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from wattune.steps.bars import Bars
from wattune.steps.files import Step as Step
from wattune.steps.files import StepFile
from wattune.steps.lines import label_of, plain
from wattune.steps.pattern import LEAST_TOLD_FRAC, MOST_TOLD_FRAC, PatternSteps
from wattune.steps.process.writer import EVENTS, SUFFIX
from wattune.steps.source import AUTOMATIC_PRESETS, BAR_PRESETS, EVALUATION, HOOKS, PRESETS, StepSource
from wattune.steps.trainer_log import TrainerLog

_IN_WORDS: Final[Mapping[str, str]] = {
    "spans": "spans (told by the program)",
    "transformers": "transformers (callback of its Trainer)",
    "lightning": "lightning (callback of its Trainer)",
    "optimizer": "optimizer (hook after each step of torch's optimizers)",
}


_OF_BARS: Final = ("transformers", "lightning")
"""Callbacks whose programs show bars too: those count where a callback tells nothing."""

_NO_LABEL: Final = (10**9,)
"""In place of a rank, above all of them."""

_MAY_TELL: Final = re.compile(r"(?i)step|iter|epoch|train|loss|\bit\b|\d/(?:\d|\?)|/s\b|eval|valid|checkpoint")
"""Words of lines that tell anything of training; most lines of other programs are passed over by it."""

_PAUSES: Final = re.compile(rf"(?i){EVALUATION}|checkpoint|saving")

AGREE_FRAC: Final = 0.1
"""Two sources agree whose steps are longer and shorter by less than this share."""

LEAST_FOUND: Final = 3
"""Fewest steps of a source that nobody named."""

LEAST_STEP_S: Final = 1e-3
"""Shortest step of such a source: a log that is printed again shows thousands a second."""


class StepReader:
    """Reads a command's steps while it runs, and once more when it has ended."""

    def __init__(self, folder: Path, source: StepSource) -> None:
        """Reads nothing yet of the folder that processes write to; `auto` takes the best source that is there."""
        self._folder, self._wanted = folder, source
        self._files: dict[Path, StepFile] = {}
        auto = source.kind == "auto"
        self._patterns = [PRESETS[name] for name in AUTOMATIC_PRESETS] if auto else []
        self._shows_bars = auto or source.kind in _OF_BARS or source.preset in BAR_PRESETS
        if source.kind == "pattern" and not self._shows_bars:
            self._patterns = [source]
        self._streams: dict[tuple[int, str], dict[tuple[int, ...], PatternSteps]] = {}
        """By rank and preset, and the ranks that launchers put before the line."""
        self._bars: dict[int, Bars] = {}
        self._log = TrainerLog()
        self._problems: list[str] = []
        self._told: Mapping[int, StepFile] = {}
        self.source = "none"
        """The source that is used now, in words."""
        self.confidence = ""
        """Degree of certainty: `high`, `medium` or `low`; empty without steps."""
        self.per_device = False
        """True where the tokens of its steps are those of one device."""

    def feed(self, line: str, mono_ns: int, rank: int | None) -> bool:
        """Takes a line of the command's output as `OutputLines` gives it, with its arrival on the monotonic clock.

        The rank is the one that wrote it, None where one stream holds the output of all. Returns True where the line
        tells anything of steps.
        """
        text, rank = plain(line.rstrip("\r")), rank or 0
        if self._wanted.kind != "pattern" and not _MAY_TELL.search(text):
            return False
        label, begin = label_of(text)
        bars = self._bars.setdefault(rank, Bars()) if self._shows_bars else None
        taken = False
        for source in self._patterns:
            if source.preset == "lines" and bars and (taken := bars.feed(text[begin:], mono_ns, label, self._log.rate)):
                break
            if found := re.search(source.pattern, text):
                # A number at the line's begin is its label only where the pattern does not need it.
                key = _NO_LABEL if found.start() < begin and found.group().strip()[:1].isdigit() else label or _NO_LABEL
                streams = self._streams.setdefault((rank, source.preset), {})
                if taken := streams.setdefault(key, PatternSteps(source)).take(found, mono_ns):
                    break
        if bars and not self._patterns:
            taken = bars.feed(text[begin:], mono_ns, label, self._log.rate)
        taken |= self._shows_bars and self._log.feed(text, mono_ns)
        if not _PAUSES.search(text) or taken:
            return taken
        if bars:
            bars.pause()
        for stream in (each for streams in self._streams.values() for each in streams.values()):
            stream.pause()
        return True

    def poll(self) -> Mapping[int, Sequence[Step]]:
        """Reads on, and returns every rank's steps so far, of the best source; empty without any."""
        self._read_on()
        kinds = HOOKS if self._wanted.kind == "auto" else tuple(kind for kind in HOOKS if kind == self._wanted.kind)
        for kind in kinds:
            files = self._told = self._of_ranks(kind)
            if files:
                self.source, self.confidence, self.per_device = _IN_WORDS[kind], "high", False
                return {rank: tuple(file.steps) for rank, file in sorted(files.items())}
        return self._of_output()

    def _of_output(self) -> Mapping[int, Sequence[Step]]:
        """Returns the steps that the output tells, by the surest source that agrees with the clock."""
        self._problems = []
        found = self._candidates()
        auto = self._wanted.kind == "auto"
        self.source, self.confidence = "none", ""
        good = []
        for name, streams in found:
            told = [each for each in streams.values() if each.told_frac > MOST_TOLD_FRAC]
            few = [each for each in streams.values() if 0 < each.told_frac < LEAST_TOLD_FRAC]
            said = [_overtold(each) for each in told] + [_undertold(each) for each in few]
            lowest = streams[min(streams)]
            if auto and not said and not (len(lowest.steps) >= LEAST_FOUND and lowest.step_s >= LEAST_STEP_S):
                continue
            if auto and said:
                self._problems += [f"{name} is refused: {one}" for one in said]
            else:
                good.append((name, streams, said))
        if not good:
            return {}
        name, streams, said = good[0]
        step_s = streams[min(streams)].step_s
        others = [(other, each[min(each)]) for other, each, _ in good[1:]]
        alike = [(other, each) for other, each in others if abs(each.step_s - step_s) <= AGREE_FRAC * step_s]
        differ = [(other, each) for other, each in others if (other, each) not in alike]
        self._problems += said
        if differ and not alike:
            other, one = differ[0]
            self._problems.append(
                f"{name} has steps of {step_s:.3g} s and {other} of {one.step_s:.3g} s; name one of them with --steps"
            )
        agrees = bool(alike) or any(0.7 < each.told_frac <= MOST_TOLD_FRAC for each in streams.values())
        self.confidence = "low" if said else "high" if agrees else "low" if differ else "medium"
        self.source = f"{name} (lines of its output, by their arrival)"
        self.per_device = any(each.per_device for each in streams.values())
        return {rank: tuple(each.steps) for rank, each in streams.items()}

    def _candidates(self) -> list[tuple[str, dict[int, PatternSteps]]]:
        """Returns the sources that have steps in the output, the surest first: in words, and the steps by rank."""
        found: dict[str, dict[int, PatternSteps]] = {}
        for (rank, preset), streams in sorted(self._streams.items()):
            # All ranks may print a step. Where a launcher says which, the lowest rank is taken, as it stands for all.
            most = max(len(each.steps) for each in streams.values())
            whole = [key for key, each in streams.items() if each.steps and 2 * len(each.steps) >= most]
            if whole:
                found.setdefault(preset, {})[rank] = streams[min(whole)]
        order = [(str(each), found[each.preset]) for each in self._patterns if each.preset in found]
        lines = [each for each in order if each[0] == str(PRESETS["lines"])]
        order = [each for each in order if each not in lines]
        for surely in (True, False) if self._shows_bars else ():
            said = [
                (rank, *bars.best(surely=surely, checked=self._wanted.kind == "auto"))
                for rank, bars in sorted(self._bars.items())
            ]
            bars = {rank: marks for rank, marks, _ in said if marks is not None}
            if bars:
                order.append((f"pattern {self._wanted.preset or 'tqdm'}: {said[0][2]}", bars))
                break
            # Without a word of training a bar counts where it was asked for, or where losses are printed beside it.
            if self._wanted.kind == "auto" and not self._log.trains:
                self._problems += [why for _, _, why in said if why]
                break
        order += lines
        if not order and self._shows_bars and (steps := self._log.steps()) is not None:
            order.append(("pattern huggingface: lines {'loss': ...} and train_runtime", {0: steps}))
        return order

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

    def out_of_memory(self) -> Sequence[int]:
        """Returns the ranks whose last exception means that memory ran out."""
        return sorted({rank for rank, one in self._events("error") if one.get("out_of_memory")})

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


def _undertold(stream: PatternSteps) -> str:
    return (
        f"lines of output tell {stream.told_frac:.2g} times the time that passed: they are of something else than "
        "steps, or in another unit"
    )


def _together_ns(one: StepFile, other: StepFile) -> int:
    """Returns how long two processes told steps side by side; not above 0 where one ended before the other began."""
    ends_ns = min(one.steps[-1].end_mono_ns, other.steps[-1].end_mono_ns)
    return ends_ns - max(one.steps[0].start_mono_ns, other.steps[0].start_mono_ns)

"""Steps in a program's output: all sources that it may hold, and the one that is surest and agrees with the clock."""

import re
from typing import Final

from wattune.steps.bars import Bars
from wattune.steps.lines import label_of, plain, token_rate_in
from wattune.steps.pattern import PatternSteps
from wattune.steps.source import AUTOMATIC_PRESETS, BAR_PRESETS, EVALUATION, PRESETS, TRAINING_LOSS, StepSource

_CALLBACKS: Final = ("transformers", "lightning")
"""Callbacks whose programs show bars too: those count where a callback tells nothing."""

_LINES: Final = PRESETS["lines"]
"""Looked for where nothing else is found in a line."""

_NO_LABEL: Final = (10**9,)
"""In place of a rank, above all of them."""

_MAY_TELL: Final = re.compile(r"(?i)step|iter|epoch|train|loss|\bit\b|\d/(?:\d|\?)|/s\b|eval|valid|checkpoint")
"""Words of lines that tell anything of training; most lines of other programs are passed over by it."""

LONGEST_LINE: Final = 1024
"""Characters of a line that are searched for what is known: twice of what programs print."""

_PAUSES: Final = re.compile(rf"(?i){EVALUATION}|checkpoint|saving")

MOST_TOLD_FRAC: Final = 1.5
"""Told time over passed time beyond which lines are not those of one process's steps: two of them tell twice of it."""

LEAST_TOLD_FRAC: Final = 0.3
"""The same below which told times are of something else, or in another unit: no program waits so long beside them."""

AGREE_FRAC: Final = 0.1
"""Two sources agree whose steps are longer and shorter by less than this share."""

LEAST_FOUND: Final = 3
"""Fewest steps of a source that nobody named."""

LEAST_STEP_S: Final = 1e-3
"""Shortest step of such a source: a log that is printed again shows thousands a second."""


class OutputSteps:
    """The steps of one command's output."""

    def __init__(self, source: StepSource) -> None:
        """Has heard nothing yet; `auto` looks for all that it knows."""
        self._preset, self._auto = source.preset or "tqdm", source.kind == "auto"
        self._is_own = source.kind == "pattern" and not source.preset
        self._shows_bars = self._auto or source.kind in _CALLBACKS or source.preset in BAR_PRESETS
        self._patterns = [PRESETS[name] for name in AUTOMATIC_PRESETS] if self._auto else []
        if source.kind == "pattern" and not self._shows_bars:
            self._patterns = [source]
        self._streams: dict[str, dict[tuple[int, ...], PatternSteps]] = {}
        """By preset, and the ranks that launchers put before the line."""
        self._bars, self._log = Bars(), TrainerLog()
        self.name, self.confidence = "none", ""
        """The source that counts, in words, and how sure it is."""
        self.problems: list[str] = []
        """Sources that are refused, with the reason, and those that differ."""

    def feed(self, line: str, mono_ns: int) -> bool:
        """Takes a line with its arrival on the monotonic clock; returns True where it tells anything of steps."""
        text = plain(line.rstrip("\r"))
        if not self._is_own:
            text = text[:LONGEST_LINE]
            if not _MAY_TELL.search(text):
                return False
        label, begin = label_of(text)
        label = label or _NO_LABEL

        def takes(source: StepSource) -> bool:
            found = re.search(source.pattern, text)
            if found is None:
                return False
            # A number at the line's begin is its label only where the pattern does not need it.
            needed = found.start() < begin and found.group().strip()[:1].isdigit()
            streams = self._streams.setdefault(source.preset, {})
            return streams.setdefault(_NO_LABEL if needed else label, PatternSteps(source)).take(found, mono_ns)

        taken = (
            any(takes(source) for source in self._patterns if source != _LINES)
            or (self._shows_bars and self._bars.feed(text[begin:], mono_ns, label, self._log.rate))
            or (_LINES in self._patterns and takes(_LINES))
        )
        taken |= self._shows_bars and self._log.feed(text, mono_ns)
        if not taken and _PAUSES.search(text):
            self._bars.pause()
            for stream in (each for streams in self._streams.values() for each in streams.values()):
                stream.pause()
            return True
        return taken

    def find(self) -> PatternSteps | None:
        """Judges all sources by what was printed so far, and returns the steps of the one that counts."""
        self.name, self.confidence, self.problems = "none", "", []
        good: list[tuple[str, PatternSteps, str]] = []
        for name, marks, doubt in self._candidates():
            said = doubt or _disagrees(marks)
            if self._auto and said:
                self.problems.append(f"{name} is refused: {said}")
            elif not self._auto or (len(marks.steps) >= LEAST_FOUND and marks.step_s >= LEAST_STEP_S):
                good.append((name, marks, said))
        if not good:
            return None
        (name, marks, said), *others = good
        alike = any(abs(one.step_s - marks.step_s) <= AGREE_FRAC * marks.step_s for _, one, _ in others)
        if others and not alike:
            # Lines that name a step say it more surely than a bar, which may count parts of a step.
            (name, marks, said), (other, one, _) = sorted(good[:2], key=lambda each: each[1].source.preset == "tqdm")
            self.problems.append(
                f"{name} has steps of {marks.step_s:.3g} s, {other} of {one.step_s:.3g} s: give --steps one"
            )
        self.problems += [said] if said else []
        sure = alike or (marks.told_frac > 0.7 and not said)
        self.confidence = "high" if sure else "low" if said or others else "medium"
        self.name = f"{name} (lines of its output, by their arrival)"
        return marks

    def _candidates(self) -> list[tuple[str, PatternSteps, str]]:
        """Returns the sources that have steps, the surest first, and what speaks against each."""
        found = {}
        for preset, streams in self._streams.items():
            # All ranks may print a step. Where a launcher says which, the lowest rank is taken, as it stands for all.
            most = max(len(each.steps) for each in streams.values())
            whole = [key for key, each in streams.items() if each.steps and 2 * len(each.steps) >= most]
            if whole:
                found[preset] = streams[min(whole)]
        order = [(str(each), found[each.preset], "") for each in self._patterns if each.preset in found]
        if self._shows_bars:
            bar, name, doubt = self._bars.best(trains=self._log.trains)
            if bar is not None:
                order.insert(len(order) - ("lines" in found), (f"pattern {self._preset}: {name}", bar, doubt))
            elif not order and (bar := self._log.steps()) is not None:
                order.append(("pattern huggingface: lines {'loss': ...} and train_runtime", bar, ""))
        return order


def _disagrees(marks: PatternSteps) -> str:
    """Says how the times that lines tell disagree with the clock; empty where they do not."""
    if marks.told_frac > MOST_TOLD_FRAC:
        return (
            f"lines of output tell {marks.told_frac:.1f} times the time that passed, so steps are too many and too "
            "short: let one rank print them, or add the group step to the pattern"
        )
    if 0 < marks.told_frac < LEAST_TOLD_FRAC:
        return (
            f"lines of output tell {marks.told_frac:.2g} times the time that passed: they are of something else than "
            "steps, or in another unit"
        )
    return ""


# transformers/trainer_callback.py, ProgressCallback.on_log and PrinterCallback.on_log print the dict of
# transformers/trainer.py, _maybe_log_save_evaluate: "{'loss': 2.31, 'grad_norm': 1.2, 'learning_rate': 5e-05,
# 'epoch': 0.5}", since version 5 with quotes around numbers; transformers/trainer_utils.py, speed_metrics, the last
# one: "{'train_runtime': 12.3, 'train_samples_per_second': 8.1, 'train_steps_per_second': 2.0, 'train_loss': 1.9,
# 'epoch': 3.0}".
_TOLD: Final = r"'?(\d{1,12}(?:\.\d{0,20})?)(?!\d)"
_EPOCH: Final = re.compile(rf"'loss': '?[\d.].*'epoch': {_TOLD}")
_EVALUATED: Final = re.compile(rf"'eval_runtime': {_TOLD}")
_END: Final = re.compile(rf"'train_runtime': {_TOLD}.*'train_steps_per_second': {_TOLD}.*'epoch': {_TOLD}")
# hiyouga/LLaMA-Factory, src/llamafactory/train/callbacks.py, LogCallback.on_log, adds the tokens a second so far.
_THROUGHPUT: Final = re.compile(rf"'loss': .*'throughput': {_TOLD}")
_LOSS: Final = re.compile(rf"(?i)(?<![a-z]){TRAINING_LOSS}['\"]?\W{{0,4}}\d")


# transformers/trainer.py, _inner_training_loop, and its examples without Trainer; the heading of the columns of
# ultralytics/models/yolo/detect/train.py, progress_string.
_TRAINS: Final = re.compile(r"(?i)\*\*\*\*\* running training|total optimization steps|^\s*epoch\b.*loss\b")


class TrainerLog:
    """The losses that Hugging Face's Trainer printed without its bar, by epoch, and its speed at the end."""

    def __init__(self) -> None:
        """Has seen none yet."""
        self._epochs: list[tuple[float, int]] = []
        self._evaluated_ns: list[tuple[int, int]] = []
        """Ends of evaluations, and how long they took."""
        self._end: tuple[float, float, float, int] | None = None
        self.rate: tuple[float, bool] | None = None
        """Tokens a second that it told last, as `token_rate_in` reads them."""
        self.trains = False
        """True once a loss was printed that is of no evaluation, or that training begins."""

    def feed(self, line: str, mono_ns: int) -> bool:
        """Takes a plain line; returns True where it has a loss or says that training begins."""
        if found := _EPOCH.search(line):
            self._epochs.append((float(found[1]), mono_ns))
        if found := _EVALUATED.search(line):
            self._evaluated_ns.append((mono_ns, round(float(found[1]) * 1e9)))
        if ended := _END.search(line):
            self._end = float(ended[1]), float(ended[2]), float(ended[3]), mono_ns
        if found := _THROUGHPUT.search(line):
            self.rate = float(found[1]), False
        else:
            self.rate = token_rate_in(line) or self.rate
        trains = any((ended, _LOSS.search(line), _TRAINS.search(line)))
        self.trains |= trains
        return trains

    def steps(self) -> PatternSteps | None:
        """Returns the steps of a run that has ended, as many as its speed says; None where nothing says how many."""
        if self._end is None:
            return None
        runtime_s, per_s, epochs, end_ns = self._end
        number, marks = round(runtime_s * per_s), PatternSteps(PRESETS["tqdm"])
        marks.mark((0.0, 0.0), end_ns - round(runtime_s * 1e9))
        told = [(number * epoch / epochs, at_ns) for epoch, at_ns in self._epochs if 0 < epoch < epochs]
        since_ns = 0
        for at, at_ns in [*told, (number, end_ns)]:
            marks.leave_out(sum(took for then, took in self._evaluated_ns if since_ns < then <= at_ns))
            marks.mark((float(round(at)), 0.0), at_ns)
            since_ns = at_ns
        return marks

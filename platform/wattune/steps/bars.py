"""Progress bars of a program's output: the one of the training among those of downloads, evaluation and saving."""

import re
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

from wattune.steps.lines import NUMBER, number_in, token_rate_in
from wattune.steps.pattern import PatternSteps
from wattune.steps.source import EVALUATION, PRESETS, TRAINING_LOSS
from wattune.units import ns_to_s

_BAR: Final = re.compile(
    rf"(?<![0-9.,])(?:(?P<n>{NUMBER})/(?P<total>{NUMBER}|\?)|(?P<endless>\d+)it) "
    r"(?:\[(?P<elapsed>\d{1,9}(?::\d\d){0,3})(?:<[^,\]]*)?(?P<told>[^\]]*)\]?"
    r"|(?:\[[=>.]+\]|━+)(?P<more>.*(?:ETA|/step).*)|(?P<clock>\d{1,9}:\d\d:\d\d) • \S+ *(?P<rest>.*))"
)
"""A bar of tqdm (tqdm/std.py, format_meter), of Keras (keras/src/utils/progbar.py, Progbar.update) or of Lightning with
rich (lightning/pytorch/callbacks/progress/rich_progress.py, configure_columns)."""

_UNIT: Final = re.compile(r"(?:[\d.?]+ ?(?P<a>[A-Za-z]+)/s(?![A-Za-z])|s/(?P<b>[A-Za-z]+))")
_UNITS_OF_STEPS: Final = re.compile(r"(?i)(?:it|iters?|iterations?|steps?|batch(?:es)?|updates?)$")
_OTHER_WORK: Final = re.compile(
    r"(?i)download|load|fetch|\bmap\b|mapping|filter|tokeni|pars(?:e|ing)|encod|embed|predict|infer|sav(?:e|ing)|writ"
    r"|upload|push|generat|creat|resolv|process|prepar|convert|pack|sanity|shard|captur|compil|warm|quanti|calibrat"
    r"|sampl|rollout|copy|read|extract|collect|comput|build|index|cach|scor|search|check|verif|merg|export|group"
    r"|shuffl|concat|flatten|split|decod|transcrib|render|simulat|install|mAP\d|\bclass\b"
)
_EVALUATES: Final = re.compile(rf"(?i){EVALUATION}(?!\W*(?:loss|acc|ppl))")
_TRAINING: Final = re.compile(r"(?i)train|epoch|\bsteps?\b|\biter|finetun|fine-tun|\bfit|optimi|updat")
_COUNTS_STEPS: Final = re.compile(r"(?i)\bsteps?\b|\biter|updat")
_LOSS: Final = re.compile(rf"(?i){TRAINING_LOSS}|\blr\b|grad_?norm|v_num|\bppl\b")

_MOST_BARS: Final = 200
"""Bars that are kept apart; a program that names each of thousands of files in a bar trains with none of them."""

DOMINANT_FRAC: Final = 1.5
"""Time of a bar over that of the next one, from which it is taken where nothing else tells them apart."""

INSIDE_FRAC: Final = 0.7
"""Share of a bar's steps that hold another bar, from which the inner one counts the steps."""


@dataclass(slots=True, eq=False)
class _Bar:
    """All bars of one description and total, such as those of each epoch."""

    words: str
    total: str
    label: tuple[int, ...]
    of_steps: bool = True
    """Its unit can be steps."""
    has_loss: bool = False
    marks: PatternSteps = field(default_factory=lambda: PatternSteps(PRESETS["tqdm"]))
    arrived_ns: list[int] = field(default_factory=list)
    told_s: float = 0.0
    """Time that passed by its own clock, and what that showed last."""
    last_s: float = 0.0

    @property
    def trains(self) -> bool | None:
        """True where words or a loss say so, False where they say that it does other work; None where nothing does."""
        if not self.of_steps or _EVALUATES.search(self.words):
            return False
        training = _TRAINING.search(self.words) is not None
        if _OTHER_WORK.search(self.words) and not (training and self.has_loss):
            return False
        return True if training or self.has_loss else None

    @property
    def active_ns(self) -> int:
        return sum(step.duration_ns for step in self.marks.steps)

    @property
    def name(self) -> str:
        return f'bar "{self.words}" of {self.total}' if self.words else f"bar of {self.total}"

    def holds(self, other: "_Bar") -> float:
        """Returns the share of its steps that hold lines of another bar; 0 where that is not inside of it."""
        first_ns, *_, last_ns = self.arrived_ns
        inside = [at_ns for at_ns in other.arrived_ns if first_ns <= at_ns <= last_ns]
        if len(inside) < 0.8 * len(other.arrived_ns):
            return 0.0
        return len({bisect_left(self.arrived_ns, at_ns) for at_ns in inside}) / len(self.arrived_ns)


class Bars:
    """The progress bars of one stream of output."""

    def __init__(self) -> None:
        """Has seen none yet."""
        self._bars: dict[tuple[tuple[int, ...], str, str], _Bar] = {}

    def feed(self, line: str, mono_ns: int, label: tuple[int, ...], rate: tuple[float, bool] | None = None) -> bool:
        """Takes a plain line without its label; returns True where it shows a bar.

        `rate` is the last one of tokens that was printed beside it, as `token_rate_in` reads it.
        """
        begin = 0
        for found in _BAR.finditer(line):
            before, begin = line[begin : found.start()], found.end()
            # What was printed before the bar in the same line is no description of it: at most six words are.
            words = re.sub(r"\{.*?\}|\d*%?\|[^|]*\|\s*$", " ", before)
            words = " ".join(re.findall(r"[A-Za-z][\w.-]*", words)[-6:])
            shape = re.sub(r"\d+", "", words).lower()
            key = label, shape, found["total"] or "?"
            if key not in self._bars and len(self._bars) >= _MOST_BARS:
                continue
            bar = self._bars.setdefault(key, _Bar(words=words, total=key[2], label=label))
            told = found["told"] or found["more"] or found["rest"] or ""
            unit = _UNIT.search(told)
            bar.of_steps &= unit is None or _UNITS_OF_STEPS.match(unit["a"] or unit["b"]) is not None
            bar.has_loss |= _LOSS.search(told + before) is not None
            if found["more"] and "val_" in told:
                bar.marks.pause()
            ended = bar.marks.mark(number_in(found["n"] or found["endless"]), mono_ns, rate=token_rate_in(told) or rate)
            if ended or not bar.arrived_ns:
                bar.arrived_ns.append(mono_ns)
            if clock := found["elapsed"] or found["clock"]:
                parts = reversed(clock.split(":"))
                shown_s = sum(int(part) * 60.0**at for at, part in enumerate(parts))
                bar.told_s += max(shown_s - bar.last_s, 0.0) if len(bar.arrived_ns) > 1 else 0.0
                bar.last_s = shown_s
            self.pause(but=bar)
        return begin > 0

    def pause(self, but: object = None) -> None:
        """Notes that the program did something else."""
        for bar in self._bars.values():
            if bar is not but:
                bar.marks.pause()

    def best(self, *, trains: bool) -> tuple[PatternSteps | None, str, str]:
        """Returns the steps of the bar that trains, if one may, which it is, and what speaks against it.

        `trains` says that something else than the bar does, such as losses that are printed beside it.
        """
        bars = [bar for bar in self._bars.values() if bar.marks.steps and bar.trains is not False]
        if not bars:
            return None, "", ""
        lowest = min(bar.label for bar in bars)
        bars = [bar for bar in bars if bar.label == lowest]
        for outer in list(bars):
            for inner in [bar for bar in bars if bar is not outer and outer in bars]:
                share = outer.holds(inner)
                of_parts = outer.has_loss and not inner.has_loss and _COUNTS_STEPS.search(outer.words)
                if share >= INSIDE_FRAC and not of_parts:
                    bars.remove(outer)  # it counts epochs, or loops of which each trains
                elif share >= INSIDE_FRAC or (share > 0 and inner.holds(outer) < INSIDE_FRAC):
                    bars.remove(inner)  # an evaluation between steps, or a part of each step
        bars.sort(key=lambda bar: (bar.trains is True, bar.active_ns), reverse=True)
        first, *others = bars
        rival = next((bar for bar in others if bar.trains == first.trains), None)
        doubt = ""
        if not trains and not first.trains:
            doubt = "nothing says that it trains; if so, give --steps tqdm"
        elif rival is not None and first.active_ns < DOMINANT_FRAC * rival.active_ns:
            doubt = f"it cannot be told apart from a {rival.name}; give --steps a pattern of one"
        elif first.told_s > 2 * ns_to_s(first.arrived_ns[-1] - first.arrived_ns[0]) + 3:
            doubt = f"it tells {first.told_s:.0f} s where less passed"
        return first.marks, first.name, doubt

"""Steps found in a program's output: each line that a pattern matches ends one or several steps."""

import math
import re
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from wattune.steps.files import MOST_NS, MOST_TOKENS, Step
from wattune.steps.lines import NUMBER, number_in, token_rate_in, total_tokens_in
from wattune.steps.source import UNITS_NS, StepSource
from wattune.units import ns_to_s

MOST_STEPS: Final = 10_000
"""Most steps that one line can end. A larger number is not a number of steps."""

LEAST_TOLD: Final = 10
"""Fewest steps whose told times are held against the time that passed."""

PAUSE_FRAC: Final = 1.3
"""Time of a step over the median beyond which an evaluation or a checkpoint that was printed meanwhile made it."""

JUMP_FRAC: Final = 20
"""So many times more steps than usual, each so many times shorter, are skipped: a run goes on from a checkpoint."""

_JUDGED: Final = 4
"""Lines after which it is known whether the first of them went on from a checkpoint."""

_LATEST: Final = 25
"""Steps and lines whose median is the usual."""


_OF: Final = re.compile(rf"\s*(?:/|of)\s*({NUMBER})")
"""The number of all steps, after that of a step."""


@dataclass(slots=True)
class PatternSteps:
    """Steps of one stream of output.

    The group `time` (or the first group, where none has a name) is the time of a step in the source's unit. The group
    `step` is the number of the step: where it rises by several, the line ends so many. The group `tokens` is the tokens
    of a step; `tokens_per_s` and `tokens_per_s_per_device` are its rate. Without a time the steps divide the time
    between two lines equally.
    """

    source: StepSource
    steps: list[Step] = field(default_factory=list)
    num_lines: int = 0
    """Lines that matched."""
    per_device: bool = False
    """True where its tokens are those of one device."""
    _told_ns: int = 0
    """Time that lines told after the first arrival, and that arrival."""
    _first_ns: int | None = None
    _last_ns: int | None = None
    _last_number: float | None = None
    _base: float | None = None
    """The first number of all."""
    _end: tuple[float, float] | None = None
    """The last number that will come, where its lines tell it."""
    _counts: deque[int] = field(default_factory=lambda: deque(maxlen=_LATEST))
    """Steps that the latest lines ended."""
    _total_tokens: float | None = None
    _paused: bool = False
    _num_paused: int = 0
    _before_ns: int | None = None
    """Arrival of the last line that came before the one at `_last_ns`."""
    _num_before: int = 0
    """Steps up to then."""
    _together: list[tuple[int, int | None, float | None, float | None]] = field(default_factory=list)
    """Lines that came at `_last_ns`: steps they end; of each its time in nanoseconds, tokens, tokens a second."""

    def take(self, found: re.Match[str], mono_ns: int) -> bool:
        """Takes what the pattern found in a line with the time of its arrival; returns True where that is a step."""
        named: Mapping[str, str | None] = found.groupdict()
        if not named and found.re.groups:
            named = {"time": found[1]}
        told = {name: number_in(text) for name, text in named.items() if text is not None}
        read = {name: number for name, number in told.items() if number is not None}
        name = next((name for name in ("step", "iteration", "batch") if name in read), "")
        if ("time" in told and "time" not in read) or ("step" in named and not name):
            return False
        time_ns = read["time"][0] * UNITS_NS[self.source.unit] if "time" in read else None
        if time_ns is not None and time_ns > MOST_NS:  # infinite where the float overflowed
            return False
        end = _OF.match(found.string, found.end(name)) if name else None
        self._end = number_in(end[1]) if end else None
        tokens = read["tokens"][0] if "tokens" in read else None
        total = total_tokens_in(found.string) if self.source.preset else None
        rates = [(read[f"tokens_per_s{of}"][0], bool(of)) for of in ("_per_device", "") if f"tokens_per_s{of}" in read]
        rate = rates[0] if rates else token_rate_in(found.string) if self.source.preset and total is None else None
        self.mark(read.get(name), mono_ns, time_ns=time_ns, tokens=tokens, rate=rate, total=total)
        return True

    def mark(
        self,
        number: tuple[float, float] | None,
        mono_ns: int,
        *,
        time_ns: float | None = None,
        tokens: float | None = None,
        rate: tuple[float, bool] | None = None,
        total: float | None = None,
    ) -> int:
        """Ends the steps up to a number, as `number_in` reads it, at a time; without a number one step.

        Returns how many.

        `tokens` are those of a step, `rate` tokens a second as `token_rate_in` reads them, `total` those of all steps
        so far.
        """
        self.num_lines += 1
        count = 1
        if number is not None:
            at = self._exact(*number)
            ended = self._ended_by(at)
            if ended is None:
                return 0
            count, self._last_number = ended, at
            self._base = at if self._base is None else self._base
        passed_s = ns_to_s(mono_ns - (self._last_ns or mono_ns))
        if count > JUMP_FRAC * self._usual and len(self.steps) > 2 and passed_s * JUMP_FRAC < count * self.step_s:
            count = 0  # skipped
        if len(self.steps) == 1 and time_ns is not None:
            self._complete_first(count)
        if mono_ns != self._last_ns:
            self._before_ns, self._num_before, self._together = self._last_ns, len(self.steps), []
        self._last_ns = mono_ns
        tokens = self._since_before(total, count) or tokens
        if count:
            if self._before_ns is not None:
                self._counts.append(count)
            step_ns = None if time_ns is None else round(time_ns)
            self._first_ns = mono_ns if self._first_ns is None else self._first_ns
            if step_ns is not None and mono_ns > self._first_ns and not self._paused:
                self._told_ns += count * step_ns
            if self._before_ns is None:
                self._together = []  # of the first lines together nobody knows how long they were held back
            self._num_paused += self._paused
            self.per_device |= tokens is None and rate is not None and rate[1]
            self._together.append((count, step_ns, tokens, rate and rate[0]))
            self._lay_out(mono_ns)
            if len(self._counts) == _JUDGED:
                self._drop_jump()
        self._paused = False
        return count

    def _since_before(self, total: float | None, count: int) -> float | None:
        """Returns the tokens of each step since the line before, where lines tell those of all steps so far."""
        before, self._total_tokens = self._total_tokens, total
        if before is None or total is None or count == 0 or total <= before:
            return None
        return (total - before) / count

    def leave_out(self, duration_ns: int) -> None:
        """Leaves out time since the line before, which was of no step."""
        self._last_ns = None if self._last_ns is None else self._last_ns + duration_ns

    def pause(self) -> None:
        """Notes that the program did something else since the line before, such as an evaluation."""
        self._paused = True

    @property
    def told_frac(self) -> float:
        """The time that its lines told over the time that passed meanwhile; 0 while there are few."""
        passed_ns = (self._last_ns or 0) - (self._first_ns or 0)
        return self._told_ns / passed_ns if passed_ns > 0 and len(self.steps) >= LEAST_TOLD else 0.0

    @property
    def step_s(self) -> float:
        """Median time of its steps; 0 without any."""
        return ns_to_s(statistics.median(step.duration_ns for step in self.steps)) if self.steps else 0.0

    @property
    def _usual(self) -> float:
        """Number of steps that a line usually ends."""
        return statistics.median(self._counts) if self._counts else 1.0

    def _exact(self, value: float, off: float) -> float:
        """Returns the number that a rounded one stands for: the next one, as far as its digits allow."""
        if not off or self._last_number is None:
            return value
        return math.floor(min(max(self._last_number + self._usual, value - off), value + off))

    def _ended_by(self, at: float) -> int | None:
        """Returns the number of steps between the last number and this one; None where the line is none of its own."""
        if self._last_number is None:
            return 1
        count = int(at - self._last_number)
        if count == 0:  # the same step again, as a progress bar repeats it
            return None
        if count > 0:
            return count if count <= MOST_STEPS else 0
        base, usual = self._base or 0.0, self._usual
        if at == 0 and self.source.preset == "tqdm":  # a bar is drawn before its first step
            self._paused = True
            return 0
        if -count <= 1.5 * usual and at > base:  # another rank that prints a little later
            return None
        self._paused = True  # what comes between two epochs is of no step
        if not base <= at <= base + usual:
            return 0
        left = at - base + usual if self._end is None else self._end[0] - self._last_number + at
        return max(round(left), 0)

    def _complete_first(self, count: int) -> None:
        """Has the first line end as many steps as the second, whose number says that it told the mean of so many."""
        if count > 1 and self._base and self._base % count == 0:
            only = self.steps.pop()
            each_ns, end_ns = only.duration_ns, only.end_mono_ns
            ends_ns = [end_ns - back * each_ns for back in range(count - 1, -1, -1)]
            self.steps += [Step(at, end - each_ns, end, only.tokens) for at, end in enumerate(ends_ns)]

    def _drop_jump(self) -> None:
        """Takes back the steps of the first line where they were not run: its bar began at 0 and not where it was."""
        first, *others = self._counts
        rest = self.steps[first:]
        usual_ns = statistics.median(step.duration_ns for step in rest) if rest else 0
        if first > JUMP_FRAC * statistics.median(others) and self.steps[0].duration_ns * JUMP_FRAC < usual_ns:
            self.steps[:] = [replace(step, index=at) for at, step in enumerate(rest)]
            self._num_before = max(self._num_before - first, 0)

    def _lay_out(self, mono_ns: int) -> None:
        """Puts the steps of all lines that came at one moment before it.

        A buffer of the program or of a pipe holds lines back and gives several at once. Each still ended its steps.
        """
        del self.steps[self._num_before :]
        shared_ns = 0
        if self._before_ns is not None:
            shared_ns = (mono_ns - self._before_ns) // sum(count for count, *_ in self._together)
        longest_ns = MOST_NS
        if self._paused and len(self.steps) >= 3 and 2 * self._num_paused < self.num_lines:
            usual_ns = int(statistics.median(step.duration_ns for step in self.steps[-_LATEST:]))
            longest_ns = usual_ns if max(shared_ns, self._together[-1][1] or 0) > PAUSE_FRAC * usual_ns else MOST_NS
        each = [
            (count, min(shared_ns if time_ns is None else time_ns, longest_ns), tokens, per_s)
            for count, time_ns, tokens, per_s in self._together
        ]
        all_ns = sum(count * step_ns for count, step_ns, *_ in each)
        # Lines arrive late by varying times: no step begins before the one before it ended.
        free_ns = max(mono_ns - (self.steps[-1].end_mono_ns if self.steps else 0), 0)
        if all_ns > free_ns:
            each = [(count, step_ns * free_ns // all_ns, tokens, per_s) for count, step_ns, tokens, per_s in each]
        end_ns = mono_ns - sum(count * step_ns for count, step_ns, *_ in each)
        for count, step_ns, known, per_s in each:
            tokens = per_s * ns_to_s(step_ns) if known is None and per_s is not None else known
            tokens = None if tokens is None or tokens > MOST_TOKENS else round(tokens)
            for _ in range(count if step_ns > 0 else 0):
                end_ns += step_ns
                self.steps.append(Step(len(self.steps), end_ns - step_ns, end_ns, tokens))

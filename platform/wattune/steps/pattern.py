"""Steps found in a program's output: each line that a pattern matches ends one or several steps."""

import math
import re
from dataclasses import dataclass, field
from typing import Final

from wattune.steps.files import MOST_NS, MOST_TOKENS, Step
from wattune.steps.source import UNITS_NS, StepSource

_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Colours of terminals, which programs also write into pipes."""

LONGEST_LINE: Final = 4096
"""Characters of a line that are searched, so that no pattern takes long on a line without end."""

MOST_STEPS: Final = 10_000
"""Most steps that one line can end. A larger number is not a number of steps."""


LEAST_TOLD: Final = 10
"""Fewest steps whose told times are held against the time that passed."""

MOST_TOLD_FRAC: Final = 1.5
"""Told time over passed time beyond which lines are not those of one process's steps: two of them tell twice of it."""

_ENDS: Final = re.compile(rb"(?<=[\r\n])")


class OutputLines:
    """Lines of one stream of output, each with the arrival of its last character.

    A carriage return ends a line too: progress bars write no other end, and each of their lines has a time of its own.
    It stays at the line's end, so that who shows lines knows that the next one overwrites it.
    """

    def __init__(self, longest_bytes: int) -> None:
        """Has read nothing yet; a line of more than `longest_bytes` is given in parts."""
        self._longest, self._rest, self._rest_ns = longest_bytes, b"", 0

    def take(self, data: bytes, mono_ns: int) -> list[tuple[str, int]]:
        """Takes what was read, with its arrival on the monotonic clock; nothing at the end of the stream.

        Returns the lines that are complete. At the end of the stream that is what is left, too.
        """
        before, before_ns = len(self._rest), self._rest_ns
        *whole, rest = _ENDS.split(self._rest + data)
        if rest and (not data or len(rest) > self._longest):
            whole, rest = [*whole, rest], b""
        # The end of a bar's line is the beginning of its next one: the line itself was there before.
        arrived_ns = [
            before_ns if at == 0 and len(line) <= before + 1 and before else mono_ns for at, line in enumerate(whole)
        ]
        self._rest = rest
        if len(rest) > before or whole:
            self._rest_ns = mono_ns
        return [
            (line.removesuffix(b"\n").decode(errors="replace"), at_ns)
            for line, at_ns in zip(whole, arrived_ns, strict=True)
        ]


def found_in(line: str, source: StepSource) -> re.Match[str] | None:
    """Returns what a source's pattern finds in a line of output."""
    return re.search(source.pattern, _ESCAPES.sub("", line[:LONGEST_LINE]))


@dataclass(slots=True)
class PatternSteps:
    """Steps of one stream of output.

    The group `time` (or the first group, where none has a name) is the time of a step in the source's unit. The group
    `step` is the number of the step: where it rises by several, the line ends so many. The group `tokens` is the tokens
    of a step. Without a time the steps divide the time between two lines equally.
    """

    source: StepSource
    steps: list[Step] = field(default_factory=list)
    num_lines: int = 0
    """Lines that matched."""
    _told_ns: int = 0
    """Time that lines told after the first arrival, and that arrival."""
    _first_ns: int | None = None
    _last_ns: int | None = None
    _last_number: float | None = None
    _before_ns: int | None = None
    """Arrival of the last line that came before the one at `_last_ns`."""
    _num_before: int = 0
    """Steps up to then."""
    _together: list[tuple[int, int | None, int | None]] = field(default_factory=list)
    """Lines that came at `_last_ns`: steps they end, time of each in nanoseconds, tokens of each."""

    def feed(self, line: str, mono_ns: int) -> None:
        """Takes a line of output with the time of its arrival."""
        found = found_in(line, self.source)
        if found is None:
            return
        named = found.groupdict()
        if not named and found.re.groups:
            named = {"time": found[1]}
        number, time, tokens = (_number(named.get(name)) for name in ("step", "time", "tokens"))
        if ("step" in named and number is None) or ("time" in named and time is None):
            return
        time_ns = None if time is None else time * UNITS_NS[self.source.unit]
        if time_ns is not None and time_ns > MOST_NS:  # infinite where the float overflowed
            return
        if tokens is not None and tokens > MOST_TOKENS:
            tokens = None
        self.num_lines += 1
        count = 1
        if number is not None and self._last_number is not None:
            count = int(number - self._last_number)
        if count == 0:  # the same step again, as a progress bar repeats it
            return
        if count < 0 or count > MOST_STEPS:  # it began anew
            count = 0
        if mono_ns != self._last_ns:
            self._before_ns, self._num_before, self._together = self._last_ns, len(self.steps), []
        self._last_ns, self._last_number = mono_ns, number
        if count:
            step_ns = None if time_ns is None else round(time_ns)
            self._first_ns = mono_ns if self._first_ns is None else self._first_ns
            self._told_ns += count * step_ns if step_ns is not None and mono_ns > self._first_ns else 0
            if self._before_ns is None:
                self._together = []  # of the first lines together nobody knows how long they were held back
            self._together.append((count, step_ns, None if tokens is None else int(tokens)))
            self._lay_out(mono_ns)

    @property
    def told_frac(self) -> float:
        """The time that its lines told over the time that passed meanwhile; 0 while there are few."""
        passed_ns = (self._last_ns or 0) - (self._first_ns or 0)
        return self._told_ns / passed_ns if passed_ns > 0 and len(self.steps) >= LEAST_TOLD else 0.0

    def _lay_out(self, mono_ns: int) -> None:
        """Puts the steps of all lines that came at one moment before it.

        A buffer of the program or of a pipe holds lines back and gives several at once. Each still ended its steps.
        """
        del self.steps[self._num_before :]
        shared_ns = 0
        if self._before_ns is not None:
            shared_ns = (mono_ns - self._before_ns) // sum(count for count, _, _ in self._together)
        each = [(count, shared_ns if time_ns is None else time_ns, tokens) for count, time_ns, tokens in self._together]
        all_ns = sum(count * step_ns for count, step_ns, _ in each)
        # Lines arrive late by varying times: no step begins before the one before it ended.
        free_ns = max(mono_ns - (self.steps[-1].end_mono_ns if self.steps else 0), 0)
        if all_ns > free_ns:
            each = [(count, step_ns * free_ns // all_ns, tokens) for count, step_ns, tokens in each]
        end_ns = mono_ns - sum(count * step_ns for count, step_ns, _ in each)
        for count, step_ns, tokens in each:
            for _ in range(count if step_ns > 0 else 0):
                end_ns += step_ns
                self.steps.append(Step(len(self.steps), end_ns - step_ns, end_ns, tokens))


def _number(text: str | None) -> float | None:
    """Returns a number as programs print it, with commas between thousands; None if it is not one."""
    if text is None:
        return None
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None

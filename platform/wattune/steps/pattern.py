"""Steps found in a program's output: each line that a pattern matches ends one or several steps."""

import math
import re
from dataclasses import dataclass, field
from typing import Final

from wattune.steps.files import Step
from wattune.steps.source import UNITS_NS, StepSource

_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Colours of terminals, which programs also write into pipes."""

LONGEST_LINE: Final = 4096
"""Characters of a line that are searched, so that no pattern takes long on a line without end."""

MOST_STEPS: Final = 10_000
"""Most steps that one line can end. A larger number is not a number of steps."""


@dataclass(frozen=True, slots=True)
class _Told:
    """Facts of one line."""

    count: int
    """Steps that it ended."""
    step_ns: int | None
    """Time of each, None where it told none."""
    tokens: int | None


@dataclass(slots=True)
class PatternSteps:
    """Steps of one stream of output.

    The group `time` (or the first group, where none has a name) is the time of a step in the source's unit. The group
    `step` is the number of the step: where it rises by several, the line ends so many. The group `tokens` is the tokens
    of a step. Without a time the steps divide the time between two lines equally.

    Lines that arrive together were held back in a buffer: the arrival is that of the last. All of them count then, one
    after another up to it.
    """

    source: StepSource
    steps: list[Step] = field(default_factory=list)
    num_lines: int = 0
    """Lines that matched."""
    _last_number: float | None = None
    _last_ns: int | None = None
    """Arrival of the last lines that matched."""
    _before_ns: int | None = None
    """Arrival of those before them."""
    _together: list[_Told] = field(default_factory=list)
    """Facts of the last lines."""
    _num_before: int = 0
    """Steps of the lines before them."""

    def feed(self, line: str, mono_ns: int) -> None:
        """Takes a line of output with the time of its arrival."""
        found = re.search(self.source.pattern, _ESCAPES.sub("", line[:LONGEST_LINE]))
        if found is None:
            return
        named = found.groupdict()
        if not named and found.re.groups:
            named = {"time": found[1]}
        number, time, tokens = (_number(named.get(name)) for name in ("step", "time", "tokens"))
        if ("step" in named and number is None) or ("time" in named and time is None):
            return
        self.num_lines += 1
        count = 1
        if number is not None and self._last_number is not None:
            count = int(number - self._last_number)
        if count == 0:  # the same step again, as a progress bar repeats it
            return
        if count < 0 or count > MOST_STEPS:  # it began anew
            count, time = 0, None
        self._last_number = number
        if mono_ns != self._last_ns:
            self._before_ns, self._last_ns = self._last_ns, mono_ns
            self._together, self._num_before = [], len(self.steps)
        step_ns = None if time is None else round(time * UNITS_NS[self.source.unit])
        self._together.append(_Told(count, step_ns, None if tokens is None else int(tokens)))
        self._place(mono_ns)

    def _place(self, mono_ns: int) -> None:
        """Puts the steps of the lines that arrived together before their arrival."""
        del self.steps[self._num_before :]
        known = self._before_ns is not None
        told = [each for each in self._together if each.count and (known or each.step_ns is not None)]
        # Lines arrive late by varying times: no step begins before the one before it ended.
        room_ns = mono_ns - (self.steps[-1].end_mono_ns if self.steps else 0)
        since_ns = room_ns if self._before_ns is None else min(mono_ns - self._before_ns, room_ns)
        number = sum(each.count for each in told)
        lengths_ns = [since_ns // number if each.step_ns is None else each.step_ns for each in told]
        whole_ns = sum(each.count * length_ns for each, length_ns in zip(told, lengths_ns, strict=True))
        if whole_ns > room_ns:
            lengths_ns = [length_ns * room_ns // whole_ns for length_ns in lengths_ns]
        end_ns = mono_ns - sum(each.count * length_ns for each, length_ns in zip(told, lengths_ns, strict=True))
        for each, length_ns in zip(told, lengths_ns, strict=True):
            for _ in range(each.count if length_ns > 0 else 0):
                self.steps.append(Step(len(self.steps), end_ns, end_ns + length_ns, each.tokens))
                end_ns += length_ns


class Lines:
    """Cuts what a program writes into lines, each with the time at which its last byte came.

    A carriage return ends a line too, and stays at its end: what follows takes its place on a terminal. Bars of
    progress have nothing else, and write it before the text: such a line is complete long before it is seen to end.
    """

    def __init__(self, longest_bytes: int) -> None:
        """Starts empty.

        Args:
            longest_bytes: A line that grows longer is given in parts.
        """
        self._longest_bytes = longest_bytes
        self._rest, self._rest_ns = b"", 0

    def add(self, data: bytes, mono_ns: int) -> list[tuple[str, int]]:
        """Returns the lines that new data ends, with their times; no data is the end of the output.

        Args:
            data: What was read.
            mono_ns: The time of reading.
        """
        *lines, rest = _ENDS.split(self._rest + data)
        if not data or len(rest) > self._longest_bytes:
            lines, rest = [*lines, rest] if rest else lines, b""
        times_ns = [mono_ns] * len(lines)
        if lines and self._rest and lines[0].rstrip(b"\r") == self._rest.rstrip(b"\r"):
            times_ns[0] = self._rest_ns
        if rest != self._rest:
            self._rest_ns = mono_ns
        self._rest = rest
        return [(line.decode(errors="replace"), at_ns) for line, at_ns in zip(lines, times_ns, strict=True)]


_ENDS: Final = re.compile(rb"\r?\n|(?<=\r)(?=[^\n])")
"""Ends of lines. A carriage return on its own is kept; whether it is on its own, the byte behind it tells."""


def _number(text: str | None) -> float | None:
    """Returns a number as programs print it, with commas between thousands; None if it is not one."""
    if text is None:
        return None
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None

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
    _last_ns: int | None = None
    _last_number: float | None = None

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
        self._add(count, mono_ns, time, None if tokens is None else int(tokens))
        self._last_ns, self._last_number = mono_ns, number

    def _add(self, count: int, mono_ns: int, time: float | None, tokens: int | None) -> None:
        if time is not None:
            step_ns = round(time * UNITS_NS[self.source.unit])
        elif self._last_ns is not None and count:
            step_ns = (mono_ns - self._last_ns) // count
        else:
            return
        floor_ns = self.steps[-1].end_mono_ns if self.steps else 0
        # Lines arrive late by varying times: no step begins before the one before it ended.
        step_ns = min(step_ns, (mono_ns - floor_ns) // count if count else 0)
        for left in reversed(range(count)) if step_ns > 0 else ():
            end_ns = mono_ns - left * step_ns
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

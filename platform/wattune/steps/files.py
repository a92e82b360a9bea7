"""Reading of step files while they grow; `wattune.steps.process.writer` writes them."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from wattune.steps.process.writer import FORMAT_VERSION

MOST_TOKENS: Final = 10**15
"""More tokens than any step has: a larger number is damage."""

MOST_NS: Final = 2**62
"""No clock and no step reaches it; tables hold times as 64-bit integers."""

_LONGEST: Final = 200
"""Characters of a damaged line that are quoted."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank, on its node's monotonic clock."""

    index: int
    start_mono_ns: int
    end_mono_ns: int
    tokens: int | None = None
    """Tokens that this rank trained in it, None where unknown."""

    @property
    def duration_ns(self) -> int:
        """Its length."""
        return self.end_mono_ns - self.start_mono_ns


@dataclass(slots=True)
class StepFile:
    """One process's file as far as it has been read."""

    path: Path
    header: Mapping[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    events: list[Mapping[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _offset: int = 0
    _line: int = 0
    _unusable: bool = False

    @property
    def rank(self) -> int:
        """Rank of the process, 0 where the header is not there yet."""
        return int(self.header.get("rank") or 0)

    @property
    def source(self) -> str:
        """Source of its steps."""
        return str(self.header.get("source", ""))

    def read_on(self) -> None:
        """Reads the lines that were added. A last line without its end is left for later."""
        if self._unusable:
            return
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError as error:
            self._give_up(f"cannot be read: {error}")
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._line += 1
            if not self._unusable:
                self._take(line)

    def _take(self, line: bytes) -> None:
        body, _, digest = line.rpartition(b" ")
        if digest != b"%08x" % zlib.crc32(body):
            self._damaged("does not agree with its checksum")
            return
        try:
            self._take_json(json.loads(body)) if body.startswith(b"{") else self._take_step(body)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            self._damaged(f"is not a step: {error}")

    def _take_json(self, facts: Mapping[str, Any]) -> None:
        if self.header:
            self.events.append(facts)
        elif facts["version"] != FORMAT_VERSION:
            self._give_up(f"has version {facts['version']}, this wattune reads {FORMAT_VERSION}; use one wattune")
        else:
            self.header = {**facts, "rank": int(facts["rank"])}

    def _take_step(self, body: bytes) -> None:
        if not self.header:
            self._give_up("has no header")
            return
        index, start_ns, end_ns, tokens = body.split()
        step = Step(int(index), int(start_ns), int(end_ns), None if tokens == b"-" else int(tokens))
        if step.duration_ns < 0 or step.end_mono_ns > MOST_NS or step.index > MOST_NS or (step.tokens or 0) < 0:
            raise ValueError(body.decode()[:_LONGEST])
        if step.tokens is not None and step.tokens > MOST_TOKENS:
            step = replace(step, tokens=None)
            self.problems.append(f"{self.path.name}, line {self._line}: has more tokens than a step can have")
        self.steps.append(step)

    def _damaged(self, problem: str) -> None:
        self.problems.append(f"{self.path.name}, line {self._line}: {problem}; it is left out")

    def _give_up(self, problem: str) -> None:
        self.problems.append(f"{self.path.name} {problem}")
        self._unusable = True

"""Counts of a fuzzer: what was refused in words, what was accepted, and what must never be."""

import hashlib
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from wattune.errors import WattuneError

SLOW_S = 10.0
"""Most seconds of CPU time of a case: a busy machine makes no case slow."""

HANGS_S = 120.0
"""Most seconds of wall time of a case, for one that waits."""


class TooSlowError(BaseException):
    """A case that took longer than it may; no handler of the code under test catches it."""


@dataclass
class Tally:
    """Outcomes of many cases."""

    name: str
    cases: int = 0
    refused: int = 0
    accepted: int = 0
    silent: list[str] = field(default_factory=list)
    """Cases whose figures changed without a word."""
    tracebacks: Counter[str] = field(default_factory=Counter)
    """Cases by the place in wattune that raised."""
    examples: dict[str, str] = field(default_factory=dict)
    slow: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    """CPU time of the case that took most."""
    wall_s: float = 0.0

    @property
    def sound(self) -> bool:
        """True where nothing happened that must never happen."""
        return not (self.silent or self.tracebacks or self.slow)

    def run(self, case: str, action: Callable[[], str]) -> None:
        """Runs one case.

        Args:
            case: Its description, to find it again.
            action: Does the work. Returns `refused`, `accepted` or `silent`; an error of wattune counts as refused.
        """
        self.cases += 1
        start_s = time.process_time()
        try:
            with _deadline():
                outcome = action()
        except WattuneError as error:
            outcome = "refused"
            if "\nTraceback" in str(error):
                self._note(error, case)
        except TooSlowError:
            outcome = ""
            self.slow.append(case)
        except Exception as error:
            outcome = ""
            self._note(error, case)
        self.longest_s = max(self.longest_s, time.process_time() - start_s)
        self.refused += outcome == "refused"
        self.accepted += outcome == "accepted"
        if outcome == "silent":
            self.silent.append(case)

    def _note(self, error: BaseException, case: str) -> None:
        ours = [one for one in traceback.extract_tb(error.__traceback__) if "/wattune/" in one.filename]
        where = f"{ours[-1].filename.rpartition('/wattune/')[2]}:{ours[-1].lineno}" if ours else "elsewhere"
        place = f"{type(error).__name__} in {where}"
        self.tracebacks[place] += 1
        self.examples.setdefault(place, f"{case}: {str(error)[:200]}")

    def row(self) -> str:
        """Returns a row of the table of results."""
        found = (
            self.cases,
            self.refused,
            self.accepted,
            len(self.silent),
            sum(self.tracebacks.values()),
            len(self.slow),
        )
        shown = " | ".join(f"{one:,}" for one in found)
        return f"| {self.name} | {shown} | {self.longest_s:.1f} | {self.wall_s:,.0f} |"

    def cells(self, seed: int) -> dict[str, str]:
        """Returns a row of the table on disk."""
        found = (self.cases, self.refused, self.accepted, len(self.silent), self.tracebacks.total(), len(self.slow))
        cells = [f"seed {seed}", self.name, *map(str, found), f"{self.longest_s:.2f}", f"{self.wall_s:.1f}"]
        return dict(zip(COLUMNS, [*cells, self.problems().replace("\n", "; ") or "none"], strict=True))

    def problems(self) -> str:
        """Returns a line for every kind of failure, with a case that shows it."""
        lines = [f"{count} x {place}: {self.examples[place]}" for place, count in self.tracebacks.most_common()]
        lines += [f"slow: {case}" for case in self.slow[:20]] + [f"silent: {case}" for case in self.silent[:20]]
        return "\n".join(lines)


HEADER = "\n".join(
    ("| fuzzer | cases | refused | accepted | silent | tracebacks | slow | longest CPU s | all s |", "|---" * 9 + "|")
)

COLUMNS = ["seed", "fuzzer", "num_cases", "num_refused", "num_accepted", "num_silent", "num_tracebacks", "num_slow"]
COLUMNS += ["longest_s", "wall_s", "problems"]
"""Of the table on disk: a row for each seed and fuzzer."""


def seed_of(*parts: object) -> int:
    """Returns a seed that depends on all of its parts and on nothing else."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


@contextmanager
def _deadline() -> Iterator[None]:
    def late(_number: int, _frame: FrameType | None) -> None:
        raise TooSlowError

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, SLOW_S), (signal.ITIMER_REAL, signal.SIGALRM, HANGS_S))
    before = [signal.signal(number, late) for _, number, _ in timers]
    for timer, _, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)

"""What one call may spend, and how long the next trial is expected to take."""

import math
import statistics
import time
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Final

from wattune.orchestrate.scheduling.order import workers_of
from wattune.trial import TrialSpec

_S_PER_HOUR: Final = 3600.0


class Budget:
    """What one call may spend: hours on the wall clock, and trials started, repeats and reference trials counted."""

    def __init__(
        self,
        *,
        max_hours: float | None = None,
        max_trials: int | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to count now; None is without bound."""
        self._end_s = math.inf if max_hours is None else clock_s() + max_hours * _S_PER_HOUR
        self._trials = math.inf if max_trials is None else max_trials
        self._clock_s = clock_s

    @property
    def num_left(self) -> float:
        """Trials that may still start; infinite without a bound."""
        return self._trials

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite without a bound."""
        return max(0.0, self._end_s - self._clock_s())

    def allows(self, expected_s: float) -> bool:
        """Whether a trial that is expected to take so long may start."""
        return self._trials > 0 and self._clock_s() + expected_s <= self._end_s

    def spend(self) -> None:
        """Counts one trial."""
        self._trials -= 1


class Pace:
    """How long trials took so far, and so how long the next ones will."""

    def __init__(self) -> None:
        """Knows nothing."""
        self._took_s: dict[Hashable, list[float]] = defaultdict(list)

    def add(self, spec: TrialSpec, took_s: float) -> None:
        """A trial of that kind took so long."""
        insort(self._took_s[workers_of(spec)], took_s)

    @property
    def typical_s(self) -> float:
        """The median of all; 0 where none was seen."""
        seen = [value for one in self._took_s.values() for value in one]
        return statistics.median(seen) if seen else 0.0

    def expected_s(self, spec: TrialSpec, least_s: float) -> float:
        """The median of trials of that kind, else of all, else the least the settings allow; never less than that."""
        seen = self._took_s.get(workers_of(spec))
        return max(least_s, statistics.median(seen) if seen else self.typical_s)

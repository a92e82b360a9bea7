"""Pacing: absolute deadlines, and how late they were served. Pure arithmetic on a clock that others read."""

import math
from collections import Counter
from typing import Any, Final

from wattune.units import NS_PER_S, ns_to_s

_FINEST_S: Final = 1e-6
"""Durations up to this share the first bin: the clock and the calls around it cost about as much."""
_BINS_PER_DECADE: Final = 10


class Schedule:
    """Deadlines at `start + index * period`. A missed tick is counted and never made up.

    A tick is missed when its whole period passes unserved. Ticks never drift: lateness of one does not delay the next.
    """

    def __init__(self, rate_hz: float, start_ns: int) -> None:
        """Begins a schedule. The period is rounded to whole nanoseconds."""
        self.period_ns = round(NS_PER_S / rate_hz)
        self._start_ns = start_ns
        self._next_index = 0
        self.taken = 0
        self.missed = 0

    @property
    def next_ns(self) -> int:
        """The next deadline."""
        return self._start_ns + self._next_index * self.period_ns

    def take(self, now_ns: int) -> int:
        """Serves the latest deadline that is due, and counts those before it as missed.

        Returns the time from that deadline in nanoseconds; always less than a period.
        """
        assert now_ns >= self.next_ns
        index, lateness_ns = divmod(now_ns - self._start_ns, self.period_ns)
        self.missed += index - self._next_index
        self.taken += 1
        self._next_index = index + 1
        return lateness_ns


class Histogram:
    """Durations counted in bins a tenth of a decade wide, from 1 µs up."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._max_s = 0.0

    def add_ns(self, duration_ns: int) -> None:
        """Counts one duration, in nanoseconds, not negative."""
        duration_s = ns_to_s(duration_ns)
        self._max_s = max(self._max_s, duration_s)
        # Rounded up, so that a bin's edge is the longest duration in it.
        self._counts[math.ceil(_BINS_PER_DECADE * math.log10(max(duration_s / _FINEST_S, 1)))] += 1

    @staticmethod
    def _edge_s(bin_index: int) -> float:
        return _FINEST_S * float(10 ** (bin_index / _BINS_PER_DECADE))

    def quantile_s(self, fraction: float) -> float | None:
        """A quantile in seconds, None before the first duration.

        It is the upper edge of the bin the quantile falls in, so at most 26 % too long; never more than the longest.
        """
        rank = math.ceil(fraction * self._counts.total())
        seen = 0
        for bin_index, count in sorted(self._counts.items()):
            seen += count
            if seen >= rank:
                return min(self._edge_s(bin_index), self._max_s)
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain data: quantiles, and `[upper edge in seconds, count]` of every bin that is not empty."""
        if not self._counts:
            return {"bins": []}
        return {
            "p50_s": self.quantile_s(0.5),
            "p99_s": self.quantile_s(0.99),
            "max_s": self._max_s,
            "bins": [[self._edge_s(bin_index), count] for bin_index, count in sorted(self._counts.items())],
        }

"""A node's two clocks, read together. The monotonic clock paces and joins. The wall clock gives date and time."""

import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)  # no slots: see `RankOutcome`
class ClockAnchor:
    """One reading of both clocks. It turns monotonic into wall time on the same node."""

    mono_ns: int
    wall_ns: int

    @classmethod
    def now(cls) -> "ClockAnchor":
        """Reads the monotonic clock before and after the wall clock, and takes the middle of the two."""
        before_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        return cls(mono_ns=(before_ns + time.monotonic_ns()) // 2, wall_ns=wall_ns)

    def to_wall_ns(self, mono_ns: int) -> int:
        """Returns the wall time of a monotonic reading."""
        return self.wall_ns + mono_ns - self.mono_ns

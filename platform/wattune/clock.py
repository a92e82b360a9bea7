"""The node's two clocks, read together: the monotonic one paces and joins, the wall clock only says when it was."""

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockAnchor:
    """One reading of both clocks; turns monotonic into wall time on the same node."""

    mono_ns: int
    wall_ns: int

    @classmethod
    def now(cls) -> "ClockAnchor":
        """Reads both clocks, the monotonic one before and after the wall clock to sit in its middle."""
        before_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        return cls(mono_ns=(before_ns + time.monotonic_ns()) // 2, wall_ns=wall_ns)

    def to_wall_ns(self, mono_ns: int) -> int:
        """The wall time of a monotonic reading."""
        return self.wall_ns + mono_ns - self.mono_ns

"""The driver's ring of power samples, joined from drain to drain with no sample lost, doubled or made up."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from wattune.units import ns_to_s

SAME_STAMP_US: Final = 3000
"""Largest move of a sample's stamp between two drains for which the clock need not have been set. The driver stamps the
whole ring anew, from a relation of its clocks that it renews about every 5 s (H200, driver 580.159.04: up to 160 µs,
and samples are never closer than 7 ms)."""
SAME_SHIFT_US: Final = 1000
"""Largest move of the stamps of one drain against each other (36 µs a second were seen)."""


class Sample(NamedTuple):
    """One entry of the ring."""

    time_us: int
    """The driver's wall clock."""
    power_mw: int | float


class RingJoin:
    """Finds what is new in a ring that is read whole every time.

    It looks for the samples of the last reading in the new one. Samples after them are new, and none in between was
    lost. Where they are not found the ring has turned over since, which is a gap. Stamps alone are not enough: a filter
    for later stamps gives the last sample again whenever the driver has moved its stamps, and loses samples whenever
    the wall clock is set back.
    """

    def __init__(self) -> None:
        self._seen: Sequence[Sample] = []
        self._drained_ns = 0
        self._drains = self._samples = self._gaps = self._depth = 0
        self._gap_s = 0.0

    def join(self, ring: Sequence[Sample], mono_ns: int) -> Sequence[Sample]:
        """Returns the samples that a reading adds.

        `ring` is all the ring holds, oldest first. Of the first reading all samples are added, which are from before
        it.
        """
        self._drains += 1
        self._depth = max(self._depth, len(ring))
        if not ring:
            return []
        new = ring
        if self._seen:
            elapsed_s = ns_to_s(mono_ns - self._drained_ns)
            known = self._known(ring, elapsed_s)
            if not known:
                self._gaps += 1
                self._gap_s += max(0.0, elapsed_s - (ring[-1].time_us - ring[0].time_us) / 1e6)
            new = ring[known:]
        self._samples += len(new)
        self._seen, self._drained_ns = ring, mono_ns
        return new

    def _known(self, ring: Sequence[Sample], elapsed_s: float) -> int:
        """Counts the samples of a reading that were seen before; 0 is a gap."""
        newest_us = self._seen[-1].time_us
        near = [index for index, sample in enumerate(ring) if abs(sample.time_us - newest_us) <= SAME_STAMP_US]
        for index in near:
            if self._agree(ring, index):
                return index + 1
        # The clock was set, so all stamps moved alike. Of several places that agree, the one nearest in time counts.
        found = [index for index in range(len(ring)) if self._agree(ring, index)]
        age_s = [abs((ring[-1].time_us - ring[index].time_us) / 1e6 - elapsed_s) for index in found]
        return found[age_s.index(min(age_s))] + 1 if found else 0

    def _agree(self, ring: Sequence[Sample], index: int) -> bool:
        """Returns True where a reading up to `index` ends as the last one did: the same powers, stamps moved alike."""
        count = min(len(self._seen), index + 1)
        shift_us = ring[index].time_us - self._seen[-1].time_us
        return all(
            new.power_mw == old.power_mw and abs(new.time_us - old.time_us - shift_us) <= SAME_SHIFT_US
            for new, old in zip(ring[index + 1 - count : index + 1], self._seen[-count:], strict=True)
        )

    def facts(self) -> dict[str, Any]:
        """Plain data: drains, samples, the most one drain returned, gaps, and about how long they were together."""
        return {
            "drains": self._drains,
            "samples": self._samples,
            "depth": self._depth,
            "gaps": self._gaps,
            "gap_s": self._gap_s,
        }

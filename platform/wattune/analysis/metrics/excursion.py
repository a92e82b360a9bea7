"""Excursions of power above a limit: their number, length and height."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from wattune.analysis.metrics.energy import Powers
from wattune.analysis.signals.energy_grid import GRID_S, Piece, steps_of
from wattune.analysis.signals.series import Floats, Ints, Series

WINDOW_S: Final = 0.1
BEGIN_FRAC: Final = 1.05
END_FRAC: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Excursions:
    """One sensor's excursions above one limit, in order."""

    limit_w: float
    start_s: Floats
    """Start of each; a moving mean belongs to the middle of its window."""
    end_s: Floats
    energy_j: Floats
    """Integral of power minus limit inside each."""
    peak_w: Floats
    """The largest moving mean of each."""
    time_frac: float
    """Share of time inside them, of the time for which the moving mean exists."""
    peak_over_limit_frac: float
    """Largest moving mean over the limit, minus 1; 0 where it never is above."""

    @property
    def count(self) -> int:
        """Number of excursions."""
        return len(self.start_s)


def stretches_inside(values: Floats, begin: float, end: float, *, inside: bool = False) -> tuple[Ints, Ints]:
    """Finds stretches of a signal from exceeding `begin` until falling below `end`, which is not larger.

    Args:
        values: The signal.
        begin: Above it a stretch begins.
        end: Below it a stretch ends.
        inside: True if a stretch had begun before the first value.

    Returns:
        Index of the first value of every stretch, and of the first value after it, which is the number of values if the
        stretch does not end.
    """
    above, below = values > begin, values < end
    begins = np.flatnonzero(above[1:] > above[:-1]) + 1
    if len(values) and not below[0] and (inside or above[0]):
        begins = np.concatenate([[0], begins])
    falls = np.append(np.flatnonzero(below[1:] > below[:-1]) + 1, len(values))
    ends = falls[np.searchsorted(falls, begins, side="right")] if len(begins) else begins
    # Of stretches that end at the same value, the first contains all others.
    new = np.concatenate([[True], ends[1:] != ends[:-1]])[: len(ends)]
    return begins[new], ends[new]


class ExcursionFinder:
    """Finds the excursions of one sensor above a limit in its pieces, one after another.

    One begins when the 100 ms moving mean exceeds 1.05 of the limit and ends when it falls below 1.00 of it.
    """

    def __init__(self, limit_w: float) -> None:
        """Takes the limit at the same sensor."""
        self._limit_w = limit_w
        self._inside, self._highest_j, self._num_means = False, 0.0, 0
        # Begin, end, energy between their middles, and peak of every stretch. `found` joins those across pieces.
        self._found: list[tuple[Ints, Ints, Floats, Floats]] = []

    def add(self, piece: Piece) -> float:
        """Looks at the next piece.

        Returns:
            The largest energy of a window that ends in it, minus infinity where none does.
        """
        width = steps_of(WINDOW_S)
        first, rises_j = piece.rises_j(width)
        if not len(rises_j):
            return -np.inf
        limit_j, largest_j = self._limit_w * WINDOW_S, float(rises_j.max())
        self._highest_j, self._num_means = max(self._highest_j, largest_j), self._num_means + len(rises_j)
        if self._inside or largest_j > BEGIN_FRAC * limit_j:
            begin, end = stretches_inside(rises_j, BEGIN_FRAC * limit_j, END_FRAC * limit_j, inside=self._inside)
            self._inside = bool(len(end)) and int(end[-1]) == len(rises_j)
            if len(begin):
                # reduceat takes no index at the end of the array, and a last stretch up to the end needs none.
                edges = np.stack([begin, end], axis=1).ravel()
                peaks_j = np.maximum.reduceat(rises_j, edges[:-1] if self._inside else edges)[::2]
                middle = first + width // 2 - piece.first
                # A mean belongs to the middle of its window. A stretch that continues ends where the next piece begins.
                energy_j = piece.energy_j[end + middle] - piece.energy_j[begin + middle]
                self._found.append((begin + first, end + first, energy_j, peaks_j / WINDOW_S))
        return largest_j

    @property
    def found(self) -> Excursions:
        """All excursions, after the last piece was added."""
        begin, end, energy_j, peak_w = _joined(self._found)
        middle = steps_of(WINDOW_S) // 2
        return Excursions(
            limit_w=self._limit_w,
            start_s=np.asarray((begin + middle) * GRID_S, np.float64),
            end_s=np.asarray((end + middle) * GRID_S, np.float64),
            energy_j=energy_j - self._limit_w * GRID_S * (end - begin),
            peak_w=peak_w,
            time_frac=float((end - begin).sum() / self._num_means),
            peak_over_limit_frac=max(self._highest_j / WINDOW_S / self._limit_w - 1.0, 0.0),
        )


def _joined(stretches: Sequence[tuple[Ints, Ints, Floats, Floats]]) -> tuple[Ints, Ints, Floats, Floats]:
    """Returns all stretches in order, with touching ones joined."""
    if not stretches:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0)
    begin, end, energy_j, peak = (np.concatenate(parts) for parts in zip(*stretches, strict=True))
    new = np.concatenate([[True], begin[1:] != end[:-1]])
    starts = np.flatnonzero(new)
    last = np.append(starts[1:] - 1, len(new) - 1)
    return begin[new], end[last], np.add.reduceat(energy_j, starts), np.maximum.reduceat(peak, starts)


def time_above_frac(series: Series, level: float) -> float:
    """Computes the share of a series' span in which it is above a level, with crossings interpolated."""
    above_s = 0.0
    for some in series.blocks():
        value, above, width_s = some.value, some.value > level, np.diff(some.time_s)
        above_s += float(width_s[above[1:] & above[:-1]].sum())
        crossed = np.flatnonzero(above[1:] != above[:-1])
        before, after = value[crossed], value[crossed + 1]
        share = (np.maximum(before, after) - level) / np.abs(after - before)
        above_s += float((share * width_s[crossed]).sum())
    return above_s / series.span_s


def excursion_metrics(
    powers: Powers, each: Sequence[Excursions | None], above_frac: Sequence[float | None]
) -> dict[str, float]:
    """Excursions of all devices above the enforced limit, or above a stated one.

    `excursion_count`: of all devices. `excursion_time_frac`: device-time inside excursions over device-time.
    `excursion_energy_j`: integral of power minus limit inside them, all devices. `excursion_peak_over_limit_frac`: the
    worst device's largest 100 ms mean over its limit, minus 1, 0 where none is above.
    `over_limit_20ms_time_frac`: share of device-time in which the raw series is above the limit, from a 20 ms ring.

    Args:
        powers: The trial's power traces.
        each: Every trace's excursions, None where it has no limit or its sensor is too slow.
        above_frac: Every trace's share of time above its limit, None without a limit or a 20 ms ring.

    Returns:
        The metrics; each group of them only if every sensor has it.
    """
    metrics: dict[str, float] = {}
    shares = [trace.share for trace in powers.traces]
    found = [one for one in each if one is not None]
    if found and len(found) == len(each):
        metrics |= {
            "excursion_count": float(sum(one.count for one in found)),
            "excursion_time_frac": float(np.average([one.time_frac for one in found], weights=shares)),
            "excursion_energy_j": float(sum(one.energy_j.sum() for one in found)),
            "excursion_peak_over_limit_frac": max(one.peak_over_limit_frac for one in found),
        }
    above = [one for one in above_frac if one is not None]
    if above and len(above) == len(above_frac):
        metrics["over_limit_20ms_time_frac"] = float(np.average(above, weights=shares))
    return metrics

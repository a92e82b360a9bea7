"""Excursions of power above a limit: their number, length and height."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from wattune.analysis.signals.series import Series
from wattune.arrays import Floats, Ints

WINDOW_S: Final = 0.1
"""Length of the moving mean. PCI Express cards may draw 120 % for 100 ms: of the published pairs of level and duration
this is the only one that a 20 ms sensor resolves."""

BEGIN_FRAC: Final = 1.05
"""Share of the limit above which an excursion begins. Ours."""

END_FRAC: Final = 1.0
"""Share of the limit below which it ends. Ours: lower than its begin, so that a wobble about one level counts once."""

_BLOCK: Final = 2**13
"""Samples processed together: few enough for a processor's cache."""


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

    `inside` says that a stretch had begun before the first value. Returns the index of the first value of every
    stretch, and of the first value after it: the number of values if the stretch does not end.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Moving means of a series over `WINDOW_S`, from one window to a later one.

    Power is linear between samples, so that the mean is a parabola between two points at which either end of the window
    meets a sample. The points here are those and the tops of the parabolas: between two points the mean only rises or
    only falls.
    """

    time_s: Floats
    """Start of each window; two neighbours may be equal."""
    mean_w: Floats
    slope_w_per_s: Floats
    """Slope of the mean, linear between points."""
    under: Series
    """The part of the series under the windows."""

    def crossing_s(self, before: Ints, level_w: float) -> Floats:
        """Returns when the mean crosses a level between a point and the next one, exactly."""
        after = before + 1
        width_s = self.time_s[after] - self.time_s[before]
        slope, change = self.slope_w_per_s[before], self.slope_w_per_s[after] - self.slope_w_per_s[before]
        left_w = level_w - self.mean_w[before]
        curve = np.divide(change, width_s, out=np.zeros_like(change), where=width_s > 0)
        # The slope at the crossing has the sign of the change; this form of the root has no cancellation.
        there = np.sign(self.mean_w[after] - self.mean_w[before]) * np.sqrt(
            np.maximum(slope**2 + 2 * curve * left_w, 0.0)
        )
        both = slope + there
        later_s = np.divide(2 * left_w, both, out=np.zeros_like(both), where=both != 0)
        result: Floats = self.time_s[before] + np.clip(later_s, 0.0, width_s)
        return result


def moving_means(series: Series) -> Iterator[Means]:
    """Yields the moving means of a series over `WINDOW_S`, some of them at a time; none if it is shorter."""
    first, last_s = 0, float(series.time_s[-1]) - WINDOW_S
    start_s = float(series.time_s[0])
    while start_s < last_s:
        end_s = last_s if first + _BLOCK >= len(series.time_s) else min(float(series.time_s[first + _BLOCK]), last_s)
        until = int(np.searchsorted(series.time_s, end_s + WINDOW_S)) + 1
        under = Series(series.time_s[first:until], series.value[first:until])
        yield _means(under, start_s, end_s)
        first, start_s = first + _BLOCK, end_s


def _means(under: Series, start_s: float, end_s: float) -> Means:
    """Returns the means of windows that start between two times; all are inside the series."""
    meets = np.concatenate([[start_s, end_s], under.time_s, under.time_s - WINDOW_S])
    time_s = np.sort(meets[(meets >= start_s) & (meets <= end_s)], kind="stable")
    ends_s = np.minimum(time_s + WINDOW_S, under.time_s[-1])
    energy_j = under.cumulative(np.concatenate([time_s, ends_s]))
    mean_w = (energy_j[len(time_s) :] - energy_j[: len(time_s)]) / WINDOW_S
    slope = (np.interp(ends_s, under.time_s, under.value) - np.interp(time_s, under.time_s, under.value)) / WINDOW_S
    turns = np.flatnonzero(slope[:-1] * slope[1:] < 0)
    later_s = np.diff(time_s)[turns] * slope[turns] / (slope[turns] - slope[turns + 1])
    at = turns + 1
    return Means(
        time_s=np.insert(time_s, at, time_s[turns] + later_s),
        mean_w=np.insert(mean_w, at, mean_w[turns] + slope[turns] * later_s / 2),
        slope_w_per_s=np.insert(slope, at, 0.0),
        under=under,
    )


class ExcursionFinder:
    """Finds the excursions of one sensor above a limit in its moving means, one part after another.

    One begins when the 100 ms moving mean exceeds 1.05 of the limit and ends when it falls below 1.00 of it. Both times
    are exact for power that is linear between samples.
    """

    def __init__(self, limit_w: float) -> None:
        self._limit_w = limit_w
        self._inside, self._highest_w, self._span_s = False, -np.inf, 0.0
        # Begin, end, energy between their middles, and peak of every stretch. `found` joins those across parts.
        self._found: list[tuple[Floats, Floats, Floats, Floats]] = []

    def add(self, means: Means) -> None:
        """Looks at the next part."""
        time_s, mean_w = means.time_s, means.mean_w
        highest_w = float(mean_w.max())
        self._highest_w, self._span_s = max(self._highest_w, highest_w), self._span_s + float(time_s[-1] - time_s[0])
        if not self._inside and highest_w <= BEGIN_FRAC * self._limit_w:
            return
        begin, end = stretches_inside(mean_w, BEGIN_FRAC * self._limit_w, END_FRAC * self._limit_w, inside=self._inside)
        self._inside = bool(len(end)) and int(end[-1]) == len(mean_w)
        if not len(begin):
            return
        # A stretch that goes on begins and ends with its part.
        begin_s, end_s = np.full(len(begin), time_s[0]), np.full(len(end), time_s[-1])
        begins, ends = begin > 0, end < len(mean_w)
        begin_s[begins] = means.crossing_s(begin[begins] - 1, BEGIN_FRAC * self._limit_w)
        end_s[ends] = means.crossing_s(end[ends] - 1, END_FRAC * self._limit_w)
        # reduceat takes no index at the end of the array, and a last stretch up to the end needs none.
        edges = np.stack([begin, end], axis=1).ravel()
        peak_w = np.maximum.reduceat(mean_w, edges[:-1] if self._inside else edges)[::2]
        # A mean belongs to the middle of its window.
        energy_j = means.under.cumulative(np.concatenate([end_s, begin_s]) + WINDOW_S / 2)
        self._found.append((begin_s, end_s, energy_j[: len(begin)] - energy_j[len(begin) :], peak_w))

    @property
    def found(self) -> Excursions:
        """All excursions, after the last part was added."""
        begin_s, end_s, energy_j, peak_w = _joined(self._found)
        return Excursions(
            limit_w=self._limit_w,
            start_s=begin_s + WINDOW_S / 2,
            end_s=end_s + WINDOW_S / 2,
            energy_j=energy_j - self._limit_w * (end_s - begin_s),
            peak_w=peak_w,
            time_frac=float((end_s - begin_s).sum()) / self._span_s,
            peak_over_limit_frac=max(self._highest_w / self._limit_w - 1.0, 0.0),
        )


def _joined(stretches: Sequence[tuple[Floats, Floats, Floats, Floats]]) -> tuple[Floats, Floats, Floats, Floats]:
    """Returns all stretches in order, with touching ones joined."""
    if not stretches:
        return np.empty(0), np.empty(0), np.empty(0), np.empty(0)
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

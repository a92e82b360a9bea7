"""A signal of one device over time: interpolation between its samples, and integrals."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from wattune.arrays import Floats

_BLOCK: Final = 2**15
"""Samples, or points of a grid, processed together: few enough for a processor's cache."""


@dataclass(frozen=True, slots=True)
class Series:
    """A signal of one device: finite values at strictly increasing times, linear in between."""

    time_s: Floats
    value: Floats

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return int(self.time_s.nbytes + self.value.nbytes)

    @property
    def span_s(self) -> float:
        """Seconds from the first to the last sample."""
        return float(self.time_s[-1] - self.time_s[0])

    def integral(self) -> float:
        """Integrates by trapezoids over the time stamps, in the value's unit times seconds."""
        # Sums products of blocks: np.trapezoid makes five passes over all samples and as many arrays. Not BLAS
        # products, whose threads would spin on CPUs that training needs.
        each = [np.einsum("i,i->", np.diff(some.time_s), some.value[1:] + some.value[:-1]) for some in self.blocks()]
        return float(sum(each)) / 2

    def gaps_s(self, longer_than_s: float) -> tuple[float, float]:
        """Returns the longest interval between samples, and the sum of all intervals longer than `longer_than_s`."""
        longest_s = total_s = 0.0
        for some in self.blocks():
            width_s = np.diff(some.time_s)
            longest_s = max(longest_s, float(width_s.max()))
            if longest_s > longer_than_s:
                total_s += float(width_s[width_s > longer_than_s].sum())
        return longest_s, total_s

    def blocks(self) -> Iterator["Series"]:
        """Yields the series as shorter ones: each begins with the last sample of the one before."""
        for first in range(0, len(self.time_s) - 1, _BLOCK):
            some = slice(first, first + _BLOCK + 1)
            yield Series(self.time_s[some], self.value[some])

    def mean(self) -> float:
        """Computes the time-weighted mean over the span."""
        return self.integral() / self.span_s

    def cumulative(self, times_s: Floats) -> Floats:
        """Integrates from the first sample to each time inside the span; exact between samples too."""
        area: Floats = np.empty(len(self.time_s))
        area[0] = 0.0
        np.multiply(np.diff(self.time_s), self.value[1:] + self.value[:-1], out=area[1:])
        area /= 2
        area.cumsum(out=area)
        index = np.clip(np.searchsorted(self.time_s, times_s, side="right") - 1, 0, len(area) - 2)
        part, value = times_s - self.time_s[index], self.value[index]
        slope = (self.value[index + 1] - value) / (self.time_s[index + 1] - self.time_s[index])
        return area[index] + part * (value + part * slope / 2)

    def cumulative_on_grid(self, start_s: float, step_s: float, num_steps: int, *, again: int = 0) -> Iterator[Floats]:
        """Computes `cumulative` at `num_steps + 1` times a step apart, all inside the span; much faster.

        It needs no search: the number of grid points before a sample follows from the sample's time. Between two
        samples the integral is a parabola, so three coefficients of an interval give all of its points.

        Yields blocks of neighbouring points, together all of them; each repeats up to `again` points of those before
        it.
        """
        last, done, under = len(self.time_s) - 1, 0, 0.0
        intervals = max(int(_BLOCK * step_s * last / self.span_s), 1)
        block: Floats = np.empty(0)
        halved: Floats = np.empty(0)
        doubled: Floats = np.empty(0)
        for first in range(0, last, intervals):
            until = min(first + intervals, last)
            # From here on times are in steps of the grid, and values are half of a step's area: both save passes.
            at = (self.time_s[first : until + 1] - start_s) * (1 / step_s)
            half = self.value[first : until + 1] * (step_s / 2)
            # Grid points before each sample; those before the first belong to its interval, as do those after the last.
            before = np.ceil(at).astype(np.int64)
            if done == 0 or before[-1] > num_steps:
                before = before.clip(done, num_steps + 1)
            before[0] = done
            before[-1] = num_steps + 1 if until == last else before[-1]
            width = np.diff(at)
            area: Floats = np.empty(len(at))
            area[0] = under
            np.multiply(width, half[1:] + half[:-1], out=area[1:])
            area.cumsum(out=area)
            # The k-th point of this block is area + 2 half (x + k) + slope / 2 (x + k)^2, here in powers of k.
            half_slope = np.diff(half) / width
            x, half = done - at[:-1], half[:-1]
            linear = x * half_slope + half
            constant = area[:-1] + x * (linear + half)
            count, points = np.diff(before), int(before[-1]) - done
            if len(halved) < points:
                doubled = 2.0 * np.arange(points, dtype=np.float64)
                halved = doubled / 4
            repeated = block[max(len(block) - again, 0) :]
            block = np.empty(len(repeated) + points)
            block[: len(repeated)] = repeated
            new = block[len(repeated) :]
            np.multiply(np.repeat(half_slope, count), halved[:points], out=new)
            new += np.repeat(linear, count)
            new *= doubled[:points]
            new += np.repeat(constant, count)
            done, under = int(before[-1]), float(area[-1])
            yield block

    def between(self, start_s: float, end_s: float) -> float:
        """Integrates between two times inside the span."""
        inside = slice(*np.searchsorted(self.time_s, [start_s, end_s]))
        ends = np.interp([start_s, end_s], self.time_s, self.value)
        time_s, value = self.time_s[inside], self.value[inside]
        if not len(time_s):
            return float((end_s - start_s) * ends.sum()) / 2
        whole = Series(time_s, value).integral() if len(time_s) > 1 else 0.0
        before = (time_s[0] - start_s) * (ends[0] + value[0]) / 2
        after = (end_s - time_s[-1]) * (value[-1] + ends[1]) / 2
        return whole + float(before + after)

    def clip(self, start_s: float, end_s: float) -> "Series | None":
        """Returns the part between two times, its ends interpolated, never extrapolated; None if nothing is left."""
        start_s, end_s = max(start_s, float(self.time_s[0])), min(end_s, float(self.time_s[-1]))
        if end_s <= start_s:
            return None
        if start_s == self.time_s[0] and end_s == self.time_s[-1]:
            return self
        first, last = np.searchsorted(self.time_s, start_s, side="right"), np.searchsorted(self.time_s, end_s)
        ends = np.interp([start_s, end_s], self.time_s, self.value)
        return Series(
            np.concatenate([[start_s], self.time_s[first:last], [end_s]]),
            np.concatenate([ends[:1], self.value[first:last], ends[1:]]),
        )


def series(time_s: Floats, value: Floats) -> Series | None:
    """Makes a series of readings in any order; values that are not finite and repeated times are dropped.

    None where fewer than two readings are left.
    """
    good = np.isfinite(value)
    good &= np.isfinite(time_s)
    if not good.all():
        time_s, value = time_s[good], value[good]
    if np.any(time_s[1:] <= time_s[:-1]):
        time_s, first = np.unique(time_s, return_index=True)
        value = value[first]
    return Series(time_s, value) if len(time_s) >= 2 else None

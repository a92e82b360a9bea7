"""A signal of one device over time: what is between its samples, and what lies under it."""

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

_BLOCK: Final = 2**13
"""Intervals worked on together: what they make on a grid of a few points each stays in a processor's cache."""


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
        """Trapezoid over the time stamps, in the value's unit times seconds."""
        return float(np.trapezoid(self.value, self.time_s))

    def mean(self) -> float:
        """Time-weighted mean over the span."""
        return self.integral() / self.span_s

    def cumulative(self, times_s: Floats) -> Floats:
        """The integral from the first sample to each of some times inside the span, exact between samples too."""
        width = np.diff(self.time_s)
        slope = np.diff(self.value) / width
        whole = np.concatenate([[0.0], np.cumsum(width * (self.value[1:] + self.value[:-1]) / 2)])
        index = np.clip(np.searchsorted(self.time_s, times_s, side="right") - 1, 0, len(width) - 1)
        part = times_s - self.time_s[index]
        result: Floats = whole[index] + part * (self.value[index] + part * slope[index] / 2)
        return result

    def cumulative_on_grid(self, start_s: float, step_s: float, num_steps: int) -> Floats:
        """`cumulative` at `num_steps + 1` times a step apart, which all lie inside the span; much faster.

        Nothing is searched for: how many grid points lie before a sample follows from the sample's time.
        """
        result: Floats = np.empty(num_steps + 1)
        last, done, under = len(self.time_s) - 1, 0, 0.0
        for first in range(0, last, _BLOCK):
            until = min(first + _BLOCK, last)
            time_s, value = self.time_s[first : until + 1], self.value[first : until + 1]
            width = np.diff(time_s)
            # Grid points before each sample; those before the first belong to its interval, as do those after the last.
            before = np.ceil((time_s - start_s) / step_s).clip(done, num_steps + 1).astype(np.int64)
            before[0] = done
            before[-1] = num_steps + 1 if until == last else before[-1]
            count = np.diff(before)
            area = np.concatenate([[under], under + np.cumsum(width * (value[1:] + value[:-1]) / 2)])
            part = start_s + step_s * np.arange(done, before[-1])
            part -= np.repeat(time_s[:-1], count)
            block = np.repeat(np.diff(value) / (2 * width), count)
            block *= part
            block += np.repeat(value[:-1], count)
            block *= part
            block += np.repeat(area[:-1], count)
            result[done : int(before[-1])] = block
            done, under = int(before[-1]), float(area[-1])
        return result

    def clip(self, start_s: float, end_s: float) -> "Series | None":
        """The part between two times, its ends interpolated, never extrapolated; None where nothing is left."""
        start_s, end_s = max(start_s, float(self.time_s[0])), min(end_s, float(self.time_s[-1]))
        if end_s <= start_s:
            return None
        inside = slice(*np.searchsorted(self.time_s, [start_s, end_s], side="right"))
        time_s = np.concatenate([[start_s], self.time_s[inside], [end_s]])
        value = np.concatenate(
            [
                [np.interp(start_s, self.time_s, self.value)],
                self.value[inside],
                [np.interp(end_s, self.time_s, self.value)],
            ]
        )
        return series(time_s, value)


def series(time_s: Floats, value: Floats) -> Series | None:
    """A series of readings in any order; values that are not finite and repeated times are dropped.

    Returns:
        The series, None where fewer than two readings are left.
    """
    good = np.isfinite(value)
    good &= np.isfinite(time_s)
    if not good.all():
        time_s, value = time_s[good], value[good]
    if np.any(time_s[1:] <= time_s[:-1]):
        time_s, first = np.unique(time_s, return_index=True)
        value = value[first]
    return Series(time_s, value) if len(time_s) >= 2 else None


def weights_s(time_s: Floats, start_s: float, end_s: float) -> Floats:
    """What each sample of a signal weighs in its integral between two times: the sum of weight times value.

    The signal is linear between samples, as in `Series`, and nothing outside the first and the last.

    Args:
        time_s: Strictly increasing.
        start_s: Where the integral begins.
        end_s: Where it ends.
    """
    weight: Floats = np.zeros(len(time_s))
    width_s = np.diff(time_s)
    if len(width_s):
        # Where in each interval the integral begins and ends, as shares of the interval.
        begin = np.clip((start_s - time_s[:-1]) / width_s, 0.0, 1.0)
        end = np.clip((end_s - time_s[:-1]) / width_s, 0.0, 1.0)
        later = width_s * np.maximum(end**2 - begin**2, 0.0) / 2
        weight[1:] += later
        weight[:-1] += width_s * np.maximum(end - begin, 0.0) - later
    return weight

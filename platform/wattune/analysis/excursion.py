"""Excursions: how often, how long and how far power goes above a limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from wattune.analysis.energy import Powers
from wattune.analysis.grid import GRID_S, GridEnergy
from wattune.analysis.series import Floats, Ints, Series

WINDOW_S: Final = 0.1
BEGIN_FRAC: Final = 1.05
END_FRAC: Final = 1.0

_BLOCK: Final = 2**15
"""Samples looked at together, few enough for a processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excursions:
    """One sensor's excursions above one limit, in order."""

    limit_w: float
    start_s: Floats
    """When each began; a moving mean belongs to the middle of its window."""
    end_s: Floats
    energy_j: Floats
    """Integral of power minus limit inside each."""
    peak_w: Floats
    """The largest moving mean of each."""
    time_frac: float
    """Share of the time the moving mean exists that is inside them."""
    peak_over_limit_frac: float
    """Largest moving mean over the limit, minus 1; 0 where it never is above."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.start_s)


def hysteresis(values: Floats, begin: float, end: float, *, inside: bool = False) -> npt.NDArray[np.bool_]:
    """Where a signal is inside: from exceeding `begin` until falling below `end`; as told before either happens."""
    event = np.where(values > begin, 1, np.where(values < end, -1, 0))
    latest = np.maximum.accumulate(np.where(event != 0, np.arange(len(values)), 0))
    event[:1] = np.where(event[:1] == 0, 1 if inside else -1, event[:1])
    found: npt.NDArray[np.bool_] = event[latest] == 1
    return found


def excursions(grid: GridEnergy, limit_w: float) -> Excursions | None:
    """The excursions of one sensor above a limit, None where its sensor does not resolve 100 ms.

    One begins when the 100 ms moving mean exceeds 1.05 of the limit and ends when it falls below 1.00 of it.

    Args:
        grid: The sensor's energy.
        limit_w: The limit at the same sensor.
    """
    if not grid.resolves(WINDOW_S):
        return None
    # Begin, end and peak of every stretch inside; what goes on in the next block is joined afterwards.
    stretches: list[tuple[Ints, Ints, Floats]] = []
    inside, highest_w, num_means = False, 0.0, 0
    for first, means_w in grid.blocks(WINDOW_S):
        highest_w, num_means = max(highest_w, float(means_w.max())), first + len(means_w)
        if not inside and means_w.max() <= BEGIN_FRAC * limit_w:
            continue
        where = hysteresis(means_w, BEGIN_FRAC * limit_w, END_FRAC * limit_w, inside=inside)
        inside = bool(where[-1])
        edges = np.diff(where.astype(np.int8), prepend=0, append=0)
        begin, end = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        if len(begin):
            peaks_w = np.maximum.reduceat(np.append(means_w, -np.inf), np.stack([begin, end], axis=1).ravel())[::2]
            stretches.append((begin + first, end + first, peaks_w))
    begins, ends, peaks_w = _joined(stretches)
    middle = round(WINDOW_S / 2 / GRID_S)
    above_j = grid.energy_j[ends + middle] - grid.energy_j[begins + middle] - limit_w * GRID_S * (ends - begins)
    return Excursions(
        limit_w=limit_w,
        start_s=np.asarray(grid.start_s + (begins + middle) * GRID_S, np.float64),
        end_s=np.asarray(grid.start_s + (ends + middle) * GRID_S, np.float64),
        energy_j=above_j,
        peak_w=peaks_w,
        time_frac=float((ends - begins).sum() / num_means),
        peak_over_limit_frac=max(highest_w / limit_w - 1.0, 0.0),
    )


def _joined(stretches: Sequence[tuple[Ints, Ints, Floats]]) -> tuple[Ints, Ints, Floats]:
    """All stretches in order, those that touch made one."""
    if not stretches:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    begin, end, peak = (np.concatenate(parts) for parts in zip(*stretches, strict=True))
    new = np.concatenate([[True], begin[1:] != end[:-1]])
    last = np.append(np.flatnonzero(new)[1:] - 1, len(new) - 1)
    return begin[new], end[last], np.maximum.reduceat(peak, np.flatnonzero(new))


def time_above_frac(series: Series, level: float) -> float:
    """Share of a series' span in which it is above a level, crossings interpolated."""
    above_s = 0.0
    for first in range(0, len(series.value) - 1, _BLOCK):
        value, time_s = series.value[first : first + _BLOCK + 1] - level, series.time_s[first : first + _BLOCK + 1]
        before, after = value[:-1], value[1:]
        rise = np.abs(after - before)
        part = np.divide(np.maximum(np.maximum(before, after), 0.0), rise, out=np.zeros_like(rise), where=rise > 0)
        share = np.where((before > 0) & (after > 0), 1.0, np.where((before <= 0) & (after <= 0), 0.0, part))
        above_s += float((share * np.diff(time_s)).sum())
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
        above_frac: Every trace's share of time above its limit, None where it has none or is no 20 ms ring.

    Returns:
        The metrics; a group of them only where every sensor has it.
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

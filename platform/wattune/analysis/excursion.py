"""Excursions: how often, how long and how far power goes above a limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from wattune.analysis.align import Aligned, Floats, Series
from wattune.analysis.energy import Powers
from wattune.analysis.power import GRID_S, GridEnergy, enforced_limit_w, resolves_20ms

WINDOW_S: Final = 0.1
BEGIN_FRAC: Final = 1.05
END_FRAC: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Excursions:
    """One sensor's excursions above one limit."""

    count: int
    time_frac: float
    """Of the time the moving mean exists."""
    energy_j: float
    """Integral of power minus limit inside them."""
    peak_over_limit_frac: float
    """Largest moving mean over the limit, minus 1; 0 where it never is above."""


def hysteresis(values: Floats, begin: float, end: float) -> npt.NDArray[np.bool_]:
    """Where a signal is inside: from exceeding `begin` until falling below `end`; outside before either happens."""
    event = np.where(values > begin, 1, np.where(values < end, -1, 0))
    latest = np.maximum.accumulate(np.where(event != 0, np.arange(len(values)), 0))
    inside: npt.NDArray[np.bool_] = event[latest] == 1
    return inside


def excursions(grid: GridEnergy, limit_w: float) -> Excursions | None:
    """The excursions of one sensor above a limit, None where its sensor does not resolve 100 ms.

    One begins when the 100 ms moving mean exceeds 1.05 of the limit and ends when it falls below 1.00 of it. A moving
    mean belongs to the middle of its window.

    Args:
        grid: The sensor's energy.
        limit_w: The limit at the same sensor.
    """
    means_w = grid.means_w(WINDOW_S)
    if means_w is None:
        return None
    inside = hysteresis(means_w, BEGIN_FRAC * limit_w, END_FRAC * limit_w)
    edges = np.diff(np.concatenate([[0], inside.astype(np.int8), [0]]))
    begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    middle = round(WINDOW_S / 2 / GRID_S)
    energy_j = grid.energy_j[ends + middle] - grid.energy_j[begins + middle] - limit_w * GRID_S * (ends - begins)
    return Excursions(
        count=len(begins),
        time_frac=float(inside.mean()),
        energy_j=float(energy_j.sum()),
        peak_over_limit_frac=max(float(means_w.max()) / limit_w - 1.0, 0.0),
    )


def time_above_frac(series: Series, level: float) -> float:
    """Share of a series' span in which it is above a level, crossings interpolated."""
    before, after = series.value[:-1] - level, series.value[1:] - level
    width = np.diff(series.time_s)
    rise = np.abs(after - before)
    part = np.divide(np.maximum(np.maximum(before, after), 0.0), rise, out=np.zeros_like(rise), where=rise > 0)
    share = np.where((before > 0) & (after > 0), 1.0, np.where((before <= 0) & (after <= 0), 0.0, part))
    return float((share * width).sum() / width.sum())


def excursion_metrics(
    aligned: Aligned, powers: Powers, grids: Sequence[GridEnergy], *, power_limit_w: float | None
) -> dict[str, float]:
    """Excursions of all devices above the enforced limit, or above a stated one.

    `excursion_count`: of all devices. `excursion_time_frac`: device-time inside excursions over device-time.
    `excursion_energy_j`: integral of power minus limit inside them, all devices. `excursion_peak_over_limit_frac`: the
    worst device's largest 100 ms mean over its limit, minus 1, 0 where none is above.
    `over_limit_20ms_time_frac`: share of device-time in which the raw series is above the limit, from a 20 ms ring.

    Args:
        aligned: The trial.
        powers: Its power traces.
        grids: `wattune.analysis.power.common_grid` of the traces; may be empty where they are not usable.
        power_limit_w: A limit for one device instead of the enforced one.

    Returns:
        The metrics; nothing unless every sensor has a limit and covers the window.
    """
    if not powers.usable:
        return {}
    limits_w = [
        enforced_limit_w(aligned, trace) if power_limit_w is None else power_limit_w * trace.share
        for trace in powers.traces
    ]
    known_w = [limit for limit in limits_w if limit]
    if len(known_w) < len(limits_w):
        return {}
    metrics: dict[str, float] = {}
    shares = [trace.share for trace in powers.traces]
    each = [found for grid, limit in zip(grids, known_w, strict=True) if (found := excursions(grid, limit)) is not None]
    if len(each) == len(grids):
        metrics |= {
            "excursion_count": float(sum(found.count for found in each)),
            "excursion_time_frac": float(np.average([found.time_frac for found in each], weights=shares)),
            "excursion_energy_j": sum(found.energy_j for found in each),
            "excursion_peak_over_limit_frac": max(found.peak_over_limit_frac for found in each),
        }
    if all(resolves_20ms(trace) for trace in powers.traces):
        above = [time_above_frac(trace.series, limit) for trace, limit in zip(powers.traces, known_w, strict=True)]
        metrics["over_limit_20ms_time_frac"] = float(np.average(above, weights=shares))
    return metrics

"""Period, delay, window and gain of sensors, fitted to a recording of loads with known times; tables in, figures out.

A power signal is modelled as y(t) = a + b * (mean of u over window_s that ended delay_s before t), u being 1 while the
load's spans say it works, else 0. All waves share `delay_s` and `window_s`; a and b belong to each wave, since a device
at its limit gives no two waves the same power. The energy counter is the reference for a signal's integral.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wattune.analysis.signals.energy_grid import peak_w
from wattune.analysis.signals.series import Series
from wattune.arrays import Floats
from wattune.errors import TelemetryError
from wattune.telemetry.backend import taken_ns
from wattune.units import NS_PER_S

TimedValues = tuple[Floats, Floats]
"""Times in seconds, and values."""

SIGNALS: Final[dict[str, tuple[str, str]]] = {
    "ring": ("ring", "power_w"),
    "instant": ("fast", "power_instant_w"),
    "average": ("slow", "power_average_w"),
}
"""Power signals by name: their tier and column."""

WINDOWS_S: Final[dict[str, float]] = {"100ms": 0.1, "1s": 1.0}
"""Windows whose moving mean of the ring is held against its highest sample."""

LEAD_S: Final = 0.5
TAIL_S: Final = 1.9
ANSWERED_S: Final = 1.2
"""A wave's readings count from `LEAD_S` before its first to `TAIL_S` after its last edge; the slowest signal known (a
mean of 1 s, refreshed every 0.1 s) has reported all of it `ANSWERED_S` after that edge."""

LONGEST_S: Final = 2.5
"""Longest window that is looked for. Delays are looked for from `EARLIEST_S` to `LATEST_S`."""
EARLIEST_S: Final = -0.2
LATEST_S: Final = 1.5
SHORTEST_S: Final = 0.002
"""Shortest window that is looked for; a point value comes out as this."""

FRESH_FRAC: Final = 0.8
"""Share of readings with a new value above which the polling is slower than the sensor."""

LEAST_COUNTS: Final = 10
"""Readings of a counter that a link's rate is taken from, at least: between two of them it may have begun or ended."""

BOOTSTRAPS: Final = 10_000
CONFIDENCE_FRAC: Final = 0.95


Wave = tuple[float, Floats, Floats]
"""One square wave, as its spans have it: its period in seconds, and the times at which work began and ended, on the
recording's monotonic clock less its origin."""


def origin_ns(spans: pa.Table) -> int:
    """The monotonic time from which a calibration counts seconds: its first span."""
    return int(pc.min(spans["start_mono_ns"]).as_py())


def waves_of(spans: pa.Table, plan: Sequence[tuple[float, int]]) -> list[Wave]:
    """The waves in a load's spans.

    Steps are numbered from 0 through all waves; `plan` has the period in seconds and the number of periods of each.
    Raises `TelemetryError` where the spans are not those of such a load.
    """
    num_steps = sum(count for _, count in plan)
    if spans.num_rows != num_steps or pc.unique(spans["step"]).sort().to_pylist() != list(range(num_steps)):
        raise TelemetryError(f"the load left {spans.num_rows} spans, its waves are {num_steps} steps; run it again")
    spans, first_ns = spans.sort_by("step"), origin_ns(spans)
    start_s, end_s = ((spans[f"{end}_mono_ns"].to_numpy() - first_ns) / NS_PER_S for end in ("start", "end"))
    bounds = np.cumsum([0, *(count for _, count in plan)])
    return [
        (period_s, start_s[first:last], end_s[first:last])
        for (period_s, _), (first, last) in zip(plan, pairwise(bounds), strict=True)
    ]


def fit(
    tables: Mapping[str, pa.Table], device: str, spans: pa.Table, plan: Sequence[tuple[float, int]]
) -> dict[str, Any]:
    """Fits every power signal a recording has. The tables begin before the first wave and end after the last one.

    Returns plain data:

    - `limits`, what a study reads: by tier the `finest_window_s` whose mean its signal resolves, which is two of its
      periods, and at least its own window.
    - `signals`, by name: `sensor_period_s`, the usual time from one new value to the next; `delay_s` from the end of a
      window to the report of its mean; `window_s`, that window's length; `gain_frac`, the integral over that of the
      energy counter over all waves, None without a counter; `explained_frac`, the share of the signal's variance that
      the model explains (R squared): near 1 the load was square and the fit holds.
    - `waves`, one after another: `period_s`; `mean_w` by the energy counter, rests before and after included;
      `peaks_w`, the highest value by `20ms` (the ring's samples), `100ms` and `1s` (its moving means), `instant`,
      `average`; `under_report_frac`, by how much each of them falls short of the highest value of the finest signal;
      `gain_frac`, each signal's integral over the rise of the energy counter; `energy_error_frac`, how far that of
      the ring is from 1.

    Raises `TelemetryError`: no power signal was recorded, or the spans do not fit the plan.
    """
    waves, first_ns = waves_of(spans, plan), origin_ns(spans)
    counter = _changes(*_readings(tables, device, "slow", "energy_j", first_ns))
    readings = {
        name: found
        for name, (tier, column) in SIGNALS.items()
        if len((found := _readings(tables, device, tier, column, first_ns))[0]) > 2
    }
    signals = {
        name: _fit_signal(*found, waves, counter, polled=name != "ring")
        for name, found in readings.items()
        if _moves(found, waves)
    }
    if not signals:
        raise TelemetryError(
            f"no power signal of {device} moved while the load ran; see that the load ran on that device, and what "
            "the sampler's manifest says of its capabilities"
        )
    finest_s = {name: max(2 * one["sensor_period_s"], one["window_s"]) for name, one in signals.items()}
    return {
        "limits": {SIGNALS[name][0]: {"finest_window_s": window_s} for name, window_s in finest_s.items()},
        "signals": signals,
        "waves": [_fit_wave(wave, readings, counter) for wave in waves],
    }


def fit_overhead(step_s: Sequence[tuple[Floats, Floats]], *, seed: int = 0) -> dict[str, float]:
    """Computes the cost of sampling to a load: the `ratio` of mean step times with sampler on and off.

    `low` and `high` are the ends of the interval that holds it with `CONFIDENCE_FRAC`, of `num_pairs` and `num_steps`.
    Each pair of neighbouring blocks gives one ratio, so that slow drift (warming) cancels; the estimate is their
    geometric mean and the interval the percentile bootstrap over pairs (Efron and Tibshirani, "An Introduction to the
    Bootstrap", 1993, chapter 13). Each pair has the step times with the sampler off, and on. Raises `TelemetryError`
    where there are fewer than two pairs with steps in both blocks.
    """
    whole = [(off, on) for off, on in step_s if len(off) and len(on)]
    if len(whole) < 2:
        raise TelemetryError(f"overhead needs two pairs of blocks with steps in both, got {len(whole)}; measure longer")
    logs = np.array([np.log(on.mean() / off.mean()) for off, on in whole])
    picks = np.random.default_rng(seed).integers(len(logs), size=(BOOTSTRAPS, len(logs)))
    outside = (1 - CONFIDENCE_FRAC) / 2
    low, high = np.quantile(logs[picks].mean(axis=1), [outside, 1 - outside])
    return {
        "ratio": float(np.exp(logs.mean())),
        "low": float(np.exp(low)),
        "high": float(np.exp(high)),
        "num_pairs": len(whole),
        "num_steps": sum(len(off) + len(on) for off, on in whole),
    }


def fit_link(tables: Mapping[str, pa.Table], device: str, columns: Sequence[str], spans: pa.Table) -> float | None:
    """Measures the most a link carries in one direction, by the sensor's counters while a load without pause ran.

    `columns` are cumulative ones of the `counter` tier, one a direction. Returns bytes a second of the busier
    direction, from the first to the last reading inside the load; None where a counter was not read, fell, or did not
    move: it does not count this link.
    """
    first_ns = origin_ns(spans)
    end_s = (int(pc.max(spans["end_mono_ns"]).as_py()) - first_ns) / NS_PER_S
    rates = []
    for column in columns:
        time_s, value = _readings(tables, device, "counter", column, first_ns)
        inside = (time_s >= 0) & (time_s <= end_s)
        if inside.sum() < LEAST_COUNTS or np.any(np.diff(value[inside]) < 0):
            return None
        rates.append(float(np.ptp(value[inside]) / np.ptp(time_s[inside])))
    fastest = max(rates, default=0.0)
    return fastest if fastest > 0 else None


def _readings(tables: Mapping[str, pa.Table], device: str, tier: str, column: str, first_ns: int) -> TimedValues:
    """Times in seconds and values of one column, in order; ring samples at the time the driver took them."""
    if tier not in tables:
        return np.empty(0), np.empty(0)
    table = tables[tier].filter(
        pc.and_(pc.equal(tables[tier]["device"].cast(pa.string()), device), pc.is_valid(tables[tier][column]))
    )
    at_ns, first = np.unique(taken_ns(tier, table), return_index=True)
    return (at_ns - first_ns) / NS_PER_S, table[column].to_numpy()[first].astype(np.float64)


def _changes(time_s: Floats, value: Floats) -> TimedValues:
    """Dates every change of a polled value: in the middle between the last old and the first new reading.

    Where nearly every reading is new the sensor is faster than the polling, and each reading stands for itself.
    """
    new = np.flatnonzero(np.diff(value)) + 1
    if len(new) > FRESH_FRAC * len(value):
        return time_s, value
    return (time_s[new] + time_s[new - 1]) / 2, value[new]


def _period_s(time_s: Floats) -> float:
    """Computes the usual interval: the mean of those near the median.

    Values that happened to repeat double an interval, and polling rounds each one.
    """
    intervals_s = np.diff(time_s)
    median_s = np.median(intervals_s)
    near = intervals_s[(intervals_s > 0.5 * median_s) & (intervals_s < 1.5 * median_s)]
    return float(near.mean() if len(near) else median_s)


def _moves(readings: TimedValues, waves: Sequence[Wave]) -> bool:
    """Returns true if a signal changed during some wave: that of an idle device may move before and after them."""
    time_s, value = readings
    spans = (_span(wave) for wave in waves)
    inside = (value[(time_s >= start_s) & (time_s <= end_s)] for start_s, end_s in spans)
    return any(len(own) and np.ptp(own) > 0 for own in inside)


def _fit_signal(
    time_s: Floats, value: Floats, waves: Sequence[Wave], counter: TimedValues, *, polled: bool
) -> dict[str, Any]:
    at_s, reported = _changes(time_s, value) if polled else (time_s, value)
    parts = []
    for wave in waves:
        start_s, end_s = _span(wave)
        inside = (at_s >= start_s) & (at_s <= end_s)
        if inside.sum() > 2 and np.ptp(reported[inside]) > 0:
            parts.append((wave, at_s[inside], reported[inside]))
    if not parts:
        raise TelemetryError(f"a power signal has {len(at_s)} new values, too few inside any wave; run longer waves")

    def unexplained(delay_s: float, window_s: float) -> float:
        return sum(_residual(_worked(wave, when - delay_s, window_s), watts) for wave, when, watts in parts)

    delay_s, window_s = _minimum(unexplained)
    spread = sum(float(((watts - watts.mean()) ** 2).sum()) for _, _, watts in parts)
    energies = [one for wave in waves if (one := _energies(wave, (time_s, value), counter)) is not None]
    return {
        "sensor_period_s": _period_s(at_s),
        "delay_s": delay_s,
        "window_s": window_s,
        "gain_frac": sum(one[0] for one in energies) / sum(one[1] for one in energies) if energies else None,
        "explained_frac": 1 - unexplained(delay_s, window_s) / spread,
    }


def _span(wave: Wave) -> tuple[float, float]:
    _, start_s, end_s = wave
    return float(start_s[0]) - LEAD_S, float(end_s[-1]) + TAIL_S


def _worked(wave: Wave, at_s: Floats, window_s: float) -> Floats:
    """The share of the window that ends at each time in which the load worked."""
    _, start_s, end_s = wave
    edges_s = np.stack([start_s, end_s], axis=1).ravel()
    worked_s = np.stack([np.zeros(len(start_s)), end_s - start_s], axis=1).ravel().cumsum()
    share: Floats = np.interp(at_s, edges_s, worked_s) - np.interp(at_s - window_s, edges_s, worked_s)
    return share / window_s


def _residual(share: Floats, watts: Floats) -> float:
    """Returns the sum of squares that the best straight line through watts over share leaves."""
    share, watts = share - share.mean(), watts - watts.mean()
    power = float(share @ share)
    slope = float(share @ watts) / power if power > 0 else 0.0
    rest = watts - slope * share
    return float(rest @ rest)


def _minimum(unexplained: Callable[[float, float], float]) -> tuple[float, float]:
    """Delay and window that leave least: the best of a grid, then steps that halve where none helps."""
    delays_s = np.arange(EARLIEST_S, LATEST_S, 0.02)
    windows_s = np.geomspace(SHORTEST_S, LONGEST_S, 24)
    best = min((unexplained(delay_s, window_s), delay_s, window_s) for delay_s in delays_s for window_s in windows_s)
    step_s = np.array([0.01, best[2] / 4])
    while step_s.max() > 1e-4:
        trials = [best[1:] + step_s * move for move in ((1, 0), (-1, 0), (0, 1), (0, -1), (-1, 1), (1, -1))]
        found = min((unexplained(d, w), float(d), float(w)) for d, w in trials if w >= SHORTEST_S)
        if found[0] < best[0]:
            best = found
        else:
            step_s /= 2
    return float(best[1]), float(best[2])


def _integral(time_s: Floats, value: Floats, start_s: float, end_s: float) -> float:
    """Trapezoid between two times, both inside the series."""
    inside = (time_s > start_s) & (time_s < end_s)
    ends = np.interp([start_s, end_s], time_s, value)
    return float(np.trapezoid([ends[0], *value[inside], ends[1]], [start_s, *time_s[inside], end_s]))


def _energies(wave: Wave, signal: TimedValues, counter: TimedValues) -> tuple[float, float, float] | None:
    """A wave's energy by a signal and by the counter, and the time between the two readings of that.

    Both readings are made while the device rests, where it matters little how old they are: the last before the wave,
    and the first after every signal has reported the end of it. Returns joules by each, and seconds; None where the
    counter or the signal does not span the wave.
    """
    (time_s, value), (at_s, energy_j), (_, begins_s, ends_s) = signal, counter, wave
    before = np.flatnonzero(at_s <= begins_s[0])
    after = np.flatnonzero(at_s >= ends_s[-1] + ANSWERED_S)
    if not len(before) or not len(after):
        return None
    first, last = before[-1], after[0]
    start_s, end_s = float(at_s[first]), float(at_s[last])
    if start_s < begins_s[0] - TAIL_S or end_s > ends_s[-1] + 2 * TAIL_S:
        return None  # another wave may lie in between
    if time_s[0] > start_s or time_s[-1] < end_s:
        return None
    return _integral(time_s, value, start_s, end_s), float(energy_j[last] - energy_j[first]), end_s - start_s


def _fit_wave(wave: Wave, readings: Mapping[str, TimedValues], counter: TimedValues) -> dict[str, Any]:
    start_s, end_s = _span(wave)
    peaks_w: dict[str, float] = {}
    gains: dict[str, float] = {}
    mean_w = None
    for name, (time_s, value) in readings.items():
        inside = (time_s >= start_s) & (time_s <= end_s)
        if inside.sum() < 2:
            continue
        peaks_w["20ms" if name == "ring" else name] = float(value[inside].max())
        if name == "ring":
            peaks_w |= {
                label: highest_w
                for label, window_s in WINDOWS_S.items()
                if (highest_w := peak_w(Series(time_s[inside], value[inside]), window_s)) is not None
            }
        energies = _energies(wave, (time_s, value), counter)
        if energies is not None:
            signal_j, counter_j, duration_s = energies
            gains[name], mean_w = signal_j / counter_j, counter_j / duration_s
    reference_w = peaks_w.get("20ms", peaks_w.get("instant"))
    short = {} if reference_w is None else {name: 1 - one_w / reference_w for name, one_w in peaks_w.items()}
    return {
        "period_s": wave[0],
        "mean_w": mean_w,
        "peaks_w": peaks_w,
        "under_report_frac": short,
        "gain_frac": gains,
        "energy_error_frac": abs(gains["ring"] - 1) if "ring" in gains else None,
    }

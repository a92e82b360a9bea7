"""Throttling: clock lost for a cause. Raw counters are separate metrics, because they also run if no clock is lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from wattune.analysis.metrics.energy import PowerTrace, counter_span, enforced_limit_w
from wattune.analysis.metrics.phases import COMPUTING, IN_STEPS, Segments
from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.energy_grid import resolves
from wattune.analysis.signals.readings import Readings, all_known, cause_column
from wattune.analysis.signals.series import Series
from wattune.arrays import Floats
from wattune.schema import THROTTLE_REASON_BITS, DeviceKey
from wattune.units import NS_PER_S

LOST_BELOW_FRAC: Final = 0.98
"""Share of the maximum clock below which clock counts as lost. Ours: clocks step by 15 MHz of 1,980 on H200, so this is
the third step."""

NEAR_CAP_FRAC: Final = 0.95
"""Share of the enforced limit from which the power before a reading counts as at the cap.

Ours, from recordings. On five H200s that matrix products hold at their cap (`tests/golden`: `dp4`, `idle_busy`), 93 to
97 % of the 200 ms means are above it. The reason bit is set in every reading of every recording, also where such means
are below half of the limit.
"""

CAP_WINDOW_S: Final = 0.2
"""Time before a reading over which power is averaged. Ours: two updates of the slowest sensor that counts, the H200's
instant power of 100 ms."""

COUNTER_STEP_S: Final = 0.1
"""Most time a throttle counter may be ahead of its reading: it steps every 100 ms (measured on H200)."""

_COUNTERS: Final = {
    "power_cap_active_frac": ("throttle_power_ns", 1),
    "thermal_active_frac": ("throttle_thermal_ns", 2),
    "hw_active_frac": ("throttle_hw_ns", 1),
}
"""Column by metric, and the number of causes it sums: if software and hardware slow a device at once, the thermal
column runs twice as fast as time (`wattune.telemetry.nvml.backend`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """One device's shares of time and clock."""

    by_cause_frac: dict[str, float]
    """Without `power` if nobody knows whether power was near the cap."""
    loss_by_cause_frac: dict[str, float]
    any_frac: float | None
    """None if a cause is unknown."""
    loss_frac: float | None
    computing_loss_frac: float | None
    """Lost clock while the device computes, over that time; None where either is unknown."""
    deficit_frac: float


def near_cap(power: Series, limit_w: float, at_s: Floats) -> Floats:
    """Tells at which times a device was at its power cap.

    1 where the mean power over `CAP_WINDOW_S` up to a time is at least `NEAR_CAP_FRAC` of the limit of the same sensor,
    else 0. At the ends of the series the part of the mean counts that the series covers. NaN beyond that.
    """
    start_s, end_s = float(power.time_s[0]), float(power.time_s[-1])
    until_s = np.clip(at_s, start_s, end_s)
    since_s = np.clip(at_s - CAP_WINDOW_S, start_s, end_s)
    until_j, since_j = np.split(power.cumulative(np.concatenate([until_s, since_s])), 2)
    width_s = until_s - since_s
    value_w = np.interp(until_s, power.time_s, power.value)
    mean_w = np.divide(until_j - since_j, width_s, out=value_w, where=width_s > 0)
    near = (mean_w >= NEAR_CAP_FRAC * limit_w).astype(np.float64)
    near[(at_s < start_s - CAP_WINDOW_S) | (at_s > end_s + CAP_WINDOW_S)] = np.nan
    return near


def with_cap_causes(readings: Readings, power: Series | None, limit_w: float | None) -> Readings:
    """Returns readings whose power cause is 1 only near the cap.

    The reason bit of the power cap alone says nothing: it is set through any busy load. If power or limit is unknown,
    the cause is left out, unless the bit was never set.
    """
    name = cause_column("power")
    if name not in readings.columns:
        return readings
    columns = {key: column for key, column in readings.columns.items() if key != name}
    if power is not None and limit_w:
        near = near_cap(power, limit_w, readings.time_s)
        # A reading without the bit has no such cause, whatever the power was.
        columns[name] = np.where(readings.columns[name] == 0.0, 0.0, readings.columns[name] * near)
    elif not np.any(readings.columns[name] == 1.0):
        columns[name] = readings.columns[name]
    return Readings(readings.time_s, columns)


def with_caps(aligned: Aligned, trace: PowerTrace | None, readings: Readings) -> Readings:
    """Returns a device's readings with the power cause active only where its power is near the enforced limit."""
    if trace is None or not resolves(CAP_WINDOW_S, trace.sensor_period_s):
        return with_cap_causes(readings, None, None)
    return with_cap_causes(readings, trace.series, enforced_limit_w(aligned, trace))


def device_throttle(
    readings: Readings, clock_max_mhz: float, window_s: float, timeline: Segments | None = None
) -> Throttle | None:
    """Computes throttling of one device, None unless clock and reasons were read together twice in the window.

    `readings` are those of `with_cap_causes`.
    """
    causes = {name: cause_column(name) for name in THROTTLE_REASON_BITS if cause_column(name) in readings.columns}
    if not causes:
        return None
    # Only readings with both clock and reasons count, so that all shares are of the same time.
    known = readings.complete("sm_clock_mhz", *causes.values())
    if known is None:
        return None
    deficit = 1.0 - known.columns["sm_clock_mhz"] / clock_max_mhz
    lost = {cause: (deficit > 1.0 - LOST_BELOW_FRAC) * known.columns[column] for cause, column in causes.items()}
    lost["any"] = np.maximum.reduce(list(lost.values()))
    columns = {"deficit": deficit, **lost, **{f"{name} loss": each * deficit for name, each in lost.items()}}
    inside = {name: Readings(known.time_s, columns).within(name, window_s) for name in columns}
    mean = {name: one.mean() for name, one in inside.items() if one is not None}
    if not mean:
        return None
    complete = len(causes) == len(THROTTLE_REASON_BITS)
    return Throttle(
        by_cause_frac={cause: mean[cause] for cause in causes},
        loss_by_cause_frac={cause: mean[f"{cause} loss"] for cause in causes},
        any_frac=mean["any"] if complete else None,
        loss_frac=mean["any loss"] if complete else None,
        computing_loss_frac=_computing_loss_frac(known, clock_max_mhz, timeline) if complete and timeline else None,
        deficit_frac=max(mean["deficit"], 0.0),
    )


def _computing_loss_frac(known: Readings, clock_max_mhz: float, timeline: Segments) -> float | None:
    """Averages lost clock over the time a rank computes, or over its whole steps if no phases were marked.

    Lost clock is linear between readings. Time before the first reading and after the last does not count. None where
    no time is left.
    """
    deficit = 1.0 - known.columns["sm_clock_mhz"] / clock_max_mhz
    caused = np.maximum.reduce([known.columns[cause_column(cause)] for cause in THROTTLE_REASON_BITS])
    lost = Series(known.time_s, caused * deficit * (deficit > 1.0 - LOST_BELOW_FRAC))
    chosen = timeline.inside(*COMPUTING)
    if not chosen.any():
        chosen = timeline.inside(*IN_STEPS)
    edge_s = np.clip(timeline.edge_s, known.time_s[0], known.time_s[-1])
    busy_s = float(np.diff(edge_s)[chosen].sum())
    return float(np.diff(lost.cumulative(edge_s))[chosen].sum()) / busy_s if busy_s > 0 else None


def stretches(readings: Readings, clock_max_mhz: float, window_s: float) -> dict[str, dict[str, Floats]]:
    """Finds when each cause lowered the clock of one device, in order of time; empty without clock and reasons.

    Each cause has arrays of one length: `start_s` from the window's start, `duration_s`, `clock_lost_frac`, the mean of
    1 minus clock over maximum, and `onset_temp_c`, the core temperature at the start; NaN where it was not read.

    A reading holds until the next one, so a stretch shorter than the readings' interval may be missed. Causes that were
    not read are missing.

    `readings` are those of `with_cap_causes`.
    """
    columns = readings.columns
    causes = [cause for cause in THROTTLE_REASON_BITS if cause_column(cause) in columns]
    if "sm_clock_mhz" not in columns or not causes:
        return {}
    rows = np.flatnonzero((readings.time_s >= 0) & (readings.time_s < window_s) & np.isfinite(columns["sm_clock_mhz"]))
    rows = rows[np.argsort(readings.time_s[rows], kind="stable")]
    width_s = np.diff(readings.time_s[rows], append=window_s)
    deficit = 1.0 - columns["sm_clock_mhz"][rows] / clock_max_mhz
    temp_c = columns["gpu_temp_c"][rows] if "gpu_temp_c" in columns else np.full(len(rows), np.nan)
    found = {}
    for cause in causes:
        lost = (columns[cause_column(cause)][rows] == 1.0) & (deficit > 1.0 - LOST_BELOW_FRAC) & (width_s > 0)
        edges = np.diff(lost.astype(np.int8), prepend=0, append=0)
        begin, end = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        until_s, until_lost_s = (np.append(0.0, np.cumsum(each)) for each in (width_s, width_s * deficit))
        duration_s = until_s[end] - until_s[begin]
        found[cause] = {
            "start_s": readings.time_s[rows[begin]],
            "duration_s": duration_s,
            "clock_lost_frac": (until_lost_s[end] - until_lost_s[begin]) / np.where(duration_s > 0, duration_s, 1.0),
            "onset_temp_c": temp_c[begin],
        }
    return found


def clock_max_mhz(aligned: Aligned, device: DeviceKey, otherwise: float | None) -> float | None:
    """Returns a device's maximum SM clock: from its manifest, else `otherwise`."""
    known = aligned.known.get(device, {}).get("sm_clock_max_mhz") or otherwise
    return None if known is None else float(known)


def throttle_metrics(aligned: Aligned, throttles: Mapping[DeviceKey, Throttle]) -> dict[str, float]:
    """Computes time and clock lost, and shares by the raw counters; every figure is the mean over devices.

    `throttle_frac`: share of device-time in which a power, thermal or hardware cause is active *and* the SM clock is
    below 0.98 of the device's maximum. The power cause is active where the driver says so and power is near the cap
    (`near_cap`). `throttle_{power,thermal,hw}_frac`: the same for one cause; causes overlap.
    `throttle_time_s`: `throttle_frac` of the window. `throttle_loss_frac`: integral of 1 minus clock over maximum
    during that time, over the window; `throttle_{power,thermal,hw}_loss_frac`: the same for one cause.
    `clock_deficit_frac`: the same at all times, whatever the cause.
    `{power_cap,thermal,hw}_active_frac`: the raw counter's rise over its own span; on H200 the power-cap counter runs
    through any busy load, also where no clock is lost.

    Without power or its limit the power cause is unknown: its metrics are absent, and those of all causes together.
    """
    metrics: dict[str, float | None] = {**_counter_metrics(aligned)}
    found = list(throttles.values())
    if found:
        throttle_frac = _mean([one.any_frac for one in found])
        metrics |= {
            "throttle_frac": throttle_frac,
            "throttle_time_s": None if throttle_frac is None else throttle_frac * aligned.duration_s,
            "throttle_loss_frac": _mean([one.loss_frac for one in found]),
            "clock_deficit_frac": _mean([one.deficit_frac for one in found]),
        }
    for cause in THROTTLE_REASON_BITS if found else ():
        metrics[f"throttle_{cause}_frac"] = _mean([one.by_cause_frac.get(cause) for one in found])
        metrics[f"throttle_{cause}_loss_frac"] = _mean([one.loss_by_cause_frac.get(cause) for one in found])
    return {name: value for name, value in metrics.items() if value is not None}


def _mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean, None unless all are known."""
    known = all_known(values)
    return float(np.mean(known)) if known else None


def _counter_metrics(aligned: Aligned) -> dict[str, float]:
    slow = aligned.tiers.get("slow", {})
    metrics = {}
    for metric, (column, num_causes) in _COUNTERS.items():
        shares = [_active_frac(slow, device, column, num_causes, aligned.duration_s) for device in aligned.devices]
        if (mean := _mean(shares)) is not None:
            metrics[metric] = mean
    return metrics


def _active_frac(
    slow: Mapping[DeviceKey, Readings], device: DeviceKey, column: str, num_causes: int, window_s: float
) -> float | None:
    span = counter_span(slow[device], column, 0.0, window_s) if device in slow else None
    if span is None:
        return None
    start_s, end_s, rise_ns = span
    active_s, span_s = rise_ns / NS_PER_S, end_s - start_s
    # A share above 1 is the counter's step, or a field that is not a time counter (IDs differ by driver). The first is
    # cut to 1, the second gives no figure.
    return min(active_s / span_s, 1.0) if active_s <= num_causes * (span_s + 2 * COUNTER_STEP_S) else None

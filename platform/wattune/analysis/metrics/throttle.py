"""Throttling: clock lost for a cause. Raw counters are separate metrics, because they also run if no clock is lost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from wattune.analysis.metrics.energy import counter_span
from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.readings import Device, Readings, cause_column
from wattune.analysis.signals.series import Floats, weights_s
from wattune.schema import THROTTLE_REASON_BITS
from wattune.units import NS_PER_S

LOST_BELOW_FRAC: Final = 0.98
"""Share of the maximum clock below which clock counts as lost: clocks step by 15 MHz of 1,980 on H200."""

_BLOCK: Final = 2**14
"""Readings processed together: few enough for a processor's cache."""

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
    loss_by_cause_frac: dict[str, float]
    any_frac: float
    loss_frac: float
    deficit_frac: float


def device_throttle(readings: Readings, clock_max_mhz: float, window_s: float) -> Throttle | None:
    """Computes throttling of one device, None unless clock and reasons were read together twice in the window."""
    causes = {name: cause_column(name) for name in THROTTLE_REASON_BITS}
    # Only readings with both clock and reasons count, so that all shares are of the same time.
    known = readings.complete("sm_clock_mhz", *causes.values())
    if known is None:
        return None
    clock_mhz, active = known.columns["sm_clock_mhz"], [known.columns[column] for column in causes.values()]
    whole_s, deficit_s, lost_s = 0.0, 0.0, np.zeros((len(causes) + 1, 2))
    for first in range(0, len(known.time_s) - 1, _BLOCK):
        # The last reading of a block is the first of the next: each has the weight of its intervals in the block.
        some = slice(first, first + _BLOCK + 1)
        weight_s = weights_s(known.time_s[some], 0.0, window_s)
        deficit = 1.0 - clock_mhz[some] / clock_max_mhz
        below = deficit > 1.0 - LOST_BELOW_FRAC
        each = [below * one[some] for one in active]
        # Not a BLAS product: its threads spin for processors that training has.
        value = np.stack([*each, np.maximum.reduce(each)])
        weighed = np.stack([weight_s, weight_s * deficit])
        lost_s += np.einsum("ct,wt->cw", value, weighed)
        whole_s += float(weight_s.sum())
        deficit_s += float(weighed[1].sum())
    if whole_s <= 0:
        return None
    shares = lost_s / whole_s
    return Throttle(
        by_cause_frac=dict(zip(causes, shares[:-1, 0].tolist(), strict=True)),
        loss_by_cause_frac=dict(zip(causes, shares[:-1, 1].tolist(), strict=True)),
        any_frac=float(shares[-1, 0]),
        loss_frac=float(shares[-1, 1]),
        deficit_frac=max(deficit_s / whole_s, 0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """Stretches in which every reading has clock lost for one cause; all arrays have the same length."""

    start_s: Floats
    """From the window's start."""
    duration_s: Floats
    clock_lost_frac: Floats
    """Mean of 1 minus clock over maximum."""
    onset_temp_c: Floats
    """Core temperature at the start of each; NaN where it was not read."""


def stretches(readings: Readings, clock_max_mhz: float, window_s: float) -> dict[str, Stretches]:
    """Finds when each cause lowered the clock of one device, in order of time; empty without clock and reasons.

    A reading holds until the next one, so a stretch shorter than the readings' interval may be missed.
    """
    columns = readings.columns
    if any(name not in columns for name in ("sm_clock_mhz", *map(cause_column, THROTTLE_REASON_BITS))):
        return {}
    rows = np.flatnonzero((readings.time_s >= 0) & (readings.time_s < window_s) & np.isfinite(columns["sm_clock_mhz"]))
    rows = rows[np.argsort(readings.time_s[rows], kind="stable")]
    width_s = np.diff(readings.time_s[rows], append=window_s)
    deficit = 1.0 - columns["sm_clock_mhz"][rows] / clock_max_mhz
    temp_c = columns["gpu_temp_c"][rows] if "gpu_temp_c" in columns else np.full(len(rows), np.nan)
    found = {}
    for cause in THROTTLE_REASON_BITS:
        lost = (columns[cause_column(cause)][rows] == 1.0) & (deficit > 1.0 - LOST_BELOW_FRAC) & (width_s > 0)
        edges = np.diff(lost.astype(np.int8), prepend=0, append=0)
        begin, end = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        until_s, until_lost_s = (np.append(0.0, np.cumsum(each)) for each in (width_s, width_s * deficit))
        duration_s = until_s[end] - until_s[begin]
        found[cause] = Stretches(
            start_s=readings.time_s[rows[begin]],
            duration_s=duration_s,
            clock_lost_frac=(until_lost_s[end] - until_lost_s[begin]) / np.where(duration_s > 0, duration_s, 1.0),
            onset_temp_c=temp_c[begin],
        )
    return found


def clock_max_mhz(aligned: Aligned, device: Device, otherwise: float | None) -> float | None:
    """Returns a device's maximum SM clock: from its manifest, else `otherwise`."""
    known = aligned.known.get(device, {}).get("sm_clock_max_mhz") or otherwise
    return None if known is None else float(known)


def throttle_metrics(aligned: Aligned, throttles: Mapping[Device, Throttle]) -> dict[str, float]:
    """Computes time and clock lost, and shares by the raw counters; every figure is the mean over devices.

    `throttle_frac`: share of device-time in which a power, thermal or hardware cause is active *and* the SM clock is
    below 0.98 of the device's maximum. `throttle_{power,thermal,hw}_frac`: the same for one cause; causes overlap.
    `throttle_time_s`: `throttle_frac` of the window. `throttle_loss_frac`: integral of 1 minus clock over maximum
    during that time, over the window; `throttle_{power,thermal,hw}_loss_frac`: the same for one cause.
    `clock_deficit_frac`: the same at all times, whatever the cause.
    `{power_cap,thermal,hw}_active_frac`: the raw counter's rise over its own span; on H200 the power-cap counter runs
    through any busy load, also where no clock is lost.

    Args:
        aligned: The trial.
        throttles: Every device's `device_throttle`; empty unless all devices have it.
    """
    metrics = _counter_metrics(aligned)
    found = list(throttles.values())
    if not found:
        return metrics
    throttle_frac = float(np.mean([one.any_frac for one in found]))
    return metrics | {
        "throttle_frac": throttle_frac,
        "throttle_time_s": throttle_frac * aligned.duration_s,
        "throttle_loss_frac": float(np.mean([one.loss_frac for one in found])),
        "clock_deficit_frac": float(np.mean([one.deficit_frac for one in found])),
        **{
            f"throttle_{cause}_frac": float(np.mean([one.by_cause_frac[cause] for one in found]))
            for cause in THROTTLE_REASON_BITS
        },
        **{
            f"throttle_{cause}_loss_frac": float(np.mean([one.loss_by_cause_frac[cause] for one in found]))
            for cause in THROTTLE_REASON_BITS
        },
    }


def _counter_metrics(aligned: Aligned) -> dict[str, float]:
    slow = aligned.tiers.get("slow", {})
    metrics = {}
    for metric, (column, num_causes) in _COUNTERS.items():
        shares = [_active_frac(slow, device, column, num_causes, aligned.duration_s) for device in aligned.devices]
        known = [share for share in shares if share is not None]
        if known and len(known) == len(shares):
            metrics[metric] = float(np.mean(known))
    return metrics


def _active_frac(
    slow: Mapping[Device, Readings], device: Device, column: str, num_causes: int, window_s: float
) -> float | None:
    span = counter_span(slow[device], column, 0.0, window_s) if device in slow else None
    if span is None:
        return None
    active_s, span_s = span.rise / NS_PER_S, span.end_s - span.start_s
    # A share above 1 is the counter's step, or a field that is not a time counter (IDs differ by driver). The first is
    # cut to 1, the second gives no figure.
    return min(active_s / span_s, 1.0) if active_s <= num_causes * (span_s + 2 * COUNTER_STEP_S) else None

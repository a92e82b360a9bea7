"""Throttling: clock lost for a cause. Raw throttle counters stand beside it, as they also run where nothing is lost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from wattune.analysis.align import Aligned, Device, Readings, Series, cause_column, series
from wattune.analysis.energy import counter_span
from wattune.schema import THROTTLE_REASON_BITS
from wattune.units import NS_PER_S

LOST_BELOW_FRAC: Final = 0.98
"""Of the device's maximum clock, below which clock counts as lost: clocks step by 15 MHz of 1,980 on H200."""

COUNTER_STEP_S: Final = 0.1
"""By how much a throttle counter may be ahead of the time it is read at: it steps every 100 ms (measured on H200)."""

_COUNTERS: Final = {
    "power_cap_active_frac": "throttle_power_ns",
    "thermal_active_frac": "throttle_thermal_ns",
    "hw_active_frac": "throttle_hw_ns",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """One device's shares of time and clock."""

    by_cause_frac: dict[str, float]
    any_frac: float
    loss_frac: float
    deficit_frac: float


def device_throttle(readings: Readings, clock_max_mhz: float, window_s: float) -> Throttle | None:
    """Throttling of one device, None where clock and reasons were not read together at least twice in the window."""
    causes = {name: readings.columns.get(cause_column(name)) for name in THROTTLE_REASON_BITS}
    clock_mhz = readings.columns.get("sm_clock_mhz")
    if clock_mhz is None or any(active is None for active in causes.values()):
        return None
    deficit = 1.0 - clock_mhz / clock_max_mhz
    low = np.where(clock_mhz < LOST_BELOW_FRAC * clock_max_mhz, 1.0, 0.0)
    lost = {name: low * active for name, active in causes.items() if active is not None}
    either = np.maximum.reduce(list(lost.values()))

    def share(value: np.ndarray) -> float | None:
        # A reading without clock or without reasons tells of neither, so that all shares are of the same time.
        known: Series | None = series(readings.time_s, np.where(np.isfinite(deficit + either), value, np.nan))
        inside = known.clip(0.0, window_s) if known is not None else None
        return None if inside is None else inside.mean()

    shares = [share(value) for value in (either, either * deficit, deficit, *lost.values())]
    known = [value for value in shares if value is not None]
    if len(known) < len(shares):
        return None
    any_frac, loss_frac, deficit_frac, *each = known
    return Throttle(
        by_cause_frac=dict(zip(lost, each, strict=True)),
        any_frac=any_frac,
        loss_frac=loss_frac,
        deficit_frac=max(deficit_frac, 0.0),
    )


def throttle_metrics(aligned: Aligned, *, clock_max_mhz: float | None) -> dict[str, float]:
    """Time and clock lost, and what the raw counters say; every figure is the mean over devices.

    `throttle_frac`: share of device-time in which a power, thermal or hardware cause is active *and* the SM clock is
    below 0.98 of the device's maximum. `throttle_{power,thermal,hw}_frac`: the same for one cause; causes overlap.
    `throttle_time_s`: `throttle_frac` of the window. `throttle_loss_frac`: integral of 1 minus clock over maximum
    during that time, over the window. `clock_deficit_frac`: the same at all times, whatever the cause.
    `{power_cap,thermal,hw}_active_frac`: the raw counter's rise over its own span; on H200 the power-cap counter runs
    through any busy load, also where no clock is lost.

    Args:
        aligned: The trial.
        clock_max_mhz: Maximum SM clock of devices whose manifest does not say; None where nothing says.
    """
    metrics = _counter_metrics(aligned)
    fast = aligned.readings("fast")
    if fast is None:
        return metrics
    maxima = [aligned.known.get(device, {}).get("sm_clock_max_mhz") or clock_max_mhz for device in aligned.devices]
    found = [
        throttle
        for readings, maximum in zip(fast, maxima, strict=True)
        if maximum and (throttle := device_throttle(readings, float(maximum), aligned.duration_s)) is not None
    ]
    if len(found) < len(aligned.devices):
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
    }


def _counter_metrics(aligned: Aligned) -> dict[str, float]:
    slow = aligned.tiers.get("slow", {})
    metrics = {}
    for metric, column in _COUNTERS.items():
        shares = [_active_frac(slow, device, column, aligned.duration_s) for device in aligned.devices]
        known = [share for share in shares if share is not None]
        if known and len(known) == len(shares):
            metrics[metric] = float(np.mean(known))
    return metrics


def _active_frac(slow: Mapping[Device, Readings], device: Device, column: str, window_s: float) -> float | None:
    span = counter_span(slow[device], column, 0.0, window_s) if device in slow else None
    if span is None:
        return None
    active_s, span_s = span.rise / NS_PER_S, span.end_s - span.start_s
    # More than all of the time is the counter's step, or no time counter at all (a misread field, as IDs differ by
    # driver): the one is cut off, the other says nothing.
    return min(active_s / span_s, 1.0) if active_s <= span_s + 2 * COUNTER_STEP_S else None

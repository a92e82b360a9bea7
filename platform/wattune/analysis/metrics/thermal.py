"""Temperatures of the window, and the time from which they are settled."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wattune.analysis.metrics.settled import Settled
from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.readings import Readings, all_known
from wattune.analysis.signals.series import Series
from wattune.analysis.signals.steady_state import S_PER_MIN, settled_from_s
from wattune.arrays import Floats
from wattune.schema import DeviceKey
from wattune.units import unit_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreTemperature:
    """One device's core temperature over the window."""

    mean_c: float
    """Time-weighted."""
    max_c: float
    rise_c_per_min: float | None
    """Slope of the second half of the window by least squares; None with fewer than two readings."""
    settled_from_s: float | None
    """Time from which it is settled, see `wattune.analysis.signals.steady_state.settled_from_s`."""


def temperature(readings: Readings, window_s: float) -> CoreTemperature | None:
    """Computes one device's core temperature, None if it was not read in the window."""
    inside = readings.within("gpu_temp_c", window_s)
    if inside is None:
        return None
    return CoreTemperature(
        mean_c=inside.mean(),
        max_c=float(inside.value.max()),
        rise_c_per_min=_rise_c_per_min(inside.clip(window_s / 2, window_s)),
        settled_from_s=settled_from_s(inside),
    )


def thermal_metrics(
    aligned: Aligned, core: Mapping[DeviceKey, CoreTemperature], settled: Mapping[DeviceKey, Settled]
) -> dict[str, float]:
    """Computes temperatures of devices and memory; each metric only if every device has the reading.

    `device_temp_max_c`: the hottest reading of any device. `device_temp_mean_c`: mean over devices of their
    time-weighted means. `device_temp_spread_c`: largest minus smallest of the devices' means in a node, the worst node.
    `memory_temp_max_c`: the hottest memory reading. `thermal_margin_min_c`: the smallest distance to the limit.
    `device_temp_settled_c`: of the device that gets hottest once stored heat is in balance with the measured power
    (`wattune.analysis.metrics.settled`); `device_temp_start_c`: its temperature at the window's start;
    `device_temp_settled_uncertainty_c`: half of its 95 % interval.
    """
    metrics: dict[str, float] = {}
    if core:
        means_c = np.array([one.mean_c for one in core.values()])
        nodes = np.array([node for node, _ in core])
        metrics["device_temp_max_c"] = max(one.max_c for one in core.values())
        metrics["device_temp_mean_c"] = float(means_c.mean())
        metrics["device_temp_spread_c"] = max(float(np.ptp(means_c[nodes == node])) for node in set(nodes))
    if settled:
        hottest = max(settled.values(), key=lambda one: one.settled_c)
        metrics["device_temp_start_c"] = hottest.start_c
        metrics["device_temp_settled_c"] = hottest.settled_c
        metrics["device_temp_settled_uncertainty_c"] = hottest.uncertainty_k
    memory_c, margin_c = _readings(aligned, "memory_temp_c"), _readings(aligned, "thermal_margin_c")
    if memory_c is not None:
        metrics["memory_temp_max_c"] = float(memory_c.max())
    if margin_c is not None:
        metrics["thermal_margin_min_c"] = float(margin_c.min())
    return metrics


def temperature_rise_c_per_min(core: Mapping[DeviceKey, CoreTemperature]) -> float | None:
    """Returns the temperature rise of the fastest warming device in the second half of the window.

    Negative if all devices cool; None without temperatures.
    """
    return max((one.rise_c_per_min for one in core.values() if one.rise_c_per_min is not None), default=None)


def all_settled_from_s(core: Mapping[DeviceKey, CoreTemperature]) -> float | None:
    """Returns the time from which all devices are settled; None if one never is, or without temperatures."""
    return max(all_known([one.settled_from_s for one in core.values()]), default=None)


def _rise_c_per_min(late: Series | None) -> float | None:
    if late is None:
        return None
    apart_s = late.time_s - late.time_s.mean()
    return float((apart_s * late.value).sum() / (apart_s**2).sum()) * S_PER_MIN


def _readings(aligned: Aligned, name: str) -> Floats | None:
    """Returns all devices' readings of a slow column in the window, None unless every device has one."""
    assert unit_of(name) == "degC", name
    found = [readings.inside(name, 0.0, aligned.duration_s)[1] for _, readings in aligned.readings("slow")]
    return np.concatenate(found) if found and all(len(values) for values in found) else None

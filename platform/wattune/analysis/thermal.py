"""Temperatures of the window, and whether they had come to rest."""

from typing import Final

import numpy as np

from wattune.analysis.align import Aligned, Device, Floats, Series
from wattune.units import unit_of

S_PER_MIN: Final = 60.0


def thermal_metrics(aligned: Aligned) -> dict[str, float]:
    """Temperatures of devices and memory; each metric only where every device has the reading.

    `device_temp_max_c`: the hottest reading of any device. `device_temp_mean_c`: mean over devices of their
    time-weighted means. `device_temp_spread_c`: largest minus smallest of the devices' means in a node, the worst node.
    `memory_temp_max_c`: the hottest memory reading. `thermal_margin_min_c`: the smallest distance to the limit.
    """
    metrics: dict[str, float] = {}
    core = _core_series(aligned)
    if core is not None:
        means_c = np.array([of_device.mean() for of_device in core])
        nodes = np.array([node for node, _ in aligned.devices])
        metrics["device_temp_max_c"] = max(float(of_device.value.max()) for of_device in core)
        metrics["device_temp_mean_c"] = float(means_c.mean())
        metrics["device_temp_spread_c"] = max(float(np.ptp(means_c[nodes == node])) for node in set(nodes))
    memory_c, margin_c = _readings(aligned, "memory_temp_c"), _readings(aligned, "thermal_margin_c")
    if memory_c is not None:
        metrics["memory_temp_max_c"] = float(memory_c.max())
    if margin_c is not None:
        metrics["thermal_margin_min_c"] = float(margin_c.min())
    return metrics


def mean_temperatures_c(aligned: Aligned) -> dict[Device, float]:
    """Each device's time-weighted mean core temperature in the window; empty unless every device has readings."""
    core = _core_series(aligned)
    return {} if core is None else {d: of_device.mean() for d, of_device in zip(aligned.devices, core, strict=True)}


def temperature_rise_c_per_min(aligned: Aligned) -> float | None:
    """How fast the fastest warming device warmed in the second half of the window, by least squares.

    Returns:
        Degrees a minute, negative where all cool; None without temperatures.
    """
    core = _core_series(aligned)
    if core is None:
        return None
    late = [of_device.clip(aligned.duration_s / 2, aligned.duration_s) for of_device in core]
    return max((float(np.polyfit(s.time_s, s.value, 1)[0]) * S_PER_MIN for s in late if s is not None), default=None)


def _core_series(aligned: Aligned) -> list[Series] | None:
    fast = aligned.readings("fast")
    found = [readings.series("gpu_temp_c") for readings in fast or []]
    clipped = [whole.clip(0.0, aligned.duration_s) for whole in found if whole is not None]
    known = [inside for inside in clipped if inside is not None]
    return known if known and len(known) == len(aligned.devices) else None


def _readings(aligned: Aligned, name: str) -> Floats | None:
    """All devices' readings of a slow column in the window, None unless every device has one."""
    assert unit_of(name) == "degC", name
    slow = aligned.readings("slow")
    found = [readings.inside(name, 0.0, aligned.duration_s)[1] for readings in slow or []]
    return np.concatenate(found) if found and all(len(values) for values in found) else None

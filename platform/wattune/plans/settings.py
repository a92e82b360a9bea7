"""Settings of devices that a plan may have: which values each kind of device can take, as far as a catalog knows."""

from typing import Any, Final

from wattune.catalog.hardware import ClusterSpec
from wattune.plans.axes import AMD_PROFILES, NVIDIA_PROFILES
from wattune.plans.engines import Configuration

CLOCK_STEP_MHZ: Final = 15
"""NVIDIA's compute clocks are multiples of it (`nvidia-smi -q -d SUPPORTED_CLOCKS` on A100, H100 and H200)."""

_PROFILES: Final = {"nvidia": NVIDIA_PROFILES, "amd": AMD_PROFILES}


def setting_problem(cluster: ClusterSpec, axis: str, value: Any) -> str | None:
    """Says why devices cannot have a value of an axis in `SETTINGS`, as far as the catalog knows; else None."""
    device = cluster.sensed_device
    if device.vendor not in _PROFILES:
        return f"{axis}={value} is none of {device.name}, whose driver sets nothing; leave it out"
    if axis == "power_profile":
        own = _PROFILES[device.vendor]
        return None if value in own else f"{axis}={value} is none of {device.vendor}; use one of: {', '.join(own)}"
    if axis == "power_limit_w" and cluster.devices_per_node % device.devices_per_package:
        return (
            f"{axis}={value} would limit devices of others: {device.devices_per_package} of {device.name} share one "
            f"limit, and devices_per_node={cluster.devices_per_node}; use whole packages"
        )
    if axis == "power_limit_w":
        least, most, unit = device.power_limit_least_w or 1.0, device.power_limit_w, "W"
    else:
        least, most, unit = float(CLOCK_STEP_MHZ), device.sm_clock_max_mhz, "MHz"
    if value < least or (most is not None and value > most):
        allowed = f"from {least:g} {unit}" if most is None else f"{least:g} to {most:g} {unit}"
        return f"{axis}={value} is outside what {device.name} takes; use {allowed}"
    if axis == "clock_mhz" and device.vendor == "nvidia" and value % CLOCK_STEP_MHZ:
        below = value // CLOCK_STEP_MHZ * CLOCK_STEP_MHZ
        return (
            f"{axis}={value} is no clock of {device.name}, which has multiples of {CLOCK_STEP_MHZ} MHz; use "
            f"{max(below, CLOCK_STEP_MHZ)} or {below + CLOCK_STEP_MHZ}"
        )
    return None


def device_settings(c: Configuration) -> str | None:
    """The devices can have the power limit, clock and profile of the plan."""
    problems = (setting_problem(c.cluster, axis, value) for axis, value in c.plan.settings.items())
    return next(filter(None, problems), None)

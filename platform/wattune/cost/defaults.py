"""Coefficients of devices without a fit of their own: published kernels where there are some, else datasheets."""

from dataclasses import replace
from typing import Final

from wattune.catalog.hardware import DeviceSpec
from wattune.cost.coefficients import PUBLISHED_STEP_TIME, Origin, StepTimeCoefficients
from wattune.cost.estimate import Coefficients, unpredictable
from wattune.cost.memory.defaults import default_coefficients as memory_coefficients
from wattune.cost.power import power_coefficients
from wattune.cost.temperature import thermal_coefficients
from wattune.errors import PlanError

WITH_KERNELS: Final = ("h100_sxm", "h200_sxm")
"""Devices whose kernels and collectives are in the published tables that the defaults are fitted to."""

DATASHEET_ERROR_FRAC: Final = 0.45
"""Half width of the 95 % interval of a step time where only a datasheet is known: the kernels of another architecture
reach another share of its peaks."""


def default_coefficients(device: DeviceSpec) -> Coefficients:
    """Returns the coefficients of a device that nothing was measured on here.

    Raises:
        PlanError: The catalog lacks its peaks or its power limit.
    """
    power, thermal = power_coefficients(device), thermal_coefficients(device)
    peaks = (
        device.peak_bf16_flop_per_s,
        device.peak_fp32_flop_per_s,
        device.memory_bytes,
        device.memory_bandwidth_bytes_per_s,
        device.link_bandwidth_bytes_per_s,
    )
    if power is None or thermal is None or None in peaks:
        raise PlanError(unpredictable(device))
    memory = memory_coefficients(device.name)
    return Coefficients(memory=memory, step_time=_step_time(device), power=power, thermal=thermal)


def _step_time(device: DeviceSpec) -> StepTimeCoefficients:
    if device.name in WITH_KERNELS:
        return PUBLISHED_STEP_TIME
    origin: Origin = "datasheet"
    published = PUBLISHED_STEP_TIME
    return replace(
        published,
        kernel=replace(published.kernel, origin=origin),
        link=replace(published.link, origin=origin),
        error_frac=max(published.error_frac, DATASHEET_ERROR_FRAC),
    )

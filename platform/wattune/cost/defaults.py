"""Coefficients of devices without a fit of the user's: what was measured here, published kernels, else datasheets."""

from dataclasses import replace
from typing import Final

from wattune.catalog.hardware import DeviceSpec, chip_of
from wattune.cost.coefficients import (
    PUBLISHED_STEP_TIME,
    EngineMemory,
    KernelCoefficients,
    MemoryCoefficients,
    Origin,
    OverheadCoefficients,
    PowerCoefficients,
    StepTimeCoefficients,
)
from wattune.cost.estimate import Coefficients, unpredictable
from wattune.cost.power import H200 as H200_POWER
from wattune.cost.power import power_coefficients
from wattune.cost.temperature import thermal_coefficients
from wattune.errors import PlanError

WITH_CHIP_OF_H200: Final = ("h100_sxm",)
"""Devices that take the fit of H200: the same GH100 at 700 W, with another memory, which the catalog has. So do those
of a space with its chip, whatever their limit.

Of 62 runs on two H100s it predicts the energy of a token within 4.0 % (median). Published kernels and the datasheet are
8.2 % off (`benchmarks/results/same_chip.md`)."""

SAME_CHIP_ERROR_FACTOR: Final = 1.5
"""Widens intervals of such a fit. They hold 95 % of those runs or more, for every metric."""

DATASHEET_ERROR_FRAC: Final = 0.45
"""Half width of the 95 % interval of a step time where only a datasheet is known: the kernels of another architecture
reach another share of its peaks."""


MEASURED_STEP_TIME: Final = StepTimeCoefficients(
    kernel=KernelCoefficients(
        matmul_frac=1.030,
        grouped_frac=0.883,
        attention_forward_frac=0.554,
        attention_backward_frac=0.468,
        memory_frac=0.560,
        linear_speedup=1.0,
        origin="measured here",
    ),
    link=replace(PUBLISHED_STEP_TIME.link, in_step_frac=0.990, slowdown_frac=0.260, origin="measured here"),
    overhead=OverheadCoefficients(launch_s=2e-6, host_op_s=45.2e-6, straggler_frac=0.0177, origin="measured here"),
    error_frac=0.078,
    seen=(
        "deepspeed gpt3_175b 3 layers, 4 devices",
        "megatron llama3_70b 3 layers, 2 devices",
        "megatron llama3_70b 4 layers, 4 devices",
        "megatron mixtral_8x22b 2 layers, 4 devices",
        "torch llama3_70b 4 layers, 4 devices",
        "torch llama3_8b 8 layers, 2 devices",
        "torch mixtral_8x7b 4 layers, 2 devices",
        "torch mixtral_8x7b 4 layers, 4 devices",
    ),
    elsewhere_error_frac=0.122,
)
"""Step time of H200 in one node: fitted to 117 trials of 94 configurations on two and on four of them, two that fill
their memory left out (`benchmarks/prediction.py`, `tests/golden/test_predicted_step_time.py`). The error by
`wattune.fitting.interval` of configurations held out in folds is 0.078, of whole engines and models 0.122."""


def default_coefficients(device: DeviceSpec) -> Coefficients:
    """Returns the coefficients of a device that nothing was measured on here.

    Raises `PlanError` where the catalog lacks its peaks or its power limit.
    """
    power, thermal = power_coefficients(device), thermal_coefficients(device)
    peaks = ("peak_bf16_flop_per_s", "peak_fp32_flop_per_s", "memory_bytes", "memory_bandwidth_bytes_per_s")
    needed = [getattr(device, name) for name in (*peaks, "link_bandwidth_bytes_per_s")]
    if power is None or thermal is None or None in needed:
        raise PlanError(unpredictable(device))
    memory = memory_coefficients(device.name)
    if device.name != "h200_sxm" and chip_of(device).name in ("h200_sxm", *WITH_CHIP_OF_H200):
        step_time, power = _of_same_chip()
        return Coefficients(memory=memory, step_time=step_time, power=power, thermal=thermal)
    return Coefficients(memory=memory, step_time=_step_time(device), power=power, thermal=thermal)


def coefficients_of_software(device: DeviceSpec, software: str) -> Coefficients:
    """Returns the coefficients for software that wattune does not run: a fit of its own engines says nothing of it.

    Of 370 published configurations on ten devices steps are 7.5 % off in the median so (90th percentile 18 %). By the
    fit of H200 it is 7.5 % (24 %), since small models on H100 come out a third too short (`benchmarks/prediction.py`).
    `software` is one of `wattune.cost.step_time.facts.SOFTWARE`. Raises `PlanError`: the catalog lacks the device's
    peaks or its power limit.
    """
    found, power = default_coefficients(device), power_coefficients(device)
    assert power is not None, "a device with defaults has them"
    has_kernels = chip_of(device).name in ("h200_sxm", *WITH_CHIP_OF_H200)
    step = PUBLISHED_STEP_TIME if has_kernels else found.step_time
    return replace(found, step_time=replace(step, software=software), power=power)


def _of_same_chip() -> tuple[StepTimeCoefficients, PowerCoefficients]:
    """Returns the fit to H200 for a device that differs from it in memory alone: no model was seen on that device."""
    origin: Origin = "same chip"
    step = MEASURED_STEP_TIME.of(origin)
    step = replace(step, error_frac=SAME_CHIP_ERROR_FACTOR * step.error_frac, seen=())
    errors = ("error_frac", "peak_error_frac", "full_peak_error_frac")
    wider = {name: SAME_CHIP_ERROR_FACTOR * getattr(H200_POWER, name) for name in errors}
    return step, replace(H200_POWER, origin=origin, **wider)


def _step_time(device: DeviceSpec) -> StepTimeCoefficients:
    if device.name == "h200_sxm":
        return MEASURED_STEP_TIME
    origin: Origin = "datasheet"
    published = PUBLISHED_STEP_TIME
    kernel = replace(published.kernel, origin=origin)
    if device.vendor == "nvidia" and device.peak_fp8_flop_per_s is None:
        # FlashAttention 2 reaches 50 to 73 % of the peak of an A100 (Dao 2023, arXiv 2307.08691, abstract); the shares
        # of H100 are lower as its matrix units, and all later ones, have twice the rate of the rest.
        kernel = replace(kernel, attention_forward_frac=0.62, attention_backward_frac=0.52)
    return replace(
        published,
        kernel=kernel,
        link=replace(published.link, origin=origin),
        error_frac=max(published.error_frac, DATASHEET_ERROR_FRAC),
    )


H200: Final = MemoryCoefficients(
    engines={
        "torch": EngineMemory(version="torch 2.11.0", offset_bytes=105e6, activations_frac=1.0, error_frac=0.02),
        "megatron": EngineMemory(
            version="megatron-core 0.19.2, torch 2.11.0", offset_bytes=104e6, activations_frac=1.0, error_frac=0.035
        ),
        "deepspeed": EngineMemory(
            version="deepspeed 0.19.8, torch 2.11.0", offset_bytes=113e6, activations_frac=1.01, error_frac=0.024
        ),
    },
    origin="measured here",
)
"""Fitted by `wattune.fitting.memory` to the trials on H200 of `benchmarks/data`. Errors are of configurations left
out."""

ELSEWHERE_ERROR_FACTOR: Final = 2.0
"""Widens intervals of devices without a measured peak: kernels there may keep other tensors."""


def memory_coefficients(device: str) -> MemoryCoefficients:
    """Returns corrections for a device of the catalog: measured on H200, the same with wider intervals elsewhere."""
    if device == "h200_sxm":
        return H200
    wider = {
        name: replace(one, error_frac=ELSEWHERE_ERROR_FACTOR * one.error_frac) for name, one in H200.engines.items()
    }
    return replace(H200, engines=wider, origin="datasheet")

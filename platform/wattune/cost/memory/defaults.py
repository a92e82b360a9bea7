"""Corrections that predictions start from, by device."""

from dataclasses import replace
from typing import Final

from wattune.cost.coefficients import EngineMemory, MemoryCoefficients

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


def default_coefficients(device: str) -> MemoryCoefficients:
    """Returns corrections for a device of the catalog: measured on H200, the same with wider intervals elsewhere."""
    if device == "h200_sxm":
        return H200
    wider = {
        name: replace(one, error_frac=ELSEWHERE_ERROR_FACTOR * one.error_frac) for name, one in H200.engines.items()
    }
    return replace(H200, engines=wider, origin="datasheet")

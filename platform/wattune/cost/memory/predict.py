"""The peak memory of every candidate: the fullest moment of the fullest stage, by part."""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from wattune.arrays import Floats
from wattune.cost.batch import Batch
from wattune.cost.coefficients import MemoryCoefficients
from wattune.cost.memory import deepspeed_engine, megatron_engine, torch_engine
from wattune.cost.memory.moments import PARTS, PartSizes
from wattune.cost.memory.shapes import Shapes, shapes
from wattune.cost.tables import Memory
from wattune.plans.engines import capabilities

_MOMENTS: Final[Mapping[str, Callable[[Shapes], list[PartSizes]]]] = {
    "torch": torch_engine.moments, "megatron": megatron_engine.moments, "deepspeed": deepspeed_engine.moments,
}  # fmt: skip

SKEWED_ERROR_FRAC: Final = 0.1
"""Least half width where the router chooses: which rank receives most tokens is not known."""


FP8_ERROR_FRAC: Final = 0.1
"""Least half width where layers run in FP8. Peaks of eight plans and of a slice of Llama-3 8B on one H200 agree within
0.6 % (`benchmarks/data/dense_llama_1b_h200.parquet`, `benchmarks/results/fp8.md`). Shards, stages and tensor parallel
were not measured."""


def predict(batch: Batch, coefficients: MemoryCoefficients) -> Memory:
    """Predicts peaks of allocated memory.

    In bytes by part on the fullest rank; `allocator` holds what libraries take beside the counted tensors.
    """
    limits, engine = capabilities(batch.engine), coefficients.engines[batch.engine]
    sizes = shapes(batch, splits_ends=limits.splits_ends, rounds_of_pp=limits.rounds_of_pp)
    found = _MOMENTS[batch.engine](sizes)
    rows = np.arange(len(batch))
    shape = sizes.stage.shape
    best = np.full(len(batch), -np.inf)
    parts = {name: np.zeros(len(batch)) for name in PARTS}
    stage = np.zeros(len(batch))
    for each in found:
        scaled = {name: _scaled(name, value, engine.activations_frac) for name, value in each.items()}
        total = np.broadcast_to(sum(scaled.values(), np.zeros(())), shape)
        place = total.argmax(axis=1)
        peak = total[rows, place]
        fuller = peak > best
        best = np.where(fuller, peak, best)
        stage = np.where(fuller, sizes.stage[rows, place], stage)
        for name in PARTS[:-1]:
            value = np.broadcast_to(scaled.get(name, np.zeros(())), shape)[rows, place]
            parts[name] = np.where(fuller, value, parts[name])
    # As Primus projects: formula of the target plus the excess of measured trials over their own formula.
    excess_bytes = coefficients.excess_bytes.get(coefficients.excess_key(batch.engine, batch.model.name), 0.0)
    parts["allocator"] = np.full(len(batch), max(engine.offset_bytes + excess_bytes, 0.0))
    routing = batch.workload.routing
    known = not batch.model.is_moe or (routing is not None and routing.by == "balanced")
    error_frac = engine.error_frac if known else max(engine.error_frac, SKEWED_ERROR_FRAC)
    error_frac = max(error_frac, FP8_ERROR_FRAC) if batch.dtype == "fp8" else error_frac
    return Memory(parts_bytes=parts, stage=stage, error_frac=np.full(len(batch), error_frac))


def _scaled(name: str, value: Floats, activations_frac: float) -> Floats:
    return value * activations_frac if name in ("activations", "logits") else value

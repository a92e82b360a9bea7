"""Moments at which a rank of the DeepSpeed engine may hold the most.

Read from DeepSpeed 0.19.8, `runtime/{engine,bf16_optimizer}.py`, `runtime/fp16/unfused_optimizer.py` and
`runtime/zero/{stage_1_and_2,stage3}.py`, run on tiny models under a memory profile, and `wattune/engines/deepspeed`
(`config.py` sets buckets and data types). Bytes a weight in bf16, n replicas:

- `none`: 2 weights, 2 gradients, 12 fp32 states; the update copies gradients to fp32, 4 more (`FP16_UnfusedOptimizer`);
- `zero1`: 2 weights, 2 gradients, 4 fp32 gradients, 12 / n (`BF16_Optimizer`); in a pipeline gradients in bf16 are
  freed as they are added;
- `zero2`: 2 weights, 16 / n, and bf16 buckets of `LARGEST_BUCKET` numbers, two with overlap;
- `zero3`: 18 / n, an fp32 bucket, and what is gathered.
"""

from typing import Final

import numpy as np

from wattune.cost.memory.activations import EAGER_LOGIT_BYTES, LayerBytes, layer, mean_layer
from wattune.cost.memory.moments import PartSizes, moment
from wattune.cost.memory.shapes import ADAM_BYTES, MASTER_BYTES, Shapes

BUCKET_NUMBERS: Final = 500_000_000
"""`LARGEST_BUCKET` of `wattune/engines/deepspeed/config.py`."""
LIVE_NUMBERS: Final = 1_000_000_000
"""Weights that ZeRO-3 keeps gathered: `stage3_max_live_parameters`, DeepSpeed's default."""


def moments(shapes: Shapes) -> list[PartSizes]:
    """Lists bytes by part at each moment, [candidates, stages]."""
    s, item = shapes, shapes.item_bytes
    eager = (s.tp > 1) | (not s.is_compiled) | ((s.sharding == 3) & s.model.is_moe)

    def of_kind(kind: Shapes) -> LayerBytes:
        one, other = (layer(kind, compiled=compiled, gathers=False) for compiled in (True, False))
        return one.where(~eager, other)

    mean = mean_layer(s, of_kind)
    row = mean.input
    parts = _constant(s)
    if not s.trains:
        return [moment(parts, activations=mean.whole / 2)]  # what a layer has used is freed
    several, in_pipeline = s.num_micro_batches > 1, s.pp > 1
    trained = np.add(*s.of_stage(s.trained))
    low = item * trained * ((s.sharding < 2) & ~in_pipeline)
    before = np.where(several, low, 0)
    kept = s.in_flight * s.num_layers * mean.saved
    recomputed = np.where(s.recompute == 2, mean.whole - row, 0)
    logit_bytes = np.where(eager | (in_pipeline & s.model.tied_embeddings), EAGER_LOGIT_BYTES, item)
    head = moment(
        parts,
        activations=kept + 2 * row * s.last,
        gradients=before + item * s.trained.head * s.last,
        logits=logit_bytes * s.tokens * s.vocab * s.last,
    )
    # The graph of a compiled layer gives the gradients of all its weights at once, before they are added.
    unit = s.trained.layer + s.trained.experts / 3  # experts run operator by operator
    own = np.where(several | (s.sharding >= 2), item * unit, 0)
    backward = moment(parts, activations=kept + recomputed + mean.working, gradients=before + own)
    update = moment(
        parts,
        gradients=low,
        buffers=np.where((s.sharding == 0) & ~in_pipeline, MASTER_BYTES * trained, 0) * (item == 2),
    )
    # A bucket is flattened and cast to fp32 before it is reduced, about half way through the backward pass.
    bucket = np.minimum(0.8 * BUCKET_NUMBERS, trained)
    reduction = moment(
        parts,
        activations=kept / 2,
        gradients=np.where(s.sharding < 2, low, item * unit),
        buffers=np.where((s.sharding == 0) | (s.sharding == 2), (item + MASTER_BYTES) * bucket, 0) * (s.dp > 1),
    )
    return [head, backward, update, reduction]


def _constant(s: Shapes) -> PartSizes:
    item = s.item_bytes
    dense, experts = s.total
    everything, trained = dense + experts, np.add(*s.of_stage(s.trained))
    shared_weights = s.sharding == 3
    bf16 = item == 2
    largest = np.maximum(np.maximum(s.held.layer + s.held.experts, s.held.embedding * s.first), s.held.head * s.last)
    live = np.minimum(everything, np.maximum(1.2 * LIVE_NUMBERS, largest + s.held.embedding * s.first))
    buckets = np.minimum(BUCKET_NUMBERS, s.model.num_parameters) * np.ones_like(everything)
    overlaps = s.is_one_of("overlap", s.overlap, "grad", "grad_param")
    reduces = s.trains & ((s.dp > 1) | (s.sharding > 0))
    gradients = np.where(
        (s.sharding == 0) & ~(s.pp > 1),
        0,
        np.where((s.sharding >= 2), MASTER_BYTES * s.sharded(s.trained), MASTER_BYTES * trained),
    )
    return {
        "weights": np.where(shared_weights, item * s.sharded(s.held), item * everything)
        + (MASTER_BYTES * s.sharded(s.trained) if bf16 else 0),
        "optimizer": ADAM_BYTES * s.sharded(s.trained),
        "gradients": gradients if s.trains else 0 * gradients,
        "gathered": np.where(shared_weights, item * live, 0),
        "buffers": reduces
        * np.choose(s.sharding, [0 * buckets, 0 * buckets, item * buckets * (1 + overlaps), MASTER_BYTES * buckets]),
    }

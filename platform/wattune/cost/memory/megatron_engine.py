"""Moments at which a rank of the Megatron-Core engine may hold the most.

Read from Megatron-Core 0.16.1, `distributed/param_and_grad_buffer.py`, `optimizer/{optimizer,distrib_optimizer}.py` and
`fusions/fused_cross_entropy.py`, and from `wattune/engines/megatron`. Weights are bf16, gradients are one fp32 buffer
(`grad_reduce_in_fp32`), and the optimizer holds fp32 weights and two moments: 18 bytes a weight, or 6 + 12 / dp with
the distributed optimizer.

With TransformerEngine the loss overwrites the logits with their gradient (`cross_entropy_fusion_impl: te`), and in FP8
each weight of a layer is there in FP8 too, as it is and transposed. Both as peaks on one H200 show them
(`benchmarks/data/dense_gpt_1b_h200.parquet`).
"""

import numpy as np

from wattune.cost.memory.activations import mean_layer, megatron_layer
from wattune.cost.memory.moments import PartSizes, moment
from wattune.cost.memory.shapes import ADAM_BYTES, MASTER_BYTES, Shapes

LOGIT_BYTES = 8
"""Bytes of a logit at the worst moment: itself and its gradient in bf16, and the softmax that is kept in fp32."""

OVERWRITTEN_LOGIT_BYTES = 2
"""The same where the loss overwrites the logits, in bf16."""

CAST_WEIGHT_BYTES = 2
"""Bytes of a weight in FP8, and of its transpose."""


def moments(shapes: Shapes) -> list[PartSizes]:
    """Lists bytes by part at each moment, [candidates, stages]."""
    s, item = shapes, shapes.item_bytes
    layer = mean_layer(s, megatron_layer)
    dense, experts = s.total
    master = MASTER_BYTES if item == 2 else 0
    cast = CAST_WEIGHT_BYTES * s.num_layers * (s.held.layer + s.held.experts) if s.casts_products else 0
    constant = {
        "weights": item * (dense + experts) + cast + master * s.sharded(s.trained),
        "optimizer": ADAM_BYTES * s.sharded(s.trained),
        "gradients": MASTER_BYTES * np.add(*s.of_stage(s.trained)),
    }
    if not s.trains:
        return [moment(constant, activations=layer.forward + layer.input)]
    row = layer.input
    kept = s.in_flight * s.num_layers * layer.saved
    recomputed = np.where(s.recompute == 2, layer.whole - row, 0)
    constant["buffers"] = 2 * row * (s.pp > 1)
    overwrites = s.transformer_engine and item == 2
    head = moment(
        constant,
        activations=kept + (3 if overwrites else 2) * row * s.last,
        gradients=item * s.trained.head * s.last,
        logits=(OVERWRITTEN_LOGIT_BYTES if overwrites else LOGIT_BYTES) * s.tokens * s.vocab / s.tp * s.last,
    )
    # Autograd makes a weight's gradient in bf16 before it is added and freed: at most that of the first product.
    block = np.where(s.trained.experts > 0, s.trained.experts, s.trained.ffn) * (2 / 3)
    backward = moment(constant, activations=kept + recomputed + layer.late, gradients=item * block)
    during = moment(constant, activations=kept + recomputed + layer.working, gradients=item * block / 3)
    embedding = moment(
        constant,
        activations=kept - kept / np.maximum(s.in_flight, 1) + row,
        gradients=item * s.trained.embedding * s.first,
    )
    return [head, backward, during, embedding]

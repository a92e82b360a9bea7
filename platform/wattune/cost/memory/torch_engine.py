"""Moments at which a rank of the torch engine may hold the most: FSDP2 in every sharding.

Read from torch 2.11 and 2.13, `torch/distributed/fsdp/_fully_shard/{_fsdp_param_group,_fsdp_collectives,_fsdp_param}.py`
and `torch/distributed/pipelining/stage.py`, and from `wattune/engines/torch`. A unit is the embedding, the experts of a
layer, the rest of a layer, or the head.
"""

import numpy as np

from wattune.cost.batch import Floats
from wattune.cost.memory.activations import LayerBytes, compiled_layer, mixture_layer
from wattune.cost.memory.shapes import ADAM_BYTES, MASTER_BYTES, Counts, Shapes

Moment = dict[str, Floats]


def moments(shapes: Shapes) -> list[Moment]:
    """Lists bytes by part at each moment, [candidates, stages]."""
    layer = mixture_layer(shapes, compiled=True) if shapes.model.is_moe else compiled_layer(shapes)
    return _Torch(shapes, layer).moments()


class _Torch:
    def __init__(self, shapes: Shapes, layer: LayerBytes) -> None:
        s = self.shapes = shapes
        self.layer = layer
        bf16 = s.item_bytes == 2
        self.n = np.where(s.sharding > 0, s.dp, 1.0)
        self.ne = np.where(s.sharding > 0, s.expert_dp, 1.0)
        self.zero3 = s.sharding == 3
        self.each_time = s.sharding >= 2
        self.on_the_way = self.each_time | s.is_one_of("overlap", s.overlap, "grad", "grad_param")
        self.several = s.num_micro_batches > 1
        dense, experts = s.total
        item = s.item_bytes
        self.weights = MASTER_BYTES * s.sharded(s.held)
        self.optimizer = ADAM_BYTES * s.sharded(s.trained)
        self.gathered_all = item * (dense + experts)
        self.grads_all = MASTER_BYTES * sum(s.of_stage(s.trained))
        self.grads_sharded = MASTER_BYTES * s.sharded(s.trained)
        row = layer.input
        # torch makes the buffers to receive into for all micro-batches before the first one.
        self.boundaries = (2 - s.first - s.last) * row * s.num_micro_batches * s.vpp
        self.kept = s.in_flight * (s.num_layers * layer.saved - (1 - s.first) * row * s.vpp + (1 - s.last) * row * s.vpp)

    def _moment(self, *, activations: Floats, grads: Floats, gathered: Floats, buffers: Floats = 0.0, logits: Floats = 0.0) -> Moment:
        return {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "gradients": grads,
            "activations": activations,
            "gathered": gathered,
            "buffers": buffers + self.boundaries,
            "logits": logits,
        }

    def moments(self) -> list[Moment]:
        s, layer, item = self.shapes, self.layer, self.shapes.item_bytes
        t, model = s.tokens, s.model
        zero3, on_the_way, several = self.zero3, self.on_the_way, self.several
        row = layer.input
        unit = s.held.layer + s.held.experts
        before = np.where(self.each_time, np.where(several, self.grads_sharded, 0.0), np.where(several, self.grads_all, 0.0))
        two_units = 2 * item * unit
        gathered = np.where(zero3, two_units, self.gathered_all)
        found = []
        # Backward pass of the head.
        logits = item * t * s.vocab / s.tp * s.last
        head_in = (row + item * t * model.hidden_size) * s.last
        head = s.held.head
        z3_head = np.where(zero3, item * (head + unit), self.gathered_all)
        found.append(self._moment(activations=self.kept + head_in, grads=before + item * head * s.last, gathered=z3_head, logits=logits))
        # Reduction of the head's gradient.
        rs = MASTER_BYTES * head * (1 + 1 / self.n) * on_the_way * s.last
        found.append(self._moment(activations=self.kept + row, grads=before + item * head * s.last, gathered=z3_head, buffers=rs))
        # Backward pass of the last layer, beside the reduction of the head.
        left = MASTER_BYTES * head * on_the_way * s.last
        recomputed = layer.whole - layer.saved + 0 * row
        recomputed = np.where(s.recompute == 2, layer.whole - row, 0)
        own = item * (s.trained.ffn if not model.is_moe else s.trained.experts)
        after_head = before + np.where(on_the_way & ~several, MASTER_BYTES * head / self.n, 0) * s.last
        after_head = after_head + np.where(~on_the_way & ~several, MASTER_BYTES * head, 0) * s.last
        found.append(self._moment(activations=self.kept + recomputed + layer.working, grads=after_head + own, gathered=gathered, buffers=left))
        found.append(self._moment(activations=self.kept + recomputed - layer.saved + 4 * row * 0, grads=after_head + item * (s.trained.layer + s.trained.experts), gathered=gathered, buffers=left))
        # Reduction of a layer.
        big = np.maximum(s.trained.layer, s.trained.experts)
        nbig = np.where(s.trained.experts > s.trained.layer, self.ne, self.n)
        rs_l = MASTER_BYTES * big * (1 + 1 / nbig) * on_the_way
        found.append(self._moment(activations=self.kept, grads=after_head + item * big, gathered=gathered, buffers=rs_l))
        # Reduction of the embedding, after every layer.
        emb = s.trained.embedding
        at_end = np.where(several, before, np.where(on_the_way, self.grads_sharded, self.grads_all))
        z3_e = np.where(zero3, item * s.held.embedding, self.gathered_all)
        others = self.kept - self.kept / np.maximum(s.in_flight, 1)
        found.append(self._moment(activations=others + row, grads=at_end + item * emb * s.first, gathered=z3_e, buffers=MASTER_BYTES * emb * (1 + 1 / self.n) * on_the_way * s.first))
        # Reduction of what was kept whole, unit by unit.
        for u, nu, where in ((emb, self.n, s.first), (big, nbig, 1.0), (head, self.n, s.last)):
            alone = np.where(nu == 1, 1, 0) * (s.dp > 1)
            extra = MASTER_BYTES * u * (1 / nu + alone) * where
            found.append(self._moment(activations=0 * self.kept, grads=self.grads_all * (1 - on_the_way * 1.0), gathered=(self.gathered_all - item * u * where) * ~zero3, buffers=extra * ~on_the_way))
        # The update.
        found.append(self._moment(activations=0 * self.kept, grads=self.grads_sharded, gathered=0 * self.kept))
        return found

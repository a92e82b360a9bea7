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
    layer = mixture_layer(shapes, compiled=True, gathers=True) if shapes.model.is_moe else compiled_layer(shapes)
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
        self.boundaries = (2 * s.vpp - s.first - s.last) * row * s.num_micro_batches * (s.pp > 1)
        received = (s.vpp - s.first) * (s.pp > 1)
        sent = (s.vpp - s.last) * (s.pp > 1)
        self.one = s.num_layers * layer.saved + (sent - received) * row
        self.kept = s.in_flight * self.one

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
        # FSDP2 gathers the unit before in the order of the pass ahead of its use.
        dense, experts = item * s.held.layer, item * s.held.experts
        gathered = np.where(zero3, 2 * dense + experts, self.gathered_all)
        gathered_late = np.where(zero3, 2 * dense, self.gathered_all)
        # Gradients that are there before this micro-batch.
        before = np.where(self.each_time, self.grads_sharded, self.grads_all) * several
        # With as many in flight as there are, the first backward pass finds all of them and no gradient.
        full = s.in_flight >= s.num_micro_batches
        one_less = self.kept - layer.saved * s.num_layers / s.vpp
        begins = full & (self.kept > one_less + before)
        kept = np.where(full & ~begins, one_less, self.kept)
        before = np.where(begins, 0.0, before)
        # Gradients that were kept whole are reduced in the last micro-batch only.
        at_reduce = np.where(self.each_time, kept, np.minimum(kept, self.one))
        # bf16 gradients are added to those kept whole before they are reduced; those that are kept sharded come after.
        bf16_too = np.where(several & ~self.each_time, 0.0, 1.0)
        found = []
        # Backward pass of the head.
        head = s.trained.head * s.last
        split = s.tp > 1
        per_logit = np.where(split, 16, item)
        logits = per_logit * t * s.vocab / s.tp * s.last
        d_head = item * head * (1 + split)
        head_in = (row + item * t * model.hidden_size) * s.last
        z3_head = np.where(zero3, item * s.held.head * s.last + dense, self.gathered_all)
        found.append(self._moment(activations=kept + head_in, grads=before + d_head, gathered=z3_head, logits=logits))

        def whole(nu, replicas):
            return np.maximum(1, (1 + ((s.sharding == 0) & (replicas > 1))) / nu)

        def reduce(u, nu, replicas=s.dp):
            return MASTER_BYTES * u * np.where(self.each_time | ~several, 1 + 1 / nu, whole(nu, replicas)) * on_the_way

        found.append(self._moment(activations=at_reduce + row, grads=before + item * head * bf16_too, gathered=np.where(zero3, dense, self.gathered_all), buffers=reduce(head, self.n)))
        # Backward pass of the last layer, beside the reduction of the head.
        left = MASTER_BYTES * head * on_the_way
        recomputed = np.where(s.recompute == 2, layer.whole - row, 0)
        after_head = before + np.where(several, 0, MASTER_BYTES * head / np.where(on_the_way, self.n, 1))
        block = np.where(s.trained.experts > 0, s.trained.experts, s.trained.ffn)
        live = kept + recomputed
        compiled_again = (s.recompute == 2) & (not model.is_moe)
        # What checkpointing has computed again is held until the whole graph is done, and nothing is reused in place.
        extra_working = np.where(compiled_again, 2 * item * t * model.ffn_hidden_size / s.tp, 0)
        found.append(self._moment(activations=live + layer.working + extra_working, grads=after_head + item * block / 3, gathered=gathered, buffers=left))
        found.append(self._moment(activations=live + np.where(compiled_again, 4 * row, layer.late), grads=after_head + item * np.where(compiled_again, s.trained.layer, block), gathered=gathered, buffers=left))
        # Reduction of experts, and the backward pass of what comes before them beside it.
        if model.is_moe:
            e = s.trained.experts
            found.append(self._moment(activations=at_reduce + recomputed - layer.experts, grads=after_head + item * e * bf16_too, gathered=gathered_late, buffers=reduce(e, self.ne, s.expert_dp)))
        # Reduction of a layer.
        u = s.trained.layer
        found.append(self._moment(activations=at_reduce - layer.saved + 2 * row, grads=after_head + item * u * bf16_too, gathered=gathered_late, buffers=reduce(u, self.n)))
        # Reduction of the embedding, after every layer.
        emb = s.trained.embedding * s.first
        at_end = np.where(several, before, np.where(on_the_way, self.grads_sharded, self.grads_all))
        z3_e = np.where(zero3, 0, self.gathered_all)
        others = np.where(self.each_time, self.kept - self.one, 0)
        found.append(self._moment(activations=others + row, grads=at_end + item * emb * np.where(on_the_way, bf16_too, 1), gathered=z3_e, buffers=reduce(emb, self.n)))
        # Reduction of what was kept whole, unit by unit.
        nothing = 0 * self.kept
        for u, nu, replicas in ((emb, self.n, s.dp), (s.trained.layer, self.n, s.dp), (s.trained.experts, self.ne, s.expert_dp), (head, self.n, s.dp)):
            extra = MASTER_BYTES * u * whole(nu, replicas)
            found.append(self._moment(activations=nothing, grads=self.grads_all * ~on_the_way, gathered=(self.gathered_all - item * u) * ~zero3, buffers=extra * ~on_the_way))
        # The update.
        found.append(self._moment(activations=nothing, grads=self.grads_sharded, gathered=nothing))
        return found

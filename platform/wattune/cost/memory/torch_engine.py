"""Moments at which a rank of the torch engine may hold the most: FSDP2 in every sharding.

Read from torch 2.13 and held to trials with torch 2.11: `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`
(`unshard`, `post_backward`), `_fsdp_collectives.py` (`foreach_all_gather`, `foreach_reduce`),
`torch/distributed/pipelining/stage.py`, and `wattune/engines/torch`. A unit is the embedding, the experts of a layer,
the rest of a layer, or the head. ZeRO as in Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.
"""

from typing import Final

import numpy as np

from wattune.arrays import Bools, Floats
from wattune.cost.batch import Batch
from wattune.cost.memory.activations import EAGER_LOGIT_BYTES, LayerBytes, layer, mean_layer
from wattune.cost.memory.moments import PartSizes, moment
from wattune.cost.memory.shapes import ADAM_BYTES, MASTER_BYTES, Shapes
from wattune.cost.memory.shapes import shapes as shapes_of

SPLIT_LOGIT_BYTES: Final = 10
"""Bytes of a logit where tensor parallel cuts the vocabulary: logits in bf16, and their gradients by the sum and by the
targets in fp32. Collectives inside the graph keep the compiler from joining them. With it peaks of six plans of a dense
model on two H200, of 8 and 28 layers, agree within 0.2 % (`benchmarks/results/prediction.md`)."""


def moments(shapes: Shapes) -> list[PartSizes]:
    """Lists bytes by part at each moment, [candidates, stages]."""
    layer = _layer(shapes)
    rank = _Rank(shapes, layer)
    if not shapes.trains:
        gathered = np.where(
            rank.zero3, 2 * shapes.item_bytes * (shapes.held.layer + shapes.held.experts), rank.gathered
        )
        return [moment(rank.constant, activations=layer.forward, gathered=gathered * (shapes.sharding > 0))]
    return [*rank.head(), *rank.layers(), *rank.first_layer(), rank.embedding(), *rank.after_all(), rank.update()]


def offloaded_bytes(batch: Batch) -> Floats:
    """Counts bytes that each layer of a micro-batch copies to host memory, and back, [candidates]."""
    sizes = shapes_of(batch, splits_ends=True, rounds_of_pp=False)
    return np.broadcast_to(sizes.offloads * _layer(sizes).saved, (len(batch), 1))[:, 0]


def _layer(shapes: Shapes) -> LayerBytes:
    return mean_layer(shapes, lambda kind: layer(kind, compiled=shapes.is_compiled, gathers=True))


class _Rank:
    """Bytes that a rank of every stage holds."""

    def __init__(self, shapes: Shapes, layer: LayerBytes) -> None:
        s = self.shapes = shapes
        self.layer = layer
        self.zero3: Bools = s.sharding == 3
        self.each_time: Bools = s.sharding >= 2
        """Reduces the gradients of every micro-batch."""
        self.on_the_way: Bools = self.each_time | s.is_one_of("overlap", s.overlap, "grad", "grad_param")
        """Reduces gradients within the backward pass, not after it."""
        self.several: Bools = s.num_micro_batches > 1
        self.replicas = np.where(s.sharding > 0, s.shard_dp, 1.0)
        self.expert_replicas = np.where(s.sharding > 0, s.expert_shard_dp, 1.0)
        held, trained = np.add(*s.of_stage(s.held)), np.add(*s.of_stage(s.trained))
        apart = (s.sharding == 0) & (s.mode != "pretrain")
        # Frozen weights lie in their own type, and outside FSDP2 where nothing shares them.
        frozen = held - trained
        kept_frozen = np.where(s.sharding > 0, s.sharded(s.held) - s.sharded(s.trained), frozen)
        self.gathered = s.item_bytes * np.where(apart, trained, held)
        self.whole = MASTER_BYTES * trained
        self.shards = MASTER_BYTES * s.sharded(s.trained)
        # What the last unit of a forward pass was gathered into is freed by the next forward pass only.
        last_unit = np.where(s.last > 0, s.held.head, s.held.layer)
        self.leftover = s.item_bytes * last_unit * (self.zero3 & (s.shard_dp > 1))
        row = layer.input
        received, sent = (s.vpp - s.first) * (s.pp > 1), (s.vpp - s.last) * (s.pp > 1)
        self.constant = {
            "weights": self.shards + s.item_bytes * kept_frozen,
            "optimizer": ADAM_BYTES * s.sharded(s.trained),
            # Buffers to receive into are made for all micro-batches before the first one.
            "buffers": (received + sent) * row * s.num_micro_batches * s.trains,
        }
        self.kept_layers = np.where(s.offloads > 0, np.minimum(s.num_layers, 2.0), s.num_layers)
        """Layers of a micro-batch whose activations lie on the device: offloaded are all but two, the one that is
        computed and the one that is copied (`wattune/engines/model/offload.py`)."""
        self.of_layers = self.kept_layers * layer.saved
        self.boundaries = (sent - received) * row
        self.one = self.of_layers + self.boundaries
        """Activations of one micro-batch; those received lie in the buffers."""
        self._begin()

    def _begin(self) -> None:
        """Finds what the fullest backward pass starts from: activations in flight, and gradients that are there."""
        s = self.shapes
        in_flight = np.where(s.offloads > 0, np.minimum(s.in_flight, 1.0), s.in_flight)
        kept = in_flight * self.of_layers + s.in_flight * self.boundaries
        before = np.where(self.each_time, self.shards, self.whole) * self.several
        # With all micro-batches in flight the first backward pass finds no gradient. Those behind it find one less.
        full = s.in_flight >= s.num_micro_batches
        one_less = kept - self.layer.saved * np.where(s.offloads > 0, 0.0, s.num_layers / s.vpp)
        begins = full & (kept > one_less + before)
        self.kept = np.where(full & ~begins, one_less, kept)
        self.before = np.where(begins, 0.0, before)
        # Gradients that are kept whole are reduced in the last micro-batch only, and in fp32.
        self.at_reduction = np.where(self.each_time, self.kept, np.minimum(self.kept, self.one))
        self.low = s.item_bytes * np.where(self.several & ~self.each_time, 0.0, 1.0)

    def _reduced(self, numbers: Floats, shards: Floats, replicas: Floats) -> Floats:
        """Bytes that reducing a unit's gradients adds: packed in fp32, and the result where its own were."""
        both = 1 + np.maximum(1 / shards - self.shapes.item_bytes / MASTER_BYTES, 0)
        return MASTER_BYTES * numbers * np.where(self.each_time | ~self.several, both, self._repacked(shards, replicas))

    def _repacked(self, shards: Floats, replicas: Floats) -> Floats:
        """The same of gradients kept whole: their own bytes are freed once packed. HSDP divides into one more."""
        replicated: Floats = np.maximum(1, (1 + ((self.shapes.sharding == 0) & (replicas > 1))) / shards)
        return replicated

    def head(self) -> list[PartSizes]:
        """Returns the head's backward pass, and the reduction of its gradient."""
        s, item, row = self.shapes, self.shapes.item_bytes, self.layer.input
        head, split = s.trained.head * s.last, s.tp > 1
        dense = item * s.held.layer
        whole = item if s.is_compiled else EAGER_LOGIT_BYTES
        logits = s.tokens / s.loss_chunks * s.vocab / s.tp * s.last
        inputs = (row + item * s.tokens * s.model.hidden_size) * s.last
        # A part of the loss has a gradient of the head's weight, beside the sum of those before it. Where logits are
        # cut, it comes after their gradients in fp32 are gone.
        moments = (np.where(split, SPLIT_LOGIT_BYTES, whole), 0), (whole, 1)
        # The first unit that is reduced has its result beside its packed gradient and its own.
        first = MASTER_BYTES * head * (1 + (s.dp > 1) / self.replicas)
        # Where passes follow one another, what an earlier one gathered the last unit into is there twice. Measured:
        # ZeRO-3 in `benchmarks/data/dense_llama_h200x2.parquet`, with one, two and four micro-batches.
        return [
            *(
                moment(
                    self.constant,
                    activations=self.kept + inputs,
                    gradients=self.before + item * head * (own + (s.loss_chunks > 1)),
                    gathered=np.where(
                        self.zero3,
                        item * s.held.head * s.last + dense + 2 * self.leftover * self.several,
                        self.gathered,
                    ),
                    logits=logit_bytes * logits,
                )
                for logit_bytes, own in moments
            ),
            moment(
                self.constant,
                activations=self.at_reduction + row,
                gradients=self.before + self.low * head,
                gathered=np.where(self.zero3, dense + self.leftover, self.gathered),
                buffers=np.maximum(self._reduced(head, self.replicas, s.dp), first) * self.on_the_way,
            ),
        ]

    def layers(self) -> list[PartSizes]:
        s, layer, item, row = self.shapes, self.layer, self.shapes.item_bytes, self.layer.input
        dense, experts = item * s.held.layer, item * s.held.experts
        # FSDP2 gathers the next unit ahead of its use.
        gathered = np.where(self.zero3, 2 * dense + experts + self.leftover, self.gathered)
        # A unit's own weights are freed before its gradients are reduced.
        beside_experts = np.where(self.zero3, 2 * dense + self.leftover, self.gathered)
        beside_rest = np.where(self.zero3, np.where(experts > 0, experts, dense) + self.leftover, self.gathered)
        head = MASTER_BYTES * s.trained.head * s.last
        before = self.before + np.where(self.several, 0, head / np.where(self.on_the_way, self.replicas, 1))
        is_full = s.is_one_of("recompute", s.recompute, "full")
        recomputed = np.where(is_full, layer.whole - row, 0)
        block = np.where(s.trained.experts > 0, s.trained.experts, s.trained.ffn)
        live, left = self.kept + recomputed, head * self.on_the_way
        early, late = (
            moment(
                self.constant,
                activations=live + more,
                gradients=before + item * block / parts,
                gathered=gathered,
                buffers=left,
            )
            for more, parts in ((layer.working, 3), (layer.late, 1))
        )
        rest = moment(
            self.constant,
            activations=self.at_reduction - layer.saved + 2 * row,
            gradients=before + self.low * s.trained.layer,
            gathered=beside_rest,
            buffers=self._reduced(s.trained.layer, self.replicas, s.dp) * self.on_the_way,
        )
        if not s.model.is_moe:
            return [early, late, rest]
        of_experts = moment(
            self.constant,
            activations=self.at_reduction + recomputed - layer.experts,
            # Measured: a third more, as if autograd held that of one weight of three when they are packed.
            gradients=before + self.low * s.trained.experts * 4 / 3,
            gathered=beside_experts,
            buffers=self._reduced(s.trained.experts, self.expert_replicas, s.expert_dp) * self.on_the_way,
        )
        return [early, late, rest, of_experts]

    def first_layer(self) -> list[PartSizes]:
        """Returns the first layer's backward pass where one micro-batch is all: gradients of the others are there.

        It is the peak where activations are recomputed, so that later layers keep little. With several micro-batches
        all gradients are there in the last layer's pass too, beside more activations.
        """
        s, layer, item = self.shapes, self.layer, self.shapes.item_bytes
        block = np.where(s.trained.experts > 0, s.trained.experts, s.trained.ffn)
        dense, experts = s.trained.layer + s.trained.embedding * s.first, s.trained.experts
        later = np.where(
            self.on_the_way,
            self.shards - MASTER_BYTES * (dense / self.replicas + experts / self.expert_replicas),
            self.whole - MASTER_BYTES * (dense + experts),
        )
        gathered = np.where(self.zero3, item * (s.held.layer + s.held.experts) + self.leftover, self.gathered)
        return [
            moment(
                self.constant,
                activations=(layer.whole + more) * ~self.several,
                gradients=np.maximum(later, 0) + item * block * share,
                gathered=gathered,
            )
            for more, share in ((layer.working, 1 / 3), (layer.late, 1.0))
        ]

    def embedding(self) -> PartSizes:
        s = self.shapes
        embedding = s.trained.embedding * s.first
        at_end = np.where(self.several, self.before, np.where(self.on_the_way, self.shards, self.whole))
        # With one micro-batch the result of the reduction is the shard that is counted among the gradients.
        return moment(
            self.constant,
            activations=np.where(self.each_time, self.kept - np.minimum(self.kept, self.one), 0) + self.layer.input,
            gradients=at_end + np.where(self.on_the_way, self.low, s.item_bytes) * embedding,
            gathered=np.where(self.zero3, self.leftover, self.gathered),
            buffers=np.where(self.several, self._reduced(embedding, self.replicas, s.dp), MASTER_BYTES * embedding)
            * self.on_the_way,
        )

    def after_all(self) -> list[PartSizes]:
        """Returns the reductions of gradients that were kept whole, unit by unit: the weights are freed before each."""
        s = self.shapes
        units = (
            (s.trained.embedding * s.first, self.replicas, s.dp),
            (s.trained.layer, self.replicas, s.dp),
            (s.trained.experts, self.expert_replicas, s.expert_dp),
            (s.trained.head * s.last, self.replicas, s.dp),
        )
        return [
            moment(
                self.constant,
                gradients=self.whole * ~self.on_the_way,
                gathered=(self.gathered - s.item_bytes * numbers) * ~self.zero3,
                buffers=MASTER_BYTES * numbers * self._repacked(shards, replicas) * ~self.on_the_way,
            )
            for numbers, shards, replicas in (units if s.model.is_moe else units[:2] + units[3:])
        ]

    def update(self) -> PartSizes:
        """Returns the optimizer's update, when nothing is gathered."""
        return moment(self.constant, gradients=self.shards)

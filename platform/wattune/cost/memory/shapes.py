"""Sizes that every engine's memory is built from: stages, numbers of weights, and tokens, as columns."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from wattune.arrays import Floats, Ints
from wattune.catalog.models import ModelSpec
from wattune.cost.batch import Batch
from wattune.cost.flops import adapted, held_weights
from wattune.plans.axes import AXES, ITEM_BYTES
from wattune.workload import Workload

MASTER_BYTES: Final = 4
"""Bytes of an fp32 weight or gradient."""
ADAM_BYTES: Final = 8
"""Bytes of Adam's two fp32 moments (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1)."""

_REPLICATED_LORA: Final = {"q": "b", "k": "b", "v": "b", "gate": "b", "up": "b", "o": "a", "down": "a"}
"""The half of an adapter that tensor parallelism cuts with its layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of weights on one rank before data parallel shards them, [candidates, 1]."""

    layer: Floats
    """One layer without its experts."""
    ffn: Floats
    """Of `layer` those of a dense feed-forward block."""
    experts: Floats
    """One layer's experts; 0 without."""
    embedding: Floats
    head: Floats
    """Output projection and final norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Columns of one batch, [candidates, 1] or, of a stage, [candidates, stages]."""

    model: ModelSpec
    mode: str
    item_bytes: int
    """Bytes of a weight and of an activation in the forward pass."""
    casts_products: bool
    """Linear layers of a decoder layer run in FP8."""
    transformer_engine: bool
    """Megatron's layers and loss are TransformerEngine's."""
    stage: Ints
    """Stages that are looked at; where layers are even the first, the second and the last stand for all."""
    first: Floats
    """1 where a stage holds the embedding, else 0."""
    last: Floats
    """1 where a stage holds the head, else 0."""
    num_layers: Floats
    """Layers of a stage, all chunks together."""
    in_flight: Floats
    """Micro-batches whose activations a stage holds at most, in units of all its layers."""
    held: Counts
    """All weights."""
    trained: Counts
    """Weights with gradients and optimizer state."""
    tokens: Floats
    """Tokens of a micro-batch on a context parallel rank."""
    micro_batch_size: Floats
    tp: Floats
    pp: Floats
    vpp: Floats
    dp: Floats
    expert_dp: Floats
    """Replicas of an expert."""
    shard_dp: Floats
    """Ranks that share one copy of what ZeRO shares: all replicas, or a group of them under hybrid sharding."""
    expert_shard_dp: Floats
    """The same of an expert."""
    ep: Floats
    etp: Floats
    num_micro_batches: Floats
    sharding: Ints
    """0 for none, then the stage of ZeRO; 0 where nothing is shared."""
    recompute: Ints
    loss_chunks: Floats
    """Parts of a micro-batch whose logits are held one after another."""
    offloads: Floats
    """1 where what layers keep waits in host memory, else 0."""
    overlap: Ints
    imbalance: Floats
    """Rows that the fullest expert parallel rank receives, over an even share."""
    is_compiled: bool
    """True where layers run as compiled graphs: on processors they do not."""
    vocab: Floats
    """Tokens of the vocabulary, padded."""

    @property
    def trains(self) -> bool:
        """True where there is a backward pass."""
        return self.mode != "prefill"

    @property
    def total(self) -> tuple[Floats, Floats]:
        """Weights of a stage outside experts, and in experts."""
        return self.of_stage(self.held)

    def kind(self, model: ModelSpec) -> "Shapes":
        """Returns the same columns of a model whose layers are all of one kind."""
        return replace(self, model=model)

    def of_stage(self, counts: Counts) -> tuple[Floats, Floats]:
        """Sums a stage's weights outside experts, and those in experts."""
        ends = self.first * counts.embedding + self.last * counts.head
        return self.num_layers * counts.layer + ends, self.num_layers * counts.experts

    def sharded(self, counts: Counts) -> Floats:
        """Sums a stage's weights over the shards of ZeRO: what one rank keeps of them."""
        dense, experts = self.of_stage(counts)
        return dense / np.where(self.sharding > 0, self.shard_dp, 1) + experts / np.where(
            self.sharding > 0, self.expert_shard_dp, 1
        )

    def is_one_of(self, axis: str, column: Ints, *names: str) -> np.ndarray:
        """Tells where a column of places in an axis is one of those names."""
        return np.isin(column, [AXES[axis].choices.index(name) for name in names])


_SAME: Final = ("micro_batch_size", "tp", "pp", "vpp", "ep", "etp", "num_micro_batches", "loss_chunks")
"""Columns that are a batch's own."""


def shapes(batch: Batch, *, splits_ends: bool, rounds_of_pp: bool) -> Shapes:
    """Computes the sizes of a batch.

    `splits_ends`: tensor parallel also cuts embedding, head and the sequence between layers. `rounds_of_pp`: a round of
    an interleaved schedule has `pp` micro-batches; else it may have more.
    """
    tp, dp = _column(batch.tp), _column(batch.dp)
    stage, num_layers = _stages(batch)
    vocab = _column(batch.vocabulary)
    expert_dp = dp * _column(batch.cp) * tp / _column(batch.etp) / _column(batch.ep)
    mode = batch.workload.mode
    held = _counts(batch, vocab, tp, splits_ends)
    trained = held
    if mode == "lora":
        trained = _adapters(batch, tp)
        held = replace(held, layer=held.layer + trained.layer)
    elif mode == "prefill":
        trained = _only(np.zeros_like(tp))
    replicas = np.maximum(dp * _column(batch.cp), expert_dp if batch.model.is_moe else 1)
    return Shapes(
        model=batch.model,
        mode=mode,
        item_bytes=ITEM_BYTES[batch.dtype],
        casts_products=batch.dtype == "fp8",
        transformer_engine=batch.cluster.transformer_engine,
        stage=stage,
        first=(stage == 0).astype(np.float64),
        last=(stage == batch.pp[:, None] - 1).astype(np.float64),
        num_layers=num_layers,
        in_flight=_in_flight(batch, stage, rounds_of_pp) if mode != "prefill" else np.zeros(stage.shape),
        held=held,
        trained=trained,
        tokens=_column(batch.local_tokens),
        **{name: _column(getattr(batch, name)) for name in _SAME},
        dp=dp * _column(batch.cp),
        expert_dp=expert_dp,
        shard_dp=dp * _column(batch.cp) / _column(batch.dp_replicate),
        expert_shard_dp=expert_dp / _column(batch.dp_replicate),
        sharding=np.where(replicas > 1, batch.sharding[:, None], 0),
        recompute=batch.recompute[:, None],
        offloads=_column(batch.offload),
        overlap=batch.overlap[:, None],
        imbalance=skewed_load(batch.model, batch.workload, _column(batch.ep)),
        is_compiled=batch.cluster.device != "cpu",
        vocab=vocab,
    )


def skewed_load(model: ModelSpec, workload: Workload, ep: Floats) -> Floats:
    """Computes the load of the fullest expert parallel rank over an even share, where routing is skewed.

    Shares fall as r^-skew with an expert's rank r, none above 1/k, as `wattune.engines.model.routing` forces them.
    The rank with the most popular expert holds others of average popularity, since layers permute experts.
    """
    routing = workload.routing
    if routing is None or routing.by != "skew" or not model.is_moe:
        return np.ones_like(ep)
    shares = np.arange(1, model.num_experts + 1, dtype=np.float64) ** -routing.skew
    largest = min(shares[0] / shares.sum(), 1 / model.num_experts_per_token)
    others = (1 - largest) / max(model.num_experts - 1, 1)
    fullest: Floats = ep * (largest + (model.num_experts / ep - 1) * others)
    return fullest


def _column(values: Ints) -> Floats:
    return values.astype(np.float64)[:, None]


def _stages(batch: Batch) -> tuple[Ints, Floats]:
    """Returns the stages to look at and the layers of each, [candidates, stages]."""
    most = int(batch.pp.max())
    rows = np.arange(batch.layers.shape[1])
    is_even = bool(
        (np.where(rows < batch.num_virtual[:, None], batch.layers, batch.layers[:, :1]) == batch.layers[:, :1]).all()
    )
    last = batch.pp[:, None] - 1
    if is_even:  # a stage between holds no more than the second one, which has the most in flight of them
        places = [np.zeros_like(last), np.minimum(last, 1), last]
        stage = np.concatenate(places[: 1 if most == 1 else 3], axis=1)
        num_layers = (batch.layers[:, :1] * batch.vpp[:, None]).astype(np.float64)
        return stage, np.broadcast_to(num_layers, stage.shape)
    stage = np.minimum(np.arange(most)[None, :], last)
    num_layers = np.zeros(stage.shape, np.int64)
    for chunk in range(int(batch.vpp.max())):
        place = np.minimum(chunk * batch.pp[:, None] + stage, batch.layers.shape[1] - 1)
        held = np.take_along_axis(batch.layers, place, axis=1)
        num_layers += np.where(chunk < batch.vpp[:, None], held, 0)
    return stage, num_layers.astype(np.float64)


def _in_flight(batch: Batch, stage: Ints, rounds_of_pp: bool) -> Floats:
    """Counts micro-batches whose activations a stage holds, in units of all its layers.

    min(m, p - s) of 1F1B and (2 (p - s - 1) + (v - 1) r + 1) / v of interleaved 1F1B with rounds of r micro-batches
    (`wattune.plans.schedule.passes`); on stage 0 with r = p the latter is 1 + (p - 1) / (p v) of all the model's
    activations, as in Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.3.
    """
    pp, vpp, m = batch.pp[:, None], batch.vpp[:, None], batch.num_micro_batches[:, None]
    plain = np.minimum(m, pp - stage)
    size = pp if rounds_of_pp else m // np.maximum(1, m // pp)
    chunks = np.minimum(m * vpp, 2 * (pp - stage - 1) + (vpp - 1) * size + 1)
    held: Floats = np.where(vpp > 1, chunks / vpp, plain)
    return held


def _counts(batch: Batch, vocab: Floats, tp: Floats, splits_ends: bool) -> Counts:
    """Counts weights as `ModelSpec.layer_parameters` does, cut over tensor and expert parallel ranks."""
    model, h = batch.model, batch.model.hidden_size
    ends = tp if splits_ends else np.ones_like(tp)
    layer, ffn, experts = (
        np.add.reduce([share * sizes for sizes, share in zip(column, (one for _, one in model.shares), strict=True)])
        for column in zip(*(_kind_counts(kind, batch, tp) for kind, _ in model.shares), strict=True)
    )
    positions = model.max_positions if model.positions == "learned" else 0
    embedding = (vocab + positions) * h / ends
    shared = model.tied_embeddings & (_column(batch.pp) == 1)
    return Counts(
        layer=layer,
        ffn=ffn,
        experts=experts,
        embedding=embedding,
        head=np.where(shared, 0.0, vocab * h / ends) + model.norm_parameters + model.has_bias("head") * vocab / ends,
    )


def _kind_counts(kind: ModelSpec, batch: Batch, tp: Floats) -> tuple[Floats, Floats, Floats]:
    """Counts weights of a layer of one kind without its experts, of these its dense block's, and its experts'."""
    cut, whole = held_weights(kind)
    h, f, biased = kind.hidden_size, kind.every_ffn_width, 1 if kind.has_bias("ffn") else 0
    block = kind.ffn_matrices * h * f
    first, last = kind.mixer_biases
    mixer = (cut - block) / tp + whole + (first / tp + last) + kind.mixer_rest
    ffn = block / tp + biased * ((kind.ffn_matrices - 1) * f / tp + h) * (f > 0)
    layer = mixer + ffn + kind.num_norms * kind.norm_parameters
    if not kind.is_moe:
        return layer, ffn, np.zeros_like(tp)
    one = kind.ffn_parameters(kind.ffn_hidden_size)
    router = kind.num_experts * (h + kind.has_bias("router")) + kind.shared_expert_gate * h
    return layer + router, ffn, kind.num_experts / _column(batch.ep) * one / _column(batch.etp)


def _adapters(batch: Batch, tp: Floats) -> Counts:
    """Counts low-rank adapters (Hu et al. 2021, arXiv 2106.09685): r (inputs + outputs) beside each target."""
    model, lora = batch.model, batch.workload.lora
    assert lora is not None, "mode lora has adapters"
    layer = np.zeros_like(tp)
    for kind, share in model.shares:
        sides = adapted(kind)
        for name in lora.targets:
            if name in sides:
                inputs, outputs = sides[name]
                cut, whole = (outputs, inputs) if _REPLICATED_LORA[name] == "b" else (inputs, outputs)
                layer = layer + share * lora.rank * (whole + cut / tp)
    return _only(layer)


def _only(layer: Floats) -> Counts:
    """Returns weights of layers, and none elsewhere."""
    nothing = np.zeros_like(layer)
    return Counts(layer=layer, ffn=nothing, experts=nothing, embedding=nothing, head=nothing)

"""The map of weights: every number of the torch engine's model is in Megatron's once, where Megatron reads it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from wattune.catalog.models import ModelSpec
from wattune.engines.megatron.weights import adapter, weight
from wattune.engines.model.experts import ExpertShard
from wattune.engines.model.tensor_ranks import TensorRanks
from wattune.workload import Lora

LLAMA = ModelSpec(
    name="llama", num_layers=1, hidden_size=16, ffn_hidden_size=24, num_heads=4, num_kv_heads=2, vocab_size=12
)
GPT = replace(
    LLAMA,
    name="gpt",
    norm="layernorm",
    activation="gelu",
    positions="learned",
    max_positions=6,
    bias=True,
    num_kv_heads=4,
)
TIED = replace(GPT, name="tied", tied_embeddings=True)
QWEN = replace(LLAMA, name="qwen", head_dim=6, qk_norm="head", biased_parts="qkv", tied_embeddings=True)
MIXTRAL = replace(LLAMA, name="mixtral", num_experts=4, num_experts_per_token=2)
SHARING = replace(MIXTRAL, name="sharing", shared_ffn_hidden_size=8, shared_expert_gate=True)
BIASED = replace(MIXTRAL, name="biased", bias=True, activation="gelu")


class Numbered:
    """Whole weights whose values are all different: where a number went tells where it came from."""

    def __init__(self) -> None:
        self.given: dict[str, Tensor] = {}
        self._next = 0

    def __call__(self, name: str, *shape: int) -> Tensor:
        if name not in self.given:
            size = torch.Size(shape).numel()
            self.given[name] = torch.arange(self._next, self._next + size, dtype=torch.float64).view(shape)
            self._next += size
        assert self.given[name].shape == shape
        return self.given[name]


def parts(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """Megatron's parameters of a whole model of one layer."""
    kinds = ("weight", "bias") if model.bias else ("weight",)
    norms = ("weight", "bias") if model.bias and model.norm == "layernorm" else ("weight",)
    yield "", "embedding.word_embeddings.weight"
    if model.positions == "learned":
        yield "", "embedding.position_embeddings.weight"
    for kind in norms:
        yield "layers.0", f"input_layernorm.{kind}"
        yield "layers.0", f"pre_mlp_layernorm.{kind}"
        yield "", f"decoder.final_layernorm.{kind}"
    for kind in ("weight", "bias") if model.has_bias("qkv") else ("weight",):
        yield "layers.0", f"self_attention.linear_qkv.{kind}"
    for name in "qk" if model.qk_norm == "head" else "":
        yield "layers.0", f"self_attention.{name}_layernorm.weight"
    for kind in kinds:
        yield "layers.0", f"self_attention.linear_proj.{kind}"
        if not model.is_moe:
            yield "layers.0", f"mlp.linear_fc1.{kind}"
            yield "layers.0", f"mlp.linear_fc2.{kind}"
    if model.is_moe:
        yield "layers.0", "mlp.router.weight"
        shared = ("linear_fc1.weight", "linear_fc2.weight", "gate_weight") if model.shared_expert_gate else ()
        yield from (("layers.0", f"mlp.shared_experts.{name}") for name in shared)
        for name in ("fc1", "fc2"):
            yield "layers.0", f"mlp.experts.{name}"
            if model.bias:
                yield "layers.0", f"mlp.experts.{name}_bias"
    if not model.tied_embeddings:
        yield "", "output_layer.weight"


def is_whole(part: str) -> bool:
    """Returns True where every tensor parallel rank holds all of a parameter."""
    return any(
        word in part for word in ("norm", "position", "router", "gate_weight", "linear_proj.bias", "linear_fc2.bias")
    )


def at(size: int = 1, rank: int = 0, **experts: int) -> tuple[TensorRanks, ExpertShard]:
    """Shares that a rank holds."""
    return TensorRanks(size=size, rank=rank), ExpertShard(**experts)


@pytest.mark.parametrize("model", [LLAMA, GPT, TIED, QWEN, MIXTRAL, SHARING, BIASED], ids=lambda each: each.name)
@pytest.mark.parametrize(("tp", "etp", "ep"), [(1, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)])
def test_ranks_together_hold_every_number_once(model, tp, etp, ep):
    whole, held = Numbered(), Counter()
    for place, part in parts(model):
        if "mlp.experts" in part:
            holders = [at(ep=ep, ep_rank=j, tp=etp, tp_rank=i) for i in range(etp) for j in range(ep)]
        else:
            holders = [at(tp, rank) for rank in range(1 if is_whole(part) else tp)]
        for holder in holders:
            held.update(weight(place, part, model, *holder, whole).flatten().tolist())
    assert set(held.values()) == {1}
    assert len(held) == model.num_parameters == sum(each.numel() for each in whole.given.values())


def test_each_group_of_heads_has_its_queries_then_key_then_value():
    whole = Numbered()
    found = weight("layers.0", "self_attention.linear_qkv.weight", LLAMA, *at(), whole)
    q, k, v = (whole.given[f"layers.0.attention.{name}.weight"] for name in "qkv")
    size = LLAMA.head_size
    assert torch.equal(found, torch.cat([q[: 2 * size], k[:size], v[:size], q[2 * size :], k[size:], v[size:]]))
    second = weight("layers.0", "self_attention.linear_qkv.weight", LLAMA, *at(2, 1), whole)
    assert torch.equal(second, torch.cat([q[2 * size :], k[size:], v[size:]]))


def test_each_rank_stacks_its_gate_on_its_up_projection():
    whole = Numbered()
    second = weight("layers.0", "mlp.linear_fc1.weight", LLAMA, *at(2, 1), whole)
    gate, up = (whole.given[f"layers.0.ffn.{name}.weight"] for name in ("gate", "up"))
    assert torch.equal(second, torch.cat([gate[12:], up[12:]]))


def test_projections_back_are_cut_by_columns():
    whole = Numbered()
    second = weight("layers.0", "mlp.linear_fc2.weight", LLAMA, *at(2, 1), whole)
    assert torch.equal(second, whole.given["layers.0.ffn.down.weight"][:, 12:])


def test_experts_are_stacked_and_named_as_the_torch_engines():
    whole = Numbered()
    found = weight("layers.0", "mlp.experts.fc1", MIXTRAL, *at(ep=2, ep_rank=1, tp=2, tp_rank=0), whole)
    assert found.shape == (2, 24, 16)
    names = [f"layers.0.ffn.experts.{name}.{number}" for number in (2, 3) for name in ("gate", "up")]
    assert list(whole.given) == names
    assert torch.equal(found[1], torch.cat([whole.given[name][:12] for name in names[2:]]))


@pytest.mark.parametrize(
    ("block", "name", "cut"),
    [
        ("self_attention", "q", "b"),
        ("self_attention", "v", "b"),
        ("self_attention", "o", "a"),
        ("mlp", "up", "b"),
        ("mlp", "down", "a"),
    ],
)
def test_of_an_adapter_ranks_share_the_half_that_meets_what_they_share(block, name, cut):
    whole, lora = Numbered(), Lora(rank=3)
    for half, dim in (("a", 1), ("b", 0)):
        ranks = [adapter("layers.0", block, half, name, LLAMA, lora, at(2, rank)[0], whole) for rank in range(2)]
        owner = {"self_attention": "attention", "mlp": "ffn"}[block]
        value = whole.given[f"layers.0.{owner}.{name}.lora_{half}.weight"]
        assert value.shape[1 - dim] == lora.rank
        if half == cut:
            assert torch.equal(torch.cat(ranks, dim), value) and ranks[0].shape == ranks[1].shape
        else:
            assert torch.equal(ranks[0], value) and torch.equal(ranks[1], value)


def test_tied_ends_are_one_weight():
    whole = Numbered()
    first = weight("", "embedding.word_embeddings.weight", TIED, *at(2), whole)
    last = weight("", "output_layer.weight", TIED, *at(2), whole)
    assert list(whole.given) == ["embedding.tokens.weight"] and torch.equal(first, last)


def test_a_vocabulary_that_the_degree_does_not_divide_ends_in_rows_of_zeros():
    whole, odd = Numbered(), replace(TIED, vocab_size=131)
    pieces = [weight("", "embedding.word_embeddings.weight", odd, *at(2, r), whole) for r in range(2)]
    assert [len(piece) for piece in pieces] == [128, 128]
    together = torch.cat(pieces)
    assert torch.equal(together[:131], whole.given["embedding.tokens.weight"]) and not together[131:].any()


def test_transformer_engine_keeps_norms_in_its_linear_layers_and_experts_apart():
    whole = Numbered()
    fused = {
        "self_attention.linear_qkv.layer_norm_weight": "layers.0.attention_norm.weight",
        "mlp.linear_fc1.layer_norm_bias": "layers.0.ffn_norm.bias",
    }
    for part, name in fused.items():
        assert torch.equal(weight("layers.0", part, GPT, *at(), whole), whole.given[name])
    holder = at(ep=2, ep_rank=1)
    stacked = weight("layers.0", "mlp.experts.fc2", MIXTRAL, *holder, whole)
    apart = [weight("layers.0", f"mlp.experts.linear_fc2.weight{i}", MIXTRAL, *holder, whole) for i in range(2)]
    assert torch.equal(stacked, torch.stack(apart))


def test_an_unknown_parameter_is_an_error():
    with pytest.raises(KeyError, match=r"layers\.0\.mlp\.shared_experts"):
        weight("layers.0", "mlp.shared_experts.linear_fc3.weight", LLAMA, *at(), Numbered())

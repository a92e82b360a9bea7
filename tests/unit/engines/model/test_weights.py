"""Initial weights follow from seed and name alone, however a model is cut."""

from dataclasses import replace

import pytest
import torch

from wattune.catalog.models import ModelSpec
from wattune.engines.model.decoder import Decoder, Layer
from wattune.engines.model.experts import Experts, ExpertShard
from wattune.engines.model.weights import INIT_STD, draw, initialise, round_values

MODEL = ModelSpec(
    name="tiny", num_layers=2, hidden_size=32, ffn_hidden_size=48, num_heads=4, num_kv_heads=2, vocab_size=40
)
MIXTRAL = replace(MODEL, num_experts=4, num_experts_per_token=2)
CPU = torch.device("cpu")


def test_values_follow_from_seed_and_full_name() -> None:
    of = {
        (name, seed): draw(name, torch.Size((64, 64)), seed, CPU)
        for name in ("layers.0.attention.q.weight", "layers.1.attention.q.weight")
        for seed in (1, 2)
    }
    again = draw("layers.0.attention.q.weight", torch.Size((64, 64)), 1, CPU)
    assert torch.equal(again, of["layers.0.attention.q.weight", 1])
    assert len({tuple(value.flatten().tolist()) for value in of.values()}) == 4
    assert again.std().item() == pytest.approx(INIT_STD, rel=0.05) and abs(again.mean().item()) < INIT_STD / 20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers.0.attention_norm.weight", 1.0),
        ("layers.0.ffn.up.bias", 0.0),
        ("layers.0.attention.q.lora_b.weight", 0.0),
    ],
)
def test_norms_start_at_one_and_biases_and_the_second_half_of_adapters_at_zero(name: str, value: float) -> None:
    assert torch.equal(draw(name, torch.Size((5,)), 1, CPU), torch.full((5,), value))


def test_a_layer_alone_is_the_layer_of_the_whole_model() -> None:
    whole = Decoder(MODEL, range(2), rotation=None, recompute="none", experts=ExpertShard())
    for index, layer in whole.layers.items():
        initialise(layer, f"layers.{index}", MODEL, 3)
    alone = Layer(MODEL, None, "none", ExpertShard())
    initialise(alone, "layers.1", MODEL, 3)
    for one, other in zip(alone.parameters(), whole.layers["1"].parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(whole.layers["0"].attention.q.weight, whole.layers["1"].attention.q.weight)


def test_tied_ends_are_drawn_alike() -> None:
    tied = replace(MODEL, tied_embeddings=True)
    whole = Decoder(tied, range(2), rotation=None, recompute="none", experts=ExpertShard())
    initialise(whole.embedding, "embedding", tied, 3)
    initialise(whole.head, "head", tied, 3)
    assert torch.equal(whole.embedding.tokens.weight, whole.head.output.weight)


def test_ranks_hold_pieces_of_the_same_experts() -> None:
    whole = Experts(MIXTRAL, ExpertShard())
    initialise(whole, "layers.0.ffn.experts", MIXTRAL, 3)
    half = Experts(MIXTRAL, ExpertShard(ep=2, ep_rank=1))
    initialise(half, "layers.0.ffn.experts", MIXTRAL, 3)
    assert torch.equal(half.up, whole.up[2:]) and torch.equal(half.down, whole.down[2:])
    slices = [Experts(MIXTRAL, ExpertShard(tp=2, tp_rank=rank)) for rank in range(2)]
    for each in slices:
        initialise(each, "layers.0.ffn.experts", MIXTRAL, 3)
    assert torch.equal(torch.cat([each.up for each in slices], 1), whole.up)
    assert torch.equal(torch.cat([each.down for each in slices], 2), whole.down)


def test_rounded_values_are_those_of_the_lower_type() -> None:
    layer = Layer(MODEL, None, "none", ExpertShard())
    initialise(layer, "layers.0", MODEL, 3)
    before = layer.attention.q.weight.clone()
    round_values(layer, torch.bfloat16)
    after = layer.attention.q.weight
    assert after.dtype == torch.float32 and torch.equal(after, before.to(torch.bfloat16).float())
    assert not torch.equal(after, before)

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from wattune.catalog.models import ModelSpec
from wattune.engines.model.experts import Experts, ExpertShard, MixtureOfExperts
from wattune.engines.model.weights import initialise


def spec(activation: str = "swiglu", *, bias: bool = False, capacity: float | None = None) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        num_layers=1,
        hidden_size=16,
        ffn_hidden_size=32,
        num_heads=4,
        num_kv_heads=4,
        vocab_size=40,
        num_experts=4,
        num_experts_per_token=2,
        activation=activation,
        bias=bias,
        expert_capacity_factor=capacity,
    )


def mixture(model: ModelSpec) -> MixtureOfExperts:
    layer = MixtureOfExperts(model, ExpertShard())
    initialise(layer, "layers.0.ffn", model, seed=5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    return layer


def token_by_token(layer: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """The same mixture written as its definition: each token asks its experts one by one."""
    experts, out = layer.experts, torch.zeros_like(x)
    for place in range(x.shape[0]):
        logits = layer.router.weight @ x[place]
        top, chosen = logits.topk(layer.num_per_token)
        for gate, expert in zip(top.softmax(0), chosen.tolist(), strict=True):

            def projected(name: str, inputs: torch.Tensor, expert: int = expert) -> torch.Tensor:
                bias = getattr(experts, f"{name}_bias")
                return F.linear(inputs, getattr(experts, name)[expert], None if bias is None else bias[expert])

            up = projected("up", x[place])
            inner = F.gelu(up) if experts.gate is None else F.silu(projected("gate", x[place])) * up
            out[place] += gate * projected("down", inner)
    return out


@pytest.mark.parametrize(("activation", "bias"), [("swiglu", False), ("swiglu", True), ("gelu", True)])
def test_dropless_mixture_is_its_definition(activation: str, bias: bool) -> None:
    layer = mixture(spec(activation, bias=bias))
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ours = layer(x)
    ours.square().sum().backward()
    ours_grads = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    layer.zero_grad()
    twin = x.detach().clone().requires_grad_()
    theirs = token_by_token(layer, twin.view(10, 16)).view(2, 5, 16)
    theirs.square().sum().backward()
    assert torch.allclose(ours, theirs, atol=1e-5)
    for one, other in zip(ours_grads, [twin.grad, *(p.grad for p in layer.parameters())], strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@settings(deadline=None)
@given(chosen=st.lists(st.integers(0, 3), min_size=1, max_size=40), factor=st.floats(0.25, 4))
def test_capacity_keeps_the_first_tokens_of_each_expert(chosen: list[int], factor: float) -> None:
    layer = MixtureOfExperts(spec(capacity=factor), ExpertShard())
    kept, counts = layer._assign(torch.tensor(chosen), torch.tensor(chosen).bincount(minlength=4))
    capacity = math.ceil(len(chosen) / 4 * factor)
    expected = []
    for expert in range(4):
        expected += [index for index, value in enumerate(chosen) if value == expert][:capacity]
    assert kept.tolist() == expected
    assert counts.tolist() == [min(chosen.count(expert), capacity) for expert in range(4)]


def test_a_dropped_token_passes_unchanged() -> None:
    """With hardly any capacity most tokens meet no expert, and the block adds nothing to them."""
    layer = mixture(spec(capacity=0.1))
    x = torch.randn(1, 20, 16, generator=torch.Generator().manual_seed(0))
    touched = (layer(x)[0] != 0).any(-1)
    assert 1 <= int(touched.sum()) <= 4


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_slices_of_experts_add_up(tp: int, activation: str) -> None:
    model = spec(activation, bias=True)
    tokens = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    counts = torch.tensor([3, 0, 4, 1])
    sums = []
    for degree in (1, tp):
        slices = [Experts(model, ExpertShard(tp=degree, tp_rank=rank)) for rank in range(degree)]
        for each in slices:
            initialise(each, "layers.0.ffn.experts", model, seed=5)
            with torch.no_grad():
                for bias in (each.gate_bias, each.up_bias, each.down_bias):
                    if bias is not None:
                        bias.fill_(1.0)
        sums.append(sum(each(tokens, counts) for each in slices))
    assert torch.allclose(sums[0], sums[1], atol=1e-5)

"""Offloaded activations: the same gradients to the last bit, no weight moved, two layers on the device at a time."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from wattune.catalog.models import ModelSpec
from wattune.engines.model import offload
from wattune.engines.model.compiler import Compiler
from wattune.engines.model.decoder import Decoder, Rotation
from wattune.engines.model.experts import ExpertShard
from wattune.engines.model.offload import Offload
from wattune.engines.model.weights import initialise

CPU = torch.device("cpu")
LLAMA = ModelSpec(
    name="llama", num_layers=5, hidden_size=32, ffn_hidden_size=48, num_heads=4, num_kv_heads=2, vocab_size=64
)
MIXTRAL = replace(LLAMA, num_experts=4, num_experts_per_token=2)
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every layer's call, in the order of the forward passes."""
    made: list[Any] = []

    class Noted(offload._Call):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(offload, "_Call", Noted)
    yield made


def decoder(
    model: ModelSpec, *, recompute: str = "none", offloads: bool = True, compiler: str | None = None
) -> Decoder:
    rotation = Rotation.table(model, 16, CPU, torch.float32)
    whole = Decoder(model, range(model.num_layers), rotation=rotation, recompute=recompute, experts=ExpertShard())
    for name, part in (("embedding", whole.embedding), ("head", whole.head)):
        initialise(part, name, model, 3)
    for index, layer in whole.layers.items():
        initialise(layer, f"layers.{index}", model, 3)
    whole.compile_with(Compiler(backend=compiler))
    if offloads:
        whole.offload = Offload(CPU, (rotation.cos, rotation.sin))
    return whole


def gradients(whole: Decoder, num_micro_batches: int = 1) -> list[Tensor]:
    losses = [whole(TOKENS, TOKENS.roll(shift, 1)) for shift in range(num_micro_batches)]
    for loss in losses:
        loss.backward()
    return [parameter.grad for parameter in whole.parameters()]


def on_device(calls: list[Any]) -> list[int]:
    return [sum(kept.device is not None for kept in call._alive()) for call in calls]


@pytest.mark.parametrize("compiler", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_gradients_are_the_same_to_the_last_bit(model: ModelSpec, recompute: str, compiler: str | None) -> None:
    both = [gradients(decoder(model, recompute=recompute, offloads=on, compiler=compiler), 2) for on in (False, True)]
    assert all(torch.equal(plain, moved) for plain, moved in zip(*both, strict=True))


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_two_layers_are_on_the_device_at_a_time(
    calls: list[Any], compiler: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = decoder(LLAMA, compiler=compiler)
    loss = whole(TOKENS, TOKENS)
    assert len(calls) == LLAMA.num_layers
    assert all(len(call._alive()) >= 5 for call in calls)  # queries, keys, values, both norms, ...
    assert [number > 0 for number in on_device(calls)] == [False] * 4 + [True]
    most: list[int] = []
    take = offload._Call.take

    def noted(call: Any, kept: Any) -> Tensor:
        taken = take(call, kept)
        most.append(sum(number > 0 for number in on_device(calls)))
        return taken

    monkeypatch.setattr(offload._Call, "take", noted)
    loss.backward()
    assert max(most) == 2
    gc.collect()
    assert on_device(calls) == [0] * LLAMA.num_layers  # and what they kept is gone


@pytest.mark.parametrize("model", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_weights_and_positions_stay(calls: list[Any], model: ModelSpec) -> None:
    whole = decoder(model)
    loss = whole(TOKENS, TOKENS)
    moved = [kept.host for call in calls for kept in call._alive()]
    rotation = whole.layers["0"].attention.rotation
    staying = [rotation.cos, rotation.sin]
    for weight in whole.parameters():
        staying += [weight] if weight.dim() < 2 else [weight, weight.transpose(-2, -1)]
    assert len(moved) > 5 * model.num_layers
    assert not any(one.shape == other.shape and torch.equal(one, other) for one in moved for other in staying)
    del loss


def test_full_recomputation_moves_a_layers_input_alone(calls: list[Any]) -> None:
    loss = decoder(LLAMA, recompute="full")(TOKENS, TOKENS)
    hosts = [[kept.host for kept in call._alive()] for call in calls]
    assert [[host.shape for host in each] for each in hosts] == [[(2, 16, LLAMA.hidden_size)]] * LLAMA.num_layers
    del loss


def test_a_forward_pass_without_gradients_moves_nothing(calls: list[Any]) -> None:
    with torch.no_grad():
        decoder(LLAMA)(TOKENS, TOKENS)
    assert calls == []


def test_micro_batches_in_flight_are_kept_apart(calls: list[Any]) -> None:
    """A pipeline's stage: all forward passes, then the backward passes in the same order."""
    whole = decoder(LLAMA)
    losses = [whole(TOKENS, TOKENS.roll(shift, 1)) for shift in range(3)]
    assert [number > 0 for number in on_device(calls)] == [False] * 14 + [True]
    for loss in losses:
        loss.backward()
    plain = gradients(decoder(LLAMA, offloads=False), 3)
    assert all(torch.equal(one.grad, other) for one, other in zip(whole.parameters(), plain, strict=True))


def test_a_view_that_is_saved_twice_is_copied_once(calls: list[Any]) -> None:
    moved = Offload(CPU)
    x = torch.randn(64, 64, requires_grad=True)
    with moved.layer(torch.nn.Identity()):
        y = x * x  # saves it on both sides
        z = y.t().exp() + y.sin()
    (call,) = calls
    assert len(call._alive()) == 3  # x, the exponential, y
    z.sum().backward()
    y = (x * x).detach()
    assert torch.equal(x.grad, 2 * x * (y.exp() + y.cos()))


class _SavesEveryOther(torch.autograd.Function):
    """Saves a view with gaps of a tensor that nothing else holds, and gives it back as the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward((x * factor)[:, ::2])
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        return grad * saved.repeat_interleave(2, dim=1), None


def test_memory_used_again_inside_a_layer_is_not_taken_for_the_tensor_before() -> None:
    moved = Offload(CPU)
    x = torch.ones(64, 64, requires_grad=True)
    with moved.layer(torch.nn.Identity()):
        parts = [_SavesEveryOther.apply(x, float(factor)) for factor in range(1, 9)]
    sum(parts).backward()
    assert torch.equal(x.grad, torch.full_like(x, sum(range(1, 9))))

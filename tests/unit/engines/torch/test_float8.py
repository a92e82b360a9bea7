"""Conversion of linear layers to FP8: its extent, its exactness, and the devices that are refused."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from wattune.catalog.models import ModelSpec
from wattune.engines.model.decoder import Decoder
from wattune.engines.model.experts import ExpertShard
from wattune.engines.torch.float8 import convert_layers
from wattune.errors import EngineError

DENSE = ModelSpec(
    name="dense", num_layers=3, hidden_size=64, ffn_hidden_size=96, num_heads=4, num_kv_heads=2, vocab_size=128
)
MOE = ModelSpec(
    name="moe",
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=96,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=128,
    num_experts=4,
    num_experts_per_token=2,
)
CPU = torch.device("cpu")


def decoder(model: ModelSpec, device: str = "meta") -> Decoder:
    with torch.device(device):
        layers = range(model.num_layers)
        return Decoder(model, layers, rotation=None, recompute="none", experts=ExpertShard())


def linears(part: nn.Module) -> dict[str, str]:
    return {name: type(each).__name__ for name, each in part.named_modules() if isinstance(each, nn.Linear)}


def test_the_linear_layers_of_layers_are_converted_and_nothing_else() -> None:
    before, after = decoder(DENSE), decoder(DENSE)
    parameters = dict(after.named_parameters())
    convert_layers(after, CPU)
    kinds = linears(after)
    assert list(kinds) == list(linears(before))
    assert [name for name, kind in kinds.items() if kind == "Linear"] == ["head.output"]
    assert sum(kind == "Float8Linear" for kind in kinds.values()) == 7 * DENSE.num_layers
    assert all(parameters[name] is own for name, own in after.named_parameters())
    assert {type(each) for each in after.modules()} - {type(each) for each in before.modules()} == {
        type(after.layers["0"].attention.q)  # type: ignore[union-attr]
    }


def test_routers_and_experts_stay_as_they_are() -> None:
    part = decoder(MOE)
    convert_layers(part, CPU)
    plain = {name for name, kind in linears(part).items() if kind == "Linear"}
    assert plain == {"layers.0.ffn.router", "layers.1.ffn.router", "head.output"}


def products(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and gradients of input and weight, where output's own gradient is small and uneven."""
    x = x.clone().requires_grad_()
    y = layer(x)
    torch.manual_seed(3)
    y.backward(1e-6 * torch.randn_like(y))
    weight = layer.weight
    assert isinstance(weight, Tensor) and x.grad is not None and weight.grad is not None
    return [y.detach().float(), x.grad.float(), weight.grad.float()]


def errors() -> list[float]:
    """Relative errors (root mean square) of the three products of an FP8 layer with values far from 1."""
    torch.manual_seed(0)
    part = decoder(DENSE, "cpu")
    q = part.layers["0"].attention.q  # type: ignore[union-attr]
    assert isinstance(q, nn.Linear)
    with torch.no_grad():
        q.weight.normal_(std=1e-4)
    x = 1e4 * torch.randn(32, 64)
    exact = products(q, x)
    q.weight.grad = None
    q.to(torch.bfloat16)
    convert_layers(part, CPU)
    rounded = products(part.layers["0"].attention.q, x.bfloat16())  # type: ignore[union-attr, arg-type]
    return [float((a - b).norm() / b.norm()) for a, b in zip(rounded, exact, strict=True)]


def test_products_are_as_exact_as_eight_bits_are_at_any_magnitude() -> None:
    """e4m3 rounds to 2^-4, e5m2 to 2^-3 at most; over normal values that is 2.6 % and 5.2 % (root mean square)."""
    output, grad_input, grad_weight = errors()
    assert 0.02 < output < 0.05
    assert 0.04 < grad_input < 0.08
    assert 0.04 < grad_weight < 0.08


@pytest.mark.parametrize("factor", [2.0, 1e-6, None], ids=["too large", "too small", "none"])
def test_a_wrong_scale_is_far_less_exact(factor: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    convert_layers(decoder(DENSE), CPU)
    from torchao.float8 import float8_scaling_utils

    right = float8_scaling_utils.tensor_to_scale

    def wrong(*args: object, **options: object) -> Tensor:
        scale = right(*args, **options)
        return torch.ones_like(scale) if factor is None else scale * factor

    monkeypatch.setattr(float8_scaling_utils, "tensor_to_scale", wrong)
    assert not max(errors()) < 0.09


@pytest.mark.parametrize(
    ("properties", "hip", "words"),
    [
        ({"major": 8, "minor": 0, "name": "NVIDIA A100"}, None, "NVIDIA A100 (8.0) has no products in FP8, compute"),
        ({"gcnArchName": "gfx90a:sramecc+", "name": "AMD MI250"}, "7.0", "AMD MI250 (gfx90a:sramecc+) has no products"),
        ({"major": 8, "minor": 9, "name": "NVIDIA L40S"}, None, ""),
        ({"major": 9, "minor": 0, "name": "NVIDIA H200"}, None, ""),
        ({"gcnArchName": "gfx942", "name": "AMD MI300X"}, "7.0", ""),
    ],
    ids=["A100", "MI250", "L40S", "H200", "MI300X"],
)
def test_a_gpu_without_products_in_fp8_is_refused_before_its_first_step(
    properties: dict[str, object], hip: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**properties))
    monkeypatch.setattr(torch.version, "hip", hip)
    part = decoder(DENSE)
    if not words:
        convert_layers(part, torch.device("cuda"))
        config = part.layers["0"].attention.q.config  # type: ignore[union-attr]
        assert config.emulate is False
        return
    with pytest.raises(EngineError) as error:
        convert_layers(part, torch.device("cuda"))
    assert words in str(error.value) and str(error.value).endswith("use dtype=bf16")
    assert set(linears(part).values()) == {"Linear"}


def test_torchao_leaves_environment_and_loggers_as_they_were() -> None:
    names = ("torchao", "torch.utils._pytree")
    environment, levels = dict(os.environ), [logging.getLogger(name).level for name in names]
    convert_layers(decoder(DENSE), CPU)
    assert dict(os.environ) == environment
    assert [logging.getLogger(name).level for name in names] == levels

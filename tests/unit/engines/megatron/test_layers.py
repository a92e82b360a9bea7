"""Our parts of Megatron's layers: the results they give, and that they compile as whole graphs."""

import importlib
import importlib.util
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from specs import trial_spec

from wattune.catalog.models import ModelSpec
from wattune.engines.megatron import config as megatron_config
from wattune.engines.model.compiler import EAGER, Compiler
from wattune.engines.model.decoder import Attention, Rotation
from wattune.engines.registry import check_libraries
from wattune.errors import EngineError
from wattune.trial import TrialSpec

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")

GROUPED = ModelSpec(
    name="grouped", num_layers=1, hidden_size=32, ffn_hidden_size=64, num_heads=4, num_kv_heads=2, vocab_size=16
)
PLAIN = replace(GROUPED, num_kv_heads=4)
MIXTRAL = replace(GROUPED, num_experts=4, num_experts_per_token=2)
COMPILERS = [EAGER, Compiler(backend="aot_eager")]


@pytest.fixture(scope="module")
def layers() -> ModuleType:
    """Loaded by the process that runs these tests alone: Megatron-Core takes seconds, and each process collects all."""
    return importlib.import_module("wattune.engines.megatron.layers")


@pytest.mark.parametrize("compiler", COMPILERS, ids=str)
@pytest.mark.parametrize("model", [GROUPED, PLAIN], ids=["grouped", "plain"])
@pytest.mark.parametrize("turns", [True, False])
def test_attention_is_the_torch_engines(layers, model, turns, compiler):
    torch.manual_seed(0)
    batch, seq_len, size = 2, 6, model.head_size
    rotation = Rotation.table(model, seq_len, torch.device("cpu"), torch.float32) if turns else None
    reference = Attention(model, rotation, recompute=False)
    heads = {"q": model.num_heads, "k": model.num_kv_heads, "v": model.num_kv_heads}
    inputs = {name: torch.randn(batch, seq_len, count * size, requires_grad=True) for name, count in heads.items()}
    expected = reference._attend(*inputs.values())
    theirs = [inputs[name].detach().view(batch, seq_len, heads[name], size).transpose(0, 1) for name in "qkv"]
    theirs = [each.requires_grad_() for each in theirs]
    turned = (None, None) if rotation is None else (rotation.cos, rotation.sin)
    found = compiler.run(layers._attend, *theirs, *turned, model is GROUPED)
    torch.testing.assert_close(found.transpose(0, 1), expected)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    found.backward(gradient.transpose(0, 1))
    for name, each in zip("qkv", theirs, strict=True):
        assert each.grad is not None
        torch.testing.assert_close(each.grad.transpose(0, 1).flatten(2), inputs[name].grad)


@pytest.mark.parametrize("compiler", COMPILERS, ids=str)
def test_norms_compile_and_are_torchs(layers, compiler):
    x, weight, bias = torch.randn(5, 2, 8), torch.randn(8), torch.randn(8)
    expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    torch.testing.assert_close(compiler.run(layers._rms_norm, x, weight, 1e-5), expected)
    for each in (bias, None):
        expected = torch.nn.functional.layer_norm(x, (8,), weight, each, 1e-5)
        torch.testing.assert_close(compiler.run(layers._layer_norm, x, weight, each, 1e-5), expected)


def test_context_parallel_ranks_share_a_sequence_evenly_and_fairly():
    from wattune.engines.megatron.engine import own_part

    whole = torch.arange(16).view(1, 16)
    parts = [own_part(whole, 2, rank) for rank in range(2)]
    assert parts[0].tolist() == [[0, 1, 2, 3, 12, 13, 14, 15]]
    assert sorted(torch.cat(parts).flatten().tolist()) == list(range(16))
    attended = [int((part + 1).sum()) for part in parts]
    assert attended[0] == attended[1]
    assert own_part(whole, 1, 0) is whole


def on(transformer_engine, model=GROUPED, **axes) -> TrialSpec:
    return trial_spec(
        model, on="1x2 h200_sxm", transformer_engine=transformer_engine, engine="megatron", seq_len=16, batch=4, **axes
    )


@pytest.mark.parametrize(("model", "experts"), [(GROUPED, None), (MIXTRAL, 4)])
def test_a_cluster_with_transformer_engine_gets_its_layers(layers, model, experts, monkeypatch):
    """The choice alone: it is not installed here, so what Megatron would make of its parts is stood in for."""
    asked = []

    def its_layers(**arguments):
        asked.append(arguments)
        return "its layers"

    monkeypatch.setattr(layers.specs, "HAVE_TE", True)
    monkeypatch.setattr(layers.specs, "TENorm", "its norm", raising=False)
    monkeypatch.setattr(layers.specs, "get_gpt_layer_with_transformer_engine_spec", its_layers)
    config = SimpleNamespace(
        moe_grouped_gemm=megatron_config.transformer(on(True, model)).get("moe_grouped_gemm", False)
    )
    assert layers.layer_specs(on(True, model), config, model) == ("its layers", "its norm")
    assert asked == [{"num_experts": experts, "moe_grouped_gemm": experts is not None, "qk_layernorm": False}]


def test_without_it_layers_are_ours_and_a_cluster_that_claims_it_is_refused(layers):
    layer, norm = layers.layer_specs(on(False), SimpleNamespace(normalization="RMSNorm"), GROUPED)
    assert norm is layers.Norm and layer.submodules.self_attention.submodules.core_attention is layers.FusedAttention
    check_libraries(on(False))
    for refusing in (check_libraries, lambda spec: layers.layer_specs(spec, None, GROUPED)):
        with pytest.raises(
            EngineError, match=r"1x2 h200_sxm says transformer_engine: true .*or set transformer_engine: false"
        ):
            refusing(on(True))

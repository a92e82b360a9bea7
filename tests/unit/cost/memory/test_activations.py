"""Counted activations are those that the layers' own graphs keep."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from specs import trial_spec
from torch.autograd.graph import saved_tensors_hooks

from wattune.catalog.models import ModelSpec, model
from wattune.cost.batch import batches
from wattune.cost.memory.activations import compiled_layer, eager_layer, mixture_layer, received_rows
from wattune.cost.memory.shapes import Shapes, shapes
from wattune.engines.model.compiler import EAGER, Compiler
from wattune.engines.model.decoder import Decoder, Rotation
from wattune.engines.model.experts import ExpertShard
from wattune.engines.torch.float8 import convert_layers
from wattune.workload import Routing

SEQ_LEN = 256
SMALL = {"num_layers": 2, "hidden_size": 256, "num_heads": 8, "vocab_size": 1000}
LLAMA = replace(model("llama3_8b"), ffn_hidden_size=896, num_kv_heads=2, **SMALL)
GPT = replace(model("gpt3_175b"), ffn_hidden_size=1024, num_kv_heads=8, max_positions=SEQ_LEN, **SMALL)
MIXTRAL = replace(model("mixtral_8x7b"), ffn_hidden_size=896, num_kv_heads=2, **SMALL)
PARTITIONED = Compiler(backend="aot_eager_decomp_partition")
"""The partitioner that decides what Inductor's graphs keep, without Inductor's code."""


def shapes_of(of: ModelSpec, recompute: str, device: str = "h200_sxm", dtype: str = "bf16") -> Shapes:
    spec = trial_spec(
        of,
        on=f"1x1 {device}",
        seq_len=SEQ_LEN,
        batch=1,
        routing=Routing(by="balanced") if of.is_moe else None,
        recompute=recompute,
        dtype=dtype,
    )
    ((_, batch),) = batches([spec])
    return shapes(batch, splits_ends=True, rounds_of_pp=False)


def kept_bytes(of: ModelSpec, recompute: str, compiler: Compiler, *, fp8: bool = False) -> int:
    """Bytes that one layer keeps for its backward pass, weights and rotation left out."""
    rotation = None
    if of.positions == "rope":
        rotation = Rotation.table(of, SEQ_LEN, torch.device("cpu"), torch.bfloat16)
    decoder = Decoder(of, range(2), rotation=rotation, recompute=recompute, experts=ExpertShard()).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.02)
    if fp8:
        convert_layers(decoder, torch.device("cuda"))
    decoder.compile_with(compiler)
    others = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    if rotation is not None:
        others |= {rotation.cos.untyped_storage().data_ptr(), rotation.sin.untyped_storage().data_ptr()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in others:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder.layers["0"](torch.randn(1, SEQ_LEN, of.hidden_size, dtype=torch.bfloat16, requires_grad=True))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("of", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_compiled_layer_keeps_what_is_counted(of: ModelSpec, recompute: str) -> None:
    counted = compiled_layer(shapes_of(of, recompute)).saved[0, 0]
    # Statistics of norms, and a random state for attention that is computed again, are not counted. With as many
    # heads for keys as for queries attention on a processor gives one tensor where GPUs were measured with two.
    assert kept_bytes(of, recompute, PARTITIONED) == pytest.approx(counted, rel=0.03 if of is LLAMA else 0.06)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("of", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_compiled_layer_in_fp8_keeps_what_is_counted(
    of: ModelSpec, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph of a GPU's products, traced on a processor: norms' outputs are computed and rounded again."""
    able = SimpleNamespace(major=9, minor=0, name="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: able)
    counted = compiled_layer(shapes_of(of, recompute, dtype="fp8")).saved[0, 0]
    # A processor's graph keeps attention's output in FP8 too, half a row that no peak on a GPU shows.
    half_a_row = SEQ_LEN * of.hidden_size * (recompute == "none")
    assert kept_bytes(of, recompute, PARTITIONED, fp8=True) == pytest.approx(counted + half_a_row, rel=0.03)


def test_an_eager_layer_keeps_what_is_counted() -> None:
    """Of the GPT model: RMSNorm and grouped queries have fused kernels on GPUs only."""
    counted = eager_layer(shapes_of(GPT, "none")).saved[0, 0]
    # On processors attention's output is copied where GPUs view it.
    copied = 2 * SEQ_LEN * GPT.hidden_size
    assert kept_bytes(GPT, "none", EAGER) == pytest.approx(counted + copied, rel=0.06)


def test_full_recomputation_keeps_a_layers_input_alone() -> None:
    layer = mixture_layer(shapes_of(MIXTRAL, "full"), compiled=True, gathers=True)
    assert layer.saved[0, 0] == layer.input[0, 0] == 2 * SEQ_LEN * MIXTRAL.hidden_size


def test_experts_keep_rows_of_every_assignment() -> None:
    sizes = shapes_of(MIXTRAL, "none")
    layer = mixture_layer(sizes, compiled=True, gathers=True)
    rows = received_rows(sizes)[0, 0]
    assert rows == 2 * SEQ_LEN
    kept = 2 * rows * (2 * MIXTRAL.hidden_size + 4 * MIXTRAL.ffn_hidden_size)
    assert layer.experts[0, 0] == pytest.approx(kept, rel=0.02)
    assert layer.experts[0, 0] < layer.whole[0, 0]


@pytest.mark.parametrize("experts", [(8, 2, 896), (32, 4, 256)], ids=str)
def test_a_layer_with_experts_keeps_what_is_counted(experts: tuple[int, int, int]) -> None:
    names = ("num_experts", "num_experts_per_token", "ffn_hidden_size")
    of = replace(MIXTRAL, **dict(zip(names, experts, strict=True)))
    counted = mixture_layer(shapes_of(of, "none"), compiled=True, gathers=True).saved[0, 0]
    # On processors the second norm keeps its input and what it normed in fp32, where a GPU's kernel keeps its input.
    normed = 3 * 2 * SEQ_LEN * of.hidden_size
    assert kept_bytes(of, "none", PARTITIONED) == pytest.approx(counted + normed, rel=0.02)


def test_where_takes_one_layer_or_the_other() -> None:
    sizes = shapes_of(LLAMA, "none")
    one, other = compiled_layer(sizes), eager_layer(sizes)
    assert one.where(np.array([[True]]), other).saved == one.saved
    assert one.where(np.array([[False]]), other).saved == other.saved

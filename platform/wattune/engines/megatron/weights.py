"""The torch engine's initial weights in Megatron's layout: same model from the same seed, whatever holds it.

Megatron keeps queries, keys and values of each group of heads together, gate and up projection one above the other,
both already cut by tensor parallelism; the head's weight is the embedding's where they are tied.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from wattune.catalog.models import ModelSpec
from wattune.engines.model.experts import ExpertShard
from wattune.engines.model.tensor_ranks import TensorRanks
from wattune.engines.model.weights import draw, pad_rows
from wattune.plans.parallel import padded_vocab_size
from wattune.workload import Lora


@torch.no_grad()
def initialise(
    chunk: nn.Module, model: ModelSpec, ranks: TensorRanks, experts: ExpertShard, seed: int, lora: Lora | None = None
) -> None:
    """Fills a GPT model of Megatron's, or a stage's part of one: seed and full name of a parameter decide its value."""
    numbers = {index: layer.layer_number - 1 for index, layer in enumerate(chunk.decoder.layers)}  # type: ignore[union-attr, arg-type]
    for full_name, parameter in chunk.named_parameters():
        found = _LAYER.match(full_name)
        place, part = (f"layers.{numbers[int(found[1])]}", found[2]) if found else ("", full_name)
        kind = model.kind_of(numbers[int(found[1])]) if found else model
        whole = partial(_draw, seed, parameter.device)
        if lora is not None and (adapts := _ADAPTER.match(part)) is not None:
            block, half, name = adapts.groups()
            value = adapter(place, block, half, name, model, lora, ranks, whole)
        else:
            value = weight(place, part.replace(".base.", "."), kind, ranks, experts, whole)
        parameter.copy_(value)


_LAYER: Final = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_ADAPTER: Final = re.compile(r"(self_attention|mlp)\.linear_\w+\.lora_([ab])_(\w+)$")


def adapter(
    place: str, block: str, half: str, name: str, model: ModelSpec, lora: Lora, ranks: TensorRanks, whole: "Whole"
) -> Tensor:
    """One half of an adapter; see `wattune.engines.megatron.lora` for which rank holds what."""
    hidden, inner, kv = model.hidden_size, model.ffn_hidden_size, model.num_kv_heads * model.head_size
    outputs = {"q": model.query_width, "k": kv, "v": kv, "gate": inner, "up": inner}.get(name, hidden)
    inputs = {"o": model.output_width, "down": inner}.get(name, hidden)
    shape = (outputs, lora.rank) if half == "b" else (lora.rank, inputs)
    owner = {"self_attention": "attention", "mlp": "ffn"}[block]
    value = whole(f"{place}.{owner}.{name}.lora_{half}.weight", *shape)
    dim = {"a": 1, "b": 0}[half]
    is_cut = (half == "a") == (name in ("o", "down"))
    return ranks.piece(value, dim) if is_cut else value


def _draw(seed: int, device: torch.device, name: str, *shape: int) -> Tensor:
    return draw(name, torch.Size(shape), seed, device)


Whole = Callable[..., Tensor]
"""Gives a whole weight by the torch engine's full name and its shape."""


def weight(place: str, part: str, model: ModelSpec, ranks: TensorRanks, experts: ExpertShard, whole: Whole) -> Tensor:
    """Returns one rank's part of one parameter, fp32.

    `model` is the kind of the layer, `place` the torch engine's name of it, such as `layers.3`, and `part` Megatron's
    name inside it. Outside of layers `place` is empty and `part` the whole name. Raises `KeyError` where there is no
    such parameter in the torch engine's model.
    """
    hidden, kind = model.hidden_size, part.rsplit(".", 1)[-1]
    part = _FUSED.sub(lambda found: f"{_NORM_OF[found[1]]}.{found[2]}", part)  # TransformerEngine's norm in its linear
    if not place:
        return _outside(part, model, ranks, whole)
    if part.startswith(("input_layernorm", "pre_mlp_layernorm")):
        name = "attention_norm" if part.startswith("input") else "ffn_norm"
        return whole(f"{place}.{name}.{part.rsplit('.', 1)[-1]}", hidden)
    if part.startswith("self_attention.linear_qkv"):
        return ranks.piece(_attention_inputs(f"{place}.attention", kind, model, whole), 0)
    if part.startswith("self_attention.linear_proj"):
        return _rows(f"{place}.attention.o", kind, (hidden, model.output_width), ranks, whole)
    if (norm := _HEAD_NORM.match(part)) is not None:
        return whole(f"{place}.attention.{norm[1]}_norm.weight", model.head_size)
    if part.startswith("mlp.router"):
        return whole(f"{place}.ffn.router.weight", model.num_experts, hidden)
    if part.startswith("mlp.experts"):
        return _experts(f"{place}.ffn.experts", part.removeprefix("mlp.experts."), model, experts, whole)
    if part == "mlp.shared_experts.gate_weight":
        return whole(f"{place}.ffn.shared_gate.weight", 1, hidden)
    for prefix, name, width in (
        ("mlp.", "ffn", model.ffn_hidden_size),
        ("mlp.shared_experts.", "ffn.shared", model.shared_ffn_hidden_size),
    ):
        if part.startswith(f"{prefix}linear_fc1"):
            pieces = [_columns(f"{place}.{name}.{each}", kind, (width, hidden), ranks, whole) for each in _wide(model)]
            return torch.cat(pieces)
        if part.startswith(f"{prefix}linear_fc2"):
            return _rows(f"{place}.{name}.down", kind, (hidden, width), ranks, whole)
    raise KeyError(f"{place}.{part}")


_FUSED: Final = re.compile(r"(self_attention\.linear_qkv|mlp\.linear_fc1)\.layer_norm_(weight|bias)")
_HEAD_NORM: Final = re.compile(r"self_attention\.([qk])_layernorm\.weight$")
_NORM_OF: Final = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}


def _outside(name: str, model: ModelSpec, ranks: TensorRanks, whole: Whole) -> Tensor:
    hidden, kind = model.hidden_size, name.rsplit(".", 1)[-1]
    if name == "embedding.position_embeddings.weight":
        return whole("embedding.positions.weight", model.max_positions, hidden)
    if name.startswith("decoder.final_layernorm"):
        return whole(f"head.norm.{kind}", hidden)
    owner = {"embedding.word_embeddings.weight": "embedding.tokens", "output_layer.weight": "head.output"}[name]
    tokens = whole(f"{'embedding.tokens' if model.tied_embeddings else owner}.weight", model.vocab_size, hidden)
    return ranks.piece(pad_rows(tokens, padded_vocab_size(model, "megatron", ranks.size)), 0)


def _wide(model: ModelSpec) -> tuple[str, ...]:
    return ("gate", "up") if model.activation == "swiglu" else ("up",)


def _attention_inputs(name: str, kind: str, model: ModelSpec, whole: Whole) -> Tensor:
    """Rows of every group in turn: its query heads, its key head, its value head."""
    groups, size = model.num_kv_heads, model.head_size
    each = {"q": model.num_heads // groups, "k": 1, "v": 1}
    ends = (model.hidden_size,) if kind == "weight" else ()
    pieces = [
        whole(f"{name}.{letter}.{kind}", groups * heads * size, *ends).view(groups, heads * size, *ends)
        for letter, heads in each.items()
    ]
    return torch.cat(pieces, dim=1).flatten(0, 1)


def _columns(name: str, kind: str, shape: tuple[int, int], ranks: TensorRanks, whole: Whole) -> Tensor:
    """A projection to the inner width, cut by what it gives."""
    return ranks.piece(whole(f"{name}.{kind}", *shape[: 2 if kind == "weight" else 1]), 0)


def _rows(name: str, kind: str, shape: tuple[int, int], ranks: TensorRanks, whole: Whole) -> Tensor:
    """A projection back to the hidden size, cut by what it takes; its bias is whole."""
    if kind == "bias":
        return whole(f"{name}.bias", shape[0])
    return ranks.piece(whole(f"{name}.weight", *shape), 1)


def _experts(name: str, part: str, model: ModelSpec, shard: ExpertShard, whole: Whole) -> Tensor:
    """Our stacked `fc1`, `fc1_bias`, `fc2`, `fc2_bias`, or TransformerEngine's `linear_fc1.weight3` of one expert."""
    held = shard.held(model.num_experts)
    numbered = re.match(r"linear_(fc[12])\.(weight|bias)(\d+)$", part)
    if numbered is not None:
        fc, kind, local = numbered.groups()
        return _expert(name, fc, kind == "bias", held[int(local)], model, shard, whole, cuts_bias=False)
    fc, _, bias = part.partition("_")
    each = (_expert(name, fc, bool(bias), number, model, shard, whole, cuts_bias=True) for number in held)
    return torch.stack(list(each))


def _expert(
    name: str,
    fc: str,
    is_bias: bool,
    number: int,
    model: ModelSpec,
    shard: ExpertShard,
    whole: Whole,
    *,
    cuts_bias: bool,
) -> Tensor:
    hidden, inner, suffix = model.hidden_size, model.ffn_hidden_size, "_bias" if is_bias else ""

    def cut(projection: str, shape: tuple[int, ...], dim: int) -> Tensor:
        return whole(f"{name}.{projection}{suffix}.{number}", *shape).chunk(shard.tp, dim)[shard.tp_rank]

    if fc == "fc1":
        return torch.cat([cut(each, (inner,) if is_bias else (inner, hidden), 0) for each in _wide(model)])
    if is_bias and not cuts_bias:
        return whole(f"{name}.down_bias.{number}", hidden)
    return cut("down", (hidden,), 0) if is_bias else cut("down", (hidden, inner), 1)

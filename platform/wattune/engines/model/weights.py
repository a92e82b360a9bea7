"""Initial weights: a pure function of seed and full parameter name, so that every plan starts from the same model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from wattune.catalog.models import ModelSpec
from wattune.engines.model.experts import Experts
from wattune.engines.model.tensor_ranks import TensorRanks
from wattune.engines.model.tokens import stable_seed

INIT_STD = 0.02
"""Standard deviation of initial weights: GPT-2's `initializer_range`, also Llama's and Mixtral's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A cut of tensor parallel: the shape before it, and the dimension of which this rank holds a piece."""

    shape: torch.Size
    dim: int
    ranks: TensorRanks


@torch.no_grad()
def initialise(part: nn.Module, name: str, model: ModelSpec, seed: int, cuts: Mapping[str, Cut] | None = None) -> None:
    """Fills a part of a model: each weight is drawn whole and then cut as tensor parallel has cut it.

    The part is an embedding, a layer or a head, allocated and not yet sharded over data-parallel ranks; `name` is its
    place in the whole model, such as `layers.3`. `cuts` are of the parameters that are cut, by their names as the
    module has them; experts know their own.
    """
    for module_name, module in part.named_modules(prefix=name):
        for short_name, parameter in module.named_parameters(recurse=False):
            own_name = f"{module_name}.{short_name}"
            full_name = ".".join(each for each in own_name.split(".") if each != "base")  # as without adapters
            if model.tied_embeddings and full_name == "head.output.weight":
                full_name = "embedding.tokens.weight"
            if isinstance(module, Experts):
                _initialise_experts(module, short_name, parameter, full_name, seed)
            elif cuts is not None and (cut := cuts.get(own_name)) is not None:
                whole = _draw_padded(full_name, cut.shape, model, seed, parameter.device)
                parameter.copy_(cut.ranks.piece(whole, cut.dim))
            else:
                parameter.copy_(draw(full_name, parameter.shape, seed, parameter.device))


OF_TOKENS: Final = ("embedding.tokens.weight", "head.output.weight")
"""Weights with a row for each token of the vocabulary, and behind them the rows of its padding."""


def _draw_padded(full_name: str, shape: torch.Size, model: ModelSpec, seed: int, device: torch.device) -> Tensor:
    """A whole weight as it is without padding, followed by zeros: padding changes no value and gets no gradient."""
    if full_name not in OF_TOKENS:
        return draw(full_name, shape, seed, device)
    return pad_rows(draw(full_name, torch.Size([model.vocab_size, *shape[1:]]), seed, device), shape[0])


def pad_rows(whole: Tensor, num_rows: int) -> Tensor:
    """Appends rows of zeros to a matrix until it has so many."""
    missing = num_rows - whole.shape[0]
    return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]) if missing else whole


@torch.no_grad()
def round_values(part: nn.Module, dtype: torch.dtype) -> None:
    """Gives weights values that a lower type has, and leaves them in their own.

    Engines with low weights start their fp32 ones from those: all start from the same model.
    """
    for parameter in part.parameters():
        parameter.copy_(parameter.to(dtype))


def _initialise_experts(experts: Experts, name: str, parameter: Tensor, full_name: str, seed: int) -> None:
    dim, shard = Experts.SHARD_DIMS[name], experts.shard
    for local, expert in zip(parameter, experts.held, strict=True):
        shape = list(local.shape)
        shape[dim] *= shard.tp
        whole = draw(f"{full_name}.{expert}", torch.Size(shape), seed, parameter.device)
        local.copy_(whole.chunk(shard.tp, dim)[shard.tp_rank])


def draw(full_name: str, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """A whole weight, fp32: zeros for biases, ones for norms, otherwise normally distributed.

    `full_name` is as in the whole model, such as `layers.3.attention.q.weight`; of an expert its number comes last.
    Processors and GPUs draw different values.
    """
    owner, kind = full_name.split(".")[-2:]
    if "bias" in full_name or owner == "lora_b":
        return torch.zeros(shape, device=device)
    if owner.endswith("norm") and kind == "weight":
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(stable_seed(seed, full_name))
    return torch.empty(shape, device=device).normal_(std=INIT_STD, generator=generator)

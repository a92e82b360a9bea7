"""Weights that are not trained: low-rank adapters beside frozen ones, and models that only run forward."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from wattune.engines.model.decoder import Decoder, Layer
from wattune.workload import Lora


class AdaptedLinear(nn.Module):
    """A frozen linear layer plus the product of two trained thin ones: W x + B A x.

    Hu et al. 2021 (arXiv 2106.09685), section 4.1, with alpha = rank, so that their scale alpha / rank is 1. A starts
    random and B at zero, so that training starts from the frozen model.
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        self.between: Callable[[Tensor], Tensor] | None = None
        """Joins or sums what A gives over tensor parallel ranks, before B takes it."""

    def forward(self, x: Tensor) -> Tensor:
        """Token by token."""
        thin = self.lora_a(x)
        out: Tensor = self.base(x) + self.lora_b(thin if self.between is None else self.between(thin))
        return out


def adapt(decoder: Decoder, lora: Lora) -> None:
    """Puts adapters beside the linear layers a specification names, in every decoder layer."""
    for layer in decoder.layers.values():
        assert isinstance(layer, Layer)
        adapt_layer(layer, lora)


def adapt_layer(layer: Layer, lora: Lora) -> None:
    """As `adapt`, in one decoder layer."""
    for block in (layer.attention, layer.ffn):
        for name in lora.targets:
            base = getattr(block, name, None)
            if isinstance(base, nn.Linear):
                setattr(block, name, AdaptedLinear(base, lora.rank))


def freeze(part: nn.Module, mode: str) -> None:
    """Leaves trainable what a mode of work trains of a part of the model: everything, the adapters, or nothing."""
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(mode == "pretrain" or (mode == "lora" and ".lora_" in name))


@torch.no_grad()
def lower_frozen(part: nn.Module, dtype: torch.dtype) -> None:
    """Keeps frozen weights in the type they are used in: nothing ever adds a small update to them."""
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad and parameter.is_floating_point() and parameter.dtype != dtype:
                setattr(module, name, nn.Parameter(parameter.to(dtype), requires_grad=False))

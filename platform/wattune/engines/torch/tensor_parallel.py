"""Cuts the weights of a decoder over tensor parallel ranks, and its activations along the sequence between them.

Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2; embedding and logits are cut along the vocabulary. A rank's
piece is a plain tensor. As a DTensor it would cost the host a dispatch by placement for every operation, and in a
compiled layer the wrapping of every weight and gradient (`benchmarks/results/tensor_parallel_host.md`).
"""

from functools import partial
from typing import Any, cast

import torch
from torch import nn

from wattune.engines.model.decoder import Decoder, Layer
from wattune.engines.model.experts import FeedForward, MixtureOfExperts
from wattune.engines.model.lora import AdaptedLinear
from wattune.engines.model.tensor_ranks import SummedRows, TensorRanks
from wattune.engines.model.weights import Cut


def pad_vocabulary(decoder: Decoder, num_rows: int) -> None:
    """Gives embedding and head that many rows, on the meta device. What is behind the vocabulary is padding."""
    if decoder.embedding is not None:
        tokens = decoder.embedding.tokens
        if num_rows != tokens.num_embeddings:
            decoder.embedding.tokens = nn.Embedding(num_rows, tokens.embedding_dim, device="meta")
    if decoder.head is not None:
        output = decoder.head.output
        if num_rows != output.out_features:
            decoder.head.output = nn.Linear(output.in_features, num_rows, bias=output.bias is not None, device="meta")


def cut_over(decoder: Decoder, ranks: TensorRanks) -> dict[str, Cut]:
    """Leaves this rank its pieces of the weights of a decoder on the meta device; returns the cuts by name.

    What is left whole gets of every rank an addend of its gradient: of its piece of the sequence, or of its slice of
    the experts.
    """
    pieces = _Pieces(ranks)
    if (embedding := decoder.embedding) is not None:
        embedding.ranks = ranks
        pieces.cut(embedding.tokens, 0)
        if embedding.positions is not None:
            pieces.cut(embedding.positions, 0)
    for layer in decoder.layers.values():
        assert isinstance(layer, Layer)
        attention, ffn = layer.attention, layer.ffn
        assert isinstance(ffn, FeedForward | MixtureOfExperts)
        attention.ranks = ffn.ranks = ranks
        pieces.cut_columns(*attention.columns)
        attention.o = pieces.cut_rows(attention.o)
        block = ffn if isinstance(ffn, FeedForward) else ffn.shared
        if block is not None:
            block.ranks = ranks
            pieces.cut_columns(*(each for each in (block.gate, block.up) if each is not None))
            block.down = pieces.cut_rows(block.down)
    if decoder.head is not None:
        decoder.head.ranks = ranks
        pieces.cut(decoder.head.output, 0)
    names = dict(decoder.named_parameters())
    return {name: pieces.cuts[parameter] for name, parameter in names.items() if parameter in pieces.cuts}


class _Pieces:
    """Puts pieces in the place of whole weights."""

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks = ranks
        self.cuts: dict[nn.Parameter, Cut] = {}

    def cut(self, module: nn.Module, dim: int) -> None:
        """Cuts a module's weight, and its bias with its outputs."""
        for name in ("weight", "bias"):
            whole = getattr(module, name, None)
            if whole is not None:
                piece = nn.Parameter(torch.empty_like(self._ranks.piece(whole, dim)))
                self.cuts[piece] = Cut(shape=whole.shape, dim=dim, ranks=self._ranks)
                setattr(module, name, piece)

    def cut_columns(self, *modules: nn.Module) -> None:
        """Cuts linear layers by their outputs; adapters by their rank and their outputs."""
        for module in modules:
            base = module
            if isinstance(module, AdaptedLinear):
                base = module.base
                self.cut(module.lora_a, 0)
                self.cut(module.lora_b, 0)
                module.between = partial(self._ranks.gather, dim=-1)
            self.cut(base, 0)

    def cut_rows(self, module: nn.Module) -> Any:
        """Cuts a linear layer by its inputs; returns what stands in its place.

        Adapters are cut by their inputs and their rank; both addends are summed over ranks together.
        """
        base: Any = module
        if isinstance(module, AdaptedLinear):
            base = module.base
            self.cut(module.lora_a, 1)
            self.cut(module.lora_b, 1)
            module.between = partial(self._ranks.scatter, dim=-1)
        bias, base.bias = cast(nn.Parameter | None, base.bias), None
        self.cut(base, 1)
        return SummedRows(module, bias, self._ranks)

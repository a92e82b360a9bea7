"""The torch engine's adapters beside Megatron's linear layers, of which one holds several of the torch engine's.

`linear_qkv` is queries, keys and values group by group, `linear_fc1` gate over up. Each has its own pair of thin
matrices, cut as the layer is: what meets the cut side is cut, what meets the whole one is whole on every rank.

Legend for shapes: S sequence held here, B micro-batch, T tensor parallel degree.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from wattune.catalog.models import ModelSpec
from wattune.workload import Lora


class _Adapted(nn.Module):
    """A frozen linear layer and adapters of some of the layers it holds; see `wattune.engines.model.lora`.

    Their halves are parameters of this module itself, such as `lora_a_q`: before a module runs Megatron waits for the
    weights that are its own, and for no others.
    """

    CUT: ClassVar[str]
    """The half tensor parallelism cuts: `a` or `b`."""

    def __init__(self, base: nn.Module, shapes: Mapping[str, tuple[int, int]], rank: int, config: Any) -> None:
        """Allocates without initialising: `shapes` are outputs and inputs held here, `rank` the inner width."""
        super().__init__()
        self.base, self.adapted = base, tuple(shapes)
        self.splits_sequence: bool = config.sequence_parallel
        device = torch.device("cuda", torch.cuda.current_device())
        for name, (outputs, inputs) in shapes.items():
            for half, shape in (("a", (rank, inputs)), ("b", (outputs, rank))):
                value = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
                if half == self.CUT:
                    value.tensor_model_parallel = True  # type: ignore[attr-defined]  # its norm counts on every rank
                else:  # ranks see different tokens: Megatron then sums the gradients
                    value.sequence_parallel = self.splits_sequence  # type: ignore[attr-defined]
                self.register_parameter(f"lora_{half}_{name}", value)

    def matrix(self, half: str, name: str) -> nn.Parameter:
        return self.get_parameter(f"lora_{half}_{name}")


class AdaptedColumns(_Adapted):
    """A layer cut by its outputs, which are those of several layers side by side, group by group."""

    CUT = "b"

    def __init__(
        self, base: nn.Module, widths: Mapping[str, int], groups: int, lora: Lora, config: TransformerConfig
    ) -> None:
        """Takes the outputs of each of the layers in one group, and the groups held here."""
        shapes = {name: (groups * width, config.hidden_size) for name, width in widths.items() if name in lora.targets}
        super().__init__(base, shapes, lora.rank, config)
        self.widths, self.groups = dict(widths), groups

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Outputs [S * T, B, outputs held here] of [S, B, inputs], and the bias that is still to add."""
        out, bias = self.base(x)
        # A group holds the outputs of each layer in turn.
        pieces = self._grouped(out).split([*self.widths.values()], -1)  # type: ignore[no-untyped-call]
        parts = dict(zip(self.widths, pieces, strict=True))
        for name in self.adapted:
            thin = F.linear(x, self.matrix("a", name))
            if self.splits_sequence:
                thin = gather_from_sequence_parallel_region(thin)
            parts[name] = parts[name] + self._grouped(F.linear(thin, self.matrix("b", name)))
        return torch.cat([*parts.values()], -1).flatten(-2), bias

    def _grouped(self, out: Tensor) -> Tensor:
        return out.view(*out.shape[:-1], self.groups, -1)


class AdaptedRows(_Adapted):
    """A layer cut by its inputs."""

    CUT = "a"

    def __init__(self, base: nn.Module, name: str, inputs: int, lora: Lora, config: TransformerConfig) -> None:
        """Takes its name in the torch engine and the inputs held here."""
        super().__init__(base, {name: (config.hidden_size, inputs)}, lora.rank, config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Outputs [S, B, outputs] of [S * T, B, inputs held here], and the bias that is still to add."""
        out, bias = self.base(x)
        (name,) = self.adapted
        thin = F.linear(x, self.matrix("a", name))
        if self.splits_sequence:
            thin = reduce_scatter_to_sequence_parallel_region(thin)
        return out + F.linear(thin, self.matrix("b", name)), bias


def adapt(chunk: Any, model: ModelSpec, lora: Lora, config: TransformerConfig) -> None:
    """Puts adapters into a GPT model of Megatron's local layers, or a stage's part of one, and freezes the rest.

    No experts are adapted (rule `adapters`). The adapters' names of layers are the torch engine's.
    """
    tp, size = config.tensor_model_parallel_size, model.head_size
    heads = {"q": model.num_heads // model.num_kv_heads * size, "k": size, "v": size}
    inner = model.ffn_hidden_size // tp
    wide = {"gate": inner, "up": inner} if model.activation == "swiglu" else {"up": inner}
    for layer in chunk.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        if heads.keys() & set(lora.targets):
            groups = model.num_kv_heads // tp
            attention.linear_qkv = AdaptedColumns(attention.linear_qkv, heads, groups, lora, config)
        if "o" in lora.targets:
            attention.linear_proj = AdaptedRows(attention.linear_proj, "o", model.output_width // tp, lora, config)
        if not model.is_moe and wide.keys() & set(lora.targets):
            mlp.linear_fc1 = AdaptedColumns(mlp.linear_fc1, wide, 1, lora, config)
        if not model.is_moe and "down" in lora.targets:
            mlp.linear_fc2 = AdaptedRows(mlp.linear_fc2, "down", inner, lora, config)
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    if config.recompute_granularity == "full" and chunk.pre_process:
        # Megatron's checkpoint gives no gradient where its input wants none, and a frozen embedding's output does not.
        chunk.embedding.register_forward_hook(_with_gradient)


def _with_gradient(_embedding: nn.Module, _tokens: Any, out: Tensor) -> Tensor:
    return out.requires_grad_(torch.is_grad_enabled())

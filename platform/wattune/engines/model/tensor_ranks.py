"""Meetings of the ranks of one tensor parallel group, on plain tensors.

Layers hold their piece of every weight as a plain tensor, and these are the only places where ranks meet: no operation
is dispatched by the placement of its operands, and a compiler sees a layer and its collectives as one graph. Between
cut layers activations are cut along the sequence: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2.
"""

import math
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

_OPS: Final = torch.ops._c10d_functional
"""torch's collectives as functions of tensors, which its compilers know. A result is there once it is waited for: on a
GPU the stream waits, not the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRanks:
    """The ranks that share every layer, this one among them; alone it exchanges nothing."""

    size: int = 1
    rank: int = 0
    group: str = ""
    """Name of their process group."""

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Joins the pieces of all ranks along a dimension; a gradient is summed over ranks and cut again."""
        return x if self.size == 1 else cast(Tensor, _Gather.apply(x, dim % x.ndim, self))  # type: ignore[no-untyped-call]

    def scatter(self, x: Tensor, dim: int = 1) -> Tensor:
        """Sums over ranks and leaves each its piece along a dimension; gradients are gathered."""
        return x if self.size == 1 else cast(Tensor, _Scatter.apply(x, dim % x.ndim, self))  # type: ignore[no-untyped-call]

    def sum(self, addends: Tensor) -> Tensor:
        """Sums over ranks what every rank goes on with alike: the gradient of a sum is that of every addend."""
        return addends if self.size == 1 else cast(Tensor, _Sum.apply(addends, self))  # type: ignore[no-untyped-call]

    def largest(self, x: Tensor) -> Tensor:
        """The largest of all ranks' values, place by place, without a gradient."""
        return x if self.size == 1 else _reduced(x.detach(), "max", self)

    def piece(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's piece of a weight; where the ranks do not divide it, the last ones have less."""
        return whole.chunk(self.size, dim)[self.rank]


ALONE: Final = TensorRanks()


class SummedRows(nn.Module):
    """A linear layer that is cut by its inputs: its results are summed over ranks and cut along the sequence."""

    def __init__(self, base: nn.Module, bias: nn.Parameter | None, ranks: TensorRanks) -> None:
        """Takes the layer without its bias, which is added once the results are summed."""
        super().__init__()
        self.base, self.bias, self.ranks = base, bias, ranks

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, inputs of this rank] to [batch, piece of the sequence, outputs]."""
        out = self.ranks.scatter(self.base(x))
        return out if self.bias is None else out + self.bias


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return _gathered(x, dim, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grad, ctx.dim, ctx.ranks), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return _scattered(x, dim, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.dim, ctx.ranks), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, addends: Tensor, ranks: TensorRanks) -> Tensor:  # noqa: ARG004  (what autograd calls it with)
        return _reduced(addends, "sum", ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


def _gathered(x: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
    joined: Tensor = _OPS.wait_tensor(_OPS.all_gather_into_tensor(x.contiguous(), ranks.size, ranks.group))
    if math.prod(x.shape[:dim]) == 1:  # pieces lie one behind the other already
        return joined.reshape(*x.shape[:dim], ranks.size * x.shape[dim], *x.shape[dim + 1 :])
    return torch.cat(joined.chunk(ranks.size), dim)


def _scattered(x: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
    if math.prod(x.shape[:dim]) == 1:
        piece = (*x.shape[:dim], x.shape[dim] // ranks.size, *x.shape[dim + 1 :])
        pieces = x.reshape(ranks.size * piece[0], *piece[1:])
    else:
        pieces = torch.cat(x.chunk(ranks.size, dim))
    summed: Tensor = _OPS.wait_tensor(_OPS.reduce_scatter_tensor(pieces.contiguous(), "sum", ranks.size, ranks.group))
    return summed


def _reduced(x: Tensor, operation: str, ranks: TensorRanks) -> Tensor:
    reduced: Tensor = _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), operation, ranks.group))
    return reduced

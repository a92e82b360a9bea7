"""Feed-forward blocks and mixtures: dropping by capacity, exchange between expert-parallel ranks, and the experts.

Legend for shapes: T tokens of this rank's micro-batch, k experts per token, E experts, e experts held here, H hidden
size, F inner width held here, R tokens received for the experts held here.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn

from wattune.catalog.models import ModelSpec
from wattune.engines.model.routing import LayerRouting
from wattune.engines.model.tensor_ranks import ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShard:
    """The part of a layer's experts that one rank holds: whole experts by expert, slices of each by tensor parallel."""

    ep: int = 1
    ep_rank: int = 0
    tp: int = 1
    tp_rank: int = 0
    group: dist.ProcessGroup | None = None
    """Ranks that exchange tokens; None where `ep` is 1."""

    def held(self, num_experts: int) -> range:
        """The experts of this rank."""
        count = num_experts // self.ep
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)


class Experts(nn.Module):
    """The feed-forward blocks of the experts one rank holds, stacked."""

    SHARD_DIMS: ClassVar = {"gate": 0, "gate_bias": 0, "up": 0, "up_bias": 0, "down": 1, "down_bias": 0}
    """Dimension of one expert's full parameter that tensor parallel cuts."""

    def __init__(self, model: ModelSpec, shard: ExpertShard) -> None:
        super().__init__()
        self.shard = shard
        self.held = shard.held(model.num_experts)
        num, hidden, inner = len(self.held), model.hidden_size, model.ffn_hidden_size // shard.tp
        gated, biased = model.activation == "swiglu", model.has_bias("ffn")
        self.gate = nn.Parameter(torch.empty(num, inner, hidden)) if gated else None
        self.up = nn.Parameter(torch.empty(num, inner, hidden))
        self.down = nn.Parameter(torch.empty(num, hidden, inner))
        self.gate_bias = nn.Parameter(torch.empty(num, inner)) if gated and biased else None
        self.up_bias = nn.Parameter(torch.empty(num, inner)) if biased else None
        self.down_bias = nn.Parameter(torch.empty(num, hidden // shard.tp)) if biased else None

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Runs each expert over its tokens, all in one grouped matrix product per weight.

        Tokens [R, H] are grouped by expert, their numbers [e] on the device; the result is [R, H], under tensor
        parallel an addend.
        """
        ends = counts.cumsum(0).to(torch.int32)
        numbers = torch.arange(counts.numel(), device=counts.device)
        owners = numbers.repeat_interleave(counts, output_size=tokens.shape[0]) if self.up_bias is not None else None
        up = expert_product(tokens, self.up, ends)
        if self.up_bias is not None:
            up = up + self.up_bias[owners]
        if self.gate is None:
            inner = F.gelu(up)
        else:
            gate = expert_product(tokens, self.gate, ends)
            inner = F.silu(gate if self.gate_bias is None else gate + self.gate_bias[owners]) * up
        out = expert_product(inner, self.down, ends)
        if self.down_bias is None:
            return out
        # Each tensor-parallel rank adds its own piece of the bias, so that the sum over ranks adds it once.
        piece = self.down_bias[owners]
        start = self.shard.tp_rank * piece.shape[-1]
        return out + F.pad(piece, (start, out.shape[-1] - start - piece.shape[-1]))


def expert_product(tokens: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[R, in] times each expert's [out, in], where `ends` are the last rows of the experts' tokens."""
    return F.grouped_mm(tokens, weight.transpose(-2, -1), offs=ends)


class MixtureOfExperts(nn.Module):
    """A router and its experts, exchanged between expert-parallel ranks."""

    def __init__(self, model: ModelSpec, shard: ExpertShard, routing: LayerRouting | None = None) -> None:
        """Allocates without initialising; without a routing the router chooses, and nobody counts."""
        super().__init__()
        self.routing = routing or LayerRouting(num_per_token=model.num_experts_per_token)
        self.num_per_token = model.num_experts_per_token
        self.num_experts = model.num_experts
        self.capacity_factor = model.expert_capacity_factor
        self.shard = shard
        self.router = nn.Linear(model.hidden_size, model.num_experts, bias=model.has_bias("router"))
        self.experts = Experts(model, shard)
        shared = model.shared_ffn_hidden_size
        self.shared = FeedForward(model, shared) if shared else None
        """The experts that every token meets, as one block."""
        self.shared_gate = nn.Linear(model.hidden_size, 1, bias=False) if model.shared_expert_gate else None
        self.ranks = ALONE

    def forward(self, x: Tensor) -> Tensor:
        """Mixes [batch, sequence, H]; under tensor parallel it takes and gives a piece of the sequence.

        Every tensor parallel rank routes all tokens and computes a slice of each expert. Its results are addends, and
        so are its gradients of tokens and router.
        """
        mixed = self.ranks.scatter(self._mix(self.ranks.gather(x)))
        if self.shared is None:
            return mixed
        shared = self.shared(x)
        gated = shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared
        return cast(Tensor, mixed + gated)

    def _mix(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        experts, weights, sent = self.routing(self.router(tokens))
        gates = weights.flatten()
        order, counts = self._assign(experts.flatten(), sent)
        sources = order // self.num_per_token
        results = self._exchange(tokens[sources], counts)
        weighted = results * gates[order].unsqueeze(-1).to(results.dtype)
        return torch.zeros_like(tokens).index_add(0, sources, weighted).view_as(x)

    def _assign(self, chosen: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Orders the T*k assignments by expert; beyond capacity they are dropped, later tokens first.

        Capacity is ceil(T k / E x factor): Fedus et al. 2022 (arXiv 2101.03961), equation 3, for top-k. Returns the
        indices of the kept assignments grouped by expert, and how many each expert got [E].
        """
        order = chosen.argsort(stable=True)
        if self.capacity_factor is None:
            return order, counts
        capacity = math.ceil(chosen.numel() / self.num_experts * self.capacity_factor)
        position = torch.arange(chosen.numel(), device=chosen.device) - (counts.cumsum(0) - counts)[chosen[order]]
        return order[position < capacity], counts.clamp(max=capacity)

    def _exchange(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Sends each token to the rank that holds its expert, runs the experts, and brings the results back."""
        if self.shard.ep == 1:
            return cast(Tensor, self.experts(tokens, counts))
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.shard.group)
        by_sender = received.view(self.shard.ep, -1)
        # The exchange wants its splits on the host: the one wait per layer that uneven routing costs.
        send, receive = torch.stack([counts.view(self.shard.ep, -1).sum(1), by_sender.sum(1)]).tolist()
        arrived = _travel(tokens, receive, send, self.shard.group)
        # What arrives is ordered by sender and then expert; experts want it by expert.
        experts = torch.arange(by_sender.shape[1], device=received.device).repeat(self.shard.ep)
        by_expert = experts.repeat_interleave(received, output_size=sum(receive)).argsort(stable=True)
        results = self.experts(arrived[by_expert], by_sender.sum(0))
        ordered = torch.empty_like(results).index_copy(0, by_expert, results)
        return _travel(ordered, send, receive, self.shard.group)


class _AllToAll(torch.autograd.Function):
    """`all_to_all_single` with uneven splits; its gradient is the exchange the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup | None) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return _all_to_all(rows, receive, send, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.send, ctx.receive, ctx.group), None, None, None


def _travel(rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup | None) -> Tensor:
    return cast(Tensor, _AllToAll.apply(rows, receive, send, group))  # type: ignore[no-untyped-call]


def _all_to_all(rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup | None) -> Tensor:
    out = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202) or GELU feed-forward block."""

    def __init__(self, model: ModelSpec, width: int | None = None) -> None:
        """Allocates without initialising; without a width it is the model's."""
        super().__init__()
        hidden, inner, biased = model.hidden_size, width or model.ffn_hidden_size, model.has_bias("ffn")
        self.gate = nn.Linear(hidden, inner, bias=biased) if model.activation == "swiglu" else None
        self.up = nn.Linear(hidden, inner, bias=biased)
        self.down = nn.Linear(inner, hidden, bias=biased)
        self.ranks = ALONE

    def forward(self, x: Tensor) -> Tensor:
        """Token by token."""
        x = self.ranks.gather(x)
        up = self.up(x)
        return cast(Tensor, self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up))

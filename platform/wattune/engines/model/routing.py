"""Sends tokens to experts, and counts the tokens that each expert is sent.

Balanced and skewed routing force the choice of experts, as Megatron's `moe_router_force_load_balancing` does, so that
the load does not move while a trial runs. The choice depends on the seed, the layer and the token's place in its
sequence, and on nothing else: every engine and every plan sends the same token to the same experts. The router is
computed all the same, and its probabilities of the chosen experts weigh their results, so that it is trained.

Legend for shapes: T tokens of this rank's micro-batch, B its sequences, P places of a sequence held here, k experts per
token, E experts.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from wattune.engines.model.tokens import stable_seed
from wattune.trial import TrialSpec

AUXILIARY_LOSS_COEFFICIENT: Final = 0.02
"""Weight of the auxiliary loss: `router_aux_loss_coef` in Mixtral-8x7B-v0.1's config.json."""


def expert_shares(num_experts: int, num_per_token: int, skew: float) -> list[float]:
    """Shares of a layer's assignments that go to its experts, the largest first; they sum to 1.

    The expert of rank r gets a share in proportion to r^-skew (Zipf's law). A token is sent to an expert once, so that
    no share is above 1/k: what is above is spread over the others, in proportion again.
    """
    ranks = np.arange(1, num_experts + 1, dtype=np.float64)
    largest = 1 / num_per_token
    for full in range(num_per_token):  # how many experts are sent every token
        weights = (ranks[full:] / ranks[full]) ** -skew  # the first is 1, however large the exponent
        shares = (1 - full * largest) * weights / weights.sum()
        if shares[0] <= largest + 1e-12:
            break
    return [largest] * full + cast(list[float], np.minimum(shares, largest).tolist())


@lru_cache(maxsize=8)
def choices(seq_len: int, num_experts: int, num_per_token: int, skew: float, seed: int) -> Tensor:
    """The experts of every place of a sequence, by their rank in `expert_shares`, int64 [seq_len, k].

    Each place in turn takes the experts that are furthest behind their shares, ties broken by the seed. Every stretch
    of a sequence is then shared as the whole is, to within a token or two: exactly equally where all shares are equal
    and the stretch is a multiple of E / k. So micro-batches and pieces of sequences are as even as whole batches.
    """
    shares = np.asarray(expert_shares(num_experts, num_per_token, skew)) * num_per_token
    generator = torch.Generator().manual_seed(stable_seed("routing", seed))
    # Far above rounding and far below what a token changes.
    ties = 1e-6 * torch.rand(seq_len, num_experts, generator=generator, dtype=torch.float64).numpy()
    sent, chosen = np.zeros(num_experts), np.empty((seq_len, num_per_token), dtype=np.int64)
    for place in range(seq_len):
        behind = shares * (place + 1) - sent + ties[place]
        chosen[place] = np.argsort(-behind, kind="stable")[:num_per_token]
        sent[chosen[place]] += 1
    return torch.from_numpy(chosen)


def layer_choices(spec: TrialSpec, layer: int, seed: int) -> Tensor | None:
    """The experts of every place of a sequence in one layer, int64 [seq_len, k]; None where the router chooses.

    A permutation of the experts, drawn for each layer, says which of them is the most popular one.
    """
    model, routing = spec.model, spec.workload.routing
    if routing is None or routing.by == "learned":
        return None
    ranked = choices(spec.workload.seq_len, model.num_experts, model.num_experts_per_token, routing.skew, seed)
    generator = torch.Generator().manual_seed(stable_seed("routing", seed, layer))
    return torch.randperm(model.num_experts, generator=generator)[ranked]


Routed = tuple[Tensor, Tensor, Tensor]
"""The experts of tokens, int64 [T, k]; the weights of their results, fp32 [T, k];
and the tokens each expert is sent, int64 [E]."""


class LayerRouting:
    """Routing in one layer of one rank."""

    def __init__(
        self,
        *,
        num_per_token: int,
        seq_len: int = 1,
        forced: Tensor | None = None,
        counts: Tensor | None = None,
        loss_scale: float = 0.0,
        scores: str = "chosen",
        scale: float = 1.0,
    ) -> None:
        """Takes what does not change while a trial runs.

        `num_per_token` is k, and `seq_len` P matters only where something is forced or balanced. `forced` are the
        experts of every place held here [P, k], None where the router chooses; `counts` int64 [E], None where nothing
        is counted; `loss_scale` the weight of one sequence's auxiliary loss, 0 without one. `scores` and `scale` are
        those of `ModelSpec.router_scores` and `router_scale`.
        """
        self._scores, self._scale = scores, scale
        self.forced, self._counts = forced, counts
        self.num_per_token, self._seq_len, self._loss_scale = num_per_token, seq_len, loss_scale

    def __call__(self, logits: Tensor) -> Routed:
        """Routes tokens by the router's outputs [T, E], sequence after sequence.

        Mixtral's: softmax over the chosen experts (Jiang et al. 2024, arXiv 2401.04088, section 2.1). Of a softmax over
        all the chosen weights add up to less than 1, and sigmoids are divided by their sum (`ModelSpec.router_scores`).
        """
        logits = logits.float()
        if self.forced is None:
            experts = logits.topk(self.num_per_token).indices
        else:
            experts = self.forced.repeat(logits.shape[0] // self._seq_len, 1)
        gates = self.weigh(logits, experts)
        sent = self._by_sequence(experts, logits.shape[1])
        if self._loss_scale and torch.is_grad_enabled():
            by_sequence = logits.view(-1, self._seq_len, logits.shape[1])
            loss = auxiliary_loss(by_sequence, sent, self._scores) * self._loss_scale
            gates = cast(Tensor, _WithLoss.apply(gates, loss))  # type: ignore[no-untyped-call]
        counts = sent.sum(0)
        self.record(counts)
        return experts, gates, counts

    def weigh(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Weights of the results of chosen experts [T, k], by the router's outputs [T, E]; all fp32 but the choice."""
        if self._scores == "all":
            gates = logits.softmax(-1).gather(1, experts)
        elif self._scores == "chosen":
            gates = logits.gather(1, experts).softmax(-1)
        else:
            weights = logits.gather(1, experts).sigmoid()
            gates = weights / weights.sum(-1, keepdim=True)
        return gates if self._scale == 1.0 else gates * self._scale

    @torch.no_grad()
    def record(self, counts: Tensor) -> None:
        """Counts the tokens that experts are sent [E]."""
        if self._counts is not None:
            self._counts += counts

    def _by_sequence(self, experts: Tensor, num_experts: int) -> Tensor:
        """Tokens of each expert and sequence, int64 [B, E]."""
        chosen = experts.view(-1, self._seq_len * self.num_per_token)
        return chosen.new_zeros(chosen.shape[0], num_experts).scatter_add_(1, chosen, torch.ones_like(chosen))


def auxiliary_loss(logits: Tensor, sent: Tensor, scores: str = "chosen") -> Tensor:
    """The loss that balances a learned routing, summed over sequences: a E sum_e f_e P_e of each.

    f_e is the share of the sequence's assignments that expert e got, P_e its mean probability, a the coefficient: Fedus
    et al. 2022 (arXiv 2101.03961), equations 4 to 6, for top-k as in Megatron-Core's `switch_load_balancing_loss_func`.
    It is taken over a sequence (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20) and not over a micro-batch, so that
    it does not depend on the plan. Logits are the router's outputs [B, P, E] in fp32, `sent` the tokens of each expert
    and sequence [B, E]. Of `scores` that are sigmoids, probabilities are those over their sum (DeepSeek-V3, equation
    19), else a softmax.
    """
    shares = sent / sent.sum(1, keepdim=True)
    sigmoids = logits.sigmoid() if scores == "sigmoid" else None
    probabilities = logits.softmax(-1) if sigmoids is None else sigmoids / sigmoids.sum(-1, keepdim=True)
    return AUXILIARY_LOSS_COEFFICIENT * logits.shape[-1] * (shares * probabilities.mean(1)).sum()


class _WithLoss(torch.autograd.Function):
    """Gives a tensor on, and has the gradient of a scalar loss follow it back: no later stage need know of the loss."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.like
        return grad, torch.ones((), dtype=dtype, device=device)


class Routes:
    """Routing in every layer of one rank."""

    def __init__(
        self,
        spec: TrialSpec,
        seed: int,
        device: torch.device,
        *,
        sequence_loss_scale: float = 0.0,
        places: Tensor | None = None,
    ) -> None:
        """Draws what is forced.

        `places` are those of a sequence this rank sees, in its order; None for all. The scale is that of a learned
        routing's loss.
        """
        self._model = model = spec.model
        routing = spec.workload.routing
        self._routed = [number for number in range(model.num_layers) if model.kind_of(number).is_moe]
        self._num_per_token = model.num_experts_per_token
        self._seq_len = spec.workload.seq_len if places is None else places.numel()
        self._forced = [_held(layer_choices(spec, number, seed), places, device) for number in range(model.num_layers)]
        self._counts = torch.zeros(model.num_layers, model.num_experts, dtype=torch.int64, device=device)
        learns = routing is not None and routing.by == "learned" and spec.workload.mode != "prefill"
        self._loss_scale = sequence_loss_scale if learns else 0.0
        # A layer that is computed again routes, and counts, again.
        self._passes = 2 if spec.plan.recompute == "full" and spec.workload.mode != "prefill" else 1

    def layer(self, number: int) -> LayerRouting:
        """Routing in one layer of the model."""
        return LayerRouting(
            forced=self._forced[number],
            counts=self._counts[number],
            num_per_token=self._num_per_token,
            seq_len=self._seq_len,
            loss_scale=self._loss_scale,
            scores=self._model.router_scores,
            scale=self._model.router_scale,
        )

    def take_counts(self) -> tuple[tuple[int, ...], ...]:
        """Tokens each expert of each layer that has them was sent since the last call; waits for the device."""
        counts = (self._counts[self._routed] // self._passes).tolist()
        self._counts.zero_()
        return tuple(map(tuple, counts))


def _held(forced: Tensor | None, places: Tensor | None, device: torch.device) -> Tensor | None:
    if forced is None:
        return None
    return (forced if places is None else forced[places.cpu()]).to(device)


def routing_facts(spec: TrialSpec) -> Mapping[str, str]:
    """The routing as a tag of the result, of a model with experts."""
    return {"routing": str(spec.workload.routing or "uncontrolled")} if spec.model.is_moe else {}

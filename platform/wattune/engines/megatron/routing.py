"""The torch engine's routing in Megatron's routers."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from wattune.engines.model.routing import LayerRouting, Routes


def route(chunks: list[nn.Module], routes: Routes) -> None:
    """Has every router of this rank's chunks choose as its layer's routing says, and count what it chose.

    Where the router chooses itself, the auxiliary loss is Megatron's own: see `megatron.config`.
    """
    for router in [module for part in chunks for module in part.modules() if isinstance(module, TopKRouter)]:
        routing = routes.layer(router.layer_number - 1)
        chooses = router.routing if routing.forced is None else partial(_forced, router.config, routing)
        router.routing = partial(_counted, chooses, routing)


RoutingFunction = Callable[..., tuple[Tensor, Tensor]]
"""`TopKRouter.routing`: weights [T, E], zero where a token is not sent, and where it is sent [T, E]."""


def _counted(
    chooses: RoutingFunction, routing: LayerRouting, logits: Tensor, padding_mask: Any = None
) -> tuple[Tensor, Tensor]:
    weights, sent = chooses(logits, padding_mask=padding_mask)
    routing.record(sent.sum(0))
    return weights, sent


def _forced(config: Any, routing: LayerRouting, logits: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
    """Sends the tokens of the router's outputs [S, B, E] to the experts of their places."""
    assert routing.forced is not None and padding_mask is None
    batch, num_experts = logits.shape[1:]
    logits = logits.reshape(-1, num_experts)
    experts = routing.forced.repeat_interleave(batch, 0)  # Megatron keeps a place of all sequences together
    gates = routing.weigh(logits.float(), experts).type_as(logits)
    weights = torch.zeros_like(logits).scatter(1, experts, gates)
    sent = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
    if config.moe_expert_capacity_factor is None:
        return weights, sent
    return cast(
        tuple[Tensor, Tensor],
        apply_router_token_dropping(
            weights,
            sent,
            router_topk=routing.num_per_token,
            capacity_factor=config.moe_expert_capacity_factor,
            drop_policy=config.moe_token_drop_policy,
        ),
    )

"""The plan that really runs: settings that do nothing in a configuration are set to their neutral values."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, Final

from wattune.catalog.models import ModelSpec
from wattune.plans.axes import Plan
from wattune.plans.engines import CAPABILITIES, Configuration, Equivalence, matches, runs_program

Change = tuple[str, Any, str]
"""An axis, the value that its setting acts as, and the reason."""


def effective(configuration: Configuration) -> tuple[Plan, tuple[str, ...]]:
    """Sets every setting that does nothing there to its neutral value.

    Two configurations that differ in nothing else than such settings do equal work and are one trial. Returns the plan
    that really runs, and a text with the reason for each setting that was changed: without one the plan is as it was.
    """
    written = plan = configuration.plan
    if runs_program(configuration.engine):  # nobody knows what a setting does in there
        return plan, ()
    changed: dict[str, tuple[Any, str]] = {}
    for find in _searches(configuration.engine, _trains(configuration)):
        if change := find(configuration, plan):
            axis, to, why = change
            plan = replace(plan, **{axis: to})
            changed[axis] = to, why
    return plan, tuple(
        f"{axis}={_text(getattr(written, axis))} acts as {_text(to)}: {why}"
        for axis, (to, why) in changed.items()
        if to != getattr(written, axis)
    )


def _expert_split(c: Configuration, plan: Plan) -> Change | None:
    if c.model.is_moe or plan.etp == plan.tp:
        return None
    return "etp", plan.tp, f"{c.model.name} has no experts"


def _even_layout(c: Configuration, plan: Plan) -> Change | None:
    num_virtual = plan.pp * plan.vpp
    layers, rest = divmod(c.model.num_layers, num_virtual)
    return ("layout", (), "it is the even split") if not rest and plan.layout == (layers,) * num_virtual else None


def _order_of_topology(c: Configuration, plan: Plan) -> Change | None:
    same = plan.rank_order != "topology" and plan.rank_order == tuple(range(c.cluster.world_size))
    return ("rank_order", "topology", "it is the order of the topology") if same else None


def _sharding_without_replicas(c: Configuration, plan: Plan) -> Change | None:
    if plan.sharding == "none" or _has_replicas(c.model, plan, c.cluster.world_size):
        return None
    return "sharding", "none", "no replicas to share it with at dp=1"


def _sharding_by_one(c: Configuration, plan: Plan) -> Change | None:
    """A copy for every rank is what no sharding is."""
    if plan.sharding == "none" or plan.dp_replicate == 1:
        return None
    ranks = c.cluster.world_size // plan.pp
    dense, experts = ranks // plan.tp, ranks // (plan.ep * plan.etp) if c.model.is_moe else 1
    if plan.dp_replicate != dense or (c.model.is_moe and plan.dp_replicate != experts):
        return None
    return "sharding", "none", f"dp_replicate={plan.dp_replicate} leaves every rank a copy of its own"


def _copies_of_the_whole(_: Configuration, plan: Plan) -> Change | None:
    if plan.sharding != "none" or plan.dp_replicate == 1:
        return None
    return "dp_replicate", 1, "nothing is shared at sharding=none"


def _overlap_of_nothing(c: Configuration, plan: Plan) -> Change | None:
    if plan.overlap in ("grad", "grad_param") and not _has_replicas(c.model, plan, c.cluster.world_size):
        return "overlap", "none", "no gradients to reduce at dp=1"
    if plan.overlap == "grad_param" and plan.sharding == "none":
        return "overlap", "grad", "no parameters to gather at sharding=none"
    if plan.overlap == "tp" and plan.tp == 1:
        return "overlap", "none", "nothing to overlap at tp=1"
    if plan.overlap == "tp" and plan.sharding == "zero3":  # NeMo, megatron_base_model.py: "not available with FSDP"
        return "overlap", "none", "its buffers are not for weights that are gathered (sharding=zero3)"
    return None


def _recompute_of_prompts(_: Configuration, plan: Plan) -> Change | None:
    return None if plan.recompute == "none" else ("recompute", "none", "mode=prefill has no backward pass")


def _offload_of_nothing(c: Configuration, plan: Plan) -> Change | None:
    if plan.offload != "none" and c.cluster.rank_device.vendor == "cpu":
        return "offload", "none", "activations on a processor are in host memory"
    return None if plan.offload == "none" or _trains(c) else ("offload", "none", "mode=prefill has no backward pass")


def _loss_of_prompts(_: Configuration, plan: Plan) -> Change | None:
    why = "mode=prefill has the loss of each sequence's last token alone"
    return None if plan.loss_chunks == 1 else ("loss_chunks", 1, why)


def _sharding_of_prompts(_: Configuration, plan: Plan) -> Change | None:
    why = "mode=prefill has no gradients and no optimizer state"
    return ("sharding", "none", why) if plan.sharding in ("zero1", "zero2") else None


def _overlap_of_prompts(_: Configuration, plan: Plan) -> Change | None:
    gathers = plan.overlap == "grad_param" and plan.sharding == "zero3"
    if gathers or plan.overlap not in ("grad", "grad_param"):
        return None
    return "overlap", "none", "mode=prefill reduces no gradients"


_OF_EVERY_ENGINE: Final[tuple[Callable[[Configuration, Plan], Change | None], ...]] = (
    _expert_split,
    _even_layout,
    _order_of_topology,
    _sharding_without_replicas,
    _sharding_by_one,
    _overlap_of_nothing,
    _recompute_of_prompts,
    _offload_of_nothing,
    _loss_of_prompts,
    _sharding_of_prompts,
    _overlap_of_prompts,
    _copies_of_the_whole,
)
"""Searches for settings that do nothing in any engine. Each sees the plan that those before it left."""

_OF_PROMPTS: Final = (_recompute_of_prompts, _loss_of_prompts, _sharding_of_prompts, _overlap_of_prompts)


@cache
def _searches(engine: str, trains: bool) -> tuple[Callable[[Configuration, Plan], Change | None], ...]:
    """Returns every search for an engine and kind of work: a space of a million plans asks for them as often."""
    every = [one for one in _OF_EVERY_ENGINE if not (trains and one in _OF_PROMPTS)]
    return (*every, *map(_of_engine, CAPABILITIES[engine].equivalences))


def _of_engine(equivalence: Equivalence) -> Callable[[Configuration, Plan], Change | None]:
    """Returns the search for one equivalence of an engine."""

    def find(c: Configuration, plan: Plan) -> Change | None:
        if not matches(equivalence.setting, plan):
            return None
        if equivalence.needs_replicas and not _has_replicas(c.model, plan, c.cluster.world_size):
            return None
        if equivalence.needs_training and not _trains(c):
            return None
        return equivalence.axis, equivalence.to, equivalence.why

    return find


def _trains(c: Configuration) -> bool:
    return c.workload.mode != "prefill"


def _has_replicas(model: ModelSpec, plan: Plan, world_size: int) -> bool:
    """Tells whether more than one rank holds some weight, so that gradients are reduced and state can be shared.

    Context parallel ranks hold the same weights as data parallel ones do; experts have replicas of their own. A world
    that the degrees do not divide counts as replicated: nothing is equivalent there.
    """
    if world_size % (plan.tp * plan.pp * plan.cp):
        return True
    dense = world_size // (plan.tp * plan.pp)
    return dense > 1 or (model.is_moe and dense * plan.tp > plan.etp * plan.ep)


def _text(value: Any) -> str:
    return ("even" if not value else str(list(value))) if isinstance(value, tuple) else str(value)

"""Choice of the small trial that stands for each large one, and the reason where none does."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from wattune.catalog.hardware import ClusterSpec
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import Find, estimate
from wattune.scale_down.cut import Target, cluster_of, depths, runnable, whole_stages
from wattune.scale_down.invariants import Scaled, compare, memory_frac
from wattune.trial import TrialSpec

FREE_PERCENT: Final = 1.0
"""Distance that a shallower stage may add: its steps are as much shorter, and more plans are measured in a time."""
LEAST_FREE_DEPTH: Final = 0.5
"""Share of a stage's layers below which only memory cuts: a trial's start takes longer then than its steps."""

KEEPS: Final = "the smallest cluster that keeps it is"
"""Words before the cluster that a refusal names."""


def choose(larges: Sequence[TrialSpec], target: Target, find: Find = default_coefficients) -> list[Scaled | str]:
    """Finds the small trial that is closest to each large one, as shallow as costs nothing; else says why none is.

    Raises:
        PlanError: The target cannot stand for the cluster, or its device has no estimates.
    """
    found = estimate(larges, find)
    certain = [memory_frac(spec, found, place, "low") > 1.0 for place, spec in enumerate(larges)]
    best = _closest(larges, target, find)
    answers: list[Scaled | str] = []
    for large, one, over in zip(larges, best, certain, strict=True):
        if over:
            answers.append(f"{large.label} does not fit {large.cluster.label}, as far as estimates tell")
        elif one is None or one.memory_frac > 1.0 or one.percent > target.allowed_percent:
            answers.append(_refusal(large, one, target))
        else:
            answers.append(one)
    refused = [place for place, one in enumerate(answers) if isinstance(one, str) and not certain[place]]
    for place, enough in zip(refused, _smallest([larges[place] for place in refused], target, find), strict=True):
        answers[place] = f"{answers[place]}; {enough}"
    return answers


def _closest(larges: Sequence[TrialSpec], target: Target, find: Find) -> list[Scaled | None]:
    """Returns the best cut of each large trial, whatever its distance; None where no rule allows one."""
    places = {large.cluster: cluster_of(target, large.cluster) for large in larges}
    cuts = [one for large in larges for one in map(runnable, whole_stages(large, places[large.cluster])) if one]
    whole = {large: min(own, key=_order) for large, own in groupby(compare(cuts, find), key=lambda one: one.large)}
    deeper = [one for found in whole.values() for one in map(runnable, depths(found.small)) if one]
    each = {large: [*own] for large, own in groupby(compare(deeper, find), key=lambda one: one.large)}
    return [_shallowest(each[large]) if large in each else None for large in larges]


def _order(one: Scaled) -> tuple[float, int, int]:
    """Orders cuts by distance, to a hundredth of the step's percent, then by devices and batch."""
    small = one.small
    return round(one.percent, 2), small.cluster.world_size, small.workload.global_batch_size


def _shallowest(own: Sequence[Scaled]) -> Scaled:
    """Returns the shallowest cut that costs no more than `FREE_PERCENT`, of those that fit the memory."""
    fitting = [one for one in own if one.memory_frac <= 1.0] or [min(own, key=lambda one: one.memory_frac)]
    least = min(one.percent for one in fitting)
    kept = LEAST_FREE_DEPTH * own[0].small.model.num_layers
    free = [one for one in fitting if one.percent <= least + FREE_PERCENT and one.small.model.num_layers >= kept]
    return min(free or fitting, key=lambda one: one.small.model.num_layers if free else one.percent)


def _refusal(large: TrialSpec, one: Scaled | None, target: Target) -> str:
    plan, world = large.plan, target.num_nodes * target.devices_per_node
    if plan.tp * plan.cp > world:
        return f"{large.label} needs tp*cp={plan.tp * plan.cp} devices or more, and {target.text} has {world}"
    if one is None:
        return f"{large.label} has no cut to {target.text} that every rule allows"
    if one.memory_frac > 1.0:
        size = f"{one.memory_frac:.1f} times its memory"
        return f"{large.label} has no cut that fits {target.text}: the smallest takes {size}"
    worst = one.worst
    return (
        f"{large.label} on {target.text} is {one.percent:.1f} % of a step away, allowed: {target.allowed_percent:g} %; "
        f"it cannot keep {worst.name} ({worst.percent:.1f} %)"
    )


def _smallest(larges: Sequence[TrialSpec], target: Target, find: Find) -> list[str]:
    """Says for each large trial which is the smallest cluster of its device that keeps the invariants."""
    enough: dict[TrialSpec, str] = {}
    for cluster in dict.fromkeys(large.cluster for large in larges):
        left = [large for large in larges if large.cluster == cluster]
        for place in _larger(cluster, target):
            for large, one in zip(left, _closest(left, place, find), strict=True):
                if one is not None and one.memory_frac <= 1.0 and one.percent <= target.allowed_percent:
                    enough[large] = f"{KEEPS} {place.text}"
            left = [large for large in left if large not in enough]
    return [enough.get(large, "no smaller cluster keeps it") for large in larges]


def _larger(cluster: ClusterSpec, target: Target) -> Iterator[Target]:
    """Yields clusters like the large one that have more devices than the target: parts of a node, then whole nodes."""
    world, most = target.num_nodes * target.devices_per_node, cluster.devices_per_node
    sizes = [(1, 2**power) for power in range(most.bit_length()) if 2**power < most]
    sizes += [(2**power, most) for power in range(cluster.num_nodes.bit_length()) if 2**power <= cluster.num_nodes]
    for nodes, on_node in sizes:
        if nodes * on_node > world:
            yield target._replace(num_nodes=nodes, devices_per_node=on_node, device=cluster.device)

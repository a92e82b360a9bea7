"""Choice of the small trial that stands for each large one, and the reason where none does."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

from wattune.catalog.hardware import ClusterSpec
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.scale_down.cut import Target, cluster_of, depths, runnable, whole_stages
from wattune.scale_down.invariants import Scaled, compare
from wattune.trial import TrialSpec

FREE_PERCENT: Final = 1.0
"""Distance that a shallower stage may add: its steps are as much shorter, and more plans are measured in a time."""
LEAST_FREE_DEPTH: Final = 0.5
"""Share of a stage's layers below which only memory cuts: a trial's start takes longer then than its steps."""
PAUSED_FREE_DEPTH: Final = 2 / 3
"""The same of a pipeline: after each pause a device draws up to a fifth above its limit for some 0.1 s, and so more in
the mean of shorter phases (`benchmarks/results/scale_down.md`)."""
KEEPS: Final = "the smallest cluster that keeps it is"
"""Words before the cluster that a refusal names."""
_MOST_NAMED: Final = 16
"""Most refusals that name one, of the plans that are closest: a search for it costs as much as the choice."""


def choose(larges: Sequence[TrialSpec], target: Target) -> list[Scaled | str]:
    """Finds the small trial that is closest to each large one, as shallow as costs nothing; else says why none is.

    Raises `PlanError` where the target cannot stand for the cluster, or its device has no estimates.
    """
    over = estimate(larges, default_coefficients).columns["memory_headroom_frac"].high < 0
    able = [large for large, full in zip(larges, over, strict=True) if not full]
    found = dict(zip(able, _closest(able, target), strict=True))
    refused = [large for large, one in found.items() if not _keeps(one, target)]
    near = sorted(refused, key=lambda large: one.percent if (one := found[large]) else math.inf)
    enough = _smallest(near[:_MOST_NAMED], target)
    return [
        f"{large.label} does not fit {large.cluster.label}, as far as estimates tell"
        if large not in found
        else one
        if (one := found[large]) and _keeps(one, target)
        else _refusal(large, one, target) + enough.get(large, "")
        for large in larges
    ]


def _keeps(one: Scaled | None, target: Target) -> bool:
    return one is not None and one.fits and one.percent <= target.allowed_percent


def _closest(larges: Sequence[TrialSpec], target: Target) -> list[Scaled | None]:
    """Returns the best cut of each large trial, whatever its distance; None where no rule allows one."""
    places = {large.cluster: cluster_of(target, large.cluster) for large in larges}
    cuts = [one for large in larges for one in map(runnable, whole_stages(large, places[large.cluster])) if one]
    grouped = groupby(compare(cuts, default_coefficients), key=lambda one: one.large)
    size = attrgetter("small.cluster.world_size", "small.workload.global_batch_size")
    # A hundredth of a percent is no difference.
    whole = [min(own, key=lambda one: (round(one.percent, 2), size(one))) for _, own in grouped]
    deeper = [one for found in whole for one in map(runnable, depths(found.small)) if one]
    grouped = groupby(compare(deeper, default_coefficients), key=lambda one: one.large)
    best = {large: _shallowest([*own]) for large, own in grouped}
    return [best.get(large) for large in larges]


def _shallowest(own: Sequence[Scaled]) -> Scaled:
    """Returns the shallowest cut that fits and costs at most `FREE_PERCENT`; the first is the deepest."""
    fitting = [one for one in own if one.fits] or [own[-1]]
    most = min(one.percent for one in fitting) + FREE_PERCENT
    share = PAUSED_FREE_DEPTH if own[0].small.plan.pp > 1 else LEAST_FREE_DEPTH
    kept = share * own[0].small.model.num_layers
    free = [one for one in fitting if one.percent <= most and one.small.model.num_layers >= kept]
    return free[-1] if free else min(fitting, key=lambda one: one.percent)


def _refusal(large: TrialSpec, one: Scaled | None, target: Target) -> str:
    ranks, world = large.plan.tp * large.plan.cp, target.num_nodes * target.devices_per_node
    if ranks > world:
        return f"{large.label} needs tp*cp={ranks} devices or more, and {target.text} has {world}"
    if one is None or not one.fits:
        return f"{large.label} has no cut to {target.text} that {'every rule allows' if one is None else 'fits it'}"
    return (
        f"{large.label} on {target.text} is {one.percent:.1f} % of a step away, allowed: {target.allowed_percent:g} %; "
        f"it cannot keep {one.worst.name} ({one.worst.percent:.1f} %)"
    )


def _smallest(larges: Sequence[TrialSpec], target: Target) -> dict[TrialSpec, str]:
    """Says for each large trial which is the smallest cluster of its device that keeps the invariants, if one does."""
    enough: dict[TrialSpec, str] = {}
    for cluster in dict.fromkeys(large.cluster for large in larges):
        for place in _larger(cluster, target):
            left = [large for large in larges if large.cluster == cluster and large not in enough]
            found = zip(left, _closest(left, place) if left else (), strict=True)
            enough |= {large: f"; {KEEPS} {place.text}" for large, one in found if _keeps(one, target)}
    return enough


def _larger(cluster: ClusterSpec, target: Target) -> Iterator[Target]:
    """Yields clusters like the large one that have more devices than the target: parts of a node, then whole nodes."""
    most = cluster.devices_per_node
    sizes = [(1, 2**power) for power in range(most.bit_length()) if 2**power < most]
    sizes += [(2**power, most) for power in range(cluster.num_nodes.bit_length()) if 2**power <= cluster.num_nodes]
    for nodes, on_node in sizes:
        if nodes * on_node > target.num_nodes * target.devices_per_node:
            yield target._replace(num_nodes=nodes, devices_per_node=on_node, device=cluster.device)

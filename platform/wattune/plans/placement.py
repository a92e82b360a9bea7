"""Places of ranks: the node and device slot of each, from the cluster's shape and a plan's rank order."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from wattune.arrays import Floats, Ints
from wattune.catalog.hardware import ClusterSpec
from wattune.errors import PlanError
from wattune.plans.axes import Plan


@dataclass(frozen=True, kw_only=True)  # no slots: a driver pickles one for each rank
class Slot:
    """One device's place in a cluster."""

    node: int
    """Index of the node, 0 <= node < num_nodes."""
    device: int
    """Index among the node's devices, 0 <= device < devices_per_node."""


def order_problem(rank_order: "RankOrder", world_size: int) -> str | None:
    """Says why a rank order, of device slots counted over all nodes, cannot be used; None where it can."""
    if isinstance(rank_order, str):
        return None if rank_order == "topology" else f'unknown rank_order "{rank_order}"; use topology, or list slots'
    if len(rank_order) != world_size:
        return f"rank_order lists {len(rank_order)} slots for world_size={world_size}; list one slot a rank"
    missing = sorted(set(range(world_size)) - set(rank_order))
    if missing:
        return (
            f"rank_order={list(rank_order)} leaves out slot {missing[0]} of 0 to {world_size - 1}; name each slot once"
        )
    return None


def place(plan: Plan, cluster: ClusterSpec) -> tuple[Slot, ...]:
    """Computes the slot that every rank runs on, in rank order.

    With `topology` neighbouring ranks are neighbouring devices, and nodes are filled one after another. So tensor
    parallel groups, innermost on the mesh, stay inside a node where they fit. Raises `PlanError` where the plan's rank
    order is not a permutation of the cluster's slots.
    """
    problem = order_problem(plan.rank_order, cluster.world_size)
    if problem:
        raise PlanError(f"{problem} (cluster {cluster.label})")
    slots = range(cluster.world_size) if isinstance(plan.rank_order, str) else plan.rank_order
    return tuple(Slot(node=s // cluster.devices_per_node, device=s % cluster.devices_per_node) for s in slots)


RankOrder = str | tuple[int, ...]
"""`topology`, or the slot of each rank, counted over all nodes."""


def _domains(ranks: Ints, domain: int, rank_order: RankOrder) -> Ints:
    """Returns the domain of the fast fabric that each rank sits in."""
    slots: Ints = ranks if isinstance(rank_order, str) else np.array(rank_order, np.int64)[ranks]
    return slots // domain


@lru_cache(maxsize=4096)
def spread_of_groups(
    size: int, stride: int, *, domain: int, world_size: int, rank_order: RankOrder = "topology"
) -> tuple[int, int]:
    """Counts, over all groups of `size` ranks that are `stride` ranks apart, domains of the fast fabric that they span.

    Returns the most domains of any group, and the fewest ranks that any group has in one of its domains: the ring
    through all of them is as fast as there. Groups tile the ranks in blocks of `size * stride`; with `topology` they
    lie on domains of `domain` ranks as those before, so that one period of both is looked at.
    """
    block = size * stride
    length = math.lcm(block, domain) if isinstance(rank_order, str) else world_size
    ranks = np.arange(min(length, world_size) // block * block, dtype=np.int64)
    groups = ranks // block * stride + ranks % stride
    pairs, counts = np.unique(np.stack([groups, _domains(ranks, domain, rank_order)]), axis=1, return_counts=True)
    return int(np.bincount(pairs[0]).max()), int(counts.min())


@lru_cache(maxsize=4096)
def spine_hops_frac(
    size: int, stride: int, *, domain: int, rail: int, world_size: int, rank_order: RankOrder = "topology"
) -> float:
    """Computes the share of a ring's hops between nodes that leave a rail group of `rail` slots, of the worst ring.

    Rings go through groups as `spread_of_groups` tiles them, in the order of their ranks.
    """
    block = size * stride
    ranks = np.arange(world_size // block * block, dtype=np.int64).reshape(-1, size, stride)
    nodes, rails = (_domains(ranks, each, rank_order) for each in (domain, rail))
    hops, over = ((own != np.roll(own, -1, axis=1)).sum(axis=1) for own in (nodes, rails))
    return float((over / np.maximum(hops, 1)).max())


@lru_cache(maxsize=1024)
def crossing_frac(num_stages: int, *, domain: int, world_size: int, rank_order: RankOrder = "topology") -> Floats:
    """Computes the share of each stage's ranks that sit in another domain than their partners in the next stage.

    Stages are outermost on the mesh: a rank's partner is `world_size / num_stages` ranks further, that of the last
    stage is in the first.
    """
    own = _domains(np.arange(world_size, dtype=np.int64), domain, rank_order)
    shares: Floats = (own != np.roll(own, -(world_size // num_stages))).reshape(num_stages, -1).mean(axis=1)
    return shares

"""Places of ranks: the node and device slot of each, from the cluster's shape and a plan's rank order."""

from dataclasses import dataclass

from wattune.catalog.hardware import ClusterSpec
from wattune.errors import PlanError
from wattune.plans.axes import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One device's place in a cluster."""

    node: int
    """Index of the node, 0 <= node < num_nodes."""
    device: int
    """Index among the node's devices, 0 <= device < devices_per_node."""


def order_problem(rank_order: str | tuple[int, ...], world_size: int) -> str | None:
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
    parallel groups, innermost on the mesh, stay inside a node where they fit.

    Raises:
        PlanError: The plan's rank order is not a permutation of the cluster's slots.
    """
    problem = order_problem(plan.rank_order, cluster.world_size)
    if problem:
        raise PlanError(f"{problem} (cluster {cluster.label})")
    slots = range(cluster.world_size) if isinstance(plan.rank_order, str) else plan.rank_order
    return tuple(Slot(node=s // cluster.devices_per_node, device=s % cluster.devices_per_node) for s in slots)

"""Sizes that projections are asked for, such as `1024x8`: nodes and devices a node."""

import re
from dataclasses import replace

from wattune.catalog.hardware import ClusterSpec
from wattune.errors import PlanError


def nodes_and_devices(text: str) -> tuple[int, int]:
    """Reads a size.

    Returns:
        Nodes, and devices of each.

    Raises:
        PlanError: The text is not such a size.
    """
    found = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,3})", text.strip(), re.ASCII)
    if found is None:
        raise PlanError(
            f'--to: got "{text}", allowed: nodes x devices a node such as 1024x8, both whole and above 0; name a size'
        )
    return int(found[1]), int(found[2])


def enlarged(cluster: ClusterSpec, size: str) -> ClusterSpec:
    """Returns a cluster of that many nodes of the same devices and fabrics.

    Raises:
        PlanError: The text is no size, or its nodes hold another number of devices than those that were measured.
    """
    num_nodes, per_node = nodes_and_devices(size)
    if per_node != cluster.devices_per_node:
        raise PlanError(
            f"--to: got nodes of {per_node} devices, allowed: {cluster.devices_per_node}, as those that were measured; "
            f"a node of another kind is another cluster: write {num_nodes * per_node // cluster.devices_per_node}x"
            f"{cluster.devices_per_node}, or measure on such a node"
        )
    return replace(cluster, num_nodes=num_nodes)

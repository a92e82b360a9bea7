"""The nodes of a study: those that live, what other jobs use of them, and those it waits for, as an autoscaler sees."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import ray
from ray._private import ray_constants
from ray.core.generated import autoscaler_pb2, gcs_pb2
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.cluster import DEVICE_LABEL, Cluster, Node, alive_nodes, left
from wattune.orchestrate.lanes.client import Lanes

UNFIT_S: Final = 60.0
"""Seconds after which an autoscaler is believed that it cannot start the nodes: idle ones may have to end before."""

_UNMANAGED: Final = "node_"
"""Beginning of the type of a node that no autoscaler started (`format_readonly_node_type` of Ray 2.60)."""

_ASK_S: Final = 10.0


class StudyNodes:
    """The nodes of a study, asked again and again. Lanes on nodes that left are ended."""

    def __init__(self, cluster: Cluster, lanes: Lanes) -> None:
        """Knows the nodes of the cluster, and keeps their names."""
        self._cluster, self._lanes = cluster, lanes
        self._nodes = list(cluster.nodes)
        self._missed: set[str] = set()
        self._wanted: ClusterSpec | None = None
        self._group: PlacementGroup | None = None
        self._unfit_since_s: float | None = None
        self._used: dict[str, Mapping[str, float]] | None = None

    def left(self, nodes: Sequence[Node]) -> list[Node]:
        """Returns those of some nodes that are gone. They then count as dead until they answer again."""
        gone = left(nodes)
        self._missed -= {node.node_id for node in nodes}
        self._missed |= {node.node_id for node in gone}
        return gone

    def alive(self) -> list[Node]:
        """Returns the nodes that are alive."""
        listed = alive_nodes(self._nodes)
        self._missed &= {node.node_id for node in listed}
        gone = self.left([node for node in listed if node.node_id in self._missed])
        now = [node for node in listed if node not in gone]
        alive = {node.node_id for node in now}
        lost = [node.node_id for node in self._nodes if node.node_id not in alive]
        if lost:
            self._lanes.forget_nodes(lost)
        self._nodes = now
        return now

    def used_by_others(self) -> dict[str, Mapping[str, float]]:
        """Returns what other jobs hold of the nodes (`CPU`, `GPU`), by Ray's id of those where they hold something.

        It was so at the look before too, but at the first: what a job of ours has just given back seems another's for a
        moment.
        """
        # Not public: Ray has no public way to ask who holds what.
        state, own = ray._private.state.state, _own(ray.get_runtime_context().get_job_id())
        free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
        found: dict[str, Mapping[str, float]] = {}
        for node in self._nodes:
            if node.node_id in free:
                left_over = free[node.node_id]
                total = {"CPU": node.num_cpus, "GPU": node.num_gpus}
                used = {name: total[name] - left_over.get(name, 0.0) - own[node.node_id, name] for name in total}
                if any(amount > 1e-3 for amount in used.values()):
                    found[node.node_id] = {name: max(0.0, amount) for name, amount in used.items()}
        before, self._used = self._used, found
        return {node_id: used for node_id, used in found.items() if before is None or node_id in before}

    def want(self, spec: ClusterSpec | None) -> bool:
        """Shows the autoscaler the nodes that a trial lacks, none for None; returns whether they may come.

        They are a placement group of bundles with the device's label, of nodes that do not live yet. As soon as they
        live it is removed: it would hold what their workers need.
        """
        if spec != self._wanted or spec is None:
            self._withdraw()
        self._wanted = spec
        if spec is None or not has_autoscaler():
            return False
        if self._group is not None and self._group.wait(0):
            self._withdraw()
        if self._group is None:
            self._group = placement_group(**bundles(spec, replace(self._cluster, nodes=tuple(self._nodes))))
        refused = any(self._group.id.hex() in one.details for one in _refused())
        self._unfit_since_s = (self._unfit_since_s or time.monotonic()) if refused else None
        return self._unfit_since_s is None or time.monotonic() - self._unfit_since_s < UNFIT_S

    def _withdraw(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
        self._group = self._unfit_since_s = None


def bundles(spec: ClusterSpec, cluster: Cluster) -> dict[str, Any]:
    """Returns the placement group of the nodes that a trial lacks: a whole node's devices each, on nodes of their own.

    Each has the label `wattune.io/device`, and is none of those that live.
    """
    lacking = spec.num_nodes - len(cluster.fitting(spec))
    each = {"CPU": 0.9} if spec.device == "cpu" else {"GPU": float(spec.devices_per_node)}
    living = ",".join(node.node_id for node in cluster.nodes)
    selector = {"ray.io/node-id": f"!in({living})", DEVICE_LABEL: spec.device}
    return {"bundles": [each] * lacking, "strategy": "STRICT_SPREAD", "bundle_label_selector": [selector] * lacking}


def has_autoscaler() -> bool:
    """Returns whether something starts nodes for the cluster: its nodes have types then, as `ray up` and KubeRay set.

    The first version says itself which it manages; with the second a node started by hand has no type.
    """
    # Not public: `ray status` reads the same two.
    said = ray._private.worker.global_worker.gcs_client.internal_kv_get(
        ray_constants.DEBUG_AUTOSCALING_STATUS.encode(), None
    )
    if said is not None:
        report = json.loads(said).get("autoscaler_report") or {}
        return any(not name.startswith(_UNMANAGED) for name in (report.get("node_type_mapping") or {}).values())
    return any(node.ray_node_type_name for node in _status().cluster_resource_state.node_states)


def _status() -> Any:
    client = ray._private.worker.global_worker.gcs_client
    return autoscaler_pb2.GetClusterStatusReply.FromString(client.get_cluster_status(timeout_s=_ASK_S))


def _refused() -> Sequence[Any]:
    """Lists the demands that the autoscaler says it cannot meet with any of its types of nodes."""
    found: Sequence[Any] = _status().autoscaling_state.infeasible_gang_resource_requests
    return found


def _own(job_id: str) -> defaultdict[tuple[str, str], float]:
    """Returns what placement groups of a job hold, by Ray's id of the node and the resource."""
    held: defaultdict[tuple[str, str], float] = defaultdict(float)
    for entry in ray._private.state.state._connect_and_get_accessor().get_placement_group_table():
        group = gcs_pb2.PlacementGroupTableData.FromString(entry)
        if group.creator_job_id.hex() == job_id and group.state == gcs_pb2.PlacementGroupTableData.CREATED:
            for bundle in group.bundles:
                for name, amount in bundle.unit_resources.items():
                    held[bundle.node_id.hex(), name] += amount
    return held

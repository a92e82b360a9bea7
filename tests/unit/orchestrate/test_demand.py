"""The nodes of a study: those that left, what other jobs hold, and those an autoscaler is asked for. No Ray runs."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate import demand
from wattune.orchestrate.cluster import Cluster, Node
from wattune.orchestrate.demand import UNFIT_S, StudyNodes, bundles, has_autoscaler

H100S = ClusterSpec(device="h100_sxm", num_nodes=3, devices_per_node=8)


def node(name: str, gpus: float = 0.0) -> Node:
    labels = {"wattune.io/device": "h100_sxm" if gpus else "cpu"}
    return Node(node_id=f"id-{name}", name=name, num_cpus=4.0, num_gpus=gpus, labels=labels)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two nodes, and what Ray says of them, which a test may change."""
    both = [node("n0"), node("n1", 8.0)]
    lanes: Any = SimpleNamespace(gone=[], forget_nodes=lambda ids: lanes.gone.append(ids))
    found: Any = StudyNodes(Cluster(nodes=tuple(both), driver_node_id="id-n0"), lanes)
    said = SimpleNamespace(nodes=found, silent=set(), free={}, own={}, gone=lanes.gone)
    monkeypatch.setattr(demand, "alive_nodes", lambda _known: list(both))
    monkeypatch.setattr(demand, "left", lambda asked: [one for one in asked if one.name in said.silent])
    state = SimpleNamespace(available_resources_per_node=lambda: said.free)
    monkeypatch.setattr(demand.ray._private.state, "state", state)
    monkeypatch.setattr(demand.ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01"))
    monkeypatch.setattr(demand, "_own", lambda _job: demand.defaultdict(float, said.own))
    return said


def test_a_node_that_left_gets_no_trial_until_it_answers_again(nodes: Any) -> None:
    nodes.silent.add("n1")
    assert len(nodes.nodes.alive()) == 2, "nobody knows yet"
    assert [one.name for one in nodes.nodes.left(nodes.nodes.alive())] == ["n1"]
    assert [one.name for one in nodes.nodes.alive()] == ["n0"]
    assert nodes.gone == [["id-n1"]]
    nodes.silent.clear()
    assert len(nodes.nodes.alive()) == 2


def test_what_other_jobs_hold_is_what_neither_is_free_nor_of_this_job(nodes: Any) -> None:
    nodes.free = {"id-n0": {"CPU": 1.0}, "id-n1": {"CPU": 4.0}}  # a resource without a rest is not named
    nodes.own = {("id-n0", "CPU"): 3.0, ("id-n1", "GPU"): 6.0}
    held = {"id-n1": {"CPU": 0.0, "GPU": 2.0}}
    assert nodes.nodes.used_by_others() == held, "at the first look this job has given nothing back"
    nodes.free["id-n1"]["GPU"] = 2.0
    assert nodes.nodes.used_by_others() == {}
    nodes.free["id-n1"]["GPU"] = 0.0
    assert nodes.nodes.used_by_others() == {}, "it may be what this job has just given back"
    assert nodes.nodes.used_by_others() == held


def test_a_demand_is_whole_nodes_of_the_label_beside_those_that_live() -> None:
    living = Cluster(nodes=(node("n0"), node("n1", 8.0)), driver_node_id="id-n0")
    assert bundles(H100S, living) == {
        "bundles": [{"GPU": 8.0}] * 2,
        "strategy": "STRICT_SPREAD",
        "bundle_label_selector": [{"ray.io/node-id": "!in(id-n0,id-n1)", "wattune.io/device": "h100_sxm"}] * 2,
    }


def test_a_demand_stands_until_its_nodes_live_and_is_refused_where_no_type_of_node_meets_it(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    removed: list[Any] = []
    refused: list[Any] = []
    now_s = [100.0]

    def make(**_: Any) -> Any:
        made.append(SimpleNamespace(wait=lambda _s: False, id=SimpleNamespace(hex=lambda: f"g{len(made)}")))
        return made[-1]

    monkeypatch.setattr(demand, "placement_group", make)
    monkeypatch.setattr(demand, "remove_placement_group", removed.append)
    monkeypatch.setattr(demand, "_refused", lambda: refused)
    monkeypatch.setattr(demand, "has_autoscaler", lambda: True)
    monkeypatch.setattr(demand.time, "monotonic", lambda: now_s[0])
    assert nodes.nodes.want(H100S) and nodes.nodes.want(H100S) and len(made) == 1
    made[0].wait = lambda _s: True  # the nodes live: the group would hold their devices
    assert nodes.nodes.want(H100S) and removed == made[:1] and len(made) == 2
    refused.append(SimpleNamespace(details="other:STRICT_SPREAD|PENDING"))
    now_s[0] += 2 * UNFIT_S
    assert nodes.nodes.want(H100S), "another job's demand"
    refused.append(SimpleNamespace(details="g2:STRICT_SPREAD|PENDING"))
    assert nodes.nodes.want(H100S)
    now_s[0] += UNFIT_S
    assert not nodes.nodes.want(H100S)
    assert not nodes.nodes.want(None) and removed == made
    monkeypatch.setattr(demand, "has_autoscaler", lambda: False)
    assert not nodes.nodes.want(H100S) and len(made) == 2


@pytest.mark.parametrize(
    ("types", "named", "there"),
    [
        (["ray.head.default", "h100"], [], True),
        (["node_ffff00", "node_ffff01"], ["by", "hand"], False),  # the first version names those it does not manage so
        ([], ["h100", ""], True),
        ([], ["", ""], False),
        (None, ["h100"], True),
        (None, [""], False),
    ],
)
def test_an_autoscaler_is_known_by_the_types_of_nodes(
    types: list[str] | None, named: list[str], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {"autoscaler_report": {"node_type_mapping": {str(at): name for at, name in enumerate(types or [])}}}
    client = SimpleNamespace(internal_kv_get=lambda _key, _namespace: json.dumps(report) if types else None)
    monkeypatch.setattr(demand.ray._private.worker, "global_worker", SimpleNamespace(gcs_client=client))
    states = [SimpleNamespace(ray_node_type_name=name) for name in named]
    monkeypatch.setattr(
        demand, "_status", lambda: SimpleNamespace(cluster_resource_state=SimpleNamespace(node_states=states))
    )
    assert has_autoscaler() is there

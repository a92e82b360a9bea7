"""Clusters of a space: in short, of the catalog, and with devices of their own that travel with a trial."""

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from wattune.catalog.hardware import DEVICES, ClusterSpec, DeviceSpec, parse_cluster_label
from wattune.catalog.networks import NETWORKS
from wattune.errors import SpaceError
from wattune.orchestrate.cluster import DEVICE_LABEL, Cluster, Node
from wattune.search.prune import prune
from wattune.search.space import StudySpec, parse_space
from wattune.simulation.device_model import device_model
from wattune.storage.space_changes import changes, contradictions
from wattune.trial import TrialSpec

SPACE: dict[str, Any] = {
    "study": "own",
    "model": {"name": "llama3_8b", "num_layers": 4},
    "engine": "torch",
    "workload": {"seq_len": 4096, "global_batch_size": 16},
    "space": {"tp": [1, 2]},
    "objective": "maximize tokens_per_s",
}
CAPPED = {"name": "h200_500w", "like": "h200_sxm", "power_limit_w": 500}


def study(cluster: Any) -> StudySpec:
    return parse_space(SPACE | {"cluster": cluster})


def first(spec: StudySpec) -> TrialSpec:
    return prune(spec).kept[0].spec


def test_a_text_says_what_a_mapping_says() -> None:
    short, long = study("2x4 h200_sxm"), study({"device": "h200_sxm", "num_nodes": 2, "devices_per_node": 4})
    assert short.clusters == long.clusters and short.document == long.document


def test_a_text_may_name_the_network() -> None:
    short = study("2x8 h100_sxm over roce_400")
    assert short.clusters == study({**H100, "network": "roce_400"}).clusters
    assert parse_cluster_label(short.clusters[0].label) == short.clusters[0]
    with pytest.raises(SpaceError, match='cluster: unknown network "roce"; use one of: efa_p4d'):
        study("2x8 h100_sxm over roce")


def test_a_device_like_another_differs_in_what_is_given() -> None:
    own = study({"device": CAPPED, "devices_per_node": 4}).clusters[0].rank_device
    assert replace(own, source="") == replace(DEVICES["h200_sxm"], name="h200_500w", power_limit_w=500, source="")


@pytest.mark.parametrize("like", ["h100_pcie", "h200_sxm"])
def test_a_study_s_file_keeps_which_device_an_own_one_is_like(like: str) -> None:
    """Links over PCIe are known by it alone: a study that goes on by its file would rate them as NVLink."""
    given = study({"device": {"name": "mine", "like": like, "power_limit_w": 300}, "devices_per_node": 4})
    again = parse_space(yaml.safe_load(yaml.safe_dump(dict(given.document))))
    assert again.document == given.document and again.clusters == given.clusters
    own, stored = given.clusters[0].rank_device, again.clusters[0].rank_device
    assert (stored.source, stored.power_limit_w) == (own.source, 300) == (f"like {like}", 300)
    assert stored.is_linked_by_pcie == own.is_linked_by_pcie == (like == "h100_pcie")
    (cluster,) = given.document["cluster"]
    before = {key: value for key, value in cluster["device"].items() if key != "like"}
    older = {**given.document, "cluster": [cluster | {"device": before}]}
    assert contradictions(older, given.document) == [] == changes(older, given.document)


def test_a_device_of_the_catalog_keeps_its_trials_ids() -> None:
    spec = first(study("1x4 h200_sxm"))
    assert spec.cluster.own_device is None
    stored = {key: value for key, value in spec.to_json()["cluster"].items() if key != "own_device"}
    older = TrialSpec.from_json({**spec.to_json(), "cluster": stored})
    assert older == spec and older.trial_id == spec.trial_id == "3a5f1609b764"


def test_a_peak_in_fp8_changes_no_id_of_an_own_device() -> None:
    spec = first(study({"device": CAPPED, "devices_per_node": 4}))
    own = spec.cluster.own_device
    assert spec.trial_id == "3f99a7afd1c0", "as before devices had one"
    assert own is not None and own.peak_fp8_flop_per_s == DEVICES["h200_sxm"].peak_fp8_flop_per_s
    older = spec.to_json()
    del older["cluster"]["own_device"]["peak_fp8_flop_per_s"]
    read = TrialSpec.from_json(older)
    assert read.trial_id == spec.trial_id
    assert read.cluster.rank_device.trains_in == ("bf16", "fp32"), "the figure is unknown, never guessed"


def test_sensors_of_an_own_device_are_simulated_with_its_limit() -> None:
    cluster = study({"device": "cpu", "devices_per_node": 2, "simulate_sensors_of": CAPPED}).clusters[0]
    assert cluster.rank_device is DEVICES["cpu"]
    assert device_model(cluster.sensed_device).limit_w == 500


def test_figures_that_nobody_gives_are_unknown() -> None:
    own = study({"device": {"name": "lab", "vendor": "nvidia"}, "devices_per_node": 2}).clusters[0].rank_device
    assert own.power_limit_w is None and own.memory_bytes is None and own.dtypes == ("bf16", "fp32")


def node(**changes: Any) -> Node:
    return Node(
        **{
            "name": "n",
            "node_id": "1",
            "num_cpus": 8.0,
            "num_gpus": 4.0,
            "products": (),
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"products": ("NVIDIA H200",)}, True),
        ({"products": ("NVIDIA H100 PCIe",)}, False),
        ({"products": ()}, False),
        ({"labels": {DEVICE_LABEL: "h200_500w"}}, True),
        ({"labels": {DEVICE_LABEL: "h200_sxm"}, "products": ("NVIDIA H200",)}, False),
    ],
    ids=["product", "other", "unknown", "label", "other-label"],
)
def test_nodes_of_an_own_device_are_told_by_product_or_label(changes: Any, fits: bool) -> None:
    cluster = study({"device": CAPPED, "devices_per_node": 4}).clusters[0]
    assert bool(Cluster(nodes=(node(**changes),), driver_node_id="1").fitting(cluster)) == fits


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"device": {"name": "h200_sxm", "like": "h100_sxm"}}, "cluster.device.name: h200_sxm is a catalog device"),
        ({"device": {"name": "lab", "like": "cpu"}}, "cluster.device.like: got cpu, which has no figures"),
        ({"device": {"name": "lab", "like": "h200_sx"}}, 'cluster.device.like: unknown device "h200_sx"; did you mean'),
        ({"device": {"name": "a b", "like": "h200_sxm"}}, 'cluster.device.name: "a b" is no name'),
        ({"device": 5}, "cluster.device: got 5, allowed: text"),
    ],
    ids=str,
)
def test_a_device_that_cannot_be_is_one_line(cluster: Any, words: str) -> None:
    with pytest.raises(SpaceError) as caught:
        study({"devices_per_node": 4, **cluster})
    lines = caught.value.problems
    assert any(words in line for line in lines), lines


def test_two_devices_of_one_name_are_a_slip() -> None:
    clusters = [{"device": CAPPED | {"power_limit_w": watts}, "devices_per_node": 4} for watts in (400, 500)]
    with pytest.raises(SpaceError, match=r"cluster\[1\]\.device\.name: h200_500w is another device in entry 0"):
        study(clusters)


def test_a_stored_device_holds_what_a_device_can() -> None:
    spec = first(study({"device": CAPPED, "devices_per_node": 4})).to_json()
    for key, value in (("power_limit_w", "500"), ("power_limit_w", -1.0), ("dtypes", [1]), ("name", 3)):
        damaged = json.loads(json.dumps(spec))
        damaged["cluster"]["own_device"][key] = value
        with pytest.raises((TypeError, ValueError)):
            TrialSpec.from_json(damaged)
    assert DeviceSpec.from_json(spec["cluster"]["own_device"]).name == "h200_500w"
    assert ClusterSpec(device="cpu", devices_per_node=1).own_device is None


OURS = {"name": "ours", "like": "hdr"}
H100 = {"device": "h100_sxm", "devices_per_node": 8, "num_nodes": 2}


def test_a_network_is_a_name_or_what_is_given_over_one() -> None:
    named = study({**H100, "network": "roce_400"}).clusters[0]
    assert named.network is NETWORKS["roce_400"] and named.label == "2x8 h100_sxm over roce_400"
    slow = {"name": "ours", "like": "roce_400", "latency_s": 9e-6}
    own = study({**H100, "network": slow}).clusters[0].network
    assert own == replace(NETWORKS["roce_400"], name="ours", latency_s=9e-6)
    assert study(H100).clusters[0].network is None
    for same in ({"name": "hdr"}, {"like": "hdr"}, {"name": "hdr", "like": "hdr"}):
        assert study({**H100, "network": same}).clusters[0].network is NETWORKS["hdr"]


@pytest.mark.parametrize(
    ("cluster", "share"),
    [
        ({"network": "hdr"}, 1),
        ({"network": "hdr", "rails": 4}, 0.5),
        ({"network": "efa_p5"}, 4),
        ({"network": "slingshot_11", "rails": 4, "slots": 8, "devices_per_node": 4}, 0.5),
        ({"network": "slingshot_11", "rails": 4, "slots": 4, "devices_per_node": 4}, 1),
    ],
    ids=str,
)
def test_the_slots_of_a_node_share_its_rails(cluster: Any, share: float) -> None:
    found = study({**H100, **cluster}).clusters[0].network
    assert found is not None and found.ports_per_device == share


@pytest.mark.parametrize(
    ("cluster", "shape"),
    [
        ({"slots": 6, "num_nodes": 3}, (3, 6)),
        ({"slots": [4, 4]}, (2, 4)),
        ({"slots": [8, 8, 8], "devices_per_node": 6}, (3, 6)),
        ({"devices_per_node": 5}, (1, 5)),
    ],
    ids=str,
)
def test_nodes_have_any_number_of_devices(cluster: Any, shape: tuple[int, int]) -> None:
    found = study({"device": "h100_sxm", **cluster}).clusters[0]
    assert (found.num_nodes, found.devices_per_node) == shape


def test_a_fabric_joins_nodes() -> None:
    rack = study({"device": "gb200", "slots": 4, "num_nodes": 18, "fabric": "nvlink_72"}).clusters[0]
    assert rack.domain == rack.world_size == 72
    assert study(H100).clusters[0].domain == 8
    half = study({**H100, "num_nodes": 3, "slots": 4, "devices_per_node": 4, "nvlink_domain_size": 8}).clusters[0]
    assert (rack.num_domains, half.num_domains) == (1, 2), "the third node is outside of the first fabric"


@pytest.mark.parametrize(("host", "speed"), [({"cpu": "epyc_7742"}, 3.4 / 3.8), ({"speed": 0.8}, 0.8)], ids=str)
def test_a_host_is_a_processor_or_a_speed(host: Any, speed: float) -> None:
    assert study({**H100, "host": host}).clusters[0].host_speed == pytest.approx(speed)


def test_a_host_may_say_its_inlet_alone_or_with_its_speed() -> None:
    alone, both = (study({**H100, "host": host}).clusters[0] for host in ({"inlet_c": 38}, {"speed": 2, "inlet_c": 38}))
    assert (alone.inlet_c, alone.host_speed) == (38, 1) and (both.inlet_c, both.host_speed) == (38, 2)
    assert study(H100).clusters[0].inlet_c is None
    assert study({**H100, "host": {"speed": 1}}).clusters == study(H100).clusters


@pytest.mark.parametrize(
    "cluster",
    [
        {"host": {"inlet_c": 27.5}},
        {"network": "hdr"},
        {"network": "hdr", "rails": 4},
        {"network": {"name": "ours", "bandwidth_bytes_per_s": 12.5e9}, "host": {"cpu": "grace"}},
        {"network": {"name": "pods", "like": "ndr", "rail_devices": 256, "oversubscription": 2.0}},
        {"slots": [8, 8], "fabric": "nvlink_8"},
        {"device": CAPPED},
        {"device": "cpu", "simulate_sensors_of": CAPPED},
        {"device": {"name": "lab", "vendor": "amd", "memory_bytes": 64 * 10**9}},
    ],
    ids=str,
)
def test_networks_hosts_and_own_devices_survive_their_files(cluster: Any) -> None:
    once = study({**H100, **cluster})
    again = parse_space(yaml.safe_load(yaml.safe_dump(dict(once.document))))
    assert again.document == once.document and again.clusters == once.clusters
    spec = first(once)
    stored = TrialSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert stored == spec and stored.trial_id == spec.trial_id
    assert stored.trial_id != first(study(H100)).trial_id


def test_every_mistake_of_a_cluster_is_told_at_once() -> None:
    wrong = {
        **H100,
        "slots": [8, 8, 4],
        "devices_per_node": 8,
        "fabric": "xgmi_8",
        "nvlink_domain_size": 72,
        "network": {"name": "ndr", "latency_s": -1, "achieved_frac": 0.7},
        "rails": 0,
        "host": {"cpu": "epyc_7742", "speed": 2},
    }
    with pytest.raises(SpaceError) as caught:
        study(wrong)
    text = str(caught.value)
    for words in (
        "cluster.slots: nodes of 8 and 4 devices: groups of ranks span all nodes alike",
        "cluster.slots: lists 3 nodes, and num_nodes is 2; drop one of the two",
        "cluster.devices_per_node: got 8, and a node has 4 slots; use at most 4",
        "cluster.fabric: xgmi_8 is of amd, and h100_sxm has a vendor of nvidia; use one of: nvlink_8",
        "cluster.nvlink_domain_size: got 72, and fabric xgmi_8 joins 8; drop one",
        "cluster.network.name: ndr is a catalog network",
        "cluster.network.latency_s: got -1, allowed: more than 0",
        "cluster.rails: got 0, allowed: at least 1",
        "cluster.host.speed: a cpu has a speed of its own",
    ):
        assert words in text, text


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"network": "infiniband"}, 'cluster.network: unknown network "infiniband"; '),
        ({"network": "infiniband", "rails": 4}, 'cluster.network: unknown network "infiniband"; '),
        ({"device": {"name": "mine", "like": "h300"}}, 'cluster.device.like: unknown device "h300"'),
        ({"network": {"latency_s": 1e-6}}, "cluster.network.bandwidth_bytes_per_s: missing; add it, or like"),
        (
            {"network": {"like": "hdr", "latency_s": 1e-6}},
            "cluster.network.name: missing for a network with a",
        ),
        (
            {"network": OURS | {"achieved_frac": 1.1}},
            "achieved_frac: got 1.1, allowed: at most 1",
        ),
        (
            {"network": OURS | {"bandwidth_bytes_per_s": "fast"}},
            'got the text "fast", allowed: a number',
        ),
        ({"rails": 4}, "cluster.rails: 4 ports, and network=null; add network"),
        (
            {"network": {"name": "ours", "like": "ndr", "oversubscription": 2}},
            "cluster.network.rail_devices: missing beside oversubscription 2; add the devices that meet",
        ),
        (
            {"network": {"name": "ours", "like": "roce_400_pods", "rail_devices": 20}},
            "cluster.network.rail_devices: 20 are no whole nodes of 8; use a multiple of it",
        ),
        ({"network": OURS | {"oversubscription": 0.5}}, "oversubscription: got 0.5, allowed: at least 1"),
        (
            {"network": OURS | {"ports_per_device": 1.0}, "rails": 4},
            "cluster.rails: got 4 for 8 slots, and network.ports_per_device is 1.0; drop one of the two",
        ),
        ({"nvlink_domain_size": 12}, "cluster.nvlink_domain_size: 12 devices of one fabric are no whole nodes of 8"),
        (
            {"device": "h100_pcie", "fabric": "nvlink_8"},
            "fabric: nvlink_8 is of nvidia, and h100_pcie has PCIe",
        ),
        ({"devices_per_node": None}, "cluster.devices_per_node: missing; add it, or slots"),
        ({"host": {}}, "cluster.host.cpu: missing; add it, or speed, or inlet_c"),
        ({"host": {"cpu": "z80"}}, 'cluster.host.cpu: unknown value "z80"'),
    ],
    ids=str,
)
def test_a_network_that_cannot_be_is_one_line(cluster: Any, words: str) -> None:
    with pytest.raises(SpaceError) as caught:
        study({**H100, **cluster})
    lines = caught.value.problems
    assert len(lines) == 1 and words in lines[0]


def test_a_stored_network_holds_what_a_network_can() -> None:
    spec = first(study({**H100, "network": "hdr"})).to_json()
    for key, value in (("latency_s", 0), ("bandwidth_bytes_per_s", "fast"), ("achieved_frac", float("nan"))):
        damaged = json.loads(json.dumps(spec))
        damaged["cluster"]["network"][key] = value
        with pytest.raises((TypeError, ValueError), match=f"{key}: got"):
            TrialSpec.from_json(damaged)

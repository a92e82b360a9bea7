"""Nodes that fit a trial, resources of a rank, and the message if there are too few nodes."""

import contextlib
import gc
import inspect
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from wattune.catalog.hardware import ClusterSpec, device_of_product
from wattune.errors import EngineError, PlanError
from wattune.orchestrate import cluster as cluster_module
from wattune.orchestrate.cluster import Cluster, Node, _callers_signals, _patience, alive_nodes, connect, left

H200 = {"ray.io/accelerator-type": "H200"}
H100 = {"ray.io/accelerator-type": "H100"}


def node(name: str, cpus: float, gpus: float = 0, products: tuple[str, ...] = (), **labels: str) -> Node:
    return Node(
        node_id=f"id-{name}",
        name=name,
        num_cpus=cpus,
        num_gpus=gpus,
        labels=labels,
        products=products,
    )


def cluster(*nodes: Node) -> Cluster:
    return Cluster(nodes=nodes, driver_node_id=nodes[0].node_id)


def sized(*sizes: tuple[float, float]) -> Cluster:
    return cluster(*(node(f"n{index}", cpus, gpus, **H200) for index, (cpus, gpus) in enumerate(sizes)))


@pytest.mark.parametrize(("cpus", "ranks"), [(2, 4), (2, 2), (64, 8), (1, 8), (3, 7)])
def test_ranks_of_one_node_always_fit_its_processors(cpus: int, ranks: int) -> None:
    share = sized((cpus, 0)).resources_per_rank(ClusterSpec(device="cpu", devices_per_node=ranks))
    assert share.keys() == {"CPU"}
    assert 0 < share["CPU"] <= 1 and share["CPU"] * ranks <= cpus


def test_a_gpu_rank_has_a_gpu() -> None:
    share = sized((64, 8), (64, 8)).resources_per_rank(ClusterSpec(device="h200_sxm", num_nodes=2, devices_per_node=8))
    assert share == {"CPU": 1.0, "GPU": 1.0}


@pytest.mark.parametrize(
    "wanted",
    [
        ClusterSpec(device="h200_sxm", devices_per_node=4),
        ClusterSpec(device="h200_sxm", num_nodes=2, devices_per_node=2),
        ClusterSpec(device="h100_sxm", devices_per_node=2),
        ClusterSpec(device="cpu", num_nodes=3, devices_per_node=1),
    ],
)
def test_too_small_a_cluster_is_said_with_what_there_is(wanted: ClusterSpec) -> None:
    with pytest.raises(EngineError, match=r"needs \d node.*n0: 4 CPU, 2 GPU \(h200_sxm\), n1: 4 CPU[;,]"):
        sized((4, 2), (4, 0)).resources_per_rank(wanted)


def test_pools_of_one_cluster_are_told_apart() -> None:
    """Equal numbers of GPUs of another kind never match, and GPUs of a kind nobody named match nothing."""
    mixed = cluster(
        node("a", 8, 8, **H200),
        node("b", 8, 8, **H100),
        node("c", 8, 8, **{"ray.io/accelerator-type": "AMD-Instinct-MI250X-MI250"}),
        node("d", 8, 8, **{"ray.io/accelerator-type": "A100"}),
        node("e", 8),
        node("f", 8, 8, **H100, **{"wattune.io/device": "h100_pcie"}),
        node("g", 8, 8),
    )
    found = {
        name: [one.name for one in mixed.fitting(ClusterSpec(device=name, devices_per_node=8))]
        for name in ("h200_sxm", "h100_sxm", "mi250_gcd", "cpu")
    }
    assert found == {"h200_sxm": ["a"], "h100_sxm": ["b"], "mi250_gcd": ["c"], "cpu": ["e"]}
    with pytest.raises(EngineError) as error:
        mixed.resources_per_rank(ClusterSpec(device="h200_sxm", num_nodes=2, devices_per_node=8))
    text = str(error.value)
    assert "8 GPU (kind unknown, Ray detected A100; label it wattune.io/device=NAME)" in text
    assert "8 GPU (kind unknown, Ray detected nothing; label it" in text and "f: 8 CPU, 8 GPU (h100_pcie)" in text


def test_a_label_makes_a_node_what_it_says() -> None:
    labelled = cluster(node("a", 8, 4, **{"wattune.io/device": "h200_sxm"}), node("b", 8, 4))
    fitting = labelled.fitting(ClusterSpec(device="h200_sxm", devices_per_node=4))
    assert [one.name for one in fitting] == ["a"]


@pytest.mark.parametrize("label", [{}, {"wattune.io/device": "h100_sxm"}], ids=["detected", "labelled"])
@pytest.mark.parametrize("product", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB"])
def test_a_board_of_another_form_factor_is_no_sxm_board(product: str, label: dict[str, str]) -> None:
    """Ray labels all of them H100; the product's name decides, also against a person's label."""
    found = cluster(node("a", 8, 8, (product,), **H100, **label))
    with pytest.raises(EngineError) as error:
        found.resources_per_rank(ClusterSpec(device="h100_sxm", devices_per_node=8))
    text = str(error.value)
    assert "8 device(s) h100_sxm each (NVIDIA H100 80GB HBM3)" in text, "what is allowed"
    in_catalog = device_of_product(product)
    if in_catalog is not None and not label:
        assert f"8 GPU ({in_catalog.name})" in text, "what was found"
        return
    assert f"its driver says {product}" in text, "what was found"
    assert ("correct or remove the label" if label else "is added in wattune/catalog/devices.toml") in text, (
        "what to do"
    )


def test_a_product_of_the_catalog_needs_no_label() -> None:
    assert node("a", 8, 8, ("NVIDIA H100 80GB HBM3",), **H100).device == "h100_sxm"
    assert node("a", 8, 8, ("NVIDIA H100 80GB HBM3",)).device == "h100_sxm"
    assert node("a", 8, 8, ("NVIDIA H200",), **{"wattune.io/device": "h200_sxm"}).device == "h200_sxm"
    assert node("a", 8, 2, ("NVIDIA H100 80GB HBM3", "NVIDIA H200")).device is None, "of several kinds"
    assert node("a", 8, 2, ("NVIDIA H200",), **{"wattune.io/device": "cpu"}).device == "cpu", "its processors are meant"


def test_a_part_of_a_cluster_still_knows_its_driver() -> None:
    whole = cluster(node("head", 2), node("a", 2), node("b", 2))
    part = whole.only([whole.nodes[2]])
    assert [one.name for one in part.nodes] == ["b"]
    assert part.driver_node_id == whole.nodes[0].node_id


def entry(node_id: str, host: str, *, alive: bool = True, **more: Any) -> dict[str, Any]:
    resources = {"CPU": 2.0, **more.pop("resources", {})}
    return {
        "NodeID": node_id,
        "Alive": alive,
        "NodeManagerHostname": host,
        "NodeManagerAddress": "10.0.0.1",
        "Resources": resources,
        "Labels": more.pop("labels", {}),
    }


def test_nodes_keep_their_names_while_others_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [entry("3", "x"), entry("1", "x"), entry("2", "y"), entry("4", "z", alive=False)]
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    first = alive_nodes()
    assert {one.node_id: one.name for one in first} == {"1": "x-0", "3": "x-1", "2": "y"}
    assert {one.domain for one in first} == {"x", "y"}
    listed[1] = entry("1", "x", alive=False)
    listed.append(entry("5", "x"))
    second = alive_nodes(first)
    assert {one.node_id: one.name for one in second} == {"3": "x-1", "2": "y", "5": "x-2"}


def test_a_node_whose_raylet_is_gone_has_left_though_it_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        there = entry("1", "x") | {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": raylet.getsockname()[1]}
        monkeypatch.setattr(ray, "nodes", lambda: [there])
        (node,) = alive_nodes()
        assert left([node]) == []
    assert left([node]) == [node]
    with socket.create_server(("127.0.0.1", there["NodeManagerPort"])):
        monkeypatch.setattr(ray, "nodes", lambda: [there | {"Alive": False}])
        assert left([node]) == [node]


def test_silent_nodes_cost_one_time_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten of 128: knocked at one after another they would take ten times as long."""
    ports = {f"10.0.0.{index}": index for index in range(128)}
    listed = [
        entry(str(index), f"h{index}") | {"NodeManagerAddress": host, "NodeManagerPort": 1}
        for host, index in ports.items()
    ]
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    every_knock = threading.Barrier(10, timeout=30)

    def knock(address: tuple[str, int], _timeout_s: float) -> Any:
        if ports[address[0]] < 10:
            every_knock.wait()  # none gives up before the last of them was knocked at
            raise TimeoutError
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(socket, "create_connection", knock)
    assert sorted(int(node.node_id) for node in left(alive_nodes())) == list(range(10))


@pytest.mark.parametrize("address", ["ray://head:10001", "http://127.0.0.1:8265", "https://head"])
def test_a_driver_outside_of_the_cluster_is_refused_in_a_line_that_names_what_to_do(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, variable in ((address, ""), (None, address)):
        monkeypatch.setenv("RAY_ADDRESS", variable)
        with pytest.raises(PlanError, match="ray job submit --address") as error, connect(given):
            pytest.fail("it connected")
        assert error.value.exit_code == 2 and "\n" not in str(error.value) and address in str(error.value)


def test_nodes_whose_product_is_not_known_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def answer(node_ids: list[str]) -> dict[str, tuple[str, ...]]:
        asked.append(node_ids)
        return dict.fromkeys(node_ids, ("NVIDIA H100 PCIe",))

    listed = [
        entry("1", "a", resources={"GPU": 4.0}, labels=H100),
        entry("2", "b", resources={"GPU": 4.0}, labels={"wattune.io/product": "NVIDIA-H100-80GB-HBM3"}),
        entry("3", "c"),
    ]
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    monkeypatch.setattr(cluster_module, "ask_products", answer)
    first = alive_nodes()
    assert {one.name: one.device for one in first} == {"a": "h100_pcie", "b": "h100_sxm", "c": "cpu"}
    assert alive_nodes(first) == first and asked == [["1"], []]


def test_labels_and_detected_accelerators_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "ask_products", lambda _node_ids: {})
    listed = [
        entry("1", "a", resources={"GPU": 4.0, "accelerator_type:H100": 1.0}),
        entry("2", "b", resources={"GPU": 4.0}, labels={**H200, "wattune.io/domain": "rack7"}),
    ]
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    assert [(one.device, one.domain) for one in alive_nodes()] == [("h100_sxm", "a"), ("h200_sxm", "rack7")]


class _Stopped(BaseException):
    """The exception that a caller's handler raises."""


def _stop(*_: object) -> None:
    raise _Stopped


@pytest.fixture
def sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm", "in_foreground")
def test_a_stop_while_a_cluster_is_joined_waits_and_goes_to_the_callers_handler() -> None:
    """Ray's own handler would end the process at once; `ray job stop` then finds no report."""
    seen = []
    signal.signal(signal.SIGTERM, _stop)
    with pytest.raises(_Stopped), _callers_signals(at_once=False):
        ray._private.utils.set_sigterm_handler(lambda *_: sys.exit(1))
        signal.raise_signal(signal.SIGTERM)
        seen.append("Ray has started")
    assert seen == ["Ray has started"]
    assert signal.getsignal(signal.SIGTERM) is _stop
    with pytest.raises(KeyboardInterrupt), _callers_signals(at_once=False):
        signal.raise_signal(signal.SIGINT)
        seen.append("again")
    assert len(seen) == 2


@pytest.mark.usefixtures("sigterm", "in_foreground")
@pytest.mark.parametrize("kept", [False, True], ids=["raised", "kept by Ray"])
def test_a_stop_ends_the_start_of_a_cluster_of_our_own(kept: bool) -> None:
    """It may take two minutes on a busy machine, and whoever stopped it does not wait."""
    reached = []
    signal.signal(signal.SIGTERM, _stop)
    keeps = contextlib.suppress(KeyboardInterrupt) if kept else contextlib.nullcontext()
    with pytest.raises(_Stopped), _callers_signals(at_once=True), keeps:
        signal.raise_signal(signal.SIGTERM)
        reached.append("Ray has started")
    assert not reached and signal.getsignal(signal.SIGTERM) is _stop


@pytest.mark.usefixtures("sigterm")
def test_rays_handler_stays_where_the_caller_has_none() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with _callers_signals(at_once=False):
        ray._private.utils.set_sigterm_handler(_stop)
    assert signal.getsignal(signal.SIGTERM) is _stop


def test_a_node_that_comes_up_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def find(address: str, node_id: str) -> str:
        asked.append((address, node_id))
        if len(asked) < 3:
            raise RuntimeError("not there yet")
        return "there"

    monkeypatch.setattr("ray._private.services.get_node", find)
    monkeypatch.setattr("wattune.orchestrate.cluster._NODE_LOOK_S", 0)
    with _patience():
        assert ray._private.services.get_node("gcs", "n0") == "there"
    assert asked == [("gcs", "n0")] * 3 and ray._private.services.get_node is find
    asked.clear()
    monkeypatch.setattr("wattune.orchestrate.cluster.NODE_START_S", -1)
    with _patience(), pytest.raises(RuntimeError):
        ray._private.services.get_node("gcs", "n0")


def test_ray_asks_for_its_node_where_it_is_made_to_wait() -> None:
    """Of a Ray that asks otherwise nothing would wait."""
    source = inspect.getsource(ray._private.node.Node.__init__)
    assert "ray._private.services.get_node(" in source and "except RuntimeError" in source


def test_a_cluster_that_does_not_come_up_is_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(_folder: object) -> None:
        raise Exception("The current node timed out during startup. Of the raylet\nmore")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("wattune.orchestrate.cluster._start_local", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("wattune.orchestrate.ray_folder._LONGEST", 200)
    said = r"cannot start a Ray cluster on this machine: .* timed out .* Of the raylet; see the logs in /.*ray-"
    with pytest.raises(EngineError, match=said), connect():
        pass


@pytest.mark.parametrize("address", ["127.0.0.1:9", "no-address"])
def test_an_address_nobody_answers_at_is_said_at_once(address: str) -> None:
    said = f"the Ray cluster at {address} did not answer: .*; check the address"
    with pytest.raises(EngineError, match=said), connect(address):
        pass


def test_a_shutdown_that_hangs_is_left_and_its_processes_are_killed(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, ended = threading.Event(), []
    monkeypatch.setattr(cluster_module, "SHUTDOWN_S", 0.1)
    monkeypatch.setattr(cluster_module.ray, "shutdown", release.wait)
    monkeypatch.setattr(cluster_module, "end_processes", ended.append)
    try:
        cluster_module._end_local(tmp_path)
    finally:
        release.set()
    assert ended == [tmp_path]


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_ray_disconnects(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that frees a reference to one of Ray's objects meanwhile ends the process."""
    during = []

    def shut_down() -> None:
        during.append(gc.isenabled())
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster_module.ray, "shutdown", shut_down)
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(KeyboardInterrupt):
            cluster_module._disconnect()
        assert (during, gc.isenabled()) == ([False], collects)
    finally:
        (gc.enable if before else gc.disable)()


def test_a_cluster_answers_where_all_its_parts_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        addresses = [one.getsockname(), other.getsockname()]
        assert cluster_module.is_answering(addresses)
        other.close()
        assert not cluster_module.is_answering(addresses)

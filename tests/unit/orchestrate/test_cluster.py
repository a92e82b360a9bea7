"""What a rank is given of a cluster, and what is said where it is too small."""

import pytest

from wattune.catalog.hardware import ClusterSpec
from wattune.errors import EngineError
from wattune.orchestrate.cluster import Cluster, Node, connect


def cluster(*sizes: tuple[float, float]) -> Cluster:
    nodes = tuple(
        Node(node_id=f"id{index}", name=f"n{index}", address=f"node:{index}", num_cpus=cpus, num_gpus=gpus)
        for index, (cpus, gpus) in enumerate(sizes)
    )
    return Cluster(nodes=nodes, driver_node_id="id0")


@pytest.mark.parametrize(("cpus", "ranks"), [(2, 4), (2, 2), (64, 8), (1, 8), (3, 7)])
def test_ranks_of_one_node_always_fit_its_processors(cpus: int, ranks: int) -> None:
    share = cluster((cpus, 0)).resources_per_rank(ClusterSpec(device="cpu", devices_per_node=ranks))
    assert share.keys() == {"CPU"}
    assert 0 < share["CPU"] <= 1 and share["CPU"] * ranks <= cpus


def test_a_gpu_rank_has_a_gpu() -> None:
    share = cluster((64, 8), (64, 8)).resources_per_rank(
        ClusterSpec(device="h200_sxm", num_nodes=2, devices_per_node=8)
    )
    assert share == {"CPU": 1.0, "GPU": 1.0}


@pytest.mark.parametrize(
    "wanted",
    [
        ClusterSpec(device="h200_sxm", devices_per_node=4),
        ClusterSpec(device="h200_sxm", num_nodes=2, devices_per_node=2),
        ClusterSpec(device="cpu", num_nodes=3, devices_per_node=1),
    ],
)
def test_too_small_a_cluster_is_said_with_what_there_is(wanted: ClusterSpec) -> None:
    with pytest.raises(EngineError, match=r"needs \d node.*n0: 4 CPU, 2 GPU, n1: 4 CPU, 0 GPU"):
        cluster((4, 2), (4, 0)).resources_per_rank(wanted)


def test_an_address_nobody_answers_at_is_said_at_once() -> None:
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9 did not answer"), connect("127.0.0.1:9"):
        pass

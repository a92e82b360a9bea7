"""Free nodes: which of them a trial gets, and which trials never run at once."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.cluster import Cluster, Node
from wattune.orchestrate.scheduling.nodes import Slots

ONE = ClusterSpec(device="cpu", devices_per_node=2)
TWO = ClusterSpec(device="cpu", num_nodes=2, devices_per_node=2)


def node(name: str, *, domain: str = "", gpu: str = "") -> Node:
    labels = {"wattune.io/domain": domain} if domain else {}
    labels |= {"wattune.io/device": gpu} if gpu else {}
    return Node(node_id=name, name=name, num_cpus=2, num_gpus=4 if gpu else 0, labels=labels)


def slots(*nodes: Node) -> Slots:
    return Slots(Cluster(nodes=nodes, driver_node_id=nodes[0].node_id))


def names(nodes: tuple[Node, ...] | None) -> list[str] | None:
    return None if nodes is None else [one.name for one in nodes]


def test_two_nodes_of_one_domain_come_before_two_domains() -> None:
    free = slots(node("a"), node("b", domain="rack"), node("c", domain="rack"))
    assert names(free.take(TWO)) == ["b", "c"]
    assert names(free.take(ONE)) == ["a"]


def test_a_set_that_was_used_comes_first() -> None:
    free = slots(node("a"), node("b"))
    first, second = free.take(ONE), free.take(ONE)
    free.release(first)
    free.release(second)
    assert free.take(ONE) == second  # used last, so its workers are the warmest


def test_nodes_that_die_are_not_given_and_nodes_that_come_are() -> None:
    a, b = node("a"), node("b")
    free = slots(a, b)
    taken = free.take(ONE)
    assert not free.update([b, a])
    assert free.update([b]) and free.nodes == (b,)
    assert not free.exists(TWO) and "needs 2 node(s)" in free.missing(TWO) and "b: 2 CPU" in free.missing(TWO)
    assert names(free.take(ONE)) == ["b"]
    free.release(taken)
    assert free.take(ONE) is None
    assert free.update([b, node("c")]) and names(free.take(ONE)) == ["c"]


@given(
    domains=st.lists(st.sampled_from("pqrs"), min_size=1, max_size=8),
    wanted=st.lists(st.integers(1, 3), min_size=1, max_size=12),
)
def test_what_runs_at_once_never_shares_a_domain(domains: list[str], wanted: list[int]) -> None:
    free = slots(*(node(f"n{index}", domain=domain) for index, domain in enumerate(domains)))
    running: list[tuple[Node, ...]] = []
    for count in wanted:
        taken = free.take(replace(ONE, num_nodes=count))
        if taken is None:
            if running:
                free.release(running.pop(0))
            continue
        assert len(taken) == count == len({one.node_id for one in taken})
        others = {one.domain for nodes in running for one in nodes}
        assert not others & {one.domain for one in taken}
        running.append(taken)

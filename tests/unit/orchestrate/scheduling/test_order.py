"""The order of trials, who gets which nodes, and what the budget allows. No Ray is started."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.orchestrate.cluster import Cluster, Node
from wattune.orchestrate.cooldown import wait_until_cool
from wattune.orchestrate.scheduling.budget import Budget, Pace
from wattune.orchestrate.scheduling.nodes import Slots
from wattune.orchestrate.scheduling.order import BLOCK, run_order, workers_of
from wattune.plan.axes import Plan
from wattune.trial import TrialSpec, Workload


def spec(size: int, *, device: str = "cpu", engine: str = "torch") -> TrialSpec:
    return TrialSpec(
        model=model("llama3_8b"),
        cluster=ClusterSpec(device=device, devices_per_node=1),
        engine=engine,
        workload=Workload(seq_len=8, global_batch_size=8),
        plan=Plan(micro_batch_size=size),
    )


def node(name: str, *, domain: str = "", gpu: str = "") -> Node:
    labels = {"wattune.io/domain": domain} if domain else {}
    labels |= {"wattune.io/device": gpu} if gpu else {}
    return Node(node_id=name, name=name, address="", num_cpus=2, num_gpus=4 if gpu else 0, labels=labels)


def slots(*nodes: Node) -> Slots:
    return Slots(Cluster(nodes=nodes, driver_node_id=nodes[0].node_id))


ONE = ClusterSpec(device="cpu", devices_per_node=2)
TWO = ClusterSpec(device="cpu", num_nodes=2, devices_per_node=2)


def names(nodes: tuple[Node, ...] | None) -> list[str] | None:
    return None if nodes is None else [one.name for one in nodes]


def test_the_order_is_the_seeds_and_nothing_elses() -> None:
    specs = [spec(size) for size in range(1, 31)]
    first = run_order(specs, seed=0, order="shuffled")
    assert run_order(specs[::-1], seed=0, order="shuffled") == first
    assert sorted(one.plan.micro_batch_size for one in first) == list(range(1, 31))
    assert first != specs and run_order(specs, seed=1, order="shuffled") != first
    assert run_order(specs, seed=0, order="listed") == specs


def test_more_trials_leave_the_order_of_the_others_as_it_was() -> None:
    specs = [spec(size) for size in range(1, 31)]
    whole = run_order(specs, seed=0, order="shuffled")
    assert [one for one in whole if one in specs[:12]] == run_order(specs[:12], seed=0, order="shuffled")


def test_trials_for_the_same_workers_run_in_blocks_and_the_blocks_mix() -> None:
    specs = [spec(size, engine=engine) for engine in ("torch", "other") for size in range(1, 26)]
    ordered = [workers_of(one)[1] for one in run_order(specs, seed=0, order="shuffled")]
    changes = sum(a != b for a, b in itertools.pairwise(ordered))
    assert 2 <= changes <= 5
    assert "other" in ordered[:25] and "torch" in ordered[:25]
    assert max(len(block) for block in "".join("t" if one == "torch" else " " for one in ordered).split()) <= 3 * BLOCK


def test_one_trial_a_domain() -> None:
    free = slots(node("a"), node("b", domain="rack"), node("c", domain="rack"))
    assert [names(one) for one in free.lanes(ONE)] == [["a"], ["b"]]
    first, second = free.take(ONE), free.take(ONE)
    assert names(first) == ["a"] and names(second) == ["b"]
    assert free.take(ONE) is None and not free.is_free(ONE) and free.exists(ONE)
    free.release(second)
    assert names(free.take(ONE)) == ["b"]


def test_a_trial_of_two_nodes_takes_both_their_domains() -> None:
    free = slots(node("a"), node("b"), node("c"))
    assert names(free.take(TWO)) == ["a", "b"]
    assert free.take(TWO) is None
    assert names(free.take(ONE)) == ["c"]


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


def test_kinds_of_devices_do_not_mix() -> None:
    free = slots(node("a", gpu="h200_sxm"), node("b", gpu="h100_sxm"), node("c"))
    assert names(free.take(ClusterSpec(device="h200_sxm", devices_per_node=4))) == ["a"]
    assert free.take(ClusterSpec(device="h200_sxm", devices_per_node=4)) is None
    assert names(free.take(ClusterSpec(device="h100_sxm", devices_per_node=2))) == ["b"]
    assert names(free.take(ONE)) == ["c"]
    assert not free.exists(ClusterSpec(device="mi250_gcd", devices_per_node=1))


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


def test_a_budget_of_trials_and_of_hours() -> None:
    now_s = [100.0]
    budget = Budget(max_hours=1, max_trials=2, clock_s=lambda: now_s[0])
    assert budget.allows(3600) and not budget.allows(3601)
    now_s[0] += 3000
    assert budget.allows(600) and not budget.allows(601)
    budget.spend()
    budget.spend()
    assert not budget.allows(0)
    assert Budget().allows(1e9)


def test_pace_is_the_median_of_what_was_seen_of_the_kind() -> None:
    pace = Pace()
    assert pace.expected_s(spec(1), 15) == 15 and pace.typical_s == 0
    for took_s in (20, 400, 30):
        pace.add(spec(1), took_s)
    assert pace.expected_s(spec(2), 15) == 30
    assert pace.expected_s(spec(2), 60) == 60
    assert pace.expected_s(spec(1, engine="other"), 0) == 30
    pace.add(spec(1, engine="other"), 5)
    assert pace.expected_s(spec(2, engine="other"), 0) == 5


class Cooling:
    """A device that cools by a degree a second while it is waited for."""

    def __init__(self, temp_c: float) -> None:
        self.now_s, self.temp_c = 0.0, temp_c

    def read_c(self) -> dict[str, float]:
        return {"gpu0": self.temp_c - self.now_s, "gpu1": 20.0}

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


@pytest.mark.parametrize(
    ("max_s", "expected"),
    [
        (60, {"cooldown_s": "10.0", "start_temp_max_c": "50.0"}),
        (5, {"cooldown": "too warm", "cooldown_s": "5.0", "start_temp_max_c": "55.0"}),
    ],
)
def test_a_trial_waits_for_its_devices_to_cool(max_s: float, expected: dict[str, str]) -> None:
    device = Cooling(60)
    tags = wait_until_cool(device.read_c, below_c=50, max_s=max_s, clock_s=lambda: device.now_s, sleep=device.sleep)
    assert tags == expected


def test_without_a_temperature_nothing_is_waited_for_and_it_is_said() -> None:
    tags = wait_until_cool(dict, below_c=50, max_s=60, clock_s=lambda: 0.0)
    assert tags["cooldown"] == "no temperature"

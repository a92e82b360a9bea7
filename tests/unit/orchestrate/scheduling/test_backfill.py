"""Backfill: idle nodes are used while a large trial waits, and it starts within a bound, whatever is expected."""

import heapq
import itertools
from dataclasses import dataclass, replace
from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specs import made_run, trial_spec

from wattune.catalog.hardware import ClusterSpec
from wattune.objective import Question
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Cluster, Node
from wattune.orchestrate.scheduling.budget import Budget
from wattune.orchestrate.scheduling.nodes import Reservations, Slots, closed_domains
from wattune.orchestrate.scheduling.study_run import StudyRun
from wattune.orchestrate.scheduling.trial_queue import TrialQueue
from wattune.plans.axes import Plan
from wattune.search.search_entry import Search
from wattune.search.strategy import Problem, make_strategy
from wattune.trial import Measure, TrialSpec

NS = 10**9


@cache
def spec_of(number: int, num_nodes: int, device: str = "cpu") -> TrialSpec:
    return trial_spec(on=f"{num_nodes}x1 {device}", seq_len=8, batch=8, micro_batch_size=number + 1)


def node_of(name: str, domain: str, device: str = "cpu") -> Node:
    labels = {"wattune.io/domain": domain, "wattune.io/device": device}
    return Node(node_id=name, name=name, num_cpus=2, num_gpus=0 if device == "cpu" else 1, labels=labels)


@dataclass(frozen=True)
class Job:
    """A trial of the simulation."""

    num_nodes: int
    took_s: int
    expected_s: int
    device: str = "cpu"


class Guessing(TrialQueue):
    """A queue that expects what a test says."""

    guesses: dict[str, float]
    knows_times = True

    def expected_s(self, queued: Attempt) -> float:
        return self.guesses[queued.trial_id]


@dataclass
class Played:
    """The course of a simulation, by the number of the trial."""

    start_s: dict[int, float]
    end_s: dict[int, float]
    first_s: dict[int, float]
    """Time at which each became the first that waits of its kind of device."""
    nodes: dict[int, tuple[Node, ...]]
    promise_s: dict[int, float]


def play(nodes: list[Node], jobs: list[Job], *, budget: Budget | None = None) -> Played:
    """Runs all trials on a clock of its own; each takes its own time, whatever was expected."""
    now = [0.0]
    specs = [spec_of(number, job.num_nodes, job.device) for number, job in enumerate(jobs)]
    number_of = {spec.trial_id: number for number, spec in enumerate(specs)}
    run = StudyRun(
        measure=Measure(reference_every=0),
        num_trials=len(specs),
        search=Search(order="listed"),
        question=Question.of("maximize tokens_per_s"),
        limits={},
        tags={},
        finalists=list,
        clusters=tuple(dict.fromkeys(spec.cluster for spec in specs)),
        budget=budget,
    )
    queue = Guessing(make_strategy("grid", Problem(specs=specs, seed=0)), run, [], {}, clock_s=lambda: now[0])
    queue.guesses = {spec.trial_id: job.expected_s for spec, job in zip(specs, jobs, strict=True)}
    slots = Slots(Cluster(nodes=tuple(nodes), driver_node_id=nodes[0].node_id))
    played = Played({}, {}, {}, {}, {})
    running: list[tuple[float, int, Attempt]] = []
    while True:
        while (found := queue.pop(slots, lambda _queued: True)) is not None:
            queued, chosen = found
            number = number_of[queued.trial_id]
            played.start_s[number], played.nodes[number] = now[0], chosen
            played.end_s[number] = now[0] + jobs[number].took_s
            heapq.heappush(running, (played.end_s[number], number, queued))
        for device in ("cpu", "h200_sxm"):
            waits = [n for n, job in enumerate(jobs) if job.device == device and n not in played.start_s]
            if waits:
                played.first_s.setdefault(waits[0], now[0])
        for kept in queue._ahead:
            played.promise_s.setdefault(number_of[kept.queued.trial_id], kept.promise_s)
        if not running:
            return played
        now[0], number, queued = heapq.heappop(running)
        slots.release(played.nodes[number])
        result = made_run(queued, start_wall_ns=int(played.start_s[number] * NS), end_wall_ns=int(now[0] * NS))
        queue.note(queued.spec, result, ",".join(one.name for one in played.nodes[number]))


@st.composite
def clusters(draw: st.DrawFn) -> list[Node]:
    domains = draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    return [node_of(f"n{index}", f"d{domain}") for index, domain in enumerate(domains)]


def jobs_for(num_nodes: int, *, exact: bool) -> st.SearchStrategy[list[Job]]:
    times = st.integers(1, 40)
    widths = st.one_of(st.just(1), st.integers(1, num_nodes))
    if exact:
        one = st.builds(lambda width, took: Job(width, took, took), widths, times)
    else:
        one = st.builds(Job, widths, times, st.integers(0, 200))
    return st.lists(one, min_size=1, max_size=15)


FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FAST
@given(st.data())
def test_whatever_is_expected_all_trials_run_the_first_within_its_bound_and_no_domain_is_shared(data) -> None:
    nodes = data.draw(clusters())
    jobs = data.draw(jobs_for(len(nodes), exact=False))
    played = play(nodes, jobs)
    assert set(played.start_s) == set(range(len(jobs)))
    longest_s = max(job.took_s for job in jobs)
    most_expected_s = max(job.expected_s for job in jobs)
    for number, first_s in played.first_s.items():
        promise_s = played.promise_s.get(number, first_s)
        assert promise_s <= first_s + most_expected_s
        assert played.start_s[number] <= max(first_s, promise_s) + longest_s

    for one, other in itertools.combinations(played.start_s, 2):
        if {node.domain for node in played.nodes[one]} & {node.domain for node in played.nodes[other]}:
            assert played.end_s[one] <= played.start_s[other] or played.end_s[other] <= played.start_s[one]


@FAST
@given(st.data())
def test_where_times_are_known_no_trial_starts_later_than_it_was_promised(data) -> None:
    nodes = data.draw(clusters())
    played = play(nodes, data.draw(jobs_for(len(nodes), exact=True)))
    assert all(played.start_s[number] <= promise_s for number, promise_s in played.promise_s.items())


def lone(count: int) -> list[Node]:
    return [node_of(f"n{index:03}", f"n{index:03}") for index in range(count)]


def test_a_long_trial_starts_beside_the_nodes_that_are_kept_and_not_on_them() -> None:
    jobs = [Job(2, 10, 10), Job(2, 20, 20), Job(1, 1000, 1000), Job(1, 1000, 1000)]
    played = play(lone(3), jobs)
    assert played.start_s == {0: 0, 1: 10, 2: 0, 3: 30}, "the third node is taken and the other two are kept"


def test_trials_that_are_too_optimistic_delay_a_large_one_once_only() -> None:
    """Every small trial is expected to take a second and takes 30: on kept nodes they start before the promise only."""
    jobs = [Job(1, 30, 1), Job(2, 30, 1), *(Job(1, 30, 1) for _ in range(50))]
    played = play(lone(2), jobs)
    assert played.promise_s[1] == 1 and played.start_s[1] <= 1 + 30


def test_kinds_of_devices_that_share_power_do_not_starve_each_other() -> None:
    nodes = [node_of("a", "rack"), node_of("g0", "rack", "h200_sxm"), node_of("g1", "g1", "h200_sxm")]
    jobs = [Job(1, 10, 10), Job(2, 10, 10, "h200_sxm"), *(Job(1, 10, 10) for _ in range(20))]
    played = play(nodes, jobs)
    assert played.start_s[1] == 10


def test_a_trial_that_overtakes_leaves_the_budget_of_the_one_that_waits() -> None:
    jobs = [Job(1, 100, 100), Job(2, 50, 50), *(Job(1, 10, 10) for _ in range(5))]
    assert play(lone(2), jobs, budget=Budget(max_trials=1)).start_s[2] > 100
    assert play(lone(2), jobs, budget=Budget(max_trials=2)).start_s[2] == 0
    hours = 2 * 50 / 3600
    assert play(lone(2), jobs, budget=Budget(max_device_hours=hours)).start_s[2] > 100
    assert play(lone(2), jobs, budget=Budget(max_device_hours=hours + 0.1)).start_s[2] == 0


def test_before_anything_is_measured_trials_start_beside_kept_nodes_only(world, make_specs, new_node) -> None:
    world.nodes += [new_node("n1"), new_node("n2")]
    large = replace(make_specs(1)[0], cluster=ClusterSpec(device="cpu", num_nodes=2, devices_per_node=1))
    small = make_specs(5)
    controller = world.controller([large, replace(large, plan=Plan(micro_batch_size=2)), *small])
    first = controller.next("t0")
    beside = controller.next("t1")
    assert first.spec == large and beside.spec == small[0] and beside.tags["nodes"] == "n2"
    assert controller.next("t2") is None


def test_a_reservation_stays_until_its_nodes_leave(new_node) -> None:
    def queued(num_nodes: int) -> Attempt:
        spec = spec_of(num_nodes, num_nodes)
        return Attempt(spec=spec, repeat=0, measure=Measure())

    nodes = lone(3)
    slots = Slots(Cluster(nodes=tuple(nodes), driver_node_id="n000"))
    one = ClusterSpec(device="cpu", devices_per_node=1)
    slots.take(one, until_s=5.0)
    slots.take(one, until_s=9.0)
    head, reservations = queued(2), Reservations()
    kept = reservations.keep(head, slots, 0.0)
    assert (kept.promise_s, kept.domains) == (5.0, {"n000", "n002"})
    assert reservations.keep(head, slots, 100.0) is kept
    assert closed_domains([kept], 5.0) == frozenset() and closed_domains([kept], 5.1) == kept.domains
    slots.update(nodes[:2])
    assert reservations.keep(head, slots, 7.0).promise_s == 9.0

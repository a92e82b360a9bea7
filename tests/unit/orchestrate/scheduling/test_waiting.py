"""Trials that wait: their order, what leaves the queue, and how many are left."""

from dataclasses import replace

import pytest

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Cluster
from wattune.orchestrate.scheduling.nodes import Slots
from wattune.orchestrate.scheduling.run_order import workers_of
from wattune.orchestrate.scheduling.waiting import Waiting
from wattune.run import Run, RunStatus
from wattune.trial import Measure, TrialSpec


def queued(spec: TrialSpec, repeat: int = 0) -> Attempt:
    return Attempt(spec=spec, repeat=repeat, measure=Measure())


def first(waiting: Waiting, slots: Slots) -> TrialSpec:
    return waiting.heads("cpu", slots)[0].spec


@pytest.fixture
def slots(new_node) -> Slots:
    return Slots(Cluster(nodes=(new_node("n0"),), driver_node_id="n0"))


def failed(spec: TrialSpec) -> Run:
    return Run(trial_id=spec.trial_id, repeat=0, status=RunStatus.OUT_OF_MEMORY)


def test_trials_wait_in_order_and_one_that_runs_again_comes_first(specs, slots) -> None:
    waiting = Waiting({}, ())
    waiting.add(map(queued, specs[:2]))
    waiting.add_first(queued(specs[2]))
    assert [one.spec for one in waiting.in_order()] == [specs[2], *specs[:2]]
    assert first(waiting, slots) == specs[2] and waiting.num_left == len(waiting) == 3


def test_what_is_done_or_left_out_is_not_queued(specs) -> None:
    first, second, third = map(queued, specs)
    waiting = Waiting({(first.trial_id, 0): failed(specs[0])}, [second.name])
    waiting.add([first, second, third])
    assert waiting.in_order() == [third]


def test_a_repeat_of_a_failed_trial_leaves_the_queue(specs, slots) -> None:
    done: dict[tuple[str, int], Run] = {}
    waiting = Waiting(done, ())
    waiting.add([queued(specs[0], 1), queued(specs[1])])
    done[specs[0].trial_id, 0] = failed(specs[0])
    assert [one.spec for one in waiting.in_order()] == [specs[1]]
    assert first(waiting, slots) == specs[1] and len(waiting) == 1


def test_trials_whose_nodes_do_not_exist_are_stranded_until_nodes_come(specs, slots, new_node) -> None:
    waiting = Waiting({}, ())
    large = replace(specs[0], cluster=ClusterSpec(device="cpu", num_nodes=2, devices_per_node=1))
    waiting.add([queued(large), queued(specs[1])])
    assert first(waiting, slots) == specs[1]
    assert [one.spec for one in waiting.stranded] == [large] and (len(waiting), waiting.num_left) == (1, 2)
    slots.update([new_node("n0"), new_node("n1")])
    waiting.reconsider()
    assert first(waiting, slots) == large and waiting.stranded == ()


def test_held_workers_start_nothing_more_and_their_trials_stay_left(specs) -> None:
    waiting = Waiting({}, ())
    other = replace(specs[1], engine="megatron")
    waiting.add([queued(specs[0]), queued(other), queued(specs[2])])
    assert waiting.hold(workers_of(specs[0])) == 2 and waiting.hold(workers_of(specs[0])) is None
    waiting.add([queued(specs[1])])
    assert [one.spec for one in waiting.in_order()] == [other]
    assert {one.spec for one in waiting.failed} == set(specs) and waiting.num_left == 4

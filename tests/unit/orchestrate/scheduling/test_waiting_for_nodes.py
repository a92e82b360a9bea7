"""A study that waits: for nodes that do not live, and for those that other jobs use. Ray is not started."""

import math
import time
from typing import Any

import pytest

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.events import Placement
from wattune.orchestrate.scheduling.controller import StudyController
from wattune.search.strategy import Problem, make_strategy

TWO = ClusterSpec(device="cpu", num_nodes=2, devices_per_node=1)


def waited(controller: StudyController, name: str) -> Attempt | None:
    """Asks for a trial as if a second had passed since the last look at the nodes."""
    controller._looked_s = -math.inf
    return controller.next(name)


def test_a_study_waits_for_nodes_that_may_come_and_no_trial_counts_the_wait(
    world: Any, make_specs: Any, new_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, clock_ns = make_specs(1, TWO), [10**12]
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock_ns[0])
    monkeypatch.setattr(time, "monotonic", lambda: clock_ns[0] / 1e9)
    world.may_come = True
    controller = world.controller(wide)
    for _ in range(3):
        assert waited(controller, "t0") is None and controller.ending is None
        clock_ns[0] += 60 * 10**9
    said = [event.waits_for for event in world.heard if isinstance(event, Placement)]
    assert said == ["", "2 nodes x 1 cpu"] and world.wanted[-1] == TWO
    world.nodes.append(new_node("n1"))
    running = waited(controller, "t0")
    assert running is not None and running.numbers.node_wait_s == 180.0
    assert running.free_since_ns == clock_ns[0], "a node that has just come had nothing to do since then"
    assert world.wanted[-1] is None and world.heard[-2].waits_for == ""
    world.run(controller, running, "t0")
    assert controller.next("t1") is None and controller.ending == "finished"


@pytest.mark.parametrize(("may_come", "wait_s", "rounds"), [(False, None, 0), (True, 90.0, 2), (False, 90.0, 2)])
def test_a_wait_for_nodes_ends_with_what_is_wanted_and_what_lives(
    world: Any, make_specs: Any, monkeypatch: pytest.MonkeyPatch, may_come: bool, wait_s: float | None, rounds: int
) -> None:
    clock_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock_s[0])
    world.may_come = may_come
    controller = world.controller(make_specs(1, TWO), wait_nodes_s=wait_s)
    for _ in range(rounds):
        assert waited(controller, "t0") is None and controller.ending is None
        clock_s[0] += 60
    assert waited(controller, "t0") is None and controller.ending == "nodes"
    assert "needs 2 node(s)" in controller.missing[0] and "the cluster has n0" in controller.missing[0]


@pytest.mark.parametrize("strategy", ["grid", "random"])
def test_nodes_that_another_job_uses_are_waited_for_and_named(
    world: Any, make_specs: Any, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    specs, clock_ns = make_specs(3), [10**12]
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock_ns[0])
    world.others = {"n0": {"CPU": world.nodes[0].num_cpus, "GPU": 0.0}}
    controller = world.controller(specs, strategy=make_strategy(strategy, Problem(specs=specs, seed=0)))
    for _ in range(3):
        assert waited(controller, "t0") is None and controller.ending is None
        clock_ns[0] += 10**9
    assert [one.waits_for for one in world.heard if isinstance(one, Placement)][-1] == "n0, which other jobs use"
    world.others = {"n0": {"CPU": 0.1 * world.nodes[0].num_cpus, "GPU": 0.0}}
    first = waited(controller, "t0")
    assert first is not None and first.numbers.node_wait_s == 3.0, "a tenth is what ranks leave free"
    world.run(controller, first, "t0")
    assert len(world.drain(controller)) == 2 and controller.ending == "finished"
    assert all(run.numbers.node_wait_s is None for run in map(world.result, specs) if run.trial_id != first.trial_id)

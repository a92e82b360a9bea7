"""The controller of a study: starts, results, interrupts, dead nodes, budgets, limits, and its preview."""

import math
import statistics
import time
from dataclasses import replace
from typing import Any

import pytest

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.events import Placement, Preview, RowStopped, TrialEvent
from wattune.orchestrate.failures import CAUSE_TAG, MOST_ALIKE, MOST_TRIES, NODES_TAG, Cause, Failure
from wattune.orchestrate.scheduling import controller as controller_module
from wattune.orchestrate.scheduling.budget import Budget
from wattune.orchestrate.scheduling.controller import STOPPED
from wattune.orchestrate.scheduling.durations import BESIDE_STEPS_S, NEW_WORKERS_S, START_BESIDE_S
from wattune.run import Numbers, Run, RunStatus
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.trial import Measure, TrialSpec


def sizes(trials) -> list[int]:
    """Micro-batch size of each trial."""
    return [one.spec.plan.micro_batch_size for one in trials]


@pytest.mark.parametrize(
    ("status", "runs_again"),
    [
        (RunStatus.INTERRUPTED, True),
        (RunStatus.INFRA_FAILED, True),
        (RunStatus.CRASHED, False),
        (RunStatus.ABORTED, False),
    ],
)
def test_only_a_trial_that_says_nothing_about_its_plan_runs_again(
    world, specs, status: RunStatus, runs_again: bool
) -> None:
    world.write(specs[0], status=status)
    ran = world.drain(world.controller(specs))
    assert (1 in sizes(ran)) is runs_again
    preview = next(event for event in world.heard if isinstance(event, Preview))
    assert preview.num_again == runs_again and preview.num_done == (not runs_again)


def test_a_stopped_attempt_is_kept_aside_and_the_next_begins_empty(world, specs) -> None:
    world.write(specs[0], status=RunStatus.INTERRUPTED)
    folder = world.study.trial(specs[0].trial_id, 0)
    (folder.path / "telemetry" / "n0").mkdir(parents=True)
    (folder.path / "telemetry" / "n0" / "manifest.json").write_text("{}")
    controller = world.controller(specs)
    running = controller.next("t0")
    assert running.numbers.attempt == 2
    assert folder.result() is None and not (folder.path / "telemetry").exists()
    world.run(controller, running, "t0")
    assert world.result(specs[0]).status is RunStatus.COMPLETED
    assert [one.status for one in folder.attempts()] == [RunStatus.INTERRUPTED]
    assert (folder.path / "attempts" / "1" / "telemetry" / "n0" / "manifest.json").exists()
    assert [folder.path for folder in world.study.trials()] == [folder.path]


def test_a_trial_that_left_no_result_is_crashed(world, specs) -> None:
    controller = world.controller(specs[:1])
    controller.next("t0")
    controller.finish("t0", error=False)
    result = world.result(specs[0])
    assert result.status is RunStatus.CRASHED and result.reason == "the trial left no result"
    assert result.tags["version.wattune"] == "x" and result.tags["nodes"] == "n0"
    assert controller.next("t1") is None


def test_the_nodes_of_a_measured_trial_are_freed_once_and_its_result_counts_when_it_is_stored(world, specs) -> None:
    controller = world.controller(specs)
    first = controller.next("t0")
    assert controller.next("t1") is None
    controller.free("t0")
    second = controller.next("t1")
    assert second.nodes == first.nodes and controller.ending is None
    finished = [event for event in world.heard if getattr(event, "kind", "") == "finished"]
    assert not finished, "nothing is told before its result is stored"
    world.run(controller, first, "t0")
    assert world.heard[-1].spec == first.spec and world.heard[-1].kind == "finished"
    assert controller.next("t2") is None, "its end does not free the nodes of the one that runs there now"
    world.run(controller, second, "t1")
    assert controller.next("t2").spec == specs[2]


def test_a_short_budget_knows_that_workers_are_warm_before_the_first_result_is_made(world, specs) -> None:
    """Two GPUs, 83 s: after the first trial nothing was begun, since the 40 s of its workers were counted again."""
    now_s = [0.0]
    budget = Budget(max_hours=100 / 3600, clock_s=lambda: now_s[0])
    controller = world.controller(specs, duration_s=lambda _spec, _measure: 5.0, budget=budget)
    first, now_s[0] = controller.next("t0"), 62.0
    controller.free("t0")
    second = controller.next("t1")
    assert second is not None
    for running, name in ((first, "t0"), (second, "t1")):
        world.run(controller, running, name)
    now_s[0] = 99.0
    assert controller.next("t2") is None and controller.ending == "budget"


def test_workers_may_start_before_the_first_trial_where_its_kind_is_known(world, specs, make_specs, learner) -> None:
    controller = world.controller(specs)
    spec, nodes, coming = controller.first()
    assert coming == (), "nothing is compiled on processors"
    first = controller.next("t0")
    assert (spec.cluster, spec.engine, nodes) == (first.spec.cluster, first.spec.engine, first.nodes)
    assert world.controller(specs, isolation="fresh").first() is None
    asks = world.controller(specs, strategy=learner(specs), candidates=specs)
    assert asks.first()[1] == tuple(world.nodes), "all candidates are of one kind"
    both = [*specs, *(replace(one, engine="deepspeed") for one in specs)]
    assert world.controller(both, strategy=learner(both), candidates=both).first() is None
    large = make_specs(1, ClusterSpec(device="cpu", num_nodes=2, devices_per_node=1))
    assert world.controller(large).first() is None, "its nodes are not there"


def test_the_next_engines_workers_start_beside_the_last_trial_of_this_one(world, make_specs, new_node) -> None:
    def then(number: int, num_cpus: float, nodes: tuple[str, ...] = ("n0",), **more: str) -> TrialSpec | None:
        world.nodes = [replace(new_node(name), num_cpus=num_cpus) for name in nodes]
        last = make_specs(number)[-1]
        controller = world.controller([last, replace(last, engine="deepspeed")], **more)
        return controller.next(f"t{number}").then

    found = then(1, 4)
    assert found is not None and found.engine == "deepspeed"
    assert then(2, 3) is None, "processors are short"
    assert then(3, 4, ("n0", "n1")) is None, "it may run on the other node"
    assert then(4, 4, isolation="fresh") is None
    world.nodes = [replace(new_node("n0"), num_cpus=4)]
    assert world.controller(make_specs(6)[4:]).next("t5").then is None, "the next one needs the same"


def test_a_placement_does_not_count_the_start_of_workers_that_start_beside(world, make_specs, new_node) -> None:
    cluster = ClusterSpec(device="h200_sxm", num_nodes=1, devices_per_node=2)
    (spec,) = make_specs(1, cluster)

    def wall_s(num_cpus: float, **more: Any) -> float:
        world.nodes = [replace(new_node("n0", **{"wattune.io/device": "h200_sxm"}), num_cpus=num_cpus)]
        world.heard.clear()
        specs = [spec, replace(spec, engine="deepspeed")]
        world.controller(specs, duration_s=lambda _spec, _measure: 20.0, measure=Measure(min_seconds=1.0), **more)
        preview, placed = world.heard
        assert preview.load_s[cluster] == pytest.approx(20 + 20 + NEW_WORKERS_S + BESIDE_STEPS_S["new_workers"])
        return placed.wall_s

    short_s = wall_s(7)
    assert short_s - wall_s(8) == pytest.approx(START_BESIDE_S), "four processors a device are to spare"
    assert wall_s(8, isolation="fresh") == short_s


def test_coming_plans_are_those_that_wait_for_the_same_workers(world, make_specs, learner, new_node) -> None:
    world.nodes = [new_node("n0", **{"wattune.io/device": "h200_sxm"})]
    specs = make_specs(3, ClusterSpec(device="h200_sxm", num_nodes=1, devices_per_node=2))
    both = [*specs, *(replace(one, engine="deepspeed") for one in specs)]
    assert world.controller(both).first()[2] == (specs[1], specs[2]), "the first trial comes too soon"
    assert world.controller(both).coming() == (*specs,), "and not too soon for what begins before its workers"
    asks = world.controller(specs, strategy=learner(specs), candidates=specs)
    assert asks.first()[2] == (*specs,), "a strategy may choose any of them first"


@pytest.mark.parametrize("arrives", [True, False])
def test_a_study_that_is_stopped_waits_a_little_for_a_result_that_is_being_made(
    world, specs, monkeypatch, arrives: bool
) -> None:
    controller = world.controller(specs)
    first = controller.next("t0")
    controller.free("t0")
    second = controller.next("t1")

    def sleep(_: float) -> None:
        assert world.result(second.spec).status is RunStatus.INTERRUPTED, "first what is lost if this process is killed"
        if arrives:
            world.write(first.spec)
        else:
            clock_s[0] = 1e9  # no result holds a time without end

    clock_s = [0.0]
    monkeypatch.setattr(controller_module.time, "sleep", sleep)
    monkeypatch.setattr(controller_module.time, "monotonic", lambda: clock_s[0])
    controller.interrupt()
    assert world.result(first.spec).status is (RunStatus.COMPLETED if arrives else RunStatus.INTERRUPTED)


def test_a_trial_whose_driver_dies_is_tried_three_times_and_then_left_to_a_later_call(world, specs, learner) -> None:
    strategy = learner(specs)
    controller = world.controller(specs, strategy=strategy)
    for number in range(MOST_TRIES):
        running = controller.next(f"t{number}")
        assert running.spec == specs[0] and (running.numbers.attempt or 1) == number + 1
        controller.finish(f"t{number}", error=True)
        found = world.result(specs[0])
        assert found.status is RunStatus.INFRA_FAILED and found.tags[CAUSE_TAG] == Cause.HEAD
        assert world.heard[-1].again is (number + 1 < MOST_TRIES) and not strategy.told
    assert [one.tags[CAUSE_TAG] for one in world.study.trial(specs[0].trial_id, 0).attempts()] == [Cause.HEAD] * 2
    assert sizes(world.drain(controller)) == [2, 4] and controller.ending == "failures" and controller.num_left == 1
    assert len(strategy.told) == 2, "nothing is learnt from the cluster's failures"

    later = world.controller(specs)
    assert sizes(world.drain(later)) == [1] and later.ending == "finished"
    assert world.result(specs[0]).status is RunStatus.COMPLETED


def test_a_later_call_tries_once_more_and_last_of_all(world, specs) -> None:
    controller = world.controller(specs[:1])
    for number in range(MOST_TRIES):
        controller.next(f"t{number}")
        controller.finish(f"t{number}", error=True)
    controller = world.controller(specs)
    first, second = controller.next("t0"), None
    assert sizes([first]) == [2]
    world.run(controller, first, "t0")
    second = controller.next("t1")
    world.run(controller, second, "t1")
    again = controller.next("t2")
    assert sizes([second, again]) == [4, 1] and again.numbers.attempt == MOST_TRIES + 1
    controller.finish("t2", error=True)
    assert controller.next("t3") is None and controller.ending == "failures"


def test_causes_are_counted_apart(world, specs) -> None:
    controller = world.controller(specs[:1])
    for number, cause in enumerate((Cause.WORKER_KILLED, Cause.PLACEMENT) * (MOST_TRIES - 1)):
        fail(world, controller, controller.next(f"t{number}"), f"t{number}", cause)
    last = controller.next("t9")
    assert last is not None
    fail(world, controller, last, "t9", Cause.PLACEMENT)
    assert controller.next("t10") is None and controller.num_left == 1


def fail(world, controller, running, tune_id: str, cause: Cause, *, nodes: tuple[str, ...] = ()) -> None:
    """Ends a trial with a failure of the cluster, as `run_trial` does."""
    queued = running
    world.write(queued.spec, queued.repeat, tags=dict(running.tags))
    folder = world.study.trial(queued.trial_id, queued.repeat)
    folder.write_result(Failure(cause, f"{cause} of trial {queued.trial_id}", nodes).of(folder.result()))
    controller.finish(tune_id, error=False)


def test_a_trial_is_tried_again_on_other_nodes_and_waits_for_them(world, specs, new_node) -> None:
    world.nodes += [new_node("n1")]
    controller = world.controller(specs)
    first, second = controller.next("t0"), controller.next("t1")
    fail(world, controller, first, "t0", Cause.PLACEMENT)
    third = controller.next("t2")
    assert third.spec == specs[2] and third.nodes == first.nodes, "others may use its node"
    assert controller.next("t3") is None and controller.ending is None, "the other node is taken"
    world.run(controller, second, "t1")
    again = controller.next("t3")
    assert again.spec == first.spec and again.nodes == second.nodes


def test_only_the_node_at_fault_is_avoided(world, make_specs, new_node) -> None:
    world.nodes += [new_node("n1"), new_node("n2")]
    (large,) = make_specs(1, ClusterSpec(device="cpu", num_nodes=2, devices_per_node=1))
    controller = world.controller([large])
    first = controller.next("t0")
    assert first.node_names == ("n0", "n1")
    fail(world, controller, first, "t0", Cause.NODE_UNFIT, nodes=("n1",))
    assert controller.next("t1").node_names == ("n0", "n2")


def test_failures_of_one_kind_in_a_row_stop_it_and_the_rest_goes_on(world, make_specs) -> None:
    torch = make_specs(MOST_ALIKE + 3)
    other = [replace(spec, engine="deepspeed") for spec in make_specs(2)]
    controller = world.controller([*torch, *other])
    for number in range(MOST_ALIKE):
        running = controller.next(f"t{number}")
        end(world, controller, running, f"t{number}", RunStatus.CRASHED, f"rank {number}: no /lib/cuda{number}.so")
    (stopped,) = (one for one in world.heard if isinstance(one, RowStopped))
    assert (stopped.count, stopped.num_held, stopped.engine) == (MOST_ALIKE, 3, "torch")
    assert [one.spec.engine for one in world.drain(controller)] == ["deepspeed"] * 2
    assert controller.ending == "failures" and controller.num_left == 3
    assert controller.stopped == [str(stopped)] and "were crashed" in str(stopped)
    assert sizes(world.drain(world.controller([*torch, *other]))) == [6, 7, 8], "the same command tries on"


def test_the_death_of_what_drives_all_trials_is_one_failure_of_a_row(world, make_specs, new_node) -> None:
    world.nodes += [new_node(f"n{number}") for number in range(1, MOST_ALIKE + 1)]
    specs = make_specs(3 * (MOST_ALIKE + 1))
    controller = world.controller(specs)
    running = [f"t{number}" for number in range(MOST_ALIKE + 1)]
    assert all(controller.next(name) for name in running)
    for name in running:
        controller.finish(name, error=True)
    assert {one.trial_id for one in world.drain(controller)} == {spec.trial_id for spec in specs}
    assert controller.ending == "finished" and not controller.stopped


def end(world, controller, running, tune_id: str, status: RunStatus, reason: str) -> None:
    """Ends a trial with a status and a reason."""
    world.write(running.spec, running.repeat, status, tags=dict(running.tags))
    folder = world.study.trial(running.trial_id, running.repeat)
    folder.write_result(replace(folder.result(), reason=reason))
    controller.finish(tune_id, error=False)


def test_a_success_another_reason_and_findings_about_plans_end_or_pass_a_row(world, make_specs) -> None:
    specs = make_specs(4 * MOST_ALIKE)
    controller = world.controller(specs)
    endings = [(RunStatus.CRASHED, "one")] * (MOST_ALIKE - 1) + [(RunStatus.COMPLETED, "")]
    endings += [(RunStatus.CRASHED, "one")] * (MOST_ALIKE - 1) + [(RunStatus.CRASHED, "another")]
    endings += [(RunStatus.OUT_OF_MEMORY, "rank 1")] * MOST_ALIKE
    endings += [(RunStatus.CRASHED, "another")] * (MOST_ALIKE - 2)
    for number, (status, reason) in enumerate(endings):
        end(world, controller, controller.next(f"t{number}"), f"t{number}", status, reason)
    assert not controller.stopped
    end(world, controller, controller.next("last"), "last", RunStatus.CRASHED, "another")
    assert len(controller.stopped) == 1, "out of memory is a finding, and in between no success"


def test_failed_trials_run_again_if_asked_and_what_they_left_stays(world, specs) -> None:
    for spec, status in zip(specs, (RunStatus.CRASHED, RunStatus.TIMED_OUT, RunStatus.COMPLETED), strict=True):
        world.write(spec, status=status)
    assert world.drain(world.controller(specs)) == []
    controller = world.controller(specs, retry=frozenset({RunStatus.CRASHED}))
    preview = [one for one in world.heard if isinstance(one, Preview)][-1]
    assert (preview.num_again, preview.num_done) == (1, 2)
    (running,) = world.drain(controller)
    assert running.spec == specs[0] and running.numbers.attempt == 2
    folder = world.study.trial(specs[0].trial_id, 0)
    assert [one.status for one in folder.attempts()] == [RunStatus.CRASHED]
    assert world.result(specs[0]).status is RunStatus.COMPLETED


@pytest.mark.parametrize("damage", ["run.json", "spec.json"])
def test_one_unreadable_trial_does_not_keep_the_others_from_running(world, specs, damage: str) -> None:
    world.write(specs[0])
    folder = world.study.trial(specs[0].trial_id, 0)
    (folder.path / damage).write_text('{"status": ')
    stray = world.study.trial("notes", 0).path.with_name("notes")
    stray.mkdir(parents=True)
    (stray / "spec.json").write_text((world.study.trial(specs[0].trial_id, 0).path / "spec.json").read_text())
    controller = world.controller(specs)
    (preview,) = (one for one in world.heard if isinstance(one, Preview))
    assert set(preview.unreadable) == {folder.path.name, "notes"}
    assert sizes(world.drain(controller)) == [2, 4] and controller.ending == "finished"
    assert (folder.path / damage).read_text() == '{"status": ', "it is left as it is"


def test_a_full_disk_stops_the_study_in_order_and_costs_no_result(world, specs, monkeypatch) -> None:
    controller = world.controller(specs)
    controller.next("t0")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TrialFolder, "write_result", full)
    monkeypatch.setattr(TrialFolder, "write_spec", full)
    controller.finish("t0", error=True)
    assert world.heard[-1].result.status is RunStatus.INFRA_FAILED
    assert controller.next("t1") is None and controller.ending == "failures"
    assert controller.stopped == [f"nothing can be written in {world.study.path}: No space left on device"]
    monkeypatch.undo()
    assert len(world.drain(world.controller(specs))) == 3


def killed(world, spec: TrialSpec) -> None:
    """Leaves what a SIGKILL in the middle of a trial leaves: a specification without a result."""
    folder = world.study.trial(spec.trial_id, 0)
    if folder.path.exists() and folder.result() is not None:
        folder.set_aside()
    folder.write_spec(spec)


def test_a_killed_study_repeats_its_running_trial_after_all_others_however_often(world, specs) -> None:
    for num_before in range(4):
        killed(world, specs[0])
        controller = world.controller(specs)
        found = world.result(specs[0])
        assert found.status is RunStatus.INTERRUPTED and "the study's process ended while it ran" in found.reason
        assert found.start_wall_ns <= found.end_wall_ns
        attempts = world.study.trial(specs[0].trial_id, 0).attempts()
        assert [one.status for one in attempts] == [RunStatus.INTERRUPTED] * num_before
    assert sizes(world.drain(controller)) == [2, 4, 1], "it may be the reason that the study ended"


def test_an_interrupt_marks_running_trials_and_keeps_results_that_arrived(world, specs, new_node) -> None:
    world.nodes.append(new_node("n1"))
    controller = world.controller(specs)
    first, second = controller.next("t0"), controller.next("t1")
    world.write(first.spec)
    controller.interrupt()
    assert world.result(first.spec).status is RunStatus.COMPLETED
    assert world.result(second.spec).status is RunStatus.INTERRUPTED
    assert world.heard[-1].result.status is RunStatus.INTERRUPTED
    assert controller.ending == "interrupted" and controller.next("t2") is None
    assert controller.num_left == 2, "the one that was stopped, and the one that never began"


def test_a_trial_that_completes_while_it_is_marked_stays_completed(world, specs, monkeypatch) -> None:
    controller = world.controller(specs)
    running = controller.next("t0")
    write_spec = TrialFolder.write_spec

    def completes(folder: TrialFolder, spec: TrialSpec) -> None:
        monkeypatch.setattr(TrialFolder, "write_spec", write_spec)
        world.write(running.spec)

    monkeypatch.setattr(TrialFolder, "write_spec", completes)
    controller.interrupt()
    assert world.result(specs[0]).status is RunStatus.COMPLETED
    assert world.heard[-1].result.status is RunStatus.COMPLETED
    assert controller.num_left == 2


def test_an_interrupt_while_a_trial_ends_still_reports_its_result(world, specs, learner) -> None:
    class Pondering(learner):
        def tell(self, spec: TrialSpec, result: Run) -> None:
            super().tell(spec, result)
            if len(self.told) == 1:
                raise KeyboardInterrupt

    controller = world.controller(specs, strategy=Pondering(specs))
    running = controller.next("t0")
    with pytest.raises(KeyboardInterrupt):
        world.run(controller, running, "t0")
    controller.interrupt()
    assert world.heard[-1].kind == "finished" and world.heard[-1].result.status is RunStatus.COMPLETED


def test_an_interrupt_while_a_trial_begins_does_not_count_as_its_death(world, specs, monkeypatch) -> None:
    controller = world.controller(specs)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrialFolder, "write_spec", interrupted)
    with pytest.raises(KeyboardInterrupt):
        controller.next("t0")
    monkeypatch.undo()
    controller.interrupt()
    assert world.result(specs[0]).reason == STOPPED
    assert len(world.drain(world.controller(specs))) == 3


def test_lanes_run_side_by_side_and_wait_for_each_other(world, specs, new_node) -> None:
    world.nodes.append(new_node("n1"))
    controller = world.controller(specs)
    first, second = controller.next("t0"), controller.next("t1")
    assert {first.tags["nodes"], second.tags["nodes"]} == {"n0", "n1"}
    assert controller.next("t2") is None and controller.ending is None
    world.run(controller, first, "t0")
    third = controller.next("t2")
    assert third.nodes == first.nodes
    world.run(controller, second, "t1")
    assert controller.next("t3") is None and controller.ending is None  # the third still runs
    world.run(controller, third, "t2")
    assert controller.next("t3") is None and controller.ending == "finished"
    placement = next(event for event in world.heard if isinstance(event, Placement))
    assert placement.lanes == ("n0", "n1") and placement.num_at_once == 2


def test_a_node_that_dies_takes_its_trial_to_another_one(world, specs, new_node, monkeypatch) -> None:
    monkeypatch.setattr("wattune.orchestrate.scheduling.controller.LOOK_EVERY_S", 0)
    world.nodes.append(new_node("n1"))
    controller = world.controller(specs)
    first, second = controller.next("t0"), controller.next("t1")
    world.nodes.pop()
    dying, living = (first, second) if first.tags["nodes"] == "n1" else (second, first)
    world.run(controller, dying, "t0" if dying is first else "t1", RunStatus.CRASHED)
    marked = world.result(dying.spec)
    assert marked.status is RunStatus.INFRA_FAILED and world.heard[-1].again
    assert marked.reason == "node n1 left the cluster; made up"
    assert (marked.tags[CAUSE_TAG], marked.tags[NODES_TAG]) == (Cause.NODE_LOST, "n1")
    world.run(controller, living, "t1" if dying is first else "t0")
    again = controller.next("t2")
    assert again.spec == dying.spec and again.tags["nodes"] == "n0"
    world.run(controller, again, "t2")
    assert world.result(dying.spec).status is RunStatus.COMPLETED


def test_a_trial_of_a_dead_node_that_still_counts_as_alive_is_run_again(world, specs, new_node) -> None:
    world.nodes.append(new_node("n1"))
    controller = world.controller(specs)
    first, second = controller.next("t0"), controller.next("t1")
    dying, living = (first, second) if first.tags["nodes"] == "n1" else (second, first)
    world.unanswering += [node for node in world.nodes if node.name == "n1"]
    world.run(controller, dying, "t0" if dying is first else "t1", RunStatus.CRASHED)
    world.nodes = [node for node in world.nodes if node.name != "n1"]
    assert controller.next("t2") is None, "no repeat on the dead node, though the last look was a moment ago"
    world.run(controller, living, "t1" if dying is first else "t0", RunStatus.CRASHED)
    assert world.result(dying.spec).status is RunStatus.INFRA_FAILED
    assert world.result(living.spec).status is RunStatus.CRASHED
    assert controller.next("t3").spec == dying.spec
    assert len(world.study.trial(dying.trial_id, 0).attempts()) == 1, "its node's death counts once"


def test_a_study_names_missing_nodes_and_goes_on_with_those_it_has(world, make_specs, new_node, monkeypatch) -> None:
    monkeypatch.setattr("wattune.orchestrate.scheduling.controller.LOOK_EVERY_S", 0)
    world.nodes.append(new_node("n1"))
    large = make_specs(1, ClusterSpec(device="cpu", num_nodes=2, devices_per_node=1))
    small = make_specs(2)
    controller = world.controller([*small[:1], *large, *small[1:]])
    running = controller.next("t0")
    world.nodes.pop()
    world.run(controller, running, "t0")
    running = controller.next("t1")
    assert running.spec == small[1]
    world.run(controller, running, "t1")
    assert controller.next("t2") is None and controller.ending == "nodes" and controller.num_left == 1
    assert controller.missing == ["2x1 cpu needs 2 node(s) with 1 device(s) cpu each; the cluster has n0: 2 CPU"]

    world.heard.clear()
    assert world.controller([*small[:1], *large, *small[1:]]).next("t0") is None
    placement = next(event for event in world.heard if isinstance(event, Placement))
    assert placement.missing == tuple(controller.missing)

    world.nodes.append(new_node("n2"))
    assert world.drain(world.controller([*small[:1], *large, *small[1:]]))[0].spec == large[0]


def test_a_trial_rejected_by_its_estimate_keeps_what_it_measured_before(world, specs) -> None:
    watched = Numbers(limit_looks=3, limit_looks_seeing=3)
    world.write(specs[0], status=RunStatus.ABORTED, numbers=watched)
    measured = world.study.trial(specs[0].trial_id, 0)
    measured.write_output(0, "what it said")
    limits = {"node_device_power_w": 1000.0}
    above = {"estimate": lambda _spec: {"node_device_power_peak_1s_w": 1200.0}, "outdated": lambda _result: True}
    assert world.controller(specs[:1], limits=limits, **above).next("t0") is None
    assert world.result(specs[0]).status is RunStatus.REJECTED
    assert [one.numbers for one in measured.attempts()] == [watched]
    assert not (measured.path / "output").exists(), "it is no output of the trial that was rejected"


def test_a_trial_estimated_above_a_hard_limit_never_starts(world, specs) -> None:
    def estimate(spec: TrialSpec) -> dict[str, float]:  # of the last one there is none
        return {} if spec == specs[2] else {"node_device_power_peak_1s_w": 1000.0 * spec.plan.micro_batch_size}

    controller = world.controller(specs, estimate=estimate, limits={"node_device_power_w": 1500.0})
    assert sizes(world.drain(controller)) == [1, 4]
    rejected = world.result(specs[1])
    assert rejected.status is RunStatus.REJECTED
    assert rejected.reason == (
        "node_device_power_peak_1s_w is estimated at 2000 or more, the hard limit node_device_power_w is 1500"
    )


def test_a_listener_that_fails_stops_nothing(world, specs, caplog) -> None:
    def broken(event) -> None:
        raise OSError("no terminal")

    assert len(world.drain(world.controller(specs, listener=broken))) == 3
    assert "a listener failed" in caplog.text


def test_a_study_of_another_process_is_read_once(world, make_specs, monkeypatch) -> None:
    """However many trials are done, one more costs the same: nothing walks through the folder again."""
    specs = make_specs(8)
    for spec in specs[:4]:
        world.write(spec)
    controller = world.controller(specs)
    monkeypatch.setattr(StudyFolder, "trials", lambda self: pytest.fail("the folder is walked through again"))
    assert len(world.drain(controller)) == 4


@pytest.mark.slow
def test_a_thousand_trials_in_line_cost_the_same_each(world, make_specs, monkeypatch) -> None:
    """The controller is as quick at the end of a long study as at its start; the disk is left out."""
    monkeypatch.setattr("os.fsync", lambda _file: None)
    controller = world.controller(make_specs(1000), order="shuffled", measure=Measure(reference_every=0))
    took_s = []
    while True:
        begun_s = time.thread_time()
        running = controller.next("t")
        chosen_s = time.thread_time() - begun_s
        if running is None:
            break
        world.write(running.spec, running.repeat)
        begun_s = time.thread_time()
        controller.finish("t", error=False)
        took_s.append(chosen_s + time.thread_time() - begun_s)
    assert len(took_s) == 1000 and controller.ending == "finished"
    assert statistics.median(took_s[-200:]) < 3 * statistics.median(took_s[:200])


def test_the_preview_knows_how_long_finished_trials_took(world, make_specs) -> None:
    spec = make_specs(4, ClusterSpec(device="cpu", devices_per_node=2))
    world.write(spec[0], took_s=30)
    world.write(spec[1], took_s=50, status=RunStatus.OUT_OF_MEMORY)
    world.controller(spec, measure=Measure(min_seconds=1))
    preview = world.heard[0]
    assert preview.measured and preview.device_s == 2 * 2 * 30
    assert preview.done == {RunStatus.COMPLETED: 1, RunStatus.OUT_OF_MEMORY: 1}


def test_the_preview_counts_what_a_budget_of_trials_lets_this_call_do(world, make_specs) -> None:
    small, large = make_specs(6), make_specs(6, ClusterSpec(device="cpu", devices_per_node=2))
    measure = Measure(min_seconds=10, reference_every=5)
    controller = world.controller([*small, *large], measure=measure, budget=Budget(max_trials=8))
    preview, placement = world.heard[:2]
    assert (preview.num_left, preview.num_now, preview.num_references) == (14, 8, 2)
    assert preview.device_s == 7 * 10 + 7 * 20, "all of it is still told"
    assert preview.device_now_s == placement.device_s == 7 * 10 + 20, (
        "the first eight in the queue, a reference trial among them"
    )
    assert placement.wall_s == 80 and not placement.cut_short
    assert len(world.drain(controller)) == 8
    left = [event.num_left for event in world.heard if isinstance(event, TrialEvent) and event.kind == "finished"]
    assert left == [7, 6, 5, 4, 3, 2, 1, 0]
    assert controller.num_left == 5, "without reference trials"


def test_a_budget_of_hours_bounds_the_placement(world, make_specs, new_node) -> None:
    world.nodes.append(new_node("n1"))
    specs, measure = make_specs(12, ClusterSpec(device="cpu", devices_per_node=2)), Measure(min_seconds=10)
    for hours, cut_short in ((0.01, True), (1, False)):
        world.heard.clear()
        world.controller(specs, measure=measure, budget=Budget(max_hours=hours))
        preview, placement = world.heard
        assert preview.most_s == pytest.approx(hours * 3600, abs=5) and preview.num_now == preview.num_left == 13
        assert placement.cut_short is cut_short
        wall_s, device_s = (36, 36 * 2 * 2) if cut_short else (13 * 10 / 2, 13 * 10 * 2)
        assert placement.wall_s == pytest.approx(wall_s, abs=5)
        assert placement.device_s == pytest.approx(device_s, abs=20)
    world.heard.clear()
    world.controller(specs, measure=measure)
    assert world.heard[0].most_s == math.inf and world.heard[0].num_now == 13

"""A lane without Ray: its workers are coroutines that report what the test wants."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest
from specs import trial_spec
from virtual_time import run_in_virtual_time

from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Node
from wattune.orchestrate.events import TrialProgress
from wattune.orchestrate.failures import Cause
from wattune.orchestrate.lanes import lane as lane_module
from wattune.orchestrate.lanes.lane import Lane
from wattune.orchestrate.lanes.messages import (
    Answer,
    Assignment,
    GroupKey,
    Place,
    RankAssignment,
    Report,
    WorkerPlace,
    received,
)
from wattune.orchestrate.lanes.worker_group import GIVE_BACK_S
from wattune.run import Numbers, RunStatus
from wattune.trial import Measure
from wattune.workers.outcome import RankOutcome

SPEC = trial_spec(on="1x2 cpu", seq_len=8, batch=8)
CLEAN = Report(problem=None)
HANGS_S = 1e6
"""Longer than a lane waits for anything. Time is virtual here: waiting is free, and no wait ends too early."""


def assignment(
    label: str = "a",
    *,
    engine: str = "torch",
    fresh: bool = False,
    timeout_s: float = 60,
    then: str = "",
) -> Assignment:
    spec = replace(SPEC, engine=engine)
    attempt = Attempt(
        spec=spec,
        repeat=0,
        measure=Measure(timeout_s=timeout_s),
        tags={"label": label},
        nodes=(Node(node_id="id0", name="n0", num_cpus=2, num_gpus=0),),
        isolation="fresh" if fresh else "warm",
        then=replace(SPEC, engine=then) if then else None,
    )
    return Assignment(attempt=attempt, key=GroupKey.of(spec, {"CPU": 1.0}), sensed={})


def label_of(assigned: RankAssignment) -> str:
    """Returns the name that the test gave the trial of a rank."""
    assert assigned.assignment is not None
    return assigned.assignment.attempt.tags["label"]


def worker_place(number: int, node_id: str = "id0", device_index: int | None = None) -> WorkerPlace:
    index = number if device_index is None else device_index
    pid: Any = next(PIDS)
    return WorkerPlace(number=number, node_id=node_id, device_index=index, device_uuid=None, pid=pid, actor=None)  # type: ignore[arg-type]


PIDS = count(1000)
"""A process has an id of its own."""


def completed(rank: int) -> RankOutcome:
    return RankOutcome(rank=rank, status=RunStatus.COMPLETED)


def crashed(rank: int, reason: str = "rank 0: ValueError: x") -> RankOutcome:
    return RankOutcome(rank=rank, status=RunStatus.CRASHED, reason=reason)


Act = Callable[["Worker", RankAssignment], Awaitable[Report]]


@dataclass
class Worker:
    """A worker that does with every trial what the test tells it."""

    workers: "Workers"
    run: int
    number: int
    group: int = -1
    task: Any = None
    place: WorkerPlace = None  # type: ignore[assignment]

    async def serve(self) -> None:
        lane = self.workers.lane
        if not await lane.turn(self.run):
            return
        self.place = worker_place(self.number)
        self.group = lane.join(self.run, self.place)
        report: Report | None = None
        while (assigned := received(await lane.next_trial(self.group, self.number, report))) is not None:
            if assigned.assignment is None:
                self.workers.num_probes += 1
                report = CLEAN
            else:
                report = await self.workers.act(self, assigned)
            report = replace(report, after=assigned.number)

    async def deliver(self, assigned: RankAssignment, outcome: RankOutcome | None = None) -> Report:
        place = Place(rank=assigned.rank, node="n0", slot=0, device="cpu0", device_uuid=None, pid=self.number)
        self.workers.delivered.append(outcome or completed(assigned.rank))
        self.workers.lane.deliver(self.group, assigned.number, self.workers.delivered[-1], place)
        return CLEAN

    async def fail(self, assigned: RankAssignment, outcome: RankOutcome, *, keeps_group: bool) -> Report:
        """Says at once that the trial failed here, then delivers."""
        self.workers.lane.failing(self.group, assigned.number, outcome, keeps_group=keeps_group)
        return await self.deliver(assigned, outcome if outcome.status is not RunStatus.COMPLETED else None)

    async def order(self, assigned: RankAssignment, kind: str) -> str:
        """Waits until the lane gives an order; returns its reason."""
        order = await self.workers.lane.stop_order(self.group, assigned.number)
        assert order is not None and order.kind == kind
        return order.reason


async def await_window(worker: Worker, assigned: RankAssignment) -> Report:
    await worker.workers.lane.await_window(worker.group, assigned.number)
    return await worker.deliver(assigned)


async def obey(worker: Worker, assigned: RankAssignment) -> Report:
    return await worker.deliver(assigned)


async def hang(_worker: Worker, _assigned: RankAssignment) -> Report:
    await asyncio.sleep(HANGS_S)
    return CLEAN


def in_trial(label: str) -> Callable[[Act], Act]:
    """Does so in trials whose name begins with this, and completes all others."""

    def of(act: Act) -> Act:
        return lambda worker, assigned: (act if label_of(assigned).startswith(label) else obey)(worker, assigned)

    return of


@dataclass
class Workers:
    """The part of Ray Train: starts workers, and others when one was killed."""

    act: Act = obey
    launches: list[tuple[GroupKey, bool]] = field(default_factory=list)
    num_groups: int = 0
    num_probes: int = 0
    lane: Lane = None  # type: ignore[assignment]
    fails: list[str] = field(default_factory=list)
    """Reasons for which the next runs end before they begin."""
    dead: set[int] = field(default_factory=set)
    """Workers whose process is gone, though nobody has said so."""
    probed: list[int] = field(default_factory=list)
    delivered: list[RankOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lane = Lane(("id0",), self.launch, self.kill, self.probe)
        self.present: dict[int, Worker] = {}

    async def launch(self, key: GroupKey, nodes: tuple[str, ...], restarts: bool, number: int) -> None:
        assert nodes == ("id0",)
        self.launches.append((key, restarts))
        if self.fails:
            raise RuntimeError(self.fails.pop(0))
        while True:
            self.num_groups += 1
            group = [Worker(self, number, index) for index in range(key.world_size)]
            self.present = {worker.number: worker for worker in group}
            for worker in group:
                worker.task = asyncio.create_task(worker.serve())
            rest, killed = {worker.task for worker in group}, False
            while rest and not killed:
                done, rest = await asyncio.wait(rest, return_when=asyncio.FIRST_COMPLETED)
                killed = any(task.cancelled() for task in done)
            for task in rest:
                task.cancel()
            if not killed:
                return
            if not restarts:
                raise RuntimeError("a worker was killed")

    async def probe(self, asked: WorkerPlace) -> str:
        self.probed.append(asked.number)
        return "it has died" if asked.number in self.dead else ""

    def kill(self, dead: WorkerPlace) -> None:
        self.present[dead.number].task.cancel()

    async def complete(self, label: str = "next", **how: Any) -> Answer:
        """Runs a trial that completes on both ranks."""
        answer = await self.lane.run(assignment(label, **how))
        assert [outcome.status.value for outcome in answer.outcomes] == ["completed", "completed"]
        return answer

    async def failure(self, label: str) -> tuple[RunStatus, str]:
        """Runs a trial of which one rank fails first: how and why."""
        answer = await self.lane.run(assignment(label))
        assert answer.cause is not None
        return answer.cause.status, answer.cause.reason


def lane_test(act: Act = obey) -> Callable[[Callable[..., Awaitable[None]]], Callable[[], None]]:
    """Makes a test of a scenario, whose workers do with a trial what `act` says. Time is virtual."""

    def of(scenario: Callable[..., Awaitable[None]]) -> Callable[[], None]:
        async def main() -> None:
            workers = Workers(act)
            await asyncio.wait_for(scenario(workers), HANGS_S / 2)
            await workers.lane.close("the test is over")

        return lambda: run_in_virtual_time(main())

    return of


@lane_test()
async def test_one_group_runs_trial_after_trial(workers: Workers) -> None:
    for number in (1, 2, 3):
        answer = await workers.complete(f"a-{number}")
        assert answer.number == number and not answer.failure
        assert [place.rank for place in answer.places] == [0, 1]
        assert answer.warm is (number > 1), "the first one's workers came after it"
        assert await workers.lane.settle() == ""
    assert workers.num_groups == 1 and len(workers.launches) == 1 and workers.num_probes == 0


async def call_twice(worker: Worker, assigned: RankAssignment) -> Report:
    """Makes each of a worker's calls twice, as after the end of the post that took the first one's answer with it."""
    lane, first = worker.workers.lane, replace(CLEAN, after=assigned.number - 1)
    assert lane.join(worker.run, worker.place) == worker.group, "it is the same process"
    assert received(await lane.next_trial(worker.group, worker.number, first)) == assigned
    for held in ("gone", "kept"):
        lane.delivered(worker.group, assigned.number, [assigned.rank], [], held)
    return CLEAN


@lane_test(call_twice)
async def test_calls_that_are_made_again_change_nothing(workers: Workers) -> None:
    for number in (1, 2):
        answer = await workers.lane.run(assignment(f"a-{number}"))
        assert answer.number == number and answer.held == ("kept", "kept")
        assert answer.completed == {0, 1} and not answer.outcomes and not answer.failure
    assert workers.num_groups == 1


@lane_test()
async def test_workers_that_were_prepared_are_those_of_the_first_trial(workers: Workers) -> None:
    workers.lane.prepare(assignment().key)
    await asyncio.sleep(1)
    assert len(workers.launches) == 1
    answer = await workers.complete()
    assert answer.number == 1 and answer.warm, "they were on their devices before its sensors were read"
    workers.lane.prepare(assignment(engine="deepspeed").key)
    assert (await workers.complete()).number == 2 and len(workers.launches) == 1, "running workers stay"
    assert (await workers.complete(engine="deepspeed")).number == 1


@lane_test()
async def test_prepared_workers_of_another_kind_make_room(workers: Workers) -> None:
    workers.lane.prepare(assignment(engine="deepspeed").key)
    answer = await workers.complete()
    assert answer.number == 1 and not answer.warm and not answer.failure
    assert [key.engine for key, _ in workers.launches] == ["deepspeed", "torch"]


@lane_test()
async def test_the_next_engines_workers_start_beside_a_trial_and_take_no_device_before_its_workers_have_ended(
    workers: Workers,
) -> None:
    await workers.complete()
    first = [*workers.present.values()]
    await workers.complete(then="megatron")
    await asyncio.sleep(1)
    assert [key.engine for key, _ in workers.launches] == ["torch", "megatron"]
    assert all(worker.group == -1 for worker in workers.present.values()), "they wait for their turn"
    assert (await workers.complete(then="megatron")).number == 3 and len(workers.launches) == 2, "they started once"
    answer = await workers.complete(engine="megatron")
    assert (answer.number, answer.warm, len(workers.launches)) == (1, False, 2)
    assert all(worker.task.done() for worker in first)
    await workers.complete(engine="megatron", then="torch")
    await workers.complete(engine="deepspeed")
    engines = [key.engine for key, _ in workers.launches]
    assert engines == ["torch", "megatron", "torch", "deepspeed"], "nobody waits for what was not needed"


@lane_test()
async def test_next_workers_that_do_not_come_are_started_when_they_are_needed(workers: Workers) -> None:
    await workers.complete()
    workers.fails = ["no memory on the node"]
    await workers.complete(then="megatron")
    await asyncio.sleep(1)
    assert (await workers.complete(engine="megatron")).number == 1
    assert [key.engine for key, _ in workers.launches] == ["torch", "megatron", "megatron"]
    await workers.complete(engine="megatron", then="torch")
    await workers.lane.close("the study was stopped", interrupts=True)
    assert all(worker.task.done() for worker in workers.present.values())


def placed_after(workers: Workers, waits_s: float) -> None:
    """Has workers wait so long for their place, as those do whose nodes another job took."""
    launch = workers.launch

    async def late(key: GroupKey, nodes: tuple[str, ...], restarts: bool, number: int) -> None:
        asked_s = time.monotonic()
        for _ in range(int(waits_s)):
            if not workers.lane.place(number, asked_s, math.inf):
                raise RuntimeError("its place is not waited for any more")
            await asyncio.sleep(1)
        assert workers.lane.place(number, asked_s, time.monotonic())
        await asyncio.sleep(5)
        await launch(key, nodes, restarts, number)

    workers.lane._launch = late


@lane_test()
async def test_a_wait_for_nodes_is_no_start_of_workers_and_the_last_trials_is_none_of_the_next(
    workers: Workers,
) -> None:
    placed_after(workers, 20)
    first, second = await workers.complete(), await workers.complete()
    assert (first.node_wait_s, first.group_start_s) == pytest.approx((20, 5), abs=0.1)
    assert (second.node_wait_s, second.group_start_s) == pytest.approx((0, 0), abs=0.1)
    placed_after(workers, 1)
    third = await workers.complete(engine="deepspeed")
    assert third.node_wait_s == 0, "a place on free nodes takes a moment too"
    placed_after(workers, 25)
    workers.lane.prepare(assignment(engine="megatron").key)
    await asyncio.sleep(0.1)
    ended = asyncio.create_task(workers.lane.make_room())
    await asyncio.sleep(10)
    assert ended.done(), "nobody waits for the place of workers that are not wanted"


@lane_test()
async def test_nodes_that_another_job_keeps_are_given_back_and_the_start_counts_from_the_place(
    workers: Workers,
) -> None:
    placed_after(workers, HANGS_S)
    answer = await workers.lane.run(assignment())
    assert answer.infra is Cause.PLACEMENT and "another job" in answer.failure
    assert answer.node_wait_s == pytest.approx(GIVE_BACK_S, abs=3) and answer.group_start_s < 3
    placed_after(workers, GIVE_BACK_S - 5)
    assert (await workers.complete()).node_wait_s == pytest.approx(GIVE_BACK_S - 5, abs=0.1)


@lane_test()
async def test_another_engine_and_a_fresh_trial_get_their_own_workers(workers: Workers) -> None:
    await workers.complete()
    await workers.complete(engine="deepspeed")
    for _ in range(2):
        answer = await workers.complete(engine="deepspeed", fresh=True)
        assert answer.number == 1 and not answer.warm
    assert [key.engine for key, _ in workers.launches] == ["torch", "deepspeed", "deepspeed", "deepspeed"]
    assert [restarts for _, restarts in workers.launches] == [True, True, False, False]


@in_trial("dies")
async def rank_1_dies(worker: Worker, assigned: RankAssignment) -> Report:
    if assigned.rank == 1:
        raise asyncio.CancelledError
    return await hang(worker, assigned)


@lane_test(rank_1_dies)
async def test_a_worker_that_dies_costs_its_trial_and_nothing_more(workers: Workers) -> None:
    await workers.complete()
    answer = await workers.lane.run(assignment("dies"))
    assert not answer.outcomes and "without reporting" in answer.failure
    after = await workers.complete()
    assert after.restart_s is not None and after.number == 1
    last = await workers.complete()
    assert last.restart_s is None and last.number == 2
    assert workers.num_groups == 2 and len(workers.launches) == 1


@lane_test(hang)
async def test_the_reason_train_reports_first_is_the_answer_and_the_dead_are_not_asked_again(workers: Workers) -> None:
    pending = asyncio.create_task(workers.lane.run(assignment("dies")))
    await asyncio.sleep(0.1)
    assert not workers.lane.lost(7, "of another run"), "which is to start no others"
    assert workers.lane.lost(1, "worker 1 of the group: killed", {1: "killed"})
    answer = await pending
    assert answer.failure == "worker 1 of the group: killed" and answer.infra is None
    assert [(one.rank, one.why) for one in answer.deaths] == [(1, "killed")] and workers.probed == []


@lane_test(await_window)
async def test_measured_steps_begin_when_the_driver_lets_them(workers: Workers) -> None:
    for number in (1, 2):  # another attempt at the trial waits anew
        asked = assignment()
        asked = replace(asked, attempt=replace(asked.attempt, numbers=Numbers(attempt=number)))
        pending = asyncio.create_task(workers.lane.run(asked))
        workers.lane.open_window("another-0#1")
        await asyncio.sleep(1)
        workers.lane.open_window(replace(asked, attempt=replace(asked.attempt, numbers=Numbers(attempt=7))).window)
        await asyncio.sleep(1)
        assert not pending.done()
        workers.lane.open_window(asked.window)
        assert (await pending).number == number
    pending = asyncio.create_task(workers.lane.run(assignment()))
    await asyncio.sleep(1)
    assert workers.lane.stop_trial(assignment().attempt.name, "the sensors did not start")
    answer = await pending
    assert answer.cause is not None and answer.cause.status is RunStatus.ABORTED and len(answer.outcomes) == 2


@lane_test(await_window)
async def test_a_trial_whose_driver_died_before_its_window_does_not_hold_the_lane(workers: Workers) -> None:
    orphan = asyncio.create_task(workers.lane.run(assignment()))  # an actor's call goes on without its caller
    await asyncio.sleep(1)
    asked = assignment()
    asked = replace(asked, attempt=replace(asked.attempt, numbers=Numbers(attempt=2)))
    again = asyncio.create_task(workers.lane.run(asked))
    workers.lane.open_window(asked.window)
    assert (await asyncio.wait_for(orphan, 60)).number == 1
    assert (await asyncio.wait_for(again, 60)).number == 2
    orphan = asyncio.create_task(workers.lane.run(assignment()))
    await asyncio.sleep(1)
    await asyncio.wait_for(workers.lane.make_room(), 60)
    assert orphan.done()


LARGE = RankOutcome(rank=1, status=RunStatus.OUT_OF_MEMORY, reason="rank 1: out of memory")


@in_trial("large")
async def rank_1_is_full(worker: Worker, assigned: RankAssignment) -> Report:
    if assigned.rank == 1:
        return await worker.fail(assigned, LARGE, keeps_group=True)
    if label_of(assigned) == "large and stuck":
        return await hang(worker, assigned)
    assert "out of memory" in await worker.order(assigned, "free")
    return await worker.deliver(assigned, crashed(0, "rank 0 was stopped"))


@lane_test(rank_1_is_full)
async def test_out_of_memory_on_one_rank_frees_the_others_and_keeps_the_group(workers: Workers) -> None:
    assert await workers.failure("large") == (RunStatus.OUT_OF_MEMORY, LARGE.reason)
    assert await workers.lane.settle() == ""
    await workers.complete()
    assert workers.num_groups == 1 and workers.num_probes == 2


@lane_test(rank_1_is_full)
async def test_a_rank_that_cannot_be_freed_is_ended(workers: Workers) -> None:
    assert await workers.failure("large and stuck") == (RunStatus.OUT_OF_MEMORY, LARGE.reason)
    assert "not every rank left" in await workers.lane.settle()
    await workers.complete()
    assert workers.num_groups == 2


async def profile_fails(worker: Worker, assigned: RankAssignment) -> Report:
    if label_of(assigned) == "next":
        return await worker.deliver(assigned)
    if assigned.rank == 1:
        return await worker.fail(assigned, replace(completed(1), reason=LARGE.reason), keeps_group=True)
    await worker.order(assigned, "free")
    return await worker.deliver(assigned, crashed(0) if label_of(assigned) == "breaks" else completed(0))


@lane_test(profile_fails)
async def test_a_failure_in_the_profiled_pass_frees_the_others_and_leaves_the_trial_completed(workers: Workers) -> None:
    answer = await workers.complete("profiled")
    assert answer.cause is not None and answer.cause.status is RunStatus.COMPLETED
    assert await workers.lane.settle() == ""
    assert (await workers.failure("breaks"))[0] is RunStatus.CRASHED, "a rank loses what it measured"
    await workers.complete()
    assert workers.num_groups == 1 and workers.num_probes == 4


@in_trial("wrong")
async def engine_raises(worker: Worker, assigned: RankAssignment) -> Report:
    return await worker.fail(assigned, crashed(assigned.rank), keeps_group=False)


@lane_test(engine_raises)
async def test_an_error_of_the_engine_replaces_the_group(workers: Workers) -> None:
    answer = await workers.lane.run(assignment("wrong"))
    assert [outcome.status.value for outcome in answer.outcomes] == ["crashed", "crashed"]
    assert "ValueError" in await workers.lane.settle()
    await workers.complete()
    assert workers.num_groups == 2


@in_trial("hangs")
async def watchdog_calls(worker: Worker, assigned: RankAssignment) -> Report:
    lane = worker.workers.lane
    if assigned.rank == 0:
        late = RankOutcome(rank=0, status=RunStatus.TIMED_OUT, reason="rank 0: no step")
        lane.hung(worker.group, assigned.number, late, "in all_reduce")
    else:
        await worker.order(assigned, "dump")
        lane.report_stacks(worker.group, assigned.number, 1, "in sleep")
    return await hang(worker, assigned)


@lane_test(watchdog_calls)
async def test_a_hang_is_reported_with_the_stacks_of_every_rank(workers: Workers) -> None:
    answer = await workers.lane.run(assignment("hangs"))
    assert answer.cause is not None and answer.cause.status is RunStatus.TIMED_OUT
    assert answer.stacks == {0: "in all_reduce", 1: "in sleep"}
    assert await workers.lane.settle() != ""
    await workers.complete()
    assert workers.num_groups == 2


@lane_test(in_trial("dead")(hang))
async def test_a_trial_whose_watchdogs_do_not_answer_ends_too(workers: Workers) -> None:
    answer = await workers.lane.run(assignment("dead", timeout_s=0.1))
    assert answer.cause is not None and answer.cause.status is RunStatus.TIMED_OUT
    await workers.complete()


@in_trial("leaks")
async def rank_1_leaks(worker: Worker, assigned: RankAssignment) -> Report:
    await worker.deliver(assigned)
    return Report(problem="memory did not come back: 500 MiB") if assigned.rank == 1 else CLEAN


@lane_test(rank_1_leaks)
async def test_memory_that_did_not_come_back_replaces_the_group_and_not_the_result(workers: Workers) -> None:
    assert not (await workers.complete("leaks")).failure
    assert "500 MiB" in await workers.lane.settle()
    assert (await workers.complete()).number == 1
    assert workers.num_groups == 2


async def leave_when_told(worker: Worker, assigned: RankAssignment) -> Report:
    lane, rank = worker.workers.lane, assigned.rank
    lane.show(worker.group, assigned.number, rank, f"spans of {rank}")  # type: ignore[arg-type]
    lane.show(worker.group, assigned.number + 1, rank, "another trial's")  # type: ignore[arg-type]
    reason = await worker.order(assigned, "free")
    return await worker.deliver(assigned, RankOutcome(rank=rank, status=RunStatus.ABORTED, reason=reason))


@lane_test(leave_when_told)
async def test_a_trial_can_be_stopped_while_it_runs(workers: Workers) -> None:
    pending = asyncio.create_task(workers.lane.run(assignment("hot")))
    await asyncio.sleep(0.1)
    name = f"{SPEC.trial_id}-0"
    assert workers.lane.progress() == {name: TrialProgress(part="start")}
    assert workers.lane.spans(name) == {0: "spans of 0", 1: "spans of 1"} and workers.lane.spans("another") == {}
    assert not workers.lane.stop_trial("another", "no")
    assert workers.lane.stop_trial(name, "3000 W") and not workers.lane.stop_trial(name, "again")
    answer = await pending
    assert answer.cause is not None
    assert (answer.cause.status, answer.cause.reason) == (RunStatus.ABORTED, "3000 W")
    assert await workers.lane.settle() == ""
    assert workers.lane.progress() == {} and workers.lane.spans(name) == {}
    assert workers.num_groups == 1


@pytest.mark.parametrize("interrupts", [False, True])
def test_waiting_trials_are_answered_when_the_lane_closes(interrupts: bool) -> None:
    @lane_test(hang)
    async def closes(workers: Workers) -> None:
        pending = [asyncio.create_task(workers.lane.run(assignment(f"a-{number}"))) for number in range(3)]
        await asyncio.sleep(0.1)
        await workers.lane.close("the study was stopped", interrupts=interrupts)
        answers = await asyncio.gather(*pending)
        assert [answer.failure for answer in answers] == ["the study was stopped"] * 3
        assert {answer.interrupted for answer in answers} == {interrupts}

    closes()


@lane_test(leave_when_told)
async def test_ranks_of_a_stopped_study_leave_their_trial_and_it_counts_as_interrupted(workers: Workers) -> None:
    """The lane does not wait for minutes of measured steps: workers leave at once by themselves, and none is killed."""
    pending = asyncio.create_task(workers.lane.run(assignment("long")))
    await asyncio.sleep(0.1)
    await workers.lane.close("the study was stopped", interrupts=True)
    answer = await pending
    assert answer.interrupted and answer.failure == "the study was stopped"
    assert [outcome.reason for outcome in workers.delivered] == ["the study was stopped"] * 2
    assert workers.num_groups == 1


@lane_test()
async def test_workers_that_do_not_start_are_a_failure_of_the_cluster_and_the_next_trial_tries_again(
    workers: Workers,
) -> None:
    workers.fails = ["no resources"] * 2
    answer = await workers.lane.run(assignment("first"))
    assert not answer.outcomes and answer.infra is Cause.PLACEMENT and "no resources" in answer.failure
    await workers.complete()
    assert len(workers.launches) == 3


@in_trial("dies")
async def all_die(_worker: Worker, _assigned: RankAssignment) -> Report:
    raise asyncio.CancelledError


@lane_test(all_die)
async def test_trials_that_kill_their_workers_again_and_again_do_not_cost_a_good_one(workers: Workers) -> None:
    for number in range(lane_module.MOST_LOSSES + 1):
        assert (await workers.lane.run(assignment(f"dies-{number}"))).failure
    await workers.complete()
    assert len(workers.launches) == 2, "the workers' own driver was replaced once"


@in_trial("killed")
async def rank_0_misses_rank_1(worker: Worker, assigned: RankAssignment) -> Report:
    if assigned.rank == 1:
        worker.workers.dead.add(worker.number)
        return await hang(worker, assigned)
    return await worker.fail(assigned, crashed(0, "rank 0: RuntimeError: Connection closed by peer"), keeps_group=False)


@lane_test(rank_0_misses_rank_1)
async def test_a_dead_worker_is_found_behind_the_error_of_the_rank_that_missed_it(workers: Workers) -> None:
    """The connection breaks at once; Ray Train asks its workers every two seconds."""
    answer = await workers.lane.run(assignment("killed"))
    (death,) = answer.deaths
    assert (death.rank, death.node_id, death.why) == (1, "id0", "it has died")
    assert death.pid == workers.present[1].place.pid
    workers.dead.clear()
    assert not (await workers.complete()).deaths
    assert workers.probed == [1], "a rank that reported lives"

"""A lane without Ray: its workers are coroutines that report what the test wants."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
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
from wattune.orchestrate.lanes.messages import Answer, Assignment, GroupKey, Place, RankAssignment, Report, WorkerPlace
from wattune.run import RunStatus
from wattune.trial import Measure
from wattune.workers.outcome import RankOutcome

SPEC = trial_spec(on="1x2 cpu", seq_len=8, batch=8)
CLEAN = Report(problem=None)
HANGS_S = 1e6
"""Longer than a lane waits for anything. Time is virtual here: waiting is free, and no wait ends too early."""


def assignment(label: str = "a", *, engine: str = "torch", fresh: bool = False, timeout_s: float = 60) -> Assignment:
    spec = replace(SPEC, engine=engine)
    attempt = Attempt(
        spec=spec,
        repeat=0,
        measure=Measure(timeout_s=timeout_s),
        tags={"label": label},
        nodes=(Node(node_id="id0", name="n0", address="", num_cpus=2, num_gpus=0),),
        isolation="fresh" if fresh else "warm",
    )
    return Assignment(attempt=attempt, key=GroupKey.of(spec, {"CPU": 1.0}), sensed={})


def label_of(assigned: RankAssignment) -> str:
    """Returns the name that the test gave the trial of a rank."""
    assert assigned.assignment is not None
    return assigned.assignment.attempt.tags["label"]


def worker_place(number: int, node_id: str = "id0", device_index: int | None = None) -> WorkerPlace:
    index = number if device_index is None else device_index
    return WorkerPlace(number=number, node_id=node_id, device_index=index, device_uuid=None, pid=number, actor=None)  # type: ignore[arg-type]


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

    async def serve(self) -> None:
        lane = self.workers.lane
        self.group = lane.join(self.run, worker_place(self.number))
        report: Report | None = None
        while (assigned := await lane.next_trial(self.group, self.number, report)) is not None:
            if assigned.assignment is None:
                self.workers.num_probes += 1
                report = CLEAN
            else:
                report = await self.workers.act(self, assigned)

    async def deliver(self, assigned: RankAssignment, outcome: RankOutcome | None = None) -> Report:
        place = Place(rank=assigned.rank, node="n0", slot=0, device="cpu0", device_uuid=None, pid=self.number)
        self.workers.lane.deliver(self.group, assigned.number, outcome or completed(assigned.rank), place)
        return CLEAN


async def obey(worker: Worker, assigned: RankAssignment) -> Report:
    return await worker.deliver(assigned)


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

    def __post_init__(self) -> None:
        self.lane = Lane(("id0",), self.launch, self.kill, self.probe)
        self._present: dict[int, Worker] = {}

    async def launch(self, key: GroupKey, nodes: tuple[str, ...], restarts: bool, number: int) -> None:
        assert nodes == ("id0",)
        self.launches.append((key, restarts))
        if self.fails:
            raise RuntimeError(self.fails.pop(0))
        while True:
            self.num_groups += 1
            group = [Worker(self, number, index) for index in range(key.world_size)]
            self._present = {worker.number: worker for worker in group}
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
        self._present[dead.number].task.cancel()


def run(scenario: Callable[[Workers], Awaitable[None]], act: Act = obey) -> Workers:
    async def main() -> Workers:
        workers = Workers(act)
        await asyncio.wait_for(scenario(workers), HANGS_S / 2)
        await workers.lane.close("the test is over")
        return workers

    return run_in_virtual_time(main())


def statuses(answer: Answer) -> list[str]:
    return [outcome.status.value for outcome in answer.outcomes]


def test_one_group_runs_trial_after_trial() -> None:
    async def scenario(workers: Workers) -> None:
        for number in (1, 2, 3):
            answer = await workers.lane.run(assignment(f"a-{number}"))
            assert statuses(answer) == ["completed", "completed"] and answer.number == number and not answer.failure
            assert [place.rank for place in answer.places] == [0, 1]
            assert answer.warm is (number > 1), "the first one's workers came after it"
            assert await workers.lane.settle() == ""

    workers = run(scenario)
    assert workers.num_groups == 1 and len(workers.launches) == 1 and workers.num_probes == 0


def test_another_engine_and_a_fresh_trial_get_their_own_workers() -> None:
    async def scenario(workers: Workers) -> None:
        await workers.lane.run(assignment("a"))
        await workers.lane.run(assignment("b", engine="deepspeed"))
        answer = await workers.lane.run(assignment("c", engine="deepspeed", fresh=True))
        assert answer.number == 1
        again = await workers.lane.run(assignment("d", engine="deepspeed", fresh=True))
        assert again.number == 1 and not again.warm

    workers = run(scenario)
    assert [key.engine for key, _ in workers.launches] == ["torch", "deepspeed", "deepspeed", "deepspeed"]
    assert [restarts for _, restarts in workers.launches] == [True, True, False, False]


def test_a_worker_that_dies_costs_its_trial_and_nothing_more() -> None:
    async def act(worker: Worker, assigned: RankAssignment) -> Report:
        assert assigned.assignment is not None
        if label_of(assigned) == "dies" and assigned.rank == 1:
            raise asyncio.CancelledError
        if label_of(assigned) == "dies":
            await asyncio.sleep(HANGS_S)
        return await worker.deliver(assigned)

    async def scenario(workers: Workers) -> None:
        await workers.lane.run(assignment("good"))
        answer = await workers.lane.run(assignment("dies"))
        assert not answer.outcomes and "without reporting" in answer.failure
        after = await workers.lane.run(assignment("next"))
        assert statuses(after) == ["completed", "completed"] and after.restart_s is not None and after.number == 1
        last = await workers.lane.run(assignment("last"))
        assert last.restart_s is None and last.number == 2

    workers = run(scenario, act)
    assert workers.num_groups == 2 and len(workers.launches) == 1


def test_the_reason_train_reports_first_is_the_answer() -> None:
    async def act(worker: Worker, assigned: RankAssignment) -> Report:
        await asyncio.sleep(HANGS_S)
        return CLEAN

    async def scenario(workers: Workers) -> None:
        pending = asyncio.create_task(workers.lane.run(assignment("dies")))
        await asyncio.sleep(0.1)
        assert not workers.lane.lost(7, "of another run"), "which is to start no others"
        assert workers.lane.lost(1, "worker 1 of the group: killed")
        answer = await pending
        assert answer.failure == "worker 1 of the group: killed"

    run(scenario, act)


def test_out_of_memory_on_one_rank_frees_the_others_and_keeps_the_group() -> None:
    async def act(worker: Worker, assigned: RankAssignment) -> Report:
        assert assigned.assignment is not None
        if label_of(assigned) != "large":
            return await worker.deliver(assigned)
        if assigned.rank == 1:
            outcome = RankOutcome(rank=1, status=RunStatus.OUT_OF_MEMORY, reason="rank 1: out of memory")
            worker.workers.lane.failing(worker.group, assigned.number, outcome, keeps_group=True)
            return await worker.deliver(assigned, outcome)
        order = await worker.workers.lane.stop_order(worker.group, assigned.number)
        assert order is not None and order.kind == "free" and "out of memory" in order.reason
        return await worker.deliver(assigned, crashed(0, "rank 0 was stopped"))

    async def scenario(workers: Workers) -> None:
        answer = await workers.lane.run(assignment("large"))
        assert answer.cause is not None and answer.cause.status is RunStatus.OUT_OF_MEMORY
        assert await workers.lane.settle() == ""
        after = await workers.lane.run(assignment("next"))
        assert statuses(after) == ["completed", "completed"]

    workers = run(scenario, act)
    assert workers.num_groups == 1 and workers.num_probes == 2


def test_a_failure_in_the_profiled_pass_frees_the_others_and_leaves_the_trial_completed() -> None:
    async def act(worker: Worker, assigned: RankAssignment) -> Report:
        assert assigned.assignment is not None
        lane = worker.workers.lane
        if label_of(assigned) == "next":
            return await worker.deliver(assigned)
        if assigned.rank == 1:
            first = replace(completed(1), reason="rank 1: out of memory")
            lane.failing(worker.group, assigned.number, first, keeps_group=True)
            return await worker.deliver(assigned)
        order = await lane.stop_order(worker.group, assigned.number)
        assert order is not None and order.kind == "free"
        broken = label_of(assigned) == "breaks"
        return await worker.deliver(assigned, crashed(0) if broken else completed(0))

    async def scenario(workers: Workers) -> None:
        answer = await workers.lane.run(assignment("profiled"))
        assert statuses(answer) == ["completed", "completed"]
        assert answer.cause is not None and answer.cause.status is RunStatus.COMPLETED
        assert await workers.lane.settle() == ""
        answer = await workers.lane.run(assignment("breaks"))  # a rank that loses what it measured is a failure
        assert answer.cause is not None and answer.cause.status is RunStatus.CRASHED
        assert statuses(await workers.lane.run(assignment("next"))) == ["completed", "completed"]

    workers = run(scenario, act)
    assert workers.num_groups == 1 and workers.num_probes == 4


def test_a_rank_that_cannot_be_freed_is_ended() -> None:
    async def act(worker: Worker, assigned: RankAssignment) -> Report:
        assert assigned.assignment is not None
        if label_of(assigned) == "large" and assigned.rank == 1:
            outcome = RankOutcome(rank=1, status=RunStatus.OUT_OF_MEMORY, reason="rank 1: out of memory")
            worker.workers.lane.failing(worker.group, assigned.number, outcome, keeps_group=True)
            return await worker.deliver(assigned, outcome)
        if label_of(assigned) == "large":
            await asyncio.sleep(HANGS_S)
        return await worker.deliver(assigned)

    async def scenario(workers: Workers) -> None:
        answer = await workers.lane.run(assignment("large"))
        assert answer.cause is not None and answer.cause.status is RunStatus.OUT_OF_MEMORY
        assert "not every rank left" in await workers.lane.settle()
        after = await workers.lane.run(assignment("next"))
        assert statuses(after) == ["completed", "completed"]

    assert run(scenario, act).num_groups == 2


def test_an_error_of_the_engine_replaces_the_group() -> None:
    async def act(worker: Worker, assigned: RankAssignment) -> Report:
        assert assigned.assignment is not None
        if label_of(assigned) == "wrong":
            worker.workers.lane.failing(worker.group, assigned.number, crashed(assigned.rank), keeps_group=False)
            return await worker.deliver(assigned, crashed(assigned.rank))
        return await worker.deliver(assigned)

    async def scenario(workers: Workers) -> None:
        answer = await workers.lane.run(assignment("wrong"))
        assert statuses(answer) == ["crashed", "crashed"]
        assert "ValueError" in await workers.lane.settle()
        assert statuses(await workers.lane.run(assignment("next"))) == ["completed", "completed"]

    assert run(scenario, act).num_groups == 2


def test_a_hang_is_reported_with_the_stacks_of_every_rank() -> None:
    async def act(worker: Worker, assigned: RankAssignment) -> Report:
        assert assigned.assignment is not None
        if label_of(assigned) != "hangs":
            return await worker.deliver(assigned)
        lane = worker.workers.lane
        if assigned.rank == 0:
            late = RankOutcome(rank=0, status=RunStatus.TIMED_OUT, reason="rank 0: no step")
            lane.hung(worker.group, assigned.number, late, "in all_reduce")
        else:
            order = await lane.stop_order(worker.group, assigned.number)
            assert order is not None and order.kind == "dump"
            lane.report_stacks(worker.group, assigned.number, 1, "in sleep")
        await asyncio.sleep(HANGS_S)
        return CLEAN

    async def scenario(workers: Workers) -> None:
        answer = await workers.lane.run(assignment("hangs"))
        assert answer.cause is not None and answer.cause.status is RunStatus.TIMED_OUT
        assert answer.stacks == {0: "in all_reduce", 1: "in sleep"}
        assert await workers.lane.settle() != ""
        assert statuses(await workers.lane.run(assignment("next"))) == ["completed", "completed"]

    assert run(scenario, act).num_groups == 2


def test_a_trial_whose_watchdogs_do_not_answer_ends_too() -> None:
    async def act(worker: Worker, assigned: RankAssignment) -> Report:
        assert assigned.assignment is not None
        if label_of(assigned) == "dead":
            await asyncio.sleep(HANGS_S)
        return await worker.deliver(assigned)

    async def scenario(workers: Workers) -> None:
        answer = await workers.lane.run(assignment("dead", timeout_s=0.1))
        assert answer.cause is not None and answer.cause.status is RunStatus.TIMED_OUT
        assert statuses(await workers.lane.run(assignment("next"))) == ["completed", "completed"]

    run(scenario, act)


def test_memory_that_did_not_come_back_replaces_the_group_and_not_the_result() -> None:
    async def act(worker: Worker, assigned: RankAssignment) -> Report:
        assert assigned.assignment is not None
        await worker.deliver(assigned)
        leaks = label_of(assigned) == "leaks" and assigned.rank == 1
        return Report(problem="memory did not come back: 500 MiB") if leaks else CLEAN

    async def scenario(workers: Workers) -> None:
        answer = await workers.lane.run(assignment("leaks"))
        assert statuses(answer) == ["completed", "completed"] and not answer.failure
        assert "500 MiB" in await workers.lane.settle()
        assert (await workers.lane.run(assignment("next"))).number == 1

    assert run(scenario, act).num_groups == 2


def test_a_trial_can_be_stopped_while_it_runs() -> None:
    async def act(worker: Worker, assigned: RankAssignment) -> Report:
        worker.workers.lane.show(worker.group, assigned.number, assigned.rank, f"spans of {assigned.rank}")  # type: ignore[arg-type]
        worker.workers.lane.show(worker.group, assigned.number + 1, assigned.rank, "another trial's")  # type: ignore[arg-type]
        order = await worker.workers.lane.stop_order(worker.group, assigned.number)
        assert order is not None and order.kind == "free"
        return await worker.deliver(assigned, replace(crashed(assigned.rank), status=RunStatus.ABORTED))

    async def scenario(workers: Workers) -> None:
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

    assert run(scenario, act).num_groups == 1


@pytest.mark.parametrize("interrupts", [False, True])
def test_waiting_trials_are_answered_when_the_lane_closes(interrupts: bool) -> None:
    async def act(worker: Worker, assigned: RankAssignment) -> Report:
        await asyncio.sleep(HANGS_S)
        return CLEAN

    async def scenario(workers: Workers) -> None:
        pending = [asyncio.create_task(workers.lane.run(assignment(f"a-{number}"))) for number in range(3)]
        await asyncio.sleep(0.1)
        await workers.lane.close("the study was stopped", interrupts=interrupts)
        answers = await asyncio.gather(*pending)
        assert [answer.failure for answer in answers] == ["the study was stopped"] * 3
        assert {answer.interrupted for answer in answers} == {interrupts}

    run(scenario, act)


def test_ranks_of_a_stopped_study_leave_their_trial_and_it_counts_as_interrupted() -> None:
    """The lane does not wait for minutes of measured steps: workers leave at once by themselves, and none is killed."""
    left: list[str] = []

    async def act(worker: Worker, assigned: RankAssignment) -> Report:
        order = await worker.workers.lane.stop_order(worker.group, assigned.number)
        assert order is not None and order.kind == "free"
        left.append(order.reason)
        return await worker.deliver(assigned, replace(crashed(assigned.rank), status=RunStatus.ABORTED))

    async def scenario(workers: Workers) -> None:
        pending = asyncio.create_task(workers.lane.run(assignment("long")))
        await asyncio.sleep(0.1)
        await workers.lane.close("the study was stopped", interrupts=True)
        answer = await pending
        assert answer.interrupted and answer.failure == "the study was stopped"
        assert left == ["the study was stopped"] * 2

    assert run(scenario, act).num_groups == 1


def test_workers_that_never_start_fail_the_trial_and_the_next_one_tries_again() -> None:
    async def scenario(workers: Workers) -> None:
        workers.fails = ["no resources"] * 2
        answer = await workers.lane.run(assignment("first"))
        assert not answer.outcomes and "no resources" in answer.failure
        assert statuses(await workers.lane.run(assignment("second"))) == ["completed", "completed"]

    assert len(run(scenario).launches) == 3


def test_trials_that_kill_their_workers_again_and_again_do_not_cost_a_good_one() -> None:
    async def act(worker: Worker, assigned: RankAssignment) -> Report:
        assert assigned.assignment is not None
        if label_of(assigned).startswith("dies"):
            raise asyncio.CancelledError
        return await worker.deliver(assigned)

    async def scenario(workers: Workers) -> None:
        for number in range(lane_module.MOST_LOSSES + 1):
            assert (await workers.lane.run(assignment(f"dies-{number}"))).failure
        assert statuses(await workers.lane.run(assignment("good"))) == ["completed", "completed"]

    assert len(run(scenario, act).launches) == 2  # and the workers' own driver was replaced once


def test_a_dead_worker_is_found_behind_the_error_of_the_rank_that_missed_it() -> None:
    """The connection breaks at once; Ray Train asks its workers every two seconds."""

    async def act(worker: Worker, assigned: RankAssignment) -> Report:
        assert assigned.assignment is not None
        if label_of(assigned) != "killed":
            return await worker.deliver(assigned)
        if assigned.rank == 1:
            worker.workers.dead.add(worker.number)
            await asyncio.sleep(HANGS_S)
        broken = crashed(0, "rank 0: RuntimeError: Connection closed by peer")
        worker.workers.lane.failing(worker.group, assigned.number, broken, keeps_group=False)
        return await worker.deliver(assigned, broken)

    async def scenario(workers: Workers) -> None:
        answer = await workers.lane.run(assignment("killed"))
        (death,) = answer.deaths
        assert (death.rank, death.node_id, death.why) == (1, "id0", "it has died") and death.pid == 1
        workers.dead.clear()
        after = await workers.lane.run(assignment("next"))
        assert statuses(after) == ["completed", "completed"] and not after.deaths

    assert run(scenario, act).probed == [1], "a rank that reported lives"


def test_what_train_says_of_the_dead_is_not_asked_again() -> None:
    async def act(worker: Worker, assigned: RankAssignment) -> Report:
        await asyncio.sleep(HANGS_S)
        return CLEAN

    async def scenario(workers: Workers) -> None:
        pending = asyncio.create_task(workers.lane.run(assignment("dies")))
        await asyncio.sleep(0.1)
        assert workers.lane.lost(1, "worker 1 of the group: killed", {1: "killed"})
        answer = await pending
        assert [(one.rank, one.why) for one in answer.deaths] == [(1, "killed")] and answer.infra is None

    assert run(scenario, act).probed == []


def test_workers_that_do_not_start_are_a_failure_of_the_cluster() -> None:
    async def scenario(workers: Workers) -> None:
        workers.fails = ["no resources"] * 9
        answer = await workers.lane.run(assignment("a"))
        assert answer.infra is Cause.PLACEMENT and "no resources" in answer.failure

    run(scenario)

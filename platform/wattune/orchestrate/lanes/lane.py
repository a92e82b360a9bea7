"""A lane: warm workers on one set of nodes that run one trial after another. The logic alone, without Ray.

States of a group of workers:

    none --_start_run--> starting --all workers wait--> idle --run()--> busy --trial over--> settling
                             ^                           ^                                      |
                             |                           +--------------- clean ----------------+
                             +--Ray Train starts other workers-- lost <--_lose-- any state
    none <--_end_run-- any state

A group is lost when a worker dies, hangs, keeps memory, or does not leave its trial. After a trial that asked for fresh
workers Ray Train starts no others. `_end_run` ends workers that the next trial cannot use, and all of them at the end.
Workers of the next trial's engine may start beside this one's. They touch no device before their `turn`.

States of a trial:

    running --every rank delivered---------------------------------------------> over
       +--a rank failed, or stop_trial()--> order "free" --ranks left, or FREE_S--> over
       +--a rank hangs, or nobody answers-> order "dump" --stacks came, or DUMP_S-> over
       +--the study stopped---------------> order "free" --ranks left, or LEAVE_S-> over, interrupted

Workers call `join`, `next_trial`, `deliver` and the rest. Drivers call `run` and `settle`. All of it is one event loop,
so nothing here needs a lock. Whatever happens to a trial, its driver gets an answer.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from wattune.errors import WattuneError
from wattune.orchestrate.events import TrialProgress
from wattune.orchestrate.failures import Cause
from wattune.orchestrate.lanes.changes import DUMP_S, END_S, FREE_S, LEAVE_S, LOOK_S, QUIT_S, Changes
from wattune.orchestrate.lanes.messages import (
    FINISH,
    Answer,
    Assignment,
    GroupKey,
    Places,
    RankAssignment,
    RankSlot,
    Report,
    WorkerPlace,
    part_of,
)
from wattune.orchestrate.lanes.worker_group import Group, Kill, LaneError, LaneRun, Launch, Probe, TrialOfGroup
from wattune.run import RunStatus
from wattune.workers.outcome import RankOutcome
from wattune.workers.watchdog import Order

UNANIMOUS_S: Final = 2.0
"""Time the other ranks get to report a failure themselves, before they are ordered to leave."""
SETTLE_S: Final = 60.0
"""Longest workers may take to clean up after a trial."""
OVERTIME_S: Final = 60.0
"""Time a trial gets beyond `measure.timeout_s`, in case its own watchdogs do not answer."""
MOST_LOSSES: Final = 4
"""Groups lost in a row, without one trial that all ranks answered, after which the lane stops waiting."""


class Lane(Changes):
    """Groups of workers for one set of nodes, one at a time, and the trials that wait for them."""

    def __init__(self, nodes: tuple[str, ...], launch: Launch, kill: Kill, probe: Probe) -> None:
        """Starts nothing on these nodes: Ray's ids, in the plan's order."""
        super().__init__()
        self.nodes = nodes
        self._launch, self._kill, self._probe_worker = launch, kill, probe
        self._one_at_a_time = asyncio.Lock()
        self._run: LaneRun | None = None
        self._next: LaneRun | None = None  # whose workers wait for the end of those of `_run`
        self._group: Group | None = None
        self._num_runs = self._num_groups = self._num_losses = 0
        self._lost_reason = ""
        self._lost_s: float | None = None
        self._placing_s = 0.0  # that the trial whose turn it is has waited for its nodes
        self._settling: asyncio.Task[str] | None = None
        self._window, self._num_next = "", 0  # whose measured steps may begin, and how many wait for the lane
        self._closed: str | None = None
        self._interrupts = False

    # ---- calls of drivers

    async def run(self, assignment: Assignment) -> Answer:
        """Runs a trial, after those that were asked for before it."""
        async with self._turn():
            begun_s, before, self._placing_s = time.monotonic(), self._run, 0.0
            try:
                group = await self._group_for(assignment)
                waited_s, start_s = self._placing_s, time.monotonic() - begun_s - self._placing_s
                restart_s, self._lost_s = group.restart_s(self._lost_s), None
                trial = group.begin(assignment)
                if self._next is None and (then := assignment.attempt.then) is not None:
                    self._next = self._start_run(GroupKey.of(then, dict(assignment.key.resources)), restarts=True)
            except WattuneError as error:
                infra, late_s = Cause.PLACEMENT if self._closed is None else Cause.NODE_LOST, self._placing_s
                start_s, why, stops = time.monotonic() - begun_s - late_s, str(error), self._interrupts
                return Answer(failure=why, infra=infra, interrupted=stops, group_start_s=start_s, node_wait_s=late_s)
            self._notify()
            await self._watch(group, trial)
            # The driver reads telemetry while the workers clean up: it is answered before they are done.
            self._settling = asyncio.create_task(self._settle(group, trial, fresh=assignment.fresh))
            return replace(
                trial.answer,
                failure="" if trial.answered and not trial.interrupted else self._closed or group.lost or "",
                infra=None if self._closed is None else Cause.NODE_LOST,
                deaths=group.deaths(trial),
                group_start_s=start_s,
                node_wait_s=waited_s,
                restart_s=restart_s,
                warm=before is not None and before is self._run,
            )

    def prepare(self, key: GroupKey) -> None:
        """Starts workers for the first trial before it is there."""
        if self._run is None and self._closed is None:
            self._run = self._start_run(key, restarts=True)

    async def settle(self) -> str:
        """Waits until the last trial is cleaned up; returns the reason it cost its group, empty if it did not."""
        return "" if self._settling is None else await asyncio.shield(self._settling)

    def open_window(self, window: str) -> None:
        """Lets measured steps begin, `Assignment.window`, whose trial may wait for its workers yet."""
        self._window = window
        self._notify()

    def stop_trial(self, name: str, reason: str) -> bool:
        """Ends a running trial as `aborted`; returns whether it was running."""
        trial = self._running(name)
        if trial is None or trial.cause is not None:
            return False
        outcome = RankOutcome(rank=-1, status=RunStatus.ABORTED, reason=reason, end_mono_ns=time.monotonic_ns())
        trial.fail(outcome, keeps_group=True, notified=True)
        self._notify()
        return True

    def progress(self) -> dict[str, TrialProgress]:
        """Progress of the running trial, by its name."""
        trial = self._group.trial if self._group is not None else None
        return {} if trial is None or trial.closed or trial.name is None else {trial.name: trial.progress}

    def spans(self, name: str) -> dict[int, pa.Table]:
        """The last seconds of a running trial's ranks, by rank."""
        return dict(trial.spans) if (trial := self._running(name)) is not None else {}

    async def make_room(self) -> None:
        """Ends the workers once the running trial is done; the next trial here starts new ones."""
        async with self._turn():
            await self.settle()
            await self._end_run()

    async def close(self, reason: str, *, interrupts: bool = False) -> None:
        """Ends everything; trials that run or wait are answered with the reason.

        `interrupts` says that whoever continues the study runs them again.
        """
        self._closed, self._interrupts = reason, interrupts
        self._notify()
        await self._end_run(QUIT_S if interrupts else None)

    # ---- calls of workers

    async def turn(self, run: int) -> bool:
        """Waits until workers of a run may use their devices; returns whether they are wanted."""
        while (found := self._run_of(run)) is not None and found is self._next and not found.ending:
            await self._told.wait()
        return found is not None and not found.ending

    def join(self, run: int, worker: WorkerPlace) -> int:
        """Takes a worker into its group; returns the group's number, -1 if the worker is not wanted any more."""
        if self._run is None or self._run.number != run or self._run.ending:
            return -1
        group = self._group
        # Another process of a number that has joined: the old group is gone, though nobody has said so yet.
        if group is None or group.lost or group.workers.get(worker.number, worker).pid != worker.pid:
            if group is not None:
                self._lose(group, "a worker ended without reporting")
            self._num_groups += 1
            group = self._group = Group(number=self._num_groups, key=self._run.key)
        group.workers[worker.number] = worker
        self._notify(workers=False)
        return group.number

    async def next_trial(self, group_number: int, worker: int, report: Report | None) -> RankAssignment | None:
        """Waits for a worker's part in the next trial; None tells the worker to end."""
        told = await self.next_trials([(group_number, worker, report)])
        return None if told is None else part_of(told[0], told[1][0])

    async def next_trials(self, several: Sequence[Sequence[Any]]) -> tuple[RankAssignment, list[RankSlot]] | None:
        """See `next_trial`; workers of one group, answered together with one part, and the rank and slot of each."""
        if (group := self._known(several[0][0])) is None:
            return None
        after = max(0 if report is None else report.after for _, _, report in several)
        group.reports |= {worker: report for _, worker, report in several}
        group.ready_s = time.monotonic() if group.ready_s is None and group.idle else group.ready_s
        self._notify(workers=False)

        def ending() -> bool:
            return group.lost is not None or self._run is None or self._run.ending

        await self._until_told(lambda: ending() or group.offered(after) is not None)
        if (trial := group.offered(after)) is None or ending():
            return None
        for _, worker, _ in several:
            group.reports.pop(worker, None)  # a call made again may have been first
            group.taken[worker] = trial.number
        self._notify(workers=False)
        return trial.part, [trial.ranks[worker] for _, worker, _ in several]

    async def await_window(self, group_number: int, number: int) -> None:
        """Waits until a trial's measured steps may begin, or it is to end."""
        trial, group = self._trial(group_number, number), self._known(group_number)
        if trial is not None and group is not None and trial.assignment is not None:
            window = trial.assignment.window  # where another trial waits for the lane, this one's driver has died
            await self._until_told(
                lambda: bool(window == self._window or self._num_next or trial.stop_order or trial.closed or group.lost)
            )

    def failing(self, group_number: int, number: int, outcome: RankOutcome, *, keeps_group: bool) -> None:
        """Notes that a rank failed and has not left the trial yet: the others may be waiting for it."""
        if (trial := self._trial(group_number, number)) is not None:
            trial.fail(outcome, keeps_group=keeps_group, notified=True)
            self._notify(workers=False)

    def deliver(self, group_number: int, number: int, outcome: RankOutcome, where: Places) -> None:
        """Takes a rank's outcome; only the first one counts."""
        if (trial := self._trial(group_number, number)) is not None:
            trial.deliver(outcome, where)
            self._notify(workers=False)

    def delivered(self, group_number: int, number: int, *told: Any) -> None:
        """Takes outcomes of ranks of posts: see `TrialOfGroup.take`."""
        if (trial := self._trial(group_number, number)) is not None:
            trial.take(*told)
            self._notify(workers=False)

    def hung(self, group_number: int, number: int, outcome: RankOutcome, stacks: str) -> None:
        """Notes a rank whose watchdog found that it hangs, and its stacks."""
        if (trial := self._trial(group_number, number)) is not None:
            trial.stacks[outcome.rank] = stacks
            trial.outcomes.setdefault(outcome.rank, outcome)
            trial.fail(outcome, keeps_group=False)
            self._notify(workers=False)

    def report_stacks(self, group_number: int, number: int, rank: int, stacks: str) -> None:
        """Takes the stacks of a rank that was ordered to dump them."""
        if (trial := self._trial(group_number, number)) is not None:
            trial.stacks[rank] = stacks
            self._notify(workers=False)

    async def stop_order(self, group_number: int, number: int) -> Order | None:
        """Waits for an order to a rank's watchdog; None means that the trial is over."""
        trial, group = self._trial(group_number, number), self._known(group_number)
        if trial is None or group is None:
            return None
        await self._until_told(lambda: trial.stop_order is not None or trial.closed or group.lost is not None)
        return None if trial.closed else trial.stop_order

    def report(self, group_number: int, number: int, part: str, step: int, num_steps: int | None) -> None:
        """Takes the progress of a trial, from its rank 0. After `FINISH` a command's other nodes are done too."""
        if (trial := self._trial(group_number, number)) is not None:
            trial.progress = TrialProgress(part=part, done=step, total=num_steps)
            if part == FINISH:
                self._order(trial, Order("finish", ""))

    def show(self, group_number: int, number: int, rank: int, spans: pa.Table) -> None:
        """Takes the last seconds of a rank."""
        if (trial := self._trial(group_number, number)) is not None:
            trial.spans[rank] = spans

    def place(self, number: int, *times_s: float) -> bool:
        """Notes from when to when workers wait for their place, in whose thread; returns whether they are wanted."""
        run = self._run_of(number)
        if run is not None and times_s:
            run.asked_s, run.placed_s = times_s
        return run is not None and not run.ending

    def lost(self, run: int, reason: str, died: Mapping[int, str] | None = None) -> bool:
        """Notes that Ray Train lost workers, some of which `died`; returns whether it may start new ones by itself."""
        if self._run is None or self._run.number != run:
            return False
        if self._group is not None:
            self._group.died |= dict(died or {}) if self._group.lost is None else {}  # later it may have ended them
            self._lose(self._group, reason)
        return True

    # ---- inside

    def _run_of(self, number: int) -> LaneRun | None:
        return next((one for one in (self._run, self._next) if one is not None and one.number == number), None)

    def _known(self, number: int) -> Group | None:
        return self._group if self._group is not None and self._group.number == number else None

    def _trial(self, group_number: int, number: int) -> TrialOfGroup | None:
        # Calls of an earlier group or trial may arrive late: they find nothing.
        trial = group.trial if (group := self._known(group_number)) is not None else None
        return trial if trial is not None and trial.number == number and not trial.closed else None

    def _running(self, name: str) -> TrialOfGroup | None:
        trial = self._group.trial if self._group is not None else None
        return trial if trial is not None and not trial.closed and trial.name == name else None

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        self._num_next += 1
        self._notify()
        async with self._one_at_a_time:
            self._num_next -= 1
            yield

    # ---- the life of a group

    async def _group_for(self, assignment: Assignment) -> Group:
        """Finds workers for a trial, and starts them if none fit."""
        await self.settle()
        await self._end_unfit(assignment)
        tolerated = self._num_losses + MOST_LOSSES
        while self._closed is None and self._num_losses < tolerated:
            run = self._run = self._run or self._start_run(assignment.key, restarts=not assignment.fresh)
            group = await self._first_ready(run, tolerated)
            if group is not None:
                return group
            await self._end_run()
        if self._closed is not None:
            raise LaneError(self._closed)
        raise LaneError(
            f"workers kept failing before they could start the trial, the last time because {self._lost_reason}; "
            "see their logs in Ray's folder while the study runs, and run `wattune doctor` on their nodes"
        )

    async def _end_unfit(self, assignment: Assignment) -> None:
        """Ends workers that a trial cannot use: of another kind, not fresh, or lost too often."""
        worn_out = self._num_losses >= MOST_LOSSES  # the state Ray Train keeps between groups may be part of the cause
        if self._run is not None and (assignment.fresh or worn_out or self._run.key != assignment.key):
            await self._end_run(then=None if assignment.fresh or worn_out else assignment.key)
        self._num_losses = 0 if worn_out else self._num_losses

    async def _first_ready(self, run: LaneRun, tolerated: int) -> Group | None:
        """Waits until all workers of a run are idle; None if the run has to be replaced."""
        begun_s, before_s, late = time.monotonic(), self._placing_s, ""
        while not await self._until(lambda: bool(self._ready() or self._gone(run, tolerated)), LOOK_S):
            if late := run.late(begun_s):
                break
        self._placing_s = before_s + run.waited_s(begun_s)
        if late and run.asked_s < run.placed_s == math.inf:
            await self._end_run()
            raise LaneError(late)
        group = self._ready()
        if group is not None and not self._gone(run, tolerated):
            return group
        if run.over is not None or self._num_losses < tolerated:
            # A run that never came to life takes minutes to say so: it is tried once more, not four times.
            self._lost_reason = run.over or late
            self._num_losses += MOST_LOSSES // 2
        return None

    def _ready(self) -> Group | None:
        group = self._group
        return group if group is not None and group.lost is None and group.idle else None

    def _gone(self, run: LaneRun, tolerated: int) -> bool:
        return run.over is not None or self._closed is not None or self._num_losses >= tolerated

    def _start_run(self, key: GroupKey, *, restarts: bool) -> LaneRun:
        number = self._num_runs = self._num_runs + 1
        coroutine = self._follow(number, key, self.nodes[: key.num_nodes], restarts=restarts)
        return LaneRun(number=number, key=key, task=asyncio.create_task(coroutine))

    async def _follow(self, number: int, key: GroupKey, nodes: tuple[str, ...], *, restarts: bool) -> None:
        why = "the workers ended by themselves"
        try:
            await self._launch(key, nodes, restarts, number)
        except Exception as error:  # Ray Train has no common class for a group that failed
            why = str(error)
        if (run := self._run_of(number)) is not None:
            run.over = why
            if self._group is not None and run is self._run and not run.ending:
                self._lose(self._group, why)
            self._notify()

    def _lose(self, group: Group, reason: str) -> None:
        if group.lost is None:
            group.lost = self._lost_reason = reason
            self._lost_s = time.monotonic()
            self._num_losses += 1
            self._notify()

    async def _end_run(self, patience_s: float | None = None, then: GroupKey | None = None) -> None:
        """Tells workers to end, but those of `then` that wait, and kills them after `patience_s` (half of `END_S`)."""
        group, runs = self._group, [one for one in (self._run, self._next) if one is not None and one.key != then]
        patience_s = END_S / 2 if patience_s is None else patience_s
        if not runs:
            return
        for run in runs:
            run.ending = True
        self._notify()
        if not await self._until(lambda: all(run.over is not None for run in runs), patience_s):
            for worker in group.workers.values() if group is not None else ():
                self._kill(worker)
            await self._until(lambda: all(run.over is not None for run in runs), patience_s)
        self._run = self._next if self._next not in runs and self._next and self._next.over is None else None
        self._next = self._group = None
        self._notify()

    # ---- the life of a trial

    async def _watch(self, group: Group, trial: TrialOfGroup) -> None:
        """Returns when nothing more is expected of a trial."""
        assert trial.assignment is not None
        timeout_s = trial.assignment.attempt.measure.timeout_s

        def decided() -> bool:
            return self._is_over(group, trial) or trial.cause is not None

        if not await self._until(decided, timeout_s + OVERTIME_S):
            reason = f"longer than measure.timeout_s = {timeout_s:g}, and its watchdogs do not answer"
            outcome = RankOutcome(rank=-1, status=RunStatus.TIMED_OUT, reason=reason, end_mono_ns=0)
            trial.fail(outcome, keeps_group=False)
        trial.interrupted = self._interrupts and not trial.answered
        if trial.interrupted and group.lost is None:
            self._order(trial, Order("free", self._closed or ""))
            await self._until(lambda: trial.answered or group.lost is not None, LEAVE_S)
        elif trial.cause is not None and not self._is_over(group, trial):
            await self._clear_out(group, trial, trial.cause)
        if trial.answered:
            self._num_losses = 0
        elif not trial.interrupted and self._closed is None and not group.died:
            await group.find_deaths(trial, self._probe_worker)
        trial.closed = True
        self._notify()

    async def _clear_out(self, group: Group, trial: TrialOfGroup, cause: RankOutcome) -> None:
        """Gets the ranks out of a trial that cannot go on."""

        def over() -> bool:
            return self._is_over(group, trial)

        if cause.status is RunStatus.TIMED_OUT:
            # Hung ranks cannot leave: their processes are ended, and before that they show where they hang.
            self._order(trial, Order("dump", cause.reason))
            await self._until(lambda: over() or len(trial.stacks) == len(trial.ranks), DUMP_S)
        elif trial.notified or not await self._until(over, UNANIMOUS_S):
            # The others may be inside a collective that waits for the failed rank.
            self._order(trial, Order("free", cause.reason))
            await self._until(over, FREE_S if trial.keeps_group else UNANIMOUS_S)

    def _is_over(self, group: Group, trial: TrialOfGroup) -> bool:
        return trial.answered or group.lost is not None or self._closed is not None

    def _order(self, trial: TrialOfGroup, order: Order) -> None:
        trial.stop_order = order  # the watchdogs of all ranks wait for it in `stop_order`
        self._notify()

    # ---- after a trial

    async def _settle(self, group: Group, trial: TrialOfGroup, *, fresh: bool) -> str:
        """Makes sure that the workers can run another trial, or ends them; returns the reason if it ends them."""
        if group.lost is None and self._closed is None:
            problem = await self._problem(group, trial)
            if problem is not None:
                self._lose(group, problem)
                for worker in group.workers.values():
                    self._kill(worker)
        lost = group.lost or ""
        if fresh:
            await self._end_run()
        return lost

    async def _problem(self, group: Group, trial: TrialOfGroup) -> str | None:
        """The reason a group must not run another trial; None if it may."""
        if not trial.answered:
            return f"{trial.cause.reason if trial.cause else 'a rank did not answer'} and not every rank left the trial"
        if not trial.keeps_group and trial.cause is not None:
            return trial.cause.reason
        if not await self._until(lambda: group.idle or group.lost is not None, SETTLE_S):
            return f"a worker did not clean up within {SETTLE_S:.0f} s"
        if group.problem is not None or trial.cause is None or group.lost is not None:
            return group.problem
        return await self._probe(group, trial)

    async def _probe(self, group: Group, trial: TrialOfGroup) -> str | None:
        """Tests that ranks which left a trial in disorder still find each other; returns the problem if they do not."""
        assert trial.assignment is not None
        probe = group.begin(trial.assignment, only_meet=True)
        self._notify()

        def tested() -> bool:
            return group.idle and all(group.taken.get(worker) == probe.number for worker in group.workers)

        answered = await self._until(lambda: tested() or group.lost is not None, SETTLE_S)
        probe.closed = True
        return group.problem if answered else "the ranks did not find each other again"

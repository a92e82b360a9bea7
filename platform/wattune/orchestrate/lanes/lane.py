"""A lane: warm workers on one set of nodes that run one trial after another. Its logic alone, without Ray.

Workers call `join`, `next_trial`, `deliver` and the rest, drivers call `run` and `settle`; all of it is one event loop,
so nothing here needs a lock. Whatever happens to a trial, its driver gets an answer.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

import pyarrow as pa

from wattune.errors import WattuneError
from wattune.orchestrate.lanes.messages import (
    Answer,
    Assignment,
    GroupKey,
    Place,
    RankAssignment,
    Report,
    StopOrder,
    WorkerPlace,
)
from wattune.orchestrate.lanes.worker_group import Group, LaneError, Run, Trial, assign_ranks, without_work
from wattune.trial import TrialStatus
from wattune.workers.loop import RankOutcome

GROUP_START_S: Final = 300.0
"""Longest a group may take from its start to the last worker's word."""
FREE_S: Final = 20.0
"""How long ranks have to leave a trial that cannot go on; then their processes are ended."""
DUMP_S: Final = 5.0
"""How long ranks have to say where they hang."""
UNANIMOUS_S: Final = 2.0
"""How long the other ranks have to say by themselves what one said, before they are ordered to leave."""
SETTLE_S: Final = 60.0
"""How long workers have to clean up after a trial."""
OVERTIME_S: Final = 60.0
"""How much longer than `measure.timeout_s` a trial may take whose own watchdogs do not answer."""
END_S: Final = 60.0
"""How long a group may take to end."""
LEAVE_S: Final = 3.0
"""How long ranks have to leave a trial that was interrupted: whoever stops a study may kill what takes longer."""
QUIT_S: Final = 5.0
"""How long a group may take to end when its study was stopped; ended by force it takes as long again at most."""
MOST_LOSSES: Final = 4
"""Groups lost in a row, without one trial that all ranks answered, after which waiting is given up."""

Launch = Callable[[GroupKey, tuple[str, ...], bool, int], Awaitable[None]]
"""Starts workers for a key on nodes and returns when they have ended, or raises what they ended by; told whether others
may take their place, and the number of the run."""


class Lane:
    """Groups of workers for one set of nodes, one at a time, and the trials that wait for them."""

    def __init__(self, nodes: tuple[str, ...], launch: Launch, kill: Callable[[WorkerPlace], None]) -> None:
        """Starts nothing.

        Args:
            nodes: Ray's ids of the nodes, in the plan's order.
            launch: Starts workers.
            kill: Ends a worker's process at once.
        """
        self.nodes = nodes
        self._launch, self._kill = launch, kill
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._run: Run | None = None
        self._group: Group | None = None
        self._num_runs = self._num_groups = self._num_losses = 0
        self._lost_reason = ""
        self._lost_s: float | None = None
        self._settling: asyncio.Task[str] | None = None
        self._closed: str | None = None
        self._interrupts = False

    # ---- what drivers ask

    async def run(self, assignment: Assignment) -> Answer:
        """Runs a trial, after those that asked before."""
        async with self._turn:
            begun_s = time.monotonic()
            try:
                group = await self._group_for(assignment)
                start_s = time.monotonic() - begun_s
                restart_s, self._lost_s = self._restart_s(group), None
                trial = self._begin(group, assignment)
            except WattuneError as error:
                start_s = time.monotonic() - begun_s
                return Answer(failure=str(error), interrupted=self._interrupts, group_start_s=start_s)
            await self._watch(group, trial)
            self._settling = asyncio.create_task(self._settle(group, trial, fresh=assignment.fresh))
            return Answer(
                outcomes=tuple(trial.outcomes[rank] for rank in sorted(trial.outcomes)),
                cause=trial.cause,
                places=tuple(trial.places[rank] for rank in sorted(trial.places)),
                failure="" if trial.answered and not trial.interrupted else self._closed or group.lost or "",
                interrupted=trial.interrupted,
                stacks=trial.stacks,
                group_start_s=start_s,
                restart_s=restart_s,
                number=trial.number,
            )

    async def settle(self) -> str:
        """Waits until the last trial is cleaned up; says why it cost its group, empty where it did not."""
        return "" if self._settling is None else await asyncio.shield(self._settling)

    def stop_trial(self, name: str, reason: str) -> bool:
        """Ends a trial while it runs, as `aborted`; says whether it was running."""
        trial = self._running(name)
        if trial is None or trial.cause is not None:
            return False
        trial.cause = RankOutcome(rank=-1, status=TrialStatus.ABORTED, reason=reason, end_mono_ns=time.monotonic_ns())
        trial.notified = True
        self._poke()
        return True

    def progress(self) -> tuple[str, str, int, int | None] | None:
        """Name, part, step and number of steps of the trial that runs; None where none does."""
        trial = self._group.trial if self._group is not None else None
        if trial is None or trial.closed or trial.assignment is None:
            return None
        return trial.assignment.name, trial.part, trial.step, trial.num_steps

    def spans(self, name: str) -> dict[int, pa.Table]:
        """What the ranks of a trial that runs showed of their last seconds, by rank."""
        trial = self._running(name)
        return dict(trial.spans) if trial is not None else {}

    async def make_room(self) -> None:
        """Ends the workers once the trial that runs is done; the next trial here starts new ones."""
        async with self._turn:
            await self.settle()
            await self._end_run()

    async def close(self, reason: str, *, interrupts: bool = False) -> None:
        """Ends everything: what runs or waits is answered with the reason.

        Args:
            reason: Why.
            interrupts: Whether trials are to be run again by whoever continues the study.
        """
        self._closed, self._interrupts = reason, interrupts
        self._poke()
        await self._end_run(QUIT_S if interrupts else None)

    # ---- what workers say

    def join(self, run: int, seat: WorkerPlace) -> int:
        """A worker says that it is there.

        Returns:
            The number of its group; -1 where it is not wanted any more.
        """
        if self._run is None or self._run.number != run or self._run.ending:
            return -1
        group = self._group
        if group is None or group.lost is not None or seat.number in group.seats:
            if group is not None:
                self._lose(group, "a worker ended without a word")
            self._num_groups += 1
            group = self._group = Group(number=self._num_groups, key=self._run.key)
        group.seats[seat.number] = seat
        self._poke()
        return group.number

    async def next_trial(self, group_number: int, seat: int, report: Report | None) -> RankAssignment | None:
        """A worker waits for its part in the next trial; None: it is to end."""
        group = self._known(group_number)
        if group is None:
            return None
        group.reports[seat] = report
        if group.ready_s is None and group.idle:
            group.ready_s = time.monotonic()
        self._poke()

        def offered() -> Trial | None:
            trial = group.trial
            new = trial is not None and not trial.closed and trial.number > group.taken.get(seat, 0)
            return trial if new else None

        def ending() -> bool:
            return group.lost is not None or self._run is None or self._run.ending

        await self._until(lambda: ending() or offered() is not None)
        trial = offered()
        if ending() or trial is None:
            return None
        del group.reports[seat]
        group.taken[seat] = trial.number
        self._poke()
        return trial.ranks[seat]

    def failing(self, group_number: int, number: int, outcome: RankOutcome, *, keeps_group: bool) -> None:
        """A rank failed and has not left the trial yet: the others may be waiting for it."""
        trial = self._trial(group_number, number)
        if trial is not None and trial.cause is None:
            trial.cause, trial.notified, trial.keeps_group = outcome, True, keeps_group
            self._poke()

    def deliver(self, group_number: int, number: int, outcome: RankOutcome, where: Place | None) -> None:
        """A rank brings home what it has; it has nothing better to say later."""
        trial = self._trial(group_number, number)
        if trial is None:
            return
        trial.outcomes.setdefault(outcome.rank, outcome)
        if where is not None:
            trial.places[outcome.rank] = where
        stands = trial.cause is None or trial.cause.status is TrialStatus.COMPLETED  # so far only a profile has failed
        if outcome.status is not TrialStatus.COMPLETED and stands:
            trial.cause = outcome
        elif trial.cause is not None and (trial.cause.rank, trial.cause.status) == (outcome.rank, outcome.status):
            trial.cause = outcome  # the same failure, in more words now that there is time for them
        self._poke()

    def hung(self, group_number: int, number: int, outcome: RankOutcome, stacks: str) -> None:
        """A rank's watchdog says that it hangs, and where."""
        trial = self._trial(group_number, number)
        if trial is None:
            return
        trial.stacks[outcome.rank] = stacks
        trial.outcomes.setdefault(outcome.rank, outcome)
        if trial.cause is None:
            trial.cause, trial.keeps_group = outcome, False
        self._poke()

    def told_stacks(self, group_number: int, number: int, rank: int, stacks: str) -> None:
        """A rank says where it is."""
        trial = self._trial(group_number, number)
        if trial is not None:
            trial.stacks[rank] = stacks
            self._poke()

    async def halt(self, group_number: int, number: int) -> StopOrder | None:
        """A rank's watchdog waits for an order; None: the trial is over."""
        trial = self._trial(group_number, number)
        group = self._known(group_number)
        if trial is None or group is None:
            return None
        await self._until(lambda: trial.halt is not None or trial.closed or group.lost is not None)
        return None if trial.closed else trial.halt

    def tell(self, group_number: int, number: int, part: str, step: int, num_steps: int | None) -> None:
        """Rank 0 says how far it is."""
        trial = self._trial(group_number, number)
        if trial is not None:
            trial.part, trial.step, trial.num_steps = part, step, num_steps

    def show(self, group_number: int, number: int, rank: int, spans: pa.Table) -> None:
        """A rank shows what it did in its last seconds."""
        trial = self._trial(group_number, number)
        if trial is not None:
            trial.spans[rank] = spans

    def lost(self, run: int, reason: str) -> bool:
        """Ray Train says that workers failed; says whether it may start new ones by itself."""
        if self._run is None or self._run.number != run:
            return False
        if self._group is not None:
            self._lose(self._group, reason)
        return True

    # ---- inside

    def _known(self, number: int) -> Group | None:
        return self._group if self._group is not None and self._group.number == number else None

    def _trial(self, group_number: int, number: int) -> Trial | None:
        group = self._known(group_number)
        trial = group.trial if group is not None else None
        return trial if trial is not None and trial.number == number and not trial.closed else None

    def _running(self, name: str) -> Trial | None:
        trial = self._group.trial if self._group is not None else None
        if trial is None or trial.closed or trial.assignment is None or trial.assignment.name != name:
            return None
        return trial

    def _poke(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits until a condition holds; says whether it does."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            return condition()
        return True

    def _lose(self, group: Group, reason: str) -> None:
        if group.lost is None:
            group.lost = self._lost_reason = reason
            self._lost_s = time.monotonic()
            self._num_losses += 1
            self._poke()

    def _kill_group(self, group: Group, reason: str) -> None:
        self._lose(group, reason)
        for seat in group.seats.values():
            self._kill(seat)

    async def _group_for(self, assignment: Assignment) -> Group:
        """Workers for a trial, started where there are none that fit.

        Raises:
            LaneError: There will be none.
        """
        await self.settle()
        worn_out = self._num_losses >= MOST_LOSSES  # whatever Ray Train keeps between groups may be part of it
        if self._run is not None and (assignment.fresh or worn_out or self._run.key != assignment.key):
            await self._end_run()
        self._num_losses = 0 if worn_out else self._num_losses
        tolerated = self._num_losses + MOST_LOSSES
        while self._closed is None and self._num_losses < tolerated:
            run = self._run or self._start_run(assignment)

            def decided(run: Run = run) -> bool:
                return self._ready() is not None or self._gone(run, tolerated)

            await self._until(decided, GROUP_START_S)
            group = self._ready()
            if group is not None and not self._gone(run, tolerated):
                return group
            if run.over is not None or self._num_losses < tolerated:
                # A run that never came to life takes minutes to say so: it is tried once more, not four times.
                self._lost_reason = run.over or f"they were not there within {GROUP_START_S:.0f} s"
                self._num_losses += MOST_LOSSES // 2
            await self._end_run()
        if self._closed is not None:
            raise LaneError(self._closed)
        raise LaneError(
            f"workers were lost again and again before they could take the trial, at last because {self._lost_reason}; "
            "see their logs in Ray's session folder, and `wattune doctor` on their nodes"
        )

    def _restart_s(self, group: Group) -> float | None:
        """How long there were no workers because some were lost; None where none were."""
        return None if self._lost_s is None or group.ready_s is None else max(group.ready_s - self._lost_s, 0.0)

    def _ready(self) -> Group | None:
        group = self._group
        return group if group is not None and group.lost is None and group.idle else None

    def _gone(self, run: Run, tolerated: int) -> bool:
        return run.over is not None or self._closed is not None or self._num_losses >= tolerated

    def _start_run(self, assignment: Assignment) -> Run:
        self._num_runs += 1
        number = self._num_runs
        nodes = self.nodes[: assignment.key.num_nodes]
        coroutine = self._follow(number, assignment.key, nodes, restarts=not assignment.fresh)
        run = self._run = Run(number=number, key=assignment.key, task=asyncio.create_task(coroutine))
        self._group = None
        return run

    async def _follow(self, number: int, key: GroupKey, nodes: tuple[str, ...], *, restarts: bool) -> None:
        why = "the workers ended by themselves"
        try:
            await self._launch(key, nodes, restarts, number)
        except Exception as error:  # Ray Train has no common class for a group that failed
            why = str(error)
        if self._run is not None and self._run.number == number:
            self._run.over = why
            if self._group is not None and not self._run.ending:
                self._lose(self._group, why)
            self._poke()

    async def _end_run(self, patience_s: float | None = None) -> None:
        """Ends the workers: they are told, and after `patience_s` (half of `END_S`) killed."""
        run, group = self._run, self._group
        patience_s = END_S / 2 if patience_s is None else patience_s
        if run is None:
            return
        run.ending = True
        self._poke()
        if not await self._until(lambda: run.over is not None, patience_s):
            for seat in group.seats.values() if group is not None else ():
                self._kill(seat)
            await self._until(lambda: run.over is not None, patience_s)
        self._run = self._group = None
        self._poke()

    def _begin(self, group: Group, assignment: Assignment) -> Trial:
        group.num_trials += 1
        ranks = assign_ranks(assignment, group.seats, number=group.num_trials, meeting=f"trial-{group.num_trials}")
        trial = group.trial = Trial(number=group.num_trials, assignment=assignment, ranks=ranks)
        self._poke()
        return trial

    async def _watch(self, group: Group, trial: Trial) -> None:
        """Returns when nothing more is to be expected of a trial."""
        assert trial.assignment is not None

        def over() -> bool:
            return trial.answered or group.lost is not None or self._closed is not None

        longest_s = trial.assignment.measure.timeout_s + OVERTIME_S
        in_time = await self._until(lambda: over() or trial.cause is not None, longest_s)
        if not in_time:
            reason = (
                f"longer than measure.timeout_s = {trial.assignment.measure.timeout_s:g}, and its watchdogs are silent"
            )
            trial.cause = RankOutcome(rank=-1, status=TrialStatus.TIMED_OUT, reason=reason, end_mono_ns=0)
            trial.keeps_group = False
        trial.interrupted = self._interrupts and not trial.answered
        cause = trial.cause
        if trial.interrupted and group.lost is None:
            trial.halt = StopOrder("free", self._closed or "")
            self._poke()
            await self._until(lambda: trial.answered or group.lost is not None, LEAVE_S)
        elif cause is not None and not over():
            if cause.status is TrialStatus.TIMED_OUT:
                trial.halt = StopOrder("dump", cause.reason)
                self._poke()
                await self._until(lambda: over() or len(trial.stacks) == len(trial.ranks), DUMP_S)
            elif trial.notified or not await self._until(over, UNANIMOUS_S):
                trial.halt = StopOrder("free", cause.reason)
                self._poke()
                await self._until(over, FREE_S if trial.keeps_group else UNANIMOUS_S)
        if trial.answered:
            self._num_losses = 0
        trial.closed = True
        self._poke()

    async def _settle(self, group: Group, trial: Trial, *, fresh: bool) -> str:
        """Makes sure that the workers can run another trial, or ends them."""
        if group.lost is None and self._closed is None:
            problem = await self._problem(group, trial)
            if problem is not None:
                self._kill_group(group, problem)
        lost = group.lost or ""
        if fresh:
            await self._end_run()
        return lost

    async def _problem(self, group: Group, trial: Trial) -> str | None:
        """Why a group must not run another trial."""
        if not trial.answered:
            return f"{trial.cause.reason if trial.cause else 'a rank said nothing'} and not every rank left the trial"
        if not trial.keeps_group and trial.cause is not None:
            return trial.cause.reason
        if not await self._until(lambda: group.idle or group.lost is not None, SETTLE_S):
            return f"a worker did not clean up within {SETTLE_S:.0f} s"
        if group.problem is not None or trial.cause is None or group.lost is not None:
            return group.problem
        # The ranks left in disorder: whether they still find each other is tried, not hoped.
        group.num_trials += 1
        assert trial.assignment is not None
        ranks = assign_ranks(trial.assignment, group.seats, number=0, meeting=f"trial-{group.num_trials}")
        group.trial = Trial(
            number=group.num_trials,
            assignment=None,
            ranks={seat: without_work(rank) for seat, rank in ranks.items()},
        )
        self._poke()
        seats, number = group.seats, group.num_trials

        def tried() -> bool:
            return group.idle and all(group.taken.get(seat) == number for seat in seats)

        answered = await self._until(lambda: tried() or group.lost is not None, SETTLE_S)
        group.trial.closed = True
        return group.problem if answered else "the ranks did not find each other again"

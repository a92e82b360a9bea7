"""State of one group of a lane's workers, and of the trial it runs, without Ray."""

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from wattune.errors import EngineError
from wattune.orchestrate.events import TrialProgress
from wattune.orchestrate.lanes.messages import (
    Answer,
    Assignment,
    Death,
    GroupKey,
    Place,
    RankAssignment,
    RankSlot,
    Report,
    WorkerPlace,
    sent,
)
from wattune.plans.axes import DEGREES
from wattune.plans.placement import Slot, place
from wattune.plans.program import is_command
from wattune.run import RunStatus
from wattune.trial import TrialSpec
from wattune.workers.outcome import RankOutcome
from wattune.workers.watchdog import Order

Launch = Callable[[GroupKey, tuple[str, ...], bool, int], Awaitable[None]]
"""Starts workers for a key on nodes; returns when they exit, raises their error.

The third argument says whether Ray Train may replace lost workers, the fourth is the number of the run.
"""

Kill = Callable[[WorkerPlace], None]
"""Ends a worker's process at once."""

Probe = Callable[[WorkerPlace], Awaitable[str]]
"""Returns Ray's words about a worker whose process has ended; empty while it lives."""

GROUP_START_S: Final = 300.0
"""Longest a group may take from its start until its last worker has joined, without its wait for a place."""
PLACE_S: Final = 2.0
"""Longest that a place on free nodes takes; what takes longer is a wait for nodes."""
GIVE_BACK_S: Final = 30.0
"""Longest a trial waits for nodes that another job took after they were chosen for it; then it may start on others."""
PROBE_S: Final = 5.0
"""Longest a worker that reported nothing may take to show that its process lives."""


class LaneError(EngineError):
    """A lane that cannot run an assignment."""


@dataclass(slots=True)
class TrialOfGroup:
    """One trial that a group runs."""

    number: int
    assignment: Assignment | None
    part: RankAssignment
    """That of rank 0."""
    ranks: dict[int, RankSlot]
    """By number of the worker."""
    completed: set[int] = field(default_factory=set)
    """Ranks whose outcomes their posts hold."""
    outcomes: dict[int, RankOutcome] = field(default_factory=dict)
    """By rank, as are the next three."""
    places: dict[int, Place] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    spans: dict[int, pa.Table] = field(default_factory=dict)
    """The last seconds of each rank."""
    held: dict[int, Any] = field(default_factory=dict)
    """References to what posts hold, by the first rank of each: after the end of a post they come again."""
    cause: RankOutcome | None = None
    keeps_group: bool = True
    """Workers can be used again after `cause`."""
    notified: bool = False
    """`cause` came from a rank that the others may be waiting for."""
    stop_order: Order | None = None
    interrupted: bool = False
    """The study ended before every rank had delivered its outcome."""
    progress: TrialProgress = field(default_factory=lambda: TrialProgress(part="start"))
    closed: bool = False

    @property
    def answered(self) -> bool:
        """True once every rank has delivered its outcome."""
        return len(self.heard) == len(self.ranks)

    @property
    def heard(self) -> set[int]:
        """Ranks that have delivered."""
        return self.completed | self.outcomes.keys()

    @property
    def answer(self) -> Answer:
        """Answer of its ranks; the lane knows the rest."""
        return Answer(
            outcomes=tuple(self.outcomes[rank] for rank in sorted(self.outcomes)),
            completed=frozenset(self.completed),
            cause=self.cause,
            places=tuple(self.places[rank] for rank in sorted(self.places)),
            held=tuple(self.held.values()),
            interrupted=self.interrupted,
            stacks=self.stacks,
            number=self.number,
        )

    @property
    def name(self) -> str | None:
        """Name of the assignment; None where the ranks only test that they find each other."""
        return None if self.assignment is None else self.assignment.attempt.name

    def fail(self, outcome: RankOutcome, *, keeps_group: bool, notified: bool = False) -> None:
        """Takes a failure as the trial's cause, unless there is an earlier one.

        `notified` says that the other ranks may be waiting for the rank that failed.
        """
        if self.cause is None:
            self.cause, self.keeps_group, self.notified = outcome, keeps_group, notified

    def deliver(self, outcome: RankOutcome, where: Place | Sequence[Place] | None) -> None:
        """Takes a rank's outcome; only the first one of a rank counts. A command's node tells several places."""
        self.outcomes.setdefault(outcome.rank, outcome)
        if isinstance(where, Place):
            self.places[outcome.rank] = where
        self.places |= {} if where is None or isinstance(where, Place) else {place.rank: place for place in where}
        stands = self.cause is None or self.cause.status is RunStatus.COMPLETED  # so far only a profile has failed
        if outcome.status is not RunStatus.COMPLETED and stands:
            self.cause = outcome
        elif self.cause is not None and (self.cause.rank, self.cause.status) == (outcome.rank, outcome.status):
            self.cause = outcome  # the same failure, now with its full description

    def take(self, ranks: Sequence[int], others: Sequence[tuple[RankOutcome, Place | None]], held: Any) -> None:
        """Takes what a post tells of its ranks: those that completed, outcomes and places of others, what it holds."""
        for outcome, where in others:
            self.deliver(outcome, where)
        self.completed.update(ranks)
        self.held[min((*ranks, *(outcome.rank for outcome, _ in others)))] = held


@dataclass(slots=True)
class Group:
    """One set of worker processes, from the first that joins until one of them is lost."""

    number: int
    key: GroupKey
    workers: dict[int, WorkerPlace] = field(default_factory=dict)
    """By number, as are the next two."""
    reports: dict[int, Report | None] = field(default_factory=dict)
    """Of the workers that wait for a trial."""
    taken: dict[int, int] = field(default_factory=dict)
    """The last trial each worker took."""
    trial: TrialOfGroup | None = None
    num_trials: int = 0
    ready_s: float | None = None
    """Time at which all workers first waited for a trial."""
    lost: str | None = None
    """The reason it cannot run anything any more."""
    died: dict[int, str] = field(default_factory=dict)
    """Ray's words about workers whose process ended by itself, by number."""

    @property
    def complete(self) -> bool:
        """True once all its workers have joined."""
        return len(self.workers) == self.key.world_size

    @property
    def idle(self) -> bool:
        """True while all its workers wait for a trial."""
        return self.complete and len(self.reports) == self.key.world_size

    def restart_s(self, lost_s: float | None) -> float | None:
        """Seconds without workers since the loss of a group; None if none was lost."""
        return None if lost_s is None or self.ready_s is None else max(self.ready_s - lost_s, 0.0)

    @property
    def problem(self) -> str | None:
        """The reason a waiting worker must not run another trial; None if all may."""
        found = (report.problem for report in self.reports.values() if report is not None)
        return next(filter(None, found), None)

    async def find_deaths(self, trial: TrialOfGroup, probe: Probe) -> None:
        """Finds workers that died, where Ray Train has not said so yet: another rank's error may be first."""

        async def ask(worker: WorkerPlace) -> None:
            try:
                async with asyncio.timeout(PROBE_S):
                    why = await probe(worker)
            except TimeoutError:  # it hangs, which is no death
                return
            if why:
                self.died.setdefault(worker.number, why)

        heard = trial.heard
        silent = [number for number, (rank, *_) in trial.ranks.items() if rank not in heard]
        await asyncio.gather(*(ask(self.workers[number]) for number in silent))

    def deaths(self, trial: TrialOfGroup) -> tuple[Death, ...]:
        """Returns the workers that died before they delivered their outcome of a trial."""
        heard = trial.heard
        places = ((trial.ranks[number][0], self.workers[number], why) for number, why in sorted(self.died.items()))
        return tuple(
            Death(rank=rank, node_id=place.node_id, pid=place.pid, why=why)
            for rank, place, why in places
            if rank not in heard
        )

    def offered(self, after: int) -> TrialOfGroup | None:
        """Returns the trial that workers are to take after one of a number, if there is one."""
        return one if (one := self.trial) is not None and not one.closed and one.number > after else None

    def begin(self, assignment: Assignment, *, only_meet: bool = False) -> TrialOfGroup:
        """Begins a trial, from which its workers take their ranks; with `only_meet` they only test that they meet.

        Raises `LaneError`: the workers are not on the nodes the trial wants.
        """
        self.num_trials += 1
        number, ranks = self.num_trials, assign_ranks(assignment, self.workers)
        (first, (rank, local_rank, node, device)), *_ = ranks.items()
        offered = self.reports.get(first)
        part = RankAssignment(
            number=number,
            rank=rank,
            world_size=len(ranks),
            local_rank=local_rank,
            slot=Slot(node=node, device=device),
            meeting=("" if only_meet else self._meeting(assignment, ranks)) or f"trial-{number}",
            assignment=None if only_meet else sent(assignment),
            rendezvous="" if offered is None else offered.rendezvous,
        )
        own = None if only_meet else assignment
        self.trial = TrialOfGroup(number=number, assignment=own, part=part, ranks=ranks)
        return self.trial

    def _meeting(self, assignment: Assignment, ranks: dict[int, RankSlot]) -> str:
        """The name under which the last trial met, if its ranks are in order and the next one needs the same groups."""
        last = self.trial
        if last is None or last.assignment is None or last.cause is not None or not last.answered:
            return ""
        if last.ranks != ranks or _groups(last.assignment.spec) != _groups(assignment.spec):
            return ""
        return last.part.meeting


def _groups(spec: TrialSpec) -> tuple[Any, ...]:
    """Returns what process groups follow from. Each holds memory of a device; two ranks have one pair for any plan."""
    plan, few = spec.plan, spec.cluster.world_size <= 2
    shape = () if few else (*(getattr(plan, name) for name in DEGREES), plan.dp_replicate, plan.sharding == "none")
    return spec.engine, *shape


@dataclass(slots=True)
class LaneRun:
    """One Ray Train run: a group, and after a loss the next one."""

    number: int
    key: GroupKey
    task: asyncio.Task[None]
    ending: bool = False
    over: str | None = None
    """The reason it starts no more workers."""
    asked_s: float = math.inf
    placed_s: float = math.inf
    """Times at which its latest workers asked for their place on the nodes, and had it."""

    def late(self, since_s: float) -> str:
        """Returns why its workers should be there, of the time since then; empty while they need not be."""
        waited_s = self.waited_s(since_s)
        if self.placed_s == math.inf and waited_s > GIVE_BACK_S:
            return (
                f"its workers had no place on its nodes for {waited_s:.0f} s after these were chosen, as where another "
                "job takes them meanwhile; it starts again where nodes are free"
            )
        is_late = time.monotonic() - since_s - waited_s > GROUP_START_S
        return f"they did not start within {GROUP_START_S:.0f} s" if is_late else ""

    def waited_s(self, since_s: float) -> float:
        """Seconds since then that its workers waited for their place, if it took longer than on free nodes."""
        waited_s = min(self.placed_s, time.monotonic()) - max(self.asked_s, since_s)
        return waited_s if waited_s > PLACE_S else 0.0


def assign_ranks(assignment: Assignment, workers: dict[int, WorkerPlace]) -> dict[int, RankSlot]:
    """Gives each rank to the worker on the device where the plan places it; in their order, by the worker's number.

    A command has one worker a node: its ranks are the nodes, in the plan's order. Raises `LaneError`: the workers are
    not on the nodes the trial wants.
    """
    spec, nodes = assignment.spec, list(assignment.node_names)
    at = _workers_by_slot(nodes, workers)
    by_node = [Slot(node=node, device=0) for node in range(spec.cluster.num_nodes)]
    slots = by_node if is_command(spec) else place(spec.plan, spec.cluster)
    if {(slot.node, slot.device) for slot in slots} != set(at):
        raise _misplaced(assignment, workers, len(slots) // spec.cluster.num_nodes)
    on_node: Counter[int] = Counter()
    ranks = {}
    for rank, slot in enumerate(slots):
        ranks[at[slot.node, slot.device]] = (rank, on_node[slot.node], slot.node, slot.device)
        on_node[slot.node] += 1
    return ranks


def _workers_by_slot(nodes: Sequence[str], workers: dict[int, WorkerPlace]) -> dict[tuple[int, int], int]:
    """Numbers the workers of each node by their devices: the worker's number by node and slot."""
    here: dict[str, list[WorkerPlace]] = defaultdict(list)
    for worker in sorted(workers.values(), key=lambda one: one.device_index):
        here[worker.node_id].append(worker)
    return {
        (index, slot): worker.number for index, node_id in enumerate(nodes) for slot, worker in enumerate(here[node_id])
    }


def _misplaced(assignment: Assignment, workers: dict[int, WorkerPlace], wanted: int) -> LaneError:
    """Makes the error of workers that are not where a trial wants them."""
    have = ", ".join(
        f"{name}: {sum(worker.node_id == node_id for worker in workers.values())}"
        for node_id, name in assignment.node_names.items()
    )
    cluster = assignment.spec.cluster
    return LaneError(
        f"{cluster.label} wants {wanted} worker(s) on each of {cluster.num_nodes} "
        f"node(s), but they run on {have}; start nodes with equal numbers of devices"
    )

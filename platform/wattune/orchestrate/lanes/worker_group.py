"""One group of a lane's workers, and the trial on its way through it: what is known of them, without Ray."""

import asyncio
from dataclasses import dataclass, field, replace

import pyarrow as pa

from wattune.errors import EngineError
from wattune.orchestrate.lanes.messages import (
    Assignment,
    GroupKey,
    Place,
    RankAssignment,
    Report,
    StopOrder,
    WorkerPlace,
)
from wattune.plan.placement import place
from wattune.workers.loop import RankOutcome


class LaneError(EngineError):
    """A lane that cannot run what it was given."""


@dataclass(slots=True)
class Trial:
    """One trial on its way through a group."""

    number: int
    assignment: Assignment | None
    ranks: dict[int, RankAssignment]
    """By seat."""
    outcomes: dict[int, RankOutcome] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    spans: dict[int, pa.Table] = field(default_factory=dict)
    """What each rank showed of its last seconds, by rank."""
    cause: RankOutcome | None = None
    keeps_group: bool = True
    """Whether the workers can be used again after `cause`."""
    notified: bool = False
    """Whether `cause` came from a rank that the others may be waiting for."""
    halt: StopOrder | None = None
    interrupted: bool = False
    """Whether the study ended before every rank had brought its outcome."""
    part: str = "start"
    step: int = 0
    num_steps: int | None = None
    closed: bool = False

    @property
    def answered(self) -> bool:
        """Whether every rank brought its outcome."""
        return len(self.outcomes) == len(self.ranks)


@dataclass(slots=True)
class Group:
    """One set of worker processes, from their first word until one of them is lost."""

    number: int
    key: GroupKey
    seats: dict[int, WorkerPlace] = field(default_factory=dict)
    reports: dict[int, Report | None] = field(default_factory=dict)
    """Of the seats that wait for a trial."""
    taken: dict[int, int] = field(default_factory=dict)
    """The last trial each seat took."""
    trial: Trial | None = None
    num_trials: int = 0
    ready_s: float | None = None
    """When all its workers waited for their first trial."""
    lost: str | None = None
    """Why it can run nothing any more."""

    @property
    def complete(self) -> bool:
        """Whether all its workers said that they are there."""
        return len(self.seats) == self.key.world_size

    @property
    def idle(self) -> bool:
        """Whether all its workers wait for a trial."""
        return self.complete and len(self.reports) == self.key.world_size

    @property
    def problem(self) -> str | None:
        """Why one of the workers that wait must not run another trial."""
        found = (report.problem for report in self.reports.values() if report is not None)
        return next(filter(None, found), None)


@dataclass(slots=True)
class Run:
    """One Ray Train run: a group, and after a loss the next one."""

    number: int
    key: GroupKey
    task: asyncio.Task[None]
    ending: bool = False
    over: str | None = None
    """Why there will be no more workers of it."""


def without_work(rank: RankAssignment) -> RankAssignment:
    """The same rank, only to find the others."""
    return replace(rank, number=0, assignment=None)


def assign_ranks(
    assignment: Assignment, seats: dict[int, WorkerPlace], *, number: int, meeting: str
) -> dict[int, RankAssignment]:
    """Which worker is which rank: the one that sits where the plan places the rank.

    Args:
        assignment: The trial; the plan's rank order decides.
        seats: The workers.
        number: Of the trial in its group.
        meeting: Name under which the ranks meet.

    Raises:
        LaneError: The workers do not sit on the nodes the trial wants.
    """
    spec, nodes = assignment.spec, list(assignment.node_names)
    at: dict[tuple[int, int], int] = {}
    for index, node_id in enumerate(nodes):
        here = sorted((seat for seat in seats.values() if seat.node_id == node_id), key=lambda seat: seat.device_index)
        at |= {(index, slot): seat.number for slot, seat in enumerate(here)}
    slots = place(spec.plan, spec.cluster)
    if {(slot.node, slot.device) for slot in slots} != set(at):
        have = ", ".join(
            f"{name}: {sum(seat.node_id == node_id for seat in seats.values())}"
            for node_id, name in assignment.node_names.items()
        )
        raise LaneError(
            f"{spec.cluster.label} wants {spec.cluster.devices_per_node} worker(s) on each of {spec.cluster.num_nodes} "
            f"node(s), but they run on {have}; start nodes with equal numbers of devices"
        )
    assigned = {}
    for rank, slot in enumerate(slots):
        assigned[at[slot.node, slot.device]] = RankAssignment(
            number=number,
            rank=rank,
            world_size=len(slots),
            local_rank=sum(other.node == slot.node for other in slots[:rank]),
            slot=slot,
            meeting=meeting,
            assignment=assignment,
        )
    return assigned

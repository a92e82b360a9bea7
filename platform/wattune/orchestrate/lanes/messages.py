"""Messages between a trial's driver, its lane and the lane's workers: plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import ray
from ray import cloudpickle

from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.failures import Cause
from wattune.orchestrate.power_limit import NODE_POWER
from wattune.orchestrate.telemetry_actor import Sensed
from wattune.plans.engines import CAPABILITIES
from wattune.plans.placement import Slot
from wattune.plans.program import filled, is_command, values_of
from wattune.trial import TrialSpec
from wattune.workers.outcome import RankOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey:
    """Kind of a group of workers: trials of equal keys run on the same workers, one after another."""

    device: str
    num_nodes: int
    devices_per_node: int
    """Workers of each node: one a device, or one for all of them where a command runs."""
    engine: str
    environment: tuple[tuple[str, str], ...]
    """Variables their processes start with, as libraries read them only once."""
    resources: tuple[tuple[str, float], ...]
    """Resources that Ray reserves for each of them."""
    coming: tuple[TrialSpec, ...] = field(default=(), compare=False)
    """Plans whose graphs are compiled while they start and run their first trials."""

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.num_nodes * self.devices_per_node

    @property
    def has_gpus(self) -> bool:
        """True if each worker drives a GPU."""
        return self.device != "cpu"

    @classmethod
    def of(cls, spec: TrialSpec, resources: Mapping[str, float]) -> "GroupKey":
        """The key of a specification whose ranks have these resources of a node each."""
        known = CAPABILITIES.get(spec.engine)  # a user's own engine is not in the table
        environment = {**(known.environment if known else {})}
        devices = spec.cluster.devices_per_node
        if spec.program is not None and not is_command(spec):
            values = values_of(spec, spec.program.flags)
            environment |= {name: filled(template, values) for name, template in spec.program.environment}
        return cls(
            device=spec.cluster.device,
            num_nodes=spec.cluster.num_nodes,
            devices_per_node=1 if is_command(spec) else devices,
            engine=spec.engine,
            environment=tuple(sorted(environment.items())),
            resources=tuple(
                sorted((name, amount * devices if is_command(spec) else amount) for name, amount in resources.items())
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One trial for a lane."""

    attempt: Attempt
    key: GroupKey
    sensed: Mapping[str, Sensed]
    """Devices and processors of each node's sampler, by telemetry's name of the node."""

    @property
    def spec(self) -> TrialSpec:
        """The trial's specification."""
        return self.attempt.spec

    @property
    def node_names(self) -> dict[str, str]:
        """The nodes to run on, in the plan's order: Ray's id to telemetry's name."""
        return {node.node_id: node.name for node in self.attempt.nodes}

    @property
    def window(self) -> str:
        """Name of this attempt's measured steps, which its driver lets begin."""
        return f"{self.attempt.name}#{self.attempt.numbers.attempt or 1}"

    @property
    def fresh(self) -> bool:
        """True if the workers must be new, and end with the trial."""
        return self.attempt.isolation == "fresh"

    @property
    def shows_spans(self) -> bool:
        """True if every rank sends its last seconds once a second, to watch a limit on simulated power."""
        return NODE_POWER in self.attempt.limits and self.spec.cluster.simulate_sensors_of is not None


@dataclass(frozen=True, kw_only=True)  # no slots: see `RankOutcome`
class WorkerPlace:
    """One worker of a group, and its own device as long as the group lives."""

    number: int
    """Ray Train's rank, which is not the plan's."""
    node_id: str
    device_index: int
    """Index of its device among those its node's workers see."""
    device_uuid: str | None
    pid: int
    actor: bytes
    """Handle that ends the worker when it hangs, pickled: to make one takes longer than all else of a message."""


@dataclass(frozen=True, kw_only=True)  # no slots: see `RankOutcome`
class Place:
    """Node, device and process of one rank, as kept with the result."""

    rank: int
    node: str
    slot: int
    """Number of the device among those the trial used on its node."""
    device: str
    """The device's name in telemetry and spans."""
    device_uuid: str | None
    pid: int
    other_pids: tuple[int, ...] = ()
    """Other processes that belong to the trial: of a command on its node, or of this rank's worker on its device."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for `ranks.json`."""
        return {name: value for name, value in asdict(self).items() if name != "other_pids"}


def device_name(spec: TrialSpec, slot: int) -> str:
    """The name telemetry and spans give the device in a slot of a node, such as `gpu0`."""
    return f"{'cpu' if spec.cluster.rank_device.vendor == 'cpu' else 'gpu'}{slot}"


Places = Place | Sequence[Place] | None
"""Origin of an outcome: a rank's place, or those of all ranks of a command's node."""

FINISH: Final = "finish"
"""Part of a trial that begins once a command's leading node has measured enough."""


@dataclass(frozen=True, kw_only=True)  # no slots: see `RankOutcome`
class RankAssignment:
    """One worker's part of an assignment."""

    number: int
    """Number of the trial in its group, from 1."""
    rank: int
    world_size: int
    local_rank: int
    slot: Slot
    meeting: str
    """Name under which the ranks meet. Trials of a group that share it share their process groups."""
    assignment: Assignment | None
    """None if the ranks only test that they find each other. On its way to a worker it is as `sent`."""
    rendezvous: str = ""
    """Meeting point of a command's processes: `host:port` of node 0."""


RankSlot = tuple[int, int, int, int]
"""Rank of a worker, its number on the node, and its slot: node and device. All else of a part is that of the others."""


def part_of(part: RankAssignment, own: RankSlot) -> RankAssignment:
    """Returns the part of a worker, of another one's part and its own rank and slot."""
    rank, local_rank, node, device = own
    return replace(part, rank=rank, local_rank=local_rank, slot=Slot(node=node, device=device))


def sent(assignment: Assignment) -> Any:
    """Returns an assignment as it travels: pickled once, however many processes pass it on."""
    return cloudpickle.dumps(assignment)


def received(part: RankAssignment | None) -> RankAssignment | None:
    """Returns a part as its worker uses it."""
    if part is None or not isinstance(part.assignment, bytes):
        return part
    return replace(part, assignment=cloudpickle.loads(part.assignment))


@dataclass(frozen=True, kw_only=True)  # no slots: see `RankOutcome`
class Report:
    """State of a worker after a trial."""

    problem: str | None
    """The reason it must not run another trial; None if it may."""
    rendezvous: str = ""
    """A free `host:port` of its node, where a command runs."""
    after: int = 0
    """Number of the part it took last, by which a call that is made again gets the same one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker whose process ended while it ran a trial, though its lane had not ended it."""

    rank: int
    node_id: str
    pid: int
    why: str
    """Ray's words."""
    words: str = ""
    """Stacks of a process that a fatal signal of its own ended, such as a segmentation fault; else empty."""
    out_of_memory: bool = False
    """The kernel or Ray ended it because the node's memory ran out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of an assignment."""

    outcomes: tuple[RankOutcome, ...] = ()
    """By rank; ranks that ended without reporting are missing, and those that `completed` until `whole`."""
    completed: frozenset[int] = frozenset()
    """Ranks that ended in order, whose outcomes and places posts hold."""
    cause: RankOutcome | None = None
    """The first failure, which decides the trial's status: `completed` if only the profiled pass failed."""
    places: tuple[Place, ...] = ()
    held: tuple[ray.ObjectRef, ...] = ()
    """References to what posts hold (`Held`), or to lists of such references: only the result needs it."""
    failure: str = ""
    """The reason the group failed; empty if it did not."""
    infra: Cause | None = None
    """The part of the cluster that `failure` is about, where the lane knows it."""
    deaths: tuple[Death, ...] = ()
    """Workers that died in the trial."""
    interrupted: bool = False
    """The study ended: the trial is to be run again."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """Stacks of all threads of hung ranks, by rank."""
    group_start_s: float = 0.0
    """Seconds the trial waited for its workers, without the next."""
    node_wait_s: float = 0.0
    """Seconds it waited for nodes that another job took after they were chosen for it."""
    restart_s: float | None = None
    """Seconds without workers because an earlier trial cost its group; None if it did not."""
    number: int = 0
    """Number of the trial in its group, from 1."""
    warm: bool = False
    """True where its workers began to start before it was asked for: they may have been on their devices before its
    sensors were read."""


RankTables = Sequence[tuple[pa.Table | None, pa.Table | None]]
"""Spans and kernels, of a rank or of several."""

Held = tuple[Sequence[tuple[RankOutcome, Place]], RankTables]
"""Outcomes and places of a post's ranks that completed, and tables of all: only the result needs them."""


def whole(answer: Answer, within_s: float) -> tuple[Answer, RankTables]:
    """Fetches what posts hold; returns the answer with every rank's outcome and place, and the tables.

    Raises `RayError`: a post has ended.
    """
    outcomes, places = {one.rank: one for one in answer.outcomes}, {one.rank: one for one in answer.places}
    tables, refs = [(one.spans, one.kernels) for one in answer.outcomes], list(answer.held)
    while refs:
        found: list[Held | list[ray.ObjectRef]] = ray.get(refs, timeout=within_s)
        refs = [ref for one in found if isinstance(one, list) for ref in one]
        for delivered, own in (one for one in found if isinstance(one, tuple)):
            tables += own
            for outcome, place in delivered:
                places.setdefault(outcome.rank, place)
                outcomes.setdefault(outcome.rank, outcome)
    told = replace(answer, outcomes=tuple(outcomes[rank] for rank in sorted(outcomes)), held=())
    return replace(told, places=tuple(places[rank] for rank in sorted(places))), tables

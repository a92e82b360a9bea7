"""What travels between a trial's driver, its lane and the lane's workers: plain values."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ray.actor import ActorHandle

from wattune.plan.engines import CAPABILITIES
from wattune.plan.placement import Slot
from wattune.trial import Measure, TrialSpec
from wattune.workers.loop import RankOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey:
    """What workers are made for: trials of equal keys run on the same ones, one after another."""

    device: str
    num_nodes: int
    devices_per_node: int
    engine: str
    environment: tuple[tuple[str, str], ...]
    """Variables their processes start with; libraries read them once."""
    resources: tuple[tuple[str, float], ...]
    """What Ray reserves for one of them."""

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.num_nodes * self.devices_per_node

    @property
    def has_gpus(self) -> bool:
        """Whether each worker drives a GPU."""
        return self.device != "cpu"

    @classmethod
    def of(cls, spec: TrialSpec, resources: Mapping[str, float]) -> "GroupKey":
        """The key of a specification, with what one rank gets of a node."""
        known = CAPABILITIES.get(spec.engine)  # an engine of one's own is in no table
        return cls(
            device=spec.cluster.device,
            num_nodes=spec.cluster.num_nodes,
            devices_per_node=spec.cluster.devices_per_node,
            engine=spec.engine,
            environment=tuple(sorted(known.environment.items())) if known else (),
            resources=tuple(sorted(resources.items())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One trial for a lane."""

    name: str
    """The trial's folder name, which nothing else in the study has."""
    spec: TrialSpec
    measure: Measure
    seed: int
    key: GroupKey
    node_names: Mapping[str, str]
    """The nodes to run on, in the plan's order: Ray's id to the name telemetry uses."""
    device_names: Mapping[str, Mapping[str, str]]
    """What telemetry calls each device, by node and uuid."""
    sampler_cpus: Mapping[str, tuple[int, ...]]
    """Processors the sampler of a node is bound to, by node; none where it shares them."""
    fresh: bool
    """Whether the workers must be new, and end with the trial."""
    shows_spans: bool = False
    """Whether every rank shows each second what it did last, for whoever watches a limit of simulated power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """One worker of a group, and the device that is its own for the group's life."""

    number: int
    """Ray Train's rank of it; the plan's rank is another one's business."""
    node_id: str
    device_index: int
    """Of its device among those its node's workers see."""
    device_uuid: str | None
    pid: int
    actor: ActorHandle
    """To end it when it hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank of a trial ran, as it is kept with the result."""

    rank: int
    node: str
    slot: int
    """Number of the device among those the trial used on its node."""
    device: str
    """The device's name in telemetry and spans."""
    device_uuid: str | None
    pid: int

    def to_json(self) -> dict[str, Any]:
        """Plain data for `ranks.json`."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """What one worker gets of an assignment."""

    number: int
    """Of the trial in its group, from 1; 0 asks only whether the ranks can still talk to each other."""
    rank: int
    world_size: int
    local_rank: int
    slot: Slot
    meeting: str
    """Name under which the ranks meet; no two trials of a group share it."""
    assignment: Assignment | None
    """None where nothing is to be trained."""


@dataclass(frozen=True, slots=True)
class StopOrder:
    """An order to ranks whose trial cannot go on."""

    kind: Literal["free", "dump"]
    """`free`: leave the trial. `dump`: only say where every thread is; the process is ended then."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a worker is after a trial."""

    problem: str | None
    """Why it must not run another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of an assignment."""

    outcomes: tuple[RankOutcome, ...] = ()
    """By rank; ranks that ended without a word are missing."""
    cause: RankOutcome | None = None
    """The first failure, which names the trial's status: `completed` where only the profiled pass failed."""
    places: tuple[Place, ...] = ()
    failure: str = ""
    """Why the group failed, where it did."""
    interrupted: bool = False
    """Whether that was because the study ended: the trial is to be run again."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """Where the threads of a hung rank were."""
    group_start_s: float = 0.0
    """How long the trial waited for its workers."""
    restart_s: float | None = None
    """How long there were none because an earlier trial cost its group; None where it did not."""
    number: int = 0
    """Of the trial in its group, from 1."""

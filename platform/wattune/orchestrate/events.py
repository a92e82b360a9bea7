"""What a study tells whoever watches it: what it will do, where, and what becomes of every trial. No Ray here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from wattune.catalog.hardware import ClusterSpec
from wattune.trial import TrialResult, TrialSpec, TrialStatus

Role = Literal["trial", "reference", "finalist"]
"""Why something runs: for itself, to see drift, or once more and longer because it is among the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What is left to do, and how much of it this call is going to do at most, before anything starts."""

    num_turns: int
    """Trials to run with all their repeats, reference trials and finalists."""
    num_now: int
    """Of them, those this call starts at most: as many as its budget of trials allows."""
    num_references: int
    num_finalists: int
    num_again: int
    """Of them, trials that were interrupted and run again."""
    done: Mapping[TrialStatus, int]
    """What is skipped because an earlier call finished it, by status."""
    load_s: Mapping[ClusterSpec, float]
    """Expected seconds of all turns one after another, by the cluster they need."""
    load_now_s: Mapping[ClusterSpec, float]
    """The same of the turns this call starts at most."""
    most_s: float
    """Seconds on the clock this call has; infinite without a budget of hours."""
    measured: bool
    """Whether that comes from finished trials; else it is the least the settings allow, without build and warm-up."""

    @property
    def num_done(self) -> int:
        """What is skipped."""
        return sum(self.done.values())

    @property
    def device_s(self) -> float:
        """Expected seconds of work times the devices it occupies."""
        return _device_s(self.load_s)

    @property
    def device_now_s(self) -> float:
        """The same of what this call starts at most."""
        return _device_s(self.load_now_s)


def _device_s(load_s: Mapping[ClusterSpec, float]) -> float:
    return sum(cluster.world_size * seconds for cluster, seconds in load_s.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a study runs, once its cluster is known."""

    lanes: tuple[str, ...]
    """Sets of nodes on which trials run one after another; sets that share nodes take turns."""
    num_at_once: int
    """Most trials that run side by side."""
    wall_s: float
    """Expected seconds to the end of this call; with `Preview.measured`, else the least."""
    device_s: float
    """Device-seconds of this call; likewise, and never more than its budget of hours leaves room for."""
    cut_short: bool = False
    """Whether it is the budget of hours that ends this call."""
    missing: tuple[str, ...] = ()
    """What some trials want of the cluster and what it has, where they have to wait for nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialProgress:
    """How far a running trial is."""

    part: str
    """Such as `build`, `warmup` or `measure`."""
    done: int = 0
    """Steps done in that part."""
    total: int | None = None
    """Steps of that part, None where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEvent:
    """Something that happened to a trial, for whoever shows progress or tracks results."""

    kind: Literal["skipped", "started", "finished"]
    spec: TrialSpec
    repeat: int
    result: TrialResult | None = None
    """The result, unless the trial only started."""
    role: Role = "trial"
    nodes: tuple[str, ...] = ()
    """Names of the nodes it runs on."""
    num_left: int | None = None
    """Trials this call is expected to start after those that run now, repeats, reference trials and finalists counted;
    None where nobody counted."""
    progress: Callable[[], TrialProgress | None] | None = field(default=None, compare=False)
    """Of a trial that started: asks its workers how far they are; may take a moment, None where nobody answers."""


Event = Preview | Placement | TrialEvent

Listener = Callable[[Event], None]

"""What a study tells whoever watches it: what it will do, where, and what becomes of every trial. No Ray here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from wattune.catalog.hardware import ClusterSpec
from wattune.trial import TrialResult, TrialSpec, TrialStatus

Role = Literal["trial", "anchor", "finalist"]
"""Why something runs: for itself, to see drift, or once more and longer because it is among the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What this call is going to do, before anything starts."""

    num_turns: int
    """Trials to run with all their repeats, anchors and finalists."""
    num_anchors: int
    num_finalists: int
    num_again: int
    """Of them, trials that were interrupted and run again."""
    done: Mapping[TrialStatus, int]
    """What is skipped because an earlier call finished it, by status."""
    load_s: Mapping[ClusterSpec, float]
    """Expected seconds of all turns one after another, by the cluster they need."""
    measured: bool
    """Whether that comes from finished trials; else it is the least the settings allow, without build and warm-up."""

    @property
    def num_done(self) -> int:
        """What is skipped."""
        return sum(self.done.values())

    @property
    def device_s(self) -> float:
        """Expected seconds of work times the devices it occupies."""
        return sum(cluster.world_size * seconds for cluster, seconds in self.load_s.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a study runs, once its cluster is known."""

    lanes: tuple[str, ...]
    """Sets of nodes on which trials run one after another; sets that share nodes take turns."""
    num_at_once: int
    """Most trials that run side by side."""
    wall_s: float
    """Expected seconds to the end; with `Preview.measured`, else the least."""
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
    """Trials expected after those that run now, repeats, anchors and finalists counted; None where nobody counted."""
    progress: Callable[[], TrialProgress | None] | None = field(default=None, compare=False)
    """Of a trial that started: asks its workers how far they are; may take a moment, None where nobody answers."""


Event = Preview | Placement | TrialEvent

Listener = Callable[[Event], None]

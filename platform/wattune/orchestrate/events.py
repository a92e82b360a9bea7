"""Events of a study: its plan, its nodes, and the start and end of every trial. No Ray here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from wattune.catalog.hardware import ClusterSpec
from wattune.fidelity import Role
from wattune.orchestrate.failures import is_surrounded
from wattune.run import Prediction, Run, RunStatus
from wattune.storage.study import Unreadable
from wattune.trial import TrialSpec
from wattune.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The work that is left, and the most that this call does of it, before anything starts."""

    num_left: int
    """Trials to run with all their repeats, reference trials and finalists."""
    num_now: int
    """The most that this call starts: as many as its budget of trials allows."""
    num_references: int
    num_finalists: int
    num_race: int = 0
    """Of `num_left`, the most repeats of the race of finalists."""
    num_again: int
    """Of `num_left`, trials that run again: they were interrupted, are to be retried, or a limit is looser now."""
    done: Mapping[RunStatus, int]
    """Number of trials that are skipped because an earlier call finished them, by status."""
    load_s: Mapping[ClusterSpec, float]
    """Expected seconds of all trials one after another, by the cluster they need."""
    load_now_s: Mapping[ClusterSpec, float]
    """The same for the trials this call starts at most."""
    most_s: float
    """Seconds this call has on the clock; infinite without a budget of hours."""
    unreadable: Unreadable = field(default_factory=dict)
    """Trials of earlier calls whose files cannot be read; they are neither counted nor run."""
    measured: bool
    """The times come from finished trials. Else from estimates (`estimated`), or they are the least the settings allow,
    without build and warm-up."""
    estimated: bool = False
    """Every trial that is queued has a predicted time, or every one that a strategy may choose."""
    num_timeouts: int = 0
    """Those trials whose predicted time exceeds `measure.timeout_s`; there they are ended."""
    longest_s: float = 0.0
    """The longest predicted time of such a trial."""
    first: "tuple[TrialEvent, ...]" = ()
    """Starts of the trials that come first, in order, as far as it is known before."""
    changes: tuple[str, ...] = ()
    """Differences to the space that the study had before, a line each."""
    workloads: tuple[Workload, ...] = ()
    """Workloads of the candidates, each once: plans are named with the sizes that differ."""
    space_number: int = 1
    """The number of the space among those of the study."""
    num_kept: int = 0
    """Combinations of the space that can run; 0 if nobody counted them."""
    num_drawn: int = 0
    """Those that are tried, with those done before."""

    @property
    def num_done(self) -> int:
        """Number of trials that are skipped."""
        return sum(self.done.values())

    @property
    def device_s(self) -> float:
        """Expected seconds of work times the devices it occupies."""
        return _device_s(self.load_s)

    @property
    def device_now_s(self) -> float:
        """The same for the trials this call starts at most."""
        return _device_s(self.load_now_s)


def _device_s(load_s: Mapping[ClusterSpec, float]) -> float:
    return sum(cluster.world_size * seconds for cluster, seconds in load_s.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The nodes of a study, once its cluster is known, and whenever what it waits for changes."""

    lanes: tuple[str, ...]
    """Sets of nodes on which trials run one after another; sets that share nodes never run at once."""
    num_at_once: int
    """The most trials that run side by side."""
    wall_s: float
    """Expected seconds to the end of this call; the least unless `Preview.measured`."""
    device_s: float
    """Expected device-seconds of this call, likewise; never more than its budget of hours allows."""
    cut_short: bool = False
    """The budget of hours ends this call."""
    missing: tuple[str, ...] = ()
    """Nodes that some trials want and nodes there are, if those trials have to wait."""
    waits_for: str = ""
    """Nodes that trials wait for now, in short: they do not live, or other jobs use them. It may change later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialProgress:
    """Progress of a running trial."""

    part: str
    """A part such as `build`, `warmup` or `measure`."""
    done: int = 0
    """Steps done in that part."""
    total: int | None = None
    """Steps of that part; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEvent:
    """The start or end of a trial, for whoever shows progress or tracks results."""

    kind: Literal["skipped", "started", "finished"]
    spec: TrialSpec
    repeat: int
    result: Run | None = None
    """The result, unless the trial only started."""
    role: Role = "trial"
    nodes: tuple[str, ...] = ()
    """Names of the nodes it runs on."""
    again: bool = False
    """It ended, and the same call runs it again."""
    num_left: int | None = None
    """Trials this call is expected to start after those that run now, with repeats, reference trials and finalists;
    None if nobody counted them."""
    predicted: Prediction | None = None
    """The strategy's prediction when it proposed the trial; None where it made none."""
    expected_s: float = 0.0
    """Seconds of a trial that started, as the preview counted with; 0 if nothing tells trials apart."""
    progress: Callable[[], TrialProgress | None] | None = field(default=None, compare=False)
    """Asks the workers of a trial that started for its progress. May take a moment; None if nobody answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStopped:
    """Trials for the same workers failed alike in a row: no more of them start, and the study goes on with others."""

    cluster: ClusterSpec
    engine: str
    result: Run
    """The latest failure."""
    count: int
    """Failures in the row."""
    num_held: int
    """Queued trials that are not started."""

    def __str__(self) -> str:
        """Describes the row in one line."""
        if is_surrounded(self.result):
            return (
                f"trials of {self.engine} on {self.cluster.label} stop, {self.num_held} are left: "
                f"{self.result.reason}; put that right and call the same command again, or bar by requires the plans "
                "that need it"
            )
        return (
            f"{self.count} trials of {self.engine} on {self.cluster.label} in a row were {self.result.status}, the "
            f"last one because: {self.result.reason}; no more of them start, {self.num_held} that waited are left"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceStep:
    """The race of finalists after one more result; see `wattune.ranking.racing`."""

    leader: TrialSpec | None
    """The trial that is most likely the best; None if no trial can be."""
    leader_name: str = ""
    """Name of its plan among the study's."""
    best_probability: float
    """Probability that it is."""
    before: float | None
    """The leader's probability at the step before; None at the first step of a call."""
    num_repeats: int
    """Repeats of the race so far, those of earlier calls counted."""
    most_repeats: int
    """The most repeats it may take."""
    ending: str = ""
    """The reason it is over; empty while it is not."""

    def __str__(self) -> str:
        """Describes the step in one line."""
        moved = "" if self.before is None else f"{self.before:.2f} -> "
        named = "" if self.leader is None else f" for {self.leader.model.name} {self.leader_name or self.leader.label}"
        over = f"; {self.ending}" if self.ending else ""
        repeats = f"{self.num_repeats} of at most {self.most_repeats} repeats"
        return f"racing: P(best) {moved}{self.best_probability:.2f}{named}, {repeats}{over}"


Event = Preview | Placement | TrialEvent | RowStopped | RaceStep

Listener = Callable[[Event], None]

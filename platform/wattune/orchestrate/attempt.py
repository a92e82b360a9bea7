"""An attempt to run one repeat of a trial: it travels whole from the queue to the ranks, and back into the result."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from wattune.fidelity import Role
from wattune.run import NO_NUMBERS, Numbers, Prediction, Run, RunStatus
from wattune.trial import Measure, TrialSpec

if TYPE_CHECKING:
    from wattune.orchestrate.cluster import Node

PASSED_ON: Final = "telemetry_passed_on"
"""Tag of a trial whose rows came through the study's node: how many, and why."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Attempt:
    """One attempt. What follows `predicted` is known once it starts."""

    spec: TrialSpec
    repeat: int
    measure: Measure
    role: Role = "trial"
    avoid: frozenset[str] = frozenset()
    """Names of nodes that failed it; others come first."""
    predicted: Prediction | None = None
    """The strategy's prediction when it proposed the trial; None where it made none."""
    nodes: "tuple[Node, ...]" = ()
    """The nodes it runs on, in the plan's order."""
    folder: Path = Path()
    """The trial's folder in the study, on the node that runs the trial's driver."""
    seed: int = 0
    limits: Mapping[str, float] = field(default_factory=dict)
    """Hard limits of the study."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Facts of the study's environment and of this attempt, kept with the result."""
    free_since_ns: int = 0
    """Time since which its nodes had nothing to do, on the monotonic clock of the study's node; 0 where unknown."""
    numbers: Numbers = NO_NUMBERS
    """Numbers of this attempt, kept with the result."""
    isolation: str = "warm"
    """`warm`: on workers that ran other trials before. `fresh`: on new workers, which end with the trial."""
    alone: bool = False
    """It may need all memory of its devices, so that nothing is compiled beside it."""
    then: TrialSpec | None = None
    """The next trial on its nodes, where it needs another engine, whose workers may start beside this one."""
    stop_above_s: float | None = None
    """Mean step time above which the trial loses, and its measurement ends early; None measures it to its end."""
    trial_id: str = field(init=False)

    def __post_init__(self) -> None:
        """Keeps the trial's id, which takes time to compute."""
        object.__setattr__(self, "trial_id", self.spec.trial_id)

    def __repr__(self) -> str:
        """Returns its name; Ray Tune makes names of it."""
        return self.name

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Attempt":
        """Returns itself: Ray Tune copies every configuration, and this one never changes."""
        return self

    @property
    def name(self) -> str:
        """Name of its folder, unique in the study."""
        return f"{self.trial_id}-{self.repeat}"

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of the nodes it runs on."""
        return tuple(node.name for node in self.nodes)

    def ended(self, status: RunStatus, reason: str, *, start_wall_ns: int, end_wall_ns: int) -> Run:
        """Returns a run of it that ended so, without anything that was measured."""
        return Run(
            trial_id=self.trial_id,
            repeat=self.repeat,
            status=status,
            reason=reason,
            tags=dict(self.tags),
            numbers=self.numbers,
            prediction=self.predicted,
            start_wall_ns=start_wall_ns,
            end_wall_ns=end_wall_ns,
        )

    @property
    def storage(self) -> Path:
        """The storage folder in `<storage>/<study>/trials/<trial>`."""
        return self.folder.parents[2]

    @property
    def key(self) -> str:
        """A name for it that no other study on the machine uses."""
        study = self.folder.parent.parent
        return f"{study.name}-{zlib.crc32(str(study).encode()):08x}-{self.folder.name}"

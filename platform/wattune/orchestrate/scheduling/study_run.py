"""Settings of a study. No Ray here."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from wattune.catalog.hardware import ClusterSpec
from wattune.cost.out_of_memory import LIKELY, UNLIKELY
from wattune.objective import Question
from wattune.orchestrate.scheduling.budget import Budget
from wattune.run import NO_NUMBERS, Numbers, Run, RunStatus
from wattune.search.search_entry import Search
from wattune.trial import Measure, TrialSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """Settings of a study, apart from its search space."""

    measure: Measure
    num_trials: int
    """Different specifications to try, including those already done in the folder."""
    search: Search
    """The strategy, seed and order, the race of finalists and the fidelity ladder."""
    question: Question
    """The question that the study asks of its trials."""
    limits: Mapping[str, float]
    tags: Mapping[str, str]
    """Facts of the environment, kept with every result."""
    finalists: Callable[[], Sequence[TrialSpec]]
    """Returns the best trials so far, best first; called once, when all others have run."""
    clusters: tuple[ClusterSpec, ...]
    """Clusters that trials may run on."""
    changes: tuple[str, ...] = ()
    """Differences to the space that the study had before, a line each."""
    numbers: Numbers = NO_NUMBERS
    """Kept with every result: the number of the space."""
    isolation: str = "warm"
    reference: TrialSpec | None = None
    """The trial that is measured again and again; None takes an ordinary one of `candidates` for each kind of
    workers."""
    candidates: Sequence[TrialSpec] = ()
    """Every trial of the space. Without any, the first trial that completes is the reference trial."""
    budget: Budget | None = None
    wait_nodes_s: float | None = None
    """Longest that the study stands idle for want of nodes; None waits as long as an autoscaler or another job may give
    them."""
    retry: frozenset[RunStatus] = frozenset()
    """Statuses of earlier calls' trials that run again, beside those that do anyway."""
    outdated: Callable[[Run], bool] | None = None
    """Returns whether an earlier result says nothing under the space that holds now, so that its trial runs again."""
    duration_s: Callable[[TrialSpec, Measure], float | None] | None = None
    """Predicts the seconds of a trial's steps, or gives None; None predicts nothing."""
    earlier: Callable[[], Iterable[tuple[TrialSpec, Run]]] = tuple
    """Returns results of other studies on the same devices, which tell what trials take beside their steps."""
    waits: Callable[[TrialSpec], bool] | None = None
    """Predicts whether a trial may wait for its host; None predicts nothing."""
    out_of_memory: Callable[[TrialSpec], float] | None = None
    """Predicts the probability that a trial runs out of memory; None predicts nothing."""
    learns_memory: Callable[[TrialSpec, Run], bool] | None = None
    """Takes a result; returns whether it changed `out_of_memory` of other trials."""
    rejects: Callable[[TrialSpec], str] | None = None
    """Returns the reason that results of the study rule a trial out; empty where nothing does."""
    estimate: Callable[[TrialSpec], Mapping[str, float]] | None = None
    """Predicts metrics of a trial: the low ends of their intervals. A trial that is estimated above a hard limit is
    rejected instead of run."""

    def runs_late(self, spec: TrialSpec) -> bool:
        """Returns whether a trial runs after the others, since it is likely to run out of memory."""
        return self.out_of_memory is not None and self.out_of_memory(spec) >= LIKELY

    def may_fill_memory(self, spec: TrialSpec) -> bool:
        """Returns whether a trial may need all memory of its devices."""
        return self.out_of_memory is not None and self.out_of_memory(spec) > UNLIKELY

    def num_full(self, num_trials: int) -> int:
        """The full measurements of so many trials, with repeats."""
        share = 1.0 if self.search.ladder is None else self.search.ladder.promote
        return math.ceil(num_trials * share) * self.measure.repeats

"""The protocol of a strategy, and the problem that it is given."""

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final, Protocol, TypeVar

from wattune.arrays import Floats
from wattune.cost.tables import EstimatedMetric
from wattune.objective import Question
from wattune.run import Run, RunStatus
from wattune.trial import TrialSpec

TEACHES_NOTHING = frozenset({RunStatus.INFRA_FAILED, RunStatus.INTERRUPTED, RunStatus.REJECTED})
"""Statuses that say nothing about a configuration: it did not run, or the cluster failed it."""

FAILED = frozenset(
    {RunStatus.OUT_OF_MEMORY, RunStatus.CRASHED, RunStatus.TIMED_OUT, RunStatus.ABORTED},
)
"""Statuses of a configuration that cannot be used."""


_Key = TypeVar("_Key", bound=Hashable)

MOST_TAUGHT: Final = 500
"""Most trials that surrogates learn from: what a proposal costs grows with the square of their number."""
CHOSEN_EVERY: Final = MOST_TAUGHT // 10
"""More results after which they are chosen anew."""


def draw(seed: int, trial_id: str) -> bytes:
    """Draws a trial's place in an order: the same on every machine and version, whatever else is drawn."""
    return hashlib.sha256(f"{seed} {trial_id}".encode()).digest()


def telling(first: Mapping[_Key, Run], question: Question) -> set[_Key]:
    """Chooses the trials that surrogates learn from, by their first results: all, else `MOST_TAUGHT`.

    Half of them are the best that hold every bound. The others are spread evenly over the rest, best to worst.
    """
    if len(first) <= MOST_TAUGHT:
        return set(first)
    metric, sign = question.objective.metric, -1.0 if question.objective.maximize else 1.0
    value = {key: sign * run.metrics.get(metric, math.nan) for key, run in first.items()}
    ordered = sorted(first, key=lambda key: value[key] if math.isfinite(value[key]) else math.inf)
    good = (key for key in ordered if math.isfinite(value[key]) and question.kept(first[key].metrics))
    leaders: set[_Key] = set(islice(good, MOST_TAUGHT // 2))
    rest = [key for key in ordered if key not in leaders]
    count = MOST_TAUGHT - len(leaders)
    return {*leaders, *(rest[place * (len(rest) - 1) // max(count - 1, 1)] for place in range(count))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A result of an earlier study."""

    spec: TrialSpec
    result: Run
    estimate: Mapping[str, float] = field(default_factory=dict)
    """Predicted metrics of the trial, by the predictor that estimates the candidates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything that a strategy may know before the first trial."""

    specs: Sequence[TrialSpec]
    """Every candidate, each once."""
    seed: int
    question: Question | None = None
    """None of a strategy that learns nothing."""
    estimates: Mapping[str, EstimatedMetric] | None = None
    """Predicted metrics of the candidates, in their order."""
    warm: Sequence[Observation] = ()
    """Results of earlier studies. Those of other devices are left out by the strategies that learn from them."""
    fits: dict[str, Floats] = field(default_factory=dict)
    """Fits that are known, and where those that are made go (`wattune.search.strategies.gaussian_process.fit`)."""
    features: Path | None = None
    """File that keeps the features of all candidates; None keeps none."""


class Strategy(Protocol):
    """Proposes trials, and learns from their results, failures included. The same seed gives the same proposals."""

    learns: bool
    """True where results change later proposals. Where they do not, a study may ask for everything at once."""

    stopped_because: str | None
    """The reason why it proposes nothing more although candidates are left; None where it has not stopped."""

    def ask(self, n: int, expected_s: Callable[[TrialSpec], float] | None = None) -> list[TrialSpec]:
        """Returns up to `n` specifications never proposed or told before: fewer, at last none, when they run out.

        By `expected_s`, seconds above 0, one that learns may prefer what gains more per second.
        """
        ...

    def tell(self, spec: TrialSpec, result: Run) -> None:
        """Takes the result of a specification, from this run of the study or an earlier one."""
        ...

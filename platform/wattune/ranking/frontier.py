"""The price of a bound: the best plan at each of several values of it, measured, and beside it what is predicted.

At each value trials are judged anew by the one posterior of their results, as far as they may be the best or lead it.
Measured and predicted plans never mix: a plan that was measured has no prediction here, and one that is predicted was
never measured in full: a burst ranks nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from wattune.intervals import CONFIDENCE_FRAC, Interval
from wattune.objective import Constraint, Objective, VariedBound
from wattune.ranking.assessment import RankedTrial, Verdict, completed, is_simulated, shallow
from wattune.ranking.best import ranks, standing, surely_better
from wattune.ranking.bounds import LIMIT, Margin
from wattune.ranking.difference import Counted, difference
from wattune.ranking.limits import LimitRows, split
from wattune.ranking.order import SCALED_DOWN, Ranking, by_figure, named, ranking_of
from wattune.ranking.posterior import Posterior
from wattune.ranking.spreads import Results
from wattune.ranking.work import compares
from wattune.run import Prediction, Run
from wattune.search.names import namer
from wattune.search.strategies.prediction import Predictions
from wattune.storage.study import Unreadable
from wattune.trial import TrialSpec, limit_of

LIKELY: Final = 0.5
"""Least probability of feasibility of a plan that is named as predicted best."""

_MOST_STEPS: Final = 10
"""Most steps between the least and the largest measured value in a range that nobody chose."""


Unmeasured = tuple[Sequence[TrialSpec], Predictions]
"""Candidates that were never measured in full, and their predictions, one row each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPlan(Prediction):
    """A candidate that was never measured in full and is predicted to be the best of those at a bound."""

    spec: TrialSpec
    label: str
    """Name of the plan, with the sizes of the workload where plans of the study differ in them."""
    holds_probability: float | None
    """Probability that it holds the varied bound; None where nothing is known of that metric."""
    better_probability: float | None
    """Probability that it is better than the measured best; None without one, and where that does other work."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        own = ("label", "holds_probability", "feasible_probability", "better_probability")
        return {
            "trial_id": self.spec.trial_id,
            "model": self.spec.model.name,
            "predicted": _ends(self),
            **{name: getattr(self, name) for name in own},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One value of the bound."""

    bound: Constraint
    best: RankedTrial | None
    """The best measured trial that holds every bound; None where none surely does."""
    undecided: RankedTrial | None
    """A measured trial whose bounds the runs do not decide, if it measured better than `best` and does the same work:
    the best of those that are at least `LIKELY` to hold all of them, else the likeliest."""
    gain_frac: float | None
    """By how much `best` measured better than the best at the value before, the next tighter one; None without one,
    where that one measured 0, and where the two do different work."""
    told_apart: bool | None
    """True where the runs tell the two apart; None where they are the same trial, one is missing, or the two do
    different work."""
    predicted: PredictedPlan | None
    """The best of those never measured in full, among candidates that are at least `LIKELY` to be feasible."""

    def margin(self, row: RankedTrial) -> Margin | None:
        """Returns a trial's margin to the varied bound."""
        return next((one for one in row.margins if one.constraint == self.bound), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data. What was measured and what is predicted are different objects."""
        return {
            **shallow(self),
            "bound": str(self.bound),
            "value": self.bound.factor,
            "best": self._measured(self.best),
            "undecided": self._measured(self.undecided),
            "predicted": self.predicted and self.predicted.to_json(),
        }

    def _measured(self, row: RankedTrial | None) -> dict[str, Any] | None:
        if row is None:
            return None
        found = self.margin(row)
        own = ("trial_id", "label", "best_probability", "quality", "simulated")
        return {
            **{name: getattr(row, name) for name in own},
            "model": row.spec.model.name,
            "verdict": str(row.verdict),
            "measured": row.objective and _ends(row.objective),
            "bounded": found and found.got,
            "holds_probability": found and found.holds_probability,
        }


def _ends(found: Interval | Prediction) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The best plans by value of one bound: the gain of loosening it."""

    objective: Objective
    varied: VariedBound
    others: tuple[Constraint, ...]
    """The bounds that stay as they are."""
    points: tuple[FrontierPoint, ...]
    """By value, the tightest first."""
    num_measured: int
    """Trials that completed."""
    num_unmeasured: int
    """Candidates of the space that were never measured in full."""
    plans: tuple[LimitRows, ...] = ()
    """Of `wattune.ranking.limits.by_limit`, where the limit of power is varied."""
    has_predictions: bool
    """False where too little is known to predict the unmeasured candidates."""
    simulated: bool
    stamp: str = ""
    """Words across its plot, as of a ranking."""
    warnings: tuple[str, ...] = ()
    """Warnings of the rankings at all values: trials that do not compare, or that are left out; empty is good."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        plain = {name: value for name, value in shallow(self).items() if name != "others"}
        return {
            **plain,
            "objective": str(self.objective),
            "varied": {name: getattr(self.varied.bound, name) for name in ("metric", "operator", "limit_metric")}
            | {"values": self.varied.values},
            "constraints": [str(one) for one in self.others],
            "warnings": list(self.warnings),
            "points": [one.to_json() for one in self.points],
            "rack": split(self.plans),
        }


def frontier(
    posterior: Posterior,
    varied: VariedBound,
    *,
    plans: Sequence[LimitRows] = (),
    unmeasured: Unmeasured | None = None,
    num_unmeasured: int = 0,
    unreadable: Unreadable | None = None,
    ranking: Ranking | None = None,
) -> Frontier:
    """Finds the best plan at each value of a bound. Bounds of the question that it stands for are left out.

    `plans` are those at each limit of power, where that is varied; `unmeasured` the candidates without a full
    measurement, where they can be predicted, of `num_unmeasured` in all; `unreadable` repeats are not among the
    results. The warnings of a `ranking` that was computed stand, where no trial is read as a large one.
    """
    question, results = posterior.question, posterior.results
    objective = question.objective
    others = tuple(one for one in question.constraints if not varied.replaces(one))
    name = namer(spec.workload for spec in (*(spec for spec, _ in results), *(unmeasured[0] if unmeasured else ())))
    warnings = dict.fromkeys(ranking.warnings if ranking else ())
    looks: list[tuple[Posterior, RankedTrial | None, tuple[RankedTrial, ...]]] = []
    moved = posterior
    for value in reversed(varied.values):  # what surely breaks a bound breaks a tighter one too
        moved = moved.asking(replace(question, constraints=(*others, varied.at(value))), tighter=bool(looks))
        if ranking is None or SCALED_DOWN in ranking.stamp:  # all rankings warn of the same, but for small trials
            scaled = any(result.reading_errors for _, result in results)
            ranking = replace(ranking_of({"": moved}, ranked=scaled), unreadable=unreadable or {})
            warnings = dict.fromkeys(ranking.warnings) | warnings
        looks.insert(0, (moved, *_leading(moved, name)))
    assert ranking is not None, "a varied bound has values"
    points: list[FrontierPoint] = []
    for value, (moved, best, ahead) in zip(varied.values, looks, strict=True):
        bound, before = varied.at(value), points[-1].best if points else None
        gain, apart = _gain(before, best, moved, ranking)
        if best is not None:
            alike = (row for row in ahead if compares(row.spec, best.spec, objective.metric))
            ahead = tuple(row for row in alike if (ranking.lead_frac(row, best) or 0.0) > 0.0)
        predicted = unmeasured and _predicted(unmeasured, (*others, bound), best, objective.metric, name)
        points.append(
            FrontierPoint(
                bound=bound, best=best, undecided=_likely(ahead), gain_frac=gain, told_apart=apart, predicted=predicted
            )
        )
    done = [result for _, result in completed_pairs(results)]
    return Frontier(
        objective=objective,
        varied=varied,
        others=others,
        points=tuple(points),
        num_measured=len({result.trial_id for result in done}),
        num_unmeasured=num_unmeasured,
        plans=tuple(plans),
        has_predictions=unmeasured is not None,
        simulated=any(is_simulated(result) for result in done),
        stamp=ranking.stamp,
        warnings=tuple(warnings),
    )


def _likely(rows: tuple[RankedTrial, ...]) -> RankedTrial | None:
    """Returns the first trial that likely holds every bound, else the likeliest, else none."""
    known = ([one.holds_probability for one in row.margins if one.holds_probability is not None] for row in rows)
    likely = [min(each, default=1.0) for each in known]
    first = next((row for row, one in zip(rows, likely, strict=True) if one >= LIKELY), None)
    return first or (rows[likely.index(max(likely))] if rows else None)


def completed_pairs(results: Results) -> list[tuple[TrialSpec, Run]]:
    """Returns the repeats that completed, with their specifications."""
    return [(spec, result) for spec, result in results if completed([result])]


def usual_range(constraint: Constraint, results: Results) -> VariedBound | None:
    """Chooses round values of a study's bound that span it and what its repeats measured; None where nothing was."""
    found = []
    for _, result in completed_pairs(results):
        value, unit = result.metrics.get(constraint.metric), 1.0
        if constraint.limit_metric is not None:
            unit = result.metrics.get(constraint.limit_metric, 0.0)
        if value is not None and unit and math.isfinite(value / unit):
            found.append(value / unit)
    if not found:
        return None
    low, high = min(*found, constraint.factor), max(*found, constraint.factor)
    least = max(high - low, 1e-3 * abs(high), 1e-9) / _MOST_STEPS
    unit = 10.0 ** math.floor(math.log10(least))  # the step is the next of 1, 2, 5, 10, ... times a power of ten
    step = next(unit * factor for factor in (1.0, 2.0, 5.0, 10.0) if unit * factor >= least * (1 - 1e-9))
    numbers = range(math.floor(low / step), math.ceil(high / step) + 1)
    return VariedBound.rising(constraint, (float(f"{number * step:.12g}") for number in numbers))


def _leading(
    posterior: Posterior, name: Callable[[TrialSpec], str]
) -> tuple[RankedTrial | None, tuple[RankedTrial, ...]]:
    """Returns the first feasible trial of a ranking, and the undecided ones ahead of it, or all where none is."""
    objective, found, best = posterior.question.objective, posterior.front, math.inf
    likely, rows = found.likely, list[RankedTrial]()
    for row in posterior.best_first():
        price, _, _ = by_figure(row, objective)
        if price - best > 1e-9 * abs(best):  # those behind are not assessed
            break
        rows.append(replace(row, best_probability=likely.get((row.study, row.trial_id), 0.0)))
        best = min(best, price) if row.verdict is Verdict.FEASIBLE else best
    rows = sorted(named(rows, name), key=lambda row: by_figure(row, objective))
    ahead = [row for row in rows if row.verdict is Verdict.UNDECIDED and (row.study, row.trial_id) not in found.behind]
    return next((row for row in rows if row.verdict is Verdict.FEASIBLE), None), tuple(ahead)


def _gain(
    before: RankedTrial | None, best: RankedTrial | None, posterior: Posterior, ranking: Ranking
) -> tuple[float | None, bool | None]:
    """Returns by how much the best now measured better than the best before, and whether that is told apart."""
    if before is None or best is None or before.objective is None or best.objective is None:
        return None, None
    if best.trial_id == before.trial_id:
        return 0.0, None
    if not compares(best.spec, before.spec, ranking.objective.metric):
        return None, None
    gain = ranking.lead_frac(best, before)
    of_two = difference(
        ranking.objective.metric, Counted(before.counted, before.spreads), Counted(best.counted, best.spreads)
    )
    if of_two is None or of_two.p_value is None or of_two.p_value > 1.0 - CONFIDENCE_FRAC:
        return gain, False
    # The best one may have run once: among all that keep every bound, some other must be told to be better too.
    if surely_better(standing([before, best], posterior.question), len(posterior.results)):
        return gain, True
    feasible = [row for row in posterior.rows if row.verdict is Verdict.FEASIBLE]
    told = dict(zip((row.trial_id for row in feasible), ranks(standing(feasible, posterior.question)), strict=True))
    return gain, bool(told.get(before.trial_id, 1) > 1)


def _predicted(
    unmeasured: Unmeasured,
    constraints: Sequence[Constraint],
    best: RankedTrial | None,
    metric: str,
    name: Callable[[TrialSpec], str],
) -> PredictedPlan | None:
    """Finds the likely feasible candidate with the best prediction; None where none is. The varied bound is last."""
    (specs, found), bound = unmeasured, constraints[-1]
    feasible, within = np.exp(found.log_feasible(constraints)), found.log_holds(bound)
    if bound.metric == LIMIT and bound.limit_metric is None:  # the plan says it, for sure
        within = np.log([bound.holds({LIMIT: limit_of(spec)}) or 1e-300 for spec in specs])
        feasible = np.exp(found.log_feasible(constraints[:-1]) + within)
    score = np.where(feasible >= LIKELY, found.sign * found.objective.mean, -math.inf)
    row = int(score.argmax()) if len(score) else 0
    if not len(score) or score[row] == -math.inf:
        return None
    spec = specs[row]
    rival = best.objective if best is not None and compares(spec, best.spec, metric) else None
    beats = found.log_beats(rival.value) if rival is not None else None
    own = shallow(found.one(row, metric, constraints)) | {"feasible_probability": float(feasible[row])}
    return PredictedPlan(
        **own,
        spec=spec,
        label=name(spec),
        holds_probability=None if within is None else float(np.exp(within[row])),
        better_probability=None if beats is None else float(np.exp(beats[row])),
    )

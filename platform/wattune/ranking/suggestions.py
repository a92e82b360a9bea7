"""Suggestions of what to measure next within a budget: the expected gain of each, and the answer it could change.

A plan that never ran may become the best one: its expected gain is the strategy's, expected improvement times the
probability of feasibility. A measured plan is worth a repeat where its bounds are undecided and repeats can decide
them, or where the runs do not tell the best two apart.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from wattune.objective import Objective
from wattune.ranking.assessment import RankedTrial, shallow
from wattune.ranking.bounds import kept_in_draws
from wattune.ranking.order import Ranking
from wattune.ranking.work import compares
from wattune.run import Prediction
from wattune.search.names import namer
from wattune.search.strategies.model_guided import ModelGuided
from wattune.trial import TrialSpec
from wattune.units import format_probability

MOST_SUGGESTED: Final = 20
"""Most suggestions, however long the budget."""

SURE: Final = 0.95
"""P(best) from which the best two count as told apart, as in a race of finalists."""

_LEAST_DECIDED: Final = 0.05
"""Least probability that repeats decide a bound as held, for a repeat to be suggested."""
_LEAST_SHARE: Final = 0.1
"""Least expected gain of a plan, as a share of the noise of one measurement, for it to be suggested."""
_MOST_REPEATS: Final = 5
"""Most undecided trials that a repeat is suggested of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One trial that is worth running."""

    kind: Literal["new", "repeat"]
    spec: TrialSpec
    expected_s: float
    """Expected seconds from build to end, by trials for the same workers."""
    gain_frac: float | None = None
    """Expected improvement of the best feasible plan, as a fraction; None where it is not known."""
    feasible_probability: float | None = None
    """Of a new plan, that it completes and holds every bound. Of a repeat, that repeats without end show so."""
    predicted: Prediction | None = None
    """Of a new plan; None of a repeat, whose figures are measured, and while nothing can be predicted."""
    changes: str
    """The answer that it could change."""
    label: str = ""
    """Name of the plan, with the sizes of the workload where plans of the study differ in them."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        own = ("kind", "label", "expected_s", "gain_frac", "feasible_probability", "changes")
        ends = ("metric", "value", "low", "high")
        return {
            **{name: getattr(self, name) for name in own},
            "trial_id": self.spec.trial_id,
            "model": self.spec.model.name,
            "predicted": self.predicted and {name: getattr(self.predicted, name) for name in ends},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestions:
    """The best use of a budget."""

    objective: Objective
    budget_s: float
    listed: tuple[Suggestion, ...]
    """Most gain for its time first."""
    nothing: str
    """The reason why nothing is listed; empty where something is."""
    best: RankedTrial | None
    """The best feasible trial so far."""
    num_left: int
    """Candidates that were never measured in full."""
    gain_frac: float | None
    """Expected improvement if all of them were measured; None while no trial is feasible."""
    noise_frac: float | None
    """Noise of one measurement of the objective, likewise."""
    better_probability: float | None
    """Probability that one of them keeps every bound and is better than `best`, likewise."""
    warnings: tuple[str, ...] = ()
    """Warnings of the ranking: trials that do not compare, or that are left out; empty is good."""

    @property
    def expected_s(self) -> float:
        """Expected seconds of everything listed, one trial after another."""
        return sum(one.expected_s for one in self.listed)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        return {
            **{name: value for name, value in shallow(self).items() if name != "listed"},
            "objective": str(self.objective),
            "expected_s": self.expected_s,
            "suggestions": [one.to_json() for one in self.listed],
            "best": None if self.best is None else {"trial_id": self.best.trial_id, "label": self.best.label},
            "warnings": list(self.warnings),
        }


def suggest(
    model: ModelGuided,
    ranking: Ranking,
    left: Sequence[TrialSpec],
    expected_s: Callable[[TrialSpec], float],
    *,
    budget_s: float,
) -> Suggestions:
    """Chooses what to measure next of the candidates `left`, whose trials, one after another, take `budget_s` at most.

    The model was told all results, and never stops by itself. It proposes nothing but `left` afterwards. The ranking is
    by its objective and bounds.
    """
    model.lead_by(row.spec for row in ranking.feasible)  # a gain is over the plan that is named as the best
    gain, noise, likely = model.joint_gain(left) or (None, None, None)
    is_worth = gain is None or noise is None or gain >= noise
    worth = left if is_worth else ()
    new = _new_plans(model, ranking, [(one, expected_s(one)) for one in worth], budget_s)
    if noise is not None:  # the first stays: all plans left together are worth it, so the best of them is
        least = _LEAST_SHARE * noise
        new = [one for one in new if one is new[0] or one.gain_frac is None or one.gain_frac >= least]
    undecided = _undecided(ranking, expected_s)
    by_rate = sorted(
        (*undecided, *new), key=lambda one: -math.inf if one.gain_frac is None else -one.gain_frac / one.expected_s
    )
    wanted = [*by_rate, *_untold(ranking, expected_s)]
    listed: list[Suggestion] = []
    left_s = budget_s
    name = namer(spec.workload for spec in (*(row.spec for row in ranking.trials), *left))
    for one in wanted:
        if one.expected_s <= left_s and len(listed) < MOST_SUGGESTED:
            listed.append(replace(one, label=name(one.spec)))
            left_s -= one.expected_s
    found = Suggestions(
        objective=ranking.objective,
        budget_s=budget_s,
        listed=tuple(listed),
        nothing="",
        best=ranking.best,
        num_left=len(left),
        gain_frac=gain,
        noise_frac=noise,
        better_probability=likely,
        warnings=ranking.warnings,
    )
    if listed:
        return found
    times_s = [*(one.expected_s for one in wanted), *map(expected_s, worth)]
    return replace(found, nothing=_nothing(found, min(times_s, default=None), ranking))


def _nothing(found: Suggestions, shortest_s: float | None, ranking: Ranking) -> str:
    """Describes why nothing is listed; `shortest_s` is of the trials that are worth running, None without any."""
    if shortest_s is not None:
        return f"nothing fits in {found.budget_s:.0f} s: the shortest trial takes about {shortest_s:.0f} s"
    parts = []
    if not found.num_left:
        parts.append("every plan of the space was tried")
    elif found.gain_frac is not None and found.noise_frac is not None:
        parts.append(
            f"the expected gain of the {found.num_left} plans left is {found.gain_frac:.1%}, below the noise of "
            f"{found.noise_frac:.1%} (P {format_probability(found.better_probability or 0.0)} that one is better)"
        )
    if ranking.best is None:
        parts.append("no repeat is likely to make a plan feasible; loosen a bound or widen the space")
    elif len(ranking.feasible) > 1:
        likely = format_probability(ranking.best.best_probability or 0.0)
        parts.append(f"{ranking.name_of(ranking.best)} is the best with P {likely}")
    else:
        parts.append(f"{ranking.name_of(ranking.best)} is the only feasible plan")
    return f"nothing is worth measuring: {'; '.join(parts)}"


def _new_plans(
    model: ModelGuided, ranking: Ranking, left: Sequence[tuple[TrialSpec, float]], budget_s: float
) -> list[Suggestion]:
    """Asks the model for plans that fit, each as if those before it had run, until the budget is used."""
    times_s, left_s = dict(left), budget_s
    asked: dict[TrialSpec, float] = {}
    while len(asked) < MOST_SUGGESTED:
        # The model is told which: it may know less than every result, or candidates of an earlier space.
        model.restrict([spec for spec, takes_s in times_s.items() if takes_s <= left_s])
        if not (proposed := model.ask(1, times_s.__getitem__)):
            break
        asked[proposed[0]] = times_s.pop(proposed[0])
        left_s -= asked[proposed[0]]
    found = model.predict([*asked]) if asked else None
    gains = None if found is None else found.gain(ranking.constraints)
    now = "the first plan known to hold every bound"
    if ranking.best is not None:
        now = f"the best plan, now {ranking.name_of(ranking.best)}"
    suggestions = []
    for row, (spec, takes_s) in enumerate(asked.items()):
        predicted = None if found is None else found.one(row, ranking.objective.metric, ranking.constraints)
        suggestions.append(
            Suggestion(
                kind="new",
                spec=spec,
                expected_s=takes_s,
                gain_frac=None if gains is None else float(gains[row]),
                feasible_probability=None if predicted is None else predicted.feasible_probability,
                predicted=predicted,
                changes=now,
            )
        )
    return suggestions


def _undecided(ranking: Ranking, expected_s: Callable[[TrialSpec], float]) -> list[Suggestion]:
    """Suggests repeats of undecided trials that are ahead of the best feasible one, where repeats can decide.

    The lead is over the best of the same work: figures of other work do not compare.
    """
    found = []
    for row in ranking.undecided[:_MOST_REPEATS]:
        best = next((one for one in ranking.feasible if compares(one.spec, row.spec, ranking.objective.metric)), None)
        ahead = None if best is None else ranking.lead_frac(row, best)
        if ahead is not None and ahead <= 0:
            continue
        # The probability that repeats without end show it. What the sensor's gain alone leaves open none of them shows.
        drawn = kept_in_draws(
            row.margins, row.counted, row.spreads, row.study, risk=ranking.question.risk, simulated=row.simulated
        )
        probability = float(drawn.mean())
        if probability < _LEAST_DECIDED:
            continue
        open_ones = ", ".join(
            str(one.constraint)
            if one.holds_probability is None
            else f"{one.constraint} (P {format_probability(one.holds_probability)} now)"
            for one in row.undecided
        )
        leads = "" if ahead is None else f"; then it leads by {ahead:.1%}"
        suggestion = Suggestion(
            kind="repeat",
            spec=row.spec,
            expected_s=expected_s(row.spec),
            gain_frac=None if ahead is None else ahead * probability,
            feasible_probability=probability,
            changes=f"whether it holds {open_ones}{leads}",
        )
        found.append(suggestion)
    return found


def _untold(ranking: Ranking, expected_s: Callable[[TrialSpec], float]) -> list[Suggestion]:
    """Suggests repeats of the two trials that are most likely the best, where they are not told apart."""
    rows = sorted(ranking.feasible, key=lambda row: -(row.best_probability or 0.0))[:2]
    if len(rows) < 2 or ranking.near_probability >= SURE:
        return []
    first, second = rows
    text = f"whether {ranking.name_of(first)} or {ranking.name_of(second)} is best: P(best) " + " against ".join(
        format_probability(row.best_probability or 0.0) for row in rows
    )
    return [Suggestion(kind="repeat", spec=row.spec, expected_s=expected_s(row.spec), changes=text) for row in rows]

"""Racing of finalists: the trial to repeat next, until the best feasible one is told apart.

A finalist may be the best feasible trial: a leader, or a trial near a bound that more runs may show to keep it. What
the trials may truly be is drawn together, objective and bounds (`wattune.ranking.best`, `wattune.ranking.bounds`).
`P(best)` here is the share of draws in which a trial keeps every bound and leads all that do. It differs from the
ranking's `P(best)`, which takes the verdicts on bounds as given.

The next run goes to one of the two trials that are most likely the best, as in top-two Thompson sampling (Russo 2020,
"Simple Bayesian algorithms for best-arm identification", Operations Research 68). Of the two it is the one whose own
uncertainty decides more of the answer: its total effect (Saltelli et al. 2010, "Variance based sensitivity analysis of
model output", Computer Physics Communications 181), times the share of its variance that one more run takes away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from wattune.arrays import Floats, Indices
from wattune.fidelity import is_soak
from wattune.objective import Constraint, Objective
from wattune.ranking.assessment import RankedTrial, Verdict, assess_trial, finite
from wattune.ranking.best import NUM_DRAWS, Standing, drawn_errors, standing
from wattune.ranking.bounds import RISK, kept_in_draws
from wattune.ranking.spreads import Results, Spreads, ordinary
from wattune.trial import TrialResult

RACE_TAG: Final = "race"
"""Tag of the runs of a race; its value is the probability at which the race ends."""

MOST_FINALISTS: Final = 200
"""Most trials that are drawn. A trial beyond them is behind as many others."""

MOST_MOMENTS: Final = 24
"""Most repeats of a race for which its history is computed."""

_SEED: Final = 20260302
_HOPELESS: Final = 0.005
"""Probability that the next run keeps a bound below which a trial is no finalist. At a risk of 5 % such a trial truly
keeps the bound with a probability of at most 0.005 / 0.95, by Markov's inequality."""

_FAR: Final = 8.0
"""Standard errors behind the first feasible trial from which a trial is no finalist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """One trial of the race."""

    row: RankedTrial
    best_probability: float
    """Share of draws in which it keeps every bound and leads."""
    total_effect: float
    """Probability that the answer changes when what is unknown of this trial alone is drawn anew. Computed for the
    two most likely trials, else 0."""

    @property
    def num_runs(self) -> int:
        """Ordinary runs so far."""
        return len(ordinary(self.row.counted))

    def worth(self, num_running: int) -> float:
        """Returns the part of its total effect that one more run takes away.

        Args:
            num_running: Runs of it whose results are not there yet.
        """
        known = self.num_runs + num_running
        return self.total_effect * self.num_runs / (known * (known + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standings:
    """The finalists, the most likely one first."""

    finalists: tuple[Finalist, ...]
    none_probability: float
    """Share of draws in which no trial keeps every bound."""

    @property
    def leader(self) -> Finalist | None:
        """The trial that is most likely the best; None if no trial can be."""
        return self.finalists[0] if self.finalists else None

    @property
    def best_probability(self) -> float:
        """The leader's P(best); 0 without one."""
        return self.finalists[0].best_probability if self.finalists else 0.0

    def told_apart(self, until: float) -> bool:
        """Returns true if the answer is known: which trial is the best, or that none keeps every bound."""
        return max(self.best_probability, self.none_probability) >= until

    def next(self, running: Mapping[str, int]) -> RankedTrial | None:
        """Returns the trial whose next run tells most; None if no trial can be the best.

        Args:
            running: Runs by trial id whose results are not there yet.
        """
        pair = self.finalists[:2]
        if not pair:
            return None
        return max(pair, key=lambda one: (one.worth(running.get(one.row.trial_id, 0)), -one.num_runs)).row


def standings(
    results: Results, objective: Objective, constraints: Sequence[Constraint], *, risk: float = RISK
) -> Standings:
    """Computes who may be the best feasible trial, from every result of one study.

    Long runs are left out: they follow the race, and must not open it again.

    Args:
        results: Every repeat of the study's trials.
        objective: The metric to maximize or minimize.
        constraints: Bounds that must hold.
        risk: Accepted probability that the next run of a feasible trial breaks a bound.
    """
    kept = [(spec, finite(result)) for spec, result in results if not is_soak(result)]
    spreads, repeats = Spreads(kept), dict[str, list[TrialResult]]()
    specs = {result.trial_id: spec for spec, result in kept}
    for _, result in kept:
        repeats.setdefault(result.trial_id, []).append(result)
    rows = []
    for trial_id, unordered in repeats.items():
        ordered = tuple(sorted(unordered, key=lambda result: result.repeat))
        row = assess_trial("", specs[trial_id], ordered, spreads, objective, constraints, risk=risk)
        if _may_be_best(row):
            rows.append(row)
    if not rows:
        return Standings(finalists=(), none_probability=1.0)
    rows.sort(key=lambda row: row.trial_id)  # draws must not depend on the order of reading
    one = _standing(rows, spreads, objective)
    near = _near(one, rows)
    return _drawn(one, near, [rows[index] for index in near], spreads, constraints, risk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The standings of a race after so many of its repeats."""

    num_repeats: int
    best_probability: Mapping[str, float]
    """P(best) by trial id; a trial that cannot be the best is absent."""
    none_probability: float


def history(
    results: Results, objective: Objective, constraints: Sequence[Constraint], *, risk: float = RISK
) -> list[Moment]:
    """Computes how P(best) moved over the repeats of a race, from the results alone, in the order in which they ended.

    The first moment is before the first repeat of the race. Of more than `MOST_MOMENTS` repeats some are left out, so
    that a long race costs no more than a short one.

    Args:
        results: Every repeat of a study's trials.
        objective: The metric to maximize or minimize.
        constraints: Bounds that must hold.
        risk: Accepted probability that the next run of a feasible trial breaks a bound.

    Returns:
        The moments in order; none without a repeat of a race.
    """
    ended = sorted(results, key=lambda pair: (pair[1].end_wall_ns, pair[1].trial_id, pair[1].repeat))
    ends = [index + 1 for index, (_, result) in enumerate(ended) if RACE_TAG in result.tags]
    if not ends:
        return []
    num_runs = [ends[0] - 1, *ends]
    moments = []
    for number in sorted({round(at) for at in np.linspace(0, len(ends), min(len(ends), MOST_MOMENTS) + 1)}):
        found = standings(ended[: num_runs[number]], objective, constraints, risk=risk)
        likely = {one.row.trial_id: one.best_probability for one in found.finalists}
        moments.append(Moment(num_repeats=number, best_probability=likely, none_probability=found.none_probability))
    return moments


def _may_be_best(row: RankedTrial) -> bool:
    """Returns whether more runs may show that a trial keeps every bound."""
    if row.verdict not in (Verdict.FEASIBLE, Verdict.UNDECIDED, Verdict.INFEASIBLE) or row.objective is None:
        return False
    likely = [margin.holds_probability for margin in row.margins]
    return not row.missing and all(one is not None and one >= _HOPELESS for one in likely)


def _standing(rows: Sequence[RankedTrial], spreads: Spreads, objective: Objective) -> Standing:
    fitted = spreads.fitted(objective.metric)
    assert fitted is not None, "every row has its objective"
    numbers = [spreads.number(row.counted, objective.metric) for row in rows]
    values = np.array([row.objective.value for row in rows if row.objective])
    return standing([(fitted.scatter, np.array(numbers, np.intp), values)], maximize=objective.maximize)


def _near(one: Standing, rows: Sequence[RankedTrial]) -> Indices:
    """Returns the numbers of trials that are not far behind the first feasible one."""
    feasible = [index for index, row in enumerate(rows) if row.verdict is Verdict.FEASIBLE]
    behind = -one.mean
    if feasible:
        first = max(feasible, key=lambda index: one.mean[index])
        shared = ((one.common - one.common[first]) ** 2).sum(axis=1)
        behind = (one.mean[first] - one.mean) / np.sqrt(one.own[first] + one.own + shared + 1e-300)
    near = np.argsort(behind, kind="stable")[:MOST_FINALISTS]
    return near[behind[near] < _FAR] if feasible else near


def _drawn(
    one: Standing,
    near: Indices,
    rows: Sequence[RankedTrial],
    spreads: Spreads,
    constraints: Sequence[Constraint],
    risk: float,
) -> Standings:
    """Draws what the trials may truly be, and counts."""
    rng = np.random.default_rng(_SEED)
    own, shared = drawn_errors(one, near, rng)
    by_text = {str(constraint): constraint for constraint in constraints}
    keeps = np.stack(
        [
            kept_in_draws(
                [(margin, by_text[margin.constraint]) for margin in row.margins],
                row.counted,
                spreads,
                rng,
                NUM_DRAWS,
                risk=risk,
                simulated=row.simulated,
            )
            for row in rows
        ],
        axis=1,
    )
    alone = np.where(keeps, one.mean[near] + own, -np.inf)
    figures = alone + shared
    first = _first(figures)
    shares = np.bincount(first, minlength=len(rows) + 1) / NUM_DRAWS
    order = sorted(range(len(rows)), key=lambda index: (-shares[index], rows[index].trial_id))
    effects = {index: _total_effect(index, first, alone, shared, rng) for index in order[:2]}
    finalists = tuple(
        Finalist(row=rows[index], best_probability=float(shares[index]), total_effect=effects.get(index, 0.0))
        for index in order
        if shares[index] > 0.0
    )
    return Standings(finalists=finalists, none_probability=float(shares[len(rows)]))


def _first(figures: Floats) -> Indices:
    """Returns the number of the trial that leads in each draw; the number of trials where none keeps its bounds."""
    first: Indices = figures.argmax(axis=1)
    first[np.isneginf(figures[np.arange(len(first)), first])] = figures.shape[1]
    return first


def _total_effect(index: int, first: Indices, alone: Floats, shared: Floats, rng: np.random.Generator) -> float:
    """Computes how often the leader changes when one trial's own unknowns are drawn anew, by shuffling its draws.

    Args:
        index: Number of the trial.
        first: The leader of each draw.
        alone: [draws, trials]: what each is without what trials share, minus infinity where it breaks a bound.
        shared: [draws, trials]: what trials share.
        rng: Source of the order.
    """
    anew = alone.copy()
    anew[:, index] = rng.permutation(anew[:, index])
    return float((_first(anew + shared) != first).mean())

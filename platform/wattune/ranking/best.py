"""The best of trials: the probability to be it with every bound, which ones are told apart, and whom to repeat next.

Figures of one study share their drift and node offsets, so a difference of two trials is surer than their intervals
suggest. What trials may truly be is drawn together, objective and bounds, with a fixed seed. `P(best)` is the share of
draws in which a trial keeps every bound and leads all that do.

A trial is told to be better than another by multiple comparisons with the best (Hsu 1981, "Simultaneous confidence
intervals for all distances from the best", Annals of Statistics 9; Hsu 1996, Multiple Comparisons, chapter 4). Each
trial is the control of one-sided comparisons with all others at once. So the truly best one is told to be worse than
another with a probability of at most 5 %, however many trials there are. A rank is 1 plus the trials told to be better.

The next run goes to one of the two trials that are most likely the best, as in top-two Thompson sampling (Russo 2020,
"Simple Bayesian algorithms for best-arm identification", Operations Research 68). Of the two it is the one whose own
uncertainty decides more of the answer: its total effect (Saltelli et al. 2010, "Variance based sensitivity analysis of
model output", Computer Physics Communications 181), times the share of its variance that one more run takes away.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import Final

import numpy as np
import numpy.typing as npt

from wattune.arrays import Floats, Indices
from wattune.fidelity import measuring, ordinary
from wattune.intervals import CONFIDENCE_FRAC
from wattune.metrics import METRICS
from wattune.objective import Question
from wattune.ranking.assessment import RankedTrial, Verdict
from wattune.ranking.bounds import kept_in_draws
from wattune.ranking.dice import NUM_DRAWS, normal_quantiles, order, scatter_quantiles, t_quantiles
from wattune.ranking.scatter import Scatter
from wattune.ranking.work import depends_on_work, work_of
from wattune.run import Run
from wattune.trial import TrialSpec

_TABLE_SEED: Final = 20260301

MOST_FINALISTS: Final = 200
"""Most trials that are drawn. A trial beyond them is behind as many others."""

FAR: Final = 8.0
"""Standard errors behind the trial that surely keeps its bounds from which a trial is not drawn: it would win in no
draw."""

SURELY: Final = 1e-3
"""Probability that none of the first feasible trials truly keeps its bounds, below which the last of them stands for
what others must beat."""

HOPELESS: Final = 0.005
"""Probability that the next run keeps a bound below which a trial is not drawn. At a risk of 5 % such a trial truly
keeps the bound with a probability of at most 0.005 / 0.95, by Markov's inequality."""

MAY_BE_BEST: Final = 0.01
"""Least P(best), given that it keeps every bound, from which a plan could still be the best."""

NEAR_FRAC: Final = 0.02
"""Lead for which nobody changes a plan, as a fraction: which of two plans so near is the better one is left open."""

_BY_TIME: Final = ("speed", "energy")
"""Groups of metrics that a faster host makes better: by at most the share of a step that devices wait for it, since
they draw no more power while they wait."""

_ROWS_AT_ONCE: Final = 512
_MOST_WAITING: Final = 0.95
"""Largest share of a step by which a trial is taken to be faster without its host."""

_ALIKENESS: Final = 20
"""Steps between correlations 0 and 1 for which critical values are kept."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Trials of one metric, more is better, on one scale: the logarithmic one if every model has that."""

    mean: Floats
    own: Floats
    """Variance of each mean by the trial's own runs."""
    freedom: Floats
    """Degrees of freedom of that variance."""
    common: Floats
    """[trials, effects]: drift, node offsets and the day of the study, scaled so that each effect has variance 1."""
    shared_freedom: float
    """Degrees of freedom of what is known of scatter by all trials together."""
    logarithmic: bool = True

    def of(self, rows: Indices) -> "Standing":
        """Returns some of the trials."""
        some = {name: getattr(self, name)[rows] for name in ("mean", "own", "freedom", "common")}
        return replace(self, **some)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standings:
    """The trials that may be the best, the most likely one first."""

    finalists: tuple[RankedTrial, ...] = ()
    """Each with the share of draws in which it keeps every bound and leads."""
    effects: tuple[float, ...] = ()
    """Probability that the answer changes when what is unknown of one of the first two alone is drawn anew."""
    none_probability: float = 1.0
    """Share of draws in which no trial keeps every bound."""
    near_probability: float = 0.0
    """Share of draws in which the leader keeps every bound and none that does is better by more than `NEAR_FRAC`."""
    regression: float = 0.0
    """Expected fall of the first feasible trial when it runs again, as a fraction of its figure (in the metric's unit
    on its own scale): the expected error of whichever feasible trial leads, if all were measured anew (a parametric
    bootstrap: Efron and Tibshirani 1993, An Introduction to the Bootstrap, sections 6.5 and 10.2)."""
    logarithmic: bool = True
    behind: Mapping[tuple[str, str], RankedTrial] = field(default_factory=dict)
    """Undecided trials that are not the best even if they keep every bound, by study and trial id, each with the trial
    that leads most often where it does not."""

    @property
    def leader(self) -> RankedTrial | None:
        """The trial that is most likely the best; None if no trial can be."""
        return self.finalists[0] if self.finalists else None

    @property
    def best_probability(self) -> float:
        """The leader's P(best); 0 without one."""
        return (self.finalists[0].best_probability or 0.0) if self.finalists else 0.0

    @property
    def likely(self) -> dict[tuple[str, str], float]:
        """P(best) by study and trial id; a trial that cannot be the best is absent."""
        return {(one.study, one.trial_id): one.best_probability or 0.0 for one in self.finalists}

    @property
    def unproven(self) -> RankedTrial | None:
        """The leader where it promises to keep a bound after one run, which does not tell how its own runs scatter."""
        one = self.leader
        return one if one is not None and one.margins and len(ordinary(one.counted)) < 2 else None

    def told_apart(self, until: float) -> bool:
        """Returns true if the answer is known: a trial that is the best or near it, or that none keeps every bound."""
        return self.none_probability >= until or (self.near_probability >= until and self.unproven is None)

    def next(self, running: Mapping[str, int], until: float = 1.0) -> RankedTrial | None:
        """Returns the trial whose next run tells most, after those `running` by id; None if none can be the best.

        A leader that is the best or near it with a probability of `until` and is not proven runs again first. Nothing
        else runs before it is known how that ended: it most likely was the last run that was needed.
        """
        if self.near_probability >= until and (row := self.unproven):
            return None if running.get(row.trial_id) else row

        def order(at: int) -> tuple[float, int]:
            """Returns the part of a trial's effect that one more run takes away, after those that are running."""
            row = self.finalists[at]
            num_runs = len(ordinary(row.counted))
            known = num_runs + running.get(row.trial_id, 0)
            return self.effects[at] * num_runs / (known * (known + 1)), -num_runs

        return self.finalists[max(range(len(self.effects)), key=order)] if self.effects else None


def on_one_scale(parts: Sequence[tuple[Scatter, Indices, Floats]], *, maximize: bool) -> Standing:
    """Puts trials of one or several models on one scale, by the numbers and the figures of those that are compared."""
    logarithmic = all(found.typical is None for found, _, _ in parts)
    sign = 1.0 if maximize else -1.0
    several = int(len(parts) > 1)  # each study is of its own day and device then
    effects, at = sum(found.shared.shape[1] + several for found, _, _ in parts), 0
    means, owns, freedoms, commons = [], [], [], []
    for found, numbers, values in parts:
        # A model on the logarithmic scale beside one that is not is taken to its metric's unit.
        size = np.abs(values) if found.typical is None and not logarithmic else np.ones(len(values))
        root = np.linalg.cholesky(found.shared_covariance)
        common = np.zeros((len(numbers), effects))
        common[:, at : at + len(root)] = (found.shared[numbers] @ root) * size[:, None]
        common[:, at + len(root) : at + len(root) + several] = (found.elsewhere * size)[:, None]
        at += len(root) + several
        means.append(sign * (np.log(values) if logarithmic else values))
        owns.append(size**2 / found.weight[numbers])
        freedoms.append(found.degrees_of_freedom[numbers])
        commons.append(common)
    return Standing(
        mean=np.concatenate(means),
        own=np.concatenate(owns),
        freedom=np.concatenate(freedoms),
        common=np.concatenate(commons),
        shared_freedom=min(found.steady.degrees_of_freedom for found, _, _ in parts),
        logarithmic=logarithmic,
    )


def standing(rows: Sequence[RankedTrial], question: Question) -> Standing:
    """Puts assessed trials on one scale, in their order; there is at least one, and each has its objective."""
    metric = question.objective.metric
    models: dict[int, tuple[Scatter, list[tuple[int, int, float]]]] = {}
    unseen: list[float] = []
    for place, row in enumerate(rows):
        placed = row.spreads.placed(row.counted, metric)
        assert placed is not None and row.objective is not None, "every row has its objective"
        fitted, number = placed
        models.setdefault(id(fitted), (fitted.scatter, []))[1].append((place, number, row.objective.value))
        unseen.append(fitted.reading_error(row.counted, metric) ** 2)
    parts = [
        (found, np.array([number for _, number, _ in own], np.intp), np.array([value for _, _, value in own]))
        for found, own in models.values()
    ]
    places = np.array([place for _, own in models.values() for place, _, _ in own], np.intp)
    found = on_one_scale(parts, maximize=question.objective.maximize).of(np.argsort(places))
    return replace(found, own=found.own + np.array(unseen))


def standings(rows: Sequence[RankedTrial], question: Question) -> Standings:
    """Computes who may be the best trial that keeps every bound, of one or several studies."""
    able = sorted(filter(may_be_best, rows), key=lambda row: (row.trial_id, row.study))  # whatever the order of reading
    if not able:
        return Standings()
    one, metric = standing(able, question), question.objective.metric
    waits = np.array([waiting_frac(row.counted, metric) for row in able])
    values = np.array([1.0 if row.objective is None else row.objective.value for row in able])
    headroom = headroom_of(waits, values, maximize=question.objective.maximize, logarithmic=one.logarithmic)
    number: dict[str, int] = {}
    works = np.array([number.setdefault(work_behind(row.spec, metric), len(number)) for row in able], np.intp)
    drawn = Drawn(one, headroom, works, lambda place: (able[place].study, able[place].trial_id))
    first = np.argsort(-(one.mean + headroom), kind="stable")
    found, each = drawn.standings(question.risk, first, able.__getitem__), dict(enumerate(able))
    return replace(found, regression=drawn.regression(each), behind=drawn.behind(each))


def work_behind(spec: TrialSpec, metric: str) -> str:
    """Returns a trial's work, where figures of different work do not compare; else nothing."""
    return work_of(spec, metric) if depends_on_work(metric) else ""


class Drawn:
    """Draws of trials together: of what they share, of each by its own runs, and of its bounds.

    A trial that cannot reach the first of its work in any draw is not drawn. Of one that in every draw is behind two of
    its work that keep every bound, the bounds are not drawn: it leads in none.
    """

    def __init__(self, one: Standing, headroom: Floats, works: Indices, name: Callable[[int], tuple[str, str]]) -> None:
        """Draws what they share.

        Args:
            one: The trials on one scale.
            headroom: By how much each would be better if its host took no time.
            works: Numbers of the works (`work_behind`), without gaps.
            name: Returns the study of a trial, empty if there is one, and its id.
        """
        self._one, self._headroom, self._works, self._name = one, headroom, works, name
        self._of_work = [Leads() for _ in range(int(works.max()) + 1)]
        self._rows: dict[int, RankedTrial] = {}
        """By place, trials that may lead in a draw."""
        self._drawn: set[int] = set()
        self._beyond: set[int] = set()
        """Places of trials that were drawn, and of those that were too many."""
        # What is known of scatter by all trials together is wrong for all of them at once. Where trials scatter
        # differently, each one's own variance is what is uncertain.
        self._factor = scatter_quantiles(one.shared_freedom)[order("scatter")]
        effects = [normal_quantiles()[order("effect", str(number))] for number in range(one.common.shape[1])]
        self._effects = self._factor * np.array(effects)
        # How far a trial may come in any draw, beside what the first of all shares with it.
        first, apart = one.common[one.mean.argmax()], np.abs(self._effects).max(axis=1)
        most = max(t_quantiles(float(one.freedom.min()))[-1], normal_quantiles()[-1] * self._factor.max())
        self._reach = one.mean + headroom + most * np.sqrt(one.own) + np.abs(one.common - first) @ apart
        self._of_first = first @ self._effects

    def figure(self, place: int) -> Floats:
        """Draws the figure of a trial."""
        return self._alone(place) + self._shared(place)

    def _alone(self, place: int) -> Floats:
        """Draws a figure without what trials share."""
        one, at, freedom = self._one, order(*self._name(place)), float(self._one.freedom[place])
        itself = freedom < one.shared_freedom
        error = t_quantiles(freedom)[at] if itself else normal_quantiles()[at] * self._factor
        return np.asarray(one.mean[place] + math.sqrt(one.own[place]) * error)

    def _shared(self, place: int) -> Floats:
        return np.asarray(self._one.common[place] @ self._effects)

    def standings(self, risk: float, left: Indices, row_of: Callable[[int], RankedTrial | None]) -> Standings:
        """Computes who leads of some trials, the most promising one first.

        `row_of` assesses a trial by its place, and returns None if no runs can show that it keeps every bound. It is
        asked for those alone that may lead in a draw.
        """
        one, first = self._one, Leads()
        kept, floors = dict[int, npt.NDArray[np.bool_]](), np.full(len(self._of_work), -np.inf)
        while len(left) and len(self._drawn) < MOST_FINALISTS:
            place, left = int(left[0]), left[1:]
            figure, work = self.figure(place), int(self._works[place])
            of_work, row = self._of_work[work], None
            if of_work.leads_in(figure) and (row := row_of(place)) is None:
                continue
            self._drawn.add(place)
            if row is not None:
                self._rows[place] = row
                kept[place] = kept_in_draws(
                    row.margins, row.counted, row.spreads, row.study, risk=risk, simulated=row.simulated
                )
                for leads in (of_work, first):
                    leads.add(place, np.where(kept[place], figure, -np.inf))
                floors[work] = (of_work.top - self._of_first).min()
                left = left[self._reach[left] > floors[self._works[left]]]
        self._beyond = {*left.tolist()}
        shares = np.bincount(first.place + 1, minlength=len(one.mean) + 1) / NUM_DRAWS
        leading = [place for place in kept if shares[place + 1] > 0.0]
        leading.sort(key=lambda place: (-shares[place + 1], self._name(place)[::-1]))
        effects, near = [], 0.0
        for place in leading[:2]:
            alone, is_first = np.where(kept[place], self._alone(place), -np.inf), first.place == place
            if place == leading[0]:
                margin = -np.log1p(-NEAR_FRAC) if one.logarithmic else NEAR_FRAC * abs(one.mean[place])
                near = float((alone + self._shared(place) >= np.maximum(first.top, -1e300) - margin).mean())
            anew = alone[order(*self._name(place), "anew")] + self._shared(place)
            effects.append(float((is_first != (anew > np.where(is_first, first.second, first.top))).mean()))
        return Standings(
            finalists=tuple(replace(self._rows[place], best_probability=float(shares[place + 1])) for place in leading),
            effects=tuple(effects),
            none_probability=float(shares[0]),
            near_probability=near,
            logarithmic=one.logarithmic,
        )

    def regression(self, rows: Mapping[int, RankedTrial]) -> float:
        """Computes the expected error of whichever feasible one of the drawn trials leads."""
        feasible, leads = [place for place in self._drawn if rows[place].verdict is Verdict.FEASIBLE], Leads()
        for place in feasible:
            leads.add(place, self.figure(place))
        return max(float((leads.top - self._one.mean[leads.place]).mean()), 0.0) if len(feasible) > 1 else 0.0

    def behind(self, rows: Mapping[int, RankedTrial]) -> dict[tuple[str, str], RankedTrial]:
        """Finds the undecided ones of some trials that are not the best even if they keep every bound, by place.

        Their host is taken to cost no time. Each has the trial that leads most often where it does not. Trials of one
        work compare with one another alone.
        """
        found: dict[tuple[str, str], RankedTrial] = {}
        # Those that were not drawn lead where none of the drawn ones keeps its bounds.
        leaders = [
            _most_often(each.place) if (each.place >= 0).mean() > 1.0 - MAY_BE_BEST else None for each in self._of_work
        ]
        for place, row in rows.items():
            if row.verdict is not Verdict.UNDECIDED or place in self._beyond:
                continue
            leads, leader = self._of_work[self._works[place]], leaders[self._works[place]]
            if place in self._drawn:
                is_first = leads.place == place
                ahead = self.figure(place) + self._headroom[place] > np.where(is_first, leads.second, leads.top)
                leader = _most_often(leads.place[~is_first]) if ahead.mean() < MAY_BE_BEST else None
            if leader is not None:
                found[row.study, row.trial_id] = self._rows[leader]
        return found


def _most_often(places: Indices) -> int:
    """Returns the place that leads most often."""
    return int(np.bincount(places[places >= 0]).argmax())


class Leads:
    """The first and the second of the trials that were added, by draw: none is minus infinity, and the place -1."""

    def __init__(self) -> None:
        """Starts without a trial."""
        self.top, self.second = np.full((2, NUM_DRAWS), -np.inf)
        self.place = np.full(NUM_DRAWS, -1)

    def leads_in(self, figure: Floats) -> bool:
        """Tells whether a trial may be the first or the second in a draw."""
        return bool((figure > self.second).any())

    def add(self, place: int, figure: Floats) -> None:
        """Adds a trial: minus infinity where it does not keep every bound."""
        ahead = figure > self.top
        self.second = np.where(ahead, self.top, np.maximum(self.second, figure))
        self.top, self.place = np.where(ahead, figure, self.top), np.where(ahead, place, self.place)


def waiting_frac(counted: Sequence[Run], metric: str) -> float:
    """Returns the share of a step that a trial's devices wait for their host; 0 where a metric is not of time."""
    if METRICS[metric].group not in _BY_TIME:
        return 0.0
    waits = [run.metrics.get("host_bound_frac", 0.0) for run in measuring(ordinary(counted), "host_bound_frac")]
    return min(max(fmean(waits), 0.0), _MOST_WAITING)


def headroom_of(waits: Floats, values: Floats, *, maximize: bool, logarithmic: bool) -> Floats:
    """Computes by how much figures could be better at most if devices never waited for their host, on their scale.

    A slow host is that of the run, not of the plan.
    """
    gain: Floats = -np.log1p(-waits)
    return gain if logarithmic else np.abs(values) * (np.expm1(gain) if maximize else waits)


def may_be_best(row: RankedTrial) -> bool:
    """Returns whether more runs may show that a trial keeps every bound."""
    if row.verdict not in (Verdict.FEASIBLE, Verdict.UNDECIDED, Verdict.INFEASIBLE) or row.objective is None:
        return False
    likely = [margin.holds_probability for margin in row.margins]
    return not row.missing and all(one is not None and one >= HOPELESS for one in likely)


def _variance(one: Standing, rows: Indices) -> Floats:
    """Computes the variance of the difference between some trials and all, [rows, trials]. With itself it is 0."""
    found = one.own[rows, None] + one.own[None, :]
    for effect in one.common.T:
        if effect.any():
            found += (effect[rows, None] - effect[None, :]) ** 2
    found[np.arange(len(rows)), rows] = 0.0
    return found


def ranks(one: Standing) -> Indices:
    """Returns each trial's rank: 1 plus those that are told to be better than it."""
    by_mean = np.argsort(-one.mean, kind="stable")
    ordered = one.of(by_mean)
    found = np.ones(len(one.mean), np.intp)
    if len(found) < 2:
        return found
    typical = float(np.median(one.own))
    for start in range(0, len(by_mean), _ROWS_AT_ONCE):
        rows = np.arange(start, min(start + _ROWS_AT_ONCE, len(by_mean)))
        alike = ordered.own[rows] / (ordered.own[rows] + typical)
        critical = np.array(
            [
                critical_value(len(by_mean) - 1, int(_ALIKENESS * share), max(3, min(int(freedom), 60)))
                for share, freedom in zip(alike, ordered.freedom[rows], strict=True)
            ]
        )
        # Only those before it have a larger mean, and of them the first are told to be better, whatever they share.
        common, own = ordered.common, (1.0 + 1e-9) * (ordered.own[rows] + ordered.own.max())
        apart = np.maximum(common.max(axis=0) - common[rows], common[rows] - common.min(axis=0)) ** 2
        sure = ordered.mean[rows] + np.abs(critical) * np.sqrt(own + (1.0 + 1e-9) * apart.sum(axis=1))
        first = int(np.searchsorted(-ordered.mean, -sure.max()))
        ahead = ordered.of(np.arange(first, int(rows[-1]) + 1))
        gaps = ahead.mean[None, :] - ordered.mean[rows, None]
        told = (gaps > 0) & (gaps**2 > critical[:, None] ** 2 * _variance(ahead, rows - first))
        found[by_mean[rows]] += first + told.sum(axis=1)
    return found


def surely_better(pair: Standing, most_others: int) -> bool:
    """Returns true where the second of two trials is told to be better than the first, whatever others there are."""
    degrees, gap = max(3, min(int(pair.freedom[0]), 60)), pair.mean[1] - pair.mean[0]
    critical = max(critical_value(most_others, alike, degrees) for alike in range(_ALIKENESS + 1))
    return bool(gap > 0 and gap**2 > critical**2 * _variance(pair, np.array([0]))[0, 1])


@lru_cache(maxsize=4096)
def critical_value(num_others: int, alikeness: int, degrees_of_freedom: int) -> float:
    """Returns the critical value of Dunnett's one-sided comparisons of one trial with others (Dunnett 1955).

    Comparisons with one trial share its error, so they correlate by its share in their variance. The largest of n
    independent normal draws is drawn in one step, as the normal quantile of U to the power 1/n. `alikeness` is the
    correlation of two comparisons in twentieths, rounded down: the value then is on the safe side.
    """
    correlation = alikeness / _ALIKENESS
    largest, own, factor = _dice(num_others, degrees_of_freedom)
    statistics = factor * (math.sqrt(1.0 - correlation) * largest + math.sqrt(correlation) * own)
    return float(np.quantile(statistics, CONFIDENCE_FRAC))


@lru_cache(maxsize=64)
def _dice(num_others: int, degrees_of_freedom: int) -> tuple[Floats, Floats, Floats]:
    """Draws the largest of so many normal numbers, one of its own, and the error of a standard deviation."""
    rng, num = np.random.default_rng(_TABLE_SEED), 20_000
    largest = _normal_quantile(rng.random(num), num_others)
    factor = np.sqrt(degrees_of_freedom / rng.chisquare(degrees_of_freedom, num))
    return largest, rng.standard_normal(num), factor


def _normal_quantile(uniform: Floats, power: int) -> Floats:
    """Computes the normal quantile of `uniform` to the power 1/`power`, from a table of the tail."""
    above = -np.expm1(np.log(uniform) / power)  # 1 - U**(1/n), exact where that is close to 0
    grid = np.linspace(-8.0, 9.0, 3401)
    tail = np.array([0.5 * math.erfc(x / math.sqrt(2.0)) for x in grid])
    return np.interp(np.log(above), np.log(tail[::-1]), grid[::-1])

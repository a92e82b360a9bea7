"""Ranking: the trials that keep every bound in order, and what each other trial lacks.

If two trials are not told apart, the measurement does not separate them and neither ranks above the other. They are
listed by the middle of their intervals: a wide or narrow interval moves no row.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, Final

from wattune.errors import SpaceError, closest
from wattune.fidelity import DECIDED_BY_STEP_TIME, measuring
from wattune.metrics import METRICS
from wattune.objective import Condition, Constraint, Objective, Question
from wattune.ranking.assessment import SIZES, RankedTrial, Verdict, completed, group_quality, start_up_text
from wattune.ranking.best import Standings, ranks, standing, standings
from wattune.ranking.bounds import true_text
from wattune.ranking.common_steps import describe
from wattune.ranking.conditions import Where, keeps, unmet
from wattune.ranking.posterior import Posterior
from wattune.ranking.recordings import differences
from wattune.ranking.scaled import scaled_texts
from wattune.ranking.scatter import factor
from wattune.ranking.spreads import Results, middle
from wattune.ranking.work import depends_on_work, work_of
from wattune.run import QUALITIES, Run
from wattune.scale_down.reading import SCALED
from wattune.search.names import namer
from wattune.storage.study import Unreadable
from wattune.trial import TrialSpec

SCALED_DOWN: Final = "SCALED DOWN"
"""Words across plots of small trials that are read as large ones."""

MOST_NAMED: Final = 10
"""Most unreadable trials that warnings name one by one; `unreadable` has all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceShare:
    """The share of a study's space that was measured."""

    study: str
    num_candidates: int
    """Trials of the space: combinations that no rule rejects, each kind of work once."""
    num_measured: int
    """Those with a completed repeat, none of whose repeats failed; a burst is none."""
    num_failed: int
    """Those that ran and did not complete, or of which a repeat failed: the ranking calls them failed too."""
    num_burst: int = 0
    """Those of which only a burst was measured."""

    def __str__(self) -> str:
        """The share in words."""
        share = self.num_measured / self.num_candidates if self.num_candidates else 0.0
        failed = f", {self.num_burst} more only in a burst" if self.num_burst else ""
        failed += f", {self.num_failed} more failed" if self.num_failed else ""
        return (
            f"measured {self.num_measured} of {self.num_candidates} trials of the space ({100 * share:.1f} %){failed}"
        )


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """All assessed trials of a study, as `rank` prints and the report draws them.

    What all rows tell together is computed once: each of ten thousand rows may ask for it.
    """

    question: Question
    where: tuple[Where, ...]
    feasible: tuple[RankedTrial, ...]
    """By objective: the first one leads, and `best_probability` tells how surely."""
    undecided: tuple[RankedTrial, ...]
    """By objective: no bound breaks, at least one is not decided, and it could be the best."""
    behind: tuple[RankedTrial, ...]
    """By objective: at least one bound is not decided, and another plan is better in any case."""
    infeasible: tuple[RankedTrial, ...]
    """By objective: the first one shows the price of the bounds."""
    unknown: tuple[RankedTrial, ...]
    burst: tuple[RankedTrial, ...]
    """Trials of which only a few steps were measured, by that figure: none of them is ranked."""
    interrupted: tuple[RankedTrial, ...]
    failed: tuple[RankedTrial, ...]
    num_filtered: int
    """Trials that `where` and `least_quality` left out before ranking."""
    least_quality: str = ""
    """Trials of a lower quality were left out; empty if none were."""
    studies: tuple[str, ...] = ()
    """The studies ranked together; empty for one."""
    scatter: tuple[str, ...] = ()
    """The run-to-run scatter of the objective and what it rests on, a line for each study."""
    shared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Scatter, drift and node offsets of the objective by study; see `Fitted.to_json`."""
    corrections: tuple[str, ...] = ()
    """Messages about drift and node offsets in the objective."""
    expected: float | None = None
    """The first feasible trial's objective when it runs again: the largest of many figures is likely lucky."""
    unreadable: Unreadable = field(default_factory=dict)
    """Repeats that ended but cannot be read, with the study's name in front if there are several."""
    unmet: tuple[str, ...] = ()
    """Conditions of `where` with a name that no trial has."""
    space: tuple[SpaceShare, ...] = ()
    """Share of each study's space that was measured; empty where the space is not known."""
    near_probability: float = 0.0
    """Probability that the likeliest plan keeps every bound and none measured that does is better by `NEAR_FRAC`."""
    better_probability: float | None = None
    """Probability that a plan not measured keeps every bound and beats those that do; None if nothing predicts it."""
    run_command: str = ""
    """The command that goes on with the one study: its own file is a space. Empty where there are several."""

    @property
    def objective(self) -> Objective:
        """The metric that is largest, or smallest, in the best trial."""
        return self.question.objective

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """The bounds that must hold."""
        return self.question.constraints

    @cached_property
    def trials(self) -> tuple[RankedTrial, ...]:
        """Every trial in the order of its listing."""
        return self.compared + self.unknown + self.burst + self.interrupted + self.failed

    @cached_property
    def compared(self) -> tuple[RankedTrial, ...]:
        """The trials with a verdict on every bound, in the order of their listing."""
        return self.feasible + self.undecided + self.behind + self.infeasible

    @cached_property
    def of_recordings(self) -> bool:
        """True where recordings are ranked, which have a command and no plan."""
        return any(row.recorded for row in self.trials)

    @cached_property
    def varying(self) -> tuple[str, ...]:
        """Parts of the trials' settings that differ between trials; see `RankedTrial.setting`."""
        settings = [row.setting for row in self.trials]
        return tuple(name for name in (settings or [{}])[0] if len({one[name] for one in settings}) > 1)

    @property
    def best(self) -> RankedTrial | None:
        """The first feasible trial, None if no trial is feasible."""
        return self.feasible[0] if self.feasible else None

    @cached_property
    def breaking(self) -> tuple[RankedTrial, ...]:
        """The infeasible trials of the same work as the best feasible one, or all where none is feasible."""
        metric, rows = self.objective.metric, self.infeasible
        own = "" if self.best is None else work_of(self.best.spec, metric)
        return tuple(row for row in rows if own in ("", work_of(row.spec, metric)))

    @cached_property
    def price(self) -> RankedTrial | None:
        """The trial that shows the price of the bounds; None where they cost nothing that was measured.

        It is the best infeasible one, of the same work as the best feasible one and ahead of it.
        """
        first, best = next(iter(self.breaking), None), self.best
        if first is None or first.objective is None or best is None or best.objective is None:
            return first if first is not None and first.objective is not None else None
        ahead = first.objective.value - best.objective.value
        return first if (ahead > 0 if self.objective.maximize else ahead < 0) else None

    @cached_property
    def qualities(self) -> dict[str, int]:
        """Measured trials by quality, the best quality first."""
        counts = Counter(row.quality for row in self.trials if row.counted)
        return {quality: counts[quality] for quality in reversed(QUALITIES) if counts[quality]}

    @cached_property
    def simulated(self) -> bool:
        """True if any ranked figure comes from simulated telemetry."""
        return any(row.simulated for row in self.trials)

    @cached_property
    def stamp(self) -> str:
        """Words across every plot of figures that were not measured as they stand."""
        words = {"simulated": "SIMULATED", SCALED: SCALED_DOWN}
        return ", ".join(word for mark, word in words.items() if any(mark in row.marks for row in self.trials))

    @property
    def true_text(self) -> str:
        """The gain of the sensor up to which the leader's true watts hold; empty without one and if simulated."""
        best = self.best
        return "" if best is None or best.simulated else true_text(best.margins)

    @property
    def note(self) -> str:
        """Note to read before comparing rows: qualities, simulation, trials left out."""
        measured = [row for row in self.trials if row.counted]
        listed = ", ".join(f"{count} {quality or 'not assessed'}" for quality, count in self.qualities.items())
        parts = [f"quality: {listed}" if listed else "nothing was measured"]
        simulated = sum(row.simulated for row in measured)
        if simulated:
            share = "all" if simulated == len(measured) else f"{simulated} of {len(measured)}"
            parts.append(f"SIMULATED telemetry in {share} measured trials")
        if self.num_filtered:
            quality = [f"quality below {self.least_quality}"] if self.least_quality else []
            parts.append(f"{self.num_filtered} left out by {' and '.join([*map(str, self.where), *quality])}")
        if self.unreadable:
            parts.append(f"{len(self.unreadable)} unreadable left out")
        parts += [text] if (text := start_up_text(measured)) else []
        parts += [f"{one.study}: {one}" if len(self.space) > 1 else str(one) for one in self.space]
        return "; ".join(parts)

    @cached_property
    def best_of_each(self) -> tuple[RankedTrial, ...]:
        """The first feasible trial of every size of work, if there is more than one size; see `warnings`."""
        metric = self.objective.metric
        first = {work_of(row.spec, metric): row for row in reversed(self.feasible)}
        return tuple(row for row in self.feasible if len(self._sizes) > 1 and first[work_of(row.spec, metric)] is row)

    @property
    def words(self) -> tuple[str, str]:
        """The words for a trial that is ahead in the objective and for one that is not."""
        return ("faster", "slower") if self.objective.metric in DECIDED_BY_STEP_TIME else ("better", "worse")

    def name_of(self, row: RankedTrial) -> str:
        """Names a trial's plan, with its model, cluster and engine where trials differ in them."""
        others = [name for name in self.varying if name not in SIZES]  # the label has them
        return " ".join([*(row.setting[name] for name in others), row.label])

    def lead_frac(self, row: RankedTrial, other: RankedTrial) -> float | None:
        """Computes by which fraction of another's figure a trial is better; None where that is 0 or one has none."""
        if row.objective is None or other.objective is None or not other.objective.value:
            return None
        ahead = (row.objective.value - other.objective.value) / abs(other.objective.value)
        return ahead if self.objective.maximize else -ahead

    def work_name(self, row: RankedTrial) -> str:
        """Names the work of a row of `best_of_each`: by its model, and in full where another one has that too."""
        alone = sum(one.spec.model.name == row.spec.model.name for one in self.best_of_each) == 1
        return row.spec.model.name if alone else work_of(row.spec, self.objective.metric)

    @cached_property
    def _sizes(self) -> list[str]:
        """Sizes of work among measured trials, if the objective is a speed or an energy that depends on them."""
        planned = (row for row in self.trials if row.objective and row.recorded is None)
        sizes = {work_of(row.spec, self.objective.metric) for row in planned}
        return sorted(sizes) if depends_on_work(self.objective.metric) else []

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about rows that do not compare, or about an uncertain order; empty is good."""
        found = [f"left out: {reason}" for reason in islice(self.unreadable.values(), MOST_NAMED)]
        if len(self.unreadable) > MOST_NAMED:
            found.append(f"{len(self.unreadable) - MOST_NAMED} more cannot be read; --json and --csv list them all")
        found += self.unmet
        metric, compared = self.objective.metric, [row for row in self.trials if row.counted]
        if len(self._sizes) > 1:
            found.append(
                f"{metric} of different work in one table: {'; '.join(self._sizes)}. A larger model does more work for "
                "a token, a larger batch for a step; compare within one, or by mfu_frac"
            )
        if 0 < sum(row.simulated for row in compared) < len(compared):
            found.append("simulated and measured telemetry in one table: do not compare ranks between the two")
        stand_ins = {row.spec.cluster.simulate_sensors_of or "" for row in compared}
        if len(stand_ins - {""}) > 1:
            found.append(
                f"sensors of {' and '.join(sorted(stand_ins - {''}))} are simulated beside steps of the same machine: "
                "power and temperature differ, speed does not"
            )
        if len(self.qualities) > 1:
            listed = ", ".join(f"{count} {quality or 'not assessed'}" for quality, count in self.qualities.items())
            found.append(f"different qualities in one table: {listed}; --quality publishable ranks only the best ones")
        found += describe(run for row in compared for run in row.counted)
        found += differences({row.trial_id: row.recorded for row in self.trials if row.recorded}, metric)
        found += scaled_texts(self.feasible, (*self.undecided, *self.behind, *self.infeasible), metric)
        return (*found, *self.corrections)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`: every row of every list, with its repeats."""
        return {
            "objective": str(self.objective),
            "constraints": [str(constraint) for constraint in self.constraints],
            "where": [str(constraint) for constraint in self.where],
            "risk": self.question.risk,
            "scatter": dict(self.shared),
            "expected": self.expected,
            "note": self.note,
            "true": self.true_text,
            "warnings": list(self.warnings),
            "studies": list(self.studies),
            "qualities": self.qualities,
            "simulated": self.simulated,
            "num_filtered": self.num_filtered,
            "space": [asdict(one) for one in self.space],
            "price": None if self.price is None else self.price.trial_id,
            "unreadable": [{"name": name, "reason": reason} for name, reason in self.unreadable.items()],
            **{str(verdict): [row.to_json() for row in getattr(self, verdict)] for verdict in Verdict},
        }


def rank(
    results: Results | Mapping[str, Results],
    question: Question,
    *,
    where: Sequence[Where] = (),
    least_quality: str = "",
) -> Ranking:
    """Assesses every trial and puts the feasible ones in order.

    A trial with a repeat that ran and failed is failed, whatever the other repeats measured: it is not reliable. A
    repeat that was interrupted, or whose measurement is invalid, is left out if another one completed. Equal
    specifications in two studies stay two trials: the machine may differ, or its state.

    `results` of several studies are by their names. Trials that do not keep `where`, conditions on their configuration
    and bounds on every completed repeat, are only counted, and so are those below `least_quality` (`indicative` or
    `publishable`). Raises `SpaceError`: there is no such quality.
    """
    studies = results if isinstance(results, Mapping) else {"": results}
    own = {name: Posterior(pairs, question) for name, pairs in studies.items()}
    return ranking_of(own, where=where, least_quality=least_quality)


def ranking_of(
    studies: Mapping[str, Posterior],
    *,
    where: Sequence[Where] = (),
    least_quality: str = "",
    ranked: bool = True,
    placed: bool = True,
) -> Ranking:
    """Puts the trials of studies in order; see `rank`. Unless `ranked`, none is judged: only its warnings are told.

    Unless `placed`, no trial is told apart from those behind it: its rank is 0.
    """
    if least_quality not in QUALITIES:
        raise SpaceError(f'unknown quality "{least_quality}"; {closest(least_quality, QUALITIES[2:])}')
    several, question = len(studies) > 1, next(iter(studies.values())).question
    objective = question.objective
    groups = {METRICS[name].group for name in question.needed}
    each = ((name, row) for name, one in studies.items() for row in (one.rows if ranked else one.unjudged))
    assessed = [replace(row, study=name) if several else row for name, row in each]
    rows = [row for row in assessed if _passes(row.spec, row.repeats, where, least_quality, groups)]
    scatter, corrections, shared = list[str](), list[str](), dict[str, dict[str, Any]]()
    for study, one in studies.items():
        fitted, front = one.spreads.fitted(objective.metric), f"study {study}, " if several else ""
        if fitted is not None:
            scatter.append(front + one.spreads.scatter_text(objective.metric))
            shared[study] = fitted.to_json()
            corrections += [front + text for text in one.spreads.corrections(objective.metric)]
    alone = not several and len(rows) == len(assessed)
    found = (next(iter(studies.values())).standings if alone else standings(rows, question)) if ranked else Standings()
    likely = found.likely

    def of(row: RankedTrial) -> float:
        return likely.get((row.study, row.trial_id), 0.0)

    plan = namer(row.spec.workload for row in rows) if ranked else None

    def those(verdict: Verdict, key: Callable[[RankedTrial, Objective], Any], **own: Any) -> tuple[RankedTrial, ...]:
        found = sorted((row for row in rows if row.verdict is verdict), key=lambda row: key(row, objective))
        return tuple(named(found, plan, **own))

    leading = [row for row in rows if row.verdict is Verdict.FEASIBLE]
    leading.sort(key=lambda row: by_figure(row, objective))
    expected = None
    if leading and leading[0].objective is not None:
        first, lost = leading[0].objective.value, found.regression * (-1.0 if objective.maximize else 1.0)
        expected = first * factor(lost) if found.logarithmic else first + lost
    told = ranks(standing(leading, question)).tolist() if leading and ranked and placed else [0] * len(leading)
    places = dict(zip(map(id, leading), told, strict=True))
    ranking = Ranking(
        question=question,
        where=tuple(where),
        feasible=tuple(named(leading, plan, rank=lambda row: places[id(row)], best_probability=of)),
        undecided=those(Verdict.UNDECIDED, by_figure, best_probability=of),
        behind=(),
        infeasible=those(Verdict.INFEASIBLE, by_figure),
        unknown=those(Verdict.UNKNOWN, by_figure),
        burst=those(Verdict.BURST, _burst_first),
        interrupted=those(Verdict.INTERRUPTED, _by_reason),
        failed=those(Verdict.FAILED, _by_reason),
        num_filtered=len(assessed) - len(rows),
        least_quality=least_quality,
        studies=tuple(studies) if several else (),
        scatter=tuple(scatter),
        shared=shared,
        corrections=tuple(corrections),
        expected=expected,
        near_probability=found.near_probability,
        unmet=tuple(unmet(where, (row.spec for row in assessed))),
    )
    return _without_those_behind(ranking, found.behind)


def named(rows: Iterable[RankedTrial], name: Callable[..., str] | None, **told: Any) -> list[RankedTrial]:
    """Names plans as others are named that they stand beside; functions say what else is `told` of each.

    Without a name they stay as they are: nobody reads it of what is not ranked.
    """
    if name is None:
        return [*rows]
    each = ((row, label := row.spec.label, name(row.spec, label)) for row in rows)
    own = ((row, {} if new == (row.name or label) else {"name": new}) for row, label, new in each)
    full = ((row, new | {key: of(row) for key, of in told.items()}) for row, new in own)
    return [replace(row, **new) if new else row for row, new in full]


def _without_those_behind(ranking: Ranking, leaders: Mapping[tuple[str, str], RankedTrial]) -> Ranking:
    """Lists the undecided trials apart that are not the best in any case, and names what is better."""
    rows = {(row.study, row.trial_id): row for row in ranking.trials}

    def worded(row: RankedTrial) -> RankedTrial:
        leader = leaders[row.study, row.trial_id]
        name = ranking.name_of(rows.get((leader.study, leader.trial_id), leader))
        text = f"{ranking.words[1]} than {name} in any case"
        return replace(row, verdict=Verdict.BEHIND, behind=text, reason=f"{text}; {row.reason}")

    return replace(
        ranking,
        undecided=tuple(row for row in ranking.undecided if (row.study, row.trial_id) not in leaders),
        behind=tuple(worded(row) for row in ranking.undecided if (row.study, row.trial_id) in leaders),
    )


def by_figure(row: RankedTrial, objective: Objective) -> tuple[float, str, str]:
    """Returns the place of a trial in its list: what is smaller the better its figure is, then its id."""
    return _price(None if row.objective is None else row.objective.value, objective), row.trial_id, row.study


def _burst_first(row: RankedTrial, objective: Objective) -> tuple[float, str, str]:
    figures = (one.metrics[objective.metric] for one in row.repeats if objective.metric in one.metrics)
    return _price(next(figures, None), objective), row.trial_id, row.study


def _by_reason(row: RankedTrial, _objective: Objective) -> tuple[str, str, str]:
    return row.reason, row.trial_id, row.study


def _price(value: float | None, objective: Objective) -> float:
    """Returns what is smaller the better a value is; without a value, infinity."""
    return math.inf if value is None else -value if objective.maximize else value


def finalists(ranking: Ranking) -> list[TrialSpec]:
    """Returns the trials that a long run may decide: the feasible ones, then the undecided ones, best first."""
    return [row.spec for row in (*ranking.feasible, *ranking.undecided)]


def pareto_front(rows: Iterable[RankedTrial], metric_a: str, metric_b: str) -> list[RankedTrial]:
    """Returns the rows that no other row beats in one metric without losing in the other, best `metric_a` first.

    Every row counts by the middle of its interval in each metric. Rows that did not measure both are left out. Raises
    `SpaceError`: a metric is unknown, or neither direction of it is better.
    """
    of_a, of_b = _turned(metric_a), _turned(metric_b)
    points = [(a, b, row) for row in rows if (a := of_a(row)) is not None and (b := of_b(row)) is not None]
    points.sort(key=lambda point: (-point[0], -point[1], point[2].trial_id))
    front: list[tuple[float, float, RankedTrial]] = []
    for a, b, row in points:
        if not front or b > front[-1][1] or (a, b) == front[-1][:2]:
            front.append((a, b, row))
    return [row for _, _, row in front]


def _turned(metric: str) -> Callable[[RankedTrial], float | None]:
    """Returns a function that reads a metric of a row, with its sign turned so that more is better."""
    if metric not in METRICS:
        raise SpaceError(f'unknown metric "{metric}" for a Pareto front; {closest(metric, METRICS)}')
    better = METRICS[metric].better
    if better == "none":
        raise SpaceError(
            f"{metric} cannot be an axis of a Pareto front: neither more nor less of it is better; "
            "choose a metric with a direction, such as tokens_per_s or energy_per_token_j"
        )

    def turned(row: RankedTrial) -> float | None:
        placed = row.spreads.placed(row.counted, metric)
        found = placed and middle(*placed, measuring(row.counted, metric), metric)
        return found if found is None or better == "higher" else -found

    return turned


def _passes(
    spec: TrialSpec, repeats: Sequence[Run], where: Sequence[Where], least_quality: str, groups: Iterable[str]
) -> bool:
    bounds = [one for one in where if isinstance(one, Constraint)]
    if not all(keeps(one, spec) for one in where if isinstance(one, Condition)):
        return False
    if not bounds and not least_quality:
        return True
    counted = completed(repeats)
    qualities = (group_quality(result, groups) for result in counted)
    good = all(QUALITIES.index(quality) >= QUALITIES.index(least_quality) for quality in qualities)
    return (
        bool(counted)
        and good
        and all(bound.holds(result.metrics) for bound in bounds for result in measuring(counted, bound.metric))
    )

"""Questions of an operator to a study that was measured: what a bound costs, and what to measure next."""

import re
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from wattune.api.beforehand import Beforehand
from wattune.api.results import AnyStudy, folder_of
from wattune.api.spaces import StudyPlan, plan_again
from wattune.errors import PlanError, SpaceError, WattuneError
from wattune.fidelity import FIRST_REFERENCE_REPEAT, is_burst
from wattune.metrics import METRICS
from wattune.objective import Question, VariedBound, parse_varied
from wattune.orchestrate.scheduling.durations import Pace
from wattune.orchestrate.scheduling.run_order import workers_of
from wattune.ranking.frontier import Frontier, completed_pairs, usual_range
from wattune.ranking.frontier import frontier as frontier_of
from wattune.ranking.limits import by_limit, every_50_w
from wattune.ranking.order import Ranking, ranking_of
from wattune.ranking.posterior import Posterior
from wattune.ranking.sources import Source, collector_paused
from wattune.ranking.spreads import Results
from wattune.ranking.suggestions import Suggestions
from wattune.ranking.suggestions import suggest as suggest_for
from wattune.run import RunStatus
from wattune.search.strategies.model_guided import ModelGuided
from wattune.search.strategies.protocol import CHOSEN_EVERY, MOST_TAUGHT, Problem, telling
from wattune.storage.known_results import FEATURES, FITS, read_known, write_known
from wattune.storage.study import StudyFolder
from wattune.trial import TrialSpec

_DURATION: Final = re.compile(
    r"\s*(?:(\d+\.?\d*)\s*h)?\s*(?:(\d+\.?\d*)\s*m(?:in)?)?\s*(?:(\d+\.?\d*)\s*s)?\s*", re.ASCII
)
_LONGEST_TEXT: Final = 40
MOST_FITS: Final = 64  # are kept with a study; the oldest are forgotten


@collector_paused()
def frontier(study: AnyStudy, *, vary: str | VariedBound | None = None, storage: str | None = None) -> Frontier:
    """Finds what loosening one bound buys: the best plan at each of its values, and what is only predicted.

    Args:
        study: A study, its name, or its folder.
        vary: The bound and its values, such as `node_device_power_peak_1s_w <= 2000..2800 step 100`. It stands for the
            study's own bounds on that side of the metric. `power_limit_w` is the limit of each device, every 50 W
            between those of its plans, or down to what its devices take where all have one. None takes the study's
            bound on power, else its first one, over the measured range.
        storage: The place studies are kept in.

    Raises:
        PlanError: There is no such study, it has no finished trial, no bound, or no trial measured the metric.
        SpaceError: The range cannot be used as written.
    """
    folder = folder_of(study, storage=storage)
    known, source = measured(folder)
    if vary == "power_limit_w":
        vary = every_50_w([*known.planned.candidates.specs, *(spec for spec, _ in source.results)], to_least=True)
    return price(folder, known, source, parse_varied(vary) if isinstance(vary, str) else vary)


def price(
    folder: StudyFolder,
    known: Beforehand,
    source: Source,
    varied: VariedBound | None = None,
    ranking: Ranking | None = None,
) -> Frontier:
    """Finds what loosening a bound of a study buys, from its plans, results and ranking that are there already."""
    planned, results = known.planned, source.results
    varied = varied or _usual(planned, results, folder)
    replaced = (one.sensor_gain_frac for one in planned.spec.constraints if varied.replaces(one))
    varied = replace(varied, bound=replace(varied.bound, sensor_gain_frac=max(replaced, default=0.0)))
    measured = {name for _, result in completed_pairs(results) for name in result.metrics}
    if missing := [name for name in varied.at(0.0).missing({}) if name not in measured]:
        raise PlanError(f"no trial of {folder.path} measured {missing[0]}; vary a bound on a metric that was measured")
    spec = planned.spec
    others = [one for one in spec.constraints if not varied.replaces(one)]
    constraints = (*others, varied.at(varied.values[-1]))
    left = _unmeasured(planned, results)
    model = _model(known, folder, replace(spec.question, constraints=constraints), results, left)
    predictions = model.predict(left) if left else None
    return frontier_of(
        Posterior(results, spec.question),
        varied,
        plans=by_limit(completed_pairs(results), varied, known.coefficients),
        unmeasured=None if predictions is None else (left, predictions),
        num_unmeasured=len(left),
        unreadable=source.unreadable,
        ranking=ranking,
    )


@collector_paused()
def suggest(study: AnyStudy, *, budget: str | float, storage: str | None = None) -> Suggestions:
    """Finds what to measure next, what it is expected to gain, and which answer it could change.

    It works on the results of any strategy. `model_guided`'s surrogates learn from them and from estimates.

    Args:
        study: A study, its name, or its folder.
        budget: Time for all suggestions, one trial after another: seconds, or text such as `10m` or `1h30m`.
        storage: The place studies are kept in.

    Raises:
        PlanError: There is no such study, it has no finished trial, or the budget is not a time above 0.
    """
    budget_s = parse_budget(budget)
    folder = folder_of(study, storage=storage)
    known, source = measured(folder)
    planned = known.planned
    spec, pace, results = planned.spec, Pace(), source.results
    for one, result in completed_pairs(results):
        if result.repeat < FIRST_REFERENCE_REPEAT:
            pace.add(one, result.took_s + (result.numbers.cooldown_s or 0.0))
    left = _unmeasured(planned, results)
    ranking = replace(ranking_of({"": Posterior(results, spec.question)}, placed=False), unreadable=source.unreadable)
    found = suggest_for(
        _model(known, folder, spec.question, results, left),
        ranking,
        left,
        _timed(pace, spec.measure.min_seconds),
        budget_s=budget_s,
    )
    if not spec.targets:
        return found
    runs = {one.read_as: one for one in planned.candidates.specs}  # a scaled study runs small trials, by their ids
    return replace(found, listed=tuple(replace(one, spec=runs.get(one.spec, one.spec)) for one in found.listed))


def over_all_plans(ranking: Ranking, known: Beforehand, source: Source) -> Ranking:
    """Adds to the ranking of one study how likely a plan that was not measured keeps every bound and is better.

    The surrogates of `suggest` say it. It is unknown where they know nothing, where no plan is known to keep every
    bound, and of many results, which take them many seconds.
    """
    left = _unmeasured(known.planned, source.results)
    if not left or not ranking.feasible or len(source.results) > MOST_TAUGHT:
        return ranking
    with suppress(WattuneError):  # such as another study that cannot be read: what was measured is ranked all the same
        model = _model(known, StudyFolder(Path(source.place)), ranking.question, source.results, left)
        model.lead_by(row.spec for row in ranking.feasible)
        return replace(ranking, better_probability=(model.joint_gain(left) or (0.0, 0.0, None))[2])
    return ranking


def parse_budget(budget: str | float, option: str = "--budget") -> float:
    """Returns the seconds of a budget, or of another option's time. Raises `PlanError`: it is not a time above 0."""
    seconds = 0.0
    if isinstance(budget, str):
        match = _DURATION.fullmatch(budget) if len(budget) <= _LONGEST_TEXT else None
        if match is not None:
            seconds = sum(float(text) * unit for text, unit in zip(match.groups(), (3600, 60, 1), strict=True) if text)
    else:
        seconds = float(budget)
    if not 0 < seconds < 1e9:
        raise PlanError(f'{option}: got "{str(budget)[:_LONGEST_TEXT]}", allowed: a time such as 90s, 10m or 1h30m')
    return seconds


def measured(folder: StudyFolder, source: Source | None = None) -> tuple[Beforehand, Source]:
    """Plans a study's space again, and reads its results unless they are at hand.

    Raises `PlanError`: it has no finished trial, or its space is not one of this version.
    """
    source = source or Source.of_folder(folder)
    if not any(result.status.is_final for _, result in source.results):
        raise PlanError(f"{folder.path} has no finished trial; `wattune run` of its space measures some")
    try:
        planned = plan_again(folder.document(), folder.path)
    except SpaceError as error:
        raise PlanError(f"{folder.path / 'study.yaml'} is not a space of this version: {error}") from error
    return Beforehand(planned, folder.path.parent, study=folder.path).fitting(folder), source


def _unmeasured(planned: StudyPlan, results: Results) -> list[TrialSpec]:
    """Returns the candidates without a full run that ended: what a burst measured is ranked nowhere."""
    tried = {
        result.trial_id
        for _, result in results
        if result.status.is_final and not (is_burst(result) and result.status is RunStatus.COMPLETED)
    }
    return [one.read_as for one in planned.candidates.specs if one.trial_id not in tried]


def _timed(pace: Pace, least_s: float) -> Callable[[TrialSpec], float]:
    """Returns what predicts the seconds of a trial, computed once for the same workers."""
    found: dict[Hashable, float] = {}
    return lambda spec: found.get(key := workers_of(spec)) or found.setdefault(key, pace.expected_s(spec, least_s))


def _model(
    known: Beforehand, folder: StudyFolder, question: Question, results: Results, left: Sequence[TrialSpec]
) -> ModelGuided:
    """Makes `model_guided`'s surrogates, whatever strategy the study has, and tells them every result.

    They learn, and their fits are kept, where plans are `left` to predict.
    """
    # A trial of an earlier space may be none of the candidates now; what it measured still counts.
    planned, candidates = known.planned, known.planned.candidates.specs
    each = {one.trial_id: one for one in (one.read_as for one in candidates)}
    for spec, _ in results:
        each.setdefault(spec.trial_id, spec)
    if (specs := [*each.values()]) != candidates:
        known = known.of(planned, specs)
    fits = read_known(path := folder.path / FITS)
    num_fits = len(fits)
    problem = Problem(
        specs=specs,
        seed=planned.spec.search.seed,
        question=question,
        estimates=None if known.estimates is None else known.estimates.columns,
        warm=known.warm(),
        fits=fits,
        features=folder.path / FEATURES,
    )
    model, final = ModelGuided(problem, stops=False), [pair for pair in results if pair[1].status.is_final]
    first = {result.trial_id: result for _, result in reversed(final)}
    # As in a search: who teaches is chosen anew every fiftieth result, what came since is added to what was fitted.
    by_end = sorted(first, key=lambda trial_id: (first[trial_id].end_wall_ns, trial_id))
    later = {*by_end[len(first) - max(len(first) - MOST_TAUGHT, 0) % CHOSEN_EVERY :]}
    for taught in (telling({key: run for key, run in first.items() if key not in later}, question), later):
        for pair in (told := [pair for pair in final if pair[1].trial_id in taught]):
            model.tell(*pair)
        if told and left:
            model.learn()
    if len(fits) > num_fits:
        write_known(path, dict([*fits.items()][-MOST_FITS:]))
    return model


def _usual(planned: StudyPlan, results: Results, folder: StudyFolder) -> VariedBound:
    """Chooses the bound that is varied where nobody says: on power, else the first one, over the measured range."""
    bounds = planned.spec.constraints
    powers = [one for one in bounds if METRICS[one.metric].group == "power"]
    for one in (*powers, *bounds):
        found = usual_range(one, results)
        if found is not None:
            return found
    if bounds:
        raise PlanError(f"no trial of {folder.path} measured {bounds[0].metric}; vary a metric that was measured")
    raise PlanError(
        f'{folder.path} has no bound; name one, such as --vary "node_device_power_peak_1s_w <= 2000..2800 step 100"'
    )

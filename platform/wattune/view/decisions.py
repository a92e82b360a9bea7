"""Views of what a bound costs and of what to measure next."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final

from wattune.cost.stage_clocks import StageClocks
from wattune.ranking.assessment import RankedTrial
from wattune.ranking.bounds import LIMIT
from wattune.ranking.frontier import Frontier, FrontierPoint, PredictedPlan
from wattune.ranking.limits import FIGURES, split
from wattune.ranking.suggestions import Suggestions
from wattune.run import Prediction
from wattune.trial import TrialSpec
from wattune.units import format_probability
from wattune.view.table import (
    PERCENT_CHANGE,
    PROBABILITY,
    SIMULATED,
    Cell,
    Column,
    Note,
    Table,
    View,
    between,
    reading,
    warnings,
    worded,
)

READING_FRONTIER: Final = reading(
    "P(holds) is the probability that the next run holds the bound; P(best) is the probability to be the best that "
    "keeps every bound; gain is against the value before, in brackets where the runs do not tell the two plans apart, "
    "and none between plans of different work"
)
READING_PREDICTED: Final = reading(
    "never measured in full: the likely feasible plan with the best prediction, its 95 % interval, P(feasible) by all "
    "bounds, and P(better) than the measured best"
)
READING_SUGGESTIONS: Final = reading(
    "gain is the expected improvement of the best feasible plan: improvement times P(feasible); of repeats, "
    "P(feasible) is the probability that repeats decide so; times are of one trial after another"
)


def names_apart(specs: Iterable[TrialSpec]) -> Callable[[TrialSpec, str], str]:
    """Returns what puts model, cluster and engine before a plan's name, as far as the listed trials differ in them."""
    listed = [(spec.model.name, spec.cluster.label, spec.engine) for spec in specs]
    differ = [len(set(values)) > 1 for values in zip(*listed, strict=True)]

    def name(spec: TrialSpec, label: str) -> str:
        own = (spec.model.name, spec.cluster.label, spec.engine)
        return " ".join([*(value for value, shows in zip(own, differ, strict=True) if shows), label])

    return name


def predicted_text(found: Prediction, metric: str) -> str:
    """Returns a prediction of a metric with its interval."""
    return between(metric, found.value, found.low, found.high)


def bound_value(point: FrontierPoint) -> str:
    """Returns one value of a varied bound: with its unit, or a factor of another metric."""
    bound = point.bound
    return f"{bound.factor:g}" if bound.limit_metric is not None else worded(bound.metric, bound.factor)


def frontier_view(found: Frontier) -> View:
    """Lays out two tables by value of the bound: what was measured, and what is only predicted."""
    rows: list[_Measured] = []
    for point in found.points:
        rows += [(point, row) for row in (point.best, point.undecided) if row is not None] or [(point, None)]
    plans = [one.predicted.spec for one in found.points if one.predicted is not None]
    name = names_apart([*(row.spec for _, row in rows if row is not None), *plans])
    parts: list[Table | Note] = [_measured(found, rows, name), READING_FRONTIER]
    if found.others:
        parts.append(Note(f"bounds that stay: {'; '.join(map(str, found.others))}"))
    parts += [*warnings(found.warnings), *([SIMULATED] if found.simulated else []), *_limits(found), Note("")]
    if not found.num_unmeasured:
        return [*parts, Note("every plan of the space was tried: nothing is left to predict")]
    if not found.has_predictions:
        text = f"{found.num_unmeasured} plans were not measured, and too little is known to predict them"
        return [*parts, Note(text)]
    return [*parts, _predicted(found, name), READING_PREDICTED]


def _limits(found: Frontier) -> list[Table | Note]:
    """Lays out what each limit of power buys a plan, and how a rack's watts are split over jobs."""
    columns = [
        Column("plan", lambda row: f"{row['job']} {row['plan']}", place="lead"),
        Column("limit", itemgetter("limit_w"), LIMIT, place="lead"),
        Column("by", lambda row: "measured" if row["measured"] else "predicted", place="lead"),
        *(Column(name, partial(lambda own, row: between(own, *row[own].values()), name), name) for name in FIGURES),
        Column("buys", itemgetter("buys_frac"), PERCENT_CHANGE),
    ]
    rack = [row | row["limits_w"] for row in split(found.plans)]
    jobs = [Column(job, itemgetter(job), LIMIT) for job in (rack[0]["limits_w"] if rack else ())]
    budget = Column("budget", itemgetter("budget_w"), LIMIT, place="lead")
    rate = Column("mean rate", lambda row: f"{row['rate_frac']:.3f}")
    tables = (
        Table("the fastest plans by limit of power", columns, [row for plan in found.plans for row in plan]),
        Table("a rack's watts, split over jobs by limits of their devices", [budget, *jobs, rate], rack),
    )
    return [part for table in tables if table.rows for part in (Note(""), table)]


_Measured = tuple[FrontierPoint, RankedTrial | None]


def _measured(found: Frontier, rows: list[_Measured], name: Callable[[TrialSpec, str], str]) -> Table:
    metric, bound = found.objective.metric, found.varied.bound
    times = f" * {bound.limit_metric}" if bound.limit_metric else ""

    def of_row(read: Callable[[FrontierPoint, RankedTrial], Any]) -> Callable[[_Measured], Any]:
        return lambda pair: None if pair[1] is None else read(pair[0], pair[1])

    def value(pair: _Measured) -> str:
        point, row = pair
        return bound_value(point) if row is point.best or point.best is None else ""

    def plan(pair: _Measured) -> Cell:
        point, row = pair
        if row is None:
            return Cell(text="none holds every bound", tone="infeasible")
        label = name(row.spec, row.label)
        return Cell(label, tone="feasible") if row is point.best else Cell(f"{label} (undecided)", tone="undecided")

    def gain(point: FrontierPoint, row: RankedTrial) -> Cell | None:
        if row is not point.best or point.gain_frac is None:
            return None
        text = worded(PERCENT_CHANGE, point.gain_frac)
        return Cell(point.gain_frac, f"({text})" if point.told_apart is False else text)

    columns = [
        Column("bound", value, place="lead"),
        Column("plan", plan, place="lead"),
        Column(metric, of_row(lambda _, row: row.objective), metric),
        Column(bound.metric, of_row(lambda point, row: (own := point.margin(row)) and own.got), bound.metric),
        Column(
            "P(holds)", of_row(lambda point, row: (own := point.margin(row)) and own.holds_probability), PROBABILITY
        ),
        Column("P(best)", of_row(lambda _, row: row.best_probability), PROBABILITY),
        Column("gain", of_row(gain), PERCENT_CHANGE),
    ]
    return Table(f"measured: {found.objective} where {bound.metric} {bound.operator} bound{times}", columns, rows)


def _predicted(found: Frontier, name: Callable[[TrialSpec, str], str]) -> Table:
    metric = found.objective.metric

    def of_plan(read: Callable[[PredictedPlan], Any], without: str | None = None) -> Callable[[FrontierPoint], Any]:
        return lambda point: without if point.predicted is None else read(point.predicted)

    columns = [
        Column("bound", bound_value, place="lead"),
        Column("trial", of_plan(lambda one: one.spec.trial_id, "-"), place="lead"),
        Column("plan", of_plan(lambda one: name(one.spec, one.label), "none is likely feasible"), place="lead"),
        Column(f"predicted {metric}", of_plan(lambda one: predicted_text(one, metric)), metric),
        Column("P(holds)", of_plan(lambda one: one.holds_probability), PROBABILITY),
        Column("P(feasible)", of_plan(lambda one: one.feasible_probability), PROBABILITY),
        Column("P(better)", of_plan(lambda one: one.better_probability), PROBABILITY),
    ]
    return Table(f"predicted: best of {found.num_unmeasured} plans that were not measured", columns, found.points)


def clocks_view(found: Sequence[StageClocks]) -> View:
    """Lays out the energy of a pipeline's step by its length, with the clocks of each stage."""
    now = found[0]

    def clocks(one: StageClocks) -> str:
        ranges = [(min(mhz for _, mhz in stage), max(mhz for _, mhz in stage)) for stage in one.clocks_mhz]
        return ", ".join(f"{low}" if low == high else f"{low} to {high}" for low, high in ranges) or "as they are"

    columns = [
        Column("step_time_s", lambda one: one.step_time_s, "step_time_s", place="lead"),
        Column("longer", lambda one: one.step_time_s / now.step_time_s - 1, PERCENT_CHANGE),
        Column("energy_per_step_j", lambda one: one.energy_per_step_j, "energy_per_step_j"),
        Column("energy", lambda one: one.energy_per_step_j / now.energy_per_step_j - 1, PERCENT_CHANGE),
        Column("MHz of each stage", clocks, place="prose"),
    ]
    return [Table("predicted, never run: energy of all devices by clocks of every pass", columns, found)]


def suggestions_view(found: Suggestions) -> View:
    """Lays out what to measure next, most gain for its time first, or plainly that nothing is worth it."""
    if found.nothing:
        return [Note(found.nothing, "good"), *warnings(found.warnings)]
    metric, name = found.objective.metric, names_apart(one.spec for one in found.listed)
    columns = [
        Column("measure", lambda one: one.kind, place="lead"),
        Column("trial", lambda one: one.spec.trial_id, place="lead"),
        Column("plan", lambda one: name(one.spec, one.label), place="lead"),
        Column(f"predicted {metric}", lambda one: one.predicted and predicted_text(one.predicted, metric), metric),
        Column("P(feasible)", lambda one: one.feasible_probability, PROBABILITY),
        Column("gain", lambda one: None if one.gain_frac is None else f"{one.gain_frac:.1%}", PERCENT_CHANGE),
        Column("takes", lambda one: _time(one.expected_s), "time_s"),
        Column("may change", lambda one: one.changes, place="prose"),
    ]
    parts = [Table(f"next {_time(found.expected_s)} of {_time(found.budget_s)}", columns, found.listed)]
    notes = [READING_SUGGESTIONS]
    if found.gain_frac is not None and found.noise_frac is not None:
        likely = format_probability(found.better_probability or 0.0)
        text = f"one of the {found.num_left} plans left is better with P {likely}; all together are expected to gain "
        notes.append(Note(f"{text}{found.gain_frac:.1%}; one measurement has a noise of {found.noise_frac:.1%}"))
    return [*parts, *notes, *warnings(found.warnings)]


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"

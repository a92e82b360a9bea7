"""Views of what a bound costs and of what to measure next. Nothing here computes a figure."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

from wattune.ranking.assessment import RankedTrial
from wattune.ranking.frontier import Frontier, FrontierPoint
from wattune.ranking.suggestions import Suggestion, Suggestions
from wattune.terminal.tables import SIMULATED_NOTE, make_table, print_table, shown
from wattune.trial import TrialSpec
from wattune.units import format_probability, format_quantity

READING_FRONTIER: Final = (
    "P(holds) is the probability that the next run holds the bound; P(best) is the probability to be the best feasible "
    "trial; gain is against the value before, in brackets where the runs do not tell the two plans apart, and none "
    "between plans of different work"
)
READING_PREDICTED: Final = (
    "never measured in full: the likely feasible plan with the best prediction, its 95 % interval, P(feasible) by all "
    "bounds, and P(better) than the measured best"
)


def print_frontier(console: Console, found: Frontier) -> None:
    """Prints two tables by value of the bound: what was measured, and what is only predicted."""
    metric, bounded = found.objective.metric, found.varied.metric
    measured = [one.spec for point in found.points for one in _rows(point)]
    name = names_apart([*measured, *(one.predicted.spec for one in found.points if one.predicted is not None)])
    columns = ["bound", "plan", metric, bounded, "P(holds)", "P(best)", "gain"]
    numbers = [metric, bounded, "P(holds)", "P(best)", "gain"]
    table = make_table(f"measured: {found.objective} where {_bound_name(found)}", *columns, right=numbers)
    for point in found.points:
        for row in _rows(point) or (None,):
            table.add_row(*_measured_cells(point, row, metric, bounded, name))
    print_table(console, table, lead=("bound", "plan"))
    console.print(READING_FRONTIER, highlight=False, style="dim")
    if found.others:
        console.print(f"bounds that stay: {'; '.join(map(str, found.others))}", highlight=False)
    _print_warnings(console, found.warnings)
    if found.simulated:
        console.print(SIMULATED_NOTE, style="yellow")
    console.print()
    _print_predicted(console, found, metric, name)


def names_apart(specs: Iterable[TrialSpec]) -> Callable[[TrialSpec, str], str]:
    """Returns what puts model, cluster and engine before a plan's name, as far as the listed trials differ in them."""
    listed = [(spec.model.name, spec.cluster.label, spec.engine) for spec in specs]
    differ = [len(set(values)) > 1 for values in zip(*listed, strict=True)]

    def name(spec: TrialSpec, label: str) -> str:
        own = (spec.model.name, spec.cluster.label, spec.engine)
        return " ".join([*(value for value, shows in zip(own, differ, strict=True) if shows), label])

    return name


def _print_predicted(console: Console, found: Frontier, metric: str, name: Callable[[TrialSpec, str], str]) -> None:
    if not found.num_unmeasured:
        console.print("every plan of the space was tried: nothing is left to predict", highlight=False)
        return
    if not found.has_predictions:
        text = f"{found.num_unmeasured} plans were not measured, and too little is known to predict them"
        console.print(text, highlight=False)
        return
    columns = ["bound", "trial", "plan", f"predicted {metric}", "P(holds)", "P(feasible)", "P(better)"]
    title = f"predicted: best of {found.num_unmeasured} plans that were not measured"
    table = make_table(title, *columns, right=columns[3:])
    for point in found.points:
        one = point.predicted
        if one is None:
            table.add_row(_value(point), "-", "none is likely feasible", "-", "-", "-", "-")
            continue
        table.add_row(
            _value(point),
            one.spec.trial_id,
            name(one.spec, one.label),
            f"{shown(metric, one.value)} ({shown(metric, one.low)} to {shown(metric, one.high)})",
            _probability(one.holds_probability),
            _probability(one.feasible_probability),
            _probability(one.better_probability),
        )
    print_table(console, table, lead=("bound", "trial", "plan"))
    console.print(READING_PREDICTED, highlight=False, style="dim")


def _rows(point: FrontierPoint) -> tuple[RankedTrial, ...]:
    return tuple(row for row in (point.best, point.undecided) if row is not None)


def _measured_cells(
    point: FrontierPoint, row: RankedTrial | None, metric: str, bounded: str, named: Callable[[TrialSpec, str], str]
) -> Sequence[str | Text]:
    if row is None:
        return (_value(point), Text("none holds every bound", style="yellow"), "-", "-", "-", "-", "-")
    margin, is_best = point.margin(row), row is point.best
    name = named(row.spec, row.label)
    gain = "" if not is_best or point.gain_frac is None else f"{100 * point.gain_frac:+.1f} %"
    return (
        _value(point) if is_best or point.best is None else "",
        Text(name if is_best else f"{name} (undecided)", style="green" if is_best else "blue"),
        "-" if row.objective is None else shown(metric, row.objective),
        "-" if margin is None else shown(bounded, margin.got),
        _probability(None if margin is None else margin.holds_probability),
        _probability(row.best_probability),
        f"({gain})" if gain and point.told_apart is False else gain or "-",
    )


def _bound_name(found: Frontier) -> str:
    times = f" * {found.varied.limit_metric}" if found.varied.limit_metric else ""
    return f"{found.varied.metric} {found.varied.operator} bound{times}"


def _value(point: FrontierPoint) -> str:
    if point.bound.limit_metric is not None:
        return f"{point.bound.factor:g}"
    return format_quantity(point.bound.metric, point.bound.factor)


def _probability(value: float | None) -> str:
    return "-" if value is None else format_probability(value)


def print_suggestions(console: Console, found: Suggestions) -> None:
    """Prints what to measure next, most gain for its time first, or plainly that nothing is worth it; then warnings."""
    _print_suggestions(console, found)
    _print_warnings(console, found.warnings)


def _print_warnings(console: Console, warnings: Sequence[str]) -> None:
    for warning in warnings:
        console.print(f"note: {warning}", highlight=False, style="yellow")


def _print_suggestions(console: Console, found: Suggestions) -> None:
    if found.nothing:
        console.print(found.nothing, highlight=False, style="green")
        return
    metric = found.objective.metric
    columns = ["measure", "trial", "plan", f"predicted {metric}", "P(feasible)", "gain", "takes", "may change"]
    table = make_table(f"next {_time(found.expected_s)} of {_time(found.budget_s)}", *columns, right=columns[3:7])
    name = names_apart(one.spec for one in found.listed)
    for one in found.listed:
        table.add_row(*_cells(one, metric, name))
    print_table(console, table, lead=("measure", "trial", "plan"), prose=("may change",))
    console.print(
        "gain is the expected improvement of the best feasible plan: improvement times P(feasible); of repeats, "
        "P(feasible) is the probability that repeats decide so; times are of one trial after another",
        highlight=False,
        style="dim",
    )
    if found.gain_frac is not None and found.noise_frac is not None:
        console.print(
            f"all {found.num_left} plans left together are expected to gain {found.gain_frac:.1%}; one measurement has "
            f"a noise of {found.noise_frac:.1%}",
            highlight=False,
        )


def _cells(one: Suggestion, metric: str, name: Callable[[TrialSpec, str], str]) -> Sequence[str]:
    predicted = one.predicted
    return (
        one.kind,
        one.spec.trial_id,
        name(one.spec, one.label),
        "-"
        if predicted is None
        else f"{shown(metric, predicted.value)} ({shown(metric, predicted.low)} to {shown(metric, predicted.high)})",
        _probability(one.feasible_probability),
        "-" if one.gain_frac is None else f"{one.gain_frac:.1%}",
        _time(one.expected_s),
        one.changes,
    )


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"

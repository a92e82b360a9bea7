"""Views of a ranking and of a comparison in a terminal. Nothing here computes a figure."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from wattune.objective import Constraint, Objective
from wattune.ranking.assessment import RankedTrial, Verdict
from wattune.ranking.bounds import Holds, Margin
from wattune.ranking.comparison import Comparison, Waterfall
from wattune.ranking.order import Ranking
from wattune.ranking.recordings import RankedRecording, RecordingRanking
from wattune.terminal.tables import SIMULATED_NOTE, fits, make_table, print_table, shown
from wattune.units import format_change, format_probability

_STYLES: Final = {
    "feasible": "green",
    "undecided": "blue",
    "infeasible": "yellow",
    "unknown": "magenta",
    "burst": "bright_black",
    "interrupted": "cyan",
    "failed": "red",
}


_BOUND_STYLES: Final = {Holds.HOLDS: "green", Holds.UNDECIDED: "blue", Holds.BREAKS: "bold red"}

READING: Final = (
    "± is the 95 % interval; P(best) is the probability to be the best feasible trial; a rank is 1 plus the trials "
    "that are told to be better, at 95 % over all comparisons"
)
"""Reading of the columns."""

_RISK: Final = "P: probability that the next run keeps the bound; holds and breaks at a risk of {:g}"


def expected_text(ranking: Ranking) -> str:
    """Describes what the leader is expected to measure again; empty where that is nothing else."""
    best = ranking.best
    if best is None or best.objective is None or ranking.expected is None or len(ranking.feasible) == 1:
        return ""
    metric = ranking.objective.metric
    measured, expected = shown(metric, best.objective.value), shown(metric, ranking.expected)
    if measured == expected:
        return ""
    return f"the first of many is likely lucky: {best.trial_id} measured {measured}, expected when run again {expected}"


def print_ranking(console: Console, ranking: Ranking, *, top: int | None = None) -> None:
    """Prints feasible trials in order with their distance to each bound, then the others with what they lack."""
    others = ranking.varying
    listed = (ranking.feasible, ranking.undecided, ranking.infeasible)
    rows = [row for rows in listed for row in rows[:top]]
    settings = [[row.setting[name] for name in others] for row in rows]
    _print_rows(console, ranking.objective, ranking.constraints, others, list(zip(rows, settings, strict=True)))
    hidden = 0 if top is None else sum(max(0, len(rows) - top) for rows in listed)
    if hidden:
        console.print(f"... and {hidden} more; raise --top to see them")
    for title, without in (
        ("unknown", ranking.unknown),
        ("only a burst: a few steps, never ranked", ranking.burst),
        ("interrupted: run again by the same command", ranking.interrupted),
        ("failed", ranking.failed),
    ):
        if without:
            table = make_table(f"{len(without)} {title}", "trial", *others, "plan", "why")
            for row in without[:top]:
                plan = Text(row.spec.label, style=_STYLES[str(row.verdict)])
                table.add_row(row.trial_id, *(row.setting[name] for name in others), plan, row.reason)
            print_table(console, table, lead=("trial", "plan"), prose=("why",))
    _print_notes(console, ranking)


def _print_rows(
    console: Console,
    objective: Objective,
    constraints: Sequence[Constraint],
    others: Sequence[str],
    rows: Sequence[tuple[RankedTrial | RankedRecording, Sequence[str]]],
) -> None:
    """Prints rows as a table with a column for each bound; on a narrow terminal as a listing with a line for each.

    Args:
        console: The output.
        objective: What the rows are ordered by.
        constraints: Their bounds.
        others: Names of further columns.
        rows: The rows in order, each with its cells of the further columns.
    """
    metric, bounds = objective.metric, [str(constraint) for constraint in constraints]
    numbered = [f"bound {n}" for n in range(1, len(bounds) + 1)]
    recordings = any(isinstance(row, RankedRecording) for row, _ in rows)
    name, what = ("recording", "command") if recordings else ("trial", "plan")

    def made(headings: Sequence[str]) -> Table:
        columns = ["P(best)", "rank", name, *others, what, metric, *headings, "verdict", "quality"]
        table = make_table(str(objective), *columns, right=["P(best)", "rank", metric])
        for row, cells in rows:
            margins = {margin.constraint: margin for margin in row.margins}
            table.add_row(
                "-" if row.best_probability is None else format_probability(row.best_probability),
                str(row.rank) if row.rank else "-",
                row.trial_id,
                *cells,
                Text(
                    row.label if isinstance(row, RankedRecording) else row.spec.label, style=_STYLES[str(row.verdict)]
                ),
                shown(metric, row.objective) if row.objective else "-",
                *(_margin_cell(margins.get(bound)) for bound in bounds),
                str(row.verdict),
                row.quality + (" (simulated)" if row.simulated else ""),
            )
        return table

    prose = ("command",) if recordings else ()
    table = made(bounds)
    if not fits(console, table, prose) and fits(console, short := made(numbered), prose):
        table = short
    print_table(console, table, lead=(name, what), prose=prose, own=bounds)
    if table.columns[-3].header in numbered:
        for number, bound in enumerate(bounds, start=1):
            console.print(f"bound {number}: {bound}", highlight=False)


def print_recordings(console: Console, ranking: RecordingRanking, *, top: int | None = None) -> None:
    """Prints recordings in order with their distance to each bound, and what they do not share."""
    measured = [row for row in ranking.rows if row.verdict not in (Verdict.UNKNOWN, Verdict.FAILED)]
    _print_rows(console, ranking.objective, ranking.constraints, (), [(row, ()) for row in measured[:top]])
    if top is not None and len(measured) > top:
        console.print(f"... and {len(measured) - top} more; raise --top to see them")
    without = [row for row in ranking.rows if row not in measured]
    if without:
        table = make_table(f"{len(without)} not ranked", "recording", "command", "why")
        for row in without:
            table.add_row(row.trial_id, Text(row.label, style=_STYLES[str(row.verdict)]), row.reason)
        print_table(console, table, prose=("command", "why"))
    if ranking.feasible:
        console.print(READING, highlight=False, style="dim")
    if ranking.scatter:
        console.print(ranking.scatter, highlight=False, style="dim")
    if ranking.constraints:
        console.print(_RISK.format(ranking.risk), highlight=False, style="dim")
    if ranking.num_filtered:
        console.print(f"{ranking.num_filtered} left out", highlight=False, style="dim")
    for warning in ranking.warnings:
        console.print(f"note: {warning}", highlight=False, style="yellow")
    if ranking.simulated:
        console.print(SIMULATED_NOTE, style="bold yellow")


def price_text(ranking: Ranking) -> str:
    """Describes what the bounds cost: the best infeasible trial against the best feasible one; empty where nothing."""
    best, price = ranking.best, ranking.price
    if best is None or price is None or best.objective is None or price.objective is None or not price.failing:
        return ""
    metric = ranking.objective.metric
    broken = ", ".join(margin.constraint for margin in price.failing)
    change = format_change(metric, abs(price.objective.value - best.objective.value))
    more = "more" if ranking.objective.maximize else "less"
    return f"price of the bounds: {price.label} ({price.trial_id}) has {change} {more} {metric} and breaks {broken}"


def _print_notes(console: Console, ranking: Ranking) -> None:
    for line in (READING if ranking.feasible else "", *ranking.scatter, expected_text(ranking), price_text(ranking)):
        if line:
            console.print(line, highlight=False, style="dim")
    if ranking.constraints:
        console.print(_RISK.format(ranking.risk), highlight=False, style="dim")
    console.print(ranking.note, highlight=False, style="dim")
    for best in ranking.best_of_each:
        name = f"{best.study} " if best.study else ""
        value = shown(ranking.objective.metric, best.objective) if best.objective else "-"
        work = ranking.work_name(best)
        console.print(f"best of {name}{work}: {best.label} ({best.trial_id}), {value}", highlight=False)
    for warning in ranking.warnings:
        console.print(f"note: {warning}", highlight=False, style="yellow")
    if ranking.simulated:
        console.print(SIMULATED_NOTE, style="bold yellow")


def _margin_cell(margin: Margin | None) -> Text:
    if margin is None:
        return Text("not measured", style="magenta")
    got, distance = shown(margin.metric, margin.got), format_change(margin.metric, abs(margin.slack))
    likely = "" if margin.holds_probability is None else f", P {format_probability(margin.holds_probability)}"
    place = "within" if margin.holds else "past"
    return Text(f"{got} ({distance} {place}{likely}, {margin.verdict})", style=_BOUND_STYLES[margin.verdict])


def print_front(console: Console, rows: Sequence[RankedTrial], metrics: Sequence[str], *, of: str) -> None:
    """Prints the trials that no other beats in both metrics, and how each stands to the bounds."""
    title = f"Pareto front of {' and '.join(metrics)}, {of}"
    table = make_table(title, "trial", "plan", *metrics, "verdict", right=metrics)
    for row in rows:
        cells = [shown(metric, found) if (found := row.interval(metric)) else "-" for metric in metrics]
        plan = Text(row.label, style=_STYLES[str(row.verdict)])
        table.add_row(row.trial_id, plan, *cells, str(row.verdict))
    print_table(console, table, lead=("trial", "plan"))


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Prints the differences between two trials, and the change of a step part by part."""
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        line, known = f"{name}  {side.label}", f"({side.known_as})"
        apart = "  " if len(line) + len(known) + 2 <= console.width else "\n   "
        console.print(f"{line}{apart}{known}", highlight=False)
    console.print(f"{comparison.conclusion}.", style="bold", highlight=False)
    differing = make_table("What differs", "field", "A", "B")
    for path, (of_a, of_b) in sorted(comparison.differences.items()):
        differing.add_row(path, str(of_a), str(of_b))
    print_table(console, differing, prose=("A", "B"))
    for fall in (comparison.time, comparison.energy):
        if fall is not None:
            _print_waterfall(console, fall)
    columns = ["metric", "A", "B", "B minus A", "relative", "95 % interval", "verdict"]
    metrics = make_table("Metrics", *columns, right=columns[1:6])
    for one in comparison.tested:
        cells = (shown(one.metric, one.a.value), shown(one.metric, one.b.value), *one.texts())
        metrics.add_row(one.metric, *cells, Text(one.verdict, style="bold" if one.told_apart else "dim"))
    print_table(console, metrics, lead=("metric", "verdict"))
    console.print(comparison.error_note, highlight=False, style="dim")
    for warning in comparison.warnings:
        console.print(f"note: {warning}", highlight=False, style="yellow")


def _print_waterfall(console: Console, fall: Waterfall) -> None:
    name = "time_s" if fall.unit == "s" else "energy_j"
    title = f"{'Time' if fall.unit == 's' else 'Energy'} of a {fall.per}"
    columns = ["part", "A", "B", "change", "of the change"]
    table = make_table(title, *columns, right=columns[1:])
    for part in fall.parts:
        share = fall.share_frac(part)
        cells = (shown(name, part.a), shown(name, part.b), _signed(name, part.change))
        table.add_row(part.name.replace("_", " "), *cells, "-" if share is None else f"{100 * share:+.1f} %")
    table.add_section()
    whole = "-" if fall.cancels else "100 %"
    table.add_row("whole", shown(name, fall.a), shown(name, fall.b), _signed(name, fall.b - fall.a), whole)
    print_table(console, table)
    if fall.cancels:
        console.print("The parts' changes cancel out, so shares of the rest are not meaningful.", highlight=False)


def _signed(name: str, value: float) -> str:
    return f"{'+' if value > 0 else '-' if value < 0 else ''}{shown(name, abs(value))}"

"""Views of a ranking: trials or recordings in order with their distance to each bound, then what the rest lacks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from wattune.objective import Constraint
from wattune.ranking.assessment import RankedTrial
from wattune.ranking.bounds import Margin
from wattune.ranking.order import Ranking
from wattune.units import format_change, format_probability
from wattune.view.answer import answer_view, place_text, slack_text
from wattune.view.table import (
    COUNT,
    FIGURE,
    PROBABILITY,
    SIMULATED,
    Cell,
    Column,
    Note,
    Table,
    View,
    columns_of,
    reading,
    warnings,
    worded,
)

READING: Final = reading(
    "± is the 95 % interval; P(best) is the probability to be the best that keeps every bound; a rank is 1 plus the "
    "trials that are told to be better, at 95 % over all comparisons"
)

MOST_ROWS: Final = 200
"""Most trials of each kind that a terminal shows unless more are asked for: ten thousand take minutes to lay out."""

STANDING: Final = (
    Column("P(best)", lambda row: row.best_probability, PROBABILITY),
    Column("rank", lambda row: row.rank, COUNT),
)
"""Columns of how surely and where a row leads."""

_WITHOUT: Final = (
    ("unknown", "unknown"),
    ("burst", "only a burst: a few steps, never ranked"),
    ("interrupted", "interrupted: run again by the same command"),
    ("failed", "failed"),
)
"""Lists of trials without a place, and their titles."""


def setting_columns(ranking: Ranking) -> list[Column]:
    """Returns a column for each part of the setting in which trials differ."""
    return columns_of({name: name for name in ranking.varying}, lambda row, name: row.setting[name], "")


def bound_columns(constraints: Sequence[Constraint]) -> list[Column]:
    """Returns a column for each bound: what came closest to it, and the verdict."""

    def cell(row: RankedTrial, bound: str) -> Cell:
        found = next((one for one in row.margins if str(one.constraint) == bound), None)
        if found is None:
            return Cell(text="not measured", tone="unknown")
        return Cell(
            worded(found.metric, found.got), tone=str(found.verdict), detail=distance(found), title=slack_text(found)
        )

    columns = columns_of({bound: bound for bound in map(str, constraints)}, cell, FIGURE)
    return [replace(column, place="own", short=f"bound {n}") for n, column in enumerate(columns, start=1)]


def distance(margin: Margin) -> str:
    """Returns the distance to a bound, the probability that the bound holds, and the verdict, in few words."""
    likely = margin.holds_probability
    kept = "" if likely is None else f", P {format_probability(likely)}"
    return f"{place_text(margin)}{kept}, {margin.verdict}"


def price_text(ranking: Ranking) -> str:
    """Describes the price of the bounds: the best trial of the same work that breaks one, against the best feasible."""
    best, row = ranking.best, ranking.price
    if row is None or row.objective is None:
        measured = best is not None and any(one.objective for one in ranking.breaking)
        return "No trial that breaks a bound does better." if measured else ""
    failing = row.failing[0]
    past = f"fails {failing.constraint} by {format_change(failing.metric, -failing.slack)}"
    reached = worded(ranking.objective.metric, row.objective.value)
    if best is None or best.objective is None:
        return f"The best trial that breaks a bound, {row.label}, reaches {reached} and {past}."
    own = best.objective.value
    share = f"{100 * abs(row.objective.value - own) / abs(own):.1f} % " if own else ""
    return f"{row.label} is {share}better, with {reached}, but {past}."


def ranking_view(ranking: Ranking, *, top: int | None = None) -> View:
    """Lays out the answer, feasible trials in order with their distance to each bound, and what the others lack."""
    listed = (ranking.feasible, ranking.undecided, ranking.behind, ranking.infeasible)
    others = [(found, title) for name, title in _WITHOUT if (found := getattr(ranking, name))]
    settings = setting_columns(ranking)
    rows = [row for rows in listed for row in rows[:top]]
    hidden = sum(len(rows[top:]) for rows in (*listed, *(found for found, _ in others))) if top else 0
    trial, plan = _named(ranking)
    without = [
        trial,
        *settings,
        plan,
        Column("why", lambda row: row.reason, place="prose"),
    ]
    lines = [READING] if ranking.feasible else []
    lines += [
        reading(line) for line in (*ranking.scatter, _expected(ranking), price_text(ranking), ranking.true_text) if line
    ]
    return [
        *answer_view(ranking),
        _measured(ranking, rows, settings) if rows else Note(str(ranking.objective), "conclusion"),
        *(Table(f"{len(found)} {title}", without, found[:top]) for found, title in others),
        *([Note(f"... and {hidden} more; raise --top to see them, --csv has all")] if hidden else []),
        *lines,
        *_risk(ranking),
        reading(ranking.note),
        *(Note(_best_of_each(ranking, best)) for best in ranking.best_of_each),
        *warnings(ranking.warnings),
        *([SIMULATED] if ranking.simulated else []),
    ]


def front_table(rows: Sequence[RankedTrial], metrics: Sequence[str], *, of: str) -> Table:
    """Lays out the trials that no other beats in both metrics, and how each stands to the bounds."""
    columns = [
        Column("trial", lambda row: row.trial_id, place="lead"),
        Column("plan", lambda row: Cell(row.label, tone=str(row.verdict)), place="lead"),
        *columns_of({metric: metric for metric in metrics}, lambda row, metric: row.interval(metric)),
        Column("verdict", lambda row: row.behind or str(row.verdict)),
    ]
    return Table(f"Pareto front of {' and '.join(metrics)}, {of}", columns, rows)


def _named(ranking: Ranking) -> tuple[Column, Column]:
    """Returns the columns that name a row: trial and plan, or recording and command."""
    trial, plan = ("recording", "command") if ranking.of_recordings else ("trial", "plan")
    return (
        Column(trial, lambda row: row.trial_id, place="lead"),
        # Sizes have columns.
        Column(
            plan,
            lambda row: Cell(row.spec.label, tone=str(row.verdict)),
            place="prose" if ranking.of_recordings else "lead",
        ),
    )


def _measured(ranking: Ranking, rows: Sequence[RankedTrial], settings: Sequence[Column]) -> Table:
    metric = ranking.objective.metric
    trial, plan = _named(ranking)
    columns = [
        *STANDING,
        trial,
        *settings,
        plan,
        Column(metric, lambda row: row.objective, metric),
        *bound_columns(ranking.constraints),
        Column("verdict", lambda row: row.behind or str(row.verdict)),
        Column("quality", lambda row: row.quality + "".join(f" ({mark})" for mark in row.marks)),
    ]
    return Table(str(ranking.objective), columns, rows)


def _risk(ranking: Ranking) -> list[Note]:
    text = f"P: probability that the next run keeps the bound; holds and breaks at a risk of {ranking.question.risk:g}"
    return [reading(text)] if ranking.constraints else []


def _expected(ranking: Ranking) -> str:
    """Describes what the leader is expected to measure again; empty where that is nothing else."""
    best, metric = ranking.best, ranking.objective.metric
    if best is None or best.objective is None or ranking.expected is None or len(ranking.feasible) == 1:
        return ""
    measured, expected = worded(metric, best.objective.value), worded(metric, ranking.expected)
    if measured == expected:
        return ""
    return f"the first of many is likely lucky: {best.trial_id} measured {measured}, expected when run again {expected}"


def _best_of_each(ranking: Ranking, best: RankedTrial) -> str:
    name = f"{best.study} " if best.study else ""
    value = worded(ranking.objective.metric, best.objective)
    return f"best of {name}{ranking.work_name(best)}: {best.label} ({best.trial_id}), {value}"

"""View of a study's time: each run's seconds by part, their sum, and the share in which steps were measured."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from wattune.ranking.order import Ranking
from wattune.run import TIME_PARTS
from wattune.view.table import PERCENT, Cell, Column, Note, Table, View, columns_of, reading, worded

_MEASURED: Final = "window"

_Row = tuple[str, str, dict[str, float], float]
"""Trial, plan, seconds by part, and those it waited for nodes, which are no node's."""


def _rows(ranking: Ranking) -> list[_Row]:
    runs = [(row, run) for row in ranking.trials for run in row.repeats if run.end_wall_ns and run.recorded is None]
    runs.sort(key=lambda one: one[1].start_wall_ns)
    return [
        (f"{run.trial_id}-{run.repeat}", row.label, run.times_s, run.numbers.node_wait_s or 0.0) for row, run in runs
    ]


def _sums(rows: Sequence[_Row]) -> dict[str, float]:
    return {part: sum(row[2].get(part, 0.0) for row in rows) for part in (*TIME_PARTS, "other")}


def _ahead_s(ranking: Ranking) -> float:
    return sum(run.numbers.ahead_cpu_s or 0.0 for row in ranking.trials for run in row.repeats)


def times_json(ranking: Ranking) -> dict[str, Any]:
    """Returns plain data for `wattune rank --time --json`: seconds by part of every run in order, and sums.

    Parts have the names of the run's numbers; `other_time_s` is what nobody told.
    """
    rows = _rows(ranking)
    sums_s = _sums(rows)
    total_s = sum(sums_s.values())
    return {
        "runs": [
            {"run": name, "plan": plan, **_named(times_s), "node_wait_s": waited_s}
            for name, plan, times_s, waited_s in rows
        ],
        "sum": _named(sums_s) | {"node_wait_s": sum(row[3] for row in rows), "ahead_cpu_s": _ahead_s(ranking)},
        "total_s": total_s,
        "measured_frac": sums_s[_MEASURED] / total_s if total_s else None,
    }


def _named(times_s: Mapping[str, float]) -> dict[str, float]:
    return {TIME_PARTS.get(part, "other_time_s"): time_s for part, time_s in times_s.items()}


def times_view(ranking: Ranking) -> View:
    """Lays out each run's seconds by part, in the order they ran."""
    rows = _rows(ranking)
    if not any(times_s.keys() - {"other"} for _, _, times_s, _ in rows):
        return [Note("No run tells where its time went.")]
    sums_s = _sums(rows)
    total_s, waited_s, ahead_s = sum(sums_s.values()), sum(row[3] for row in rows), _ahead_s(ranking)
    shown = {part: part for part, whole_s in sums_s.items() if whole_s >= 0.05 or part == _MEASURED}
    columns = [
        Column("run", lambda row: row[0], place="lead"),
        Column("plan", lambda row: row[1], place="lead"),
        *([Column("for nodes", lambda row: _seconds(row[3]), "time_s")] if waited_s else []),
        *columns_of(shown, lambda row, part: _seconds(row[2].get(part)), "time_s"),
        Column("all", lambda row: _seconds(sum(row[2].values())), "time_s"),
        Column("measured", lambda row: row[2].get(_MEASURED, 0.0) / (sum(row[2].values()) or 1.0), PERCENT),
    ]
    share = worded(PERCENT, sums_s[_MEASURED] / (total_s or 1.0))
    other = "; other: what nobody told, such as of a run whose ranks ended without a word" if "other" in shown else ""
    nodes = "for nodes: they did not live or other jobs used them, which no other column counts; " if waited_s else ""
    return [
        Table("Seconds of each run by part", columns, rows, total=("", "sum", sums_s, waited_s)),
        reading(f"steps were measured in {share} of {total_s:.1f} s, the wall time of each set of nodes together"),
        *([reading(f"beside them {ahead_s:.0f} s of processors compiled coming plans")] if ahead_s else []),
        reading(f"{nodes}wait: its nodes had nothing to do before it; first step: with the compiler's work{other}"),
    ]


def _seconds(value_s: float | None) -> Cell:
    return Cell(value_s, "" if value_s is None else f"{value_s:.1f}")

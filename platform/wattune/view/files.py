"""Results as flat tables, one figure a cell: a ranking with a row a trial, and a study with a row a repeat."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from wattune.arrays import Floats
from wattune.metrics import METRICS
from wattune.objective import Constraint
from wattune.plans.axes import AXES
from wattune.plans.program import text_of
from wattune.ranking.answer import BETTER, asked_of
from wattune.ranking.assessment import RankedTrial, is_simulated
from wattune.ranking.order import Ranking
from wattune.run import Run
from wattune.search.names import namer
from wattune.trial import TrialSpec
from wattune.view.arrow import arrow, csv_text, flat, schema_of
from wattune.view.table import Column, columns_of

_KINDS: Final = {"choice": "text", "layout": "layout", "order": "text"}
"""Kinds of columns by those of axes; others are counts, or text where they have names."""

_Run: TypeAlias = tuple[TrialSpec, Run]


def plan_columns(spec_of: Callable[[Any], TrialSpec]) -> list[Column]:
    """Returns a column for each axis of a row's plan."""

    def column(name: str) -> Column:
        if name == "rank_order":
            return Column(name, lambda row: flat(spec_of(row).plan.rank_order))
        return Column(
            name,
            lambda row: getattr(spec_of(row).plan, name),
            kind=_KINDS.get(AXES[name].kind) or ("text" if AXES[name].choices else "count"),
        )

    return [column(name) for name in AXES]


def flag_columns(specs: Iterable[TrialSpec], spec_of: Callable[[Any], TrialSpec]) -> list[Column]:
    """Returns a column for each flag of some trials, such as `flags.lr`: numbers where all values are."""
    kinds: dict[str, set[type]] = {}
    for spec in specs:
        for name, value in spec.flags:
            kinds.setdefault(name, set()).add(type(value))

    def column(name: str, own: set[type]) -> Column:
        kind = "size" if own == {int} else "number" if own <= {int, float} else "text"

        def read(row: Any) -> Any:
            value = dict(spec_of(row).flags).get(name)
            return text_of(value) if kind == "text" and value is not None else value

        return Column(f"flags.{name}", read, kind=kind)

    return [column(name, own) for name, own in kinds.items()]


def ranking_columns(ranking: Ranking) -> list[Column]:
    """Returns the columns of a ranking. None is nested but `layout`, and each metric has a column."""
    rows, objective = ranking.trials, ranking.objective.metric
    studies: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        studies.setdefault(id(row.spreads), []).append(place)
    middles = [(own, rows[own[0]].spreads.middles([rows[at].counted for at in own])) for own in studies.values()]

    def spec_of(row: RankedTrial) -> TrialSpec:
        return row.spec

    def metric(name: str) -> Column:
        def every(_: Sequence[Any]) -> Floats:
            found = np.full(len(rows), np.nan)
            for own, read in middles:
                found[own] = read(name)
            return found

        return Column(name, lambda row: (found := row.interval(name)) and found.value, name, every=every)

    def known(read: Callable[[Any], Any]) -> Callable[[RankedTrial], Any]:
        return lambda row: read(row.spec.model) if row.spec.model.is_known else None

    def interval(read: Callable[[Any], Any]) -> Callable[[RankedTrial], Any]:
        return lambda row: None if row.objective is None else read(row.objective)

    def margins(bound: Constraint) -> list[Column]:
        own = {id(row): one for row in rows for one in row.margins if one.constraint == bound}

        def part(name: str, quantity: str, kind: str) -> Column:
            return Column(f"{bound}: {name}", lambda row: getattr(own.get(id(row)), name, None), quantity, kind=kind)

        figures = [part(name, bound.metric, "number") for name in ("got", "bound", "slack")]
        return [*figures, part("holds_probability", "", "number"), part("verdict", "", "text")]

    return [
        Column("rank", lambda row: row.rank, kind="count"),
        Column("best_probability", lambda row: row.best_probability, kind="number"),
        Column("verdict", lambda row: str(row.verdict)),
        Column("study", lambda row: row.study),
        Column("trial_id", lambda row: row.trial_id),
        Column("label", lambda row: row.label),
        Column("model", lambda row: row.spec.model.name),
        Column("num_parameters", known(lambda model: model.num_parameters), kind="size"),
        Column("num_active_parameters", known(lambda model: model.num_active_parameters), kind="size"),
        *_place_columns(spec_of),
        *plan_columns(spec_of),
        *flag_columns((row.spec for row in rows), spec_of),
        Column(f"{objective} low", interval(lambda one: one.low), objective),
        Column(f"{objective} high", interval(lambda one: one.high), objective),
        Column(f"{objective} interval", interval(lambda one: one.method)),
        Column(f"{objective} runs", interval(lambda one: one.num_runs), kind="count"),
        *map(metric, METRICS),
        *(column for bound in ranking.constraints for column in margins(bound)),
        Column("quality", lambda row: row.quality),
        Column("simulated", lambda row: row.simulated, kind="flag"),
        Column("num_repeats", lambda row: len(row.counted), kind="count"),
        # What objective and constraints need and nothing measured.
        Column("missing", lambda row: ", ".join(row.missing)),
        Column("reason", lambda row: row.reason),
    ]


def _place_columns(spec_of: Callable[[Any], TrialSpec]) -> list[Column]:
    return [
        Column("cluster", lambda row: spec_of(row).cluster.label),
        Column("engine", lambda row: spec_of(row).engine),
        Column("dp", lambda row: spec_of(row).plan.dp(spec_of(row).cluster.world_size), kind="count"),
    ]


def ranking_table(ranking: Ranking) -> pa.Table:
    """Builds `ranking.parquet`: one row a trial, one column a metric; the metadata has objective, constraints, notes.

    A metric is the middle of its interval over the trial's repeats, null where one of them did not measure it. The
    repeats themselves are rows of `wattune.Study.metrics`.
    """
    metadata = {
        "wattune.objective": str(ranking.objective),
        "wattune.constraints": "\n".join(map(str, ranking.constraints)),
        "wattune.where": "\n".join(map(str, ranking.where)),
        "wattune.note": ranking.note,
        "wattune.unreadable": "\n".join(ranking.unreadable.values()),
        "wattune.simulated": str(ranking.simulated).lower(),
        BETTER: f"{ranking.better_probability} {asked_of(ranking)}",
    }
    return arrow(ranking_columns(ranking), ranking.trials, metadata)


def ranking_csv(ranking: Ranking) -> str:
    """Builds the CSV: a line per trial in the order of listing, then one per unreadable repeat (verdict `unreadable`).

    Its columns are those of `ranking_table`, without metrics that no trial measured. A cell is empty where the table
    is null.
    """
    measured = {name for row in ranking.trials for one in row.counted for name in one.metrics}
    columns = [one for one in ranking_columns(ranking) if one.name not in METRICS or one.name in measured]
    lost = [{"verdict": "unreadable", "trial_id": name, "reason": why} for name, why in ranking.unreadable.items()]
    return csv_text(arrow(columns, ranking.trials), lost)


def repeats_table(runs: Sequence[_Run], **metadata: str) -> pa.Table:
    """Builds the table of a study's repeats: status, quality, plan, and a column for every metric."""
    return arrow(_repeats_columns(runs), runs, {f"wattune.{name}": text for name, text in metadata.items()})


def repeats_schema() -> pa.Schema:
    """Returns the columns of `Study.metrics`, with the unit of each metric in its field's metadata."""
    return schema_of(_repeats_columns([]))


def _repeats_columns(runs: Sequence[_Run]) -> list[Column]:
    name = namer(spec.workload for spec, _ in runs)

    def spec_of(run: _Run) -> TrialSpec:
        return run[0]

    return [
        Column("trial_id", lambda run: run[1].trial_id),
        Column("repeat", lambda run: run[1].repeat, kind="count"),
        Column("status", lambda run: str(run[1].status)),
        Column("reason", lambda run: run[1].reason),
        Column("quality", lambda run: run[1].quality),
        Column("simulated", lambda run: is_simulated(run[1]), kind="flag"),
        Column("label", lambda run: name(run[0])),
        Column("model", lambda run: run[0].model.name),
        *_place_columns(spec_of),
        *plan_columns(spec_of),
        *columns_of({metric: metric for metric in METRICS}, lambda run, metric: run[1].metrics.get(metric)),
        *flag_columns((spec for spec, _ in runs), spec_of),
    ]

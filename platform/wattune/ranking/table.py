"""A ranking as flat files, one row a trial and one figure a cell: Parquet with units, and CSV for spreadsheets."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from wattune.metrics import METRICS
from wattune.plans.axes import AXES, Plan
from wattune.plans.program import text_of
from wattune.ranking.assessment import RankedTrial
from wattune.ranking.order import Ranking
from wattune.storage.files import write_asked
from wattune.trial import TrialSpec

_AXIS_TYPES: Final = {"count": pa.int32(), "choice": pa.string(), "layout": pa.list_(pa.int32()), "order": pa.string()}

_MARGIN_PARTS: Final = ("got", "bound", "slack", "holds_probability", "verdict")
"""Parts of a margin that have a column."""

PLAN_COLUMNS: Final[dict[str, pa.DataType]] = {name: _AXIS_TYPES[axis.kind] for name, axis in AXES.items()}
"""Columns a plan has in a table: its axes."""


def plan_values(plan: Plan) -> dict[str, Any]:
    """A plan as one row of `PLAN_COLUMNS`."""
    return {name: getattr(plan, name) for name in PLAN_COLUMNS} | {"rank_order": cell_text(plan.rank_order)}


def flag_columns(specs: Iterable[TrialSpec]) -> dict[str, pa.DataType]:
    """Returns the columns of the flags of some trials, such as `flags.lr`: numbers where all values are."""
    values: dict[str, list[Any]] = {}
    for spec in specs:
        for name, value in spec.flags:
            values.setdefault(f"flags.{name}", []).append(value)
    types = {int: pa.int64(), float: pa.float64(), str: pa.string()}
    kinds = {name: {type(one) for one in own} for name, own in values.items()}
    return {
        name: types[int] if own == {int} else types[float] if own <= {int, float} else types[str]
        for name, own in kinds.items()
    }


def flag_values(spec: TrialSpec, columns: Mapping[str, pa.DataType]) -> dict[str, Any]:
    """Returns the flags of a trial as one row of `flag_columns`."""
    own = {f"flags.{name}": value for name, value in spec.flags}
    return {name: text_of(value) if columns[name] == pa.string() else value for name, value in own.items()}


_FACTS: Final = {
    "rank": pa.int32(),
    "best_probability": pa.float64(),
    "verdict": pa.string(),
    "study": pa.string(),
    "trial_id": pa.string(),
    "label": pa.string(),
    "model": pa.string(),
    "num_parameters": pa.int64(),
    "num_active_parameters": pa.int64(),
    "cluster": pa.string(),
    "engine": pa.string(),
    "dp": pa.int32(),
}
"""First columns of a ranking, before those of the plan."""

_ENDS: Final = {
    "quality": pa.string(),
    "simulated": pa.bool_(),
    "num_repeats": pa.int32(),
    "missing": pa.string(),
    "reason": pa.string(),
}
"""Last columns of a ranking. `missing` has the metrics that objective and constraints need and nothing measured."""


def metric_field(name: str, metric: str | None = None) -> pa.Field:
    """Returns the column of a figure, with the unit of its metric and which way is better in the field's metadata.

    Args:
        name: The column's name.
        metric: The metric, where the column has another name than it.
    """
    found = METRICS[metric or name]
    return pa.field(name, pa.float64(), metadata={"unit": found.unit or "", "better": found.better})


def ranking_schema(ranking: Ranking) -> pa.Schema:
    """Returns the columns of a ranking as a table. None is nested but `layout`, and each metric has a column."""
    objective = ranking.objective.metric
    flags = flag_columns(row.spec for row in ranking.trials)
    fields = [pa.field(name, kind) for name, kind in {**_FACTS, **PLAN_COLUMNS, **flags}.items()]
    fields += [metric_field(f"{objective} {end}", objective) for end in ("low", "high")]
    fields += [pa.field(f"{objective} interval", pa.string()), pa.field(f"{objective} runs", pa.int32())]
    fields += [metric_field(name) for name in METRICS]
    for bound in ranking.constraints:
        fields += [metric_field(f"{bound}: {part}", bound.metric) for part in ("got", "bound", "slack")]
        fields += [pa.field(f"{bound}: holds_probability", pa.float64()), pa.field(f"{bound}: verdict", pa.string())]
    return pa.schema([*fields, *(pa.field(name, kind) for name, kind in _ENDS.items())])


def to_table(ranking: Ranking) -> pa.Table:
    """Builds `ranking.parquet`: one row a trial, one column a metric; the metadata has objective, constraints, notes.

    A metric is the middle of its interval over the trial's repeats, null where one of them did not measure it. The
    repeats themselves are rows of `wattune.Study.metrics`.
    """
    metadata = {
        "wattune.objective": str(ranking.objective),
        "wattune.constraints": "\n".join(map(str, ranking.constraints)),
        "wattune.where": "\n".join(map(str, ranking.where)),
        "wattune.note": ranking.note,
        "wattune.unreadable": "\n".join(one.reason for one in ranking.unreadable),
        "wattune.simulated": str(ranking.simulated).lower(),
    }
    schema = ranking_schema(ranking).with_metadata(metadata)
    return pa.Table.from_pylist(list(_rows(ranking)), schema)


def to_csv(ranking: Ranking) -> str:
    """Builds the CSV: a line per trial in the order of listing, then one per unreadable repeat (verdict `unreadable`).

    Its columns are those of `to_table`, without metrics that no trial measured. A cell is empty where the table is
    null.
    """
    measured = _measured(ranking)
    columns = [name for name in ranking_schema(ranking).names if name not in METRICS or name in measured]
    written = io.StringIO()
    lines = csv.DictWriter(written, columns, restval="", lineterminator="\n")
    lines.writeheader()
    for row in _rows(ranking):
        lines.writerow({name: cell_text(value) for name, value in row.items()})
    for one in ranking.unreadable:
        lines.writerow({"verdict": "unreadable", "trial_id": one.name, "reason": one.reason})
    return written.getvalue()


def _measured(ranking: Ranking) -> list[str]:
    """Lists the metrics that any repeat measured."""
    found = {name for row in ranking.trials for one in row.counted for name in one.metrics}
    return [name for name in METRICS if name in found]


def _rows(ranking: Ranking) -> Iterator[dict[str, Any]]:
    """Yields each trial as one row of `ranking_schema`."""
    trials, measured = ranking.trials, _measured(ranking)
    flags = flag_columns(row.spec for row in trials)
    for row in trials:
        yield _cells(row, ranking.objective.metric, measured, flags)


def _cells(
    row: RankedTrial, objective: str, measured: Sequence[str], flags: Mapping[str, pa.DataType]
) -> dict[str, Any]:
    """Returns a trial as one row of `ranking_schema`, without the columns that are null."""
    whole = row.to_json()
    cells: dict[str, Any] = {name: whole[name] for name in (*_FACTS, "quality", "simulated", "reason")}
    cells |= plan_values(row.spec.plan) | flag_values(row.spec, flags)
    cells |= {"num_repeats": len(row.counted), "missing": ", ".join(row.missing)}
    counted = row.counted
    cells |= {name: value for name in measured if (value := row.spreads.middle(counted, name)) is not None}
    if row.objective is not None:
        cells[f"{objective} low"], cells[f"{objective} high"] = row.objective.low, row.objective.high
        cells[f"{objective} interval"], cells[f"{objective} runs"] = row.objective.method, row.objective.num_runs
    for margin in whole["margins"]:
        cells |= {f"{margin['constraint']}: {part}": margin[part] for part in _MARGIN_PARTS}
    return cells


def write_csv(ranking: Ranking, path: Path) -> None:
    """Writes the CSV to a file.

    Raises:
        PlanError: It cannot be written there.
    """
    write_asked(path, to_csv(ranking))


def cell_text(value: Any) -> Any:
    """Returns a value as a cell of a CSV: empty for null, a list joined by `-`."""
    if value is None:
        return ""
    return "-".join(map(str, value)) if isinstance(value, tuple | list) else value

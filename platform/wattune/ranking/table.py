"""A ranking as files: Parquet with all data, and CSV for spreadsheets with one figure per cell."""

import csv
import io
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from wattune.plan.axes import AXES, Plan
from wattune.ranking.order import Ranking
from wattune.schema import METRICS
from wattune.storage.files import write_asked

_AXIS_TYPES: Final = {"count": pa.int32(), "choice": pa.string(), "layout": pa.list_(pa.int32()), "order": pa.string()}

_MARGIN_PARTS: Final = ("got", "bound", "slack", "holds_probability", "verdict")
"""Parts of a margin that have a column in the CSV."""

PLAN_COLUMNS: Final[dict[str, pa.DataType]] = {name: _AXIS_TYPES[axis.kind] for name, axis in AXES.items()}
"""Columns a plan has in a table: its axes."""


def plan_values(plan: Plan) -> dict[str, Any]:
    """A plan as one row of `PLAN_COLUMNS`."""
    return {name: getattr(plan, name) for name in PLAN_COLUMNS} | {"rank_order": str(plan.rank_order)}


def _struct(**types: pa.DataType) -> pa.DataType:
    return pa.struct(list(types.items()))


_TABLE: Final = pa.schema(
    {
        "rank": pa.int32(),
        "best_probability": pa.float64(),
        "study": pa.string(),
        "trial_id": pa.string(),
        "verdict": pa.string(),
        "label": pa.string(),
        "model": pa.string(),
        "num_parameters": pa.int64(),
        "num_active_parameters": pa.int64(),
        "cluster": pa.string(),
        "engine": pa.string(),
        "dp": pa.int32(),
        "plan": _struct(**PLAN_COLUMNS),
        "objective": _struct(
            value=pa.float64(),
            low=pa.float64(),
            high=pa.float64(),
            method=pa.string(),
            num_runs=pa.int32(),
            confidence_frac=pa.float64(),
        ),
        "margins": pa.list_(
            _struct(
                constraint=pa.string(),
                metric=pa.string(),
                got=pa.float64(),
                bound=pa.float64(),
                slack=pa.float64(),
                slack_frac=pa.float64(),
                repeat=pa.int32(),
                holds=pa.bool_(),
                holds_probability=pa.float64(),
                verdict=pa.string(),
            )
        ),
        "missing": pa.list_(pa.string()),
        "reason": pa.string(),
        "quality": pa.string(),
        "simulated": pa.bool_(),
        "repeats": pa.list_(
            _struct(
                repeat=pa.int32(),
                status=pa.string(),
                reason=pa.string(),
                quality=pa.string(),
                quality_reasons=pa.list_(pa.string()),
                metrics=pa.map_(pa.string(), pa.float64()),
            )
        ),
    }.items()
)
"""Columns of `ranking.parquet`: those of a row's JSON. Values are in the units of their metrics."""


def to_table(ranking: Ranking) -> pa.Table:
    """Builds `ranking.parquet`: one row per trial; the metadata has objective, constraints and notes."""
    rows = [row.to_json() for row in ranking.trials]
    for row, trial in zip(rows, ranking.trials, strict=True):
        row["plan"] = plan_values(trial.spec.plan)
        row["repeats"] = [{**repeat, "metrics": list(repeat["metrics"].items())} for repeat in row["repeats"]]
    metadata = {
        "wattune.objective": str(ranking.objective),
        "wattune.constraints": "\n".join(map(str, ranking.constraints)),
        "wattune.where": "\n".join(map(str, ranking.where)),
        "wattune.note": ranking.note,
        "wattune.unreadable": "\n".join(one.reason for one in ranking.unreadable),
        "wattune.simulated": str(ranking.simulated).lower(),
    }
    return pa.Table.from_pylist(rows, schema=_TABLE.with_metadata(metadata))


def to_csv(ranking: Ranking) -> str:
    """Builds the CSV: a line per trial in the order of listing, then one per unreadable repeat (verdict `unreadable`).

    A metric is the middle of its interval, empty where unmeasured. The objective has its interval beside it. Every
    constraint has the measured value, the bound, the distance to it, the probability that the next run keeps it, and
    the verdict. Columns are named as in the ranking's JSON.
    """
    bounds = [str(constraint) for constraint in ranking.constraints]
    objective = ranking.objective.metric
    measured = [name for name in METRICS if any(name in one.metrics for row in ranking.trials for one in row.counted)]
    facts = [
        "rank",
        "best_probability",
        "verdict",
        "study",
        "trial_id",
        "label",
        "model",
        "num_parameters",
        "num_active_parameters",
    ]
    facts += ["cluster", "engine", "dp"]
    trust = ["quality", "simulated", "num_repeats", "reason"]
    columns = [*facts, *AXES, f"{objective} low", f"{objective} high", f"{objective} interval", *measured]
    columns += [f"{bound}: {part}" for bound in bounds for part in _MARGIN_PARTS]
    written = io.StringIO()
    lines = csv.DictWriter(written, [*columns, *trust], restval="", lineterminator="\n")
    lines.writeheader()
    for row in ranking.trials:
        whole = row.to_json()
        cells: dict[str, Any] = {name: whole[name] for name in (*facts, "quality", "simulated", "reason")}
        cells |= {name: _text(value) for name, value in whole["plan"].items()}
        cells |= {name: found.value for name in measured if (found := row.interval(name)) is not None}
        if row.objective is not None:
            cells[f"{objective} low"], cells[f"{objective} high"] = row.objective.low, row.objective.high
            cells[f"{objective} interval"] = row.objective.method
        for margin in whole["margins"]:
            for part in _MARGIN_PARTS:
                cells[f"{margin['constraint']}: {part}"] = margin[part]
        lines.writerow(
            {name: "" if value is None else value for name, value in cells.items()} | {"num_repeats": len(row.counted)}
        )
    for one in ranking.unreadable:
        lines.writerow({"verdict": "unreadable", "trial_id": one.name, "reason": one.reason})
    return written.getvalue()


def write_csv(ranking: Ranking, path: Path) -> None:
    """Writes the CSV to a file.

    Raises:
        PlanError: It cannot be written there.
    """
    write_asked(path, to_csv(ranking))


def _text(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple | list) else str(value)

"""The measured studies of `benchmarks/data`: specification and result of every trial, and what each study asked."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.cost.tables import EstimatedMetric
from wattune.metrics import METRICS
from wattune.objective import Question
from wattune.run import Numbers, Run, RunStatus
from wattune.trial import TrialSpec

DATA = Path(__file__).parents[2] / "benchmarks" / "data"


def results_of(table: str, *, without: tuple[str, ...] = ()) -> list[tuple[TrialSpec, Run]]:
    """Reads every repeat of a table, without some metrics."""
    return [
        (
            TrialSpec.from_json(json.loads(row["spec"])),
            Run(
                trial_id=row["trial_id"],
                repeat=row["repeat"],
                status=RunStatus(row["status"]),
                start_wall_ns=row["start_wall_ns"],
                quality=row["quality"],
                metrics={name: row[name] for name in METRICS.keys() - {*without} if row.get(name) is not None},
                tags=json.loads(row["tags"]),
                numbers=Numbers(**json.loads(row["numbers"])),
            ),
        )
        for row in pq.read_table(DATA / f"{table}.parquet").to_pylist()
    ]


def estimates_of(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, EstimatedMetric]:
    """Estimates the trials of rows of a table."""
    specs = [TrialSpec.from_json(json.loads(row["spec"])) for row in rows]
    return estimate(specs, default_coefficients).columns


def studies() -> Iterator[tuple[str, Question]]:
    """Yields each table that is a study with its space, and the question of it."""
    for path in sorted(DATA.glob("*.yaml")):
        space = yaml.safe_load(path.read_text())
        if "objective" in space and path.with_suffix(".parquet").is_file():
            yield path.stem, Question.of(space["objective"], *space.get("constraints", ()))

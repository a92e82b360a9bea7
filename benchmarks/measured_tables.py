"""Reads the measured trials of `benchmarks/data`, for the scripts that fit and test predictions."""

import json
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

DATA: Final = Path(__file__).parent / "data"
ALL: Final = "*_h200x*.parquet"
"""Tables of trials on H200."""

SAME_HEAD_NS: Final = 1_795_370_400 * 10**9
"""Wall time since which the torch engine computes head and loss compiled at every tensor degree. Trials from before it
with tp > 1 ran other kernels, and held 6 bytes more of each logit."""


def rows(pattern: str = ALL) -> list[dict[str, Any]]:
    """Reads every completed trial of the tables of that name, of the engines as they are; no users' commands.

    Each row has the name of its `table` too.
    """
    found = [row for path in sorted(DATA.glob(pattern)) for row in completed(path)]
    return [row for row in found if row["engine"] != "command" and not is_outdated(row)]


def completed(path: Path) -> list[dict[str, Any]]:
    """Reads the completed trials of one table, with the table's name."""
    found = [{**row, "table": path.stem} for row in pq.read_table(path).to_pylist()]
    return [row for row in found if row["status"] == "completed" and row["step_time_s"]]


def is_outdated(row: dict[str, Any]) -> bool:
    """Tells whether a trial was measured with an engine that has changed in what it measures."""
    spec = json.loads(row["spec"])
    return spec["engine"] == "torch" and spec["plan"]["tp"] > 1 and row["start_wall_ns"] < SAME_HEAD_NS

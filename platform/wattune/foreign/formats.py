"""Formats that are known: each is recognised from the content of a file."""

from pathlib import Path
from typing import Final

from wattune.errors import PlanError
from wattune.foreign.columns import named
from wattune.foreign.sampled import ForeignLog, sampled_of
from wattune.foreign.tables import csv_table, plain_text

KNOWN: Final = "nvidia-smi --query-gpu=timestamp,index,... --format=csv"

_TABLES: Final = (
    ("nvidia-smi csv", ("power_draw", "clocks_current", "temperature_gpu", "utilization_gpu", "clocks_")),
)
"""Tools by the beginnings of their columns."""

MOST_BYTES: Final = 2 * 2**30
"""Largest file: a day of eight GPUs at ten readings a second has some 700 MB."""


def read_log(path: Path, zone: str | None) -> ForeignLog:
    """Reads a log.

    Raises:
        PlanError: It cannot be read, or is none of a format that is known.
    """
    where = path.name
    try:
        if not path.is_file():
            raise PlanError(f"{path} is not a file; give a log that another tool wrote")
        if path.stat().st_size > MOST_BYTES:
            raise PlanError(f"{path} has more than {MOST_BYTES / 2**30:.0f} GiB; cut it to the run")
        text = plain_text(path.read_bytes(), where)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from error
    if (found := csv_table(text, where)) is not None:
        table, notes = found
        names = [named(name)[0] for name in table.column_names]
        tool = next((tool for tool, heads in _TABLES if any(name.startswith(heads) for name in names)), "CSV")
        return sampled_of(table, where, tool, notes, zone)
    first = next(line for line in text.split("\n") if line.strip()).strip()
    raise PlanError(f'{where} is of no format that is known; it begins "{first[:80]}"; known are: {KNOWN}')

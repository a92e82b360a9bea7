"""A study's results as one file for other tools: CSV, Parquet or JSON, one row a repeat or a trial."""

from typing import Final, Literal, get_args

from wattune.api.results import AnyStudy, folder_of, rank
from wattune.api.studies import Study
from wattune.errors import SpaceError, closest
from wattune.storage.documents import json_text
from wattune.storage.parquet import encoded
from wattune.version import __version__
from wattune.view.arrow import csv_text, plain_data
from wattune.view.files import ranking_table

Format = Literal["csv", "parquet", "json"]
Rows = Literal["repeats", "trials"]

FORMATS: Final[tuple[str, ...]] = get_args(Format)
ROWS: Final[tuple[str, ...]] = get_args(Rows)


def export(study: AnyStudy, to: Format, *, rows: Rows = "repeats", storage: str | None = None) -> bytes:
    """Returns a study's results as the content of one file.

    Raises `SpaceError`: there is no such format, or rows, `PlanError`: there is no such study, or none of its finished
    trials can be read.

    Args:
        study: A study, its name, or its folder.
        to: `csv`, `parquet` with units in the fields' metadata, or `json` with the unit of each column.
        rows: `repeats` is one row for each finished repeat with what it measured (`Study.metrics`). `trials` is one
            row for each trial as it is ranked, with verdict, interval and margins (`ranking.parquet`).
        storage: The place studies are kept in.
    """
    for name, got, allowed in (("to", to, FORMATS), ("rows", rows, ROWS)):
        if got not in allowed:
            raise SpaceError(f'--{name}: got "{got}"; {closest(got, allowed)}')
    folder = folder_of(study, storage=storage)
    table = Study(folder).metrics() if rows == "repeats" else ranking_table(rank(folder))
    known = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    facts = {**known, "wattune.study": folder.name, "wattune.rows": rows, "wattune.version": __version__}
    table = table.replace_schema_metadata(facts)
    if to == "parquet":
        return bytes(encoded(table).to_pybytes())
    if to == "csv":
        return csv_text(table).encode()
    told = {key.removeprefix("wattune."): value for key, value in facts.items() if key != "wattune.rows"}
    return (json_text({**told, "kind": rows, **plain_data(table)}) + "\n").encode()

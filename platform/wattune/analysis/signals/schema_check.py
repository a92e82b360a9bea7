"""Check of tables against the schema, before any figure is computed from them."""

from typing import Final

import pyarrow as pa

from wattune.analysis.signals.readings import Tables
from wattune.schema import SCHEMA_VERSION, TELEMETRY
from wattune.storage.values import wrong_columns

WRONG_VERSION: Final = "schema_version"
"""A table was written in another version of the schema: its columns may have another meaning."""

WRONG_COLUMNS: Final = "schema_columns"
"""A table lacks a column of keys or times, or has a column of another type than the schema's."""


def schema_problems(tables: Tables, spans: pa.Table | None) -> dict[str, str]:
    """Describes all problems that make tables unusable, by `schema_version` and `schema_columns`; empty without any."""
    problems: dict[str, list[str]] = {}
    schemas = {tier: table.schema for tier, table in tables.items() if tier in TELEMETRY}
    if spans is not None:
        schemas["spans"] = spans.schema
    for name, schema in schemas.items():
        version = (
            (schema.metadata or {}).get(b"wattune.schema_version", SCHEMA_VERSION.encode()).decode(errors="replace")
        )
        if version != SCHEMA_VERSION:
            problems.setdefault(WRONG_VERSION, []).append(f"{name} is of version {version}, not {SCHEMA_VERSION}")
        wrong = wrong_columns(schema, name)
        if wrong:
            problems.setdefault(WRONG_COLUMNS, []).extend(wrong)
    return {code: "; ".join(found) for code, found in problems.items()}

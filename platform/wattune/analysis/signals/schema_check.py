"""Check of tables against the schema, before any figure is computed from them."""

from typing import Final

import pyarrow as pa

from wattune.analysis.signals.readings import Tables
from wattune.schema import TELEMETRY
from wattune.storage.values import wrong_columns

WRONG_COLUMNS: Final = "schema_columns"
"""A table lacks a column of keys or times, or has a column of another type than the schema's."""


def schema_problems(tables: Tables, spans: pa.Table | None) -> dict[str, str]:
    """Describes all columns that make tables unusable, as `schema_columns`; empty without any."""
    schemas = {tier: table.schema for tier, table in tables.items() if tier in TELEMETRY}
    if spans is not None:
        schemas["spans"] = spans.schema
    wrong = [text for name, schema in schemas.items() for text in wrong_columns(schema, name)]
    return {WRONG_COLUMNS: "; ".join(wrong)} if wrong else {}

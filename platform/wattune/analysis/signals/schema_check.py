"""Check of tables against the schema, before any figure is computed from them."""

from typing import Final

import pyarrow as pa

from wattune.analysis.signals.readings import Tables
from wattune.schema import SCHEMA_VERSION, SPANS, TELEMETRY

WRONG_VERSION: Final = "schema_version"
"""A table was written in another version of the schema: its columns may have another meaning."""

WRONG_COLUMNS: Final = "schema_columns"
"""A table lacks a column of keys or times, or has a column of another type than the schema's."""

_NEEDED: Final = ("node", "device", "mono_ns", "wall_ns")
_NEEDED_OF_SPANS: Final = ("node", "device", "rank", "step", "phase", "start_mono_ns", "end_mono_ns", "start_wall_ns")


def schema_problems(tables: Tables, spans: pa.Table | None) -> dict[str, str]:
    """Describes all problems that make tables unusable, by `schema_version` and `schema_columns`; empty without any."""
    problems: dict[str, list[str]] = {}
    schemas = {tier: table.schema for tier, table in tables.items() if tier in TELEMETRY}
    if spans is not None:
        schemas["spans"] = spans.schema
    for name, schema in schemas.items():
        version = (schema.metadata or {}).get(b"wattune.schema_version", SCHEMA_VERSION.encode()).decode()
        if version != SCHEMA_VERSION:
            problems.setdefault(WRONG_VERSION, []).append(f"{name} is of version {version}, not {SCHEMA_VERSION}")
        expected = SPANS if name == "spans" else TELEMETRY[name]
        needed = _NEEDED_OF_SPANS if name == "spans" else (*_NEEDED, *(("sensor_ns",) if name == "ring" else ()))
        wrong = [f"{name} has no {column}" for column in needed if column not in schema.names]
        wrong += [
            f"{name}.{field.name} is {schema.field(field.name).type}"
            for field in expected
            if field.name in schema.names and not _alike(schema.field(field.name).type, field)
        ]
        if wrong:
            problems.setdefault(WRONG_COLUMNS, []).extend(wrong)
    return {code: "; ".join(found) for code, found in problems.items()}


def _alike(found: pa.DataType, expected: pa.Field) -> bool:
    """Returns true if a column has the expected kind: name, whole number or number. A column of nulls always has."""
    if pa.types.is_null(found):
        return True
    if pa.types.is_dictionary(expected.type):
        values = found.value_type if pa.types.is_dictionary(found) else found
        return bool(pa.types.is_string(values) or pa.types.is_large_string(values))
    # Some tools turn whole numbers with gaps into floats. Floats would lose the last digits of times, keys and bits.
    exact = pa.types.is_integer(expected.type) and (expected.metadata or {}).get(b"kind") in (b"time", b"bits", b"key")
    return bool(pa.types.is_integer(found) or (pa.types.is_floating(found) and not exact))

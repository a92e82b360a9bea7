"""Whether tables are what analysis takes them for, before a single figure is computed from them."""

from typing import Final

import pyarrow as pa

from wattune.analysis.signals.readings import Tables
from wattune.schema import SCHEMA_VERSION, SPANS, TELEMETRY

WRONG_VERSION: Final = "schema_version"
"""A table says that it was written in another version of the schema: its columns may mean something else."""

WRONG_COLUMNS: Final = "schema_columns"
"""A table lacks a column nothing can be placed without, or has one of another kind than its name says."""

_NEEDED: Final = ("node", "device", "mono_ns", "wall_ns")
_NEEDED_OF_SPANS: Final = ("node", "device", "rank", "step", "phase", "start_mono_ns", "end_mono_ns", "start_wall_ns")


def schema_problems(tables: Tables, spans: pa.Table | None) -> dict[str, str]:
    """What makes tables unusable, in words, by `schema_version` and `schema_columns`; empty where nothing does."""
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
    """Whether a column is of the kind it should be: a name, a whole number, or any number; nothing at all is all."""
    if pa.types.is_null(found):
        return True
    if pa.types.is_dictionary(expected.type):
        values = found.value_type if pa.types.is_dictionary(found) else found
        return bool(pa.types.is_string(values) or pa.types.is_large_string(values))
    # Some tools turn whole numbers with gaps into floats; of times, keys and bits a float would lose the last digits.
    exact = pa.types.is_integer(expected.type) and (expected.metadata or {}).get(b"kind") in (b"time", b"bits", b"key")
    return bool(pa.types.is_integer(found) or (pa.types.is_floating(found) and not exact))

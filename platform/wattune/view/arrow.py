"""Views as files for other programs: Arrow with a type and a unit for each column, and CSV and JSON of that."""

import csv
import io
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import pyarrow as pa

from wattune.arrays import Floats
from wattune.metrics import METRICS
from wattune.view.table import Column

TYPES: Final = {
    "text": pa.string(),
    "count": pa.int32(),
    "size": pa.int64(),
    "number": pa.float64(),
    "flag": pa.bool_(),
    "layout": pa.list_(pa.int32()),
}


def schema_of(columns: Sequence[Column], metadata: Mapping[str, str] | None = None) -> pa.Schema:
    """Returns the fields of columns; that of a metric has its unit, and which way is better, in its metadata."""

    def field(column: Column) -> pa.Field:
        metric = METRICS.get(column.quantity)
        about = None if metric is None else {"unit": metric.unit or "", "better": metric.better}
        return pa.field(column.name, TYPES[column.kind or ("number" if column.quantity else "text")], metadata=about)

    return pa.schema(map(field, columns), dict(metadata or {}) or None)


def arrow(columns: Sequence[Column], rows: Sequence[Any], metadata: Mapping[str, str] | None = None) -> pa.Table:
    """Reads every column of every row, column by column."""
    schema = schema_of(columns, metadata)
    each = (one.every(rows) if one.every else [one.of(row) for row in rows] for one in columns)
    return pa.Table.from_arrays(
        [_array(own, field.type) for own, field in zip(each, schema, strict=True)], schema=schema
    )


def _array(values: Sequence[Any] | Floats, kind: pa.DataType) -> pa.Array:
    """Makes an array; what is NaN among `Floats` is null. Arrow's own way loads pandas, which takes 0.2 s."""
    if pa.types.is_string(kind):
        (texts := pa.lib.StringBuilder()).append_values(values)
        return texts.finish()
    if pa.types.is_list(kind):
        ends = np.cumsum([0, *map(len, values)])
        return pa.ListArray.from_arrays(_array(ends, pa.int32()), _array([*chain(*values)], kind.value_type))
    figures = isinstance(values, np.ndarray)
    known = ~np.isnan(values) if figures else np.array([one is not None for one in values], np.bool_)
    plain = np.array(values if figures else [0 if one is None else one for one in values], np.dtype(str(kind)))
    data = np.packbits(plain, bitorder="little") if pa.types.is_boolean(kind) else plain
    valid = None if known.all() else pa.py_buffer(np.packbits(known, bitorder="little"))
    return pa.Array.from_buffers(kind, len(plain), [valid, pa.py_buffer(data)])


def csv_text(table: pa.Table, more: Sequence[Mapping[str, Any]] = ()) -> str:
    """Returns a table as CSV, with some more lines; a cell is empty where the table is null."""
    written = io.StringIO()
    lines = csv.writer(written, lineterminator="\n")
    lines.writerow(table.column_names)
    columns = [column.to_pylist() for column in table.columns]
    lines.writerows([flat(value) for value in row] for row in zip(*columns, strict=True))
    lines.writerows([row.get(name, "") for name in table.column_names] for row in more)
    return written.getvalue()


def plain_data(table: pa.Table) -> dict[str, Any]:
    """Returns a table as plain data: its columns with type and unit, and its rows."""
    columns = [
        {"name": field.name, "type": str(field.type), "unit": (field.metadata or {}).get(b"unit", b"").decode() or None}
        for field in table.schema
    ]
    return {"columns": columns, "rows": table.to_pylist()}


def flat(value: Any) -> Any:
    """Returns a value as one cell: empty for null, a list joined by `-`."""
    if value is None:
        return ""
    return "-".join(map(str, value)) if isinstance(value, tuple | list) else value

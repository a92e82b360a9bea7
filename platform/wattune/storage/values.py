"""Values that cannot be are refused where files become tables, by the bounds of `wattune.schema`."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from wattune.errors import ImpossibleValueError
from wattune.schema import BOUNDS, KERNELS, MOST_SPAN_NS, SPANS, TELEMETRY, Bound
from wattune.units import NS_PER_S

DeviceFacts = Mapping[tuple[str, str], Mapping[str, Any]]
"""Facts of devices by node and device, from the manifests."""


_NEEDED: Final = ("node", "device", "mono_ns", "wall_ns")
_NEEDED_OF_SPANS: Final = ("node", "device", "rank", "step", "phase", "start_mono_ns", "end_mono_ns", "start_wall_ns")


def require_possible(table: pa.Table, where: str, facts: Mapping[str, Any] | None = None) -> None:
    """Makes sure that every value of a table is one that can be.

    The rows are of one device in the order they were written, or have none, such as spans. A device's facts bound some
    columns more closely. Raises `ImpossibleValueError`: a value is beyond its bound, a counter rises faster than it
    can, or time runs back.
    """
    for name in table.column_names:
        bound = BOUNDS.get(name)
        if bound is not None and table.num_rows and _is_number(table.schema.field(name).type):
            most = bound.most if bound.rise_per_s is not None else _most(bound, bound.most, facts)
            _require_within(table[name], bound.least, most, f"{where}: {name}")
    if "mono_ns" in table.column_names and table.num_rows > 1:
        kind = table.schema.field("mono_ns").type
        if not (_is_number(kind) or pa.types.is_null(kind)):
            raise ImpossibleValueError(f"{where}: mono_ns is {kind}, allowed: whole numbers")
        _require_rates(table, where, facts)


def require_possible_rows(table: pa.Table, where: str, facts: DeviceFacts) -> None:
    """Makes sure of the values of a whole telemetry table, a device at a time. See `require_possible`."""
    if not {"node", "device"} <= set(table.column_names):
        require_possible(table, where)
        return
    keys = table.select(["node", "device"]).group_by(["node", "device"]).aggregate([]).to_pylist()
    for key in keys:
        pair = str(key["node"]), str(key["device"])
        if len(keys) == 1:
            own = table
        else:
            same = [pc.equal(table[name].cast(pa.string()), key[name]) for name in ("node", "device")]
            own = table.filter(pc.fill_null(pc.and_(*same), False))
        require_possible(own, f"{where}: {pair[1]}", facts.get(pair))


def _require_within(column: pa.ChunkedArray, least: float, most: float, where: str) -> None:
    ends = pc.min_max(column)
    for value in (ends["min"].as_py(), ends["max"].as_py()):
        # Not-a-number is a failed read of some tools, and infinity never reaches a metric.
        if value is not None and not least <= value <= most and np.isfinite(value):
            raise ImpossibleValueError(f"{where}: got {value:.6g}, allowed: {least:.6g} to {most:.6g}")


def _require_rates(table: pa.Table, where: str, facts: Mapping[str, Any] | None) -> None:
    """Makes sure that time does not run back, and that no counter rises faster than it can."""
    time_ns = table["mono_ns"].drop_null().to_numpy().astype(np.int64, copy=False)
    if len(time_ns) < 2:
        return
    if np.any(time_ns[1:] < time_ns[:-1]):
        raise ImpossibleValueError(f"{where}: mono_ns runs back")
    if int(time_ns[-1]) - int(time_ns[0]) > MOST_SPAN_NS:
        raise ImpossibleValueError(f"{where}: mono_ns: rows of {(time_ns[-1] - time_ns[0]) / NS_PER_S:.3g} s")
    for name in table.column_names:
        bound = BOUNDS.get(name)
        if bound is None or bound.rise_per_s is None or not _is_number(table.schema.field(name).type):
            continue
        valid = pc.and_(pc.is_valid(table[name]), pc.is_valid(table["mono_ns"])).to_numpy()
        if valid.sum() < 2:
            continue
        rows = table.select(["mono_ns", name]).filter(pa.array(valid))
        at_s: NDArray[np.float64] = rows["mono_ns"].to_numpy() / NS_PER_S
        rise = np.diff(rows[name].to_numpy().astype(np.float64))
        per_s = _most(bound, bound.rise_per_s, facts)
        beyond = np.flatnonzero(rise > per_s * np.diff(at_s) + bound.slack)
        if len(beyond):
            worst = int(beyond[0])
            took_s = at_s[worst + 1] - at_s[worst]
            raise ImpossibleValueError(
                f"{where}: {name}: rose by {rise[worst]:.6g} in {took_s:.6g} s, allowed: {per_s:.6g} a second"
            )


def _most(bound: Bound, otherwise: float, facts: Mapping[str, Any] | None) -> float:
    """Returns the most of a column: by the device's own fact where that is known, else by the schema."""
    known: Any = facts
    for part in bound.fact.split(".") if bound.fact else ():
        known = known.get(part) if isinstance(known, Mapping) else None
    if not bound.fact or not isinstance(known, int | float) or isinstance(known, bool) or not 0 < known < np.inf:
        return otherwise
    return min(otherwise, bound.times * known)


def _is_number(kind: pa.DataType) -> bool:
    # Arrow computes nothing of half precision, and 600 W in it are within 0.5 W.
    return bool(pa.types.is_integer(kind) or (pa.types.is_floating(kind) and not pa.types.is_float16(kind)))


def require_schema(schema: pa.Schema, where: str) -> None:
    """Makes sure that columns can be told apart by their names.

    Raises `ImpossibleValueError`: two columns have one name.
    """
    if len(set(schema.names)) < len(schema.names):
        raise ImpossibleValueError(f"{where}: two columns have one name")


def wrong_columns(schema: pa.Schema, name: str) -> list[str]:
    """Lists columns that a table lacks or that are of another type than in the schema of that `name`.

    The name is a key of `wattune.schema.TELEMETRY`, `spans` or `kernels`.
    """
    expected = {"spans": SPANS, "kernels": KERNELS}.get(name) or TELEMETRY[name]
    needed = {"spans": _NEEDED_OF_SPANS, "kernels": tuple(KERNELS.names), "ring": (*_NEEDED, "sensor_ns")}.get(
        name, _NEEDED
    )
    wrong = [f"{name} has no {column}" for column in needed if column not in schema.names]
    wrong += [
        f"{name}.{field.name} is {schema.field(field.name).type}"
        for field in expected
        if field.name in schema.names and not _alike(schema.field(field.name).type, field)
    ]
    return wrong


def _alike(found: pa.DataType, expected: pa.Field) -> bool:
    """Returns true if a column has the expected kind: name, whole number or number. A column of nulls always has."""
    if pa.types.is_null(found):
        return True
    if pa.types.is_dictionary(expected.type):
        values = found.value_type if pa.types.is_dictionary(found) else found
        return bool(pa.types.is_string(values) or pa.types.is_large_string(values))
    # Some tools turn whole numbers with gaps into floats. Floats would lose the last digits of times, keys and bits.
    exact = pa.types.is_integer(expected.type) and (expected.metadata or {}).get(b"kind") in (b"time", b"bits", b"key")
    return bool(pa.types.is_integer(found) or (_is_number(found) and not exact))

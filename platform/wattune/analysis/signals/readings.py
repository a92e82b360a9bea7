"""Readings of one tier, a device at a time, so that a day of eight GPUs is never in memory at once.

A tier is a table, or a `TierSource` that reads a device's columns on demand. The most recent readings are cached up to
`CACHE_BYTES`: a recording of an hour or two is read once, a longer one again for each use.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wattune.analysis.signals.series import Series, series
from wattune.arrays import Floats, Ints
from wattune.schema import TELEMETRY, THROTTLE_REASON_BITS, DeviceKey
from wattune.storage.parquet import TableSource
from wattune.units import NS_PER_S, s_to_ns

HOST: Final = "host"
"""Name of the device in host tables; it is not a device of a trial."""

DEVICE_TIERS: Final = ("ring", "fast", "counter", "slow")

CACHE_BYTES: Final = 128 * 2**20
"""Most bytes of readings that are cached. An hour of eight GPUs takes some 60 MB."""

_LARGE_SHARE: Final = 8
"""Smallest number of entries that must fit the cache: a larger entry is not cached but read again."""

AHEAD_NS: Final = s_to_ns(0.1)
"""A sample stamped this much after its reading has a wrong time and is left out."""

_KEYS: Final = ("node", "device", "mono_ns", "wall_ns", "sensor_ns")
_TIME: Final = "time_s"


@runtime_checkable
class TierSource(Protocol):
    """One tier of one or several nodes that can be read a device at a time."""

    @property
    def schema(self) -> pa.Schema:
        """Schema of every table it reads, with the table's metadata."""

    @property
    def devices(self) -> Sequence[DeviceKey]:
        """Every device that has rows."""

    def parts(self, device: DeviceKey, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yields some columns of a device's rows, in the order they were written, some rows at a time."""


Tables: TypeAlias = Mapping[str, "pa.Table | TierSource"]
"""Telemetry by tier."""


def all_known(values: Sequence[float | None]) -> list[float]:
    """Returns values if all are known, else none: a mean or a peak of some would be another figure."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def as_source(tier: "pa.Table | TierSource") -> TierSource:
    """Returns a tier as a source that is read a device at a time."""
    return TableSource(tier) if isinstance(tier, pa.Table) else tier


class Readings:
    """One tier's readings of one device: equally long columns, nulls as NaN."""

    def __init__(self, time_s: Floats, columns: Mapping[str, Floats]) -> None:
        self.time_s, self.columns = time_s, columns

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return int(self.time_s.nbytes + sum(column.nbytes for column in self.columns.values()))

    def series(self, name: str) -> Series | None:
        """Returns one column as a series, None if it was not read at least twice."""
        return series(self.time_s, self.columns[name]) if name in self.columns else None

    def within(self, name: str, end_s: float) -> Series | None:
        """Returns one column as a series from 0 to a time; None if it was not read twice about there."""
        whole = self.series(name)
        return None if whole is None else whole.clip(0.0, end_s)

    def complete(self, *names: str) -> "Readings | None":
        """Returns some columns at the times all of them were read, ordered and unique; None if a column is missing."""
        if any(name not in self.columns for name in names):
            return None
        chosen = {name: self.columns[name] for name in names}
        good = np.isfinite(self.time_s)
        for column in chosen.values():
            good &= np.isfinite(column)
        if good.all() and not np.any(self.time_s[1:] <= self.time_s[:-1]):
            return Readings(self.time_s, chosen)
        rows = np.flatnonzero(good)
        time_s = self.time_s[rows]
        # Only among rows that count: a comparison with NaN says nothing of the order.
        if np.any(time_s[1:] <= time_s[:-1]):
            rows = rows[np.unique(time_s, return_index=True)[1]]
        return Readings(self.time_s[rows], {name: column[rows] for name, column in chosen.items()})

    def inside(self, name: str, start_s: float, end_s: float) -> tuple[Floats, Floats]:
        """Returns times and finite values of one column read between two times, ordered by time."""
        if name not in self.columns:
            return np.empty(0), np.empty(0)
        value = self.columns[name]
        rows = np.flatnonzero((self.time_s >= start_s) & (self.time_s <= end_s) & np.isfinite(value))
        if np.any(np.diff(self.time_s[rows]) < 0):
            rows = rows[np.argsort(self.time_s[rows], kind="stable")]
        return self.time_s[rows], value[rows]


class Sized(Protocol):
    """Something with a known size in memory."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""


Cached = TypeVar("Cached", bound=Sized)


class ReadingsCache:
    """A least-recently-used cache of readings and of series made from them; shared by all tiers of a trial."""

    def __init__(self, most_bytes: int = CACHE_BYTES) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._entries: OrderedDict[Hashable, Sized] = OrderedDict()

    def get(self, key: Hashable, kind: type[Cached], make: Callable[[], Cached]) -> Cached:
        """Returns the entry of a key, or makes it. An entry too large for the cache is made each time."""
        entry = self._entries.get(key)
        if isinstance(entry, kind):
            self._entries.move_to_end(key)
            return entry
        made = make()
        if made.num_bytes > self._most_bytes // _LARGE_SHARE:
            return made  # it would push out all others, and be pushed out itself before its next use
        self._entries[key] = made
        self._bytes += made.num_bytes
        while self._bytes > self._most_bytes and len(self._entries) > 1:
            self._bytes -= self._entries.popitem(last=False)[1].num_bytes
        return made


class Tier(Mapping[DeviceKey, Readings]):
    """One tier on the common axis: a device's readings are read at their lookup."""

    def __init__(
        self, name: str, source: TierSource, anchors_ns: Mapping[str, int], origin_ns: int, cache: ReadingsCache
    ) -> None:
        """Reads nothing yet.

        `anchors_ns` shift monotonic readings to common time, by node; `origin_ns` is time 0 in it.
        """
        self._name, self._source, self._cache = name, source, cache
        self._anchors_ns, self._origin_ns = anchors_ns, origin_ns
        self._devices = dict.fromkeys(source.devices)
        known = TELEMETRY[name].names if name in TELEMETRY else source.schema.names
        self._columns = [each for each in source.schema.names if each in known]

    def __getitem__(self, device: DeviceKey) -> Readings:
        if device not in self._devices:
            raise KeyError(device)
        if self._name == "ring":
            return self._read(device)  # the series of power made from its only column is cached instead
        return self._cache.get((self._name, device), Readings, lambda: self._read(device))

    def __contains__(self, device: object) -> bool:
        return device in self._devices

    def __iter__(self) -> Iterator[DeviceKey]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    def _read(self, device: DeviceKey) -> Readings:
        shift_ns = self._anchors_ns.get(device[0], 0) - self._origin_ns
        wanted = [name for name in self._columns if name not in ("node", "device")]
        # Only a part's float columns are held: its table is released before the next one is read.
        parts = [_columns_of(part, shift_ns) for part in self._source.parts(device, wanted)]
        if not parts:
            return Readings(np.empty(0), {})
        if len(parts) == 1:
            whole = parts[0]
        else:
            whole = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
        return Readings(whole.pop(_TIME), whole)


def _columns_of(table: pa.Table, shift_ns: int) -> dict[str, Floats]:
    """Returns a device's rows as floats, nulls as NaN; `_TIME` in seconds after a shift of the monotonic clock."""
    table = with_values(table, [name for name in _KEYS if name in table.column_names])
    rows: Ints | slice | None = None
    # Integers until the origin is subtracted: a float holds nanoseconds of a window, not those since 1970.
    if "sensor_ns" in table.column_names:
        time_ns, rows = _sensor_time(table)
        time_ns += shift_ns
    else:
        time_ns = integers(table, "mono_ns") + shift_ns
    columns = {_TIME: time_ns / NS_PER_S, **_value_columns(table)}
    return columns if rows is None else {name: column[rows] for name, column in columns.items()}


def _sensor_time(table: pa.Table) -> tuple[Ints, Ints | slice | None]:
    """Returns the driver's time of each sample of a device's ring, on the monotonic clock, and the rows that count.

    The driver stamps samples with wall time. The row's own pair of clock readings, taken as the ring was drained, gives
    the monotonic time of a stamp. Two drains may return the same sample: it counts once.

    Beside the times stand the rows that count, None if all do.
    """
    sensor_ns = integers(table, "sensor_ns")
    ahead_ns = sensor_ns - integers(table, "wall_ns")
    rows: Ints | slice | None = None
    if len(ahead_ns) and ahead_ns.max() > AHEAD_NS:
        ahead = ahead_ns > AHEAD_NS
        until = int(ahead.argmax())
        rows = slice(until) if ahead[until:].all() else np.flatnonzero(~ahead)
    counted_ns = sensor_ns if rows is None else sensor_ns[rows]
    if np.any(counted_ns[1:] <= counted_ns[:-1]):
        first = np.unique(counted_ns, return_index=True)[1]
        rows = first if rows is None else np.arange(len(sensor_ns))[rows][first]
    ahead_ns += integers(table, "mono_ns")
    return ahead_ns, rows


def _value_columns(table: pa.Table) -> dict[str, Floats]:
    """Returns all columns except keys and times as floats, nulls as NaN; reason bits become a 0 or 1 column a cause."""
    columns = {
        name: _floats(table[name]) for name in table.column_names if name not in _KEYS and name != "event_reasons"
    }
    if "event_reasons" in table.column_names:
        reasons = table["event_reasons"]
        bits = reasons.cast(pa.uint64()).fill_null(0).to_numpy()
        unknown = ~reasons.is_valid().to_numpy() if reasons.null_count else None
        for cause, mask in THROTTLE_REASON_BITS.items():
            active: Floats = ((bits & np.uint64(mask)) != 0).astype(np.float64)
            if unknown is not None:
                active[unknown] = np.nan
            columns[cause_column(cause)] = active
    return columns


def cause_column(cause: str) -> str:
    """Names the column of `fast` readings that is 1 while a cause of `THROTTLE_REASON_BITS` is active."""
    return f"{cause}_cause"


def with_values(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Returns the rows without nulls in some columns; other rows have no known place or time."""
    for name in columns:
        if table[name].null_count:
            table = table.filter(pc.is_valid(table[name]))
    return table


def integers(table: pa.Table, name: str) -> Ints:
    """Returns an integer column without nulls as an array."""
    values: Ints = table[name].to_numpy().astype(np.int64, copy=False)
    return values


def _floats(column: pa.ChunkedArray) -> Floats:
    """Returns a numeric column as floats, nulls as NaN."""
    values: Floats = column.cast(pa.float64(), safe=False).to_numpy().astype(np.float64, copy=False)
    return values

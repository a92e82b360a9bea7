"""Alignment: what every node wrote, on one time axis in seconds from the start of the measured window.

Within a node everything is joined on the monotonic clock. Between nodes a monotonic reading becomes *common time*, the
reference node's wall clock: one number per node is added to it, the median of wall minus monotonic in the node's own
tables less the `clock_offset_ns` of its manifest (this node's wall clock minus the reference's). One number, so that
jitter between the two clock reads never moves readings of one node against each other.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wattune.schema import THROTTLE_REASON_BITS
from wattune.units import NS_PER_S

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Device: TypeAlias = tuple[str, str]
"""Node and device, by the names tables use."""

HOST: Final = "host"
"""What host tables call their device; it is no device of a trial."""

DEVICE_TIERS: Final = ("ring", "fast", "counter", "slow")
_KEYS: Final = frozenset({"node", "device", "mono_ns", "wall_ns", "sensor_ns"})
_MARK_KEYS: Final = ("node", "device", "rank", "step", "phase", "start_mono_ns", "end_mono_ns", "start_wall_ns")
_ANCHOR_TIERS: Final = ("slow", HOST, "counter", "fast", "ring")


@dataclass(frozen=True, slots=True)
class Series:
    """A signal of one device: finite values at strictly increasing times, linear in between."""

    time_s: Floats
    value: Floats

    @property
    def span_s(self) -> float:
        """Seconds from the first to the last sample."""
        return float(self.time_s[-1] - self.time_s[0])

    def integral(self) -> float:
        """Trapezoid over the time stamps, in the value's unit times seconds."""
        return float(np.trapezoid(self.value, self.time_s))

    def mean(self) -> float:
        """Time-weighted mean over the span."""
        return self.integral() / self.span_s

    def cumulative(self, times_s: Floats) -> Floats:
        """The integral from the first sample to each of some times inside the span, exact between samples too."""
        width = np.diff(self.time_s)
        slope = np.diff(self.value) / width
        whole = np.concatenate([[0.0], np.cumsum(width * (self.value[1:] + self.value[:-1]) / 2)])
        index = np.clip(np.searchsorted(self.time_s, times_s, side="right") - 1, 0, len(width) - 1)
        part = times_s - self.time_s[index]
        result: Floats = whole[index] + part * (self.value[index] + part * slope[index] / 2)
        return result

    def clip(self, start_s: float, end_s: float) -> "Series | None":
        """The part between two times, its ends interpolated, never extrapolated; None where nothing is left."""
        start_s, end_s = max(start_s, float(self.time_s[0])), min(end_s, float(self.time_s[-1]))
        if end_s <= start_s:
            return None
        inside = slice(*np.searchsorted(self.time_s, [start_s, end_s], side="right"))
        time_s = np.concatenate([[start_s], self.time_s[inside], [end_s]])
        value = np.concatenate(
            [
                [np.interp(start_s, self.time_s, self.value)],
                self.value[inside],
                [np.interp(end_s, self.time_s, self.value)],
            ]
        )
        return series(time_s, value)


def series(time_s: Floats, value: Floats) -> Series | None:
    """A series of readings in any order; values that are not finite and repeated times are dropped.

    Returns:
        The series, None where fewer than two readings are left.
    """
    good = np.isfinite(time_s) & np.isfinite(value)
    time_s, value = time_s[good], value[good]
    if np.any(np.diff(time_s) <= 0):
        time_s, first = np.unique(time_s, return_index=True)
        value = value[first]
    return Series(time_s, value) if len(time_s) >= 2 else None


@dataclass(frozen=True, slots=True)
class Readings:
    """One tier's readings of one device: equally long columns, nulls as NaN."""

    time_s: Floats
    columns: Mapping[str, Floats]

    def series(self, name: str) -> Series | None:
        """One column as a series, None where it was not read at least twice."""
        return series(self.time_s, self.columns[name]) if name in self.columns else None

    def inside(self, name: str, start_s: float, end_s: float) -> tuple[Floats, Floats]:
        """Times and finite values of one column read between two times, ordered by time."""
        if name not in self.columns:
            return np.empty(0), np.empty(0)
        value = self.columns[name]
        rows = np.flatnonzero((self.time_s >= start_s) & (self.time_s <= end_s) & np.isfinite(value))
        rows = rows[np.argsort(self.time_s[rows], kind="stable")]
        return self.time_s[rows], value[rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The measured steps that every rank has finished, in common time."""

    number: Ints
    """Step numbers, shape (steps,)."""
    rank: Ints
    """Global ranks, shape (ranks,)."""
    device: tuple[Device, ...]
    """What each rank drove, in the order of `rank`."""
    start_ns: Ints
    """Shape (steps, ranks)."""
    end_ns: Ints
    """Shape (steps, ranks)."""
    anchor_ns: Ints
    """What turns each rank's monotonic times into common time, shape (ranks,)."""

    def duration_s(self) -> Floats:
        """How long each rank took for each step, shape (steps, ranks)."""
        result: Floats = (self.end_ns - self.start_ns) / NS_PER_S
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """A trial or recording on one time axis: 0 is the window's start."""

    start_ns: int
    """The window's start in common time."""
    duration_s: float
    """The window's length."""
    steps: Steps | None
    """None for a recording without marks."""
    devices: tuple[Device, ...]
    """Whose readings count: the devices the marks name, else all that were recorded or announced."""
    tiers: Mapping[str, Mapping[Device, Readings]]
    known: Mapping[Device, Mapping[str, Any]]
    """What the manifests say of each device; empty where they do not."""

    def readings(self, tier: str) -> list[Readings] | None:
        """A tier's readings of every device in order, None unless every device has some: a partial sum is wrong."""
        found = self.tiers.get(tier, {})
        if not self.devices or any(device not in found for device in self.devices):
            return None
        return [found[device] for device in self.devices]

    @property
    def missing(self) -> list[Device]:
        """Devices that should have telemetry and have none in any tier."""
        return [device for device in self.devices if not any(device in self.tiers.get(t, {}) for t in DEVICE_TIERS)]


def align(
    tables: Mapping[str, pa.Table],
    marks: pa.Table | None,
    manifests: Mapping[str, Mapping[str, Any]],
    *,
    measured_steps: Sequence[int] | None = None,
    window: tuple[int, int] | None = None,
) -> Aligned | None:
    """Puts telemetry and marks on one axis and finds the window and the devices that count.

    The window runs from the earliest start to the latest end of the measured steps over all ranks; without marks it is
    the one given.

    Args:
        tables: Telemetry by tier, all nodes together (`wattune.schema.TELEMETRY`).
        marks: Marks of all ranks (`wattune.schema.MARKS`), None where there are none.
        manifests: What each node's sampler knew, by node.
        measured_steps: The steps to count; None counts every step from 0 on, as warm-up steps are negative.
        window: Start and end of a recorded command in common time (the reference node's wall clock), nanoseconds.

    Returns:
        The aligned data, None where neither marks nor `window` give a window of positive length.
    """
    tables = {tier: _usable(table, _KEYS) for tier, table in tables.items()}
    marks = None if marks is None else _usable(marks, _MARK_KEYS)
    anchors_ns = clock_anchors_ns(tables, marks, manifests)
    steps = None if marks is None else find_steps(marks, anchors_ns, measured_steps)
    if steps is not None:
        window = int(steps.start_ns.min()), int(steps.end_ns.max())
    if window is None or window[1] <= window[0]:
        return None
    tiers = {tier: _by_device(_with_sensor_time(table), anchors_ns, window[0]) for tier, table in tables.items()}
    known = {
        (node, name): facts
        for node, manifest in manifests.items()
        for name, facts in manifest.get("devices", {}).items()
        if name != HOST
    }
    recorded = {device for tier in DEVICE_TIERS for device in tiers.get(tier, {})}
    devices = set(steps.device) if steps is not None else recorded | known.keys()
    return Aligned(
        start_ns=window[0],
        duration_s=(window[1] - window[0]) / NS_PER_S,
        steps=steps,
        devices=tuple(sorted(devices)),
        tiers=tiers,
        known=known,
    )


def clock_anchors_ns(
    tables: Mapping[str, pa.Table], marks: pa.Table | None, manifests: Mapping[str, Mapping[str, Any]]
) -> dict[str, int]:
    """What turns a node's monotonic readings into common time by addition, for every node that wrote a row."""
    sources = [(tables[tier], "mono_ns", "wall_ns") for tier in _ANCHOR_TIERS if tier in tables]
    if marks is not None:
        sources.append((marks, "start_mono_ns", "start_wall_ns"))
    anchors_ns: dict[str, int] = {}
    for table, mono, wall in sources:
        code, names = codes(table, "node")
        difference = integers(table, wall) - integers(table, mono)
        for index, node in enumerate(names):
            ordered = np.sort(difference[code == index])
            if node not in anchors_ns and len(ordered):
                # Not np.median: nanoseconds since 1970 do not fit a float exactly.
                anchors_ns[node] = int(ordered[len(ordered) // 2]) - int(
                    manifests.get(node, {}).get("clock_offset_ns") or 0
                )
    return anchors_ns


def find_steps(marks: pa.Table, anchors_ns: Mapping[str, int], measured: Sequence[int] | None) -> Steps | None:
    """The measured steps that every rank has marked; None where there is none.

    Args:
        marks: Marks of all ranks.
        anchors_ns: Per node, from `clock_anchors_ns`.
        measured: The steps to count, None for all from 0 on.
    """
    phase, phase_names = codes(marks, "phase")
    step = integers(marks, "step")
    wanted = step >= 0 if measured is None else np.isin(step, np.array(measured, np.int64))
    rows = marks.filter(pa.array(wanted & np.array([name == "step" for name in phase_names], bool)[phase]))
    if not rows.num_rows:
        return None
    rank, rank_index = np.unique(integers(rows, "rank"), return_inverse=True)
    number, step_index = np.unique(integers(rows, "step"), return_inverse=True)
    node, node_names = codes(rows, "node")
    device, device_names = codes(rows, "device")
    anchor_ns = np.array([anchors_ns[name] for name in node_names], np.int64)[node]
    start_ns, end_ns = (np.full((len(number), len(rank)), -1, np.int64) for _ in range(2))
    start_ns[step_index, rank_index] = integers(rows, "start_mono_ns") + anchor_ns
    end_ns[step_index, rank_index] = integers(rows, "end_mono_ns") + anchor_ns
    whole = np.all((start_ns >= 0) & (end_ns > start_ns), axis=1)
    if not whole.any():
        return None
    first = np.unique(rank_index, return_index=True)[1]
    return Steps(
        number=number[whole],
        rank=rank,
        device=tuple((node_names[node[row]], device_names[device[row]]) for row in first),
        start_ns=start_ns[whole],
        end_ns=end_ns[whole],
        anchor_ns=anchor_ns[first],
    )


def _with_sensor_time(table: pa.Table) -> pa.Table:
    """A ring table with each sample at the time the driver took it, on the monotonic clock, each sample once.

    The driver stamps samples with wall time; the row's own pair of clock readings, made when the ring was drained,
    tells what the monotonic clock said then. Two drains may hand out one sample twice.
    """
    if "sensor_ns" not in table.column_names:
        return table
    node, device = (codes(table, name)[0] for name in ("node", "device"))
    sensor_ns = integers(table, "sensor_ns")
    order = np.lexsort((sensor_ns, device, node))
    same = [np.diff(values[order]) == 0 for values in (sensor_ns, device, node)]
    repeated = np.concatenate([[False], same[0] & same[1] & same[2]]) if len(order) else np.empty(0, bool)
    mono_ns = sensor_ns - (integers(table, "wall_ns") - integers(table, "mono_ns"))
    index = table.column_names.index("mono_ns")
    return table.set_column(index, "mono_ns", pa.array(mono_ns)).take(order[~repeated])


def _by_device(table: pa.Table, anchors_ns: Mapping[str, int], origin_ns: int) -> dict[Device, Readings]:
    """A tier's table split by device, times in seconds from the origin."""
    node, node_names = codes(table, "node")
    device, device_names = codes(table, "device")
    key = node * max(len(device_names), 1) + device
    # Times stay integers until the origin is taken off: a float holds nanoseconds of a window, not those since 1970.
    shift_ns = np.array([anchors_ns.get(name, 0) - origin_ns for name in node_names], np.int64)
    time_s = (integers(table, "mono_ns") + shift_ns[node]) / NS_PER_S
    columns = _value_columns(table)
    order = np.argsort(key.astype(np.int16) if key.max(initial=0) < 2**15 else key, kind="stable")
    bounds = np.searchsorted(key[order], np.arange(len(node_names) * len(device_names) + 1))
    split = {}
    for index, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            rows = order[start:end]
            where = node_names[index // len(device_names)], device_names[index % len(device_names)]
            split[where] = Readings(time_s[rows], {name: column[rows] for name, column in columns.items()})
    return split


def _value_columns(table: pa.Table) -> dict[str, Floats]:
    """Every column but keys and times as floats, nulls as NaN; reason bits become one 0 or 1 column per cause."""
    columns = {
        name: _floats(table[name])
        for name in table.column_names
        if name not in _KEYS and name != "event_reasons" and not name.endswith("_error")
    }
    if "event_reasons" in table.column_names:
        for cause, bits in THROTTLE_REASON_BITS.items():
            active = pc.not_equal(
                pc.bit_wise_and(table["event_reasons"].cast(pa.uint64()), pa.scalar(bits, pa.uint64())), 0
            )
            columns[cause_column(cause)] = _floats(active)
    return columns


def cause_column(cause: str) -> str:
    """The column of `fast` readings that is 1 while a cause of `wattune.schema.THROTTLE_REASON_BITS` is active."""
    return f"{cause}_cause"


def _usable(table: pa.Table, keys: Collection[str]) -> pa.Table:
    """The rows whose keys and times are all there; others cannot be placed."""
    for name in keys:
        if name in table.column_names and table[name].null_count:
            table = table.filter(pc.is_valid(table[name]))
    return table


def codes(table: pa.Table, name: str) -> tuple[Ints, list[str]]:
    """A text column as indices into its distinct values."""
    column = table[name]
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    whole = column.unify_dictionaries().combine_chunks()
    return whole.indices.to_numpy(zero_copy_only=False).astype(np.int64), whole.dictionary.to_pylist()


def integers(table: pa.Table, name: str) -> Ints:
    """An integer column without nulls."""
    values: Ints = table[name].to_numpy().astype(np.int64, copy=False)
    return values


def _floats(column: pa.ChunkedArray) -> Floats:
    """A numeric or boolean column, nulls as NaN."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    values: Floats = column.cast(pa.float64(), safe=False).to_numpy().astype(np.float64, copy=False)
    return values

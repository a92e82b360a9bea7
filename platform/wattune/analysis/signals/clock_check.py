"""Checks of stamps before any figure: whether they are nanoseconds, and whether both clocks run alike."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

import numpy as np
import pyarrow as pa

from wattune.analysis.signals.readings import Tables, as_source, integers, with_values
from wattune.arrays import Ints
from wattune.units import NS_PER_S, ns_to_s

NOT_NANOSECONDS: Final = "times_not_nanoseconds"
"""Times are of another unit than their names say."""

CLOCKS_DISAGREE: Final = "clocks_disagree"
"""The two clocks of a table do not run at one pace, so one of them is no clock."""

_UNITS: Final = {"microseconds": 10**3, "milliseconds": 10**6, "seconds": 10**9}
_DATES_NS: Final = (946_684_800 * NS_PER_S, 4_102_444_800 * NS_PER_S)
"""2000 to 2100: a wall clock tells nothing else."""
_ROWS: Final = 2**12
_FEWEST_ROWS: Final = 20
_DENSE_NS: Final = 100_000
"""Nobody polls a power sensor more often than every 100 us; the finest history of a driver has 20 ms."""
_SHORT_NS: Final = NS_PER_S
"""A log of many rows takes longer."""
_CLOSE_NS: Final = 10_000_000
"""Distance of rows from which on a wall clock without a date may be the time since the machine started."""
_AROUND: Final = 5
"""Rows before and after a jump of a clock whose medians are compared."""
_PACE_FRAC: Final = 0.02
"""Most that the paces of two clocks differ by: no clock drifts by more than 0.05 %, the rest is rounding of stamps."""


def clock_problems(tables: Tables, spans: pa.Table | None) -> dict[str, str]:
    """Describes stamps that cannot be what their names say, by `NOT_NANOSECONDS` or `CLOCKS_DISAGREE`.

    Looks at the first rows of each device. Without a date on the wall clock, which a tool with one clock has, the
    distance of rows decides.
    """
    wrong: dict[str, str] = {}
    for place, mono_ns, wall_ns in _clocks(tables, spans):
        text = _unit(mono_ns, wall_ns, dense=place != "spans")
        if text:
            wrong.setdefault(NOT_NANOSECONDS, f"{place}: {text}")
            continue
        pace = _pace(mono_ns, wall_ns)
        if pace is not None and abs(pace - 1) > _PACE_FRAC:
            decade = round(float(np.log10(max(abs(pace), 1e-12))))
            of_unit = decade in (-9, -6, -3, 3, 6, 9) and abs(pace / 10.0**decade - 1) < _PACE_FRAC
            text = f"{place}: wall_ns runs {pace:.6g} times as fast as mono_ns"
            wrong.setdefault(NOT_NANOSECONDS if of_unit else CLOCKS_DISAGREE, text)
    return wrong


def clock_step_s(tables: Tables) -> float:
    """Returns the largest jump of any node's wall clock against its monotonic one, beyond the rounding of stamps."""
    largest_ns, seen = 0.0, set()
    for tier in ("slow", "fast", "ring"):
        if tier not in tables:
            continue
        source = as_source(tables[tier])
        for device in source.devices:
            if device[0] not in seen:
                seen.add(device[0])
                parts = pa.concat_tables(source.parts(device, ("mono_ns", "wall_ns")))
                mono_ns, wall_ns = _ordered(parts, "mono_ns", "wall_ns")
                apart_ns = wall_ns - mono_ns
                if len(apart_ns) >= 2 * _AROUND:
                    around_ns = np.lib.stride_tricks.sliding_window_view(apart_ns - apart_ns[0], _AROUND)
                    middle = np.median(around_ns, axis=1)
                    jump_ns = float(np.abs(middle[_AROUND:] - middle[:-_AROUND]).max())
                    largest_ns = max(largest_ns, jump_ns - _rounding_ns(wall_ns))
    return ns_to_s(largest_ns)


def _rounding_ns(stamps_ns: Ints) -> float:
    """Returns the decimal part of a second that all stamps are whole multiples of."""
    return max(float(10**digits) for digits in range(10) if not (stamps_ns % 10**digits).any())


def _clocks(tables: Tables, spans: pa.Table | None) -> Iterator[tuple[str, Ints, Ints]]:
    """Yields a place, and its first stamps of both clocks in the order of the monotonic one."""
    for tier, table in tables.items():
        source = as_source(table)
        for device in source.devices:
            first = next(source.parts(device, ("mono_ns", "wall_ns")), None)
            if first is not None:
                yield f"{tier} of {'/'.join(device)}", *_ordered(first.slice(0, _ROWS), "mono_ns", "wall_ns")
    if spans is not None:
        yield "spans", *_ordered(spans.slice(0, _ROWS), "start_mono_ns", "start_wall_ns")


def _ordered(table: pa.Table, mono: str, wall: str) -> tuple[Ints, Ints]:
    table = with_values(table, (mono, wall))
    order = np.argsort(integers(table, mono), kind="stable")
    return integers(table, mono)[order], integers(table, wall)[order]


def _unit(mono_ns: Ints, wall_ns: Ints, *, dense: bool) -> str:
    """Returns why times are no nanoseconds; empty if they may be."""
    if len(mono_ns) < _FEWEST_ROWS or _DATES_NS[0] <= wall_ns[0] <= _DATES_NS[1]:
        return ""
    span_ns = int(mono_ns[-1]) - int(mono_ns[0])
    apart_ns = span_ns / (len(mono_ns) - 1)
    rows = f"{len(mono_ns)} rows in {ns_to_s(span_ns):.3g} s"
    for name, per in _UNITS.items():
        if _DATES_NS[0] <= int(wall_ns[0]) * per <= _DATES_NS[1] and apart_ns < _CLOSE_NS:
            date = datetime.fromtimestamp(int(wall_ns[0]) * per // NS_PER_S, UTC).date()
            return f"{rows}; wall_ns is {date} if it is {name}: multiply times by {per:,}"
    if dense and (apart_ns < _DENSE_NS or span_ns < _SHORT_NS):
        return f"{rows}, {apart_ns:.3g} ns apart, which no sensor is read in; write times in nanoseconds"
    return ""


def _pace(mono_ns: Ints, wall_ns: Ints) -> float | None:
    """Returns how fast the wall clock runs against the monotonic one, by the median over quarters of the rows.

    A clock that is set once changes a third of them.
    """
    quarter = len(mono_ns) // 4
    if len(mono_ns) < _FEWEST_ROWS:
        return None
    took_ns = (mono_ns[quarter:] - mono_ns[:-quarter]).astype(np.float64)
    told_ns = (wall_ns[quarter:] - wall_ns[:-quarter]).astype(np.float64)
    return float(np.median(told_ns[took_ns > 0] / took_ns[took_ns > 0])) if np.any(took_ns > 0) else None

"""Tables of texts as sampled values: by node, device and column, on clocks that never run back."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wattune.arrays import Floats, Ints
from wattune.errors import PlanError
from wattune.foreign.columns import HOST_VALUES, KEYS, known_names, meaning, named, values
from wattune.foreign.times import NOT_A_TIME, monotonic_ns, wall_ns
from wattune.masking import printable
from wattune.schema import BOUNDS, TELEMETRY
from wattune.telemetry.host import HOST
from wattune.units import NS_PER_S

ValueKey: TypeAlias = tuple[str, str, str]
"""Node (empty where the log names none), device and column."""

SampledValues: TypeAlias = tuple[Ints, Ints, Floats]
"""Monotonic times, wall times and values in our units; not-a-number where nothing was read."""

Sampled: TypeAlias = dict[ValueKey, SampledValues]

_REASONS: Final = {
    "gpu_idle": 0x1, "applications_clocks_setting": 0x2, "sw_power_cap": 0x4, "hw_slowdown": 0x8, "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40, "hw_power_brake_slowdown": 0x80,
}  # fmt: skip
"""Columns of single reasons in `nvidia-smi --help-query-gpu`, and their bits in nvml.h."""


@dataclass(kw_only=True)
class ForeignLog:
    """Values of one file, and what else it tells."""

    file: str
    format: str
    sampled: Sampled = field(default_factory=dict)
    facts: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """Facts of devices: `name` and `uuid`."""
    clock_steps: list[dict[str, int]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Columns that mean nothing here."""
    notes: list[str] = field(default_factory=list)
    rows: int = 0
    digest: str = ""
    """Of its columns and content."""
    nothing: str = ""
    """The error where a recording has none of its columns; else empty."""


def sampled_of(
    table: pa.Table, file: str, format_: str, notes: list[str], zone: str | None, interval_s: float | None = None
) -> ForeignLog:
    """Reads the values of a table whose columns are known by their names.

    `interval_s` is the time between readings of a log that has no times. Raises `PlanError` where it has no time, or a
    value that cannot be.
    """
    log = ForeignLog(file=file, format=format_, notes=notes, rows=table.num_rows)
    names = table.column_names
    last = {name: name.partition("reasons.")[2].strip().partition(" ")[0] for name in names}
    said, reasons = _meanings(names, file), {name: _REASONS[word] for name, word in last.items() if word in _REASONS}
    log.left_out = [name for name in names if name.strip(" #0123456789") and name not in said and name not in reasons]
    # Where several columns say when, a whole date is preferred to seconds since some start; else the first counts.
    order = sorted(said, key=lambda name: ("stamp" in name.lower() or "host" in name.lower(), -names.index(name)))
    keys = {said[name][0]: name for name in order if said[name][0] in KEYS}
    given = [name for name, found in said.items() if found[0] not in KEYS]
    if not given and not reasons:
        listed = keys and keys.keys().isdisjoint(("time", "date"))
        what = "a list of devices without readings" if listed else f"{format_}, and a recording has none of its columns"
        log.nothing = (
            f"{file}: recognised as {what} ({', '.join(names)[:200]}); log "
            f"one of: {', '.join(known_names())}. A power that may be of anything is named gpu0_power_w or node_power_w"
        )
        return log
    bare = [name for name in given if re.fullmatch(r"gpu_?\d+", named(name)[0]) and not named(name)[1]]
    if bare:
        log.notes.append(f"{', '.join(bare)}: a device's number alone is its power in watts, as Zeus writes it")
    ns, more = _times(table, keys, said, log, zone, interval_s)
    log.notes += more
    good = np.flatnonzero(ns != NOT_A_TIME)
    if len(good) < len(ns):
        log.notes.append(f"{len(ns) - len(good)} row without a time was left out")
    read = {name: values(table[name], said[name][0], said[name][1], f"{file}: {name}") for name in given}
    if reasons:
        read["event_reasons"] = _bits(table, reasons)
        said["event_reasons"] = "event_reasons", "", None
    dated, zoned = (not any(word in one for one in more) for word in ("no date", "no zone"))
    several = Counter(said[name][0] for name in read if said[name][0] in ("node_power_w", "node_energy_j"))
    for (node, device), rows, sure in _groups(table, keys, good):
        own, steps = monotonic_ns(ns[rows], has_date=dated, has_zone=zoned, where=f"{file}: {device or HOST}")
        if not sure and any(said[name][2] is None and said[name][0] not in _HOST_COLUMNS for name in read):
            _require_one_device(own, file)
        log.clock_steps += [one for one in steps if all(_apart(one, other) for other in log.clock_steps)]
        first = {key: table[keys[key]][int(rows[0])].as_py() for key in ("name", "uuid") if key in keys}
        facts: dict[str, Any] = {key: printable(str(text).strip()) for key, text in first.items() if text}
        for name, column in read.items():
            ours, _, number = said[name]
            at = HOST if ours in _HOST_COLUMNS else f"gpu{int(number)}" if number is not None else device or "gpu0"
            where = plain_name(named(name)[0]) if several[ours] > 1 else node  # an outlet is a meter of its own
            _add(log.sampled, (where, at, ours), (own, ns[rows], column[rows]))
            if at != HOST and facts:
                log.facts.setdefault((node, at), dict(facts))
    _add_powers(log)
    for node, device, ours in [key for key in log.sampled if key[2] == "sm_clock_max_mhz"]:
        most = log.sampled.pop((node, device, ours))[2]
        if np.isfinite(most).any():
            log.facts.setdefault((node, device), {})[ours] = float(np.nanmax(most))
    return log


def _meanings(names: Sequence[str], file: str) -> dict[str, tuple[str, str, str | None]]:
    """Returns what each known column means. A power of nothing in particular is a device's, or a meter's, by words."""
    first = [meaning(name, of_devices=True) for name in names]
    device_named = any(one is not None and one[0] in ("device", "uuid") for one in first)
    said = {name: found for name in names if (found := meaning(name, of_devices=device_named)) is not None}
    if not device_named and any(_METER.search(text.lower()) for text in (file, *names)):
        for name, one in zip(names, first, strict=True):
            if name not in said and one is not None and one[0] == "power_average_w":
                said[name] = "node_power_w", one[1], None
    return said


def _times(
    table: pa.Table,
    keys: Mapping[str, str],
    said: Mapping[str, tuple[str, str, str | None]],
    log: ForeignLog,
    zone: str | None,
    interval_s: float | None,
) -> tuple[Ints, list[str]]:
    """Returns the time of each row, and notes on it; without a column of times they are counted."""
    if "time" in keys or "date" in keys:
        own = [table[keys[key]].cast(pa.string()) for key in ("date", "time") if key in keys]
        texts = own[0] if len(own) == 1 else pc.binary_join_element_wise(*own, " ")
        unit = said[keys["time"]][1] if "time" in keys else ""
        return wall_ns(texts, unit, zone, f"{log.file}: {keys.get('time') or keys['date']}")
    if interval_s is None:
        raise PlanError(
            f"{log.file}: recognised as {log.format}, and it has no column of times "
            f"({', '.join(table.column_names)[:200]}); log them too, or give --interval, the seconds between readings"
        )
    whose = [_texts(table[keys[key]]) for key in ("node", "uuid" if "uuid" in keys else "device") if key in keys]
    devices = list(zip(*whose, strict=True)) or [()] * table.num_rows
    ticks = np.cumsum([device == devices[0] for device in devices]) - 1  # the first device begins a new interval
    texts = pa.chunked_array([[repr(float(tick) * interval_s) for tick in ticks]])
    return wall_ns(texts, "s", None, log.file)


def _apart(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return abs(one["mono_ns"] - other["mono_ns"]) > 60 * NS_PER_S


def _require_one_device(times_ns: Ints, file: str) -> None:
    """Refuses readings that come several at a time: they are of several devices, and nothing says of which."""
    between = np.diff(times_ns)
    if len(between) > 3 and np.mean(between < 0.2 * np.mean(between)) > 0.3:
        raise PlanError(
            f"{file}: several readings come at a time, and no column says of which device; log an index or uuid too"
        )


def _add(sampled: Sampled, key: ValueKey, series: SampledValues) -> None:
    """Adds a column. Of two that mean the same that with more readings counts; sockets of a host are summed."""
    if key not in sampled:
        sampled[key] = series
    elif key[2].startswith(("package", "dram")):
        if not np.array_equal(sampled[key][0], series[0]):
            raise PlanError(f"{key[2]} of several sockets was not read at the same times; log their sum")
        sampled[key] = *series[:2], sampled[key][2] + series[2]
    elif np.isnan(series[2]).sum() < np.isnan(sampled[key][2]).sum():
        sampled[key] = series


def plain_name(text: str) -> str:
    """Returns a text as a name of a node, which is a folder: letters, digits, `.`, `_` and `-`."""
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in text)
    return plain.strip("._-")[:100]


def _add_powers(log: ForeignLog) -> None:
    """Adds the power that is the rise of a counter of energy, where none was read."""
    for (node, device, column), (mono_ns, wall, counter_j) in list(log.sampled.items()):
        power = _FROM_ENERGY.get(column)
        if power is None:
            continue
        if not {(node, device, power), (node, device, "power_instant_w")} & log.sampled.keys():
            times_ns, watts = mean_powers(mono_ns, counter_j)
            most_w = float(np.nanmax(watts, initial=0.0))
            if most_w > BOUNDS[power].most:
                raise PlanError(
                    f"{log.file}: {column} rises by {most_w:.3g} W; see that its unit is the one in the log"
                )
            if len(watts):
                log.sampled[node, device, power] = times_ns, times_ns + (wall[0] - mono_ns[0]), watts
                log.facts.setdefault((node, device), {})["power_from_energy_counter"] = True
        if column != "energy_j":
            del log.sampled[node, device, column]


def mean_powers(times_ns: Ints, counter_j: Floats) -> tuple[Ints, Floats]:
    """Returns the mean power between readings of a counter of energy, at their middles and at both ends.

    The trapezoid under it is the counter's rise where readings are regular. A counter that falls began anew: the
    power of that interval is not known.
    """
    read = ~np.isnan(counter_j)
    at, counter_j = times_ns[read], counter_j[read]
    new = np.concatenate([[True], np.diff(at) > 0])[: len(at)]
    at, counter_j = at[new], counter_j[new]
    if len(at) < 2:
        return np.empty(0, np.int64), np.empty(0)
    rise = np.diff(counter_j)
    watts = np.where(rise >= 0, rise / (np.diff(at) / NS_PER_S), np.nan)
    times = np.concatenate([at[:1], at[:-1] + np.diff(at) // 2, at[-1:]])
    return times, np.concatenate([watts[:1], watts, watts[-1:]])


_HOST_COLUMNS: Final = {ours for ours, _, _ in HOST_VALUES}

_METER: Final = re.compile(r"pdu|outlet|ipmi|redfish|chassis|rack|psu|meter")
"""Words of a column or a file's name by which a power that may be of anything is a meter's."""

_FROM_ENERGY: Final = {
    "energy_j": "power_average_w",
    "package_energy_j": "package_power_w",
    "dram_energy_j": "dram_power_w",
    "node_energy_j": "node_power_w",
}
"""Power by the counter whose rise it is, where the log has no power itself."""


_NUMBERED: Final = re.compile(r"(?:gpu|card|device|nvidia|amd)?[ _#:-]*(\d{1,4})", re.IGNORECASE)


def _groups(table: pa.Table, keys: Mapping[str, str], good: Ints) -> Iterator[tuple[tuple[str, str], Ints, bool]]:
    """Yields node and device, its rows, and whether it has a number or an identifier, which a name alone is not.

    A device is the same under another number where its identifier is.
    """
    texts = {key: _texts(table[keys[key]]) for key in ("node", "device", "uuid") if key in keys}
    if not texts:
        yield ("", ""), good, False
        return
    joined = list(zip(*(texts.get(key, [""] * table.num_rows) for key in ("node", "device", "uuid")), strict=True))
    names: dict[tuple[str, str], str] = {}
    rows: dict[tuple[str, str], list[int]] = {}
    surely: dict[tuple[str, str], bool] = {}
    for row in good.tolist():
        node, device, uuid = joined[row]
        identity = node, uuid or device
        if identity not in names:
            number = _NUMBERED.fullmatch(device)
            taken = {name for (other, _), name in names.items() if other == node}
            wanted = [f"gpu{int(number[1])}"] if number else []
            names[identity] = next(one for one in (*wanted, *map("gpu{}".format, range(9999))) if one not in taken)
            surely[node, names[identity]] = bool(number or uuid)
        rows.setdefault((node, names[identity]), []).append(row)
    for (node, device), each in rows.items():
        yield (plain_name(re.sub(r":\d+$", "", node)), device), np.array(each, np.int64), surely[node, device]


def _texts(column: pa.ChunkedArray) -> list[str]:
    return [text or "" for text in pc.utf8_trim_whitespace(column.cast(pa.string())).to_pylist()]


def _bits(table: pa.Table, reasons: Mapping[str, int]) -> Floats:
    """Joins columns of single reasons, `Active` or `Not Active`; not-a-number where none was read."""
    bits, read = np.zeros(table.num_rows), np.zeros(table.num_rows, bool)
    for name, bit in reasons.items():
        text = pc.utf8_lower(pc.utf8_trim_whitespace(table[name].cast(pa.string()))).fill_null("")
        active, idle = np.asarray(pc.equal(text, "active")), np.asarray(pc.equal(text, "not active"))
        bits += np.where(active, float(bit), 0.0)
        read |= active | idle
    return np.where(read, bits, np.nan)


def tier_of(device: str, column: str) -> str:
    """Returns the tier that holds a column of a device, or of the host."""
    tiers = [HOST] if device == HOST else [tier for tier in TELEMETRY if tier not in (HOST, "ring")]
    return next(tier for tier in tiers if column in TELEMETRY[tier].names)

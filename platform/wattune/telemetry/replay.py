"""The replay backend: a recording played back as if its devices were here.

Everything behind a backend (sampler, store, analysis, live view) then runs on readings of real hardware, on machines
that have none. It is named `replay:FOLDER[?speed=2&start_s=18&loop]`. Tables and manifests sampled from it
name the backend `replay`, and `wattune.analysis.quality` never lets them count as a new measurement.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wattune.arrays import Ints
from wattune.clock import ClockAnchor
from wattune.errors import TelemetryError, closest
from wattune.schema import TELEMETRY
from wattune.storage.measured import MeasuredFolder
from wattune.storage.values import wrong_columns
from wattune.telemetry.backend import AVAILABLE, ERROR_SUFFIX, DeviceInfo, Row, taken_ns
from wattune.units import NS_PER_S, s_to_ns

HISTORY_S: Final = 2.36
"""Most of the past that a drain gives: the length of the driver's ring (measured on H200, driver 580)."""

ENDED: Final = "ended"
"""The error code of every column once the recording is over."""

_TIERS: Final = ("ring", "fast", "counter", "slow")
_KEYS: Final = ("node", "device", "mono_ns", "wall_ns")


Playback = tuple[Path, float, float, bool]
"""A recording's folder, and the way to play it. First its speed, recorded seconds per second: rates stay those
recorded, so that counters rise as many times less. Then the second of the recording at which play begins. And whether
it begins again there when it is over, counters going on; else every read fails from then on."""


def parse_playback(text: str) -> Playback:
    """Reads `FOLDER[?speed=2&start_s=18&loop]`.

    Raises `TelemetryError`: an option is unknown, or its value is out of range.
    """
    folder, _, query = text.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in ("speed", "start_s", "loop"):
            raise TelemetryError(f'replay option "{name}" is unknown; {closest(name, ("speed", "start_s", "loop"))}')
    if options.get("loop", "") != "":
        raise TelemetryError(f'replay option "loop={options["loop"]}" takes no value; write "loop", or leave it out')
    speed = _number("speed", options.get("speed", "1"), least=0.01)
    return (
        Path(folder).expanduser(),
        speed,
        _number("start_s", options.get("start_s", "0"), least=0.0),
        "loop" in options,
    )


def _number(name: str, text: str, *, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise TelemetryError(f'replay option "{name}={text}" is not a number from {least:g} on; write "{name}=2"')
    return value


@dataclass(frozen=True, slots=True)
class _Track:
    """One tier of one device."""

    time_ns: Ints
    """Time each row was read, or the sensor took it (`ring`), strictly increasing. Play begins at 0."""
    columns: Mapping[str, pa.Array]
    """Every column with at least one value, and the error codes beside it."""
    counters: Mapping[str, tuple[Ints, npt.NDArray[np.float64]]]
    """Times and values of the cumulative columns, failed reads left out."""

    def value(self, name: str, row: int) -> int | float | str | None:
        """A recorded value, None where the read had failed."""
        value: int | float | str | None = self.columns[name][row].as_py()
        return value


class ReplayBackend:
    """The devices of one recorded node, their readings moved to now.

    Gauges hold their last reading, as sensors do; cumulative counters move on between two readings; the ring gives each
    sample once and forgets as the driver does.
    """

    def __init__(
        self,
        playback: str,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        anchor: Callable[[], ClockAnchor] = ClockAnchor.now,
    ) -> None:
        """Reads the recording; play begins now, where all of its tiers have begun.

        Raises `TelemetryError`: there is no device telemetry of exactly one node, or it is over before `start_s`.
        """
        self._folder, self._speed, start_s, self._loops = parse_playback(playback)
        recording = MeasuredFolder(self._folder)
        recording.check()
        found = {tier: table for tier, table in recording.telemetry().items() if tier in _TIERS}
        wrong = [one for tier, table in found.items() for one in wrong_columns(table.schema, tier)]
        if wrong:
            raise TelemetryError(f"{self._folder}: {'; '.join(wrong)}; give another recording")
        tables = {tier: rows for tier, table in found.items() if (rows := _with_keys(table, tier)).num_rows}
        node = self._only_node(tables)
        manifest = recording.manifests().get(node, {})
        self.simulated = manifest.get("simulated") is True or any(
            (table.schema.metadata or {}).get(b"wattune.simulated") == b"true" for table in tables.values()
        )
        raw = {
            (device, tier): rows
            for tier, table in tables.items()
            for device in pc.unique(table["device"].cast(pa.string())).to_pylist()
            if (rows := _ordered(table.filter(pc.equal(table["device"].cast(pa.string()), device)), tier)).num_rows
        }
        names = sorted({device for device, _ in raw})
        known = {device: manifest.get("devices", {}).get(device, {}) for device in names}
        self._devices = [_info(device, facts) for device, facts in known.items()]
        self._recorded = {
            device: {"recorded_uuid": facts["uuid"]} for device, facts in known.items() if "uuid" in facts
        }
        begin_ns = max(rows["mono_ns"][0].as_py() for rows in raw.values()) + s_to_ns(start_s)
        self._span_ns = min(rows["mono_ns"][-1].as_py() for rows in raw.values()) - begin_ns
        if self._span_ns <= 0:
            raise TelemetryError(
                f"{self._folder} is over before start_s={start_s:g}; begin "
                f"{-self._span_ns / NS_PER_S:.1f} s earlier or more"
            )
        self._tracks = {key: _track(rows, key[1], begin_ns) for key, rows in raw.items()}
        self._clock_ns, self._opened = clock_ns, anchor()
        self._drained_ns: dict[str, int] = {}

    def _only_node(self, tables: Mapping[str, pa.Table]) -> str:
        nodes = {node for table in tables.values() for node in pc.unique(table["node"].cast(pa.string())).to_pylist()}
        if len(nodes) != 1:
            found = f"of nodes {', '.join(sorted(nodes))}" if nodes else "of no device"
            raise TelemetryError(
                f"{self._folder} holds telemetry {found}; give the folder of a trial or recording of one node"
            )
        return str(nodes.pop())

    def devices(self) -> Sequence[DeviceInfo]:
        """The recorded devices, with identities of their own: one recording may be played by many at once."""
        return self._devices

    def facts(self, device: str) -> Mapping[str, object]:
        """Returns the device's own identity, by which it can be chosen as when it was recorded."""
        return self._recorded.get(device, {})

    def capabilities(self, device: str) -> Mapping[str, Mapping[str, str]]:
        """Returns the tiers and columns that were recorded of a device."""
        return {
            tier: {
                column: AVAILABLE if column in track.columns else "unavailable: not recorded"
                for column in TELEMETRY[tier].names
                if column not in _KEYS
            }
            for (name, tier), track in self._tracks.items()
            if name == device
        }

    def read(self, device: str, tier: str) -> Sequence[Row]:
        """Returns the recorded readings of this moment; after the end, no ring samples and failed reads."""
        track, now_ns = self._tracks[device, tier], self._now_ns()
        if tier == "ring":
            return self._drain(device, track, now_ns)
        lap, at_ns = divmod(now_ns, self._span_ns) if self._loops else (0, now_ns)
        if at_ns > self._span_ns:
            offered = [name for name in track.columns if not name.endswith(ERROR_SUFFIX)]
            return [dict.fromkeys(offered) | {f"{name}{ERROR_SUFFIX}": ENDED for name in offered}]
        held = max(int(np.searchsorted(track.time_ns, at_ns, side="right")) - 1, 0)
        row = {}
        for name in track.columns:
            value = track.value(name, held)
            if name in track.counters and value is not None:
                value = self._counted(track, name, lap, at_ns)
            if value is not None or not name.endswith(ERROR_SUFFIX):
                row[name] = value
        return [row]

    def close(self) -> None:
        """Nothing stays open."""

    def _now_ns(self) -> int:
        return int((self._clock_ns() - self._opened.mono_ns) * self._speed)

    def _counted(self, track: _Track, name: str, lap: int, at_ns: int) -> int | float:
        times_ns, values = track.counters[name]
        start, now, end = np.interp([0, at_ns, self._span_ns], times_ns, values)
        counted = float(start + (now - start + lap * (end - start)) / self._speed)
        return round(counted) if pa.types.is_integer(track.columns[name].type) else counted

    def _drain(self, device: str, track: _Track, now_ns: int) -> list[Row]:
        """The samples since the last drain, stamped with the wall time at which they are played."""
        oldest_ns = now_ns - int(s_to_ns(HISTORY_S) * self._speed)
        since_ns = max(self._drained_ns.get(device, oldest_ns), oldest_ns)
        self._drained_ns[device] = now_ns
        rows: list[Row] = []
        for lap in range(max(since_ns // self._span_ns, 0), now_ns // self._span_ns + 1 if self._loops else 1):
            shift_ns = lap * self._span_ns
            # What was recorded before play begins is history of the first lap alone.
            first_ns = max(since_ns - shift_ns, -1 if lap else since_ns)
            last_ns = min(now_ns - shift_ns, self._span_ns - 1 if self._loops else self._span_ns)
            for row in range(*np.searchsorted(track.time_ns, [first_ns, last_ns], side="right")):
                played_ns = self._opened.mono_ns + int((int(track.time_ns[row]) + shift_ns) / self._speed)
                rows.append({"sensor_ns": self._opened.to_wall_ns(played_ns), "power_w": track.value("power_w", row)})
        return rows


def _with_keys(table: pa.Table, tier: str) -> pa.Table:
    """Returns the rows that have a place and a time."""
    for name in (*_KEYS, *(("sensor_ns",) if tier == "ring" else ())):
        if table[name].null_count:
            table = table.filter(pc.is_valid(table[name]))
    return table


def _ordered(rows: pa.Table, tier: str) -> pa.Table:
    """A device's rows by time, each once; `mono_ns` of ring rows becomes the moment the sensor took them."""
    unique_ns, first = np.unique(taken_ns(tier, rows), return_index=True)
    return rows.take(first).set_column(rows.column_names.index("mono_ns"), "mono_ns", pa.array(unique_ns))


def _track(rows: pa.Table, tier: str, begin_ns: int) -> _Track:
    time_ns = rows["mono_ns"].to_numpy() - begin_ns
    columns = {
        name: rows[name].combine_chunks()
        for name in rows.column_names
        if name not in _KEYS and rows[name].null_count < rows.num_rows
    }
    counters = {}
    for field in TELEMETRY[tier]:
        if field.name in columns and field.metadata[b"kind"] == b"cumulative":
            valid = columns[field.name].is_valid().to_numpy(zero_copy_only=False)
            counters[field.name] = time_ns[valid], columns[field.name].drop_null().to_numpy().astype(np.float64)
    return _Track(time_ns, columns, counters)


def _info(device: str, facts: Mapping[str, object]) -> DeviceInfo:
    known = {field.name: facts[field.name] for field in fields(DeviceInfo) if field.name in facts}
    identity = {"device": device, "name": "unknown", "uuid": f"replay-{os.getpid()}-{device}"}
    return DeviceInfo(**{**identity, **known, "uuid": identity["uuid"]})  # type: ignore[arg-type]  # checked JSON

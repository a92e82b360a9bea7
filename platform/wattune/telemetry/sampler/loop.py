"""The sampling loop: reads backends on absolute deadlines and hands the rows to the store."""

import contextlib
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from wattune.clock import ClockAnchor
from wattune.errors import TelemetryError
from wattune.schema import TELEMETRY
from wattune.telemetry.backend import OTHER_PROCESSES, Backend, FactsProvider
from wattune.telemetry.files.manifest import ClockWatch, SamplerCost, TierRecord, software
from wattune.telemetry.files.pacing import Schedule
from wattune.telemetry.files.segments import SegmentStore, StoredRow
from wattune.units import ns_to_s

DEFAULT_RATES_HZ: Final[dict[str, float]] = {"ring": 1, "fast": 20, "counter": 5, "slow": 1, "host": 1}
"""Reads per second of every device, by tier, after the sensors' own periods. Measured on H200: the driver's ring holds
2.36 s, instant power moves every 100 ms, GPM needs 100 ms between samples, the energy counter costs 3 ms a read."""

SPREAD_TIERS: Final = frozenset({"ring", "slow"})
"""Tiers whose reads take milliseconds: one device a tick, so that eight in a row never delay the fast tier."""

HAND_OVER_S: Final = 0.8
"""Length of a batch. A killed sampler loses at most this and the time to write one: less than a second."""
MANIFEST_EVERY: Final = 6
"""Batches from one manifest to the next: 4.8 s."""


class _TierReader:
    """One tier: its backend, its devices and its pace."""

    def __init__(self, tier: str, backend: Backend, devices: Sequence[str], rate_hz: float, start_ns: int) -> None:
        self.tier, self.backend, self.devices = tier, backend, list(devices)
        self._spread = tier in SPREAD_TIERS
        self._turn = 0
        self.schedule = Schedule(rate_hz * (len(devices) if self._spread else 1), start_ns)
        self.record = TierRecord(rate_hz, self.schedule)

    def due(self) -> Sequence[str]:
        """The devices of a tick. Each tick begins with another one, so that no device is always read late.

        Ticks that were missed take no turn: a regular miss would take that of the same devices again and again.
        """
        first = self._turn
        self._turn = (first + 1) % len(self.devices)
        return self.devices[first : first + 1] if self._spread else self.devices[first:] + self.devices[:first]


_Tiers = dict[str, tuple[str, list[str]]]
"""The one backend of each tier, and its devices."""


def _inventory(backends: Mapping[str, Backend]) -> tuple[dict[str, dict[str, Any]], _Tiers]:
    """Returns the manifest's facts of every device there is to read, and the tiers."""
    devices: dict[str, dict[str, Any]] = {}
    tiers: _Tiers = {}
    for name, backend in backends.items():
        for info in backend.devices():
            capabilities = backend.capabilities(info.device)
            facts = {"backend": name, **info.to_json(), "capabilities": capabilities}
            if devices.setdefault(info.device, facts) is not facts:
                other = devices[info.device]["backend"]
                raise TelemetryError(f"backends {other} and {name} both name a device {info.device}; sample one")
            for tier in capabilities:
                other, of_tier = tiers.setdefault(tier, (name, []))
                if other != name:
                    raise TelemetryError(
                        f"backends {other} and {name} both fill the table {tier}, which has one; sample one of "
                        "them, or each in its own folder"
                    )
                of_tier.append(info.device)
    if not tiers:
        raise TelemetryError(f"backends {', '.join(backends)} have nothing to read on this node; see wattune doctor")
    return devices, {tier: tiers[tier] for tier in TELEMETRY if tier in tiers}


class Sampler:
    """One recording from its first file to its last. It takes all time from its clocks and its wait."""

    def __init__(
        self,
        folder: Path,
        backends: Mapping[str, Backend],
        *,
        node: str,
        expired: Callable[[], bool],
        wait: Callable[[float], str | None],
        rates_hz: Mapping[str, float] = DEFAULT_RATES_HZ,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Opens the files and writes the first manifest.

        Backends are open, and closed when the recording ends. `expired` says whether the owner is gone, once a batch;
        `wait` sleeps so many seconds and returns why to stop, or None; `rates_hz` is by tier. The monotonic clock
        paces, the wall clock only stamps. Raises `TelemetryError`: two backends have a device or a tier in common, or
        none has a tier.
        """
        self._node, self._backends = node, backends
        self._expired, self._wait = expired, wait
        self._clock_ns, self._wall_ns = clock_ns, wall_ns
        self._ended: str | None = None
        self._num_batches = 0
        self.looks_for_users = False
        """True where the manifest is to say which processes use each device."""
        self._devices, tiers = _inventory(backends)
        of_devices = {name: backends[facts["backend"]] for name, facts in self._devices.items()}
        self._providers = [(name, one) for name, one in of_devices.items() if isinstance(one, FactsProvider)]
        self._add_facts("at_start")
        self._simulated = any(backend.simulated for backend in backends.values())
        served_by = {tier: name for tier, (name, _) in tiers.items()}
        self._rows: dict[str, list[StoredRow]] = {tier: [] for tier in served_by}
        self._store = SegmentStore(folder, served_by, simulated=self._simulated)
        # Opening files takes longer than a tick, so time begins here.
        self._software, self._cost, self._start_clocks = software(), SamplerCost(), ClockAnchor.now()
        self._clock_watch = ClockWatch(clock_ns, wall_ns)
        start_ns = clock_ns()
        self._readers = {
            tier: _TierReader(tier, backends[name], devices, rates_hz[tier], start_ns)
            for tier, (name, devices) in tiers.items()
        }
        # The shortest period first: of tasks due at one moment, it can wait least.
        readers = sorted(self._readers.values(), key=lambda reader: reader.schedule.period_ns)
        self._tasks: dict[Schedule, Callable[[int], None]] = {one.schedule: partial(self._read, one) for one in readers}
        self._tasks[Schedule(1 / HAND_OVER_S, start_ns)] = self._hand_over
        self._store.put({}, self._manifest())

    def run(self) -> str:
        """Samples until `wait` or the lease ends it; then closes every file and backend, also after an error.

        Returns the reason it ended: that of `wait`, or `lease expired`. Raises `TelemetryError`: the store cannot be
        written.
        """
        # A collection would only pause the loop, which makes no cycles.
        gc.collect()
        gc.disable()
        try:
            while self._ended is None:
                schedule = min(self._tasks, key=lambda one: one.next_ns)
                self._ended = self._wait(ns_to_s(max(0, schedule.next_ns - self._clock_ns())))
                now_ns = self._clock_ns()
                if self._ended is None and now_ns >= schedule.next_ns:
                    self._tasks[schedule](schedule.take(now_ns))
            self._read_last()
            self._add_facts("at_end")
        except BaseException as error:  # raised on: the manifest says why the files end, an interrupt too
            self._ended = f"failed: {error!r}"
            raise
        finally:
            gc.enable()
            self._close()
        return self._ended

    def _read(self, reader: _TierReader, lateness_ns: int) -> None:
        reader.record.add_tick(lateness_ns)
        for device in reader.due():
            self._read_device(reader, device)

    def _read_last(self) -> None:
        """Reads the slowest tiers once more, else up to a second before the end is in no file."""
        for reader in self._readers.values():
            for device in reader.devices if reader.tier in SPREAD_TIERS else ():
                self._read_device(reader, device)

    def _read_device(self, reader: _TierReader, device: str) -> None:
        start_ns = self._clock_ns()
        rows = reader.backend.read(device, reader.tier)
        end_ns, wall_ns = self._clock_ns(), self._wall_ns()
        reader.record.add_read(device, start_ns, end_ns)
        since_ns = (end_ns - start_ns) // 2  # the middle of a read is the best single time for it
        keys: StoredRow = {
            "node": self._node,
            "device": device,
            "mono_ns": end_ns - since_ns,
            "wall_ns": wall_ns - since_ns,
        }
        for row in rows:
            reader.record.add_errors(row)
            self._rows[reader.tier].append({**keys, **row})

    def _hand_over(self, _lateness_ns: int) -> None:
        self._clock_watch.look()
        if self.looks_for_users:
            self._look_for_users()
        rows, self._rows = self._rows, {tier: [] for tier in self._rows}
        self._store.put(rows, self._manifest() if self._num_batches % MANIFEST_EVERY == 0 else None)
        self._num_batches += 1
        if self._expired():
            self._ended = "lease expired"

    def _add_facts(self, when: str) -> None:
        """Asks backends for facts no column holds, before the first tick and after the last, when calls may block."""
        for device, backend in self._providers:
            # The store's thread may be writing the old facts.
            self._devices[device] = {**self._devices[device], when: dict(backend.facts(device))}

    def _look_for_users(self) -> None:
        """Asks who uses one device, another in each batch: NVML takes 4.5 ms to answer, and eight would delay ticks."""
        if not self._providers:
            return
        device, backend = self._providers[self._num_batches % len(self._providers)]
        pids = [process["pid"] for process in backend.facts(device).get(OTHER_PROCESSES, ())]
        if pids:
            known = self._devices[device]
            here = {pid: Path(f"/proc/{pid}").exists() for pid in pids}
            self._devices[device] = {**known, "users": {**known.get("users", {}), **here}}

    def _close(self) -> None:
        with contextlib.ExitStack() as held:
            # The files first: a driver that has lost a device may refuse to be closed.
            for backend in self._backends.values():
                held.callback(backend.close)
            with contextlib.suppress(TelemetryError):  # where the store failed, `close` says so
                self._store.put(self._rows)
            self._store.close(self._manifest() | {"ended": self._ended})

    def _manifest(self) -> dict[str, Any]:
        return {
            "node": self._node,
            "simulated": self._simulated,
            **self._software,
            "devices": dict(self._devices),
            "tiers": {tier: reader.record.to_json() for tier, reader in self._readers.items()},
            "clock": {
                "start": asdict(self._start_clocks),
                "end": asdict(ClockAnchor.now()),
                "steps": list(self._clock_watch.steps),
            },
            "sampler": self._cost.to_json(),
        }

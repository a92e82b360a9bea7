"""The sampler process from both ends: the owner's `SamplerProcess`, and `sample`, which it starts.

A sampler is `python -m wattune.telemetry.sampler.process` in a session of its own. It imports neither ray nor torch, is
nobody's child, and lives by a lease: without renewal for 10 s it closes its files and ends. Owner and sampler share
only its folder: `lease` (written by the owner), `sampler.lock` (held by the sampler), `sampler.log`, and the
recording of `wattune.telemetry.files.segments`.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from wattune.errors import SensorChoiceError, TelemetryError, closest
from wattune.schema import TELEMETRY
from wattune.telemetry.backend import Backend
from wattune.telemetry.devices import Devices, named, visible
from wattune.telemetry.files.segments import MANIFEST, read_manifest
from wattune.telemetry.registry import SHARED_BACKENDS, load_backend, split_backend
from wattune.telemetry.sampler.lease import (
    LEASE,
    LEASE_S,
    READY_S,
    DetachedProcess,
    DeviceLocks,
    Lease,
    run_detached,
    wait_for_signal,
)
from wattune.telemetry.sampler.loop import DEFAULT_RATES_HZ, Sampler

_HIGHEST_RATE_HZ: Final = 1000.0
_STUCK_S: Final = 60.0
"""A sampler that a driver call has held for so long ends itself: it could never see its lease expire."""
_WATCH_S: Final = 1.0
"""Time between two looks for such a call."""


class SamplerProcess(DetachedProcess):
    """A sampler, known by its folder."""

    what, ready_file = "sampler", MANIFEST

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        node: str,
        backends: Sequence[str] = ("host",),
        rates_hz: Mapping[str, float] | None = None,
        cpus: Sequence[int] = (),
        lease_s: float = LEASE_S,
        lock_wait_s: float = LEASE_S + 2,
        timeout_s: float = READY_S,
        choice: Mapping[str, Any] | None = None,
    ) -> Self:
        """Starts a sampler and waits until its sensors are open.

        Raises `TelemetryError`: the folder is taken, a rate is wrong, or the sampler ended or was too slow; the message
        holds the end of its log.

        Args:
            folder: A folder for this recording alone; it is made if need be.
            node: This node's name in every row.
            backends: Names of `wattune.telemetry.registry.BACKENDS`.
            rates_hz: Reads per second of every device by tier, where not `DEFAULT_RATES_HZ`.
            cpus: Processors it may run on, best such as nobody trains on; all where empty.
            lease_s: Seconds it lives without `renew`.
            lock_wait_s: Longest to wait for devices that another sampler reads; an orphan is gone after its lease.
            timeout_s: Longest the start may take altogether; 0 does not wait: see `wait_until_ready`.
            choice: Devices (`chosen`) that it alone may read. All are read. With `asked`, it is looked who uses each.
        """
        sampler = cls(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).exists():
            raise TelemetryError(f"{folder} holds a recording already; give another folder, or attach to this one")
        rates_hz = dict(parse_rate(f"{tier}={rate_hz}") for tier, rate_hz in (rates_hz or {}).items())
        asked = {"node": node, "backends": list(backends), "rates_hz": rates_hz, "cpus": list(cpus), "choice": choice}
        sampler._spawn("wattune.telemetry.sampler.process", {**asked, "lease_s": lease_s, "lock_wait_s": lock_wait_s})
        if timeout_s:
            sampler.wait_until_ready(timeout_s)
        return sampler

    @classmethod
    def attach(cls, folder: Path) -> Self:
        """The sampler that runs in a folder, its lease renewed. Raises `TelemetryError`: none does."""
        sampler = cls(folder)
        if not sampler.alive():
            raise TelemetryError(f"no sampler runs in {folder}; read what it recorded, and start one in a new folder")
        sampler.renew()
        return sampler

    def manifest(self) -> dict[str, Any]:
        """The last manifest it wrote, at most some seconds old while it lives."""
        return read_manifest(self.folder)

    def stop(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Has it close its files and end, and kills it where that takes too long. May be called twice.

        Returns its last manifest; `closed` is false where it was killed or had died before. Raises `TelemetryError`:
        there is none: it ended before its sensors were open.
        """
        self.end(timeout_s)
        return self.manifest()


def parse_rate(text: str) -> tuple[str, float]:
    """A tier and its rate in Hz from `tier=hz`.

    Raises `SensorChoiceError`: there is no such tier, or the rate is not in (0, 1000] Hz.
    """
    tier, _, rate = text.partition("=")
    if tier not in TELEMETRY:
        raise SensorChoiceError(f'"{tier}" in rate "{text}" is not a tier; {closest(tier, TELEMETRY)}')
    try:
        rate_hz = float(rate)
    except ValueError:
        rate_hz = 0.0
    if not 0 < rate_hz <= _HIGHEST_RATE_HZ:
        raise SensorChoiceError(f'rate "{text}" is not in (0, {_HIGHEST_RATE_HZ:.0f}] Hz; write for example "{tier}=1"')
    return tier, rate_hz


class Watchdog:
    """Ends this process where a driver call holds its loop and never returns.

    It counts its own looks, not time: in a process that is stopped (Slurm's `scontrol suspend`, a paused container, a
    freezer) it does not look either. A timer would have run out by the time the process goes on, and end it then.
    """

    def __init__(self, stuck_s: float = _STUCK_S) -> None:
        """Begins to look; nothing is held before the first `beat`: sensors may take their time to open."""
        self._most_looks, self._beats = math.ceil(stuck_s / _WATCH_S), 0
        # Driver calls go through ctypes, which lets other threads run meanwhile.
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """Says that the loop goes on."""
        self._beats += 1

    def _run(self) -> None:
        seen, looks = self._beats, 0
        while looks < self._most_looks:
            time.sleep(_WATCH_S)
            beats = self._beats
            seen, looks = beats, looks + 1 if 0 < beats == seen else 0
        os.write(2, f"error: a driver call held the sampler for {self._most_looks * _WATCH_S:.0f} s\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)


def chosen(choice: Mapping[str, Any], devices: Devices) -> Sequence[str]:
    """Returns the devices of a choice: those `asked` for, else those that `variables` leave, else all."""
    try:
        if choice.get("asked") is not None:
            return named(choice["asked"], devices)
        return (visible(choice.get("variables") or {}, devices) or (list(devices), ""))[0]
    except SensorChoiceError:  # the owner says so: it knows the devices of all backends
        return []


def sample(
    folder: Path,
    *,
    node: str,
    backends: Sequence[str],
    rates_hz: Mapping[str, float],
    lease_s: float,
    lock_wait_s: float,
    choice: Mapping[str, Any] | None = None,
    cpus: Sequence[int] = (),
) -> str:
    """Opens backends, locks their devices, or those of a choice, and samples until a stop signal or the lease's end.

    Returns the reason it ended. Raises `TelemetryError`: a backend cannot be opened, another sampler reads one of its
    devices, or the disk failed.
    """
    if cpus:
        _pin(cpus)
    lease = Lease(folder / LEASE, lease_s)
    with contextlib.ExitStack() as held:
        opened: dict[str, Backend] = {}
        for text in backends:
            name, _ = split_backend(text)
            if name in opened:
                raise SensorChoiceError(f"backend {name} is given twice; sample each in its own folder")
            opened[name] = load_backend(text)
            held.callback(opened[name].close)
            if name not in SHARED_BACKENDS:
                infos = {info.device: info.to_json() | {"backend": name} for info in opened[name].devices()}
                wanted = infos if choice is None else chosen(choice, infos)
                identities = [str(infos[each].get("uuid", each)) for each in wanted]
                held.enter_context(DeviceLocks(name, identities, wait_s=lock_wait_s))
        rates_hz = {**DEFAULT_RATES_HZ, **rates_hz}
        watchdog = Watchdog()

        def wait(timeout_s: float) -> str | None:
            watchdog.beat()
            return wait_for_signal(timeout_s)

        sampler = Sampler(folder, opened, node=node, expired=lease.expired, wait=wait, rates_hz=rates_hz)
        sampler.looks_for_users = choice is not None and "asked" in choice
        return sampler.run()


def _pin(cpus: Sequence[int]) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if not set(cpus) <= set(allowed):
        raise TelemetryError(f"the sampler cannot run on processors {cpus}; choose among {allowed}")
    os.sched_setaffinity(0, cpus)


if __name__ == "__main__":
    sys.exit(run_detached(sample))

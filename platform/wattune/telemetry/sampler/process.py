"""The sampler process from both ends: the owner's `SamplerProcess`, and `main`, which it starts.

A sampler is `python -m wattune.telemetry.sampler.process` in a session of its own. It imports neither ray nor torch, is
nobody's child, and lives by a lease: without renewal for 10 s it closes its files and ends. Owner and sampler share
only its folder: `lease` (written by the owner), `sampler.lock` (held by the sampler), `sampler.log`, and the
recording of `wattune.telemetry.files.segments`.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
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
from wattune.telemetry.registry import BACKENDS, SHARED_BACKENDS, load_backend, split_backend
from wattune.telemetry.sampler.lease import LEASE_S, DeviceLocks, FileLock, Lease, lock_holder, renew
from wattune.telemetry.sampler.loop import DEFAULT_RATES_HZ, Sampler

_LEASE: Final = "lease"
_LOCK: Final = "sampler.lock"
_LOG: Final = "sampler.log"
_LOG_TAIL_LINES: Final = 12
_POLL_S: Final = 0.02
READY_S: Final = 60.0
"""Longest a sampler may take to open its sensors."""
_HIGHEST_RATE_HZ: Final = 1000.0
_STUCK_S: Final = 60.0
"""A sampler that a driver call has held for so long ends itself: it could never see its lease expire."""
_WATCH_S: Final = 1.0
"""Time between two looks for such a call."""
_STOP_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

_DETACH: Final = '"$@" >&2 & echo $!'
"""A shell that starts its arguments in the background, says their process id and ends. The sampler is then nobody's
child: Ray kills the children of an actor that ends, and an owner would have to reap it."""


class SamplerProcess:
    """A sampler, known by its folder. It outlives this object, and its owner for as long as the lease lasts."""

    def __init__(self, folder: Path) -> None:
        """Names a sampler; use `start` or `attach`."""
        self.folder = folder

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

        Args:
            folder: A folder for this recording alone; it is made if need be.
            node: This node's name in every row.
            backends: What to read, names of `wattune.telemetry.registry.BACKENDS`.
            rates_hz: Reads per second of every device by tier, where not `DEFAULT_RATES_HZ`.
            cpus: Processors it may run on, best such as nobody trains on; all where empty.
            lease_s: Seconds it lives without `renew`.
            lock_wait_s: Longest to wait for devices that another sampler reads; an orphan is gone after its lease.
            timeout_s: Longest the start may take altogether; 0 does not wait: see `wait_until_ready`.
            choice: Devices that the owner chose (`asked`, `variables`; see `chosen`). It alone may read those. All are
                read, and it is looked who uses each.

        Raises:
            TelemetryError: The folder is taken, a rate is wrong, or the sampler ended or was too slow; the message
                holds the end of its log.
        """
        sampler = cls(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).exists():
            raise TelemetryError(f"{folder} holds a recording already; give another folder, or attach to this one")
        options = ["--node", node, "--lease-s", str(lease_s), "--lock-wait-s", str(lock_wait_s)]
        options += [part for name in backends for part in ("--backend", name)]
        options += [part for tier, rate_hz in (rates_hz or {}).items() for part in ("--rate", f"{tier}={rate_hz}")]
        options += ["--cpus", *map(str, cpus)] if cpus else []
        options += [] if choice is None else ["--choice", json.dumps(choice)]
        sampler._spawn(
            [sys.executable, "-P", "-m", "wattune.telemetry.sampler.process", str(folder.absolute()), *options]
        )
        if timeout_s:
            sampler.wait_until_ready(timeout_s)
        return sampler

    @classmethod
    def attach(cls, folder: Path) -> Self:
        """The sampler that runs in a folder, its lease renewed.

        Raises:
            TelemetryError: None does.
        """
        sampler = cls(folder)
        if not sampler.alive():
            raise TelemetryError(f"no sampler runs in {folder}; read what it recorded, and start one in a new folder")
        sampler.renew()
        return sampler

    def renew(self) -> None:
        """Renews the lease; to be called well within every `lease_s`.

        Raises:
            TelemetryError: There is no lease: no sampler was started here, or the folder was cleared.
        """
        try:
            renew(self.folder / _LEASE)
        except FileNotFoundError:
            raise TelemetryError(f"{self.folder} has no sampler's lease; start a sampler there first") from None

    def alive(self) -> bool:
        """Returns True while its process runs."""
        return lock_holder(self.folder / _LOCK) is not None

    def manifest(self) -> dict[str, Any]:
        """The last manifest it wrote, at most some seconds old while it lives."""
        return read_manifest(self.folder)

    def stop(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Has it close its files and end, and kills it where that takes too long. May be called twice.

        Returns its last manifest; `closed` is false where it was killed or had died before.

        Raises:
            TelemetryError: There is none: it ended before its sensors were open.
        """
        self.end(timeout_s)
        return self.manifest()

    def end(self, timeout_s: float = 10.0) -> None:
        """Ends it as `stop` does, without its manifest: for a recording nobody wants, which may not have begun."""
        self._signal(signal.SIGTERM)
        if not self._ended_within(timeout_s):
            self._signal(signal.SIGKILL)
            self._ended_within(timeout_s)

    def _spawn(self, command: Sequence[str]) -> None:
        lock = FileLock.take(self.folder / _LOCK)
        if lock is None:
            raise TelemetryError(f"a sampler starts or runs in {self.folder}; attach to it")
        try:
            (self.folder / _LEASE).touch()
            self.renew()
            with open(self.folder / _LOG, "wb") as log:
                shell = subprocess.run(
                    ["/bin/sh", "-c", _DETACH, "sh", *command],
                    check=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    # The sampler is born with the lock and never lets go of it: to hold it is to be alive.
                    pass_fds=[lock.fileno()],
                    # A Ray worker may find wattune in a working directory that is on its own path only.
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                        "OPENBLAS_NUM_THREADS": "1",  # numpy starts one thread a processor otherwise
                    },
                )
            lock.write_holder(int(shell.stdout))
        finally:
            lock.release()

    def wait_until_ready(self, timeout_s: float = READY_S) -> None:
        """Waits until the sensors of a sampler that was started are open.

        Raises:
            TelemetryError: The sampler ended or was too slow; the message holds the end of its log.
        """
        deadline_s = time.monotonic() + timeout_s
        while not (self.folder / MANIFEST).exists():
            if not self.alive():
                raise TelemetryError(f"the sampler in {self.folder} ended while starting:\n{self._last_words()}")
            if time.monotonic() > deadline_s:
                self._signal(signal.SIGKILL)
                raise TelemetryError(
                    f"the sampler in {self.folder} was not ready within timeout_s={timeout_s:g}; raise that, or see "
                    f"what blocks its backends:\n{self._last_words()}"
                )
            self.renew()
            time.sleep(_POLL_S)

    def _last_words(self) -> str:
        lines = (self.folder / _LOG).read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join(f"  {line}" for line in lines) or "  its log is empty"

    def _signal(self, number: signal.Signals) -> None:
        if pid := lock_holder(self.folder / _LOCK):
            with contextlib.suppress(ProcessLookupError):  # it ended since
                os.kill(pid, number)

    def _ended_within(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True


def parse_rate(text: str) -> tuple[str, float]:
    """A tier and its rate in Hz from `tier=hz`.

    Raises:
        SensorChoiceError: There is no such tier, or the rate is not in (0, 1000] Hz.
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


def wait_for_signal(timeout_s: float) -> str | None:
    """Sleeps until a stop signal or a time-out.

    The stop signals must be blocked, so that they interrupt nothing else. Returns the signal's name, or None.
    """
    received = signal.sigtimedwait(_STOP_SIGNALS, timeout_s)
    # Continued after a stop past its deadline, CPython 3.11 returns a signal number that was never filled in.
    if received is None or received.si_signo not in _STOP_SIGNALS:
        return None
    return signal.Signals(received.si_signo).name


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
) -> str:
    """Opens backends, locks their devices, or those of a choice, and samples until a stop signal or the lease's end.

    Returns the reason it ended.

    Raises:
        TelemetryError: A backend cannot be opened, another sampler reads one of its devices, or the disk failed.
    """
    lease = Lease(folder / _LEASE, lease_s)
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
        sampler.looks_for_users = choice is not None
        return sampler.run()


def _pin(cpus: Sequence[int]) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if not set(cpus) <= set(allowed):
        raise TelemetryError(f"the sampler cannot run on processors {cpus}; choose among {allowed}")
    os.sched_setaffinity(0, cpus)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sampler in this process.

    The exit code is 0 after a stop, that of the error otherwise, whose message is on standard error.
    """
    # Blocked before any thread is made, so that all inherit it and `wait_for_signal` gets every one.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    parser = argparse.ArgumentParser(prog="python -m wattune.telemetry.sampler.process")
    parser.add_argument("folder", type=Path, help="where the recording goes; holds the lease")
    parser.add_argument("--node", required=True, help="this node's name in every row")
    parser.add_argument("--backend", action="append", required=True, help=f"what to read: {', '.join(BACKENDS)}")
    parser.add_argument("--rate", action="append", default=[], metavar="TIER=HZ", help="reads per second and device")
    parser.add_argument("--cpus", type=int, nargs="+", help="processors it may run on; all where left out")
    parser.add_argument("--lease-s", type=float, default=LEASE_S, help="seconds it lives without renewal")
    parser.add_argument("--lock-wait-s", type=float, default=0.0, help="seconds to wait for another sampler's devices")
    parser.add_argument("--choice", type=json.loads, help="JSON of the devices that the owner chose")
    given = parser.parse_args(arguments)
    try:
        if given.cpus:
            _pin(given.cpus)
        sample(
            given.folder,
            node=given.node,
            backends=given.backend,
            rates_hz=dict(parse_rate(text) for text in given.rate),
            lease_s=given.lease_s,
            lock_wait_s=given.lock_wait_s,
            choice=given.choice,
        )
    except TelemetryError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

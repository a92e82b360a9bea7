"""One actor per node: keeps the node's sampler process alive during a trial and returns its tables."""

import contextlib
import json
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import ray
from ray.actor import ActorHandle

from wattune.analysis.signals.energy_grid import LONGEST_S
from wattune.analysis.signals.readings import HOST
from wattune.clock import ClockAnchor
from wattune.errors import PlanError, TelemetryError, TrackingError
from wattune.limits.process import VENDORS, SettingsProcess
from wattune.orchestrate.ask import on_node
from wattune.orchestrate.cluster import NAMESPACE, Node
from wattune.orchestrate.power_limit import node_power_peak_w
from wattune.private_folder import temporary_folder
from wattune.storage.measured import MeasuredFolder, tier_files
from wattune.storage.remote import RemoteStorage
from wattune.telemetry.devices import VARIABLES, of_devices
from wattune.telemetry.files.coverage import measured_facts
from wattune.telemetry.files.segments import read_tables
from wattune.telemetry.sampler.process import SamplerProcess
from wattune.units import s_to_ns
from wattune.workers.command.environment import node_environment
from wattune.workers.last_words import forget_dead, last_words, num_oom_kills

RENEW_INTERVAL_S: Final = 2.0
"""Seconds between renewals of a running sampler's lease; without one it lives 10 s."""

STOP_TIMEOUT_S: Final = 15.0

SPARE_CPUS: Final = 2
"""Processors a node must have beyond one for each rank before the sampler gets one of its own."""

POWER_LOOK_BACK_S: Final = 6.0
"""Age of the oldest readings that the first check of a running trial uses: a driver's history arrives up to 2 s late.
Each later check goes on where the one before ended, whenever it comes."""

POWER_LONGEST_S: Final = 60.0
"""Longest time that one check covers, where those before it could not tell the power."""

_SETTER: Final = ".setter"
NO_SETTINGS: Final[Mapping[str, Any]] = {}

_TEMPERATURES: Final = "temperatures"
_TEMPERATURE_S: Final = 1.2
"""Time a sampler runs for one reading of temperatures: its first batch reaches the file sooner."""


@dataclass(frozen=True, slots=True)
class NodeTelemetry:
    """Recording of one node's sampler during one trial. Its rows stay on the node, or go from there to the storage."""

    node: str
    manifest: Mapping[str, Any]
    losses: tuple[str, ...]
    """Descriptions of data that could not be read back; empty if the sampler closed its files."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of the files that the node wrote into the trial's folder or sent to the storage, by their place in it."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The same files by name, where the node does not see the folder and sent none."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the files that it sent to the storage, by their place in the folder."""
    unsent: str = ""
    """Reason that it sent none; empty if nobody asked it to."""

    def __reduce__(self) -> Any:
        """Sends the manifest compressed: a driver gets one of every node."""
        told = {one.name: getattr(self, one.name) for one in fields(self)}
        return _received, (zlib.compress(json.dumps(told.pop("manifest")).encode()), told)


def _received(facts: bytes, told: Mapping[str, Any]) -> NodeTelemetry:
    return NodeTelemetry(manifest=json.loads(zlib.decompress(facts)), **told)


@dataclass(frozen=True, kw_only=True)  # no slots: see `RankOutcome`
class Sensed:
    """Devices and processors of a node's running sampler."""

    device_names: Mapping[str, str]
    """Names of the devices that have a uuid, by uuid."""
    cpus: tuple[int, ...]
    """Processors it is bound to, which ranks keep off; empty if it shares theirs."""
    clock: ClockAnchor
    """Both clocks of the node, read when it told this."""


def _power_known_ns(tables: Mapping[str, pa.Table]) -> tuple[int, int] | None:
    """Wall times between which the power of every device was read; None if it is not read."""
    for tier, column in (("ring", "sensor_ns"), ("fast", "wall_ns")):
        if tier in tables and tables[tier].num_rows:
            found = tables[tier].group_by("device").aggregate([(column, "min"), (column, "max")])
            return int(max(found[f"{column}_min"].to_pylist())), int(min(found[f"{column}_max"].to_pylist()))
    return None


def spare_cpus(allowed: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Returns the processor a sampler gets for itself: the last one, if there are more than ranks need."""
    return tuple(allowed[-1:]) if num_ranks and len(allowed) >= num_ranks + SPARE_CPUS else ()


def leave_to_sampler(cpus: tuple[int, ...]) -> None:
    """Keeps every thread of this process off the processors that a sampler is bound to."""
    if not cpus:
        return
    rest = os.sched_getaffinity(0) - set(cpus)
    for task in Path("/proc/self/task").iterdir() if rest else ():
        with contextlib.suppress(ProcessLookupError):  # it ended since
            os.sched_setaffinity(int(task.name), rest)


def spool_folder(name: str) -> Path:
    """The folder where an actor keeps telemetry, one folder per trial, until it is in the study folder.

    Raises `NotPrivateError`: it, or a folder above it, is not this user's own.
    """
    return temporary_folder("spool", name)


class TelemetryActor:
    """Runs on the node it samples. Its sampler is a process of its own and outlives a restart of the actor."""

    def __init__(self, name: str, node: str, backends: Sequence[str]) -> None:
        """Samples nothing until `start`, but keeps alive a sampler of an earlier actor of this name."""
        self._spool, self._node, self._backends = spool_folder(name), node, list(backends)
        running = (SamplerProcess(folder) for folder in self._spool.glob("*/"))
        self._sampler = next((sampler for sampler in running if sampler.alive()), None)
        if self._sampler is not None:
            self._sampler.renew()
        setter = SettingsProcess(self._spool / _SETTER)
        self._setter = setter if setter.alive() else None
        self._set_for = ""
        """The trial whose settings the devices have."""
        self._num_oom_kills = num_oom_kills()
        self._cpus: Sequence[int] = ()
        """Processors of its sampler."""
        self._device_names: Mapping[str, str] | None = None
        """Names of the devices that have a uuid, as its latest sampler found them."""
        self._died: dict[str, str] = {}
        """Last words of samplers that ended before they were to, by trial."""
        self._power_checked_ns: dict[str, int] = {}
        """Wall time up to which the power of a running trial was checked."""
        self._lock = threading.Lock()
        threading.Thread(target=self._keep_lease, daemon=True, name="lease").start()

    def own(self, num_devices: int, values: Mapping[str, Sequence[Any]]) -> None:
        """Takes the node's devices for the study, to set them to values of axes; else says why not (`PlanError`)."""
        backend = next(name for name in self._backends if name in VENDORS)
        self._setter = SettingsProcess.start(
            self._spool / _SETTER, backend=backend, num_devices=num_devices, values=values
        )

    def _set(self, key: str, num_devices: int, settings: Mapping[str, Any]) -> None:
        """Has the devices set for a trial. A setter that died is replaced by one that restores what it left."""
        if self._setter is None and not settings:
            return
        if self._setter is None or not self._setter.alive():
            self.own(num_devices, {axis: [value] for axis, value in settings.items()})
        self._set_for = key
        assert self._setter is not None, "it was there or was made"
        self._setter.set(settings)

    def start(self, key: str, num_ranks: int = 0, settings: Mapping[str, Any] = NO_SETTINGS) -> Sensed:
        """Begins to sample for a trial, and removes files of an earlier attempt at it.

        Where an earlier trial was sampled, the devices are known, and nobody waits here for the sensors: see `ready`.
        `num_ranks` are those on the node; 0 leaves the sampler on all processors. Its devices get the `settings`.
        Raises `TelemetryError`: the sampler did not start, or devices were not set; the message holds the last words.
        """
        self._set(key, num_ranks, settings)
        cpus = spare_cpus(sorted(os.sched_getaffinity(0)), num_ranks)
        with self._lock:
            self._num_oom_kills, self._cpus = num_oom_kills(), cpus
            self._sampler = self._begin(key, cpus)
        names = self.ready(key) if self._device_names is None else self._device_names
        return Sensed(device_names=names, cpus=cpus, clock=ClockAnchor.now())

    def ready(self, key: str) -> Mapping[str, str]:
        """Waits until a trial's sensors are open; returns the names of the devices that have a uuid, by uuid.

        Raises `TelemetryError`: the sampler did not start; the message holds its last words.
        """
        sampler = SamplerProcess(self._spool / key)
        try:
            sampler.wait_until_ready()
        except TelemetryError:
            with self._lock:
                if sampler.refused or self._sampler is None or self._sampler.folder != sampler.folder:
                    raise
                # Killed, or crashed in a driver while workers open their devices: it costs a start, not a trial.
                self._sampler = self._begin(key, self._cpus)
            sampler.wait_until_ready()
        devices: Mapping[str, Mapping[str, Any]] = sampler.manifest()["devices"]
        self._device_names = {facts["uuid"]: name for name, facts in devices.items() if "uuid" in facts}
        return self._device_names

    def _begin(self, key: str, cpus: Sequence[int]) -> SamplerProcess:
        if self._sampler is not None:  # of a trial whose end comes after this start, or never
            ending = threading.Thread(target=self._sampler.end, args=(STOP_TIMEOUT_S,), daemon=True)
            ending.start()
            if self._sampler.folder == self._spool / key:
                ending.join()
        self._power_checked_ns.clear()
        self._died.pop(key, None)
        shutil.rmtree(self._spool / key, ignore_errors=True)
        # Its parent is the node's raylet. Another one may have the rest of the devices, and a sampler of its own.
        node = node_environment()
        choice = {"variables": {name: node[name] for name in VARIABLES if name in node}}
        return SamplerProcess.start(
            self._spool / key, node=self._node, backends=self._backends, cpus=cpus, timeout_s=0, choice=choice
        )

    def stop(self, key: str) -> None:
        """Ends a trial's sampling, also if this actor was restarted in between."""
        sampler = SamplerProcess(self._spool / key)
        with self._lock:
            if not sampler.alive() and sampler.folder.exists():
                kills = num_oom_kills() - self._num_oom_kills
                self._died[key] = sampler.last_words() + (
                    f"\n  out of memory ended {kills} process(es)" if kills else ""
                )
            if self._sampler is not None and self._sampler.folder == sampler.folder:
                self._sampler = None
        sampler.end(STOP_TIMEOUT_S)  # the next one starts meanwhile: it waits for the locks of the devices
        if self._set_for == key:  # else the next trial has begun
            self._set("", 0, {})

    def recording(
        self, key: str, mark: Path, used: Mapping[str, Collection[str]] | None = None, url: str = ""
    ) -> NodeTelemetry:
        """Moves what a trial's sampler recorded to the trial's folder, while the sampler of another may run.

        The `mark` is a file that the driver made there: a node that does not see it does not share the folder, and
        sends the files to the storage's `url`, else returns them. Asked again, it does the same again. Where `used`
        devices are given, by node, of those alone. Raises `TelemetryError`: it ended before its sensors were open.
        """
        folder = self._spool / key
        manifest = SamplerProcess(folder).manifest()
        tables, losses = read_tables(folder)
        manifest["measured"] = measured_facts(tables)
        if (words := self._died.get(key)) and not manifest["closed"]:
            manifest["died"] = words
        if used is not None:
            tables, manifest = of_devices(tables, manifest, {HOST, *used.get(self._node, ())})
        told, files = NodeTelemetry(node=self._node, manifest=manifest, losses=tuple(losses)), tier_files(tables)
        if mark.exists():
            return replace(told, digests=MeasuredFolder(mark.parent).write_files(self._node, files))
        if not url:
            return replace(told, files=files)
        named = {f"telemetry/{self._node}/{name}": content for name, content in files.items()}
        try:
            _storage(url).send_ahead(place_of(mark.parent), named)
        except (TrackingError, PlanError) as error:
            return replace(told, files=files, unsent=str(error))
        digests = {name: sha256(content).hexdigest() for name, content in named.items()}
        return replace(told, digests=digests, sent={name: len(content) for name, content in named.items()})

    def node_power_w(self, key: str) -> float | None:
        """Highest 1 s mean of the node's device power in a trial that runs, since the last call that could tell it.

        It is read from the sampler's files, so it is up to 2 s late. None if the devices' power is not read.
        """
        now, checked_ns = ClockAnchor.now(), self._power_checked_ns.get(key)
        since_ns = now.mono_ns - s_to_ns(POWER_LOOK_BACK_S)
        if checked_ns is not None:  # means of 1 s may begin before it; a reading is never older than its sample
            checked_ns = max(checked_ns - s_to_ns(LONGEST_S), now.wall_ns - s_to_ns(POWER_LONGEST_S))
            since_ns = min(since_ns, now.mono_ns - (now.wall_ns - checked_ns))
        tables, _ = read_tables(self._spool / key, start_mono_ns=since_ns)
        known_ns = _power_known_ns(tables)
        if known_ns is None:
            return None
        begin_ns, end_ns = known_ns
        if checked_ns is not None:  # it seems to lie ahead where the wall clock was set back
            begin_ns = max(begin_ns, min(checked_ns, end_ns - s_to_ns(LONGEST_S)))
        manifest = SamplerProcess(self._spool / key).manifest()
        power_w = node_power_peak_w(tables, self._node, manifest, (begin_ns, end_ns))
        if power_w is not None:
            self._power_checked_ns[key] = end_ns
        return power_w

    def temperatures_c(self) -> dict[str, float]:
        """The latest temperature of every device that has one, by the device's name.

        If no sampler runs at the moment, one runs for a second.
        """
        with self._lock:
            running = self._sampler
            sampler = running or self._begin(_TEMPERATURES, ())
            if running is None:
                sampler.wait_until_ready()
                time.sleep(_TEMPERATURE_S)
                sampler.stop(STOP_TIMEOUT_S)
            tables, _ = read_tables(sampler.folder)
            if running is None:
                shutil.rmtree(sampler.folder, ignore_errors=True)
        fast = tables.get("fast")
        if fast is None or "gpu_temp_c" not in fast.column_names:
            return {}
        latest = zip(fast["device"].to_pylist(), fast["gpu_temp_c"].to_pylist(), strict=True)
        return {name: float(value) for name, value in latest if value is not None}

    def fate(self, pid: int) -> tuple[str, int]:
        """Returns the last words of a process that a fatal signal of its own ended, empty for others.

        And the number of processes that the kernel ended because memory ran out since the trial began.
        """
        return last_words(pid), num_oom_kills() - self._num_oom_kills

    def mono_ns(self) -> int:
        """This node's monotonic clock."""
        return time.monotonic_ns()

    def forget(self, key: str) -> None:
        """Removes a trial's spool once its telemetry is in the study folder."""
        shutil.rmtree(self._spool / key, ignore_errors=True)

    def release(self) -> None:
        """Ends a running sampler and removes its recording: the study ends, and its trial is run again."""
        with self._lock:
            for process in (self._sampler, self._setter):
                if process is not None:
                    process.end(STOP_TIMEOUT_S)
            self._sampler = self._setter = None
        forget_dead()
        # Also recordings of a driver that was killed between `stop` and `forget`.
        shutil.rmtree(self._spool, ignore_errors=True)

    def _keep_lease(self) -> None:
        while True:
            time.sleep(RENEW_INTERVAL_S)
            with self._lock:
                for process in (self._sampler, self._setter):
                    # If its folder is gone `stop` reports it. This thread goes on for later samplers.
                    with contextlib.suppress(TelemetryError):
                        if process is not None:
                            process.renew()


_storage = cache(RemoteStorage)  # it remembers for a minute that a store does not answer


def place_of(folder: Path) -> str:
    """Returns the place of a trial's folder in the storage."""
    return "/".join(folder.parts[-3:])


EXCHANGE_S: Final = 10.0
"""Longest that a node which has just answered may take to tell its clock."""
MOST_EXCHANGES, UNCERTAINTY_NS = 8, 500_000
"""Times that a clock is asked, and the uncertainty that will do."""
KEPT_NS, DRIFT = 100 * 10**9, 1e-4
"""Time that an exchange is used again, and twice the drift that quartz is sold with: 10 ms, of the quarter of a second
that results need (`wattune.analysis.quality`, `clock_uncertain`)."""

NO_OFFSET: Final = {"clock_offset_ns": 0, "clock_offset_uncertainty_ns": 0}


class NodeClocks:
    """Offsets of nodes' clocks from this process's: of those that nobody sets, which hold for many trials."""

    def __init__(self) -> None:
        """Knows none."""
        self._known: dict[str, tuple[int, int, int]] = {}
        """Uncertainty, offset and own time of the best exchange, by Ray's id of the node."""

    def offset(self, node_id: str, actor: ActorHandle, told: ClockAnchor) -> dict[str, int]:
        """Estimates how far a node's wall clock is ahead, as the manifest has it; `told` are both its clocks."""
        known = self._known.get(node_id)
        if known is None or time.monotonic_ns() - known[2] > KEPT_NS:
            known = self._known[node_id] = _exchanged(actor)
        here = ClockAnchor.now()
        uncertainty_ns, ahead_ns, at_ns = known
        return {
            "clock_offset_ns": ahead_ns + (told.wall_ns - told.mono_ns) - (here.wall_ns - here.mono_ns),
            "clock_offset_uncertainty_ns": uncertainty_ns + round(DRIFT * (here.mono_ns - at_ns)),
        }


def _exchanged(actor: ActorHandle) -> tuple[int, int, int]:
    """Asks for a node's clock; returns half of the shortest round trip, how far the clock is ahead, and when that was.

    The remote reading lies somewhere inside the round trip; its middle is the estimate (Cristian, "Probabilistic clock
    synchronization", Distributed Computing 3, 1989).
    """
    found = []
    for _ in range(MOST_EXCHANGES):
        begun_ns = time.monotonic_ns()
        remote_ns = ray.get(actor.mono_ns.remote(), timeout=EXCHANGE_S)
        half_ns = (time.monotonic_ns() - begun_ns) // 2
        found.append((half_ns, remote_ns - begun_ns - half_ns, begun_ns))
        if half_ns <= UNCERTAINTY_NS:
            break
    return min(found)


def actor_name(node: Node, backends: Sequence[str], job_id: str) -> str:
    """Name of a node's actor, different for each job, with which it ends.

    The backends are part of it: trials of one study may need other sensors than a running actor reads.
    """
    # It names a folder too, and a backend may have an argument, such as the path of a recording to replay.
    read = re.sub(r"[^\w.-]", "_", "-".join(backends))
    return f"telemetry-{read}-{job_id}-{node.node_id}"


def telemetry_actor(node: Node, backends: Sequence[str]) -> ActorHandle:
    """Returns the actor of a node, and starts it if it does not run. It ends with the job."""
    name = actor_name(node, backends, ray.get_runtime_context().get_job_id())
    known = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "max_restarts": -1, "max_task_retries": 2}
    # Two calls at once: a recording is read while the next one begins.
    pinned = on_node(TelemetryActor, node.node_id, **known, max_concurrency=2)
    return pinned.remote(name, node.name, list(backends))

"""One actor per node: keeps that node's sampler process alive during a trial and brings its tables home."""

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from wattune.clock import ClockAnchor
from wattune.errors import TelemetryError
from wattune.orchestrate.cluster import NAMESPACE, Node
from wattune.orchestrate.power_limit import node_power_peak_w
from wattune.telemetry.backend import OTHER_PROCESSES
from wattune.telemetry.files.coverage import measured_facts
from wattune.telemetry.files.segments import read_tables
from wattune.telemetry.sampler.process import SamplerProcess
from wattune.units import s_to_ns

RENEW_INTERVAL_S: Final = 2.0
"""How often a running sampler's lease is renewed; it lives 10 s without."""

STOP_TIMEOUT_S: Final = 15.0

SPARE_CPUS: Final = 2
"""Processors a node must have beyond one for each rank before one of them is the sampler's alone."""

POWER_LOOK_BACK_S: Final = 6.0
"""How far back a running trial's readings are looked at: a driver's power history arrives up to 2 s late."""

POWER_WINDOW_S: Final = 2.5
"""Of them, what is judged: looked at once a second, no second of a trial is left out."""

_TEMPERATURES: Final = "temperatures"
_TEMPERATURE_S: Final = 1.2
"""How long a sampler runs for one look at temperatures: longer than the first batch takes to reach its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTelemetry:
    """What one node's sampler recorded during one trial."""

    node: str
    tables: Mapping[str, pa.Table]
    manifest: Mapping[str, Any]
    losses: tuple[str, ...]
    """What could not be read back, in words; empty when the sampler closed its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensed:
    """What a node's sampler reads, once it does."""

    device_names: Mapping[str, str]
    """The names of the devices that have an identity, by uuid."""
    cpus: tuple[int, ...]
    """Processors it is bound to, and ranks keep off; none where it has to share theirs."""


def _power_known_until_ns(tables: Mapping[str, pa.Table]) -> int | None:
    """Until when the power of every device was read, in wall time; None where it is not."""
    for tier, column in (("ring", "sensor_ns"), ("fast", "wall_ns")):
        if tier in tables and tables[tier].num_rows:
            latest = tables[tier].group_by("device").aggregate([(column, "max")])[f"{column}_max"]
            return int(min(latest.to_pylist()))
    return None


def spare_cpus(allowed: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """The processor a sampler gets for itself: the last one, where there are more than ranks need."""
    return tuple(allowed[-1:]) if num_ranks and len(allowed) >= num_ranks + SPARE_CPUS else ()


def without_own_processes(manifest: Mapping[str, Any], pids: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """A node's manifest in which the trial's own workers, warm from before it to after it, are no strangers.

    A container may hide which process is which: the driver then says ids no process here has. One process for each
    worker is taken for it, the largest first: a training process holds more than a viewer does.

    Args:
        manifest: What the sampler knew.
        pids: The trial's workers on this node, by the device they drive.
    """
    devices = {}
    for name, facts in manifest.get("devices", {}).items():
        own, known = set(pids.get(name, ())), dict(facts)
        for when in ("at_start", "at_end"):
            found = known.get(when, {}).get(OTHER_PROCESSES)
            if own and found:
                mine = [process for process in found if process["pid"] in own]
                if not mine:
                    by_size = sorted(found, key=lambda process: -process.get("memory_used_bytes", 0))
                    mine = by_size[: len(own)]
                known[when] = {**known[when], OTHER_PROCESSES: [process for process in found if process not in mine]}
        devices[name] = known | ({"own_processes": sorted(own)} if own else {})
    return {**manifest, "devices": devices}


def spool_folder(name: str) -> Path:
    """Where the actor of that name keeps trials' telemetry, each in a folder, until it is in the study folder."""
    return Path(tempfile.gettempdir()) / f"wattune-{os.getuid()}" / "spool" / name


class TelemetryActor:
    """Runs on the node it samples. Its sampler is a process of its own and outlives a restart of the actor."""

    def __init__(self, name: str, node: str, backends: Sequence[str]) -> None:
        """Samples nothing until `start`, unless an actor of this name died while its sampler ran: that is kept alive.

        Args:
            name: The actor's name, the same after a restart.
            node: The node's name in tables.
            backends: What to read.
        """
        self._spool, self._node, self._backends = spool_folder(name), node, list(backends)
        running = (SamplerProcess(folder) for folder in self._spool.glob("*/"))
        self._sampler = next((sampler for sampler in running if sampler.alive()), None)
        if self._sampler is not None:
            self._sampler.renew()
        self._lock = threading.Lock()
        threading.Thread(target=self._keep_lease, daemon=True, name="lease").start()

    def start(self, key: str, num_ranks: int = 0) -> Sensed:
        """Begins sampling for a trial; what an earlier attempt at it left behind is removed.

        Args:
            key: The trial's name in the spool.
            num_ranks: How many ranks will run on the node; 0 leaves the sampler on all processors.

        Raises:
            TelemetryError: The sampler did not start; the message holds its last words.
        """
        cpus = spare_cpus(sorted(os.sched_getaffinity(0)), num_ranks)
        with self._lock:
            self._sampler = self._start(key, cpus)
            devices: Mapping[str, Mapping[str, Any]] = self._sampler.manifest()["devices"]
        return Sensed(
            device_names={facts["uuid"]: name for name, facts in devices.items() if "uuid" in facts}, cpus=cpus
        )

    def _start(self, key: str, cpus: Sequence[int]) -> SamplerProcess:
        if self._sampler is not None:
            self._sampler.end(STOP_TIMEOUT_S)
        shutil.rmtree(self._spool / key, ignore_errors=True)
        return SamplerProcess.start(self._spool / key, node=self._node, backends=self._backends, cpus=cpus)

    def stop(self, key: str) -> NodeTelemetry:
        """Ends sampling and reads back what was recorded, also after this actor was restarted in between."""
        folder = self._spool / key
        with self._lock:
            sampler = self._sampler or SamplerProcess(folder)
            manifest = sampler.stop(STOP_TIMEOUT_S)
            self._sampler = None
        tables, losses = read_tables(folder)
        manifest["measured"] = measured_facts(tables)
        return NodeTelemetry(node=self._node, tables=tables, manifest=manifest, losses=tuple(losses))

    def node_power_w(self, key: str) -> float | None:
        """Highest 1 s mean of the node's device power in the last seconds of a trial that runs.

        Read from the sampler's files, so it is up to 2 s late. None where the devices' power is not read.
        """
        tables, _ = read_tables(self._spool / key, start_mono_ns=time.monotonic_ns() - s_to_ns(POWER_LOOK_BACK_S))
        end_ns = _power_known_until_ns(tables)
        if end_ns is None:
            return None
        manifest = SamplerProcess(self._spool / key).manifest()
        return node_power_peak_w(tables, self._node, manifest, (end_ns - s_to_ns(POWER_WINDOW_S), end_ns))

    def temperatures_c(self) -> dict[str, float]:
        """The latest temperature of every device that has one, by the device's name.

        Where nothing is sampled at the moment, a sampler runs for a second.
        """
        with self._lock:
            running = self._sampler
            sampler = running or self._start(_TEMPERATURES, ())
            if running is None:
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

    def wall_ns(self) -> int:
        """This node's wall clock."""
        return time.time_ns()

    def forget(self, key: str) -> None:
        """Removes a trial's spool once its telemetry is in the study folder."""
        shutil.rmtree(self._spool / key, ignore_errors=True)

    def release(self) -> None:
        """Ends a sampler that runs and removes what was recorded: the study ends, and its trial is run again."""
        with self._lock:
            sampler, self._sampler = self._sampler, None
            if sampler is not None:
                sampler.end(STOP_TIMEOUT_S)
        # Also what a driver that was ended had stopped and not asked to be forgotten.
        shutil.rmtree(self._spool, ignore_errors=True)

    def _keep_lease(self) -> None:
        while True:
            time.sleep(RENEW_INTERVAL_S)
            with self._lock:
                if self._sampler is not None:
                    # Where its folder is gone `stop` says so, and later samplers need this thread.
                    with contextlib.suppress(TelemetryError):
                        self._sampler.renew()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far a node's wall clock is ahead of this process's."""

    clock_offset_ns: int
    clock_offset_uncertainty_ns: int
    """Half the round trip of the best exchange: the true offset is within it."""


def clock_offset(actor: ActorHandle, num_exchanges: int = 8) -> ClockOffset:
    """Estimates a node's clock offset from the exchange with the shortest round trip.

    The remote reading lies somewhere inside the round trip; its middle is the estimate (Cristian, "Probabilistic clock
    synchronization", Distributed Computing 3, 1989).
    """
    best: ClockOffset | None = None
    for _ in range(num_exchanges):
        here = ClockAnchor.now()
        remote_ns = ray.get(actor.wall_ns.remote())
        half_ns = (time.monotonic_ns() - here.mono_ns) // 2
        if best is None or half_ns < best.clock_offset_uncertainty_ns:
            middle_ns = here.wall_ns + half_ns
            best = ClockOffset(clock_offset_ns=remote_ns - middle_ns, clock_offset_uncertainty_ns=half_ns)
    assert best is not None, "at least one exchange"
    return best


def actor_name(node: Node, backends: Sequence[str], job_id: str) -> str:
    """The name of a node's actor: its own for each job, with which it ends.

    Trials of one study may need other sensors: an actor that is there keeps those it was made with.
    """
    return f"telemetry-{'-'.join(backends)}-{job_id}-{node.node_id}"


def telemetry_actor(node: Node, backends: Sequence[str]) -> ActorHandle:
    """The actor of a node, started now if it is not running; it ends with the job.

    Args:
        node: Where it runs and what it samples.
        backends: Which sensors it reads.
    """
    name = actor_name(node, backends, ray.get_runtime_context().get_job_id())
    remote_class = ray.remote(TelemetryActor)
    options = remote_class.options(
        name=name,
        namespace=NAMESPACE,
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=2,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
    )
    return options.remote(name, node.name, list(backends))

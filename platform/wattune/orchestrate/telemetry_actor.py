"""One actor per node: keeps that node's sampler process alive during a trial and brings its tables home."""

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
from wattune.orchestrate.cluster import NAMESPACE, Node
from wattune.telemetry.facts import measured_facts
from wattune.telemetry.sampler import SamplerProcess
from wattune.telemetry.store import read_tables

RENEW_INTERVAL_S: Final = 2.0
"""How often a running sampler's lease is renewed; it lives 10 s without."""

STOP_TIMEOUT_S: Final = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTelemetry:
    """What one node's sampler recorded during one trial."""

    node: str
    tables: Mapping[str, pa.Table]
    manifest: Mapping[str, Any]
    losses: tuple[str, ...]
    """What could not be read back, in words; empty when the sampler closed its files."""


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

    def start(self, key: str) -> dict[str, str]:
        """Begins sampling for a trial; what an earlier attempt at it left behind is removed.

        Returns:
            The names of the devices that have an identity, by uuid.

        Raises:
            TelemetryError: The sampler did not start; the message holds its last words.
        """
        folder = self._spool / key
        with self._lock:
            if self._sampler is not None:
                self._sampler.stop(STOP_TIMEOUT_S)
            shutil.rmtree(folder, ignore_errors=True)
            self._sampler = SamplerProcess.start(folder, node=self._node, backends=self._backends)
            devices: Mapping[str, Mapping[str, Any]] = self._sampler.manifest()["devices"]
        return {facts["uuid"]: name for name, facts in devices.items() if "uuid" in facts}

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

    def wall_ns(self) -> int:
        """This node's wall clock."""
        return time.time_ns()

    def forget(self, key: str) -> None:
        """Removes a trial's spool once its telemetry is in the study folder."""
        shutil.rmtree(self._spool / key, ignore_errors=True)

    def _keep_lease(self) -> None:
        while not threading.Event().wait(RENEW_INTERVAL_S):
            with self._lock:
                if self._sampler is not None:
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


def telemetry_actor(node: Node, backends: Sequence[str]) -> ActorHandle:
    """The actor of a node, started now if it is not running; it ends with the job.

    Args:
        node: Where it runs and what it samples.
        backends: Which sensors it reads.
    """
    # Trials of one study may need other sensors: an actor that is there keeps those it was made with.
    name = f"telemetry-{'-'.join(backends)}-{node.node_id}"
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

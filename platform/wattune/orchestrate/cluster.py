"""Connecting to Ray: a cluster that exists, or one of our own on this machine; and what nodes it has."""

import os
import secrets
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

import wattune
from wattune.catalog.hardware import ClusterSpec
from wattune.errors import EngineError

NAMESPACE: Final = "wattune"
"""Ray namespace of every named actor of ours."""

CONNECT_TIMEOUT_S: Final = 10.0

_WORKER_SETTINGS: Final = {
    # An unsatisfiable placement group is retried for ever by default; see `run_trial`.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",
    # Trials end by themselves; where Tune has to end one, its workers must not hold their devices for ten minutes.
    "TUNE_FORCE_TRIAL_CLEANUP_S": "10",
    # Result files are the study folder's business.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    # Progress is shown by whoever listens to the study.
    "RAY_AIR_NEW_OUTPUT": "0",
    # Ctrl-C is ours: the study folder is brought in order before Ray goes.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of the cluster."""

    node_id: str
    """Ray's id."""
    name: str
    """The name in telemetry, tables and folders: the host's, numbered where two nodes share it."""
    address: str
    """Ray's resource that pins something to the node."""
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A connection to Ray, and the nodes that were alive when it was made."""

    nodes: tuple[Node, ...]
    driver_node_id: str

    @property
    def driver_node(self) -> Node:
        """The node this process runs on, where studies are written."""
        return next(node for node in self.nodes if node.node_id == self.driver_node_id)

    def resources_per_rank(self, spec: ClusterSpec) -> dict[str, float]:
        """What Ray reserves for one rank: its device, and a share of the node's processors.

        Raises:
            EngineError: The cluster does not have the nodes and devices.
        """
        wanted = spec.devices_per_node
        gpus = spec.device != "cpu"
        fitting = [node for node in self.nodes if (node.num_gpus >= wanted if gpus else node.num_cpus > 0)]
        if len(fitting) < spec.num_nodes:
            have = ", ".join(f"{node.name}: {node.num_cpus:g} CPU, {node.num_gpus:g} GPU" for node in self.nodes)
            raise EngineError(
                f"{spec.label} needs {spec.num_nodes} node(s) with {wanted} device(s) each; the cluster has {have}; "
                "shrink `cluster` in the space, or start the missing nodes"
            )
        # Ranks may outnumber processors (a laptop runs four on two); a tenth stays free for Ray's own actors.
        cpus = min(1.0, round(0.9 * min(node.num_cpus for node in fitting) / wanted, 4))
        return {"CPU": cpus, "GPU": 1.0} if gpus else {"CPU": cpus}


@contextmanager
def connect(address: str | None = None) -> Iterator[Cluster]:
    """Connects to a Ray cluster, or starts one here, and disconnects at the end.

    Args:
        address: A cluster's address. None is the cluster of the environment (`RAY_ADDRESS`, set inside a Ray job),
            else a new one on this machine.

    Raises:
        EngineError: The cluster cannot be reached or started.
    """
    target = address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.update({name: os.environ.get(name, value) for name, value in _WORKER_SETTINGS.items()})
    try:
        if ray.is_initialized():  # a script that connected by itself keeps its connection
            yield _inventory()
            return
        if target is None:
            _start_local()
        else:
            _join(target)
    except (OSError, RuntimeError) as error:
        where = f"the Ray cluster at {target}" if target else "a Ray cluster on this machine"
        raise EngineError(f"{where} did not answer: {str(error).splitlines()[0]}; check the address") from error
    try:
        yield _inventory()
    finally:
        ray.shutdown()


def _start_local() -> None:
    if "RAY_AUTH_MODE" not in os.environ:
        # A token of our own: without one Ray writes its token to the home folder, which turns authentication on for
        # every later `ray start` there, and open mode would let anyone who reaches the ports run code.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Ray read both when it was imported; what makes it read them again is not public (as of 2.60).
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
    # Workers of a local cluster inherit the environment; this is how they import what this process imported.
    paths = [str(_package_folder().parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    with _quiet_interrupt():
        ray.init(
            address="local",
            namespace=NAMESPACE,
            include_dashboard=True,  # without it Ray Train cannot clean up after a trial that Tune ended (ray#54305)
            log_to_driver=False,
            logging_level="ERROR",
        )


def _join(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        # Ray itself goes on asking an address nobody answers at for minutes.
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    ray.init(
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"py_modules": [str(_package_folder())], "env_vars": _WORKER_SETTINGS},
    )


@contextmanager
def _quiet_interrupt() -> Iterator[None]:
    """Keeps a Ctrl-C during start-up for after it: Ray leaves processes behind when its start is interrupted."""
    pending: list[int] = []
    try:
        previous = signal.signal(signal.SIGINT, lambda number, _frame: pending.append(number))
    except ValueError:  # not the main thread: signals do not arrive here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending:
            raise KeyboardInterrupt


def _package_folder() -> Path:
    return Path(wattune.__file__).parent


def _inventory() -> Cluster:
    alive = [node for node in ray.nodes() if node["Alive"]]
    shared = Counter(node["NodeManagerHostname"] for node in alive)
    seen: Counter[str] = Counter()
    nodes = []
    for node in sorted(alive, key=lambda node: node["NodeID"]):
        host = node["NodeManagerHostname"]
        name = host if shared[host] == 1 else f"{host}-{seen[host]}"
        seen[host] += 1
        nodes.append(
            Node(
                node_id=node["NodeID"],
                name=name,
                address=f"node:{node['NodeManagerAddress']}",
                num_cpus=node["Resources"].get("CPU", 0.0),
                num_gpus=node["Resources"].get("GPU", 0.0),
            )
        )
    return Cluster(nodes=tuple(nodes), driver_node_id=ray.get_runtime_context().get_node_id())

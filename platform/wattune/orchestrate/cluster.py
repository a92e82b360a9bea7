"""Connects to Ray, on an existing cluster or a new one on this machine, and lists its nodes."""

import atexit
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import ray
import ray.util.client
from ray._private.ray_constants import DASHBOARD_ADDRESS
from ray.experimental import internal_kv

from wattune import forced_exit
from wattune.catalog.hardware import DEVICES, ClusterSpec, device_of_accelerator, device_of_product
from wattune.deadline import within
from wattune.errors import EngineError, PlanError
from wattune.orchestrate import lost_cluster, ray_settings
from wattune.orchestrate.node_products import ask_products, own_products
from wattune.orchestrate.ray_folder import end_processes, ray_folder, remove_by_force, temporary_files_in

NAMESPACE: Final = "wattune"
"""Ray namespace of wattune's named actors."""

CONNECT_TIMEOUT_S: Final = 10.0

NODE_START_S: Final = 120.0
"""Longest a node that wattune starts may take to come up."""

_NODE_LOOK_S: Final = 0.1

KNOCK_S: Final = 2.0
"""Longest a node's raylet may take to accept a connection; a live one needs milliseconds."""

SHUTDOWN_S: Final = 4.0
"""Longest Ray may take to end a cluster of our own; then its processes are killed."""

DEVICE_LABEL: Final = "wattune.io/device"
"""Ray node label with the catalog name of a node's devices; it overrides what Ray detected."""

PRODUCT_LABEL: Final = "wattune.io/product"
"""Ray node label with the product name of a node's GPUs, its separators as hyphens; without it the node is asked."""

DOMAIN_LABEL: Final = "wattune.io/domain"
"""Ray node label of nodes that share power or air, such as a rack. Without it every host is its own domain."""

_OUTSIDE: Final = ("ray://", "http://", "https://")
"""Beginnings of addresses of Ray Client, and of the dashboard, to which jobs are submitted."""

_ACCELERATOR_LABEL: Final = "ray.io/accelerator-type"
_ACCELERATOR_RESOURCE: Final = "accelerator_type:"


@dataclass(frozen=True, kw_only=True)  # no slots: see `RankOutcome`
class Node:
    """One machine of the cluster."""

    node_id: str
    """Ray's id."""
    name: str
    """The name in telemetry, tables and folders: the host's, numbered if two nodes share a host."""
    num_cpus: float
    num_gpus: float
    host: str = ""
    """Name of the machine; empty means `name`."""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Ray's labels of the node, including an accelerator that Ray detected."""
    products: tuple[str, ...] = ()
    """Product names of its GPUs, as their driver or `PRODUCT_LABEL` gives them; empty where nobody knows."""

    @property
    def device(self) -> str | None:
        """Catalog name of its devices; None where they are in no catalog, of several kinds, or labelled wrongly.

        Product names decide, since PCIe and NVL boards have Ray's label of SXM ones.
        """
        labelled = self.labels.get(DEVICE_LABEL)
        if not self.num_gpus:
            return labelled or "cpu"
        if labelled is not None:
            return None if self._contradicts(labelled) else labelled
        if self.products:
            kinds = {device_of_product(product) for product in self.products}
        else:
            kinds = {device_of_accelerator(self.labels.get(_ACCELERATOR_LABEL, ""))}
        kind = kinds.pop() if len(kinds) == 1 else None
        return kind.name if kind is not None else None

    def _contradicts(self, labelled: str) -> bool:
        spec = DEVICES.get(labelled)
        names_products = spec is not None and bool(spec.product_names)
        return names_products and not all(map(DEVICES[labelled].is_product, self.products))

    @property
    def domain(self) -> str:
        """Its power or thermal domain: trials of one domain never overlap."""
        return self.labels.get(DOMAIN_LABEL) or self.host or self.name

    def __str__(self) -> str:
        """Describes what decides whether the node fits a trial."""
        if not self.num_gpus:
            kind = "" if self.device == "cpu" else f" ({self.device})"
            return f"{self.name}: {self.num_cpus:g} CPU{kind}"
        return f"{self.name}: {self.num_cpus:g} CPU, {self.num_gpus:g} GPU ({self.device or self._why_unknown()})"

    def _why_unknown(self) -> str:
        products, labelled = " and ".join(self.products), self.labels.get(DEVICE_LABEL)
        if labelled is not None:
            return f"labelled {labelled}, its driver says {products}; correct or remove the label {DEVICE_LABEL}"
        if products:
            return f"kind unknown, its driver says {products}; a device is added in wattune/catalog/devices.toml"
        detected = self.labels.get(_ACCELERATOR_LABEL) or "nothing"
        return f"kind unknown, Ray detected {detected}; label it {DEVICE_LABEL}=NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A connection to Ray, and nodes alive when it was made: all of them, or those a trial may use."""

    nodes: tuple[Node, ...]
    driver_node_id: str
    """Of the node this process runs on, where studies are written."""
    tags: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Ray's settings, kept with every result."""
    url: str = ""
    """Storage that nodes which do not see the study's folder send their telemetry to; empty where there is none."""

    def only(self, nodes: Sequence[Node]) -> "Cluster":
        """The part of the cluster that consists of these nodes, in this order."""
        return replace(self, nodes=tuple(nodes))

    def fitting(self, spec: ClusterSpec) -> list[Node]:
        """The nodes that fit a trial, by name.

        GPUs are matched by kind, never by number alone. A trial on `cpu` gets nodes without GPUs, or the processors of
        GPU nodes if the cluster has no others.
        """
        if spec.device == "cpu":
            with_cpus = [
                node for node in self.nodes if node.num_cpus > 0 and node.labels.get(DEVICE_LABEL) in (None, "cpu")
            ]
            able = [node for node in with_cpus if node.device == "cpu"] or with_cpus
        else:
            enough = [node for node in self.nodes if node.num_gpus >= spec.devices_per_node]
            able = [node for node in enough if _has(node, spec)]
        return sorted(able, key=lambda node: node.name)

    def resources_per_rank(self, spec: ClusterSpec) -> dict[str, float]:
        """Resources Ray reserves for one rank: its device, and a share of the node's processors.

        Raises `EngineError`: the cluster lacks the nodes or devices.
        """
        fitting = self.fitting(spec)
        if len(fitting) < spec.num_nodes:
            raise EngineError(
                f"{self.missing(spec)}; shrink `cluster` in the space, start the missing nodes, label nodes of that "
                f"kind {DEVICE_LABEL}={spec.device}, or wait for them by --wait-nodes 30m"
            )
        cpus = min(self.cpus_per_rank(spec, node) for node in fitting)
        return {"CPU": cpus} if spec.device == "cpu" else {"CPU": cpus, "GPU": 1.0}

    @staticmethod
    def cpus_per_rank(spec: ClusterSpec, node: Node) -> float:
        """Processors that Ray reserves for each rank of a trial on a node."""
        # Ranks may outnumber processors (a laptop runs four on two). A tenth stays free for Ray's own actors.
        return min(1.0, round(0.9 * node.num_cpus / spec.devices_per_node, 4))

    def missing(self, spec: ClusterSpec) -> str:
        """Describes the nodes a trial wants and the nodes the cluster has."""
        return f"{spec.needs}; the cluster has {', '.join(map(str, self.nodes)) or 'no node'}"


def _has(node: Node, spec: ClusterSpec) -> bool:
    """Tells whether a node has the devices of a trial: by its catalog's name, or of a space's own by their products."""
    own = spec.own_device
    if own is None or own.name != spec.device or DEVICE_LABEL in node.labels:
        return node.device == spec.device
    return bool(node.products) and all(map(own.is_product, node.products))


def is_here(spec: ClusterSpec) -> bool:
    """Returns whether this machine's GPUs are those of a specification, on one node."""
    return spec.num_nodes == 1 and all(map(spec.rank_device.is_product, own_products() or ("none",)))


@contextmanager
def connect(address: str | None = None, beside: AbstractContextManager[object] | None = None) -> Iterator[Cluster]:
    """Connects to a Ray cluster, or starts one here, `beside` it, and disconnects at the end.

    Without an address it is the cluster in `RAY_ADDRESS`, which a Ray job sets, or else a new one on this machine.
    Raises `EngineError`: the cluster cannot be reached or started, `PlanError`: the address is one that takes jobs,
    from outside of the cluster.
    """
    target = address or os.environ.get("RAY_ADDRESS")
    if ray.util.client.ray.is_connected() or (not ray.is_initialized() and (target or "").startswith(_OUTSIDE)):
        raise PlanError(
            f"{target or 'the connection by ray://'}: a study's driver runs on the cluster, not outside of it; use "
            "`ray job submit --address http://HEAD:8265 --working-dir . -- wattune run SPACE`, or on a node of the "
            "cluster --address HEAD:6379"
        )
    ray_settings.apply(ray_settings.JOB_SETTINGS)
    try:
        Path.cwd()
    except FileNotFoundError:
        raise PlanError("the folder that this was started in is gone; change to one that exists") from None
    if ray.is_initialized():  # a script that connected by itself keeps its connection
        with _watched():
            yield _inventory(ours=False)
        return
    with ray_folder() if target is None else nullcontext() as folder:
        if folder is None:
            try:
                _reach(target, None)
                with _watched():
                    yield _inventory(ours=False)
            finally:
                (_disconnect_in_time if lost_cluster.found() else _disconnect)()
            return
        with forced_exit.last_act(partial(remove_by_force, folder)):
            try:
                with beside or nullcontext(), lost_cluster.watched():
                    _reach(None, folder)
                    yield _inventory(ours=True)
            finally:
                _end_local(folder)


def _disconnect() -> None:
    """Disconnects from Ray while no garbage is collected.

    Ray 2.60 ends the process with 1 where a thread frees a reference to an object while another one disconnects
    (`GetCoreWorker` in `core_worker_process.cc`). The collector frees what it finds in whichever thread allocates.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        ray.shutdown()
    finally:
        if collects:
            gc.enable()


def _watched() -> AbstractContextManager[None]:
    return lost_cluster.watched(partial(is_answering, own_addresses()))


def _disconnect_in_time() -> None:
    """Disconnects from Ray, which asks dead processes of its own for minutes."""
    try:
        within(SHUTDOWN_S, _disconnect, name="ray shutdown")
    except TimeoutError:
        atexit.unregister(ray.shutdown)  # Ray's own hook: at the process's end it would ask them again


def _end_local(folder: Path) -> None:
    """Ends a cluster of our own, and whatever outlives it."""
    try:
        _disconnect_in_time()
    finally:
        end_processes(folder)


def is_answering(addresses: Sequence[tuple[str, int]]) -> bool:
    """Returns whether something listens at every address."""
    try:
        for address in addresses:
            socket.create_connection(address, KNOCK_S).close()
    except OSError:
        return False
    return True


def own_addresses() -> tuple[tuple[str, int], ...]:
    """Returns where the cluster's head and this node's raylet listen. Without them nothing here comes to an end."""
    context = ray.get_runtime_context()
    host, _, port = context.gcs_address.rpartition(":")
    here = context.get_node_id()
    raylets = [(one["NodeManagerAddress"], one["NodeManagerPort"]) for one in ray.nodes() if one["NodeID"] == here]
    return (host, int(port)), *raylets


def _reach(target: str | None, folder: Path | None) -> None:
    """Connects to the cluster at an address, or starts one with its files in a folder."""
    try:
        with _callers_signals(at_once=folder is not None):
            if target is not None:
                _join(target)
            else:
                assert folder is not None, "a cluster that is started has a folder"
                _start_local(folder)
    except Exception as error:  # Ray raises bare ones too, as when a busy machine takes 30 s to start its processes
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        if target is None:
            raise EngineError(
                f"cannot start a Ray cluster on this machine: {why.rstrip('.')}; see the logs in {folder}, and try "
                "again if the machine was busy"
            ) from error
        raise EngineError(f"the Ray cluster at {target} did not answer: {why}; check the address") from error


def _start_local(folder: Path) -> None:
    # Workers of a local cluster inherit the environment: with it they import the same package as this process.
    paths = [str(_package_folder().parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    threading.Thread(target=own_products, daemon=True).start()  # asked for once Ray is there
    with ray_settings.local_cluster(), temporary_files_in(folder), _patience():
        ray.init(
            address="local",
            namespace=NAMESPACE,
            _temp_dir=str(folder),
            include_dashboard=True,  # without it Ray Train cannot clean up after a trial that Tune ended (ray#54305)
            log_to_driver=False,
            logging_level="ERROR",
        )


@contextmanager
def _patience() -> Iterator[None]:
    """Makes Ray wait `NODE_START_S` for the node it starts; by itself it waits 30 s, too short on a busy machine.

    And not for its dashboard, which nothing asks before the first trial ends: the raylet would start 2 to 5 s later.
    """
    # Not public: Ray 2.60 has no setting for the 30 s, nor for the wait.
    find, look_up = ray._private.services.get_node, internal_kv._internal_kv_get

    def known(key: Any, *arguments: Any, **more: Any) -> Any:
        return b"" if key == DASHBOARD_ADDRESS else look_up(key, *arguments, **more)

    def wait_for(*arguments: Any) -> Any:
        end_s = time.monotonic() + NODE_START_S
        while True:
            try:
                return find(*arguments)
            except RuntimeError:  # the node is not there yet
                if time.monotonic() > end_s:
                    raise
                time.sleep(_NODE_LOOK_S)

    ray._private.services.get_node, internal_kv._internal_kv_get = wait_for, known
    try:
        yield
    finally:
        ray._private.services.get_node, internal_kv._internal_kv_get = find, look_up


def _join(address: str) -> None:
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        # Ray itself keeps asking a dead address for minutes.
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    settings = {name: os.environ[name] for name in ray_settings.JOB_SETTINGS}
    ray.init(
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"py_modules": [str(_package_folder())], "env_vars": settings},
    )


@contextmanager
def _callers_signals(*, at_once: bool) -> Iterator[None]:
    """Keeps the caller's handlers of a Ctrl-C, SIGTERM or SIGHUP while Ray starts.

    For SIGTERM Ray sets its own handler, which ends the process on the spot: a study could not be brought in order, as
    `ray job stop` and Slurm expect. If the caller has no handler for SIGTERM, Ray's stays, and ends the processes Ray
    started. `at_once` interrupts the start of a cluster of our own, whose processes are ended with its folder. A
    cluster that is joined is joined first.
    """
    if threading.current_thread() is not threading.main_thread():  # signals do not arrive here
        yield
        return
    pending: list[int] = []

    def heard(number: int, _frame: FrameType | None) -> None:
        pending.append(number)
        announce = getattr(callers[signal.Signals(number)], "announce", None)  # says at once that it was heard
        if announce is not None and not lost_cluster.found():
            announce(number)
        if at_once:
            raise KeyboardInterrupt

    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    callers = {number: handler for number, handler in found.items() if handler is not signal.SIG_DFL}
    # Not public: Ray 2.60 has no public way to keep it from setting one.
    set_rays = ray._private.utils.set_sigterm_handler
    for number in callers:
        signal.signal(number, heard)
    if signal.SIGTERM in callers:
        ray._private.utils.set_sigterm_handler = lambda _handler: None
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler = set_rays
        # Set again in any case: Ray's C++ part has put a handler in front that prints stacks.
        for number, handler in callers.items():
            signal.signal(number, handler)
        # Once more: Ray may have kept the interrupt to itself.
        if pending and lost_cluster.found():
            raise KeyboardInterrupt
        for came in dict.fromkeys(pending):
            signal.raise_signal(came)


def _package_folder() -> Path:
    return Path(__file__).parents[1]


def alive_nodes(known: Sequence[Node] = ()) -> list[Node]:
    """The nodes of the cluster that are alive now. Known nodes keep their names."""
    alive = {node["NodeID"]: node for node in _alive_entries()}
    kept = [node for node in known if node.node_id in alive]
    fresh = [alive[node_id] for node_id in sorted(alive.keys() - {node.node_id for node in kept})]
    taken = {node.name for node in known}
    hosts = [node["NodeManagerHostname"] for node in fresh]
    unknown = [one for one in fresh if one["Resources"].get("GPU") and PRODUCT_LABEL not in (one.get("Labels") or {})]
    products = ask_products([node["NodeID"] for node in unknown])
    for entry in fresh:
        host = entry["NodeManagerHostname"]
        numbered = (f"{host}-{index}" for index in range(len(fresh) + len(taken) + 1))
        alone = hosts.count(host) == 1 and not any(node.host == host for node in known)
        name = host if alone else next(name for name in numbered if name not in taken)
        taken.add(name)
        kept.append(_node(entry, name, products.get(entry["NodeID"], ())))
    return kept


def left(nodes: Sequence[Node]) -> list[Node]:
    """Returns those of some nodes that are dead, also if Ray still counts them as alive.

    Ray takes seconds to notice a killed node, and a trial that loses its workers with it ends sooner. A raylet that is
    gone does not listen at its port any more. All are asked at once: silent ones take `KNOCK_S` together.
    """
    if not nodes:
        return []
    alive = {each["NodeID"]: (each["NodeManagerAddress"], each["NodeManagerPort"]) for each in _alive_entries()}
    with ThreadPoolExecutor(len(nodes)) as knocking:
        there = knocking.map(lambda node: node.node_id in alive and is_answering([alive[node.node_id]]), nodes)
        return [node for node, answers in zip(nodes, there, strict=True) if not answers]


def _alive_entries() -> list[dict[str, Any]]:
    return [each for each in ray.nodes() if each["Alive"]]


def _node(entry: Mapping[str, Any], name: str, products: tuple[str, ...]) -> Node:
    labels: dict[str, str] = dict(entry.get("Labels") or {})
    resources: Mapping[str, float] = entry["Resources"]
    # If GPUs were given to Ray by hand, it may have set the resource without the label.
    detected = [key.removeprefix(_ACCELERATOR_RESOURCE) for key in resources if key.startswith(_ACCELERATOR_RESOURCE)]
    if detected:
        labels.setdefault(_ACCELERATOR_LABEL, detected[0])
    return Node(
        node_id=entry["NodeID"],
        name=name,
        num_cpus=resources.get("CPU", 0.0),
        num_gpus=resources.get("GPU", 0.0),
        host=entry["NodeManagerHostname"],
        labels=labels,
        products=(labels[PRODUCT_LABEL],) if PRODUCT_LABEL in labels else products,
    )


def _inventory(*, ours: bool) -> Cluster:
    nodes = tuple(alive_nodes())
    return Cluster(
        nodes=nodes,
        driver_node_id=ray.get_runtime_context().get_node_id(),
        tags=ray_settings.ray_tags([node.node_id for node in nodes], ours=ours),
    )

"""Findings about this machine: what it has, what it lacks, and what follows for a study on it."""

import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any, Final

import psutil

from wattune.catalog.hardware import device, device_of_product
from wattune.catalog.networks import NETWORKS
from wattune.cost.temperature import inlet_at_rest, thermal_coefficients
from wattune.errors import TelemetryError
from wattune.storage.documents import yaml_line
from wattune.storage.files import nearest_existing, storage_path
from wattune.telemetry.probe import network_ports, nvidia_heat, nvidia_products, probe
from wattune.view.table import worded

_LIBRARIES: Final = {
    "torch": "training needs it",
    "ray": "studies need it",
    "mlflow": "tracking needs it",
    "megatron-core": "its engine needs it; install wattune[megatron]",
    "deepspeed": "its engine needs it",
    "torchao": "`dtype: fp8` of the torch engine needs it; install wattune[fp8]",
    "transformer-engine": "without it the megatron engine runs its local layers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that this machine has, or lacks."""

    topic: str
    ok: bool
    have: str
    """The thing that was found, or that it is missing."""
    follows: str = ""
    """The consequence for a study here; empty where there is none."""


def examine() -> list[Finding]:
    """Looks at interpreter, processors, memory, libraries, sensors, storage and network; writes nothing."""
    sensors = [Finding(topic=name, ok=ok, have=have, follows=follows) for name, ok, have, follows in probe()]
    return [_python(), *_host(), *map(_library, _LIBRARIES), *sensors, _storage(), _cluster()]


REFERENCE_OPERATION_S: Final = 0.283e-6
"""Result of `operation_s` on a host of speed 1, a DGX H100's, by assumption: 0.290 us were measured on an EPYC of the
fourth generation, of 3.7 GHz at most, and clocks are taken to do equal work (`wattune.catalog.networks.host_speed`)."""


def operation_s(tries: int = 7, operations: int = 20_000) -> float:
    """Measures one thread's time for two calls with look-ups and tuples, as a framework makes for a kernel.

    In CPU seconds, the least of several tries, so that other work on the machine counts little.
    """
    table = {"weight": 1.0, "bias": 2.0}

    def operation(name: str, *sizes: int, scale: float = 1.0) -> tuple[float, ...]:
        return (table[name] * scale, *sizes)

    least_ns = sys.maxsize
    for _ in range(tries):
        start_ns = time.thread_time_ns()
        for _ in range(operations):
            operation("weight", 1, 2, scale=2.0)
            operation("bias", 3)
        least_ns = min(least_ns, time.thread_time_ns() - start_ns)
    return least_ns / operations * 1e-9


def own_devices() -> tuple[int, str]:
    """Counts this machine's GPUs, with their catalog name; two ranks on its processors where the catalog has none."""
    try:
        products = nvidia_products()
    except TelemetryError:
        products = []
    kinds = {device_of_product(product) for product in products}
    kind = kinds.pop() if len(kinds) == 1 else None
    return (len(products), kind.name) if kind is not None else (2, "cpu")


def _cluster() -> Finding:
    """Writes the `cluster` of a space on machines like this one."""
    slots, name = own_devices()
    ports = network_ports()
    entry: dict[str, Any] = {"device": name, "slots": slots}
    follows = "as `cluster` of a space; add num_nodes"
    if ports:
        _, kind, rate = ports[0]
        entry |= {"network": _network_of(kind, rate, len(ports) / slots), "rails": len(ports)}
        follows += f"; ports: {', '.join(port for port, _, _ in ports)}, drop from rails those that serve storage"
    else:
        follows += "; no port to other nodes was found, so name the network"
    heat, said = _inlet(name)
    entry["host"] = {"speed": round(REFERENCE_OPERATION_S / operation_s(), 2), **heat}
    return Finding(topic="cluster", ok=True, have=yaml_line(entry), follows=follows + said)


MOST_BUSY_FRAC: Final = 0.03
"""A device at rest is busy no more: a monitor's own calls show as some per cent."""


def _inlet(name: str) -> tuple[dict[str, float], str]:
    """Measures `inlet_c` where the devices of that name rest, the median over them; says what it needs where not."""
    thermal = thermal_coefficients(device(name))
    if thermal is None:
        return {}, ""
    try:
        found = nvidia_heat()
    except TelemetryError as error:
        return {}, f"; no inlet_c: {error}"
    busy = [index for index, (_, _, frac) in enumerate(found) if frac > MOST_BUSY_FRAC]
    if busy:
        return {}, f"; no inlet_c: device {', '.join(map(str, busy))} works, and the host must rest for five minutes"
    inlet_c = median(inlet_at_rest(temp_c, power_w, thermal) for temp_c, power_w, _ in found)
    return {"inlet_c": round(inlet_c, 1)}, "; inlet_c holds if the devices have rested for five minutes"


_FAMILIES: Final = {
    "InfiniBand": ("xdr", "ndr", "hdr"),
    "Ethernet": ("roce_",),
    "efa": ("efa_",),
    "cxi": ("slingshot",),
}
"""Beginnings of the catalog's names of networks, by kind of link."""


def _network_of(kind: str, bytes_per_s: float, ports_per_device: float) -> str | dict[str, Any]:
    """Names the network of the catalog with such ports, the nearest by their number; else describes it."""
    alike = [
        one
        for one in NETWORKS.values()
        if one.name.startswith(_FAMILIES.get(kind, ())) and one.bandwidth_bytes_per_s == bytes_per_s
    ]
    if alike:
        return min(alike, key=lambda one: abs(one.ports_per_device - ports_per_device)).name
    return {"name": f"{kind.lower()}_{bytes_per_s * 8e-9:g}", "bandwidth_bytes_per_s": bytes_per_s}


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    return Finding(topic="python", ok=ok, have=platform.python_version(), follows="" if ok else "wattune needs 3.11")


def _host() -> list[Finding]:
    cpus, memory_bytes = len(os.sched_getaffinity(0)), psutil.virtual_memory().total
    follows = f"{cpus} CPU ranks run side by side; more share processors, and their step times say so"
    return [
        Finding(topic="processors", ok=True, have=str(cpus), follows=follows),
        Finding(topic="memory", ok=True, have=worded("memory_bytes", memory_bytes)),
    ]


def _library(name: str) -> Finding:
    try:
        return Finding(topic=name, ok=True, have=version(name))
    except PackageNotFoundError:
        return Finding(topic=name, ok=False, have="not installed", follows=_LIBRARIES[name])


def _storage() -> Finding:
    folder = storage_path()
    existing, writable = nearest_existing(folder)
    free = worded("free_bytes", shutil.disk_usage(existing).free)
    follows = "" if writable else "set WATTUNE_STORAGE or give --storage"
    return Finding(topic="storage", ok=writable, have=f"{folder}, {free} free", follows=follows)

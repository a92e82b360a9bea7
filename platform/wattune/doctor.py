"""Findings about this machine: what it has, what it lacks, and what follows for a study on it."""

import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import psutil

from wattune.storage.files import nearest_existing, storage_path
from wattune.telemetry.probe import probe
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

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def examine() -> list[Finding]:
    """Looks at interpreter, processors, memory, libraries, sensors and storage; starts nothing and writes nothing."""
    return [_python(), *_host(), *map(_library, _LIBRARIES), *_sensors(), _storage()]


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


def _sensors() -> list[Finding]:
    return [Finding(topic=name, ok=ok, have=have, follows=follows) for name, ok, have, follows in probe()]


def _storage() -> Finding:
    folder = storage_path()
    existing, writable = nearest_existing(folder)
    free = worded("free_bytes", shutil.disk_usage(existing).free)
    follows = "" if writable else "set WATTUNE_STORAGE or give --storage"
    return Finding(topic="storage", ok=writable, have=f"{folder}, {free} free", follows=follows)

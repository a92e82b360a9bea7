"""Sensor backends by name, loaded on first use."""

import importlib
from typing import Final, cast

from wattune.errors import SensorChoiceError, TelemetryError, closest
from wattune.telemetry.backend import Backend

BACKENDS: Final[dict[str, str]] = {
    "amd_smi": "wattune.telemetry.amd_smi.backend:AmdSmiBackend",
    "host": "wattune.telemetry.host:HostBackend",
    "nvml": "wattune.telemetry.nvml.backend:NvmlBackend",
    "replay": "wattune.telemetry.replay:ReplayBackend",
}
"""Backend name to `module:Class`; loaded on first use, so that naming a backend imports no vendor library."""

SHARED_BACKENDS: Final = frozenset({"host"})
"""Backends whose devices any number of samplers may read: the kernel's own counters disturb nobody."""

ARGUMENTS: Final[dict[str, str]] = {"replay": "FOLDER"}
"""What must follow the name of a backend, after a colon; the others take nothing."""


def split_backend(text: str) -> tuple[str, str]:
    """A backend's name and its argument, from `name` or `name:argument`.

    Raises:
        SensorChoiceError: There is no such backend, or it lacks its argument or takes none.
    """
    name, _, argument = text.partition(":")
    if name not in BACKENDS:
        raise SensorChoiceError(f'backend "{text}" is not built; {closest(name, BACKENDS)}')
    if bool(argument) != (name in ARGUMENTS):
        usage = f"{name}:{ARGUMENTS[name]}" if name in ARGUMENTS else name
        raise SensorChoiceError(f'backend "{text}" cannot be used as written; write {usage}')
    return name, argument


def load_backend(text: str) -> Backend:
    """A new backend, its sensors open.

    Args:
        text: Its name, for some with a colon and an argument; see `ARGUMENTS`.

    Raises:
        TelemetryError: There is none, its library is not installed, or there are no such sensors here.
    """
    name, argument = split_backend(text)
    module_name, _, class_name = BACKENDS[name].partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise TelemetryError(
            f'backend "{name}" needs {error.name}, which is not installed; install it and try again'
        ) from error
    return cast(Backend, getattr(module, class_name)(*([argument] if argument else [])))

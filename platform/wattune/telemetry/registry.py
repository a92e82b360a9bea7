"""Sensor backends by name: the way from a name such as `nvml` to the class that reads sensors.

`SamplerProcess.start` starts a sampler process with the name, `sample` in that process calls `load_backend`, and
`wattune.telemetry.sampler.loop.Sampler` reads what comes of it as any `wattune.telemetry.backend.Backend`. The table
holds text and not classes, so that only such a process loads a vendor's library. No other module imports a backend's
module, but those of settings beside it. To add a backend, write its class and add a line to `BACKENDS`; the test
`test_name_to_class_tables_name_classes_that_exist_and_stay_in_their_room` checks that the class exists.
"""

import pkgutil
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
"""Argument that must follow the name of a backend after a colon; other backends take none."""


def split_backend(text: str) -> tuple[str, str]:
    """Splits `name` or `name:argument` into a backend's name and its argument.

    Raises `SensorChoiceError`: there is no such backend, or it lacks its argument or takes none.
    """
    name, _, argument = text.partition(":")
    if name not in BACKENDS:
        raise SensorChoiceError(f'backend "{text}" is not built; {closest(name, BACKENDS)}')
    if bool(argument) != (name in ARGUMENTS):
        usage = f"{name}:{ARGUMENTS[name]}" if name in ARGUMENTS else name
        raise SensorChoiceError(f'backend "{text}" cannot be used as written; write {usage}')
    return name, argument


def load_backend(text: str) -> Backend:
    """Makes a backend of a name and opens its sensors; called in the sampler process.

    A name may have a colon and an argument; see `ARGUMENTS`. Raises `TelemetryError`: there is no such backend, its
    library is not installed, or this machine has no such sensors.
    """
    name, argument = split_backend(text)
    try:
        made = pkgutil.resolve_name(BACKENDS[name])
    except ModuleNotFoundError as error:
        raise TelemetryError(
            f'backend "{name}" needs {error.name}, which is not installed; install it and try again'
        ) from error
    return cast(Backend, made(*([argument] if argument else [])))

"""What a sensor backend is, which there are, and which sensors are here. A backend reads; it never paces or judges."""

import ctypes
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast, runtime_checkable

from wattune.errors import SensorChoiceError, TelemetryError, closest

Row = Mapping[str, int | float | str | None]
"""Values by the columns of the tier's table in `wattune.schema.TELEMETRY`, without node, device and times.

A column the device does not have is left out; a read that failed is None, and `<column>_error` then holds the vendor's
code for it as text.
"""

ERROR_SUFFIX: Final = "_error"

AVAILABLE: Final = "available"
"""What `Backend.capabilities` says of a column that can be read; others say `unavailable: ` and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What is known of a device before it is read; None where there is no such thing or it cannot be asked."""

    device: str
    """The name telemetry rows and marks carry, unique on its node, such as `gpu0` or `host`."""
    name: str
    """The product's name, as its driver gives it."""
    uuid: str | None = None
    """The device's own identity, the same in every container and after every restart."""
    slot: int | None = None
    """Position in the chassis: devices in order of bus address."""
    driver: str | None = None
    power_limit_w: float | None = None
    """The enforced limit at the start."""
    sm_clock_max_mhz: float | None = None
    power_domain: str | None = None
    """Devices that share one power reading share this name."""
    power_from_energy_counter: bool | None = None
    """True where the power series is the energy counter's own rise: the two cannot check each other."""
    nic_link_bytes_per_s: float | None = None
    """Of a host: what its network ports that are up carry together in one direction, by their links' rated speed."""

    def to_json(self) -> dict[str, str | int | float]:
        """Plain data for the manifest; what is unknown is not in it."""
        return {key: value for key, value in asdict(self).items() if value is not None}


class Backend(Protocol):
    """The sensors of one kind on this node, read by one thread.

    A sensor that fails is data (see `Row`), so `read` raises nothing for it. Vendor units end here: rows are in the
    units their columns name. Calls that block belong in no `read`.
    """

    @property
    def simulated(self) -> bool:
        """Whether its values are computed instead of measured."""
        ...

    def devices(self) -> Sequence[DeviceInfo]:
        """The devices it reads; the same for its whole life."""
        ...

    def capabilities(self, device: str) -> Mapping[str, Mapping[str, str]]:
        """Which tiers a device has, and for every column of each whether it can be read.

        Args:
            device: A name from `devices`.

        Returns:
            Tier to column to `AVAILABLE` or `unavailable: ` with the reason, such as `unavailable: permission`.
        """
        ...

    def read(self, device: str, tier: str) -> Sequence[Row]:
        """Reads one tier of a device now.

        Args:
            device: A name from `devices`.
            tier: A key of the device's `capabilities`.

        Returns:
            One row; for `ring` one for every sample the driver recorded since the last read, perhaps none.
        """
        ...

    def close(self) -> None:
        """Gives the sensors back; may be called twice."""
        ...


OTHER_PROCESSES: Final = "other_processes"
"""What `Witness.facts` calls the processes on a device that are not the sampler."""


@runtime_checkable
class Witness(Protocol):
    """A backend that also knows what no column holds; a backend need not be one.

    It is asked when a recording begins and when it ends, never between, so these calls may block.
    """

    def facts(self, device: str) -> Mapping[str, Any]:
        """What is so now, as plain data for the manifest; like `read`, it raises nothing for a sensor that fails.

        Args:
            device: A name from `devices`.

        Returns:
            Facts by name. `OTHER_PROCESSES`, left out where it cannot be told, is a list with one mapping for every
            other process on the device: `pid`, and `memory_used_bytes` where known.
        """
        ...


BACKENDS: Final[dict[str, str]] = {
    "amd_smi": "wattune.telemetry.amd_smi:AmdSmiBackend",
    "host": "wattune.telemetry.host:HostBackend",
    "nvml": "wattune.telemetry.nvml:NvmlBackend",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SensorSource:
    """One source of readings, there or not."""

    name: str
    available: bool
    detail: str
    """What was found, or why nothing was."""
    follows: str = ""
    """What to do about it, or what is not measured without it; empty where it is there."""


def probe(procfs: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> list[SensorSource]:
    """Looks for every source of readings wattune knows of.

    Vendors' libraries are opened for a moment, their Python packages are not imported.

    Args:
        procfs: Where the kernel's process file system is.
        sysfs: Where the kernel's device file system is.
    """
    checks: dict[str, tuple[Callable[[], str], str]] = {
        "nvml": (_find_nvml, "no NVIDIA GPU is measured; it comes with the driver (in containers: capability utility)"),
        "amd_smi": (_find_amd_smi, "no AMD GPU is measured; library and Python package come with ROCm"),
        "rapl": (lambda: _find_rapl(sysfs), "no CPU power; let this user read energy_uj where there is one"),
        "hwmon": (lambda: _find_chips(sysfs / "class/hwmon"), "no cpu_temp_max_c; virtual machines have none"),
        "infiniband": (lambda: _find_entries(sysfs / "class/infiniband"), "no RDMA traffic in nic_tx_bytes"),
        "psi": (lambda: _find_psi(procfs / "pressure/cpu"), "no pressure stall times; boot the kernel with psi=1"),
    }
    sources = []
    for name, (find, follows) in checks.items():
        try:
            sources.append(SensorSource(name=name, available=True, detail=find()))
        except (TelemetryError, OSError) as error:
            sources.append(SensorSource(name=name, available=False, detail=str(error), follows=follows))
    return sources


def _find_nvml() -> str:
    library = ctypes.CDLL("libnvidia-ml.so.1")
    library.nvmlErrorString.restype = ctypes.c_char_p
    if code := library.nvmlInit_v2():
        raise TelemetryError(f"nvmlInit failed: {library.nvmlErrorString(code).decode()}")
    try:
        count, driver = ctypes.c_uint(), ctypes.create_string_buffer(80)
        for code in (
            library.nvmlDeviceGetCount_v2(ctypes.byref(count)),
            library.nvmlSystemGetDriverVersion(driver, len(driver)),
        ):
            if code:
                raise TelemetryError(f"the driver does not answer: {library.nvmlErrorString(code).decode()}")
    finally:
        library.nvmlShutdown()
    if not count.value:
        raise TelemetryError(f"driver {driver.value.decode()} has no device")
    return f"{count.value} devices, driver {driver.value.decode()}"


def _find_amd_smi() -> str:
    roots = [root for variable in ("ROCM_PATH", "ROCM_HOME") if (root := os.environ.get(variable))]
    libraries = ["libamd_smi.so", *(f"{root}/lib/libamd_smi.so" for root in [*roots, "/opt/rocm"])]
    found = None
    for library in libraries:
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        found = library
        break
    if found is None:
        raise TelemetryError(f"none of {', '.join(libraries)} can be loaded")
    # Only looked for: where something is amiss, importing it prints to standard output and breaks `import ray`.
    if importlib.util.find_spec("amdsmi") is None:
        raise TelemetryError(f"{found} is there, its Python package amdsmi is not")
    return found


def _find_rapl(sysfs: Path) -> str:
    counters = sorted((sysfs / "class/powercap").glob("intel-rapl:*/energy_uj"))
    if not counters:
        raise TelemetryError(f"no intel-rapl zone under {sysfs / 'class/powercap'}")
    for counter in counters:
        counter.read_text()
    return f"{len(counters)} zones"


def _find_entries(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*"))
    if not names:
        raise TelemetryError(f"nothing under {folder}")
    return ", ".join(names)


def _find_chips(folder: Path) -> str:
    _find_entries(folder)
    return ", ".join(sorted(path.read_text().strip() for path in folder.glob("*/name")))


def _find_psi(path: Path) -> str:
    path.read_text()  # ENOENT where it is not built in, EOPNOTSUPP where it is switched off
    return str(path.parent)

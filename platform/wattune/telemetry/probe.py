"""Looks for the sensor sources of this machine, and asks its NVIDIA driver who is there."""

import ctypes
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from wattune.errors import TelemetryError


def probe(procfs: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> list[tuple[str, bool, str, str]]:
    """Looks for every source of readings; opens vendors' libraries for a moment.

    Returns of each its name; whether it is there; what was found, or why there is nothing; and advice, or the readings
    that are missing without it, empty where it is there.
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
            sources.append((name, True, find(), ""))
        except (TelemetryError, OSError) as error:
            sources.append((name, False, str(error), follows))
    return sources


def nvidia_products() -> list[str]:
    """Returns the product name of every NVIDIA GPU of this machine, in the driver's order.

    Raises `TelemetryError`: there is no driver, or it does not answer.
    """
    with _nvml() as nvml:
        return [nvml.nvmlDeviceGetName(gpu) for gpu in _gpus(nvml)]


def has_nvml() -> bool:
    """Returns whether NVIDIA's library is here, without a word to the driver, which may take seconds to wake."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def nvidia_heat() -> list[tuple[float, float, float]]:
    """Returns degrees Celsius, watts and busy share of every NVIDIA GPU of this machine, in the driver's order.

    Raises `TelemetryError`: there is no driver, or it does not answer.
    """
    with _nvml() as nvml:
        return [
            (
                float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
                nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
                nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 1e2,
            )
            for gpu in _gpus(nvml)
        ]


def _gpus(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


@contextmanager
def _nvml() -> Iterator[Any]:
    """Opens NVML for a moment; what it refuses is a `TelemetryError`."""
    import pynvml  # here, since most commands ask nothing of it

    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise TelemetryError(f"NVML: {error}") from error


TOPOLOGY: Final = "/var/run/nvidia-topologyd/virtualTopology.xml"
"""File of NCCL's topology on virtual machines, where `NCCL_TOPO_FILE` names none (NCCL's environment variables)."""


def network_ports(
    sysfs: Path = Path("/sys"), environ: Mapping[str, str] = os.environ, ibstat: str = "ibstat"
) -> list[tuple[str, str, float]]:
    """Finds the active ports by which this machine's devices reach others: name, kind of link, bytes a second.

    The kernel lists them; where it shows none, `ibstat` is asked. Kinds are `InfiniBand`, `Ethernet`, `efa` and `cxi`
    (Slingshot). Of those, `NCCL_IB_HCA` chooses as it does for NCCL, else NCCL's topology file, else the fastest
    stand: slower ones serve storage and management.
    """
    ports = []
    for port in sorted((sysfs / "class/infiniband").glob("*/ports/*")):
        try:
            state, rate, kind = ((port / name).read_text().strip() for name in ("state", "rate", "link_layer"))
        except OSError:
            continue
        adapter = port.parent.parent
        driver = (adapter / "device/driver").resolve().name
        if "ACTIVE" in state:
            ports.append((adapter.name, "efa" if driver == "efa" else kind, _bytes_per_s(rate)))
    # 200 Gb/s each: `wattune.catalog.networks`.
    ports += [(card.name, "cxi", 25e9) for card in sorted((sysfs / "class/cxi").glob("*"))]
    ports = ports or _ports_of_ibstat(ibstat)
    chosen = [port for port in ports if _is_chosen(port[0], environ)]
    fastest = max((port[2] for port in chosen), default=0.0)
    return [port for port in chosen if port[2] == fastest]


def _bytes_per_s(rate: str) -> float:
    """Reads the kernel's `400 Gb/sec (4X NDR)`, or the `400` of `ibstat`."""
    found = re.match(r"[\d.]+", rate)
    return float(found[0]) * 1e9 / 8 if found else 0.0


def _ports_of_ibstat(ibstat: str) -> list[tuple[str, str, float]]:
    try:
        text = subprocess.run([ibstat], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    ports = []
    for adapter in re.split(r"^CA ", text, flags=re.MULTILINE)[1:]:
        name = adapter.split("'")[1] if "'" in adapter else "?"
        for port in re.split(r"Port \d+:", adapter)[1:]:
            own = dict(re.findall(r"^\s*([\w ]+): (.+)$", port, re.MULTILINE))
            if own.get("State") == "Active":
                ports.append((name, own.get("Link layer", "InfiniBand"), _bytes_per_s(own.get("Rate", ""))))
    return ports


def _is_chosen(name: str, environ: Mapping[str, str]) -> bool:
    """Tells whether NCCL uses an adapter: prefixes of `NCCL_IB_HCA`, `=` for whole names, `^` for all but those."""
    if wanted := environ.get("NCCL_IB_HCA", "").strip():
        exact = "=" in wanted[:2]
        names = [one.split(":")[0] for one in wanted.lstrip("^=").split(",") if one]
        return any(name == one if exact else name.startswith(one) for one in names) != wanted.startswith("^")
    try:
        nets = re.findall(r'<net [^>]*name="([^"]+)"', Path(environ.get("NCCL_TOPO_FILE", TOPOLOGY)).read_text())
    except (OSError, UnicodeDecodeError):
        return True
    return name in nets or not nets


def _find_nvml() -> str:
    with _nvml() as nvml:
        count, driver = nvml.nvmlDeviceGetCount(), nvml.nvmlSystemGetDriverVersion()
    if not count:
        raise TelemetryError(f"driver {driver} has no device")
    return f"{count} devices, driver {driver}"


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

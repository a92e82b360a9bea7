"""The AMD SMI backend: AMD devices through the library of the installed ROCm. No AMD device has run it yet.

What is read, what it is taken to mean and what nobody has checked on hardware is in docs/amd.md. Devices are named
`gpu0`, `gpu1`, ... as HIP numbers them, which need not be the order of bus addresses. A package with two dies (MI250)
reports its power at one of them: that device has the package's power, energy and limit, the other has none, and both
name one `power_domain`, so that analysis counts the package once.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from wattune.errors import TelemetryError
from wattune.telemetry.amd_smi.device import AmdSmiDevice
from wattune.telemetry.amd_smi.library import Library, load_package
from wattune.telemetry.backend import AVAILABLE, OTHER_PROCESSES, DeviceInfo, Row
from wattune.units import uj_to_j

TWO_DIES: Final = frozenset({0x7408, 0x740C})
"""PCI device ids of products with two dies a package: MI250X, MI250 (pci.ids; MI210, 0x740f, has one)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Facts about a device that its name depends on."""

    handle: Any
    """AMD SMI's."""
    bdf: str
    """Bus address, `domain:bus:device.function`, lower case."""
    device_id: int | None
    """The product, by its PCI device id."""
    powered: bool
    """True where its energy counter is above 0: the second die of a package reads 0."""


def power_owners(gpus: Sequence[Gpu]) -> list[int | None]:
    """Finds the device that reports each device's power, as an index into `gpus`; None where none that is visible does.

    The dies of a package with two follow each other in bus order, the one with power first. Devices that differ in the
    bus address's function alone are partitions of one package.
    """
    owners: list[int | None] = [index if gpu.powered else None for index, gpu in enumerate(gpus)]
    in_bus_order = sorted(range(len(gpus)), key=lambda index: gpus[index].bdf)
    for before, index in pairwise(in_bus_order):
        gpu = gpus[index]
        if gpu.powered:
            continue
        if gpu.device_id in TWO_DIES:
            # A die before it without power of its own belongs to another package, or its first die is hidden.
            owners[index] = before if gpus[before].powered and gpus[before].device_id == gpu.device_id else None
        elif gpus[before].bdf.rpartition(".")[0] == gpu.bdf.rpartition(".")[0]:
            owners[index] = owners[before]
    return owners


class AmdSmiBackend:
    """Every AMD GPU of this node; on MI250 every die is one."""

    simulated: Final = False

    def __init__(
        self,
        package: Any = None,
        hip_bdfs: Callable[[], Sequence[str]] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Starts AMD SMI and reads every sensor once.

        `package` is the module `amdsmi`, imported where None. `hip_bdfs` gives the bus addresses of all devices in
        HIP's order, as hipDeviceGetPCIBusId does; where None the library's own enumeration is asked, which heeds no
        `HIP_VISIBLE_DEVICES`. Raises `TelemetryError`: AMD SMI cannot be loaded or started, does not belong to its
        wrapper, shows no device, or HIP's order is not known.
        """
        self._library = Library(load_package() if package is None else package)
        self._open = True
        try:
            gpus = [self._identify(handle) for handle in self._library.call("amdsmi_get_processor_handles")]
            if not gpus:
                raise TelemetryError("AMD SMI shows no device; in containers, ask for /dev/kfd and /dev/dri")
            hip_indices = self._hip_indices(gpus, hip_bdfs)
        except TelemetryError:
            self.close()
            raise
        owners, slots = power_owners(gpus), sorted(gpu.bdf for gpu in gpus)
        self._gpus: dict[str, Gpu] = {}
        self._infos: dict[str, DeviceInfo] = {}
        self._devices: dict[str, AmdSmiDevice] = {}
        for hip_index, index in sorted(zip(hip_indices, range(len(gpus)), strict=True)):
            gpu, owner, name = gpus[index], owners[index], f"gpu{hip_index}"
            domain = name if owner is None else f"gpu{hip_indices[owner]}"
            self._gpus[name] = gpu
            self._infos[name] = self._info(gpu, name, slots.index(gpu.bdf), domain)
            power = _power_state(gpu, owner == index, domain if owner is not None else None)
            self._devices[name] = AmdSmiDevice(self._library, gpu.handle, clock_ns, power=power)

    def _identify(self, handle: Any) -> Gpu:
        bdf = str(self._library.call("amdsmi_get_gpu_device_bdf", handle)).lower()
        try:
            device_id = int(self._library.call("amdsmi_get_gpu_asic_info", handle)["device_id"], 16)
        except (TelemetryError, ValueError):  # AMD SMI writes N/A
            device_id = None
        try:
            powered = self._library.metrics(handle).value("energy_accumulator") > 0
        except TelemetryError:
            powered = False
        return Gpu(handle=handle, bdf=bdf, device_id=device_id, powered=powered)

    def _hip_indices(self, gpus: Sequence[Gpu], hip_bdfs: Callable[[], Sequence[str]] | None) -> list[int]:
        """HIP's number of every device."""
        if hip_bdfs is not None:
            order = [bdf.lower() for bdf in hip_bdfs()]
            if sorted(order) != sorted(gpu.bdf for gpu in gpus):
                raise TelemetryError(
                    f"HIP's devices are at {', '.join(order)}, AMD SMI's at {', '.join(gpu.bdf for gpu in gpus)}; give "
                    "the address of every device once"
                )
            return [order.index(gpu.bdf) for gpu in gpus]
        indices = []
        for gpu in gpus:
            try:
                hip_id = self._library.call("amdsmi_get_gpu_enumeration_info", gpu.handle)["hip_id"]
            except TelemetryError as error:
                hip_id = error
            if not isinstance(hip_id, int) or hip_id in indices:
                raise TelemetryError(
                    f"AMD SMI gives {gpu.bdf} the HIP index {hip_id}, where each device needs one of its own, or rows "
                    "are not of the ranks they seem to be; use ROCm 6.4 or later, or give hip_bdfs"
                )
            indices.append(hip_id)
        return indices

    def _info(self, gpu: Gpu, name: str, slot: int, domain: str) -> DeviceInfo:
        def ask(function: str, key: str | None, *arguments: str) -> Any:
            """An answer, None where there is none; what cannot be asked is not in the manifest."""
            try:
                answer = self._library.call(function, gpu.handle, *arguments)
            except TelemetryError:
                return None
            value = answer if key is None else answer[key]
            return None if value in ("N/A", "", 0) else value

        limit_uw = ask("amdsmi_get_power_cap_info", "power_cap") if gpu.powered else None
        clock_mhz = ask("amdsmi_get_clock_info", "max_clk", "AmdSmiClkType.GFX")
        return DeviceInfo(
            device=name,
            name=ask("amdsmi_get_gpu_asic_info", "market_name") or "unknown AMD device",
            uuid=ask("amdsmi_get_gpu_device_uuid", None),
            slot=slot,
            driver=ask("amdsmi_get_gpu_driver_info", "driver_version"),
            # amdsmi.h gives power caps in microwatts, which convert as microjoules do.
            power_limit_w=None if limit_uw is None else uj_to_j(limit_uw),
            sm_clock_max_mhz=None if clock_mhz is None else float(clock_mhz),
            power_domain=domain,
            power_from_energy_counter=True,
        )

    def devices(self) -> Sequence[DeviceInfo]:
        """All devices, in HIP's order."""
        return list(self._infos.values())

    def capabilities(self, device: str) -> Mapping[str, Mapping[str, str]]:
        """The tiers fast, counter and slow, and for each column whether it can be read."""
        return self._devices[device].capabilities

    def facts(self, device: str) -> Mapping[str, Any]:
        """Returns facts that `DeviceInfo` lacks, under the names NVML's backend uses where it has them.

        `pci_bus_id`; `power_series`, the column that holds the power, or `none`; `power_scope`, which is `package` or
        `device`; `amdsmi` and `libamd_smi`, their versions; and the other processes on the device.
        """
        domain = self._infos[device].power_domain
        shared = sum(info.power_domain == domain for info in self._infos.values()) > 1
        has_power = self.capabilities(device)["fast"]["power_instant_w"] == AVAILABLE
        facts: dict[str, Any] = {
            "pci_bus_id": self._gpus[device].bdf,
            "power_series": "power_instant_w" if has_power else "none",
            "power_scope": "package" if shared else "device",
            "amdsmi": self._library.wrapper_version,
            "libamd_smi": self._library.library_version,
        }
        try:
            processes = self._library.call("amdsmi_get_gpu_process_list", self._gpus[device].handle)
        except TelemetryError:
            return facts
        facts[OTHER_PROCESSES] = [
            {"pid": int(process["pid"]), "memory_used_bytes": int(process["memory_usage"]["vram_mem"])}
            for process in processes
            if process["pid"] != os.getpid()
        ]
        return facts

    def read(self, device: str, tier: str) -> Sequence[Row]:
        """One row; what cannot be read is None with AMD SMI's code beside it."""
        return [self._devices[device].read(tier)]

    def close(self) -> None:
        """Shuts AMD SMI down."""
        if self._open:
            self._open = False
            self._library.close()


def _power_state(gpu: Gpu, owns: bool, read_at: str | None) -> str:
    """Returns the capability of a device's power columns before they are probed."""
    if owns:
        return AVAILABLE
    if read_at is not None:
        return f"unavailable: the package's power is read at {read_at}"
    if gpu.device_id in TWO_DIES:
        return "unavailable: the package's power is read at its other die, which is not visible"
    return "unavailable: no energy counter (virtual machines have none)"

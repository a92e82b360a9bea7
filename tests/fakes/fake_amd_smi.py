"""The parts of `amdsmi` that wattune uses, in memory: devices are mappings of metrics fields."""

import ctypes
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from wattune.telemetry.amd_smi.library import Metrics

U16, U64 = 0xFFFF, 2**64 - 1


RESIDENCIES = "ppt socket_thm vr_thm hbm_thm prochot"


MI250, MI300 = 0x740C, 0x74A1


class Struct(ctypes.Structure):
    """The part of `amdsmi_gpu_metrics_t` that is read; with the real one, see tests/contracts/test_amd_smi_stub.py."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("energy_accumulator", "system_clock_counter", "accumulation_counter")),
        *((f"{name}_residency_acc", ctypes.c_uint64) for name in RESIDENCIES.split()),
        ("indep_throttle_status", ctypes.c_uint64),
        ("xgmi_read_data_acc", ctypes.c_uint64 * 8),
        ("xgmi_write_data_acc", ctypes.c_uint64 * 8),
        *((f"temperature_{name}", ctypes.c_uint16) for name in ("hotspot", "mem")),
        ("temperature_hbm", ctypes.c_uint16 * 4),
        *((name, ctypes.c_uint16) for name in ("average_socket_power", "average_umc_activity", "current_gfxclk")),
        ("average_gfxclk_frequency", ctypes.c_uint16),
        ("current_gfxclks", ctypes.c_uint16 * 8),
    )


UNSET = {
    name: (1 << 8 * ctypes.sizeof(kind._type_ if issubclass(kind, ctypes.Array) else kind)) - 1
    for name, kind in Struct._fields_
}


def fill(struct: Struct, values: Mapping[str, Any]) -> None:
    ctypes.memset(ctypes.addressof(struct), 0xFF, ctypes.sizeof(struct))
    for name, value in values.items():
        setattr(struct, name, tuple(value) if isinstance(value, Sequence) else value)


def metrics(**values: int) -> Metrics:
    struct = Struct()
    fill(struct, values)
    return Metrics(struct, UNSET)


class Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("release", ctypes.c_uint32))


class AmdSmiException(Exception):  # noqa: N818 – the package's own name
    def get_error_info(self, detailed: bool = True) -> str:
        return "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported" if detailed else "AMDSMI_STATUS_NOT_SUPPORTED"


class FakeAmdSmi:
    """The parts of `amdsmi` that are used. A device is a mapping: `bdf`, `hip_id`, `device_id`, and metrics fields."""

    __version__ = "26.2.0+fake"
    AmdSmiException = AmdSmiException
    AmdSmiClkType = SimpleNamespace(GFX=0)
    AmdSmiMemoryType = SimpleNamespace(VRAM=0)

    def __init__(self, *devices: dict[str, Any], major: int = 26) -> None:
        self.devices, self.major, self.open, self.calls = list(devices), major, 0, 0
        self.amdsmi_wrapper = SimpleNamespace(
            amdsmi_gpu_metrics_t=Struct,
            amdsmi_version_t=Version,
            amdsmi_get_lib_version=self._version,
            amdsmi_get_gpu_metrics_info=self._metrics,
            amdsmi_status_t__enumvalues={31: "AMDSMI_STATUS_NOT_FOUND"},
        )

    def _version(self, out: Any) -> int:
        out._obj.major = self.major
        return 0

    def _metrics(self, handle: int, out: Any) -> int:
        self.calls += 1
        device = self.devices[handle]
        fill(out._obj, {name: device[name] for name in UNSET if name in device})
        return int(device.get("status", 0))

    def amdsmi_init(self) -> None:
        self.open += 1

    def amdsmi_shut_down(self) -> None:
        self.open -= 1

    def amdsmi_get_processor_handles(self) -> list[int]:
        return list(range(len(self.devices)))

    def amdsmi_get_gpu_device_bdf(self, handle: int) -> str:
        return str(self.devices[handle]["bdf"])

    def amdsmi_get_gpu_device_uuid(self, handle: int) -> str:
        return f"uuid-{self.devices[handle]['bdf']}"

    def amdsmi_get_gpu_enumeration_info(self, handle: int) -> dict[str, Any]:
        return {"hip_id": self.devices[handle]["hip_id"]}

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, Any]:
        return {"market_name": "AMD Instinct", "device_id": hex(self.devices[handle]["device_id"])}

    def amdsmi_get_power_cap_info(self, handle: int) -> dict[str, Any]:
        return {"power_cap": self.devices[handle].get("power_cap", 0)}

    def amdsmi_get_clock_info(self, handle: int, kind: int) -> dict[str, Any]:
        raise AmdSmiException

    def amdsmi_get_gpu_memory_usage(self, handle: int, kind: int) -> int:
        return 5 * 2**30

    def amdsmi_get_gpu_driver_info(self, handle: int) -> dict[str, Any]:
        return {"driver_version": "N/A"}


def die(bus: str, hip_id: int, *, primary: bool, **more: Any) -> dict[str, Any]:
    """One MI250 die: a second one reads 0 for everything of the package (aldebaran_ppt.c)."""
    values = {"energy_accumulator": 10**9 if primary else 0, "average_socket_power": 300 if primary else 0}
    values |= {"power_cap": 560_000_000 if primary else 0, "system_clock_counter": 1, "indep_throttle_status": 0}
    values |= {"temperature_hotspot": 55, "temperature_mem": 50, "current_gfxclk": 1700}
    return {"bdf": f"0000:{bus}:00.0", "hip_id": hip_id, "device_id": MI250, **values, **more}

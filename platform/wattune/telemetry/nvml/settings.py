"""Settings of NVIDIA devices through NVML: power limit, locked clocks, workload power profile. Setting one needs root.

NVML does not tell the clocks that a device is locked to. None counts as found, so a lock of somebody else's is lost.
"""

from collections.abc import Collection
from ctypes import byref
from typing import Any, Final

from wattune.errors import PlanError
from wattune.plans.axes import NVIDIA_PROFILES
from wattune.telemetry.nvml.backend import NvmlBackend

_MW: Final = 1000
_WORDS: Final = 8
"""Words of a mask of profiles, nvmlMask255_t."""
_PROFILE: Final = "nvmlDeviceWorkloadPowerProfile"
_OVERWRITE: Final = 2
"""NVML_POWER_PROFILE_OPERATION_SET_AND_OVERWRITE."""


class NvmlSettings(NvmlBackend):
    """Every NVIDIA device of this node, as `wattune.limits.setter.Settings`; raw values are NVML's own."""

    def __init__(self) -> None:
        """Starts NVML."""
        super().__init__()
        self.owners = [str(info.uuid) for info in self.devices()]
        handles = [self._call("nvmlDeviceGetHandleByIndex", slot) for slot in range(len(self.owners))]
        self._handles = dict(zip(self.owners, handles, strict=True))
        self.num_devices = len(handles)

    def _call(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError as error:
            remedy = "run as root, or leave the axis out of the space"
            raise PlanError(f"NVML refuses {function}: {error}; {remedy}") from None

    def setting(self, owner: str, axis: str) -> Any:
        """The setting as it is: milliwatts, None (clocks), or the mask of the requested profiles."""
        if axis == "power_limit_w":
            return self._call("nvmlDeviceGetPowerManagementLimit", self._handles[owner])
        if axis == "clock_mhz":
            return None
        found = self._nvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
        self._call(f"{_PROFILE}GetCurrentProfiles", self._handles[owner], byref(found))
        return list(found.requestedProfilesMask.mask)

    def allowed(self, owner: str, axis: str) -> Collection[Any]:
        """The values of an axis that the device can have."""
        handle = self._handles[owner]
        if axis == "power_limit_w":
            least, most = self._call("nvmlDeviceGetPowerManagementLimitConstraints", handle)
            return range(-(-least // _MW), most // _MW + 1)
        if axis == "clock_mhz":
            memory_mhz = max(self._call("nvmlDeviceGetSupportedMemoryClocks", handle))
            clocks: list[int] = self._call("nvmlDeviceGetSupportedGraphicsClocks", handle, memory_mhz)
            return clocks
        there = self._nvml.c_nvmlWorkloadPowerProfileProfilesInfo_v1_t()
        self._call(f"{_PROFILE}GetProfilesInfo", handle, byref(there))
        words = there.perfProfilesMask.mask
        return [name for name in NVIDIA_PROFILES if words[(at := self._number(name)) // 32] >> at % 32 & 1]

    def _number(self, profile: str) -> int:
        return int(getattr(self._nvml, f"NVML_POWER_PROFILE_{profile.upper()}"))

    def raw(self, owner: str, axis: str, value: Any) -> Any:
        """The raw value of one that is allowed."""
        del owner
        if axis == "power_profile":
            number = self._number(value)
            return [1 << number % 32 if at == number // 32 else 0 for at in range(_WORDS)]
        return value * _MW if axis == "power_limit_w" else value

    def write(self, owner: str, axis: str, raw: Any) -> None:
        """Sets a raw value."""
        handle = self._handles[owner]
        if axis == "power_limit_w":
            self._call("nvmlDeviceSetPowerManagementLimit", handle, raw)
        elif axis == "clock_mhz" and raw is None:
            self._call("nvmlDeviceResetGpuLockedClocks", handle)
        elif axis == "clock_mhz":
            self._call("nvmlDeviceSetGpuLockedClocks", handle, raw, raw)
        else:
            asked = self._nvml.c_nvmlWorkloadPowerProfileUpdateProfiles_v1_t(operation=_OVERWRITE)
            asked.updateProfilesMask.mask[:] = raw
            self._call(f"{_PROFILE}UpdateProfiles_v1", handle, byref(asked))

"""Settings of AMD devices through AMD SMI: power cap, clock range, power profile. Setting one needs root.

The dies of one package share its power cap, which the die with the power sensor holds. Each may draw an equal part.
"""

from collections.abc import Collection
from typing import Any, Final

from wattune.errors import PlanError, TelemetryError
from wattune.plans.axes import AMD_PROFILES
from wattune.telemetry.amd_smi.backend import AmdSmiBackend

_UW: Final = 1_000_000
_GFX: Final = "AmdSmiClkType.GFX"
_LEVEL: Final = "AMDSMI_DEV_PERF_LEVEL_"


class AmdSmiSettings(AmdSmiBackend):
    """Every AMD package of this node, as `wattune.limits.setter.Settings`; raw values are AMD SMI's own."""

    def __init__(self) -> None:
        """Starts AMD SMI."""
        super().__init__()
        self.num_devices = len(self._infos)
        self._dies: dict[str, list[Any]] = {}
        for name, info in sorted(
            self._infos.items(), key=lambda one: one[1].power_domain != one[0]
        ):  # capped dies first
            owner = str(self._infos[str(info.power_domain)].uuid)
            self._dies.setdefault(owner, []).append(self._gpus[name].handle)
        self.owners = list(self._dies)

    def _call(self, function: str, *arguments: Any) -> Any:
        try:
            return self._library.call(function, *arguments)
        except TelemetryError as error:
            remedy = "run as root, or leave the axis out of the space"
            raise PlanError(f"AMD SMI refuses {function}: {error}; {remedy}") from None

    def setting(self, owner: str, axis: str) -> Any:
        """The setting as it is: a package's microwatts; lowest, highest clock and mode of each die; a profile's bit."""
        dies = self._dies[owner]
        if axis == "power_limit_w":
            return self._call("amdsmi_get_power_cap_info", dies[0])["power_cap"]
        if axis == "power_profile":
            return self._call("amdsmi_get_gpu_power_profile_presets", dies[0], 0)["current"]
        clocks = [self._call("amdsmi_get_clock_info", die, _GFX) for die in dies]
        levels = [self._call("amdsmi_get_gpu_perf_level", die).removeprefix(_LEVEL) for die in dies]
        return [[one["min_clk"], one["max_clk"], level] for one, level in zip(clocks, levels, strict=True)]

    def allowed(self, owner: str, axis: str) -> Collection[Any]:
        """The values of an axis that the package can have."""
        dies = self._dies[owner]
        if axis == "power_limit_w":
            cap, uw = self._call("amdsmi_get_power_cap_info", dies[0]), _UW * len(dies)
            return range(-(-cap["min_power_cap"] // uw), cap["max_power_cap"] // uw + 1)
        if axis == "clock_mhz":
            ranges = self.setting(owner, axis)
            return range(max(one[0] for one in ranges), min(one[1] for one in ranges) + 1)
        there = self._call("amdsmi_get_gpu_power_profile_presets", dies[0], 0)["available_profiles"]
        return [name for name in AMD_PROFILES if self._mask(name) & there]

    def _mask(self, profile: str) -> Any:
        name = profile.upper() if profile == "bootup_default" else f"{profile.upper()}_MASK"
        return self._library.member(f"AmdSmiPowerProfilePresetMasks.{name}")

    def raw(self, owner: str, axis: str, value: Any) -> Any:
        """The raw value of one that is allowed."""
        dies = self._dies[owner]
        if axis == "power_limit_w":
            return value * _UW * len(dies)
        return int(self._mask(value)) if axis == "power_profile" else [[value, value, "MANUAL"]] * len(dies)

    def write(self, owner: str, axis: str, raw: Any) -> None:
        """Sets a raw value. A range of clocks makes the driver's mode manual, so the mode comes after it."""
        dies = self._dies[owner]
        if axis == "power_limit_w":
            self._call("amdsmi_set_power_cap", dies[0], 0, raw)
        elif axis == "power_profile":
            self._call("amdsmi_set_gpu_power_profile", dies[0], 0, type(self._mask("compute"))(raw))
        else:
            for die, (least, most, level) in zip(dies, raw, strict=True):
                self._call("amdsmi_set_gpu_clk_range", die, least, most, _GFX)
                self._call("amdsmi_set_gpu_perf_level", die, f"AmdSmiDevPerfLevel.{level}")

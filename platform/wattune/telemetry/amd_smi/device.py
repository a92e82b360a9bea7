"""One AMD device: which of AMD SMI's fields fill which columns, and what becomes of counters on the way.

Fields and units are those of the kernel's `gpu_metrics_v1_*` (kgd_pp_interface.h): v1.3 on MI200, v1.4 and later on
MI300. Nothing here has run on AMD hardware; docs/amd.md says what is assumed.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from wattune.errors import TelemetryError
from wattune.schema import TELEMETRY, THROTTLE_REASON_BITS
from wattune.telemetry.amd_smi.library import Library, Metrics
from wattune.telemetry.backend import AVAILABLE, ERROR_SUFFIX, Row, read_columns
from wattune.units import kib_to_bytes, ns_to_s, s_to_ns, uj_to_j

TIERS: Final = ("fast", "counter", "slow")
"""Tiers of AMD devices. The driver keeps no power history, so there is no `ring`."""

ENERGY_UNIT_J: Final = 2**-16
"""One count of the energy accumulator, 15.259 uJ (kgd_pp_interface.h)."""

REUSE_S: Final = 0.005
"""Longest age of metrics that another tier may use again: tiers that are due together then cost one call."""

_STAMP: Final = "system_clock_counter"
"""Time at which the driver took the metrics, in nanoseconds since boot."""

_KEYS: Final = frozenset({"node", "device", "mono_ns", "wall_ns"})

_STATUS_BITS: Final[Mapping[str, int]] = {
    "power": 0xFF | 0xFF << 16 | 1 << 56,  # package power, currents, platform power
    "thermal": 0x3FFF << 32,  # dies, memory, regulators
    "hw": 0b11 << 46 | 1 << 57,  # PROCHOT from outside, reliability
}
"""Bits of `indep_throttle_status` by cause (amdgpu_smu.h, SMU_THROTTLER_*_BIT, the same on every product)."""

_RESIDENCIES: Final[Mapping[str, tuple[str, ...]]] = {
    "power": ("ppt_residency_acc",),
    "thermal": ("socket_thm_residency_acc", "vr_thm_residency_acc", "hbm_thm_residency_acc"),
    "hw": ("prochot_residency_acc",),
}
"""MI300's residency accumulators by cause: firmware cycles, of `accumulation_counter`, in which a limit held."""

_NO_FIELD: Final = {
    "pcie_tx_bytes": "AMD SMI counts both directions together",
    "pcie_rx_bytes": "AMD SMI counts both directions together",
    "tensor_active_frac": "AMD SMI has no matrix core activity",
    "sm_active_frac": "AMD SMI's graphics activity says that a kernel runs, not on how many compute units",
    "thermal_margin_c": "AMD SMI has no margin",
}


def reasons(active: Mapping[str, bool]) -> int:
    """Causes as `event_reasons` has them: of each, the lowest of its bits in `wattune.schema.THROTTLE_REASON_BITS`."""
    return sum(THROTTLE_REASON_BITS[cause] & -THROTTLE_REASON_BITS[cause] for cause, is_on in active.items() if is_on)


class EnergyPower:
    """Mean power between two readings of the energy accumulator."""

    def __init__(self, metrics: Metrics) -> None:
        """Takes the first reading. Raises `TelemetryError`: there is no accumulator, or no time stamp with it."""
        self._last = self._reading(metrics)

    @staticmethod
    def _reading(metrics: Metrics) -> tuple[int, int]:
        # The driver's own time stamp, as metrics may come out of a cache. The firmware's is finer, in a unit that is
        # documented and was never checked.
        return metrics.value(_STAMP), metrics.value("energy_accumulator")

    def power_w(self, metrics: Metrics) -> float | None:
        """The mean since the reading before, None while the accumulator has not moved: its next step covers both.

        Raises `TelemetryError`: it is not available now, or fell.
        """
        now_ns, now_count = self._reading(metrics)
        last_ns, last_count = self._last
        if now_count == last_count or now_ns == last_ns:
            return None
        self._last = now_ns, now_count
        if now_count < last_count or now_ns < last_ns:
            raise TelemetryError("counter fell")
        return (now_count - last_count) * ENERGY_UNIT_J / ns_to_s(now_ns - last_ns)


class Residency:
    """Time each cause held since the reading before."""

    def __init__(self, metrics: Metrics) -> None:
        """Takes the first reading.

        Raises `TelemetryError`: there are no residency accumulators, or no time stamp with them.
        """
        self._last = self._reading(metrics)

    @staticmethod
    def _reading(metrics: Metrics) -> dict[str, int]:
        accumulators = (name for names in _RESIDENCIES.values() for name in names)
        return {name: metrics.value(name) for name in (_STAMP, "accumulation_counter", *accumulators)}

    def held_ns(self, metrics: Metrics) -> dict[str, int] | None:
        """Nanoseconds by cause: the share of firmware cycles that counted, of the time between the two readings.

        Of a cause's accumulators the one that rose most, so that limits which held together count once. None while the
        cycle counter has not moved; its next step covers both. Raises `TelemetryError`: they are not available now, or
        one fell.
        """
        now, last = self._reading(metrics), self._last
        rise = {name: now[name] - last[name] for name in now}
        if rise["accumulation_counter"] == 0:
            return None
        self._last = now
        if min(rise.values()) < 0:
            raise TelemetryError("counter fell")
        return {
            cause: round(min(1.0, max(rise[n] for n in names) / rise["accumulation_counter"]) * rise[_STAMP])
            for cause, names in _RESIDENCIES.items()
        }


class ThrottleTime:
    """Cumulative time by cause since it was opened."""

    def __init__(self, metrics: Metrics) -> None:
        """Starts at 0. Raises `TelemetryError`: there are no residency accumulators, or no time stamp with them."""
        self._residency, self._total_ns = Residency(metrics), dict.fromkeys(_RESIDENCIES, 0)
        self._counted: Metrics | None = None

    def total_ns(self, cause: str, metrics: Metrics) -> int:
        """The time a cause held; an interval in which an accumulator fell is left out.

        Raises `TelemetryError`: the accumulators are not available now, or one fell.
        """
        if metrics is not self._counted:
            for name, held_ns in (self._residency.held_ns(metrics) or {}).items():
                self._total_ns[name] += held_ns
            self._counted = metrics
        return self._total_ns[cause]


def _energy_j(metrics: Metrics) -> float:
    return metrics.value("energy_accumulator") * ENERGY_UNIT_J


def _link_bytes(name: str, metrics: Metrics) -> int:
    return kib_to_bytes(sum(metrics.values(name)))


def _clock_mhz(metrics: Metrics) -> int:
    """The mean over a device's compute dies where each has a clock of its own."""
    try:
        clocks = metrics.values("current_gfxclks")
        return round(sum(clocks) / len(clocks))
    except TelemetryError:
        return metrics.value("current_gfxclk" if metrics.has("current_gfxclk") else "average_gfxclk_frequency")


def _memory_temp_c(metrics: Metrics) -> float:
    return float(
        metrics.value("temperature_mem") if metrics.has("temperature_mem") else max(metrics.values("temperature_hbm"))
    )


def _dram_active_frac(metrics: Metrics) -> float:
    percent = metrics.value("average_umc_activity")
    if percent > 100:
        raise TelemetryError(f"{percent} percent")
    return percent / 100


MetricReader = Callable[[Metrics], int | float | None]
"""Makes a column's value of one answer, None where there is no new one; raises TelemetryError with AMD SMI's code."""


def _open_reasons(metrics: Metrics) -> MetricReader:
    """Throttle flags where there are any (MI200), else which causes held since the read before (MI300)."""
    if metrics.has("indep_throttle_status"):
        return lambda now: reasons(
            {cause: bool(now.value("indep_throttle_status") & bits) for cause, bits in _STATUS_BITS.items()}
        )
    residency = Residency(metrics)

    def since_last(now: Metrics) -> int | None:
        held_ns = residency.held_ns(now)
        return None if held_ns is None else reasons({cause: time_ns > 0 for cause, time_ns in held_ns.items()})

    return since_last


def _open_throttle_time(opened: list[ThrottleTime], cause: str, metrics: Metrics) -> MetricReader:
    """One `ThrottleTime` for all causes of a device: it advances once a read."""
    if not opened:
        opened.append(ThrottleTime(metrics))
    return partial(opened[0].total_ns, cause)


class AmdSmiDevice:
    """The columns of one device."""

    def __init__(self, library: Library, handle: Any, clock_ns: Callable[[], int], *, power: str) -> None:
        """Reads every sensor once and keeps those that answer.

        `clock_ns` is the monotonic clock by which the age of metrics is known; `power` is `AVAILABLE` where the
        package's power is this device's to report, else why it is not.
        """
        self._library, self._handle, self._clock_ns = library, handle, clock_ns
        self._metrics: Metrics | None = None
        self._read_ns, self._served = 0, set[str]()
        self._readers: dict[str, dict[str, MetricReader]] = {tier: {} for tier in TIERS}
        self.capabilities: dict[str, dict[str, str]] = {
            tier: {
                name: f"unavailable: {_NO_FIELD.get(name, 'AMD SMI has none')}"
                for name in TELEMETRY[tier].names
                if name not in _KEYS
            }
            for tier in TIERS
        }
        try:
            self._probe(library.metrics(handle), power)
        except TelemetryError as error:
            for columns in self.capabilities.values():
                columns.update(dict.fromkeys(columns, f"unavailable: {error}"))

    def _probe(self, metrics: Metrics, power: str) -> None:
        def simple(reader: MetricReader) -> Callable[[], MetricReader]:
            """Opens a reader that keeps nothing between reads: it has to answer once."""

            def open_reader() -> MetricReader:
                reader(metrics)
                return reader

            return open_reader

        package: dict[tuple[str, str], Callable[[], MetricReader]] = {
            ("fast", "power_instant_w"): lambda: EnergyPower(metrics).power_w,
            ("slow", "energy_j"): simple(_energy_j),
            ("slow", "power_average_w"): simple(lambda metrics: float(metrics.value("average_socket_power"))),
            ("slow", "power_limit_w"): simple(self._power_limit_w),
        }
        for (tier, column), open_reader in package.items():
            if power == AVAILABLE:
                self._offer(tier, column, open_reader)
            else:
                self.capabilities[tier][column] = power
        self._offer("fast", "sm_clock_mhz", simple(_clock_mhz))
        self._offer("fast", "event_reasons", partial(_open_reasons, metrics))
        self._offer("fast", "gpu_temp_c", simple(lambda metrics: float(metrics.value("temperature_hotspot"))))
        self._offer("counter", "nvlink_tx_bytes", simple(partial(_link_bytes, "xgmi_write_data_acc")))
        self._offer("counter", "nvlink_rx_bytes", simple(partial(_link_bytes, "xgmi_read_data_acc")))
        self._offer("counter", "dram_active_frac", simple(_dram_active_frac))
        self._offer("slow", "memory_temp_c", simple(_memory_temp_c))
        self._offer("slow", "memory_used_bytes", simple(self._memory_used_bytes))
        throttled: list[ThrottleTime] = []
        for cause in _RESIDENCIES:
            self._offer("slow", f"throttle_{cause}_ns", partial(_open_throttle_time, throttled, cause, metrics))

    def _offer(self, tier: str, column: str, open_reader: Callable[[], MetricReader]) -> None:
        """Keeps a column's reader, or why there is none."""
        try:
            self._readers[tier][column] = open_reader()
            self.capabilities[tier][column] = AVAILABLE
        except TelemetryError as absent:
            self.capabilities[tier][column] = f"unavailable: {absent}"

    def _power_limit_w(self, _: Metrics) -> float:
        limit_w = uj_to_j(self._library.call("amdsmi_get_power_cap_info", self._handle)["power_cap"])
        if not limit_w:
            raise TelemetryError("no power limit is set")
        return limit_w

    def _memory_used_bytes(self, _: Metrics) -> int:
        return int(self._library.call("amdsmi_get_gpu_memory_usage", self._handle, "AmdSmiMemoryType.VRAM"))

    def read(self, tier: str) -> Row:
        """One row of a tier; what fails is None with AMD SMI's code beside it."""
        readers = self._readers[tier]
        try:
            metrics = self._fresh(tier)
        except TelemetryError as lost:
            return dict.fromkeys(readers) | {f"{column}{ERROR_SUFFIX}": str(lost) for column in readers}
        return read_columns({name: partial(reader, metrics) for name, reader in readers.items()}, (TelemetryError,))

    def _fresh(self, tier: str) -> Metrics:
        """Metrics this tier has not seen, from the call of another one where that was just now."""
        now_ns = self._clock_ns()
        if self._metrics is None or tier in self._served or now_ns - self._read_ns > s_to_ns(REUSE_S):
            self._metrics = None
            self._metrics, self._read_ns, self._served = self._library.metrics(self._handle), now_ns, set()
        self._served.add(tier)
        return self._metrics

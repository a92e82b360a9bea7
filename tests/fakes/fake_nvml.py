"""A driver's library in memory, below the real `pynvml`: its C functions on ctypes arguments, scripted.

What it answers is what one H200 with driver 580.159.04 answered, types and errors included; every quirk is a method or
field whose docstring says which real one it stands for.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from wattune.telemetry.backend import Row
from wattune.telemetry.nvml.backend import NvmlBackend

SUCCESS, NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE, GPU_IS_LOST = 0, 3, 6, 7, 15
U32, U64, S32 = 1, 3, 5
MEMBERS = {0: "dVal", U32: "uiVal", U64: "ullVal", S32: "siVal"}
ALL_LINKS = 2**32 - 1
START_WALL_NS = 1_790_000_000 * 10**9
RING_PERIOD_NS = 20_000_000
RING_DEPTH = 119
RELATED_EVERY_NS = 5_000_000_000
LIMIT_W = 700.0


def square_wave(period_s: float = 0.5, low_w: float = 120.0, high_w: float = 900.0) -> Callable[[float], float]:
    """Power over time in seconds: on in the first half of each period."""
    return lambda time_s: high_w if time_s % period_s < period_s / 2 else low_w


class FakeGpu:
    """One device."""

    def __init__(self, driver: "FakeNvml", index: int) -> None:
        self.driver, self.uuid = driver, f"GPU-00000000-0000-0000-0000-{index:012d}"
        self.name = "NVIDIA H200"
        self.power_w: Callable[[float], float] = square_wave()
        self.lost = False
        """Every call fails: the device fell off the bus (Xid 79), the driver answers GPU_IS_LOST for it."""
        self.faults: dict[str | int, int] = {}
        """Return code by function, or by field: a field that fails has its own code in a call that succeeds."""
        self.types: dict[int, int] = {}
        """Value type by field, where not the usual one: PCIe bytes are u32 on H200, said to be u64 elsewhere."""
        self.pcie_bytes_per_s = 1e6
        self.nvlink_kib_per_s = 1000.0
        self.busy_frac = 0.5
        self.mig = False
        self.energy_reset_j = 0.0
        self.memory_temp_c = 41
        self.throttle_ns: dict[str, int] = {"power": 0, "low_utilization": 10**9}
        self.throttle_ns |= {"sw_thermal": 0, "hw_thermal": 0, "brake": 0}
        self.processes: list[tuple[int, int]] = []

    @property
    def time_s(self) -> float:
        return self.driver.now_ns / 1e9

    def ring(self) -> list[tuple[int, int]]:
        """Samples every 20 ms, 119 of them: 2.36 s are kept.

        Stands for `nvmlDeviceGetSamples(TOTAL_POWER)` on H200, driver 580.159.04: the whole ring is stamped anew
        whenever it is read, from a relation of the GPU's clock to the wall clock that is renewed every 5 s. Stamps of
        one sample so differ between reads, by up to 160 µs, and all move at once after the wall clock was set.
        """
        last = self.driver.now_ns // RING_PERIOD_NS
        times_ns = [index * RING_PERIOD_NS for index in range(last - RING_DEPTH + 1, last + 1)]
        related_ns = self.driver.now_ns // RELATED_EVERY_NS * RELATED_EVERY_NS
        moved_ns = self.driver.wall_at(related_ns) - related_ns + related_ns // RELATED_EVERY_NS * 71_000 % 160_000
        return [((t + moved_ns) // 1000, round(self.power_w(t / 1e9) * 1000)) for t in times_ns]

    def energy_mj(self) -> int:
        return round((500.0 * self.time_s + 1e6 - self.energy_reset_j) * 1000)

    def field(self, field: int, scope: int) -> tuple[int, int, int]:
        """Return code, value type and value of a field."""
        driver = self.driver
        if field in self.faults:
            return self.faults[field], 0, 0
        throttle = dict(zip(driver.throttle_fields, ("sw_thermal", "hw_thermal", "brake"), strict=True))
        if field in throttle:
            return SUCCESS, U64, self.throttle_ns[throttle[field]]
        if field == driver.smoothing_field:
            return SUCCESS, U32, 1
        # NVLink counts without a scope are those of link 0 alone: one of 18 on H200.
        nvlink_kib = round(self.nvlink_kib_per_s * self.time_s * (18 if scope == ALL_LINKS else 1))
        pcie = round(self.pcie_bytes_per_s * self.time_s)
        known: dict[int, tuple[int, int]] = {
            74: (U64, self.throttle_ns["power"]),
            78: (U64, self.throttle_ns["low_utilization"]),
            82: (U32, self.memory_temp_c),
            83: (U64, self.energy_mj()),
            138: (U64, nvlink_kib),
            139: (U64, 2 * nvlink_kib),
            185: (U32, 500_000),
            186: (U32, round(self.power_w(self.time_s // 0.1 * 0.1) * 1000)),
            197: (self.types.get(197, U32), pcie),
            198: (self.types.get(198, U32), 2 * pcie),
        }
        if field not in known:
            return NOT_SUPPORTED, 0, 0
        type_, value = known[field]
        return SUCCESS, type_, value % 2**32 if type_ == U32 else value


def _always(value: int) -> Callable[..., int]:
    """A C function of a device that writes the same through its last argument whenever it is called."""

    def get(_driver: Any, _handle: Any, *rest: Any) -> int:
        rest[-1]._obj.value = value
        return SUCCESS

    return get


class FakeNvml:
    """The library. Time stands still until a test moves it."""

    def __init__(self, count: int = 1, version: str = "580.159.04") -> None:
        self.version, self.now_ns = version, 10_000_000_000
        self.gpus = [FakeGpu(self, index) for index in range(count)]
        self.steps: list[tuple[int, int]] = []
        self.missing: set[str] = set()
        """Functions an older driver's library does not have."""
        self.throttle_fields = (269, 270, 271)
        self.smoothing_field: int | None = None
        self.gpm_values: dict[int, float] = {}
        """GPM metrics that do not follow the device's state."""
        self.gpm_faults: dict[int, int] = {}
        self.calls: list[str] = []
        self.started = 0
        self._gpm_samples: dict[int, tuple[int, float]] = {}
        self.gpm_allocated = 0

    # What tests do

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeNvml":
        monkeypatch.setattr(pynvml, "nvmlLib", self)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return self

    def clock_ns(self) -> int:
        return self.now_ns

    def wall_at(self, mono_ns: int) -> int:
        return START_WALL_NS + mono_ns + sum(step for at, step in self.steps if at <= mono_ns)

    def wall_ns(self) -> int:
        return self.wall_at(self.now_ns)

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def step_clock(self, seconds: float) -> None:
        """The wall clock is set: NTP stepping it, or an operator. The monotonic clock goes on."""
        self.steps.append((self.now_ns, round(seconds * 1e9)))

    def old_numbering(self) -> "FakeNvml":
        """Drivers 575 to 580.65 number throttle counters 251 to 253 (nvidia-ml-py 12.575.51, 13.580.65)."""
        self.throttle_fields = (251, 252, 253)
        return self

    def power_smoothing(self) -> "FakeNvml":
        """Field 251 is PWR_SMOOTHING_ENABLED, a u32 switch: on 570 instead of the counters, later beside them."""
        self.smoothing_field = 251
        return self

    # The C functions

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("nvml"):
            return value
        if name in self.missing:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            for argument in arguments[:1]:
                gpu = self._gpu(argument)
                if gpu is not None and gpu.lost:
                    return GPU_IS_LOST
                if gpu is not None and name in gpu.faults:
                    return gpu.faults[name]
            return value(*arguments)

        return call

    def _gpu(self, handle: Any) -> FakeGpu | None:
        if not isinstance(handle, pynvml.c_nvmlDevice_t):
            return None
        return self.gpus[ctypes.cast(handle, ctypes.c_void_p).value - 1]

    @staticmethod
    def _point(reference: Any, address: int) -> None:
        ctypes.memmove(ctypes.addressof(reference._obj), ctypes.byref(ctypes.c_void_p(address)), 8)

    def nvmlInitWithFlags(self, flags):
        self.started += 1
        return SUCCESS

    def nvmlShutdown(self):
        self.started -= 1
        return SUCCESS

    def nvmlErrorString(self, code):
        return b"scripted"

    def nvmlSystemGetDriverVersion(self, buffer, length):
        buffer.value = self.version.encode()
        return SUCCESS

    def nvmlSystemGetNVMLVersion(self, buffer, length):
        buffer.value = f"13.{self.version}".encode()
        return SUCCESS

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.gpus)
        return SUCCESS

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        """A device that is lost already has no handle."""
        if self.gpus[index.value].lost:
            return GPU_IS_LOST
        self._point(device, index.value + 1)
        return SUCCESS

    def nvmlDeviceGetName(self, handle, buffer, length):
        buffer.value = self._gpu(handle).name.encode()
        return SUCCESS

    def nvmlDeviceGetUUID(self, handle, buffer, length):
        buffer.value = self._gpu(handle).uuid.encode()
        return SUCCESS

    def nvmlDeviceGetPciInfo_v3(self, handle, info):
        info._obj.busId = b"00000000:18:00.0"
        return SUCCESS

    def nvmlDeviceGetMigMode(self, handle, current, pending):
        current._obj.value, pending._obj.value = int(self._gpu(handle).mig), 0
        return SUCCESS

    nvmlDeviceGetEnforcedPowerLimit = _always(round(LIMIT_W * 1000))
    nvmlDeviceGetMaxClockInfo = _always(1980)
    nvmlDeviceGetClockInfo = _always(1500)
    nvmlDeviceGetCurrentClocksEventReasons = _always(0x4)
    nvmlDeviceGetTemperature = _always(38)
    nvmlDeviceGetPowerUsage = _always(78_500)

    def nvmlDeviceGetUtilizationRates(self, handle, utilization):
        utilization._obj.gpu = round(100 * self._gpu(handle).busy_frac)
        return SUCCESS

    def nvmlDeviceGetMarginTemperature(self, handle, margin):
        margin._obj.marginTemperature = 49
        return SUCCESS

    def nvmlDeviceGetMemoryInfo_v2(self, handle, memory):
        memory._obj.used = 5 * 10**9
        return SUCCESS

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle, count, found):
        processes = self._gpu(handle).processes
        if count._obj.value < len(processes):
            count._obj.value = len(processes)
            return INSUFFICIENT_SIZE
        count._obj.value = len(processes)
        for index, (pid, used) in enumerate(processes):
            found[index].pid, found[index].usedGpuMemory = pid, used
        return SUCCESS

    def nvmlDeviceGetViolationStatus(self, handle, policy, violation):
        """On H200 the power policy agrees with field 74, and thermal with the sum of the slowdown counters."""
        counters = self._gpu(handle).throttle_ns
        thermal = counters["sw_thermal"] + counters["hw_thermal"]
        by_policy = {0: counters["power"], 1: thermal, 4: counters["low_utilization"]}
        violation._obj.violationTime = by_policy.get(policy.value, 0)
        return SUCCESS

    def nvmlDeviceGetFieldValues(self, handle, count, values):
        for item in values._obj:
            item.nvmlReturn, item.valueType, number = self._gpu(handle).field(item.fieldId, item.scopeId)
            if item.valueType in MEMBERS:
                setattr(item.value, MEMBERS[item.valueType], number)
        return SUCCESS

    def nvmlDeviceGetSamples(self, handle, kind, last_seen, value_type, count, samples):
        """Without a buffer it says how many there may be; what is not later than `last_seen` is left out."""
        if kind.value != 0:
            return NOT_FOUND
        ring = [sample for sample in self._gpu(handle).ring() if sample[0] > last_seen.value]
        if not ring:
            return NOT_FOUND
        value_type._obj.value = U32
        if samples is not None:
            for index, (time_us, power_mw) in enumerate(ring):
                samples[index].timeStamp, samples[index].sampleValue.uiVal = time_us, power_mw
        count._obj.value = len(ring) if samples is not None else RING_DEPTH + 1
        return SUCCESS

    def nvmlGpmQueryDeviceSupport(self, handle, support):
        support._obj.isSupportedDevice = 1
        return SUCCESS

    def nvmlGpmSampleAlloc(self, sample):
        self.gpm_allocated += 1
        self._point(sample, 1000 + self.gpm_allocated)
        return SUCCESS

    def nvmlGpmSampleFree(self, sample):
        self.gpm_allocated -= 1
        return SUCCESS

    def nvmlGpmSampleGet(self, handle, sample):
        self._gpm_samples[ctypes.cast(sample, ctypes.c_void_p).value] = (
            self.now_ns,
            self._gpu(handle).pcie_bytes_per_s,
        )
        self._last_gpu = self._gpu(handle)
        return SUCCESS

    def nvmlGpmMetricsGet(self, request):
        """Percentages in 0 to 100, PCIe in MiB/s; over less than 100 ms they are refused here, and wrong there."""
        asked, gpu = request._obj, self._last_gpu
        times = [self._gpm_samples[ctypes.cast(s, ctypes.c_void_p).value][0] for s in (asked.sample1, asked.sample2)]
        if times[1] - times[0] < 100_000_000:
            return 2
        percent = 100 * gpu.busy_frac
        mib_per_s = gpu.pcie_bytes_per_s / 2**20
        computed = {2: percent, 5: percent / 2, 10: percent / 4, 20: mib_per_s, 21: 2 * mib_per_s} | self.gpm_values
        for metric in asked.metrics[: asked.numMetrics]:
            metric.value, metric.nvmlReturn = computed[metric.metricId], self.gpm_faults.get(metric.metricId, SUCCESS)
        return SUCCESS


class RunningNvml(FakeNvml):
    """The library on the real clock."""

    @property
    def now_ns(self) -> int:
        return time.monotonic_ns()

    @now_ns.setter
    def now_ns(self, value: int) -> None:
        pass


def opened(driver: FakeNvml) -> NvmlBackend:
    return NvmlBackend(driver.clock_ns, driver.wall_ns, driver.sleep)


def row(backend: NvmlBackend, tier: str, device: str = "gpu0") -> Row:
    (only,) = backend.read(device, tier)
    return only


def drain(backend: NvmlBackend) -> list[tuple[int, float]]:
    return [(int(one["sensor_ns"] or 0), float(one["power_w"] or 0)) for one in backend.read("gpu0", "ring")]

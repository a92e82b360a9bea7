"""One NVIDIA device read through NVML: a reader for every column, found by asking once what the device answers."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Final

from wattune.errors import TelemetryError
from wattune.schema import TELEMETRY
from wattune.telemetry.backend import AVAILABLE, ERROR_SUFFIX, OTHER_PROCESSES, DeviceInfo, Row, read_columns
from wattune.telemetry.nvml import fields
from wattune.telemetry.nvml.gpm import ANY_TENSOR_UTIL, DRAM_BW_UTIL, PCIE_RX_PER_SEC, PCIE_TX_PER_SEC, SM_UTIL, Gpm
from wattune.telemetry.nvml.ring import RingJoin, Sample
from wattune.units import NS_PER_S, kib_to_bytes, mj_to_j, mw_to_w, ns_to_s, s_to_ns

_COUNTER_BOUND: Final = 1.05
"""Speed of a counter of time, relative to the monotonic clock, above which its readings are not believed."""
_VIOLATION_SLACK_S: Final = 0.5
"""Largest difference allowed between a field and violation status read after it: 0.18 s was seen on H200."""
_ERROR: Final = "NVML_ERROR_"
_BYTES_PER_MIB: Final = 2**20

SensorReader = Callable[[], int | float | None]


def _refusing(reason: str) -> SensorReader:
    """The reader of a column that is not there."""

    def read() -> None:
        raise TelemetryError(reason)

    return read


class NvmlDevice:
    """One device of a started NVML; see `wattune.telemetry.nvml.backend` for the meaning of its columns."""

    def __init__(
        self,
        nvml: ModuleType,
        slot: int,
        driver: str,
        clock_ns: Callable[[], int],
        wall_ns: Callable[[], int],
    ) -> None:
        """Opens the device and makes its readers; `prime` and `probe` find out which of them work."""
        self._nvml, self._clock_ns, self._wall_ns = nvml, clock_ns, wall_ns
        self._codes = {value: name[len(_ERROR) :] for name, value in vars(nvml).items() if name.startswith(_ERROR)}
        self.capabilities: dict[str, dict[str, str]] = {}
        self._facts: dict[str, Any] = {}
        self._ring = RingJoin()
        self._gpm: Gpm | None = None
        self._readers: dict[str, dict[str, SensorReader]] = {}
        try:
            self._handle = nvml.nvmlDeviceGetHandleByIndex(slot)
        except nvml.NVMLError as error:
            lost = f"unknown device: {self._code(error)}"
            self.info = DeviceInfo(device=f"gpu{slot}", name=lost, slot=slot, driver=driver)
            return
        self.info = self._describe(slot, driver)
        self._facts = self._static_facts()
        self._readers = {"fast": self._fast(), "counter": self._counter(), "slow": self._slow(driver)}

    def _code(self, error: Exception) -> str:
        """Returns NVML's name of an error without its prefix, or the code of our own decoding."""
        if not isinstance(error, self._nvml.NVMLError):
            return str(error)
        return self._codes.get(error.value, f"NVML_{error.value}")

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Returns NVML's answer, None where it gives an error."""
        try:
            return question(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None

    def _describe(self, slot: int, driver: str) -> DeviceInfo:
        nvml, name = self._nvml, f"gpu{slot}"
        limit_mw = self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
        return DeviceInfo(
            device=name,
            name=self._ask(nvml.nvmlDeviceGetName) or "unknown NVIDIA device",
            uuid=self._ask(nvml.nvmlDeviceGetUUID),
            slot=slot,
            driver=driver,
            power_limit_w=None if limit_mw is None else mw_to_w(limit_mw),
            sm_clock_max_mhz=self._ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
            power_domain=name,
        )

    def _static_facts(self) -> dict[str, Any]:
        bus, mig = self._ask(self._nvml.nvmlDeviceGetPciInfo), self._ask(self._nvml.nvmlDeviceGetMigMode)
        found = {
            "pci_bus_id": None if bus is None else bus.busId,
            # Devices that cannot do MIG do not answer; those that can say the mode now and after the next reset.
            "mig": bool(mig[0]) if mig else False,
            "nvml": self._nvml.nvmlSystemGetNVMLVersion(),
        }
        return {name: value for name, value in found.items() if value is not None}

    def prime(self) -> None:
        """Takes the first GPM sample."""
        if self._gpm is not None:
            self._gpm.advance()

    def probe(self) -> None:
        """Reads everything once: a column that fails now stays `unavailable`, with the reason."""
        if not self._readers:
            return
        if self._gpm is not None:
            self._gpm.advance()
        for tier, readers in self._readers.items():
            columns = self.capabilities[tier] = {}
            for column in (name for name in TELEMETRY[tier].names if name in readers):
                try:
                    readers[column]()
                    columns[column] = AVAILABLE
                except (self._nvml.NVMLError, TelemetryError) as error:
                    columns[column] = f"unavailable: {self._code(error)}"
            self._readers[tier] = {name: reader for name, reader in readers.items() if columns[name] == AVAILABLE}
        try:
            self._samples()
            ring = AVAILABLE
        except (self._nvml.NVMLError, TelemetryError) as error:
            ring = f"unavailable: {self._code(error)}"
        self.capabilities["ring"] = dict.fromkeys(("sensor_ns", "power_w"), ring)
        instant = self.capabilities["fast"]["power_instant_w"] == AVAILABLE
        self._facts["power_series"] = "ring" if ring == AVAILABLE else "power_instant_w" if instant else "none"

    def facts(self) -> dict[str, Any]:
        """See `NvmlBackend.facts`."""
        # Before the first drain there are no counts, and a sampler that is killed leaves the facts of its start.
        drained = {"ring": ring} if (ring := self._ring.facts())["drains"] else {}
        others = self._other_processes()
        return {**self._facts, **drained, **({} if others is None else {OTHER_PROCESSES: others})}

    def _other_processes(self) -> list[dict[str, int]] | None:
        """Processes with a context on the device; reading sensors makes none, so the sampler is not among them."""
        found = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses_v3) if self._readers else None
        if found is None:
            return None
        return [
            {"pid": one.pid} | ({} if one.usedGpuMemory is None else {"memory_used_bytes": one.usedGpuMemory})
            for one in found
        ]

    def read_row(self, tier: str) -> Row:
        """Returns one row of a tier; a value that fails is None with its code beside it."""
        if tier == "counter" and self._gpm is not None:
            self._gpm.advance()
        return read_columns(self._readers[tier], (self._nvml.NVMLError, TelemetryError), self._code)

    def read_ring(self) -> Sequence[Row]:
        """Returns the samples since the last drain."""
        if self._facts["power_series"] != "ring":
            return []
        try:
            ring, drained_ns = self._samples(), self._clock_ns()
        except (self._nvml.NVMLError, TelemetryError) as error:
            # There is no sample whose time it could be: the time of the attempt keeps the column whole.
            failed_ns = self._wall_ns()
            return [{"sensor_ns": failed_ns, "power_w": None, f"power_w{ERROR_SUFFIX}": self._code(error)}]
        return [
            {"sensor_ns": sample.time_us * 1000, "power_w": mw_to_w(sample.power_mw)}
            for sample in self._ring.join(ring, drained_ns)
        ]

    def _samples(self) -> Sequence[Sample]:
        """The whole ring, oldest first."""
        try:
            value_type, samples = self._nvml.nvmlDeviceGetSamples(self._handle, self._nvml.NVML_TOTAL_POWER_SAMPLES, 0)
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_NOT_FOUND:  # an empty ring, after the driver was loaded
                return []
            raise
        return [
            Sample(sample.timeStamp, fields.decode(value_type, sample.sampleValue))
            for sample in samples
            if sample.timeStamp
        ]

    def _field(self, field: int, scope: int = 0) -> tuple[int | float, int]:
        """A field's value and its value type."""
        found = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(field, scope)])[0]
        if found.nvmlReturn:
            raise self._nvml.NVMLError(found.nvmlReturn)
        return fields.decode(found.valueType, found.value), found.valueType

    def _counting(self, field: int, scope: int = 0) -> Callable[..., int]:
        """A reader of a counter's field."""
        counter = fields.Counter()

        def read(**bounds: float | None) -> int:
            value, value_type = self._field(field, scope)
            bits = fields.counter_bits(value_type)
            return counter.advance(int(value), bits, ns_to_s(self._clock_ns()), **bounds)

        return read

    def _fast(self) -> dict[str, SensorReader]:
        nvml, handle = self._nvml, self._handle
        return {
            "power_instant_w": lambda: mw_to_w(self._field(fields.POWER_INSTANT)[0]),
            "sm_clock_mhz": partial(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "event_reasons": partial(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
            "gpu_temp_c": partial(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        }

    def _counter(self) -> dict[str, SensorReader]:
        def nvlink(field: int) -> SensorReader:
            read_kib = self._counting(field, fields.ALL_LINKS)
            return lambda: kib_to_bytes(read_kib())

        metrics = (SM_UTIL, ANY_TENSOR_UTIL, DRAM_BW_UTIL, PCIE_TX_PER_SEC, PCIE_RX_PER_SEC)
        active: dict[int, SensorReader]
        try:
            gpm = self._gpm = Gpm(self._nvml, self._handle, metrics, self._clock_ns)
            active = {metric: partial(gpm.frac, metric) for metric in metrics}
        except (self._nvml.NVMLError, TelemetryError) as error:
            active = dict.fromkeys(metrics, _refusing(self._code(error)))
        return {
            "nvlink_tx_bytes": nvlink(fields.NVLINK_TX),
            "nvlink_rx_bytes": nvlink(fields.NVLINK_RX),
            "pcie_tx_bytes": self._pcie(fields.PCIE_TX, PCIE_TX_PER_SEC),
            "pcie_rx_bytes": self._pcie(fields.PCIE_RX, PCIE_RX_PER_SEC),
            "tensor_active_frac": active[ANY_TENSOR_UTIL],
            "dram_active_frac": active[DRAM_BW_UTIL],
            "sm_active_frac": active[SM_UTIL],
        }

    def _pcie(self, field: int, metric: int) -> SensorReader:
        count = self._counting(field)

        def read() -> int:
            rate_mib_per_s = None
            if self._gpm is not None:
                with contextlib.suppress(self._nvml.NVMLError, TelemetryError):  # its own columns say that it failed
                    rate_mib_per_s = self._gpm.value(metric)
            return count(about_per_s=None if rate_mib_per_s is None else rate_mib_per_s * _BYTES_PER_MIB)

        return read

    def _slow(self, driver: str) -> dict[str, SensorReader]:
        nvml, handle, throttle = self._nvml, self._handle, self._check_throttle(driver)
        unknown = _refusing(f"its field numbers are not known for driver {driver}")
        read_mj = self._counting(fields.TOTAL_ENERGY)
        return {
            "energy_j": lambda: mj_to_j(read_mj()),
            "power_average_w": lambda: mw_to_w(self._field(fields.POWER_AVERAGE)[0]),
            "power_limit_w": lambda: mw_to_w(nvml.nvmlDeviceGetEnforcedPowerLimit(handle)),
            "memory_temp_c": self._memory_temp,
            "thermal_margin_c": partial(nvml.nvmlDeviceGetMarginTemperature, handle),
            "throttle_power_ns": self._throttle(fields.THROTTLE_POWER),
            "throttle_thermal_ns": self._throttle(*throttle[:2]) if throttle else unknown,
            "throttle_hw_ns": self._throttle(throttle.power_brake) if throttle else unknown,
            "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used,
        }

    def _memory_temp(self) -> int | float:
        temp_c, _ = self._field(fields.MEMORY_TEMP)
        if not temp_c:
            raise TelemetryError("READS_ZERO")  # parts without the sensor answer 0 and success
        return temp_c

    def _throttle(self, *counters: int) -> SensorReader:
        """The sum of counters of nanoseconds, none of which can run faster than time."""
        reads = [self._counting(field) for field in counters]
        return lambda: sum(count(at_most_per_s=_COUNTER_BOUND * NS_PER_S) for count in reads)

    def _check_throttle(self, driver: str) -> fields.ThrottleFields | None:
        """Finds the numbering of the throttle counters, and compares it with violation status, once."""
        types = {}
        for field in {*fields.OLD_THROTTLE_FIELDS, *fields.NEW_THROTTLE_FIELDS}:
            try:
                types[field] = self._field(field)[1]
            except (self._nvml.NVMLError, TelemetryError):
                continue
        found = fields.likely_throttle_fields(driver, types)
        if found is None:
            self._facts["throttle_abi"] = "unavailable"
            return None
        checks = {
            "power_ns": self._against_violation((fields.THROTTLE_POWER,), self._nvml.NVML_PERF_POLICY_POWER),
            "low_utilization_ns": self._against_violation(
                (fields.LOW_UTILIZATION,), self._nvml.NVML_PERF_POLICY_LOW_UTILIZATION
            ),
            "thermal_ns": self._against_violation(found[:2], self._nvml.NVML_PERF_POLICY_THERMAL),
        }
        agree = all(
            check is not None and abs(check[0] - check[1]) <= s_to_ns(_VIOLATION_SLACK_S) for check in checks.values()
        )
        expected = found == fields.throttle_fields(driver)
        self._facts["throttle_abi"] = "verified" if agree and expected else "assumed"
        self._facts["throttle_fields"] = list(found)
        self._facts["throttle_check"] = {name: check for name, check in checks.items() if check is not None}
        return found

    def _against_violation(self, counters: Sequence[int], policy: int) -> list[int] | None:
        """Returns nanoseconds of one cause by fields and by violation status; None where either does not answer."""
        try:
            said_ns = sum(int(self._field(field)[0]) for field in counters)
        except (self._nvml.NVMLError, TelemetryError):
            return None
        violation = self._ask(self._nvml.nvmlDeviceGetViolationStatus, policy)
        return None if violation is None else [said_ns, int(violation.violationTime)]

    def close(self) -> None:
        """Frees the GPM buffers."""
        if self._gpm is not None:
            self._gpm.close()

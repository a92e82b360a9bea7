"""The NVML backend: NVIDIA devices through their driver's own library. Needs driver 535 or later; written on 580.

What each call costs was measured on one H200 (benchmarks/results/nvml_check.md). `read` makes no call that blocks:
PCIe throughput (20 ms inside the call) is never asked for, and process lists, violation status and maximum clocks only
when the backend is opened or states its facts. NVML ignores `CUDA_VISIBLE_DEVICES`: the devices are all that the driver
shows, named `gpu0`, `gpu1`, ... in its order, which is that of bus addresses. Code that must not confuse devices uses
their `uuid`.

Decisions that readers of the tables should know:

- `throttle_power_ns` is field 74, the software power cap; `throttle_thermal_ns` the sum of software and hardware
  thermal slowdown, so time in both counts twice; `throttle_hw_ns` is the external power brake.
- `throttle_abi` in the manifest: `verified` where the numbering the driver's version asks for answers like counters and
  agrees with violation status, `assumed` where the latter cannot be asked or another numbering answers, `unavailable`.
- PCIe bytes come from a 32-bit register, which at full speed wraps several times between two reads. The
  number of wraps comes from GPM's PCIe rate. Without GPM the count is right below 21 GB/s at 5 Hz, and too low above.
- A device without a ring has power in `fast.power_instant_w` alone, a value every 100 ms; `power_series` says which.
- On a device in MIG mode NVML answers for the whole device or not at all; columns it refuses are `unavailable`.
"""

import contextlib
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from wattune.errors import TelemetryError
from wattune.telemetry.backend import DeviceInfo, Row
from wattune.telemetry.nvml.device import NvmlDevice
from wattune.telemetry.nvml.gpm import SHORTEST_S


class NvmlBackend:
    """Every NVIDIA device of this node."""

    simulated: Final = False

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Starts NVML and asks every device what it can do.

        Raises `TelemetryError`: NVML cannot be started, or shows no device.
        """
        try:
            self._nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError as error:
            raise TelemetryError("backend nvml needs pynvml; install nvidia-ml-py and try again") from error
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise TelemetryError(f"NVML does not start: {error}; see wattune doctor, and nvidia-smi") from error
        self._open = True
        try:
            driver = str(self._nvml.nvmlSystemGetDriverVersion())
            count = int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            self.close()
            raise TelemetryError(f"the NVIDIA driver does not answer: {error}; see nvidia-smi") from error
        if not count:
            self.close()
            raise TelemetryError(f"NVIDIA driver {driver} shows no device; in containers, ask for devices too")
        opened = [NvmlDevice(self._nvml, slot, driver, clock_ns, wall_ns) for slot in range(count)]
        self._gpus = {gpu.info.device: gpu for gpu in opened}
        for gpu in opened:
            gpu.prime()
        sleep(1.1 * SHORTEST_S)
        for gpu in opened:
            gpu.probe()

    def devices(self) -> Sequence[DeviceInfo]:
        """Returns all devices the driver shows; one that is lost already is listed without its facts."""
        return [gpu.info for gpu in self._gpus.values()]

    def capabilities(self, device: str) -> Mapping[str, Mapping[str, str]]:
        """The tiers `ring`, `fast`, `counter` and `slow`, as found when the backend was opened."""
        return self._gpus[device].capabilities

    def facts(self, device: str) -> Mapping[str, Any]:
        """Returns facts no column holds; see `wattune.telemetry.backend.FactsProvider`.

        `throttle_abi`, `throttle_fields`, `throttle_check` (pairs of nanoseconds by field and by violation status),
        `power_series`, `ring` (see `RingJoin.facts`; from the first drain on), `pci_bus_id`, `mig`, `nvml` (the
        library's version) and `other_processes`; what is unknown is left out.
        """
        return self._gpus[device].facts()

    def read(self, device: str, tier: str) -> Sequence[Row]:
        """Returns one row, or the ring's new samples. A value that fails is None, with NVML's error name beside it."""
        gpu = self._gpus[device]
        return gpu.read_ring() if tier == "ring" else [gpu.read_row(tier)]

    def close(self) -> None:
        """Frees sample buffers and shuts NVML down."""
        if self._open:
            self._open = False
            closers = [gpu.close for gpu in getattr(self, "_gpus", {}).values()]
            for close in (*closers, self._nvml.nvmlShutdown):
                with contextlib.suppress(self._nvml.NVMLError):  # the driver may have lost a device, or be gone itself
                    close()

"""GPU performance monitoring (GPM) by NVML alone: activity and traffic between two samples, without DCGM or root."""

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from wattune.errors import TelemetryError
from wattune.units import s_to_ns

SM_UTIL: Final = 2
"""Percent of time an SM was busy, mean over SMs (nvml.h, nvmlGpmMetricId_t)."""
ANY_TENSOR_UTIL: Final = 5
DRAM_BW_UTIL: Final = 10
PCIE_TX_PER_SEC: Final = 20
"""MiB/s."""
PCIE_RX_PER_SEC: Final = 21

SHORTEST_S: Final = 0.1
"""Between two samples; what is computed over less is not valid (NVML's documentation)."""


class Gpm:
    """Two sample buffers of one device that take turns, each pair one set of means; not for two threads."""

    def __init__(self, nvml: ModuleType, handle: Any, metrics: Sequence[int], clock_ns: Callable[[], int]) -> None:
        """Asks for support and allocates the buffers.

        Raises `TelemetryError`: the device has no GPM; the text is a code, `NVMLError`: NVML refuses.
        """
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise TelemetryError("NOT_SUPPORTED")
        self._nvml, self._handle, self._clock_ns = nvml, handle, clock_ns
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(metrics)
        for index, metric in enumerate(metrics):
            self._request.metrics[index].metricId = metric
        self._positions = {metric: index for index, metric in enumerate(metrics)}
        self._older, self._newer = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._taken_ns: int | None = None
        self._fresh = False
        self._error: Exception | None = None

    def advance(self) -> None:
        """Takes a sample and computes the means since the last one. Too soon after that, there is nothing new.

        A failure is kept for `value` to raise.
        """
        now_ns = self._clock_ns()
        self._fresh, self._error = False, None
        if self._taken_ns is not None and now_ns - self._taken_ns < s_to_ns(SHORTEST_S):
            return
        try:
            self._nvml.nvmlGpmSampleGet(self._handle, self._newer)
            if self._taken_ns is not None:
                self._request.sample1, self._request.sample2 = self._older, self._newer
                self._nvml.nvmlGpmMetricsGet(self._request)
                self._fresh = True
        except self._nvml.NVMLError as error:
            self._error = error
            return
        self._older, self._newer, self._taken_ns = self._newer, self._older, now_ns

    def value(self, metric: int) -> float | None:
        """A metric's mean over the last pair, in NVML's unit; None where there is no new pair.

        Raises `NVMLError`: the sample or this metric failed, `TelemetryError`: it is not a finite number; the text is a
        code.
        """
        if self._error is not None:
            raise self._error
        if not self._fresh:
            return None
        found = self._request.metrics[self._positions[metric]]
        if found.nvmlReturn:
            raise self._nvml.NVMLError(found.nvmlReturn)
        value = float(found.value)
        if not math.isfinite(value):
            raise TelemetryError("NOT_FINITE")
        return value

    def frac(self, metric: int) -> float | None:
        """A metric of percent as a fraction of 1."""
        value = self.value(metric)
        # Two registers read one after the other may disagree by a hair.
        return None if value is None else min(1.0, max(0.0, value / 100))

    def close(self) -> None:
        """Frees the buffers."""
        for sample in (self._older, self._newer):
            self._nvml.nvmlGpmSampleFree(sample)

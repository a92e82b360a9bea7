"""Recorders of phases and peak memory: on the host clock for CPUs, on CUDA events for GPUs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from wattune.schema import PHASES
from wattune.workers.phases import PhaseRecorder, Span, noting


class HostRecorder(PhaseRecorder):
    """For devices whose work is done when the call returns."""

    def __init__(self) -> None:
        """Starts empty, memory counted from now."""
        super().__init__()
        self._process = psutil.Process()
        self._peak_bytes = self._process.memory_info().rss

    @contextmanager
    def phase(self, name: str, *, micro_batch: int | None = None, chunk: int | None = None) -> Iterator[None]:
        """Spans the enclosed work, and looks at the resident set when it ends."""
        with super().phase(name, micro_batch=micro_batch, chunk=chunk):
            yield
        self.memory_peak_bytes()

    def memory_peak_bytes(self) -> int:
        """Highest resident set of this process seen at the end of any phase."""
        self._peak_bytes = max(self._peak_bytes, self._process.memory_info().rss)
        return int(self._peak_bytes)


class CudaRecorder(PhaseRecorder):
    """For CUDA and HIP devices: events on the compute stream, read after the step, so that no phase makes a wait.

    Device time is tied to the host clock where the `step` phase begins. The device is idle then, so the event happens
    as it is recorded, to within a kernel launch (about 10 us).
    """

    def __init__(self, device: torch.device) -> None:
        """Starts empty, memory counted from now."""
        super().__init__()
        self._device = device
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event, int | None, int | None]] = []
        self._tie_ns = 0
        self._tie: torch.cuda.Event | None = None
        torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def phase(self, name: str, *, micro_batch: int | None = None, chunk: int | None = None) -> Iterator[None]:
        """Spans the enclosed work from the moment the stream reaches it until the stream has done it."""
        assert name in PHASES, name
        start, end = _event(), _event()
        if name == "step":
            torch.cuda.synchronize(self._device)
        start.record()
        if name == "step":
            self._tie_ns, self._tie = time.monotonic_ns(), start
        try:
            with noting(name):
                yield
        finally:
            end.record()
            self._spans.append((name, start, end, micro_batch, chunk))

    def take(self) -> tuple[Span, ...]:
        """Waits for the device, then gives the spans so far in order of start; the recorder is then empty."""
        torch.cuda.synchronize(self._device)
        for name, start, end, micro_batch, chunk in self._spans:
            self.spans.append(Span(name, self._mono_ns(start), self._mono_ns(end), micro_batch, chunk))
        self._spans = []
        return super().take()

    def _mono_ns(self, event: torch.cuda.Event) -> int:
        assert self._tie is not None, "the step phase comes first"
        return self._tie_ns + int(self._tie.elapsed_time(event) * 1e6)

    def memory_peak_bytes(self) -> int:
        """Highest memory torch has allocated on the device."""
        return int(torch.cuda.max_memory_allocated(self._device))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


Recorder = HostRecorder | CudaRecorder


def recorder_for(device: torch.device) -> Recorder:
    """Returns a recorder that measures a device correctly: by CUDA events on GPUs, by the host clock elsewhere."""
    return CudaRecorder(device) if device.type == "cuda" else HostRecorder()


def with_idle(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Adds a `wait` span wherever a pipeline stage did nothing between the start of the step and its optimizer.

    Spans are of one step in order of start: `step`, then phases that do not overlap. Between its actions a stage only
    waits for its neighbours.
    """
    step, *phases = spans
    result, now_ns = [step], step.start_mono_ns
    for span in phases:
        if span.start_mono_ns > now_ns and span.phase != "optimizer":
            result.append(Span("wait", now_ns, span.start_mono_ns))
        result.append(span)
        now_ns = max(now_ns, span.end_mono_ns)
    return tuple(result)

"""Loads of known times, to calibrate sensors with: square waves of products, and products or copies without pause.

    python -m wattune.workers.calibration_load m.parquet --node n0 --name gpu0 --device cuda:0 --wave 0.5 20 --wave 4 3
    python -m wattune.workers.calibration_load m.parquet --node n0 --name gpu0 --device cuda:0 --steady 60
    python -m wattune.workers.calibration_load m.parquet --node n0 --name gpu0 --device cuda:0 --copies 10

A process of its own, so that no other thread of Python delays an edge. It says `ready` on standard output once warm,
and leaves a table of `wattune.schema.SPANS` behind. Every stretch of work is one `step`: in a wave the time from the
first product queued to the last one finished, the device idle in between; when steady, a fixed number of products or
copies.
"""

import argparse
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from wattune.clock import ClockAnchor
from wattune.storage.files import write_table
from wattune.units import ns_to_s, s_to_ns
from wattune.workers.phases import Span, spans_table

REST_S: Final = 2.0
"""Idle time before the first, between two, and after the last wave: longer than the delay and window of any sensor
seen (H200: average power is a mean of 1 s, refreshed every 0.1 s), so that waves do not run into each other."""

DUTY_FRAC: Final = 0.5
"""Share of a period in which it works."""

GPU_SIZE: Final = 8192
"""Rows and columns of bf16 products: 1.6 ms each on H200, and at its power limit when repeated (670 TFLOP/s seen)."""

CPU_SIZE: Final = 512
"""Rows and columns of fp32 products on a CPU: some milliseconds on one thread."""

COPY_BYTES: Final = 2**28
"""Bytes of one copy in each direction: 5 ms at the 55 GB/s of a PCIe 5 link of 16 lanes, so that starting it costs
nothing beside it."""

QUEUED: Final = 2
"""Products or copies queued ahead: enough to leave the GPU no gap, few enough to end on time."""

STEP_S: Final = 0.03
"""Length that steady steps are made for."""

WARM_S: Final = 1.0
"""Work before `ready`: libraries loaded, kernels chosen, clocks up."""

_STOPPED: Final = 128 + signal.SIGTERM


class Work(ABC):
    """Equal pieces of work on one device, one after another."""

    def __init__(self, device: str) -> None:
        """Takes the device: `cpu`, or `cuda:` and an index, which becomes torch's current one."""
        self._cuda = device != "cpu"
        if self._cuda:  # events and the streams they are recorded on are the current device's
            torch.cuda.set_device(device)
        self._queued: deque[torch.cuda.Event] = deque()

    @abstractmethod
    def _start(self) -> None:
        """Queues one piece on the current stream, or does it on a CPU."""

    def run(self, count: int) -> None:
        """Does so many pieces and waits for the last one."""
        for _ in range(count):
            self._queue()
        self._wait(0)

    def run_until(self, deadline_ns: int) -> int:
        """Works until a monotonic time and waits for the last piece; returns how many it did, at least one."""
        count = 0
        while not count or time.monotonic_ns() < deadline_ns:
            self._queue()
            self._wait(QUEUED)
            count += 1
        self._wait(0)
        return count

    def _queue(self) -> None:
        self._start()
        if self._cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._queued.append(event)

    def _wait(self, most: int) -> None:
        while len(self._queued) > most:
            self._queued.popleft().synchronize()


class MatrixProducts(Work):
    """Square matrix products."""

    def __init__(self, device: str) -> None:
        """Makes the factors; a fixed seed, since power depends on the numbers multiplied."""
        super().__init__(device)
        size, dtype = (GPU_SIZE, torch.bfloat16) if self._cuda else (CPU_SIZE, torch.float32)
        generator = torch.Generator(device).manual_seed(0)
        self._left, self._right = (
            torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2)
        )
        self._product = torch.empty_like(self._left)

    def _start(self) -> None:
        torch.matmul(self._left, self._right, out=self._product)


class HostCopies(Work):
    """Copies between pinned memory and the device, both ways at once: all that the link between them carries."""

    def __init__(self, device: str) -> None:
        """Takes the memory; on a CPU, both ends are the host's."""
        super().__init__(device)
        kind = torch.uint8
        self._pairs = []
        for to_device in (True, False):
            here = torch.zeros(COPY_BYTES, dtype=kind, pin_memory=self._cuda)
            there = torch.zeros(COPY_BYTES, dtype=kind, device=device)
            self._pairs.append((there, here) if to_device else (here, there))
        streams = len(self._pairs) if self._cuda else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(streams)]  # type: ignore[no-untyped-call]

    def _start(self) -> None:
        if not self._cuda:
            for target, source in self._pairs:
                target.copy_(source)
            return
        # A stream for each direction: one stream's copies run after one another, whatever their direction.
        for stream, (target, source) in zip(self._streams, self._pairs, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)


def square_wave(work: Work, period_s: float, num_periods: int) -> list[Span]:
    """Works the first half of each period and rests the second, on absolute deadlines, so that no error adds up.

    Returns one span a period: when it really worked, which may be some milliseconds longer than half of it.
    """
    period_ns, spans = s_to_ns(period_s), []
    first_ns = time.monotonic_ns()
    for index in range(num_periods):
        due_ns = first_ns + index * period_ns
        _sleep_until(due_ns)
        start_ns = time.monotonic_ns()
        work.run_until(due_ns + round(DUTY_FRAC * period_ns))
        spans.append(Span("step", start_ns, time.monotonic_ns()))
    _sleep_until(first_ns + num_periods * period_ns)
    return spans


def steady(work: Work, duration_s: float) -> list[Span]:
    """Works without pause in steps of a fixed number of pieces, about `STEP_S` long; the last ends after the time."""
    start_ns = time.monotonic_ns()
    count = work.run_until(start_ns + s_to_ns(10 * STEP_S))
    per_step = max(1, round(count * STEP_S / ns_to_s(time.monotonic_ns() - start_ns)))
    now_ns, spans = time.monotonic_ns(), []
    deadline_ns = now_ns + s_to_ns(duration_s)
    while now_ns < deadline_ns:
        work.run(per_step)
        begun_ns, now_ns = now_ns, time.monotonic_ns()
        spans.append(Span("step", begun_ns, now_ns))
    return spans


def _sleep_until(deadline_ns: int) -> None:
    time.sleep(max(0.0, ns_to_s(deadline_ns - time.monotonic_ns())))


def _stop(_number: int, _frame: object) -> None:
    sys.exit(_STOPPED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the loads of the command line and writes their spans; returns 143 where SIGTERM stopped it, without any."""
    parser = argparse.ArgumentParser(prog="python -m wattune.workers.calibration_load")
    parser.add_argument("spans", type=Path, help="the Parquet file to write")
    parser.add_argument("--node", required=True, help="this node's name in every span")
    parser.add_argument("--name", required=True, help="the device's name in every span, as telemetry has it")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:<index>")
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--wave", action="append", nargs=2, type=float, metavar=("PERIOD_S", "PERIODS"))
    load.add_argument("--steady", type=float, metavar="SECONDS")
    load.add_argument("--copies", type=float, metavar="SECONDS")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)
    if given.device == "cpu":
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        parser.error(f"--device {given.device}: this torch ({torch.__version__}) sees no GPU")
    anchor = ClockAnchor.now()
    work = HostCopies(given.device) if given.copies is not None else MatrixProducts(given.device)
    work.run_until(time.monotonic_ns() + s_to_ns(WARM_S))
    print("ready", flush=True)  # noqa: T201 - the process that started this waits for it
    if given.wave is None:
        spans = steady(work, given.steady if given.copies is None else given.copies)
    else:
        spans = []
        time.sleep(REST_S)
        for period_s, num_periods in given.wave:
            spans += square_wave(work, period_s, int(num_periods))
            time.sleep(REST_S)
    steps = [(number, [span]) for number, span in enumerate(spans)]
    write_table(given.spans, spans_table(steps, node=given.node, device=given.name, rank=0, anchor=anchor))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Signs of life of a command that has told no step yet: output, work of its processors, memory, files."""

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import psutil

LEAST_CPU_FRAC: Final = 0.05
"""Share of a processor that is work: threads that only look whether something has come take less."""

LEAST_CPU_S: Final = 0.5
LEAST_BYTES: Final = 2**20
"""Bytes of memory, or of files read and written, since the last sign of life."""


class SignsOfLife:
    """Looks for signs of life. Of processes elsewhere, as behind `docker run` or `srun`, it sees the output alone."""

    def __init__(self) -> None:
        """Counts from now."""
        self._since_s, self._num_lines = time.monotonic(), 0
        self._before: dict[int, tuple[float, int]] = {}

    def quiet_s(self, pids: Iterable[int], num_lines: int) -> float:
        """Looks at the processes and the number of lines of output; returns the seconds since the last sign."""
        now_s, used = time.monotonic(), {pid: _used(pid) for pid in pids}
        quiet_s = now_s - self._since_s
        least_cpu_s = LEAST_CPU_S + LEAST_CPU_FRAC * quiet_s
        alive = num_lines != self._num_lines
        for pid, (cpu_s, num_bytes) in used.items():
            cpu_before_s, bytes_before = self._before.get(pid, (0.0, 0))
            alive |= cpu_s - cpu_before_s > least_cpu_s or num_bytes - bytes_before > LEAST_BYTES
        if alive:
            self._since_s, self._num_lines, self._before = now_s, num_lines, used
        return time.monotonic() - self._since_s


def _used(pid: int) -> tuple[float, int]:
    """Returns the processor time of a process, and the bytes of its memory and of all it has read and written."""
    cpu_s, num_bytes = 0.0, 0
    with suppress(psutil.Error):  # it has ended since, or is another user's
        process = psutil.Process(pid)
        with process.oneshot():
            cpu_s, num_bytes = sum(process.cpu_times()[:2]), process.memory_info().rss
            files = process.io_counters()
            num_bytes += files.read_chars + files.write_chars
    return cpu_s, num_bytes

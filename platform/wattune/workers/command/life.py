"""Signs of life of a command that has told no step yet: output, work of its processors, memory, files."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

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
    with suppress(OSError, ValueError, IndexError):  # it has ended since, or is another user's
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        cpu_s, num_bytes = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, int(fields[21]) * _PAGE_BYTES
        with suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            num_bytes += int(lines[0].split()[1]) + int(lines[1].split()[1])
        return cpu_s, num_bytes
    return 0.0, 0

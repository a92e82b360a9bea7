"""The manifest: facts a sampler knows of itself and its recording.

It states facts; `analysis` judges them. Layout of `manifest.json`, unknown facts left out:

- `node`, `simulated`, `closed` (every stream has its end mark), `ended` (why, once it has),
- `versions`: wattune, python, pyarrow, kernel; `boot_id`: monotonic times compare within one boot,
- `devices`: by name, `backend`, the fields of `DeviceInfo`, `capabilities` by tier and column, and the facts of a
  backend that is a `FactsProvider`: `at_start`, and `at_end` once it has ended,
- `tiers`: by name, see `TierRecord`, with `rows` and `segments` as `store` counted them,
- `clock`: `start` and `end`, each `mono_ns` and `wall_ns` read together, and `steps`, see `ClockWatch`,
- `sampler`: `pid`, `cpu_s`, `elapsed_s`, `cpu_frac`, `memory_peak_bytes`, `cpus`.

Whoever collects a recording adds facts that only its rows or other nodes show: `measured`, by device, see
`wattune.telemetry.files.coverage`, `died`, the last words of a sampler that nobody had told to end, and
`clock_offset_ns` with `clock_offset_uncertainty_ns`; of devices also `own_processes`, those of the trial or the
recorded command, which are then not among the other processes.
"""

import os
import platform
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from wattune.telemetry.backend import ERROR_SUFFIX, Row
from wattune.telemetry.files.pacing import Histogram, Schedule
from wattune.units import kib_to_bytes, ns_to_s
from wattune.version import __version__

LEAST_CLOCK_STEP_NS: Final = 5_000_000
"""Change of the wall clock against the monotonic one that is a step. NTP's slewing, 500 ppm at most (adjtimex(2)),
moves it by a tenth of that in a second."""
_CLOCK_PAIR_NS: Final = 1_000_000
"""Longest time between two clock readings that still belong together."""


def software() -> dict[str, Any]:
    """The versions behind a recording, and the boot its monotonic clock counts from."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return {
        "versions": {
            "wattune": __version__,
            "python": platform.python_version(),
            "pyarrow": pa.__version__,
            "kernel": platform.release(),
        },
        **({"boot_id": boot_id.read_text().strip()} if boot_id.exists() else {}),
    }


class SamplerCost:
    """Cost of sampling to this process from now on."""

    def __init__(self) -> None:
        self._start_cpu_s, self._start_ns = time.process_time(), time.monotonic_ns()

    def to_json(self) -> dict[str, Any]:
        """Plain data: CPU time of all threads, as a fraction of one processor too; memory; where it may run."""
        cpu_s, elapsed_s = time.process_time() - self._start_cpu_s, ns_to_s(time.monotonic_ns() - self._start_ns)
        return {
            "pid": os.getpid(),
            "cpu_s": cpu_s,
            "elapsed_s": elapsed_s,
            "cpu_frac": cpu_s / elapsed_s if elapsed_s else 0.0,
            # Linux gives ru_maxrss in KiB (getrusage(2)).
            "memory_peak_bytes": kib_to_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss),
            "cpus": sorted(os.sched_getaffinity(0)),
        }


class ClockWatch:
    """Notices when the wall clock is set; the driver stamps its power history with it."""

    def __init__(self, clock_ns: Callable[[], int], wall_ns: Callable[[], int]) -> None:
        self._clock_ns, self._wall_ns = clock_ns, wall_ns
        self._offset_ns: int | None = None
        self.steps: list[dict[str, int]] = []
        """`mono_ns`, the time it was noticed, and `step_ns`, the jump of the wall clock."""
        self.look()

    def look(self) -> None:
        """Compares the clocks; to be called about once a second."""
        before_ns = self._clock_ns()
        wall_ns = self._wall_ns()
        after_ns = self._clock_ns()
        if after_ns - before_ns > _CLOCK_PAIR_NS:
            return  # interrupted between the two: next time
        offset_ns = wall_ns - (before_ns + after_ns) // 2
        if self._offset_ns is not None and abs(offset_ns - self._offset_ns) >= LEAST_CLOCK_STEP_NS:
            self.steps.append({"mono_ns": after_ns, "step_ns": offset_ns - self._offset_ns})
        self._offset_ns = offset_ns


class TierRecord:
    """Record of one tier: its pace, its calls, its failures."""

    def __init__(self, requested_hz: float, schedule: Schedule) -> None:
        self._requested_hz, self._schedule = requested_hz, schedule
        self._lateness, self._read = Histogram(), Histogram()
        self._errors: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._last_ns: dict[str, int] = {}
        self._longest_gap_ns = 0

    def add_tick(self, lateness_ns: int) -> None:
        """Counts one served deadline."""
        self._lateness.add_ns(lateness_ns)

    def add_read(self, device: str, start_ns: int, end_ns: int) -> None:
        """Counts one call to the backend, by the monotonic clock before and after it."""
        self._read.add_ns(end_ns - start_ns)
        self._longest_gap_ns = max(self._longest_gap_ns, start_ns - self._last_ns.get(device, start_ns))
        self._last_ns[device] = start_ns

    def add_errors(self, row: Row) -> None:
        """Counts the failed reads of a row, by column and the vendor's code."""
        for column, code in row.items():
            if column.endswith(ERROR_SUFFIX):
                self._errors[column.removesuffix(ERROR_SUFFIX)][str(code)] += 1

    def to_json(self) -> dict[str, Any]:
        """Plain data: rates in Hz and per device, durations in seconds, `errors` by column and code."""
        taken, missed = self._schedule.taken, self._schedule.missed
        # Deadlines are absolute, so the share that was served is the share of the rate.
        achieved = {"achieved_hz": self._requested_hz * taken / (taken + missed)} if taken else {}
        gap = {"longest_gap_s": ns_to_s(self._longest_gap_ns)} if self._longest_gap_ns else {}
        return {
            "requested_hz": self._requested_hz,
            **achieved,
            "ticks": taken,
            "missed_ticks": missed,
            **gap,
            "lateness": self._lateness.to_json(),
            "read": self._read.to_json(),
            "errors": {column: dict(codes) for column, codes in self._errors.items()},
        }

"""Facts of a manifest: the cost of sampling, steps of the wall clock, and the record of a tier."""

import os
from pathlib import Path

import pytest

from wattune.telemetry.files.manifest import LEAST_CLOCK_STEP_NS, ClockWatch, SamplerCost, TierRecord, software
from wattune.telemetry.files.pacing import Schedule


def test_a_recording_names_its_software_and_the_boot_its_clock_counts_from() -> None:
    found = software()
    assert set(found["versions"]) == {"wattune", "python", "pyarrow", "kernel"}
    assert found["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_the_cost_of_sampling_is_this_process_s_from_the_start_on() -> None:
    cost = SamplerCost()
    sum(range(200_000))
    first, later = cost.to_json(), cost.to_json()
    assert first["pid"] == os.getpid() and first["cpus"] == sorted(os.sched_getaffinity(0))
    assert 0 < first["cpu_s"] <= later["cpu_s"] and 0 < first["elapsed_s"] < later["elapsed_s"]
    assert first["cpu_frac"] == pytest.approx(first["cpu_s"] / first["elapsed_s"])
    assert first["memory_peak_bytes"] > 2**20


class _Clocks:
    """A monotonic clock that moves only when told to, and a wall clock ahead of it."""

    def __init__(self) -> None:
        self.mono_ns, self.offset_ns, self.interruption_ns = 0, 10**18, 0

    def wall_ns(self) -> int:
        now_ns = self.mono_ns + self.offset_ns
        self.mono_ns += self.interruption_ns
        return now_ns


def test_a_wall_clock_that_is_set_is_a_step_and_slewing_is_none() -> None:
    clocks = _Clocks()
    watch = ClockWatch(lambda: clocks.mono_ns, clocks.wall_ns)
    for moved_ns in (LEAST_CLOCK_STEP_NS - 1, -7_000_000_000, 0):
        clocks.mono_ns += 10**9
        clocks.offset_ns += moved_ns
        watch.look()
    assert watch.steps == [{"mono_ns": 2 * 10**9, "step_ns": -7_000_000_000}]


def test_clocks_read_with_an_interruption_between_them_are_compared_next_time() -> None:
    clocks = _Clocks()
    watch = ClockWatch(lambda: clocks.mono_ns, clocks.wall_ns)
    clocks.offset_ns, clocks.interruption_ns = clocks.offset_ns + 10**9, 2_000_000
    watch.look()
    assert watch.steps == []
    clocks.interruption_ns = 0
    watch.look()
    assert [step["step_ns"] for step in watch.steps] == [10**9]


def test_a_tier_s_record_counts_ticks_gaps_and_errors() -> None:
    schedule = Schedule(10.0, 0)
    record = TierRecord(5.0, schedule)
    assert "achieved_hz" not in record.to_json() and record.to_json()["read"] == {"bins": []}
    for now_ns in (0, 100_000_000, 350_000_000):
        record.add_tick(schedule.take(now_ns))
        for device in ("gpu0", "gpu1"):
            record.add_read(device, now_ns, now_ns + 1_000_000)
    record.add_errors({"power_w": None, "power_w_error": "TIMEOUT", "gpu_temp_c": 40.0})
    found = record.to_json()
    assert (found["ticks"], found["missed_ticks"], found["requested_hz"]) == (3, 1, 5.0)
    assert found["achieved_hz"] == 5.0 * 3 / 4
    assert found["longest_gap_s"] == pytest.approx(0.25) and found["lateness"]["max_s"] == pytest.approx(0.05)
    assert sum(count for _, count in found["read"]["bins"]) == 6
    assert found["errors"] == {"power_w": {"TIMEOUT": 1}}

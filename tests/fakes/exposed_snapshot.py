"""A snapshot of a recording with a value in every column, as a follower would take it."""

from wattune.recording.serving.follower import ClockLost, DeviceView, Latest, Peaks, Snapshot
from wattune.schema import TELEMETRY

NOW_NS = 100_000_000_000


def row(tier: str, **values: float) -> dict[str, Latest]:
    return {tier: {**values, "mono_ns": NOW_NS - 500_000_000}}


def full_row(tier: str) -> dict[str, Latest]:
    return row(tier, **{name: 8.0 for name in TELEMETRY[tier].names if name not in ("node", "device")})


def view(**changes: object) -> DeviceView:
    whole = {
        "facts": {"uuid": "GPU-1", "name": "NVIDIA H200", "backend": "nvml", "sm_clock_max_mhz": 1980.0, "slot": 0},
        "latest": {**full_row("fast"), **full_row("counter"), **full_row("slow")},
        "peaks": Peaks(since_start_w={"20ms": 930.0, "1s": 700.0}, recent_w={"1s": 650.0}),
        "clock_lost": ClockLost(assessed_s=10.0, throttled_s=9.0, lost_s=1.5, lost_by_cause_s={"power": 1.5}),
    }
    return DeviceView(**(whole | changes))


def snapshot(**changes: object) -> Snapshot:
    whole = {
        "taken_mono_ns": NOW_NS,
        "recording": "mine",
        "start_wall_ns": 1_700_000_000_000_000_000,
        "node": "n0",
        "sampler_alive": True,
        "manifest": {
            "sampler": {"cpu_s": 1.5},
            "tiers": {"fast": {"missed_ticks": 3, "errors": {"gpu_temp_c": {"999": 2}}}},
        },
        "devices": {"gpu0": view(), "gpu1": view(facts={"uuid": "GPU-2", "sm_clock_max_mhz": 1980.0})},
        "host": full_row("host")["host"],
        "peaks": Peaks(since_start_w={"1s": 1400.0}, recent_w={"1s": 1300.0}),
        "cpu_s": 0.25,
    }
    return Snapshot(**(whole | changes))

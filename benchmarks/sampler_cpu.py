"""What a sampler of eight GPUs costs one processor, at the default rates.

    python benchmarks/sampler_cpu.py [SECONDS]     # prints the table of benchmarks/results/sampler_cpu.md

The devices give the rows of a real recording (tests/golden/h200x4/dp4) after as long as the driver takes for them,
slept away: what a driver call costs the processor is in benchmarks/sampler_overhead.py, on GPUs. Everything else is the
sampler's own: pacing, rows, batches, compression, checksums, files, manifest. Beside it, in the same run: one device,
and a loop that only reads, with `time.sleep` and without storing, as most tools poll.
"""

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from wattune.schema import TELEMETRY
from wattune.telemetry.backend import AVAILABLE, DeviceInfo, Row
from wattune.telemetry.sampling import DEFAULT_RATES_HZ, Sampler
from wattune.telemetry.store import read_manifest, read_tables

RECORDED: Final = Path(__file__).parent.parent / "tests/golden/h200x4/dp4/telemetry/node0"
DEVICES: Final = 8
TIERS: Final = ("ring", "fast", "counter", "slow")
CALL_S: Final = {"ring": 0.4e-3, "fast": 10e-6, "counter": 0.5e-3, "slow": 6e-3}
"""How long the driver takes, measured on H200 with driver 580."""
SAMPLES: Final = 50
"""Of a ring, a drain a second."""
TARGET_FRAC: Final = 0.10


class RecordedBackend:
    """Devices that give recorded rows, one after the other."""

    simulated: Final = False

    def __init__(self, num_devices: int) -> None:
        """Loads the recording."""
        self._names = [f"gpu{index}" for index in range(num_devices)]
        self._rows = {tier: self._load(tier) for tier in TIERS}
        self._next = dict.fromkeys(TIERS, 0)

    @staticmethod
    def _load(tier: str) -> list[dict[str, Any]]:
        table = pq.read_table(RECORDED / f"{tier}.parquet")
        values = [name for name in TELEMETRY[tier].names if name not in ("node", "device", "mono_ns", "wall_ns")]
        return list(table.select(values).to_pylist())

    def devices(self) -> Sequence[DeviceInfo]:
        """H200s by name."""
        return [DeviceInfo(device=name, name="NVIDIA H200") for name in self._names]

    def capabilities(self, device: str) -> Mapping[str, Mapping[str, str]]:
        """Everything that was recorded."""
        assert device in self._names
        return {tier: dict.fromkeys(self._rows[tier][0], AVAILABLE) for tier in TIERS}

    def read(self, device: str, tier: str) -> Sequence[Row]:
        """The next rows of the recording, after the driver's time."""
        assert device in self._names
        time.sleep(CALL_S[tier])
        count, rows = SAMPLES if tier == "ring" else 1, self._rows[tier]
        start = self._next[tier] = (self._next[tier] + count) % (len(rows) - count)
        return rows[start : start + count]

    def close(self) -> None:
        """Nothing is open."""


def sampled(num_devices: int, seconds: float) -> dict[str, Any]:
    """The manifest of a recording of so many devices."""
    end_s = time.monotonic() + seconds

    def wait(timeout_s: float) -> str | None:
        time.sleep(timeout_s)
        return "end" if time.monotonic() >= end_s else None

    with tempfile.TemporaryDirectory() as temporary:
        folder, backends = Path(temporary), {"recorded": RecordedBackend(num_devices)}
        Sampler(folder, backends, node="node0", expired=lambda: False, wait=wait).run()
        tables, notes = read_tables(folder)
        assert notes == [] and set(tables) == set(TIERS)
        return read_manifest(folder)


def polled(num_devices: int, seconds: float) -> float:
    """The share of a processor that reading the same values costs by itself."""
    backend, cpu_s, end_s = RecordedBackend(num_devices), time.process_time(), time.monotonic() + seconds
    next_s = dict.fromkeys(TIERS, time.monotonic())
    while (now_s := time.monotonic()) < end_s:
        for tier in TIERS:
            if now_s >= next_s[tier]:
                next_s[tier] += 1 / DEFAULT_RATES_HZ[tier]
                for info in backend.devices():
                    backend.read(info.device, tier)
        time.sleep(max(0.0, min(next_s.values()) - time.monotonic()))
    return (time.process_time() - cpu_s) / seconds


def main() -> None:
    """Measures and prints."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    print("| what | devices | share of one processor | missed ticks of the fast tier | its p99 lateness |")
    print("|---|---|---|---|---|")
    for num_devices in (1, DEVICES):
        manifest = sampled(num_devices, seconds)
        cpu_frac, fast = manifest["sampler"]["cpu_frac"], manifest["tiers"]["fast"]
        late = f"{1e3 * fast['lateness']['p99_s']:.1f} ms"
        missed = f"{fast['missed_ticks']} of {fast['ticks'] + fast['missed_ticks']}"
        print(f"| sampler and store | {num_devices} | {100 * cpu_frac:.1f} % | {missed} | {late} |")
    print(f"| reading alone | {DEVICES} | {100 * polled(DEVICES, seconds):.1f} % | | |")
    print(f"\n{DEVICES} devices below {100 * TARGET_FRAC:.0f} % of a processor: {cpu_frac < TARGET_FRAC}")


if __name__ == "__main__":
    main()

"""Measures the processor time of a sampler of eight GPUs at the default rates.

    python benchmarks/sampler_cpu.py [SECONDS]     # prints the rows of benchmarks/results/sampler_cpu.md

The devices give the rows of a real recording (tests/golden/h200x4/dp4) after as long as the driver takes for them,
slept away. Everything else is the sampler's own: pacing, rows, batches, compression, checksums, files, manifest. Beside
it, in the same run:

- one device, and a loop that only reads, with `time.sleep` and without storing, as most tools poll;
- the process a study starts, on the replay backend and the host's: the four recorded devices, each twice;
- driver calls that keep the processor busy for as long as they take, which is the most they can cost: what they do cost
  is measured on one GPU (benchmarks/results/sampler_overhead.md, benchmarks/results/telemetry_training.md).
"""

import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from harness import Found, Rows, benchmark

from wattune.schema import TELEMETRY
from wattune.storage.measured import MeasuredFolder
from wattune.telemetry.backend import AVAILABLE, DeviceInfo, Row
from wattune.telemetry.files.segments import read_manifest, read_tables
from wattune.telemetry.sampler.loop import DEFAULT_RATES_HZ, Sampler
from wattune.telemetry.sampler.process import SamplerProcess

RECORDED: Final = Path(__file__).parent.parent / "tests/golden/h200x4/dp4/telemetry/node0"
DEVICES: Final = 8
TIERS: Final = ("ring", "fast", "counter", "slow")
CALL_S: Final = {"ring": 0.6e-3, "fast": 10e-6, "counter": 1.0e-3, "slow": 5.5e-3}
"""Seconds that the driver takes, medians on H200 with driver 580 (benchmarks/results/nvml_check.md)."""
SAMPLES: Final = 50
"""Of a ring, a drain a second."""
TARGET_FRAC: Final = 0.10


class RecordedBackend:
    """Devices that give recorded rows, one after the other."""

    simulated: Final = False

    def __init__(self, num_devices: int, *, busy: bool = False) -> None:
        """Loads the recording.

        Args:
            num_devices: How many there are.
            busy: Whether the processor works while the driver is waited for.
        """
        self._busy = busy
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
        if self._busy:
            end_s = time.perf_counter() + CALL_S[tier]
            while time.perf_counter() < end_s:
                pass
        else:
            time.sleep(CALL_S[tier])
        count, rows = SAMPLES if tier == "ring" else 1, self._rows[tier]
        start = self._next[tier] = (self._next[tier] + count) % (len(rows) - count)
        return rows[start : start + count]

    def close(self) -> None:
        """Nothing is open."""


def sampled(num_devices: int, seconds: float, *, busy: bool = False) -> dict[str, Any]:
    """The manifest of a recording of so many devices; see `RecordedBackend`."""
    end_s = time.monotonic() + seconds

    def wait(timeout_s: float) -> str | None:
        time.sleep(timeout_s)
        return "end" if time.monotonic() >= end_s else None

    with tempfile.TemporaryDirectory() as temporary:
        folder, backends = Path(temporary), {"recorded": RecordedBackend(num_devices, busy=busy)}
        Sampler(folder, backends, node="node0", expired=lambda: False, wait=wait).run()
        tables, notes = read_tables(folder)
        assert notes == [] and set(tables) == set(TIERS)
        return read_manifest(folder)


def replayed(seconds: float) -> dict[str, Any]:
    """The manifest of a sampler process that reads the host and the recorded devices, each twice."""
    with tempfile.TemporaryDirectory() as temporary:
        recording, folder = MeasuredFolder(Path(temporary) / "recording"), Path(temporary) / "sampler"
        doubled = {}
        for tier in TIERS:
            table = pq.read_table(RECORDED / f"{tier}.parquet")
            names = table["device"].cast(pa.string())
            again = pc.replace_substring_regex(names, "^gpu", "gpu1")
            column = table.column_names.index("device")
            tables = [table.set_column(column, "device", name.dictionary_encode()) for name in (names, again)]
            doubled[tier] = pa.concat_tables(tables).unify_dictionaries()
        recording.write_telemetry("node0", doubled, {"node": "node0"})
        backends = [f"replay:{recording.path}?loop", "host"]
        sampler = SamplerProcess.start(folder, node="node0", backends=backends, lease_s=seconds + 60)
        time.sleep(seconds)
        manifest = sampler.stop()
    assert len(manifest["devices"]) == DEVICES + 1, "eight devices and the host"
    return manifest


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


@benchmark(
    claim=f"Sampling {DEVICES} devices and their host takes a small share of one processor.",
    bar=f"share of the sampler process over replayed devices below {100 * TARGET_FRAC:g} %",
    options=lambda parser: parser.add_argument("seconds", type=float, nargs="?", default=30.0, help="of every row"),
)
def main(given: Namespace) -> Found:
    """Measures the sampler over replayed and over busy devices."""
    seconds, replay = given.seconds, "sampler process, replayed devices and host"
    measured = {
        ("sampler and store", 1): sampled(1, seconds),
        ("sampler and store", DEVICES): sampled(DEVICES, seconds),
        (replay, DEVICES): replayed(seconds),
        ("sampler and store, driver calls busy", 1): sampled(1, seconds, busy=True),
        ("sampler and store, driver calls busy", DEVICES): sampled(DEVICES, seconds, busy=True),
    }
    rows = Rows("what", "num_devices", "processor_frac", "num_missed_ticks", "num_ticks", "p99_lateness_s")
    for (what, num_devices), manifest in measured.items():
        fast = manifest["tiers"]["fast"]
        ticks = fast["ticks"] + fast["missed_ticks"]
        share = manifest["sampler"]["cpu_frac"]
        rows.add(what, num_devices, share, fast["missed_ticks"], ticks, fast["lateness"].get("p99_s"))
    rows.add("reading alone", DEVICES, polled(DEVICES, seconds), None, None, None)
    share = measured[replay, DEVICES]["sampler"]["cpu_frac"]
    return Found(rows, missed=[f"{100 * share:.1f} %"] if share >= TARGET_FRAC else [])


if __name__ == "__main__":
    main()

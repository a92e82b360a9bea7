"""Measures the size of an hour of telemetry of eight GPUs, and the time to read it back and summarise it.

    python benchmarks/store.py            # prints the rows of benchmarks/results/store.md

Readings are drawn from a real recording (tests/golden/h200x4/dp4: four H200s under load) at the sampler's default
rates: consecutive differences of times and counters and blocks of gauges, each at the sensor's own resolution, so that
nothing repeats that would not. Peers in the same run: the same rows as CSV, and as an uncompressed Arrow stream.
"""

import itertools
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from harness import Found, Rows, benchmark, timed

from wattune.analysis.run_data import RunData
from wattune.analysis.summary import Summary, summarize
from wattune.schema import TELEMETRY, table_schema
from wattune.storage.measured import MeasuredFolder
from wattune.telemetry.files.segments import SEGMENT_S, TierWriter, read_tables
from wattune.telemetry.sampler.loop import DEFAULT_RATES_HZ, HAND_OVER_S
from wattune.units import NS_PER_S, s_to_ns

RECORDED: Final = Path(__file__).parent.parent / "tests/golden/h200x4/dp4/telemetry/node0"
BUSY_S: Final = (47.0, 59.0)
"""Seconds of the recording in which all four devices were under load."""
DEVICES: Final = 8
HOUR_S: Final = 3600.0
WALL_NS: Final = 1_795_233_000 * NS_PER_S
RING_HZ: Final = 50.0
TARGETS_MB_PER_H: Final = {"parquet": 20.0, "stream": 35.0}

Array = npt.NDArray[Any]


def busy(tier: str) -> list[pa.Table]:
    """The recorded rows under load, by device."""
    table = pq.read_table(RECORDED / f"{tier}.parquet")
    seconds = table["mono_ns"].to_numpy() / NS_PER_S
    table = table.filter(pa.array((seconds >= BUSY_S[0]) & (seconds <= BUSY_S[1])))
    names = np.array(table["device"].to_pylist())
    return [table.filter(pa.array(names == name)) for name in sorted(set(names))]


def gauge(recorded: Array, rows: int, noise: float, rng: np.random.Generator) -> Array:
    """Blocks of recorded values in random order, each with noise of the size of the sensor's own."""
    block = 64
    starts = rng.integers(0, max(len(recorded) - block, 1), rows // block + 1)
    index = (starts[:, None] + np.arange(block)).ravel()[:rows] % len(recorded)
    return recorded[index] + noise * rng.integers(-3, 4, rows)


def counter(recorded: Array, rows: int, rng: np.random.Generator) -> Array:
    """A counter that rises by recorded steps in random order."""
    steps = np.diff(recorded)
    steps = steps[steps >= 0]
    return recorded[0] + np.cumsum(rng.choice(steps if len(steps) else np.zeros(1, recorded.dtype), rows))


RESOLUTION: Final = {"power_w": 0.001, "power_instant_w": 0.001, "power_average_w": 0.001}


def columns(tier: str, source: pa.Table, rows: int, rng: np.random.Generator) -> dict[str, Array]:
    """A device's columns but keys and clocks."""
    made = {}
    for field in TELEMETRY[tier]:
        if field.metadata[b"kind"] in (b"key", b"time") or field.name not in source.column_names:
            continue
        recorded = source[field.name].to_numpy()
        if field.metadata[b"kind"] == b"cumulative":
            made[field.name] = counter(recorded, rows, rng)
        else:
            noise = RESOLUTION.get(field.name, 1e-4 if field.name.endswith("_frac") else 0)
            values = gauge(recorded, rows, noise, rng)
            made[field.name] = np.clip(values, 0, 1) if field.name.endswith("_frac") else values
    return made


def device_rows(tier: str, device: int, seconds: float, rng: np.random.Generator) -> pa.Table:
    """One device's rows of one tier over some time."""
    sources = busy(tier) if tier != "host" else []
    rate_hz = DEFAULT_RATES_HZ[tier]
    # Reads of milliseconds are spread over the period; the others follow each other within a tick.
    delay_s = device / DEVICES / rate_hz if tier in ("ring", "slow") else device * 25e-6
    reads = int(seconds * rate_hz)
    mono_ns = ((np.arange(reads) / rate_hz + delay_s) * NS_PER_S).astype(np.int64) + rng.integers(
        60_000, 120_000, reads
    )
    rows = int(seconds * RING_HZ) if tier == "ring" else reads
    if tier == "host":
        made = {name: rng.random(rows) for name in TELEMETRY[tier].names if name.endswith("_frac")}
        made |= {name: 200 + 100 * rng.random(rows) for name in ("package_power_w", "dram_power_w")}
        made["cpu_temp_max_c"] = rng.integers(50, 60, rows) * 1.0
        made["memory_used_bytes"] = 2**38 + rng.integers(0, 2**30, rows) // 4096 * 4096
        made |= {name: np.cumsum(rng.integers(0, 10**8, rows)) for name in ("nic_tx_bytes", "nic_rx_bytes")}
    else:
        source = sources[device % len(sources)]
        made = columns(tier, source, rows, rng)
    if tier == "ring":
        spacing_ns = np.diff(np.sort(source["sensor_ns"].to_numpy()))
        sensor_ns = np.cumsum(rng.choice(spacing_ns[spacing_ns < NS_PER_S / 10], rows))
        drained = np.minimum((sensor_ns / NS_PER_S + 1).astype(np.int64), reads - 1)
        mono_ns = mono_ns[drained]
        made["sensor_ns"] = WALL_NS + sensor_ns
    wall_ns = WALL_NS + mono_ns + (0 if tier == "ring" else rng.integers(-150, 150, rows))
    keys = {"node": ["node0"] * rows, "device": ["host" if tier == "host" else f"gpu{device}"] * rows}
    schema = table_schema(tier, backend="replay", simulated=False)
    arrays = {
        name: pa.array(values) for name, values in {**keys, "mono_ns": mono_ns, "wall_ns": wall_ns, **made}.items()
    }
    return pa.table({field.name: arrays[field.name].cast(field.type, safe=False) for field in schema}, schema=schema)


def recording(seconds: float) -> dict[str, pa.Table]:
    """All tiers of eight devices and their host, rows in the order a sampler reads them."""
    rng = np.random.default_rng(0)
    tables = {}
    for tier in DEFAULT_RATES_HZ:
        devices = range(1 if tier == "host" else DEVICES)
        table = pa.concat_tables([device_rows(tier, device, seconds, rng) for device in devices])
        tables[tier] = (
            table.unify_dictionaries()
            .combine_chunks()
            .take(pa.array(np.argsort(table["mono_ns"].to_numpy(), kind="stable")))
        )
    return tables


def hand_overs(table: pa.Table) -> Iterator[pa.Table]:
    """The rows of a table as the sampler hands them to the store."""
    number = table["mono_ns"].to_numpy() // s_to_ns(HAND_OVER_S)
    edges = [0, *(np.flatnonzero(np.diff(number)) + 1), table.num_rows]
    for start, end in itertools.pairwise(edges):
        yield table.slice(start, end - start)


def stream_bytes(folder: Path, tables: Mapping[str, pa.Table]) -> dict[str, int]:
    """Returns the bytes of each tier's streams and checksums."""
    sizes = {}
    for tier, table in tables.items():
        writer = TierWriter(folder, table.schema)
        for batch in hand_overs(table):
            writer.write(batch.to_pylist())
        writer.close()
        sizes[tier] = sum(path.stat().st_size for path in folder.glob(f"{tier}-*"))
    return sizes


def plain_stream_bytes(path: Path, table: pa.Table) -> int:
    """The same batches as an uncompressed Arrow stream."""
    with pa.ipc.new_stream(path, table.schema) as stream:
        for batch in hand_overs(table):
            stream.write_table(batch.combine_chunks())
    return path.stat().st_size


def spelled_out(table: pa.Table) -> pa.Table:
    """The table without dictionaries."""
    return table.cast(
        pa.schema([(f.name, pa.string() if pa.types.is_dictionary(f.type) else f.type) for f in table.schema])
    )


def csv_bytes(path: Path, table: pa.Table) -> int:
    """The same rows as CSV."""
    pyarrow.csv.write_csv(spelled_out(table), path)
    return path.stat().st_size


def summarise(folder: MeasuredFolder) -> Summary:
    """Does what `wattune analyze` does with a recording of an hour."""
    window = WALL_NS + s_to_ns(2), WALL_NS + s_to_ns(HOUR_S - 2)
    return summarize(RunData(tables=folder.telemetry(), manifests=folder.manifests(), window=window))


@benchmark(
    claim=f"An hour of {DEVICES} GPUs at default rates takes little room, and is read back and summarised at once.",
    bar=f"MB an hour below {TARGETS_MB_PER_H}, summary within a second",
)
def main(_: Namespace) -> Found:
    """Measures an hour in every form."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        segment = recording(SEGMENT_S)
        per_hour = HOUR_S / SEGMENT_S / 1e6
        stream = {tier: size * per_hour for tier, size in stream_bytes(root, segment).items()}
        read_s, _, (back, notes) = timed(lambda: read_tables(root), 1)
        assert notes == [] and all(spelled_out(back[tier]) == spelled_out(segment[tier]) for tier in segment), notes
        plain = {tier: plain_stream_bytes(root / "plain", table) * per_hour for tier, table in segment.items()}
        csv = {tier: csv_bytes(root / "csv", table) * per_hour for tier, table in segment.items()}
        folder, hour = MeasuredFolder(root / "hour"), recording(HOUR_S)
        write_s, *_ = timed(lambda: folder.write_telemetry("node0", hour, {"node": "node0", "devices": {}}), 1)
        parquet = {tier: (root / f"hour/telemetry/node0/{tier}.parquet").stat().st_size / 1e6 for tier in hour}
        summary_s, _, summary = timed(lambda: summarise(folder))
        assert summary.metrics["device_power_peak_20ms_w"] > 0
    kinds = {"stream": stream, "parquet": parquet, "uncompressed_arrow": plain, "csv": csv}
    rows = Rows("tier", "num_rows_an_hour", *(f"{kind}_mb" for kind in kinds))
    for tier in hour:
        rows.add(tier, hour[tier].num_rows, *(sizes[tier] for sizes in kinds.values()))
    totals = {kind: sum(sizes.values()) for kind, sizes in kinds.items()}
    rows.add("all", sum(table.num_rows for table in hour.values()), *totals.values())
    over = ", ".join(f"{totals['csv'] / total:.1f} times {kind}" for kind, total in totals.items())
    missed = [f"{kind} {totals[kind]:.1f} MB/h" for kind, most in TARGETS_MB_PER_H.items() if totals[kind] >= most]
    hour_s = f"An hour of Parquet is read back and summarised in {summary_s:.2f} s and written in {write_s:.2f} s."
    notes = [f"CSV is {over}.", hour_s, f"Ten minutes of streams are read back in {read_s:.2f} s."]
    return Found(rows, notes, missed + ([f"summary {summary_s:.2f} s"] if summary_s >= 1 else []))


if __name__ == "__main__":
    main()

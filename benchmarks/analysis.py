"""Times the analysis of recordings of eight GPUs, from an hour to a day, and measures its memory.

    python benchmarks/analysis.py            # prints the rows of benchmarks/results/analysis.md
    python benchmarks/analysis.py --hours 1  # without the longer recordings

Recordings are made as in benchmarks/store.py: readings of a real one in new order, at the sampler's default rates. Each
measurement is a process of its own that reads the folder's Parquet files; its memory is the kernel's account of it. The
peers compute mean, energy, and the peaks of devices and node over 100 ms and 1 s from the same ring as CSV, in the same
run: as one writes it with pandas, and with pandas for reading alone. Beside them stand the same figures and nothing
else by our functions, and every metric of all tiers.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv
from harness import Found, Rows, benchmark
from store import DEVICES, WALL_NS, device_rows, spelled_out

from wattune.analysis.detail import detail_of
from wattune.analysis.metrics.energy import PowerTrace, powers, total_energy_j
from wattune.analysis.run_data import RunData
from wattune.analysis.signals.align import align
from wattune.analysis.signals.energy_grid import EnergySum, pieces, steps_of
from wattune.analysis.signals.series import Series
from wattune.analysis.summary import summarize
from wattune.storage.format import FORMAT, FORMAT_KEY
from wattune.storage.measured import MeasuredFolder
from wattune.storage.parquet import encoded
from wattune.telemetry.sampler.loop import DEFAULT_RATES_HZ
from wattune.units import s_to_ns

HOURS: Final = (1, 6, 24)
REPEATS: Final = 5
LEAST_RATIO: Final = 20.0
MOST_S_AN_HOUR: Final = 2.0
MOST_BYTES: Final = 10**9
WINDOWS_S: Final = {"100ms": 0.1, "1s": 1.0}
FACTS: Final = {"power_limit_w": 700.0, "sm_clock_max_mhz": 1980.0}
MANIFEST: Final = {FORMAT_KEY: FORMAT, "devices": {f"gpu{n}": FACTS for n in range(DEVICES)}}


def window(hours: float) -> tuple[int, int]:
    """The recorded command's: all but two seconds at either end."""
    return WALL_NS + s_to_ns(2), WALL_NS + s_to_ns(hours * 3600 - 2)


def make(folder: Path, hours: float) -> None:
    """Writes a recording as a study folder has it, rows in order of devices."""
    node = folder / "telemetry" / "node0"
    node.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for tier in DEFAULT_RATES_HZ:
        devices = range(1 if tier == "host" else DEVICES)
        parts = [device_rows(tier, device, hours * 3600, rng) for device in devices]
        (node / f"{tier}.parquet").write_bytes(encoded(pa.concat_tables(parts).unify_dictionaries()).to_pybytes())
        if tier == "ring" and hours == HOURS[0]:
            pyarrow.csv.write_csv(spelled_out(pa.concat_tables(parts)), folder / "ring.csv")
    (node / "manifest.json").write_text(json.dumps(MANIFEST))


def all_metrics(folder: Path, hours: float, *, with_detail: bool = False) -> dict[str, float]:
    """Computes what `wattune analyze` does, from the files."""
    data = replace(RunData.of(folder), window=window(hours))
    assert data.examined is not None
    if with_detail:
        detail_of(data.examined)
    return dict(summarize(data).metrics)


def ours(folder: Path, hours: float) -> dict[str, float]:
    """Mean, energy and peaks of the ring and nothing else, from Parquet, by the functions all metrics come from."""
    aligned = align({"ring": MeasuredFolder(folder).stored()["ring"]}, None, {}, window=window(hours))
    assert aligned is not None
    node, most_w = EnergySum(aligned.duration_s), dict.fromkeys(WINDOWS_S, 0.0)

    def look(trace: PowerTrace, series: Series) -> PowerTrace:
        for piece in node.add(pieces(series), trace.sensor_period_s, trace.smoothed_s):
            for label, window_s in WINDOWS_S.items():
                most_w[label] = max(most_w[label], piece.most_j(steps_of(window_s)) / window_s)
        return trace

    traces = powers(aligned, look)
    energy_j = total_energy_j(traces, aligned.duration_s)
    peaks_w = {f"device_power_peak_{label}_w": peak_w for label, peak_w in most_w.items()}
    for label, window_s in WINDOWS_S.items():
        peaks_w[f"node_device_power_peak_{label}_w"] = node.energy.peak_w(window_s) or 0.0
    return {**peaks_w, "device_power_mean_w": energy_j / aligned.duration_s / DEVICES, "energy_j": energy_j}


def pandas_plain(folder: Path, hours: float) -> dict[str, float]:
    """The same as one writes it with pandas: a column a device on one time axis, interpolated, then rolling means."""
    import pandas as pd

    table = pd.read_csv(folder / "ring.csv")
    table["time"] = pd.to_datetime(table["sensor_ns"])
    start, end = (pd.Timestamp(each) for each in window(hours))
    wide = table.pivot_table(index="time", columns="device", values="power_w").interpolate(method="time")
    node = wide.sum(axis=1)
    second = pd.Timedelta("1s")
    peaks_w = {
        f"{what}_peak_{label}_w": float(series.rolling(length).mean().loc[start + second : end].max(axis=None))
        for what, series in (("device_power", wide), ("node_device_power", node))
        for label, length in (("100ms", "100ms"), ("1s", "1s"))
    }
    inside = wide.loc[start:end]
    time_s = (inside.index - start).total_seconds().to_numpy()
    energy_j = sum(float(np.trapezoid(inside[device], time_s)) for device in inside)
    span_s = time_s[-1] - time_s[0]
    return {**peaks_w, "device_power_mean_w": energy_j / span_s / DEVICES, "energy_j": energy_j}


def pandas_tuned(folder: Path, hours: float) -> dict[str, float]:
    """The same with pandas for reading alone and NumPy for the rest, on our grid."""
    import pandas as pd

    table = pd.read_csv(folder / "ring.csv", usecols=["device", "sensor_ns", "power_w"])
    end_s = (window(hours)[1] - window(hours)[0]) / 1e9
    grid_s = np.arange(0.0, end_s, 0.005)
    node_w, energy_j, peaks_w = np.zeros(len(grid_s)), 0.0, {"100ms": 0.0, "1s": 0.0}
    widths = {"100ms": 20, "1s": 200}

    def peak_w(watts: np.ndarray, width: int) -> float:
        sums = np.cumsum(np.append(0.0, (watts[1:] + watts[:-1]) / 2))
        return float((sums[width:] - sums[:-width]).max() / width)

    for _, own in table.groupby("device"):
        watts = np.interp(grid_s, (own["sensor_ns"].to_numpy() - window(hours)[0]) / 1e9, own["power_w"].to_numpy())
        energy_j += float(np.trapezoid(watts, dx=0.005))
        node_w += watts
        peaks_w = {label: max(peaks_w[label], peak_w(watts, width)) for label, width in widths.items()}
    found = {f"device_power_peak_{label}_w": peak for label, peak in peaks_w.items()}
    found |= {f"node_device_power_peak_{label}_w": peak_w(node_w, width) for label, width in widths.items()}
    return found | {"device_power_mean_w": energy_j / end_s / DEVICES, "energy_j": energy_j}


WORK: Final[dict[str, Callable[..., dict[str, float]]]] = {
    "all": all_metrics,
    "detail": lambda folder, hours: all_metrics(folder, hours, with_detail=True),
    "ours": ours,
    "plain": pandas_plain,
    "tuned": pandas_tuned,
}


def measure(work: str, folder: Path, hours: float, repeats: int) -> dict[str, Any]:
    """Runs one piece of work some times in a process of its own."""
    command = [sys.executable, __file__, "--child", work, str(folder), str(hours), str(repeats)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900).stdout
    result: dict[str, Any] = json.loads(found.splitlines()[-1])
    return result


def child(work: str, folder: Path, hours: float, repeats: int) -> None:
    """The other side of `measure`."""
    wall_s, cpu_s, result = [], [], {}
    for _ in range(repeats):
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        result = WORK[work](folder, hours)
        wall_s.append(time.perf_counter() - start_s)
        cpu_s.append(time.process_time() - start_cpu_s)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "peak_bytes": peak_bytes, "result": result}))


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--hours", type=int, nargs="*", default=HOURS, choices=HOURS)


@benchmark(
    claim=f"All metrics of {DEVICES} GPUs take less than {MOST_S_AN_HOUR:g} s an hour, and less than pandas over CSV.",
    bar=f"CPU time of an hour below {MOST_S_AN_HOUR:g} s; pandas over CSV at least {LEAST_RATIO:g} times as long for "
    f"mean, energy and peaks; peak memory below {MOST_BYTES / 1e6:.0f} MB",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Analyses recordings of some lengths, then an hour's ring by every way."""
    rows = Rows("work", "hours", "num_rows", "wall_s", "wall_least_s", "wall_most_s", "processor_s", "peak_memory_mb")

    def add(work: str, hours: float, num_rows: int, found: dict[str, Any]) -> None:
        wall_s, cpu_s = found["wall_s"], statistics.median(found["cpu_s"])
        span = (statistics.median(wall_s), min(wall_s), max(wall_s))
        rows.add(work, hours, num_rows, *span, cpu_s, found["peak_bytes"] / 1e6)

    first: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for hours in given.hours:
            folder = Path(temporary) / f"{hours}h"
            subprocess.run([sys.executable, __file__, "--make", str(folder), str(hours)], check=True, timeout=900)
            repeats = REPEATS if hours == 1 else 2
            found, more = measure("all", folder, hours, repeats), measure("detail", folder, hours, repeats // 2)
            first = first or {"folder": folder, **found}
            num_rows = sum(tier.num_rows for tier in MeasuredFolder(folder).stored().values())
            add("all metrics", hours, num_rows, found)
            add("all metrics with detail", hours, num_rows, more)
        by = {work: measure(work, first["folder"], 1, REPEATS) for work in ("ours", "plain", "tuned", "all")}
    own = by["ours"]
    for name in own["result"].keys() & by["all"]["result"].keys():
        assert abs(by["all"]["result"][name] / own["result"][name] - 1) < 1e-6, name
    for name, value in own["result"].items():
        for peer, most_frac in ((by["plain"], 0.02), (by["tuned"], 0.001)):
            assert abs(peer["result"][name] / value - 1) < most_frac, (name, value, peer["result"][name])
    words = {"ours": "wattune, Parquet", "plain": "pandas, CSV", "tuned": "pandas to read CSV, NumPy"}
    for work, name in words.items():
        add(f"mean, energy and four peaks of an hour's ring: {name}", 1, 1_440_000, by[work])
    cpu_s = {work: statistics.median(found["cpu_s"]) for work, found in by.items()}
    hour_s, ratio = statistics.median(first["cpu_s"]), cpu_s["plain"] / cpu_s["ours"]
    most_mb = max(row["peak_memory_mb"] for row in rows.objects() if row["work"].startswith("all metrics"))
    missed = [f"{hour_s:.2f} s of CPU an hour"] if hour_s >= MOST_S_AN_HOUR else []
    missed += [f"pandas takes {ratio:.1f} times as long"] if ratio < LEAST_RATIO else []
    missed += [f"{most_mb:.0f} MB"] if most_mb * 1e6 >= MOST_BYTES else []
    over_all = cpu_s["plain"] / cpu_s["all"]
    notes = [f"pandas over CSV takes {ratio:.1f} times the CPU time, and {over_all:.1f} times that of all metrics."]
    return Found(rows, notes, missed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make(Path(sys.argv[2]), float(sys.argv[3]))
    elif sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    else:
        main()

#!/usr/bin/env python
"""Joins the telemetry of a study's trials on one node to one series of power, core temperature and SM clock.

    python benchmarks/temperature_series.py STUDY_FOLDER --out benchmarks/data/temperature/moe_ep_h200x4.parquet

Each row is a device and a second, values are means over it. The ring reaches 2.4 s back, so that power has no gap where
trials follow one another within that; temperature and clock are null where no sampler ran.
"""

import argparse
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from wattune.units import NS_PER_S

Array = npt.NDArray[np.float64]

LONGEST_GAP_S: Final = 1.0


def column(table: pa.Table, device: str, time: str, value: str) -> tuple[Array, Array]:
    """Returns a device's times in seconds and values, in order of time, each time once."""
    rows = table.filter(pc.equal(table["device"].cast("string"), device))
    at_s, once = np.unique(rows[time].to_numpy() / NS_PER_S, return_index=True)
    return at_s, rows[value].to_numpy(zero_copy_only=False)[once].astype(np.float64)


def tier(study: Path, name: str) -> pa.Table:
    """Reads a tier of every trial, with sensor times of the ring on the monotonic clock."""
    tables = []
    for path in sorted(study.glob(f"trials/*/telemetry/*/{name}.parquet")):
        table = pq.read_table(path)
        if name == "ring":
            offset_ns = pc.subtract(table["wall_ns"], table["mono_ns"])[0].as_py()
            table = table.append_column("at_ns", pc.subtract(table["sensor_ns"].cast("int64"), offset_ns))
            table = table.select(["device", "at_ns", "power_w"])
        else:
            table = table.select(["device", "mono_ns", "gpu_temp_c", "sm_clock_mhz"])
        tables.append(table.set_column(0, "device", table["device"].cast("string")))
    return pa.concat_tables(tables)


def main() -> None:
    """Writes the series."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    ring, fast = tier(arguments.study, "ring"), tier(arguments.study, "fast")
    devices = sorted(pc.unique(fast["device"]).to_pylist())
    powers = {name: column(ring, name, "at_ns", "power_w") for name in devices}
    temps = {name: column(fast, name, "mono_ns", "gpu_temp_c") for name in devices}
    clocks = {name: column(fast, name, "mono_ns", "sm_clock_mhz") for name in devices}
    gap_s = max(float(np.diff(at_s).max()) for at_s, _ in powers.values())
    if gap_s > LONGEST_GAP_S:
        parser.error(f"power has a gap of {gap_s:.1f} s; give a study whose trials follow one another within 2 s")
    first_s = max(at_s[0] for at_s, _ in temps.values())
    seconds = int(min(each[name][0][-1] for name in devices for each in (powers, temps)) - first_s)
    edges_s = first_s + np.arange(seconds + 1)
    tables = []
    for name in devices:
        at_s, watts = powers[name]
        joules = np.append(0.0, np.cumsum(np.diff(at_s) * (watts[1:] + watts[:-1]) / 2))
        columns = {"power_w": np.diff(np.interp(edges_s, at_s, joules)).round(1)}
        for key, (times_s, values) in (("gpu_temp_c", temps[name]), ("sm_clock_mhz", clocks[name])):
            cell = np.searchsorted(edges_s, times_s, side="right") - 1
            inside = (cell >= 0) & (cell < seconds)
            count = np.bincount(cell[inside], minlength=seconds)
            total = np.bincount(cell[inside], values[inside], minlength=seconds)
            columns[key] = np.where(count > 0, total / np.maximum(count, 1), np.nan).round(2)
        floats = {key: pa.array(values, pa.float32(), from_pandas=True) for key, values in columns.items()}
        which = {"device": pa.array([name] * seconds), "second": pa.array(np.arange(seconds, dtype=np.int16))}
        tables.append(pa.table(which | floats))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.concat_tables(tables), arguments.out, compression="zstd")
    print(f"{arguments.out}: {seconds} s of {len(devices)} devices, longest gap of power {gap_s:.2f} s")


if __name__ == "__main__":
    main()

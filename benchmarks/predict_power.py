#!/usr/bin/env python
"""Holds predicted power and temperature against measurements that their coefficients never saw.

    python benchmarks/predict_power.py --kernels FILE     # prints the tables and the coefficients to ship

Power is fitted to the trials of `benchmarks/data` with whole configurations left out, temperature to recordings of four
H200s with whole recordings left out. FILE is `h200_gemm_bf16.parquet` of AIConfigurator 095f58a (Apache-2.0): m, n, k,
latency_ms and power_w of bf16 products on one H200. Without it the prior is the one in the code.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import measured_tables
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq
from host_temperature import HostFit, Trace, fit_temperature, run, with_inlet_at_rest

from wattune.catalog.hardware import DEVICES
from wattune.cost.coefficients import PowerCoefficients
from wattune.cost.power import predict
from wattune.cost.temperature import H200 as H200_THERMAL
from wattune.fitting.power import (
    H200_PRIOR,
    fit_kernels,
    fit_power,
    has_activity,
    kernel_w,
    measured_steps,
    with_intervals,
    with_solved_clock,
)
from wattune.units import NS_PER_S

Array = npt.NDArray[np.float64]
Rows = Sequence[Mapping[str, Any]]

ROOT: Final = Path(__file__).parent.parent
DATA: Final = ROOT / "benchmarks" / "data"
GOLDEN: Final = ROOT / "tests" / "golden" / "h200x4"
H200: Final = DEVICES["h200_sxm"]
LIMIT_W: Final = 700.0
METRICS: Final = ("device_power_mean_w", "node_device_power_peak_1s_w", "energy_per_token_j", "clock_deficit_frac")
MINUTES_3: Final = 180
SOAK_FITTED_S: Final = 64
"""Seconds of the recording under constant load that are fitted to: half a minute of rest and half a minute of load."""


def trials() -> list[dict[str, Any]]:
    """Reads every completed trial of the device."""
    return [row for row in measured_tables.rows() if row["device"] == H200.name and has_activity(row)]


def predicted(c: PowerCoefficients, rows: Rows, solve: bool) -> Array:
    """Predicts `METRICS` from measured activity, [trials, metrics]."""
    result = np.empty((len(rows), len(METRICS)))
    for one in measured_steps(rows):
        power = predict(one.batch, with_solved_clock(one.step, c, LIMIT_W) if solve else one.step, c, limit_w=LIMIT_W)
        result[one.positions] = np.stack([getattr(power, name) for name in METRICS], axis=1)
    return result


def held_out(rows: Rows, groups: Sequence[str], prior: PowerCoefficients) -> dict[str, Array]:
    """Predicts every trial with coefficients fitted without its group; baselines likewise."""
    names = np.array(groups)
    found = {name: np.empty((len(rows), len(METRICS))) for name in ("measured clock", "solved clock", *BASELINES)}
    for name in np.unique(names):
        rest, places = (
            [row for row, each in zip(rows, names, strict=True) if each != name],
            np.flatnonzero(names == name),
        )
        these = [rows[place] for place in places]
        c = fit_power(rest, prior, limit_w=LIMIT_W)
        found["measured clock"][places] = predicted(c, these, solve=False)
        found["solved clock"][places] = predicted(c, these, solve=True)
        for baseline, function in BASELINES.items():
            found[baseline][places] = from_mean(these, function(rest, these))
    return found


def from_mean(rows: Rows, mean_w: Array) -> Array:
    """Returns `METRICS` of a baseline that predicts a mean power and nothing else."""
    world = np.array([row["world_size"] for row in rows])
    tokens_per_s = np.array([row["seq_len"] * row["global_batch_size"] / row["step_time_s"] for row in rows])
    return np.stack([mean_w, mean_w * world, mean_w * world / tokens_per_s, np.full(len(rows), np.nan)], axis=1)


def constant(rest: Rows, rows: Rows) -> Array:
    """A constant share of the limit: the mean of the other trials."""
    return np.full(len(rows), np.mean([row["device_power_mean_w"] for row in rest]))


def linear(rest: Rows, rows: Rows) -> Array:
    """A line in compute's share of the step, cut at the limit."""
    shares, watts = (np.array([row[name] for row in rest]) for name in ("compute_frac", "device_power_mean_w"))
    slope, offset = np.polyfit(shares, watts, 1)
    return np.minimum(offset + slope * np.array([row["compute_frac"] for row in rows]), LIMIT_W)


BASELINES: Final = {"constant share of the limit": constant, "linear in compute, capped": linear}


def print_errors(found: Mapping[str, Array], rows: Rows) -> None:
    """Prints median, 90th percentile and worst error of every method and metric."""
    actual = np.array([[row[name] for name in METRICS] for row in rows])
    print("| method | metric | median | p90 | p95 | worst |\n|---|---|---|---|---|---|")
    for method, values in found.items():
        for column, metric in enumerate(METRICS):
            error = np.abs(values[:, column] - actual[:, column])
            error = error if metric == "clock_deficit_frac" else error / actual[:, column]
            if np.isfinite(error).all():
                figures = " | ".join(f"{100 * each:.1f} %" for each in np.percentile(error, [50, 90, 95, 100]))
                print(f"| {method} | {metric} | {figures} |")


def print_configurations(found: Mapping[str, Array], rows: Rows) -> None:
    """Prints each held-out configuration: mean power and node peak, predicted from the solved clock, and measured."""
    print("\n| engine | model | tp pp ep mbs | sharding recompute overlap | mean W | predicted | peak W | predicted |")
    print("|---|---|---|---|---|---|---|---|")
    for row, values in zip(rows, found["solved clock"], strict=True):
        plan = " ".join(str(row[name]) for name in ("tp", "pp", "ep", "micro_batch_size"))
        how = " ".join(row[name] for name in ("sharding", "recompute", "overlap"))
        watts = (row[METRICS[0]], values[0], row[METRICS[1]], values[1])
        print(f"| {row['engine']} | {row['model']} | {plan} | {how} | " + " | ".join(f"{w:.0f}" for w in watts) + " |")


def kernels(path: Path, prior: PowerCoefficients) -> PowerCoefficients:
    """Fits the table of kernels, prints its held-out error, and returns the prior it gives for trials."""
    table = pq.read_table(path)
    m, n, k, ms, watts = (
        table[name].to_numpy().astype(np.float64) for name in ("m", "n", "k", "latency_ms", "power_w")
    )
    out = (7 * n + 13 * k) // 64 % 5 == 0  # whole (n, k) are held out
    peaks = (H200.peak_bf16_flop_per_s or 0.0, H200.memory_bandwidth_bytes_per_s or 0.0)
    sets = [((m[one], n[one], k[one]), ms[one] / 1e3) for one in (~out, out)]
    found = fit_kernels(*sets[0], watts[~out], peaks=peaks, idle_w=prior.idle_w)
    errors = np.abs(kernel_w(found, *sets[1], peaks=peaks, idle_w=prior.idle_w) / watts[out] - 1)
    line = " ".join(f"{100 * each:.1f} %" for each in np.percentile(errors, [50, 90]))
    print(f"kernels: active, matrix, memory W, pause us, cap W = {np.round(found, 1)}; held out median, p90: {line}")
    return replace(prior, active_w=float(found[0]), matrix_w=float(found[1]), memory_w=float(found[2]))


def recording(name: str) -> Trace:
    """Reads a recording of four H200s as means over each second."""
    folder = GOLDEN / name / "telemetry" / "node0"
    ring, fast = (pq.read_table(folder / f"{tier}.parquet") for tier in ("ring", "fast"))
    offset_ns = fast["wall_ns"][0].as_py() - fast["mono_ns"][0].as_py()
    names = sorted(pc.unique(fast["device"].cast("string")).to_pylist())
    first_s = fast["mono_ns"].to_numpy().min() / NS_PER_S + 0.5
    seconds = int(fast["mono_ns"].to_numpy().max() / NS_PER_S - first_s) - 1
    powers, temps = [], []
    for device in names:
        rows = ring.filter(pc.equal(ring["device"].cast("string"), device))
        at_s, once = np.unique((rows["sensor_ns"].to_numpy() - offset_ns) / NS_PER_S, return_index=True)
        watts = rows["power_w"].to_numpy()[once].astype(np.float64)
        joules = np.append(0.0, np.cumsum(np.diff(at_s) * (watts[1:] + watts[:-1]) / 2))
        powers.append(np.diff(np.interp(first_s + np.arange(seconds + 1), at_s, joules)))
        rows = fast.filter(pc.equal(fast["device"].cast("string"), device))
        cell = np.floor(rows["mono_ns"].to_numpy() / NS_PER_S - first_s).astype(int)
        value = rows["gpu_temp_c"].to_numpy().astype(np.float64)
        temps.append([value[cell == second].mean() for second in range(seconds)])
    return Trace(power_w=np.stack(powers), temp_c=np.array(temps))


def study_trace(name: str = "moe_ep_h200x4") -> Trace:
    """Reads a series of `benchmarks/data/temperature`: by default eight minutes of 21 trials on another host."""
    table = pq.read_table(DATA / "temperature" / f"{name}.parquet")
    names = sorted(pc.unique(table["device"].cast("string")).to_pylist())
    rows = [table.filter(pc.equal(table["device"].cast("string"), name)).sort_by("second") for name in names]
    power_w, temp_c = (
        np.stack([each[name].to_numpy(zero_copy_only=False).astype(np.float64) for each in rows])
        for name in ("power_w", "gpu_temp_c")
    )
    return Trace(power_w=power_w, temp_c=temp_c)


def print_temperature(label: str, fit: HostFit, trace: Trace, first: int = 0) -> None:
    """Prints the free-running error: power goes in from the first second, no temperature does."""
    error = (run(fit, trace.power_w) - trace.temp_c)[:, first:]
    hot = error[trace.power_w[:, first:] > 400]
    hot = hot[np.isfinite(hot)]
    error = error[np.isfinite(error)]
    print(
        f"| {label} | {len(trace.power_w[0]) - first} | {np.sqrt(np.mean(error**2)):.2f} "
        f"| {np.median(np.abs(error)):.2f} | {np.percentile(np.abs(error), 95):.2f} "
        f"| {hot.mean():+.2f} | {np.sqrt(np.mean(hot**2)):.2f} |"
    )


def print_warmest(label: str, fit: HostFit, trace: Trace) -> None:
    """Prints the error of the warmest device's temperature where another host was fitted: slots may differ."""
    mean = float(np.mean(fit.preheat_k_per_w))
    flat = replace(fit, preheat_k_per_w=(mean,) * len(trace.power_w))
    inlet_c = with_inlet_at_rest(flat, trace, 8).coefficients.inlet_c
    most = (fit.coefficients.preheat_k_per_w,) * len(trace.power_w)
    there = HostFit(coefficients=replace(fit.coefficients, inlet_c=inlet_c), preheat_k_per_w=most)
    error = run(there, trace.power_w).max(0) - trace.temp_c.max(0)
    hot = error[(trace.power_w.max(0) > 400) & np.isfinite(error)]
    error = error[np.isfinite(error)]
    print(
        f"| {label} | {len(error)} | {np.sqrt(np.mean(error**2)):.2f} | {np.percentile(np.abs(error), 95):.2f} "
        f"| {hot.mean():+.2f} |"
    )


def temperatures() -> None:
    """Fits and tests temperature on both hosts."""
    host = {name: recording(name) for name in ("dp4", "square_inphase", "tp2pp2")}
    study = study_trace()
    print("\n| recording | s | rms K | median K | p95 K | mean K above 400 W | rms K above 400 W |")
    print("|---|---|---|---|---|---|---|")
    first = fit_temperature([host["dp4"], host["square_inphase"]], H200_THERMAL)
    print_temperature("dp4 (fitted)", first, host["dp4"])
    print_temperature("square_inphase (fitted)", first, host["square_inphase"])
    print_temperature("tp2pp2 (held out)", first, host["tp2pp2"])
    half = study.power_w.shape[1] // 2
    begin = Trace(power_w=study.power_w[:, :half], temp_c=study.temp_c[:, :half])
    other = fit_temperature([begin], H200_THERMAL)
    print_temperature("study, first half (fitted)", other, begin)
    print_temperature("study, second half (held out)", other, study, half)
    soak = study_trace("soak_llama_h200x2")
    minute = Trace(power_w=soak.power_w[:, :SOAK_FITTED_S], temp_c=soak.temp_c[:, :SOAK_FITTED_S])
    short = fit_temperature([minute], H200_THERMAL)
    print_temperature("constant load, rest and 30 s of it (fitted)", short, minute)
    print_temperature("constant load, 160 s to steady (held out)", short, soak, SOAK_FITTED_S)
    print("\n| warmest device of another host, inlet from 8 s of rest | s | rms K | p95 K | mean K above 400 W |")
    print("|---|---|---|---|---|")
    print_warmest("study by the first host", first, study)
    print_warmest("tp2pp2 by the study", other, host["tp2pp2"])
    print_warmest("dp4 by the study", other, host["dp4"])
    print_warmest("constant load by the first host", first, soak)
    print_warmest("constant load by the study", other, soak)
    whole = fit_temperature([study], H200_THERMAL)
    for label, fit in (("first host", first), ("study, first half", other), ("study", whole)):
        print(f"{label}: {fit}")


def main() -> None:
    """Prints everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", type=Path, help="table of kernels with power")
    path = parser.parse_args().kernels
    prior = kernels(path, H200_PRIOR) if path else H200_PRIOR
    rows = trials()
    print(f"{len(rows)} trials, {len({row['trial_id'] for row in rows})} configurations; each configuration held out:")
    found = held_out(rows, [row["trial_id"] for row in rows], prior)
    print_errors(found, rows)
    print("\nEach model with its engine held out:")
    print_errors(held_out(rows, [row["model"] + row["engine"] for row in rows], prior), rows)
    print_configurations(found, rows)
    print(f"\nfitted to all: {with_intervals(rows, prior, limit_w=LIMIT_W)}")
    temperatures()


if __name__ == "__main__":
    main()

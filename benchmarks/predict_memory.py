#!/usr/bin/env python
"""Compares predicted with measured peaks of memory, trial by trial, and with two formulas that are used elsewhere.

    python benchmarks/predict_memory.py            # errors with the shipped coefficients
    python benchmarks/predict_memory.py --fit      # fits them, and leaves whole configurations out

Measured are the trials in benchmarks/data (bytes) and the cases in benchmarks/results/engine_cases.csv (to 0.1 GiB).
The baselines are Megatron's 18 bytes a parameter, and the same plus s b h (18 + 4 f / h) / t of activations a layer
(Korthikanti et al. 2022, arXiv 2205.05198, table 2), divided by pipeline stages and with 6 + 12 / dp under ZeRO.
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import measured_tables
import numpy as np
from engine_case_list import cases
from engine_cases import Where

from wattune.cost.batch import batches
from wattune.cost.coefficients import MemoryCoefficients
from wattune.cost.memory.defaults import H200
from wattune.cost.memory.predict import predict
from wattune.fitting.memory import fit_memory, measured_excess
from wattune.plans.effective import effective
from wattune.trial import TrialSpec

HERE = Path(__file__).parent


def trials() -> list[tuple[str, TrialSpec, float]]:
    """Every completed trial of benchmarks/data once, with its source."""
    found: dict[str, tuple[str, TrialSpec, float]] = {}
    for row in measured_tables.rows():
        if row["memory_peak_bytes"]:
            spec = TrialSpec.from_json(json.loads(row["spec"]))
            found.setdefault(spec.trial_id, ("trial", spec, row["memory_peak_bytes"]))
    return list(found.values())


def measured_cases() -> list[tuple[str, TrialSpec, float]]:
    """Every case of engine_cases.csv once."""
    known = {case.name: case for case in cases(2)}
    found = {}
    with open(HERE / "results" / "engine_cases.csv") as file:
        for row in csv.DictReader(file):
            if row["memory_peak_gib"] and row["case"] in known:
                spec = Where(ranks=2).spec(known[row["case"]])
                spec = replace(spec, plan=effective(spec)[0])
                found.setdefault(spec.trial_id, ("case", spec, float(row["memory_peak_gib"]) * 2**30))
    return list(found.values())


def baselines(spec: TrialSpec) -> tuple[float, float]:
    """Bytes by the two formulas."""
    model, plan = spec.model, spec.plan
    ranks = plan.tp * plan.pp
    dp = plan.dp(spec.cluster.world_size)
    state = {"none": 18.0, "zero1": 6 + 12 / dp, "zero2": 2 + 16 / dp, "zero3": 18 / dp}[plan.sharding]
    if spec.workload.mode != "pretrain":
        state = 2.0
    h = model.hidden_size
    rows = spec.workload.seq_len * plan.micro_batch_size * h
    layer = 2 * rows / plan.tp
    if plan.recompute != "full":
        layer = rows * (18 + 4 * model.ffn_hidden_size / h) / plan.tp
    weights = state * model.num_parameters / ranks
    return weights, weights + model.num_layers * layer


def summary(name: str, errors: np.ndarray) -> str:
    """One line of a summary."""
    size = np.abs(errors)
    return (
        f"{name:34} {len(errors):4d} {100 * np.median(size):7.2f} {100 * np.quantile(size, 0.9):7.2f} "
        f"{100 * errors.min():+8.2f} {100 * errors.max():+8.2f}"
    )


def print_excess(measured: Sequence[tuple[str, TrialSpec, float]]) -> None:
    """Prints errors with the excess of one measured trial carried over to the others of its engine and model.

    Each engine and model is predicted by a fit to the others. `always` adds any excess, as Primus does;
    `measured_excess` adds one that is far beyond the interval.
    """
    trials = [(spec, peak) for source, spec, peak in measured if source == "trial"]
    groups = defaultdict(list)
    for spec, peak in trials:
        groups[spec.engine, spec.model.name].append((spec, peak))
    errors: dict[str, list[float]] = {"none": [], "always": [], "measured_excess": []}
    for own in groups.values():
        fitted = fit_memory([one for one in trials if one not in own], H200).coefficients
        predicted = [_peak_bytes(spec, fitted) for spec, _ in own]
        for first, (spec, peak) in enumerate(own):
            any_bytes = peak - predicted[first]
            known_bytes = sum(measured_excess([(spec, peak)], fitted).values())
            for place, (_, actual) in enumerate(own):
                if place != first:
                    for name, more in (("none", 0.0), ("always", any_bytes), ("measured_excess", known_bytes)):
                        errors[name].append((predicted[place] + more) / actual - 1)
    print("\nexcess of one measured trial, carried over to the other plans of its engine and model")
    for name, found in errors.items():
        print(summary(f"  {name}", np.array(found)))


def _peak_bytes(spec: TrialSpec, coefficients: MemoryCoefficients) -> float:
    ((_, batch),) = batches([spec])
    return float(predict(batch, coefficients).peak_bytes[0])


def main() -> None:
    """Prints the table and the summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the coefficients, leaving configurations out")
    measured = trials() + measured_cases()
    coefficients, held_out = H200, None
    if parser.parse_args().fit:
        fit = fit_memory([(spec, peak) for _, spec, peak in measured], H200)
        coefficients, held_out = fit.coefficients, fit.held_out_frac
        print(json.dumps({name: str(engine) for name, engine in coefficients.engines.items()}, indent=1))
    errors, others = [], []
    print(f"{'source':6} {'engine':9} {'model':13} {'measured':>9} {'predicted':>9} {'error %':>8}  plan; parts in GB")
    for source, spec, peak in measured:
        ((_, batch),) = batches([spec])
        memory = predict(batch, coefficients)
        errors.append(memory.peak_bytes[0] / peak - 1)
        others.append([value / peak - 1 for value in baselines(spec)])
        parts = " ".join(f"{name} {value[0] / 1e9:.2f}" for name, value in memory.parts_bytes.items() if value[0] > 5e6)
        print(
            f"{source:6} {spec.engine:9} {spec.model.name:13} {peak / 1e9:9.2f} {memory.peak_bytes[0] / 1e9:9.2f} "
            f"{100 * errors[-1]:+8.2f}  {spec.workload.mode} {spec.label}; {parts}"
        )
    print(f"\n{'errors, %':34} {'n':>4} {'median':>7} {'p90':>7} {'least':>8} {'most':>8}")
    every, rest = np.array(errors), np.array(others)
    sources = np.array([source for source, _, _ in measured])
    engines = np.array([spec.engine for _, spec, _ in measured])
    for source in ("trial", "case"):
        chosen = sources == source
        print(summary(f"predicted, {source}s", every[chosen]))
        for engine in ("torch", "megatron", "deepspeed"):
            print(summary(f"  {engine}", every[chosen & (engines == engine)]))
        if held_out is not None:
            print(summary("  configurations held out", held_out[chosen]))
        print(summary("  18 bytes a parameter", rest[chosen, 0]))
        print(summary("  the same and Korthikanti's layers", rest[chosen, 1]))
    print_excess(measured)


if __name__ == "__main__":
    main()

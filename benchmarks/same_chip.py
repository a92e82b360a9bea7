#!/usr/bin/env python3
"""Prints the errors of what was predicted of two H100s before any H100 was measured, and of what is predicted now.

    python benchmarks/same_chip.py [--csv FILE]

Both spaces, their trials and their estimates from before the first run are in `benchmarks/data`.
Repeats count one by one.
"""

import argparse
import csv
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from measured_tables import DATA, completed
from prediction import ordered, trial_of

from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.fitting.device import Measured
from wattune.trial import TrialStatus

TABLES: Final = {"dense_llama_h100x2": "Llama-3 8B, 8 layers", "moe_ep_h100x2": "Mixtral 8x7B, 4 layers"}
METRICS: Final = (
    "step_time_s",
    "memory_peak_bytes",
    "device_power_mean_w",
    "node_device_power_peak_1s_w",
    "energy_per_token_j",
)
WAYS: Final = {"before": "before the first run, blind", "now": "by the fit to H200"}
UNIT: Final = {"memory_peak_bytes": 1e-9}
"""Factors of the raw rows, which have gigabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run, with its estimates by way: metric -> value, low, high."""

    table: str
    trial: Measured
    plan: str
    predicted: Mapping[str, Mapping[str, tuple[float, float, float]]]

    @property
    def measured(self) -> Mapping[str, float]:
        """All metrics of the run."""
        return self.trial[1].metrics

    def error(self, way: str, metric: str) -> float:
        """Returns the relative error of a prediction."""
        return self.predicted[way][metric][0] / self.measured[metric] - 1

    def inside(self, way: str, metric: str) -> bool:
        """Tells whether the interval holds what was measured."""
        _, low, high = self.predicted[way][metric]
        return low <= self.measured[metric] <= high


def before(table: str) -> dict[str, dict[str, Any]]:
    """Reads the estimates of a table's plans from before its first run, by trial."""
    return {row["trial_id"]: row for row in pq.read_table(DATA / "estimates" / f"{table}.parquet").to_pylist()}


def runs(table: str) -> list[Run]:
    """Reads the completed runs of a table with what was and what is predicted of them."""
    rows, blind = completed(DATA / f"{table}.parquet"), before(table)
    trials = [trial_of(row) for row in rows]
    now = estimate([spec for spec, _ in trials], default_coefficients).columns
    return [
        Run(
            table=table,
            trial=trials[number],
            plan=blind[row["trial_id"]]["plan"],
            predicted={
                "before": {
                    metric: tuple(blind[row["trial_id"]][f"estimate.{metric}{end}"] for end in ("", ".low", ".high"))
                    for metric in METRICS
                },
                "now": {
                    metric: tuple(
                        float(column[number]) for column in (now[metric].value, now[metric].low, now[metric].high)
                    )
                    for metric in METRICS
                },
            },
        )
        for number, row in enumerate(rows)
    ]


def in_order(found: Sequence[Run], way: str) -> tuple[int, int]:
    """Counts the pairs whose steps are predicted in order, and all that `prediction.ordered` counts."""
    return ordered([run.trial for run in found], [run.predicted[way]["step_time_s"][0] for run in found])


def out_of_memory(table: str) -> dict[str, tuple[float, float]]:
    """Returns the plans that ran out of memory: predicted peak and upper end of its interval [bytes], from before."""
    failed = {
        row["trial_id"]
        for row in pq.read_table(DATA / f"{table}.parquet").to_pylist()
        if row["status"] == TrialStatus.OUT_OF_MEMORY
    }
    name = "estimate.memory_peak_bytes"
    return {row["plan"]: (row[name], row[f"{name}.high"]) for at, row in before(table).items() if at in failed}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="file for a row of every run")
    given = parser.parse_args()
    found = [run for table in TABLES for run in runs(table)]
    groups = {name: [run for run in found if run.table == table] for table, name in TABLES.items()}
    for way, words in WAYS.items():
        print(f"\n{words}: | metric | of | median | 90th percentile | worst | bias | inside 95 % |")
        for metric, (name, of) in itertools.product(METRICS, {**groups, "both": found}.items()):
            errors = np.array([run.error(way, metric) for run in of])
            size = np.abs(errors)
            figures = " | ".join(f"{value:.1%}" for value in (np.median(size), np.quantile(size, 0.9), size.max()))
            inside = np.mean([run.inside(way, metric) for run in of])
            print(f"| {metric} | {name} | {figures} | {np.median(errors):+.1%} | {inside:.0%} |")
        for name, of in groups.items():
            right, total = in_order(of, way)
            print(f"{name}: {right / total:.1%} of {total} pairs in order")
    for table in TABLES:
        for plan, (peak, high) in out_of_memory(table).items():
            print(f"ran out of memory: {plan}, predicted {peak / 1e9:.1f} GB, at most {high / 1e9:.1f} GB")
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            names = [name.replace("_bytes", "_gb") for name in METRICS]
            ways = [f"{way}_{name}" for name in names for way in WAYS]
            writer.writerow(["table", "run", "plan", "host_bound_frac", *names, *ways])
            for run in found:
                values = [run.measured[metric] * UNIT.get(metric, 1) for metric in METRICS]
                values += [run.predicted[way][metric][0] * UNIT.get(metric, 1) for metric in METRICS for way in WAYS]
                figures = (f"{value:.6g}" for value in (run.measured["host_bound_frac"], *values))
                result = run.trial[1]
                writer.writerow([run.table, f"{result.trial_id}-{result.repeat}", run.plan, *figures])


if __name__ == "__main__":
    main()

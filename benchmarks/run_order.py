#!/usr/bin/env python
"""Replays measured tables in several orders of trials: what compiling costs in each, and what drift does to groups.

    python benchmarks/run_order.py --csv benchmarks/results/run_order.csv

First it splits each measured trial into its steps (build, warm-up, window) and the rest, and tells the rest of trials
that made new graphs from that of warm ones. Then it puts the trials of each table, and those of the whole space beside
it, into orders with chunks of several lengths, adds the reference trial, and sums up what the trials would take on one
set of nodes. A trial that was not measured has the median steps of its table.
"""

import argparse
import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from wattune.orchestrate.scheduling.graphs import Start, WarmGraphs, graphs_of, waited_for_workers
from wattune.orchestrate.scheduling.references import ordinary_plans
from wattune.orchestrate.scheduling.run_order import CHUNK, run_order, workers_of
from wattune.search.prune import prune
from wattune.search.space import load_space
from wattune.trial import Measure, TrialResult, TrialSpec, TrialStatus
from wattune.units import NS_PER_S

DATA: Final = Path(__file__).parent / "data"
CHUNKS: Final = (1, 2, 3, CHUNK, 10, 1000)
"""Most trials in a row with the same graphs. 1 is the order of before: one by one, in blocks for the same workers."""
REFERENCE_EVERY: Final = Measure().reference_every
STARTS: Final[tuple[Start, ...]] = ("new_workers", "new_graphs", "warm")
ORDER_FIELDS: Final = (
    "trials",
    "num_trials",
    "num_groups",
    "num_in_chunk",
    "num_cold",
    "cold_frac",
    "time_s",
    "saved_frac",
    "saved_least_frac",
    "saved_most_frac",
    "linear_drift_frac",
    "walk_drift_frac",
    "walk_drift_corrected_frac",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured trial, split into parts."""

    spec: TrialSpec
    start: Start
    steps_s: float
    """Build, warm-up and window."""
    rest_s: float
    """Everything else without the start of workers: compiling, profiling, telemetry, analysis."""
    workers_s: float


def read(path: Path) -> list[Measured]:
    """Reads the completed trials of a table in the order they ran; each learns from those before it how it started."""
    warm, found = WarmGraphs(), []
    for row in sorted(pq.read_table(path).to_pylist(), key=lambda row: row["start_wall_ns"]):
        spec, tags = TrialSpec.from_json(json.loads(row["spec"])), json.loads(row["tags"])
        status = TrialStatus(row["status"])
        result = TrialResult(trial_id=row["trial_id"], repeat=row["repeat"], status=status, tags=tags)
        if status is not TrialStatus.COMPLETED:
            continue
        start = warm.ran(spec, tags["nodes"], new_workers=waited_for_workers(result))
        steps_s = float(tags["build_time_s"]) + float(tags["window_s"]) + int(tags["warmup_steps"]) * row["step_time_s"]
        workers_s = float(tags["group_start_s"])
        took_s = (row["end_wall_ns"] - row["start_wall_ns"]) / NS_PER_S
        found.append(Measured(spec, start, steps_s, took_s - steps_s - workers_s, workers_s))
    return found


def rests(tables: Sequence[Sequence[Measured]]) -> dict[tuple[str, Start], list[float]]:
    """Seconds beside steps and the start of workers, by engine and start."""
    found: dict[tuple[str, Start], list[float]] = defaultdict(list)
    for one in (one for table in tables for one in table):
        found[one.spec.engine, one.start].append(one.rest_s)
    return found


def with_references(order: Sequence[TrialSpec]) -> list[tuple[TrialSpec, bool]]:
    """Adds the runs of the reference trials, as a study on one set of nodes does; each says whether it is one."""
    plans = ordinary_plans(order, seed=0)
    since: dict[Any, int] = defaultdict(int)
    found: list[tuple[TrialSpec, bool]] = []
    for spec in order:
        workers = workers_of(spec)
        if not since[workers] % REFERENCE_EVERY:
            found += [(plans[workers], True)] * (1 if since[workers] else 2)
        since[workers] += 1
        found.append((spec, False))
    return found


@dataclass(frozen=True, slots=True)
class Played:
    """One order, run on paper."""

    took_s: float
    num_cold: int
    biases: tuple[float, float, float]
    """Of a group's mean, root mean square: linear drift, random walk, the walk corrected by reference trials."""


def play(order: Sequence[TrialSpec], steps_s: dict[TrialSpec, float], rest_s: dict[Start, float], seed: int) -> Played:
    """Sums up what an order takes, and what drift does to the means of its groups.

    Args:
        order: Trials in order.
        steps_s: Seconds of each trial's build and steps.
        rest_s: Seconds beside them by start; `new_workers` with the start of the workers.
        seed: Seed of the drift.
    """
    warm, ends_s, num_cold = WarmGraphs(), [0.0], 0
    runs = with_references(order)
    for spec, _ in runs:
        start = warm.ran(spec, "", new_workers=warm.start_of(spec, "") == "new_workers")
        num_cold += start != "warm"
        ends_s.append(ends_s[-1] + steps_s[spec] + rest_s[start])
    at = np.array(ends_s[:-1]) / ends_s[-1]
    walk = np.cumsum(np.random.default_rng(seed).standard_normal(len(runs))) / len(runs) ** 0.5
    is_reference = np.array([reference for _, reference in runs])
    corrected = walk - np.interp(at, at[is_reference], walk[is_reference])
    groups: dict[Any, list[int]] = defaultdict(list)
    for place, (spec, reference) in enumerate(runs):
        if not reference:
            groups[graphs_of(spec)].append(place)
    biases = tuple(_bias(drift, list(groups.values())) for drift in (at, walk, corrected))
    return Played(ends_s[-1], num_cold, biases)  # type: ignore[arg-type]


def _bias(drift: NDArray[np.float64], groups: Sequence[Sequence[int]]) -> float:
    """Root mean square, over trials, of the difference of their group's mean drift from that of all."""
    sizes = np.array([len(group) for group in groups])
    means = np.array([drift[list(group)].mean() for group in groups])
    middle = float((sizes * means).sum() / sizes.sum())
    return float(((sizes * (means - middle) ** 2).sum() / sizes.sum()) ** 0.5)


def compared(
    name: str, specs: Sequence[TrialSpec], steps_s: dict[TrialSpec, float], rest_s: dict[Start, float], num_seeds: int
) -> list[dict[str, Any]]:
    """Plays one set of trials in every order; rows of means over seeds."""
    rows, before = [], []
    for chunk in CHUNKS:
        played = []
        for seed in range(num_seeds):
            order = run_order(specs, seed=seed, order="shuffled", graphs_of=graphs_of, chunk=chunk)
            played.append(play(order, steps_s, rest_s, seed))
        took_s = [one.took_s for one in played]
        before = before or took_s
        saved = [1 - after / was for after, was in zip(took_s, before, strict=True)]
        cold = statistics.fmean(one.num_cold for one in played)
        biases = [(statistics.fmean(one.biases[kind] ** 2 for one in played)) ** 0.5 for kind in range(3)]
        values = (
            [name, len(specs), len({graphs_of(spec) for spec in specs}), chunk, f"{cold:.1f}"]
            + [f"{cold / len(with_references(specs)):.3f}", f"{statistics.fmean(took_s):.0f}"]
            + [f"{value:.3f}" for value in (statistics.fmean(saved), min(saved), max(saved), *biases)]
        )
        rows.append(dict(zip(ORDER_FIELDS, values, strict=True)))
    return rows


def main() -> None:
    """Prints both tables and writes the rows of the second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, action="append", help="measured tables; default: all of this folder")
    parser.add_argument("--seeds", type=int, default=20, help="orders of each length (default %(default)s)")
    parser.add_argument("--csv", type=Path, help="where the rows go")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds: got {options.seeds}, allowed: 1 or more")
    paths = options.table or sorted(DATA.glob("*_h200x4.parquet"))
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        parser.error(f"--table: {', '.join(missing)} is not there")
    tables = {path: read(path) for path in paths}
    found = rests(list(tables.values()))
    print("| engine | start | trials | seconds beside steps: median | least | most |\n|---|---|---|---|---|---|")
    for (engine, start), seen in sorted(found.items(), key=lambda item: (item[0][0], STARTS.index(item[0][1]))):
        print(
            f"| {engine} | {start} | {len(seen)} | {statistics.median(seen):.1f} | {min(seen):.1f} | {max(seen):.1f} |"
        )
    rows = []
    for path, table in tables.items():
        engine = table[0].spec.engine
        if any((engine, start) not in found for start in STARTS):
            print(f"{path.name}: left out, some start of {engine} was never measured")
            continue
        rest_s = {start: statistics.median(found[engine, start]) for start in STARTS}
        rest_s["new_workers"] += statistics.median(
            one.workers_s for each in tables.values() for one in each if one.workers_s and one.spec.engine == engine
        )
        own_s = {one.spec: one.steps_s for one in table}
        middle_s = statistics.median(own_s.values())
        if len(own_s) >= REFERENCE_EVERY:
            rows += compared(f"{path.stem}, measured", list(own_s), own_s, rest_s, options.seeds)
        space = path.with_suffix(".yaml")
        if space.exists():
            specs = [one.spec for one in prune(load_space(space)).kept if one.spec.engine == engine]
            steps_s = {spec: own_s.get(spec, middle_s) for spec in specs}
            rows += compared(f"{path.stem}, space", specs, steps_s, rest_s, options.seeds)
    print("\n| " + " | ".join(ORDER_FIELDS) + " |\n" + "|---" * len(ORDER_FIELDS) + "|")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, ORDER_FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()

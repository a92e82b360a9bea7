"""A cluster's power against published statistics of eight H100 that save every so many steps, and from our own traces.

Every row is foretold from all others, then the row of `--every` from all of them, by the product's `cluster_power`. The
load behind the statistics is fitted: means tell only the ratio of a checkpoint's time to a step's; seconds follow from
the swing, which counts edges, and from percentiles. Several loads fit nearly as well: what is foretold is their mean by
likelihood, and the range between them says what statistics do not. What repeats faster than readings is not in them:
a load has noise in its place, and no lines of steps.

    python benchmarks/power_swing.py [--rows FILE.csv] [--against FILE.csv] [--every 50] [--out DIR]
"""

import argparse
import csv
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from scipy.optimize import minimize

from wattune.analysis.run_data import RunData
from wattune.analysis.signals.energy_grid import GRID_S
from wattune.arrays import Floats
from wattune.projection.cluster_power import Checkpoints, NodeLoad, cluster_power, measured_load

Fit: TypeAlias = tuple[float, NodeLoad, Checkpoints]
"""A load with its checkpoint, and its likelihood over that of the best."""

ROWS = Path(__file__).parent / "data" / "h100x8_power_swing.csv"
TRACES = Path(__file__).parents[1] / "tests" / "golden" / "h200x4"
NODES = 1024

PERIOD_S, AVERAGED_S = 0.1, 1.0
"""Time between the readings, and that over which each is a mean: `power.draw` of an H100."""

COLUMNS = {
    "cluster_power_mean_w": ("mean_w", 0.03),
    "cluster_power_p5_w": ("p5_w", 0.05),
    "cluster_power_p95_w": ("p95_w", 0.015),
    "cluster_power_ramp_1s_w_per_s": ("max_1s_ramp_w_per_s", 0.2),
    "cluster_swing_rms_w": ("rms_0p1_to_5_hz_w", 0.05),
}
"""Our figures, the column of the table, and the relative error at which each counts the same in the fit."""

STEPS_S = np.geomspace(0.05, 5.0, 21)
"""Lengths of a step from which the search starts; it goes on from the best five."""

COUNTS = 0.05
"""Least likelihood of a load that counts for the range."""

NOISE_S = 60.0
"""Length of the noise, the same at every call."""


def read(path: Path) -> dict[float, dict[str, float]]:
    """Reads the table: figures by our names, by steps between checkpoints."""
    with path.open() as file:
        return {
            float(row["trace"].removeprefix("ckpt")): {
                **{ours: float(row[theirs]) for ours, (theirs, _) in COLUMNS.items()},
                "window_s": float(row["window_s"]),
            }
            for row in csv.DictReader(file)
        }


def noise() -> Floats:
    """Makes white noise as such readings show it, of variance 1."""
    count = round(NOISE_S / GRID_S)
    frequency_hz = np.fft.rfftfreq(count, GRID_S)
    white = np.fft.rfft(np.random.default_rng(0).standard_normal(count))
    white *= np.sinc(frequency_hz * AVERAGED_S) * np.sinc(frequency_hz * PERIOD_S)
    white[0] = 0.0
    drawn = np.fft.irfft(white, count)
    return np.asarray(drawn / drawn.std())


NOISE = noise()


def made(logs: Floats) -> tuple[NodeLoad, Checkpoints]:
    """Makes the load and the checkpoint of six parameters."""
    step_s, save_s, train_w, noise_w, node_w, edge_s = np.exp(logs).tolist()
    load = NodeLoad(parts_w=(train_w + noise_w * NOISE)[None], step_s=step_s, period_s=PERIOD_S, averaged_s=AVERAGED_S)
    return load, Checkpoints(every_steps=1.0, duration_s=save_s, node_w=node_w, edge_s=edge_s)


def foretell(load: NodeLoad, saves: Checkpoints, every: float, window_s: float) -> dict[str, float]:
    """Computes a row: a trace that begins with training."""
    return cluster_power(load, 1, checkpoints=replace(saves, every_steps=every), window_s=window_s)


def fitted(rows: Mapping[float, Mapping[str, float]]) -> list[Fit]:
    """Finds loads and checkpoints with the statistics of some rows."""

    def cost(logs: Floats) -> float:
        if np.abs(logs).max() > 12.0:
            return 1e9
        load, saves = made(logs)
        total = 0.0
        for every, row in rows.items():
            found = foretell(load, saves, every, row["window_s"])
            for name, (_, scale) in COLUMNS.items():
                off = np.log(max(found[name], 1e-9) / row[name]) / scale
                total += 2 * (np.sqrt(1 + off**2) - 1)  # as a square where it is small, else as an amount
        return total

    low_w = min(row["cluster_power_p5_w"] for row in rows.values())
    high_w = max(row["cluster_power_p95_w"] for row in rows.values())
    share = {every: (row["cluster_power_mean_w"] - low_w) / (high_w - low_w) for every, row in rows.items()}
    middle = min(share, key=lambda every: abs(share[every] - 0.5))
    saved_steps = middle * (1 / share[middle] - 1)
    starts = [
        np.log([step_s, saved_steps * step_s, 0.98 * high_w, 0.02 * high_w, low_w, 1.3 * AVERAGED_S])
        for step_s in STEPS_S
    ]
    best = sorted(starts, key=cost)[:5]
    simplex = 0.15 * np.vstack([np.zeros(6), np.diag([1.0, 1.0, 0.2, 2.0, 0.2, 2.0])])
    ends = [
        minimize(
            cost, one, method="Nelder-Mead", options={"initial_simplex": one + simplex, "maxfev": 260, "fatol": 0.01}
        )
        for one in best
    ]
    least = min(float(end.fun) for end in ends)
    return [(math.exp((least - float(end.fun)) / 2), *made(end.x)) for end in ends]


def foretold(loads: Sequence[Fit], every: float, window_s: float) -> dict[str, tuple[float, float, float]]:
    """Computes a row: mean of what the loads say, weighted, and the lowest and highest of those that count."""
    each = [foretell(load, saves, every, window_s) for _, load, saves in loads]
    weights = [weight for weight, _, _ in loads]
    found = {}
    for name in COLUMNS:
        values = np.array([one[name] for one in each])
        counts = values[np.array(weights) > COUNTS]
        found[name] = (float(np.average(values, weights=weights)), float(counts.min()), float(counts.max()))
    return found


def recorded() -> list[dict[str, float | str]]:
    """Projects the three recordings of four H200 to 1,024 nodes."""
    rows: list[dict[str, float | str]] = []
    for name, saves in itertools.product(("dp4", "tp2pp2", "square_inphase"), (False, True)):
        examined = RunData.of(TRACES / name).examined
        assert examined is not None and examined.aligned.steps is not None
        load = measured_load(examined.powers, examined.duration_s / len(examined.aligned.steps.number))
        assert load is not None
        checkpoints = Checkpoints(every_steps=500, duration_s=30.0, node_w=4 * 118.4) if saves else None
        for nodes in (1, NODES):
            start = time.process_time()
            found = cluster_power(load, nodes, checkpoints=checkpoints)
            rows.append(
                {
                    "recording": name,
                    "num_nodes": nodes,
                    "num_steps_to_checkpoint": 500 if saves else 0,
                    **{key: round(value, 3) for key, value in found.items() if not key.endswith("hz")},
                    **{
                        f"{key[:-2]}period_s": round(1 / value, 3) for key, value in found.items() if key.endswith("hz")
                    },
                    "cpu_s": round(time.process_time() - start, 2),
                }
            )
    return rows


def main() -> None:
    """Foretells, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--against", type=Path, help="a table with more rows, to score what is foretold of them")
    parser.add_argument("--every", type=float, default=50.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = read(args.rows)
    known = rows | (read(args.against) if args.against else {})
    done: list[dict[str, object]] = []
    for left in [*rows, None]:
        start = time.process_time()
        some = {every: row for every, row in rows.items() if every != left}
        loads = fitted(some)
        _, load, saves = max(loads, key=lambda one: one[0])
        for every in [left] if left is not None else sorted({args.every, *known}):
            found = foretold(loads, every, known.get(every, rows[max(rows)])["window_s"])
            line: dict[str, object] = {"num_steps": every, "from": " ".join(f"{one:g}" for one in sorted(some))}
            for name, (theirs, _) in COLUMNS.items():
                value, low, high = found[name]
                line |= {theirs: round(value), f"low_{theirs}": round(low), f"high_{theirs}": round(high)}
                if every in known:
                    line[f"error_{theirs.rpartition('_')[0]}_frac"] = round(value / known[every][name] - 1, 4)
            done.append(line)
            print(line, flush=True)
        fit = f"step {load.step_s:.3f} s, training {load.parts_w.mean():.0f} W, {saves}"
        print(f"best load: {fit}; {time.process_time() - start:.0f} CPU-s")
    traces = recorded()
    for row in traces:
        print(row)
    if args.out:
        table = [*done, *traces]
        with (args.out / "power_swing.csv").open("w", newline="") as file:
            columns = list(dict.fromkeys(key for row in table for key in row))
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()

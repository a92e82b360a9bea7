#!/usr/bin/env python3
"""Prints the errors of predicted step times, with baselines beside them.

    python benchmarks/predict_step_time.py

(a) Measured trials in `benchmarks/data/*_h200x*.parquet`, whole configurations held out of the fit.
(b) Published steps without any calibration: datasheets, kernel tables, and each software's habits as its sources say.
(c) Scaling: series of published rows, predicted from their smallest row's error.
Steps of MLPerf rows are derived from MLPerf logs; they are not an MLPerf metric and not verified by MLCommons.
"""

import argparse
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import measured_tables
import numpy as np
from published_steps import SPEEDUP, Step, adjusted, published_world, read
from step_time_baselines import at_rate, calculon_s, model_flop, roofline_s

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import MODELS
from wattune.cost.batch import Batch, batches
from wattune.cost.coefficients import PUBLISHED_STEP_TIME
from wattune.cost.power import H200, H200_PRIOR, power_coefficients
from wattune.cost.step_time.predict import predict
from wattune.fitting.step_time import TimedTrial, fit
from wattune.trial import TrialSpec
from wattune.workload import Workload

DATA = Path(__file__).parent / "data"


def trials() -> list[tuple[str, TrialSpec, dict]]:
    """Reads the measured trials: the name of the table, the specification and the metrics."""
    return [(row["table"], TrialSpec.from_json(json.loads(row["spec"])), row) for row in measured_tables.rows()]


def errors_text(errors: Iterable[float]) -> str:
    """Says median, 90th percentile and bias."""
    known = np.array(list(errors))
    size = np.abs(known)
    return f"median {np.median(size):6.1%}  p90 {np.quantile(size, 0.9):6.1%}  bias {np.median(known):+6.1%}"


def order_accuracy(tables: list[str], measured: np.ndarray, predicted: np.ndarray) -> tuple[float, int]:
    """Computes the share of pairs of one table that differ by more than 5 % and are predicted in their order."""
    right = []
    for one, other in itertools.combinations(range(len(tables)), 2):
        if tables[one] == tables[other] and abs(np.log(measured[one] / measured[other])) > np.log(1.05):
            right.append((measured[one] > measured[other]) == (predicted[one] > predicted[other]))
    return float(np.mean(right)), len(right)


def measured_trials() -> None:
    """Prints part (a)."""
    found = trials()
    tables = [table for table, _, _ in found]
    measured = np.array([row["step_time_s"] for _, _, row in found])
    given: list[TimedTrial] = [(spec, row) for _, spec, row in found]
    result = fit(given, PUBLISHED_STEP_TIME, H200)
    print(f"(a) {len(found)} trials of {result.num_configurations} configurations on H200, held out by configuration")
    rates = np.array([model_flop(spec) / (row["step_time_s"] * spec.cluster.world_size) for _, spec, row in found])
    constant = [
        at_rate(spec, float(np.median([rates[at] for at, (_, one, _) in enumerate(found) if one != spec])))
        for _, spec, _ in found
    ]
    lines = {
        "fitted, held out": measured * (1 + result.held_out_frac),
        "published coefficients": _predicted([spec for spec, _ in given]),
        "constant MFU, fitted": np.array(constant),
        "datasheet roofline": np.array([roofline_s(spec) for _, spec, _ in found]),
        "Calculon's equations": np.array([calculon_s(spec) for _, spec, _ in found]),
    }
    for name, predicted in lines.items():
        share, pairs = order_accuracy(tables, measured, predicted)
        print(f"  {name:24s} {errors_text(predicted / measured - 1)}  order {share:.1%} of {pairs} pairs")
    for table in sorted(set(tables)):
        rows = [at for at, one in enumerate(tables) if one == table]
        print(f"    {table:34s} {len(rows):3d} trials  {errors_text(result.held_out_frac[rows])}")
    print("  factors on the published coefficients: " + ", ".join(f"{k} {v:.2f}" for k, v in result.factors.items()))
    worst = np.argsort(-np.abs(result.held_out_frac))[:4]
    print("  worst: " + "; ".join(f"{found[at][1].plan.label} {result.held_out_frac[at]:+.0%}" for at in worst))
    _parts(found, result.coefficients)


def _parts(found: list, coefficients) -> None:  # noqa: ANN001
    """Prints measured and predicted parts, and the clock."""
    differences = defaultdict(list)
    for _, spec, row in found:
        ((_, batch),) = batches([spec])
        step = predict(batch, coefficients, H200, limit_w=row["device_power_limit_w"] or 700.0)
        share = {name: float(values[0] / step.step_time_s[0]) for name, values in step.parts_s.items()}
        share["exposed_comm_s"] = sum(value for name, value in share.items() if name.startswith("exposed_comm"))
        share["bubble and straggler_s"] = share["bubble_s"] + share["straggler_s"]
        own = dict(row)
        if row["bubble_frac"] is not None and row["straggler_frac"] is not None:
            own["bubble and straggler_frac"] = row["bubble_frac"] + row["straggler_frac"]
        for name, value in share.items():
            measured = own.get(name.removesuffix("_s") + "_frac")
            if measured is not None:
                differences[name.removesuffix("_s")].append(value - measured)
        stages = step.activity.matrix_s[0] > 0
        deficit = (1 - step.activity.clock_frac[0][stages].mean()) * (share["compute_s"] + share["exposed_comm_tp_s"])
        differences["clock deficit"].append(deficit - row["clock_deficit_frac"])
    print("  parts as shares of the step, predicted less measured (fitted on these trials):")
    for name, values in differences.items():
        print(
            f"    {name:24s} {len(values):3d} trials  median {np.median(values):+.3f}  "
            f"median absolute {np.median(np.abs(values)):.3f}"
        )


def _predicted(specs: list[TrialSpec]) -> np.ndarray:
    times = np.empty(len(specs))
    for positions, batch in batches(specs):
        limit_w = batch.device.power_limit_w or np.inf
        times[positions] = predict(batch, PUBLISHED_STEP_TIME, H200_PRIOR, limit_w=limit_w).step_time_s
    return times


def published(steps: list[Step]) -> np.ndarray:
    """Predicts published steps as `wattune plan` does for a device without a fit."""
    times = np.empty(len(steps))
    groups = defaultdict(list)
    for at, step in enumerate(steps):
        groups[step.precision, step.spec.cluster.device].append(at)
    for (precision, name), rows in groups.items():
        coefficients = adjusted(PUBLISHED_STEP_TIME, name, precision)
        for positions, batch in batches([steps[at].spec for at in rows]):
            power, limit_w = power_coefficients(batch.device), batch.device.power_limit_w
            assert power is not None and limit_w is not None, "the catalog has the limits of published devices"
            times[np.array(rows)[positions]] = predict(batch, coefficients, power, limit_w=limit_w).step_time_s
    return times


def group(step: Step) -> tuple[str, str, str, str]:
    """Names the source, precision, device and kind of a row."""
    kind = "lora" if step.spec.workload.mode == "lora" else "experts" if step.spec.model.is_moe else "dense"
    return step.source, step.precision, step.spec.cluster.device, kind


def published_steps() -> None:
    """Prints parts (b) and (c)."""
    steps, reasons = read()
    times = published(steps)
    print(f"\n(b) {len(steps)} of {len(steps) + sum(reasons.values())} published rows, without calibration")
    for reason, count in sorted(reasons.items(), key=lambda one: -one[1]):
        print(f"    left out {count:4d}: {reason}")
    rates = [model_flop(one.spec) / (one.measured_s * one.spec.cluster.world_size) for one in steps]
    groups = defaultdict(lambda: defaultdict(list))
    for at, one in enumerate(steps):
        speedup = SPEEDUP[one.precision]
        others = [
            rates[i] for i, two in enumerate(steps)
            if (two.precision, two.spec.cluster.device) == (one.precision, one.spec.cluster.device)
            and two.spec.model.hidden_size != one.spec.model.hidden_size
        ]  # fmt: skip
        constant = at_rate(one.spec, float(np.median(others))) / one.measured_s - 1 if others else np.nan
        error = (
            times[at] / one.measured_s - 1,
            constant,
            roofline_s(one.spec, speedup) / one.measured_s - 1,
            calculon_s(one.spec, speedup) / one.measured_s - 1,
        )
        row = (one.configuration, error)
        for key in (group(one), ("all", *group(one)[1:])):
            groups[key][row[0]].append(row[1])
    print("    median absolute error by configuration: ours | p90 | constant TFLOP/s | roofline | Calculon")
    for key, rows in sorted(groups.items()):
        table = np.array([np.mean(values, axis=0) for values in rows.values()])
        size = np.abs(table)
        middle = [np.nanmedian(column) if np.isfinite(column).any() else np.nan for column in size.T]
        print(
            f"    {' '.join(key):48s} {len(table):4d}  {middle[0]:6.1%} | {np.quantile(size[:, 0], 0.9):6.1%} | "
            + " | ".join(f"{one:6.1%}" for one in middle[1:])
            + f"   bias {np.median(table[:, 0]):+.1%}"
        )
    _scaling(steps, times)


def _scaling(steps: list[Step], times: np.ndarray) -> None:
    """Prints series that differ in the number of devices: the error of growth since the smallest row."""
    print("\n(c) scaling: predicted over measured, each relative to the smallest row of its series")
    series = defaultdict(list)
    for at, one in enumerate(steps):
        plan = one.spec.plan
        same_model = (one.spec.model.num_layers, one.spec.model.hidden_size)
        key = (one.source, one.precision, one.spec.cluster.device, *same_model, plan.label, one.spec.workload.seq_len)
        series[key].append((one.spec.cluster.world_size, at))
    growth = []
    for key, rows in sorted(series.items(), key=str):
        rows.sort()
        if key[0] not in ("DGXC", "MLPerf logs") or rows[-1][0] < 2 * rows[0][0]:
            continue
        first = times[rows[0][1]] / steps[rows[0][1]].measured_s
        values = [times[at] / steps[at].measured_s / first - 1 for _, at in rows[1:]]
        growth += values
        print(
            f"    {key[0]:12s} {key[1]} {key[2]:9s} h{key[4]} l{key[3]} {rows[0][0]:5d} to {rows[-1][0]:5d}: "
            + " ".join(f"{value:+.1%}" for value in values)
        )
    print(f"    all: {errors_text(growth)}")


def speed(num_candidates: int) -> None:
    """Prints candidates a second on one core."""
    cluster = ClusterSpec(device="h200_sxm", num_nodes=32, devices_per_node=8)
    world, batch_size, layers = cluster.world_size, 1024, 80
    columns = [
        (tp, pp, cp, vpp, mbs, sharding, recompute, overlap, world // (tp * pp * cp))
        for tp, pp, cp, vpp, mbs, sharding, recompute, overlap in itertools.product(
            (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (1, 2, 5), (1, 2, 4, 8), range(2), range(3), range(3)
        )
        if (pp > 1 or vpp == 1) and batch_size % (mbs * (world // (tp * pp * cp))) == 0
        and (vpp == 1 or batch_size // (mbs * (world // (tp * pp * cp))) % pp == 0)
        and layers % (pp * vpp) == 0 and batch_size >= mbs * (world // (tp * pp * cp))
    ]  # fmt: skip
    table = np.resize(np.random.default_rng(0).permutation(np.array(columns)), (num_candidates, 9))
    tp, pp, cp, vpp, mbs, sharding, recompute, overlap, dp = table.T
    virtual = pp * vpp
    batch = Batch(
        model=MODELS["llama3_70b"],
        cluster=cluster,
        engine="megatron",
        workload=Workload(seq_len=8192, global_batch_size=batch_size),
        dtype="bf16",
        tp=tp, pp=pp, cp=cp, ep=np.ones_like(tp), etp=tp, vpp=vpp, dp=dp, micro_batch_size=mbs,
        dp_replicate=np.ones_like(tp), offload=np.zeros_like(tp),
        num_micro_batches=batch_size // (mbs * dp), sharding=sharding, recompute=recompute, overlap=overlap,
        layers=np.where(np.arange(virtual.max()) < virtual[:, None], layers // virtual[:, None], 0),
    )  # fmt: skip
    start_s = time.process_time()
    predict(batch, PUBLISHED_STEP_TIME, H200_PRIOR, limit_w=700.0)
    spent_s = time.process_time() - start_s
    print(
        f"\nspeed: {num_candidates} candidates of {len(columns)} plans in {spent_s:.2f} s, "
        f"{num_candidates / spent_s:,.0f} a second"
    )


def main() -> None:
    """Prints all parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--candidates", type=int, default=60_000, help="candidates for the speed")
    arguments = parser.parse_args()
    measured_trials()
    with published_world():
        published_steps()
    speed(arguments.candidates)


if __name__ == "__main__":
    main()

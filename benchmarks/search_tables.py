#!/usr/bin/env python
"""Writes the synthetic tables that search strategies are compared on: 600 plans, and an earlier study of another model.

    python benchmarks/search_tables.py --out benchmarks/data

The truth is analytic: compute with an efficiency that grows with the work per kernel, a pipeline bubble, communication
that overlap hides in part, power with a cap, temperature by power, memory by formula. Each plan also deviates from that
on its own. The estimate has the same terms with other constants, so its errors are systematic. Noise is 2 %.
"""

import argparse
import hashlib
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec
from wattune.workload import Workload

SEED: Final = 20261122
NUM_PLANS: Final = 600
FIRST_AXES: Final = "tp pp cp ep etp vpp micro_batch_size sharding recompute overlap dtype layout rank_order"
NUM_REPEATS: Final = 3
NOISE: Final = {"time": 0.02, "power": 0.006, "temp": 0.004}
OWN_DEVIATION: Final = 0.03
"""Standard deviation of what no formula knows about a plan."""
ESTIMATES: Final = "estimated_"
"""Prefix of a column with predicted values; the same with `_log_std` has their standard deviations."""
CLUSTER: Final = ClusterSpec(device="h200_sxm", num_nodes=2, devices_per_node=8)

TRUTH: Final = {
    "peak": 660e12, "half_work": 1.6e3, "tp_bw": 260e9, "dp_bw": 48e9, "hidden": 0.62, "selective": 1.05, "full": 1.29,
    "gather": 1.25, "launch": 7e-4, "idle": 105.0, "watts": 830.0, "heat": 0.062, "air": 31.0, "activation": 34.0,
}  # fmt: skip
WRONG: Final = TRUTH | {
    "peak": 690e12, "half_work": 0.9e3, "tp_bw": 345e9, "hidden": 0.95, "selective": 1.02, "full": 1.33,
    "gather": 0.7, "launch": 2e-4, "watts": 760.0, "heat": 0.060, "activation": 31.0,
}  # fmt: skip
"""Constants that an estimate from datasheets and published formulas would have."""


def plans() -> list[Plan]:
    """Lists the plans that two nodes can run, thinned by a hash to the number of the table."""
    found = []
    for tp, pp, vpp, size, sharding, recompute, overlap in itertools.product(
        (1, 2, 4, 8), (1, 2, 4), (1, 2), (1, 2, 4, 8), ("none", "zero1", "zero3"), ("none", "selective", "full"),
        ("none", "grad", "grad_param"),
    ):  # fmt: skip
        needless = (vpp > 1 and pp == 1) or (overlap == "grad_param" and sharding != "zero3")
        if not needless and tp * pp <= 16 and 16 // (tp * pp) * size <= 64:
            chosen = {"sharding": sharding, "recompute": recompute, "overlap": overlap}
            found.append(Plan(tp=tp, pp=pp, vpp=vpp, etp=tp, micro_batch_size=size, **chosen))
    return sorted(found, key=_place)[:NUM_PLANS]


def _place(plan: Plan) -> bytes:
    """Returns what orders plans: a hash of the axes that the tables were drawn by; later axes change no table."""
    text = ", ".join(f"{name}={getattr(plan, name)!r}" for name in FIRST_AXES.split())
    return hashlib.sha256(f"{SEED} Plan({text})".encode()).digest()


def metrics(spec: TrialSpec, c: dict[str, float]) -> dict[str, float]:
    """Computes the metrics of a specification by the formulas, with one set of constants."""
    plan, work, shape = spec.plan, spec.workload, spec.model
    ranks = spec.cluster.world_size
    dp = plan.dp(ranks)
    micro_batches = work.global_batch_size / (dp * plan.micro_batch_size)
    tokens = plan.micro_batch_size * work.seq_len
    width = tokens / plan.tp * min(shape.hidden_size / plan.tp / 2048, 1.0)
    efficiency = width / (width + c["half_work"])
    again = {"none": 1.0, "selective": c["selective"], "full": c["full"]}[plan.recompute]
    flops = 6 * shape.num_active_parameters * tokens * again
    compute_s = flops / (plan.tp * plan.pp) / (c["peak"] * efficiency) + c["launch"] * shape.num_layers / plan.pp
    tp_bytes = 8 * tokens * shape.hidden_size * 2 * (plan.tp - 1) / plan.tp * shape.num_layers / plan.pp
    micro_s = compute_s + tp_bytes / c["tp_bw"] * (1.3 if plan.recompute == "full" else 1.0)
    bubble = (plan.pp - 1) / (micro_batches * plan.vpp + plan.pp - 1)
    pipeline_s = micro_s * micro_batches / (1 - bubble) * (1 + 0.015 * (plan.vpp - 1))
    shard = 2 * shape.num_parameters / (plan.tp * plan.pp) * (dp - 1) / dp
    rounds = {"none": 2.0, "zero1": 2.0, "zero3": 1.0 + 2 * c["gather"]}[plan.sharding]
    hidden = {"none": 0.0, "grad": 0.6, "grad_param": 1.0}[plan.overlap] * c["hidden"]
    step_s = pipeline_s + shard * rounds / c["dp_bw"] * (1 - hidden)
    busy = compute_s * micro_batches / step_s
    wanted_w = c["idle"] + c["watts"] * busy * (0.55 + 0.45 * efficiency)
    power_w = 700 - 60 * math.log1p(math.exp((700 - wanted_w) / 60))
    slowed = max(wanted_w - 700, 0.0) / 700
    step_s *= 1 + 0.5 * slowed
    own = shape.num_parameters / (plan.tp * plan.pp)
    share = {"none": 1, "zero1": dp, "zero3": dp}[plan.sharding]
    state = own * (6 / (dp if plan.sharding == "zero3" else 1) + 12 / share)
    kept = {"none": 1.0, "selective": 0.62, "full": 0.06}[plan.recompute]
    flight = min(micro_batches, plan.pp) * (1 + 0.2 * (plan.vpp - 1))
    layers = shape.num_layers / plan.pp
    memory = state + c["activation"] * tokens * shape.hidden_size * kept * layers * flight / plan.tp + 6e9
    temp_c = c["air"] + c["heat"] * power_w + 2.0 * busy
    return {
        "step_time_s": step_s,
        "tokens_per_s": work.tokens_per_step / step_s,
        "node_device_power_peak_1s_w": 8 * power_w * 1.02,
        "device_temp_max_c": temp_c,
        "memory_peak_bytes": memory,
        "memory_headroom_frac": 1 - memory / 141e9,
        "throttle_power_frac": min(max(slowed * 2.0, 0.0), 1.0),
    }


def row(spec: TrialSpec, repeat: int, dice: np.random.Generator, level: float, clock_s: float) -> dict[str, Any]:
    """One trial as a row: what it was, how it ended, its metrics and their estimates."""
    truth, estimate = metrics(spec, dict(TRUTH)), metrics(spec, dict(WRONG))
    own = np.random.default_rng(int(spec.trial_id, 16)).standard_normal(2)
    slower = level * math.exp(OWN_DEVIATION * own[0] + NOISE["time"] * dice.standard_normal())
    truth["step_time_s"] *= slower
    truth["tokens_per_s"] /= slower
    hotter = math.exp(0.015 * own[1] + NOISE["power"] * dice.standard_normal())
    truth["node_device_power_peak_1s_w"] *= hotter
    truth["device_temp_max_c"] *= hotter * math.exp(NOISE["temp"] * dice.standard_normal())
    fits = truth["memory_peak_bytes"] < 0.97 * 141e9
    build_s = 14.0 if repeat == 0 else 0.9
    lasts_s = build_s + (max(15 * truth["step_time_s"], 12.0) if fits else 6.0)
    return {
        "trial_id": spec.trial_id,
        "repeat": repeat,
        "status": "completed" if fits else "out_of_memory",
        "start_wall_ns": int(clock_s * 1e9),
        "end_wall_ns": int((clock_s + lasts_s) * 1e9),
        "spec": json.dumps(spec.to_json(), sort_keys=True),
        "tags": json.dumps({"build_time_s": f"{build_s:.3f}", "simulated": "true", "synthetic": "true"}),
        **{name: value if fits else None for name, value in truth.items()},
        **{ESTIMATES + name: value for name, value in estimate.items() if name != "throttle_power_frac"},
    }


def table(name: str, num_layers: int, batch: int, chosen: list[Plan], repeats: int, level: float) -> pa.Table:
    """Measures plans of one model, in a table."""
    dice = np.random.default_rng([SEED, num_layers])
    work = Workload(seq_len=4096, global_batch_size=batch)
    shape = replace(model(name), num_layers=num_layers)
    rows: list[dict[str, Any]] = []
    for plan in chosen:
        spec = TrialSpec(model=shape, cluster=CLUSTER, engine="torch", workload=work, plan=plan)
        for repeat in range(repeats):
            clock_s = rows[-1]["end_wall_ns"] / 1e9 + 1 if rows else 1_790_000_000.0
            rows.append(row(spec, repeat, dice, level, clock_s))
    return pa.Table.from_pylist(rows)


def main() -> None:
    """Writes both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/data"))
    folder = parser.parse_args().out
    chosen = plans()
    for name, one in (
        ("synthetic_600", table("llama3_8b", 32, 128, chosen, NUM_REPEATS, 1.0)),
        ("synthetic_earlier", table("llama3_8b", 24, 64, chosen[::15], 1, 1.07)),
    ):
        path = folder / f"{name}.parquet"
        pq.write_table(one, path, compression="zstd", use_dictionary=True)
        print(f"{path}: {one.num_rows} rows")


if __name__ == "__main__":
    main()

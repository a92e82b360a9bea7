"""Small runs read as large ones: a whole model against the slice that `wattune scale` writes, and published proxies.

    python benchmarks/scale_down.py --keep DIR                       whole and slice on two GPUs, beside a naive cut
    python benchmarks/scale_down.py --keep DIR --device cpu          the same of a tiny model, no GPU
    python benchmarks/scale_down.py --keep DIR --cases none          the tables of an earlier call again
    python benchmarks/scale_down.py --keep DIR --cases none --ratios FILE.csv   with whole plans of another call

The same plans of a model of 3 billion parameters (28 layers) are measured three times, each a study of its own by
`wattune run`: `whole`; `slice`, the space that `wattune scale` writes for the same two devices; `naive`, 8 layers with
everything else as it is. `wattune rank --json` gives the figures: those of `slice` are read as the whole model's by the
product, those of `naive` by the ratio of layers. Each study's ranking is kept as `CASE.json` as soon as it is done, and
`scale_down.csv` has what is read over what the whole model measured, plan by plan, and the figures. Where a plan was
measured small alone, `--ratios` takes the whole model's from what another call's slice was of it.

The published proxies of Llama 405B are predicted alone: the ratio of their MFU to the full model's. No coefficient is
fitted to those rows.
"""

import csv
import itertools
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from harness import Found, Rows, benchmark
from published_steps import MODELS_PUBLISHED, TABLE

from wattune.catalog.hardware import ClusterSpec
from wattune.cost.defaults import coefficients_of_software
from wattune.cost.estimate import estimate
from wattune.plans.axes import Plan
from wattune.scale_down.invariants import compare
from wattune.trial import TrialSpec
from wattune.workload import Workload

CASES = ("whole", "slice", "naive")
STOP_S = 60.0  # longest a study may take to end when it is stopped
LAYERS, NAIVE = 28, 8
MODEL = {"name": "llama3_8b", "hidden_size": 3072, "num_heads": 24, "num_kv_heads": 8, "ffn_hidden_size": 8192}
TINY = {"name": "llama3_8b", "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 128}
PEAK, STEP, SPEED = "node_device_power_peak_1s_w", "step_time_s", "tokens_per_s"
LEAST_TAU, MOST_REGRET, MOST_PEAK, MOST_STEP, MOST_POINTS = 0.95, 0.02, 0.03, 0.05, 0.02
LEAST_PLANS = 16
AXES = ("tp", "pp", "micro_batch_size", "sharding", "recompute")
PLANS = (
    (2, 1, 2, "zero1", "none"),
    (1, 1, 4, "zero1", "none"),
    (1, 1, 4, "zero1", "full"),
    (1, 2, 4, "zero1", "none"),
    (2, 1, 2, "zero1", "full"),
    (1, 1, 2, "zero1", "none"),
    (1, 2, 2, "zero1", "none"),
    (1, 1, 4, "zero3", "full"),
    (1, 1, 4, "zero3", "none"),
    (1, 1, 1, "zero1", "none"),
    (1, 2, 4, "zero1", "full"),
    (2, 1, 4, "zero1", "none"),
    (1, 2, 1, "zero1", "none"),
    (2, 1, 4, "zero1", "full"),
    (2, 1, 1, "zero1", "none"),
    (1, 1, 2, "zero3", "none"),
    (1, 1, 1, "zero3", "none"),
)  # first those that earlier calls lack, the worst peak, and the neighbours of both in speed: a call may be cut


def space(case: str, given: Namespace) -> dict[str, Any]:
    """The document of a study."""
    is_cpu = given.device == "cpu"
    layers = NAIVE if case == "naive" else LAYERS
    return {
        "study": case,
        "model": {**(TINY if is_cpu else MODEL), "num_layers": layers} | ({"vocab_size": 4096} if is_cpu else {}),
        "cluster": {"device": given.device, "num_nodes": 1, "devices_per_node": 2}
        | ({"simulate_sensors_of": "h200_sxm"} if is_cpu else {}),
        "engine": "torch",
        "workload": {"mode": "pretrain", "seq_len": 32 if is_cpu else 4096, "global_batch_size": 8},
        "plans": [
            dict(zip(AXES, (tp, pp, each, sharding, recompute), strict=True)) | {"overlap": "grad_param"}
            for tp, pp, each, sharding, recompute in PLANS
        ],
        "requires": given.requires,
        "measure": {
            "warmup_steps": 3, "min_steps": 4, "min_seconds": given.window_s, "profile_steps": 0,
            "reference_every": 0, "timeout_s": 150, "stall_s": 60,
        },
        "objective": f"maximize {SPEED}",
        "search": {"strategy": "grid", "order": "listed"},
    }  # fmt: skip


def wattune(*arguments: object, folder: Path) -> list[str]:
    """The command line of the product."""
    return [sys.executable, "-m", "wattune", *map(str, arguments), "--storage", str(folder / "storage")]


def measure(case: str, given: Namespace, most_s: float) -> None:
    """Runs a study within a time and keeps its ranking."""
    folder = given.keep
    (folder / "storage").mkdir(parents=True, exist_ok=True)
    path = folder / f"{case}.yaml"
    path.write_text(yaml.safe_dump(space("whole" if case == "slice" else case, given), sort_keys=False))
    name = case
    if case == "slice":
        small = folder / "small.yaml"
        small.unlink(missing_ok=True)
        command = [sys.executable, "-m", "wattune", "scale", path, "--to", "1x2", "--out", small]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, file=sys.stderr)
        path, name = small, str(yaml.safe_load(small.read_text())["study"])
    with (folder / f"{case}.txt").open("w") as output:
        command = wattune("run", path, "--max-hours", most_s / 3600, folder=folder)
        running = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            running.wait(most_s + STOP_S / 6)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)
            running.wait(STOP_S)
    command = wattune("rank", name, "--json", folder=folder)
    ranked = subprocess.run(command, check=False, capture_output=True, text=True)
    (folder / f"{case}.json").write_text(ranked.stdout)


def figures(path: Path) -> dict[str, dict[str, Any]]:
    """Metrics of each plan of a ranking, with the interval of its objective."""
    found = json.loads(path.read_text())
    if "error" in found:  # its study measured nothing, so that plans are missing, which misses a bar
        print(f"{path.stem}: {found['error']['what']}", file=sys.stderr)
        return {}
    rows = [row for name in ("feasible", "undecided", "infeasible") for row in found[name] if row["objective"]]
    return {row["label"].removesuffix(" scaled"): row["repeats"][0]["metrics"] | row["objective"] for row in rows}


def implied(small: dict[str, dict[str, Any]], path: Path) -> dict[str, dict[str, Any]]:
    """Returns what the whole model measures of each plan, if a slice is of it what the slice of another call was."""
    with path.open(newline="") as file:
        told = {row["plan"]: row for row in csv.DictReader(file) if row["case"] == "slice"}
    by = {STEP: "step_ratio", PEAK: "peak_ratio"}
    found = {
        plan: row | {name: row[name] / float(told[plan][by[name]]) for name in by}
        for plan, row in small.items()
        if plan in told
    }
    return {plan: row | {SPEED: small[plan][SPEED] * small[plan][STEP] / row[STEP]} for plan, row in found.items()}


def tau(a: list[float], b: list[float]) -> float:
    """Kendall's rank correlation of two lists without ties."""
    pairs = list(itertools.combinations(range(len(a)), 2))
    signs = [math.copysign(1, (a[i] - a[j]) * (b[i] - b[j])) for i, j in pairs]
    return sum(signs) / len(pairs)


def compared(case: str, whole: dict[str, Any], small: dict[str, Any], rows: Rows, raw: Rows) -> list[str]:
    """Adds the row of a case against the whole model; returns in what it misses the bars."""
    scale = LAYERS / NAIVE if case == "naive" else 1.0
    plans = sorted(whole.keys() & small.keys())
    speeds = [[each[plan][SPEED] for plan in plans] for each in (whole, small)]
    best = max(plans, key=lambda plan: small[plan][SPEED])
    regret = 1 - whole[best][SPEED] / max(speeds[0])
    off = {
        name: [small[plan][name] * (scale if name == STEP else 1) / whole[plan][name] - 1 for plan in plans]
        for name in (STEP, PEAK)
    }
    inside = [small[plan]["low"] <= whole[plan][SPEED] <= small[plan]["high"] for plan in plans]
    order = tau(*speeds)
    rows.add(
        case, len(plans), order, regret,
        *(value for one in off.values() for value in (statistics.median(map(abs, one)), max(map(abs, one)))),
        None if case == "naive" else sum(inside) / len(inside),
    )  # fmt: skip
    for plan, step, peak in zip(plans, off[STEP], off[PEAK], strict=True):
        measured = [one[plan][name] for one in (whole, small) for name in (STEP, PEAK)]
        raw.add(case, plan, 1 + step, 1 + peak, None, None, None, *measured)
    if case == "naive":
        return []
    wrong = [] if len(plans) >= LEAST_PLANS else [f"{len(plans)} plans in both"]
    wrong += [] if order >= LEAST_TAU else [f"tau {order:.3f}"]
    wrong += [] if regret <= MOST_REGRET else [f"regret {regret:.1%}"]
    wrong += [f"{STEP} {max(map(abs, off[STEP])):.1%}"] if max(map(abs, off[STEP])) > MOST_STEP else []
    wrong += [f"{PEAK} {max(map(abs, off[PEAK])):.1%}"] if max(map(abs, off[PEAK])) > MOST_PEAK else []
    return wrong


def proxy(row: dict[str, Any]) -> TrialSpec:
    """The trial of a published row. NeMo counts embedding and loss as a layer each where it divides the pipeline."""
    layers, gpus, cp, tp, pp, vpp = (int(row[name] or 1) for name in ("num_layers", "gpus", "cp", "tp", "pp", "vpp"))
    each = (layers + 2) // (pp * vpp)
    plan = Plan(
        tp=tp, pp=pp, cp=cp, etp=tp, vpp=vpp, sharding="zero1", overlap="tp", dtype=row["precision"].lower(),
        layout=(each - 1, *[each] * (pp * vpp - 2), each - 1) if pp > 1 else (),
    )  # fmt: skip
    return TrialSpec(
        model=replace(MODELS_PUBLISHED["llama3.1-405b"], num_layers=layers),
        cluster=ClusterSpec(device="h100_sxm", num_nodes=gpus // 8, devices_per_node=8, transformer_engine=True),
        engine="megatron",
        workload=Workload(seq_len=8192, global_batch_size=int(row["global_batch"])),
        plan=plan,
    )


def proxies(rows: Rows, raw: Rows) -> list[str]:
    """Adds a row for each published proxy; returns those further off than the bar."""
    find, wrong = partial(coefficients_of_software, software="nemo"), []
    published = [
        row
        for row in pq.read_table(TABLE).to_pylist()
        if "405B" in row["model"] and row["gpu"] == "H100-SXM-80GB" and "v25.04.01" in row["source"]
    ]
    whole = {row["precision"]: row for row in published if row["num_layers"] == 126}
    full = {precision: proxy(row) for precision, row in whole.items()}
    for row in published:
        small = replace(proxy(row), stands_for=full[row["precision"]])
        mfu = estimate([small, full[row["precision"]]], find).columns["mfu_frac"].value
        (one,) = compare([small], find)
        predicted, told = float(mfu[0] / mfu[1]), row["mfu"] / whole[row["precision"]]["mfu"]
        name = f"{row['precision']}, {row['num_layers']:.0f} layers"
        rows.add(name, told, predicted, predicted - told, one.percent / 100)
        raw.add("proxy", name, None, None, told, predicted, one.percent / 100, *[None] * 4)
        wrong += [f"{name}: {predicted - told:+.3f}"] if abs(predicted - told) > MOST_POINTS else []
    return wrong


def _device() -> str:
    """The catalog's name of this machine's devices; `cpu` without any."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "cpu"
    return "h200_sxm" if "H200" in listed else "h100_sxm"


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--keep", type=Path, default=Path("scale_down"), help="folder of spaces, studies and rankings")
    parser.add_argument("--cases", default=",".join(CASES), help="studies to run now, or none")
    parser.add_argument("--device", default="", help="a device of the catalog, or cpu; else what is here")
    parser.add_argument("--window-s", type=float, default=2.0, help="least seconds of measured steps")
    parser.add_argument("--most-s", type=float, default=520.0, help="seconds for all studies together")
    parser.add_argument("--requires", action="append", default=[], help="condition on plans; may be repeated")
    parser.add_argument("--ratios", type=Path, help="scale_down.csv of another call")
    parser.add_argument("--also", type=Path, action="append", default=[], help="folder of another call; repeatable")


@benchmark(
    claim="A slice that `wattune scale` writes stands for the whole model: its results, read as the whole model's, are "
    "those that the whole model measures.",
    bar=f"two H100 or H200, {LEAST_PLANS} plans or more: Kendall tau {LEAST_TAU}, regret of the slice's best "
    f"{MOST_REGRET:.0%}, each step within {MOST_STEP:.0%} and each node peak within {MOST_PEAK:.0%}; published "
    f"proxies of Llama 405B: ratio of MFU within {100 * MOST_POINTS:g} points",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Runs the studies one after another, and compares what they kept."""
    given.device = given.device or _device()
    rows = Rows(
        "case", "num_plans", "kendall_tau_ratio", "regret_frac", "step_median_off_frac", "step_most_off_frac",
        "peak_median_off_frac", "peak_most_off_frac", "inside_frac",
    )  # fmt: skip
    end_s, cases = time.monotonic() + given.most_s, [one for one in given.cases.split(",") if one in CASES]
    for number, case in enumerate(cases):
        left_s = end_s - time.monotonic()
        share = {"whole": 1.4, "slice": 1.0, "naive": 1.0}
        part = share[case] / sum(share[one] for one in cases[number:])
        if left_s > STOP_S:
            measure(case, given, left_s * part if number < len(cases) - 1 else left_s)
    raw = Rows(
        "case",
        "plan",
        "step_ratio",
        "peak_ratio",
        "published_ratio",
        "predicted_ratio",
        "distance_frac",
        "whole_step_s",
        "whole_peak_w",
        "read_step_s",
        "read_peak_w",
    )  # what is read over what the whole model measured
    calls = [
        {case: figures(path) if (path := folder / f"{case}.json").exists() else {} for case in CASES}
        for folder in (given.keep, *given.also)
    ]
    wrong: list[str] = []
    for case in CASES[1:]:
        whole, small = ({plan: row for call in calls for plan, row in call[name].items()} for name in ("whole", case))
        for call in calls:  # both runs of one call, where one has both
            both = call["whole"].keys() & call[case].keys()
            whole |= {plan: call["whole"][plan] for plan in both}
            small |= {plan: call[case][plan] for plan in both}
        if case == "slice" and given.ratios:
            whole = implied(small, given.ratios) | whole
        if len(whole.keys() & small.keys()) > 1:
            wrong += compared(case, whole, small, rows, raw)
    published = Rows("proxy", "published_ratio", "predicted_ratio", "off_ratio", "distance_frac")
    wrong = ([] if given.device == "cpu" else wrong) + proxies(published, raw)
    given.keep.mkdir(parents=True, exist_ok=True)
    raw.write(given.keep / "scale_down.csv")
    return Found(rows, ["", published.markdown()], wrong)


if __name__ == "__main__":
    main()

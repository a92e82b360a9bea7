"""Figures of a whole node: errors of estimates made before, regret of the guided search, verdicts, slots, layouts.

    python benchmarks/whole_node_rows.py --csv benchmarks/results/whole_node.csv
    python benchmarks/whole_node_rows.py --studies DIR      # of folders that calls left: the table by slot anew

Of each node it reads `benchmarks/data/nodes/NODE`: a table of each part, what was estimated before anything ran, what
`place` said before its move ran, and what each device did. Regret is that of the first proposals of each model, against
the best of all that was measured, at three bounds on the node's power. The search had one of its own, so where all
plans of a model were measured it is replayed under each of the three. A verdict on the node is computed by the rule of
`wattune experiments`, from arms of all its devices; that before is the one of two devices.
"""

import itertools
import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import Found, Rows, benchmark
from search_regret import ESTIMATES, LOG_STD, Case, curve, read_table, replay

from wattune.analysis.run_data import RunData
from wattune.api.experiments import find_experiments, judged, measured_effects, results_of
from wattune.fidelity import FIRST_REFERENCE_REPEAT
from wattune.intervals import NORMAL_95
from wattune.metrics import METRICS
from wattune.objective import Question
from wattune.ranking.difference import Counted, difference
from wattune.ranking.spreads import Spreads
from wattune.run import Numbers, Run, RunStatus
from wattune.search.strategy import STRATEGIES
from wattune.storage.study import StudyFolder
from wattune.trial import TrialSpec
from wattune.view.effects import effect_text

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks" / "data" / "nodes"
POWER = "node_device_power_peak_1s_w"
GUIDED = 8
"""Most proposals of the guided search, of each model, before all others followed; at most half of its plans."""

ESTIMATED = ("tokens_per_s", POWER, "device_power_mean_w", "energy_per_token_j", "memory_peak_bytes")
SEEDS = 20
BOUNDS = (0.25, 0.5, 0.75)
"""Bounds on the node's power, as quantiles of the dense plans that were measured."""

NODES = ("h200x8", "h200x4")
ARMS = {
    "slots": {
        "parallelism": ("tp", "pipe"),
        "traffic": ("tp", "pipe"),
        "swing": ("tp4", "pipe"),
        "micro_batch": ("tp", "tp4"),
        "overlap": ("apart", "overlap"),
    },
    "heat": {"overlap_heat": ("apart", "overlap"), "micro_batch_heat": ("tp", "tp4")},
}
"""Arms of all devices, by the part and by the experiment whose claims they are judged by."""


ENDS = ("effect_log_ratio", "low_log_ratio", "high_log_ratio")
FIGURES = (
    "error_median_frac", "error_bias_frac", "error_most_frac", "inside_frac", "pairs_right_frac",
    "bound_w", "regret_frac", "regret_most_frac", "left_gain_frac", "estimated_log_ratio", *ENDS,
    "power_mean_w", "warmer_k", "power_throttle_frac", "thermal_throttle_frac", "node_swing_std_w", "node_power_max_w",
)  # fmt: skip


def guided(num_plans: int) -> int:
    """Returns how many of a model's plans the guided search proposed before all others followed."""
    return min(GUIDED, num_plans // 2)


def add(rows: Rows, node: str, case: str, model: str, metric: str, num: int, **figures: float | None) -> None:
    """Adds a row of some figures."""
    rows.add(node, case, model, metric, num, *(figures.get(name) for name in FIGURES))


def read(node: str, part: str) -> list[tuple[TrialSpec, Run]]:
    """The completed runs of a table, in the order they ran; none where the node has no such table."""
    found, path = [], DATA / node / f"{part}.parquet"
    table = pq.read_table(path).to_pylist() if path.exists() else []
    for row in sorted(table, key=lambda row: row["start_wall_ns"]):
        if row["status"] == RunStatus.COMPLETED:
            metrics = {metric: row[metric] for metric in METRICS if row.get(metric) is not None}
            times = {key: row[key] for key in ("trial_id", "repeat", "start_wall_ns", "end_wall_ns")}
            run = Run(
                status=RunStatus.COMPLETED, metrics=metrics, numbers=Numbers(**json.loads(row["numbers"])), **times
            )
            found.append((TrialSpec.from_json(json.loads(row["spec"])), run))
    return found


def estimated(node: str, part: str) -> dict[str, dict[str, Any]]:
    """Reads what was estimated of each plan before anything ran, by trial."""
    table = pq.read_table(DATA / node / f"{part}_estimates.parquet")
    return {one["trial_id"]: one for one in table.to_pylist()}


def errors(rows: Rows, node: str) -> None:
    """Adds the error of the estimates made before, by model and metric."""
    for part in ("sweep", "slots"):
        estimates = estimated(node, part)
        first = {run.trial_id: (spec, run) for spec, run in reversed(read(node, part))}
        for model, metric in itertools.product(dict.fromkeys(s.model.name for s, _ in first.values()), ESTIMATED):
            of = [(run.metrics[metric], estimates[key]) for key, (s, run) in first.items() if s.model.name == model]
            got = np.array([value for value, _ in of])
            said, low, high = (
                np.array([one[f"estimate.{metric}{end}"] for _, one in of]) for end in ("", ".low", ".high")
            )
            away = np.log(said / got)
            pairs = [(a - b) * (c - d) > 0 for (a, c), (b, d) in itertools.combinations(zip(got, said, strict=True), 2)]
            inside = ((low <= got) & (got <= high)).mean()
            middle, bias, most = (
                math.expm1(float(one)) for one in (np.median(abs(away)), np.median(away), abs(away).max())
            )
            told = {"error_median_frac": middle, "error_bias_frac": bias, "error_most_frac": most}
            shares = {"inside_frac": float(inside), "pairs_right_frac": float(np.mean(pairs))}
            add(rows, node, "estimate", model, metric, len(of), **told, **shares)


def regret(rows: Rows, node: str) -> None:
    """Adds the regret of what was known after the guided search's first proposals, at three bounds.

    Of plans that no run was left for it adds what the best of them is estimated to gain within the bound.
    """
    runs, estimates = read(node, "sweep"), estimated(node, "sweep")
    dense = [run.metrics[POWER] for spec, run in runs if not spec.model.num_experts]
    for model in dict.fromkeys(spec.model.name for spec, _ in runs):
        mine = [run for spec, run in runs if spec.model.name == model]
        known = {run.trial_id: run.metrics for run in reversed(mine)}
        proposed = list(dict.fromkeys(run.trial_id for run in mine if run.repeat < FIRST_REFERENCE_REPEAT))
        most = guided(sum(one["model"] == model for one in estimates.values()))
        last = next(run.start_wall_ns for run in mine if run.trial_id == proposed[:most][-1])
        tried = {run.trial_id for run in mine if run.start_wall_ns <= last}
        left = [one for key, one in estimates.items() if key not in known and one["model"] == model]
        for share in BOUNDS:
            bound = float(np.quantile(dense, share))
            kept = {key: one["tokens_per_s"] for key, one in known.items() if one[POWER] <= bound}
            best, found = max(kept.values()), max((kept[key] for key in tried if key in kept), default=math.nan)
            promised = [one["estimate.tokens_per_s"] for one in left if one[f"estimate.{POWER}"] <= bound]
            more = max(promised, default=math.nan) / best - 1
            told = {"bound_w": bound, "regret_frac": 1 - found / best, "left_gain_frac": more}
            add(rows, node, "regret", model, "tokens_per_s", len(known), **told)


def replayed(rows: Rows, node: str) -> None:
    """Adds the regret of a guided search after its first proposals, and of one at random, from 20 orders of candidates.

    It has the mean and the most, under each bound. Only models count whose plans were all measured.
    """
    estimates, table = estimated(node, "sweep"), read_table(DATA / node / "sweep.parquet")
    dense = [one.metrics[POWER] for one in table if not one.spec.model.num_experts]
    for model in dict.fromkeys(one.spec.model.name for one in table):
        own = [one for one in table if one.spec.model.name == model]
        mine = tuple(replace(one, estimate=as_prior(estimates[one.spec.trial_id])) for one in own)
        if len(mine) < sum(one["model"] == model for one in estimates.values()):
            continue
        for share in BOUNDS:
            bound, most = float(np.quantile(dense, share)), guided(len(mine))
            question = Question.of("maximize tokens_per_s", f"{POWER} <= {bound}")
            case = Case(name=model, trials=mine, question=question)
            best = max(map(case.value, mine))
            for name in ("model_guided", "random"):
                runs = [replay(STRATEGIES[name], case, seed, most) for seed in range(SEEDS)]
                left = [min(curve(case, run, best, most)[-1], 1.0) for run in runs]  # 1: it found nothing that holds
                told = {"bound_w": bound, "regret_frac": float(np.mean(left)), "regret_most_frac": max(left)}
                add(rows, node, f"replayed {name}, {most} of {len(mine)}", model, "tokens_per_s", SEEDS, **told)


def as_prior(said: dict[str, Any]) -> dict[str, float]:
    """Returns what was estimated of a plan, as `search_regret.py` takes it."""
    found = {}
    for key in [one for one in said if one.startswith("estimate.") and f"{one}.low" in said]:
        name = ESTIMATES + key.removeprefix("estimate.")
        found[name] = said[key]
        if said[f"{key}.low"] > 0.0:
            found[name + LOG_STD] = math.log(said[f"{key}.high"] / said[f"{key}.low"]) / (2 * NORMAL_95)
    return found


def arm_of(spec: TrialSpec) -> str:
    """Names the arm that a plan of the study of slots belongs to; a turned pipeline does the work of the even one."""
    plan = spec.plan
    if plan.pp > 1:
        return "moved" if plan.layout else "pipe"
    if plan.tp > 1:
        return "tp" if plan.micro_batch_size == 1 else "tp4"
    return "apart" if plan.overlap == "none" else "overlap"


def verdicts(rows: Rows, node: str) -> Iterator[str]:
    """Adds the claims of experiments with arms of the whole node; yields them beside those of two devices."""
    folder = ROOT / "experiments"
    known, before = find_experiments(folder), results_of(folder)
    for part, experiments in ARMS.items():
        runs = read(node, part)
        spreads = Spreads(runs) if runs else None
        for name, arms in experiments.items() if spreads else ():
            sides = [Counted([run for spec, run in runs if arm_of(spec) == arm], spreads) for arm in arms]
            effects = measured_effects(*sides)
            two = {one["metric"]: one["verdict"] for one in before.get(name, {}).get("claims", ())}
            for metric, expected in known[name]["CLAIMS"].items():
                effect = effects.get(metric, {"effect": None, "low": None, "high": None, "repeats": 0})
                told = {"metric": metric, "expected": expected} | effect | judged(expected, effect)
                on_two = two.get(metric, "not run")
                yield f"{node}: {name} {effect_text(told)}, expected {expected}; two devices: {on_two}"
                num = sum(len(one.runs) for one in sides)
                shown = dict(zip(ENDS, (effect["effect"], effect["low"], effect["high"]), strict=True))
                add(rows, node, f"verdict {name}: {told['verdict']}", "llama3_8b", metric, num, **shown)


def layouts(rows: Rows, node: str) -> None:
    """Adds the gain of each layout over the even pipeline in every turn, beside the estimate made before."""
    runs, estimates = read(node, "slots"), estimated(node, "slots")
    even = [(run.metrics["step_time_s"], run.trial_id) for spec, run in runs if arm_of(spec) == "pipe"]
    base = np.log([time_s for time_s, _ in even])
    said_s = estimates[even[0][1]]["estimate.step_time_s"]
    for label in dict.fromkeys(spec.label for spec, _ in runs if arm_of(spec) == "moved"):
        moved = [run for spec, run in runs if spec.label == label]
        gain = float(base.mean() - np.mean(np.log([run.metrics["step_time_s"] for run in moved])))
        reach = 1.96 * float(base.std(ddof=1)) * math.sqrt(1 / len(base) + 1 / len(moved))
        said = math.log(said_s / estimates[moved[0].trial_id]["estimate.step_time_s"])
        told = dict(zip(ENDS, (gain, gain - reach, gain + reach), strict=True)) | {"estimated_log_ratio": said}
        add(rows, node, f"layout {label}", "llama3_8b", "steps_per_s", len(base) + len(moved), **told)


def placements(rows: Rows, node: str) -> None:
    """Adds what `place` said of a pipeline before its move was measured in turn, and what that gave."""
    runs, path = read(node, "place"), DATA / node / "place_said.parquet"
    for one in pq.read_table(path).to_pylist() if runs else ():
        present, moved = ([run for spec, run in runs if spec.trial_id == one[key]] for key in ("present", "moved"))
        found = difference("step_time_s", *(Counted(side, Spreads(runs)) for side in (present, moved)))
        assert found is not None
        ends = [-math.log1p(each) for each in (found.change_frac, found.high_frac, found.low_frac)]
        told = dict(zip(ENDS, ends, strict=True)) | {"estimated_log_ratio": math.log1p(one["gain_frac"])}
        case = f"placed {one['label']}, at {one['from']}"
        add(rows, node, case, "llama3_8b", "steps_per_s", len(present) + len(moved), **told)


def slots(rows: Rows, node: str) -> None:
    """Adds means over all runs by slot, and by arm what the node's power did at 20 ms."""
    table = pq.read_table(DATA / node / "by_slot.parquet").to_pylist()
    warm = float(np.mean([row["temp_max_c"] for row in table]))
    for slot in sorted({row["slot"] for row in table}):
        mine = [row for row in table if row["slot"] == slot]
        names = ("power_mean_w", "temp_max_c", "power_throttle_frac", "thermal_throttle_frac")
        told = {name: float(np.mean([row[name] for row in mine])) for name in names}
        add(rows, node, f"slot {slot}", "llama3_8b", "all arms", len(mine), **told, warmer_k=told["temp_max_c"] - warm)
    for arm in dict.fromkeys(row["arm"] for row in table):
        mine = [row for row in table if row["arm"] == arm and row["slot"] == 0]
        told = {name: float(np.mean([row[name] for row in mine])) for name in ("node_swing_std_w", "node_power_max_w")}
        add(rows, node, f"swing {arm}", "llama3_8b", "node at 20 ms", len(mine), **told)


def by_slot(study: Path) -> Iterator[dict[str, Any]]:
    """Yields what each device of each run did in the measured window; the node's swing is of 20 ms samples."""
    folder = StudyFolder(study)
    for spec, run in folder.results():
        found = RunData.of(folder.trial(run.trial_id, run.repeat).path).examined
        if run.status is not RunStatus.COMPLETED or found is None:
            continue
        aligned, end_s = found.aligned, found.aligned.duration_s
        grid_s = np.arange(0.0, end_s, 0.02)
        power = {
            key: np.interp(grid_s, *one.inside("power_w", -1.0, end_s + 1.0)) for key, one in aligned.readings("ring")
        }
        node_w = sum(power.values()) if power else np.full(len(grid_s), np.nan)
        slow, fast = dict(aligned.readings("slow")), dict(aligned.readings("fast"))
        for device in aligned.devices:
            counters = [
                slow[device].inside(f"throttle_{cause}_ns", -1.5, end_s + 1.5) for cause in ("power", "thermal")
            ]
            shares = [(ns[-1] - ns[0]) / (at_s[-1] - at_s[0]) / 1e9 if len(at_s) > 1 else None for at_s, ns in counters]
            yield {
                "trial_id": run.trial_id, "repeat": run.repeat, "label": spec.label, "arm": arm_of(spec),
                "slot": aligned.known[device]["slot"], "uuid": aligned.known[device]["uuid"],
                "power_mean_w": float(power[device].mean()) if power else None,
                "temp_max_c": float(fast[device].inside("gpu_temp_c", 0.0, end_s)[1].max()),
                "sm_clock_mean_mhz": float(fast[device].inside("sm_clock_mhz", 0.0, end_s)[1].mean()),
                "power_throttle_frac": shares[0], "thermal_throttle_frac": shares[1],
                "window_s": end_s, "node_swing_std_w": float(np.std(node_w)), "node_power_max_w": float(np.max(node_w)),
            }  # fmt: skip


def by_second(study: Path) -> pa.Table:
    """Means of each device over each second of a study, pauses left out, and what its power limit has taken so far."""
    import duckdb  # only new recordings need it

    files = {tier: str(study / f"trials/*/telemetry/*/{tier}.parquet") for tier in ("fast", "slow")}
    began_ns = f"(SELECT min(wall_ns) FROM '{files['fast']}')"
    return duckdb.sql(f"""
        SELECT f.second, f.device, power_w, gpu_temp_c, sm_clock_mhz, throttle_power_ns, throttle_thermal_ns
        FROM (SELECT (wall_ns - {began_ns}) // 1000000000 AS second, device, avg(power_instant_w) AS power_w,
                     avg(gpu_temp_c) AS gpu_temp_c, avg(sm_clock_mhz) AS sm_clock_mhz
              FROM '{files["fast"]}' GROUP BY ALL) f
        LEFT JOIN (SELECT (wall_ns - {began_ns}) // 1000000000 AS second, device,
                          max(throttle_power_ns) AS throttle_power_ns, max(throttle_thermal_ns) AS throttle_thermal_ns
                   FROM '{files["slow"]}' GROUP BY ALL) s USING (second, device)
        ORDER BY device, second""").to_arrow_table()


def options(parser: ArgumentParser) -> None:
    """Adds the script's own."""
    parser.add_argument("--studies", type=Path, help="folder with node_slots and node_heat, as a call left it")
    parser.add_argument("--node", choices=NODES, default=NODES[-1], help="the node that ran those studies")


@benchmark(
    claim="Estimates made before order and size the plans of a whole node, and a guided search finds the best early.",
    bar="median error of tokens/s <= 10 %, regret <= 2 % at three bounds",
    options=options,
)
def main(given: Namespace) -> Found:
    """Computes all rows."""
    if given.studies:
        table = pa.Table.from_pylist(
            [row | {"part": part} for part in ARMS for row in by_slot(given.studies / f"node_{part}")]
        )
        pq.write_table(table, DATA / given.node / "by_slot.parquet", compression="zstd")
        seconds = by_second(given.studies / "node_heat")
        pq.write_table(seconds, DATA / given.node / "by_second.parquet", compression="zstd")
    rows, notes = Rows("node", "case", "model", "metric", "num_runs", *FIGURES), list[str]()
    for node in NODES:
        errors(rows, node)
        regret(rows, node)
        replayed(rows, node)
        notes += verdicts(rows, node)
        layouts(rows, node)
        placements(rows, node)
        slots(rows, node)
    return Found(rows, notes, missed(rows.objects()))


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Says where a bar is missed."""
    wrong = [r for r in rows if r["metric"] == "tokens_per_s" and (r["error_median_frac"] or 0) > 0.1]
    # The search ran under one bound; under others it is judged by replays, where all was measured.
    replays = [one for one in rows if one["case"].startswith("replayed model_guided")]
    told = {one["node"] for one in replays}
    judged_by = replays + [one for one in rows if one["case"] == "regret" and one["node"] not in told]
    wrong += [one for one in judged_by if not one["regret_frac"] <= 0.02]
    return [f"{one['node']}: {one['case']} of {one['model']}" for one in wrong]


if __name__ == "__main__":
    main()

"""Measures the cost of a trial beside its steps, on warm workers and in a fresh Ray Train run for each trial.

    python benchmarks/trial_overhead.py [--device cpu] [--ranks 2] [--warm 10] [--fresh 3]
    python benchmarks/trial_overhead.py --command plain_loop hf_trainer [--device h200_sxm --ranks 2] [--turns 3]

A trial's overhead is the time that it keeps its nodes (specification written, sampler started, workers found, process
group made, memory given back) without its steps, warm-up included, and without the engine's build. With the result,
which is made while the next trial runs (sampler stopped, tables written, analysis), it is printed beside. Fresh and
warm trials are of the same small model. `--command` runs programs of experiments/own_code under torchrun instead, cold
and warm in turns, and tells the time to their first step, that of their imports, and the step itself.
The script prints the rows of benchmarks/results/trial_overhead.md.
"""

import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
from harness import Found, Rows, benchmark
from ray.exceptions import RayActorError

from wattune.catalog.hardware import ClusterSpec, device
from wattune.catalog.models import ModelSpec
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Cluster, connect
from wattune.orchestrate.failures import Cause, Failure
from wattune.orchestrate.lanes.actor import DONE_METRIC
from wattune.orchestrate.lanes.client import Lanes
from wattune.orchestrate.lanes.ray_errors import KEEPER_ENDED, KEEPER_REMEDY, ray_words
from wattune.orchestrate.run_trial import conclude, drive
from wattune.plans.axes import Plan
from wattune.run import Run, RunStatus
from wattune.search.prune import prune
from wattune.search.space import parse_space
from wattune.storage.study import TrialFolder
from wattune.trial import Measure, TrialSpec
from wattune.workload import Workload

WARM_BELOW_S = {"cpu": 0.5}
GPU_WARM_BELOW_S = 2.0
RATIO_AT_LEAST = 8.0


MODEL = ModelSpec(
    name="small", num_layers=2, hidden_size=256, ffn_hidden_size=512, num_heads=4, num_kv_heads=4, vocab_size=1024,
    source="made up: small enough that what is not a step is seen",
)  # fmt: skip


def run_trial(attempt: Attempt, cluster: Cluster, lanes: Lanes, free: Callable[[], None] = lambda: None) -> Run:
    """Runs one repeat of one trial on the first nodes that fit it; returns the result it left in the study folder.

    `free` is called where its nodes are free. Whatever fails becomes the trial's status.
    """
    folder = TrialFolder(attempt.folder)
    try:
        is_done = ray.get(lanes.drive(attempt, cluster))[DONE_METRIC]
        free()
        if not is_done:
            ray.get(lanes.concluded(attempt))
    except RayActorError as error:
        lost = Failure(Cause.HEAD, f"{KEEPER_ENDED} ({ray_words(error)}); {KEEPER_REMEDY}")
        now_ns, status = time.time_ns(), RunStatus.CRASHED
        result = Run(
            trial_id=attempt.trial_id, repeat=attempt.repeat, status=status, start_wall_ns=now_ns, end_wall_ns=now_ns
        )
        conclude(folder, lost.of(result))
    found = folder.result()
    assert found is not None, "whatever ends a trial leaves a result"
    return found


def specification(given: Namespace) -> TrialSpec:
    """The trial that is run again and again."""
    gpu = given.device != "cpu"
    cluster = ClusterSpec(
        device=given.device, devices_per_node=given.ranks, simulate_sensors_of=None if gpu else "h200_sxm"
    )
    workload, plan = Workload(seq_len=128, global_batch_size=4 * given.ranks), Plan(dtype="bf16" if gpu else "fp32")
    return TrialSpec(model=MODEL, cluster=cluster, engine="torch", workload=workload, plan=plan)


def one(root: Path, spec: TrialSpec, number: int, isolation: str, cluster: Cluster, lanes: Lanes) -> dict[str, Any]:
    """Runs one trial and takes its time apart."""
    folder = root / "study" / "trials" / f"{spec.trial_id}-{number}"
    measure = Measure(warmup_steps=4, min_steps=8, min_seconds=0.5, profile_steps=0)
    asked = Attempt(spec=spec, repeat=number, measure=measure, seed=0, folder=folder, isolation=isolation)
    begun_s, freed_s = time.monotonic(), []
    result = run_trial(asked, cluster, lanes, lambda: freed_s.append(time.monotonic()))
    wall_s = time.monotonic() - begun_s
    if result.status not in ("completed", "invalid"):  # too short for some sensors, which is no matter here
        raise SystemExit(f"trial {number} is {result.status}: {result.reason}")
    spans = pq.read_table(folder / "spans.parquet")
    steps = spans.filter(pc.equal(spans["phase"].cast("string"), "step"))
    steps = steps.filter(pc.equal(steps["rank"], 0))  # not from the first to the last: a trial may wait between steps
    steps_s = pc.sum(pc.subtract(steps["end_mono_ns"], steps["start_mono_ns"])).as_py() / 1e9
    build_s = result.numbers.build_time_s or 0.0
    return {
        "isolation": isolation,
        "wall_s": wall_s,
        "steps_s": steps_s,
        "build_s": build_s,
        "overhead_s": wall_s - steps_s - build_s,
        "held_s": (freed_s[0] - begun_s if freed_s else wall_s) - steps_s - build_s,
        "workers_s": result.numbers.group_start_s or 0.0,
    }


def compare(given: Namespace, root: Path) -> Found:
    """Fresh and warm trials in one cluster."""
    spec = specification(given)
    trials = []
    with connect() as cluster, Lanes(drive) as lanes:
        kinds = ["fresh"] * given.fresh + ["warm"] * (given.warm + 1)
        for number, isolation in enumerate(kinds):
            trials.append(one(root, spec, number, isolation, cluster, lanes))
            print(trials[-1], file=sys.stderr, flush=True)
    first = next(trial for trial in trials if trial["isolation"] == "warm")
    fresh = [trial for trial in trials if trial["isolation"] == "fresh"]
    warm = [trial for trial in trials if trial["isolation"] == "warm"][1:]  # the first starts the lane
    rows = Rows("what", "median_s", "least_s", "most_s", "num_trials")
    medians_s = {}
    for name, of, part in (
        ("fresh Ray Train run, overhead a trial", fresh, "overhead_s"),
        ("warm lane, overhead a trial", warm, "held_s"),
        ("the same, with its result, made beside the next trial", warm, "overhead_s"),
        ("build, fresh", fresh, "build_s"),
        ("build, warm", warm, "build_s"),
        ("first start of the lane", [first], "workers_s"),
    ):
        taken_s = [trial[part] for trial in of]
        medians_s[name] = statistics.median(taken_s)
        rows.add(name, medians_s[name], min(taken_s), max(taken_s), len(of))
    fresh_s, warm_s, *_ = medians_s.values()
    bound_s = WARM_BELOW_S.get(given.device, GPU_WARM_BELOW_S)
    missed = [f"warm {warm_s:.2f} s, bound {bound_s:g} s"] if warm_s >= bound_s else []
    missed += [f"ratio {fresh_s / warm_s:.1f}"] if fresh_s / warm_s < RATIO_AT_LEAST else []
    return Found(rows, [f"Fresh over warm: {fresh_s / warm_s:.1f}."], missed)


def compare_commands(given: Namespace, root: Path) -> Found:
    """Commands that start cold and warm in turns, on one lane."""
    rows, missed = Rows("what", "median_s", "least_s", "most_s", "num_trials"), []
    gpu = given.device != "cpu"
    cluster_text = {"device": given.device, "num_nodes": 1, "devices_per_node": given.ranks}
    measure = Measure(warmup_steps=4, min_steps=20, min_seconds=4.0, profile_steps=0)
    with connect() as cluster, Lanes(drive) as lanes:
        for program in given.command:
            runs: dict[str, list[Any]] = {"cold": [], "warm, notes its imports": [], "warm, makes them": [], "warm": []}
            turns = ["warm, notes its imports", "warm, makes them", *["cold", "warm"] * given.turns]
            for number, kind in enumerate(turns):
                script = Path(__file__).parents[1] / "experiments" / "own_code" / f"{program}.py"
                run = f"torchrun --nproc-per-node {given.ranks} --rdzv-backend c10d --rdzv-endpoint {{rendezvous}}"
                space = {
                    "study": "study",
                    "cluster": cluster_text if gpu else {**cluster_text, "simulate_sensors_of": "h200_sxm"},
                    "engine": "command",
                    "command": {
                        "run": f"{run} {script} --steps 100000 --micro-batch-size {{size}}",
                        "warm": kind != "cold",
                    },
                    "flags": {"size": [2]},
                    "objective": "minimize step_time_s",
                }
                spec = prune(parse_space(space)).kept[0].spec
                folder = root / "study" / "trials" / f"{spec.trial_id}-{number}"
                begun_s = time.monotonic()
                result = run_trial(
                    Attempt(spec=spec, repeat=number, measure=measure, seed=0, folder=folder), cluster, lanes
                )
                took_s, numbers = time.monotonic() - begun_s, result.numbers
                print(program, kind, took_s, numbers.known, result.status, result.reason, file=sys.stderr, flush=True)
                step_s = result.metrics.get("step_time_s", 0.0)
                runs[kind].append((took_s, numbers.build_time_s or 0.0, numbers.import_time_s or 0.0, step_s))
            for kind, found in runs.items():
                for at, part in enumerate(("the trial", "to the first step", "of which imports", "a step")):
                    each_s = [one[at] for one in found]
                    rows.add(
                        f"{program}, {kind}: {part}", statistics.median(each_s), min(each_s), max(each_s), len(found)
                    )
            cold_s, warm_s = (statistics.median(one[1] for one in runs[kind]) for kind in ("cold", "warm"))
            missed += [f"{program}: {warm_s:.1f} s warm, {cold_s:.1f} s cold"] if warm_s > cold_s / 2 else []
    return Found(rows, [], missed)


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="a device of the catalog")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--fresh", type=int, default=3)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--command", nargs="+", default=[], help="programs of experiments/own_code, cold and warm")
    parser.add_argument("--turns", type=int, default=3)


@benchmark(
    claim="A trial on warm workers costs little beside its steps, and a fraction of what a fresh Ray Train run costs.",
    bar=f"warm below {WARM_BELOW_S['cpu']:g} s on cpu and {GPU_WARM_BELOW_S:g} s on GPUs; fresh over warm at least "
    f"{RATIO_AT_LEAST:g}",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Runs fresh and warm trials in one cluster."""
    device(given.device)  # a name nobody knows is said before Ray starts
    with tempfile.TemporaryDirectory(prefix="wattune-overhead-") as folder:
        return (compare_commands if given.command else compare)(given, Path(folder))


if __name__ == "__main__":
    main()

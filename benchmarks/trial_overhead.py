"""Measures the cost of a trial beside its steps, on warm workers and in a fresh Ray Train run for each trial.

    python benchmarks/trial_overhead.py [--device cpu] [--ranks 2] [--warm 10] [--fresh 3] [--json] [--out FILE]
    python benchmarks/trial_overhead.py --faults [--device h200_sxm --ranks 2]
    python benchmarks/trial_overhead.py --queue 1000

A trial's overhead is its wall time (specification written to result renamed into place: sampler started and stopped,
workers found, process group made, memory given back, tables written, analysis) without its steps, warm-up included, and
without the engine's build; with the build it is printed beside. Fresh and warm trials are of the same small model.
`--faults` then also runs trials that fail on their last rank while the others wait for it, each followed by a good one:
their status, whether they cost the lane its workers, and how long it had none.
`--queue` runs so many trials of an engine that takes 10 ms a step as one study (`queued_trials.py`): what each costs,
how time and memory of every process grow, and how long the controller, and those who ask for the status, have to wait.
The script prints the rows of benchmarks/results/trial_overhead.md.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from wattune.catalog.hardware import ClusterSpec, device
from wattune.catalog.models import ModelSpec
from wattune.engines.torch.engine import TorchEngine
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Cluster, connect
from wattune.orchestrate.lanes.client import Lanes
from wattune.orchestrate.run_trial import run_trial
from wattune.plans.axes import Plan
from wattune.trial import Measure, TrialSpec
from wattune.workers.engine import Ranks, StepSpans
from wattune.workload import Workload

WARM_BELOW_S = {"cpu": 1.5}
GPU_WARM_BELOW_S = 2.0
RATIO_AT_LEAST = 8.0

MODEL = ModelSpec(
    name="small",
    num_layers=2,
    hidden_size=256,
    ffn_hidden_size=512,
    num_heads=4,
    num_kv_heads=4,
    vocab_size=1024,
    source="made up: small enough that what is not a step is seen",
)


class RunsOutOfMemory(TorchEngine):
    """Asks for more memory than there is, on its last rank and in its third step, unless its seed is 0."""

    def build(self, spec: TrialSpec, ranks: Ranks, *, seed: int) -> None:
        """As the torch engine, whose rules know it by its own name only."""
        super().build(replace(spec, engine="torch"), ranks, seed=seed)
        self._steps_left, self._here = 2 if seed else sys.maxsize, ranks

    def step(self) -> StepSpans:
        """A step, until it fails."""
        self._steps_left -= 1
        if self._steps_left < 0 and self._here.rank == self._here.world_size - 1:
            self.fail()
        return super().step()

    def fail(self) -> None:
        """Fails."""
        torch.zeros(1 << 50, device=self._here.device)


class Raises(RunsOutOfMemory):
    """Raises there."""

    def fail(self) -> None:
        """Fails."""
        raise ValueError("an engine that is wrong")


def specification(given: argparse.Namespace, engine: str) -> TrialSpec:
    """The trial that is run again and again."""
    gpu = given.device != "cpu"
    cluster = ClusterSpec(
        device=given.device, devices_per_node=given.ranks, simulate_sensors_of=None if gpu else "h200_sxm"
    )
    return TrialSpec(
        model=MODEL,
        cluster=cluster,
        engine=engine,
        workload=Workload(seq_len=128, global_batch_size=4 * given.ranks),
        plan=Plan(dtype="bf16" if gpu else "fp32"),
    )


def one(root: Path, spec: TrialSpec, number: int, isolation: str, cluster: Cluster, lanes: Lanes) -> dict[str, Any]:
    """Runs one trial and takes its time apart."""
    folder = root / "study" / "trials" / f"{spec.trial_id}-{number}"
    measure = Measure(warmup_steps=4, min_steps=8, min_seconds=0.5, profile_steps=0)
    asked = Attempt(spec=spec, repeat=number, measure=measure, seed=0, folder=folder, isolation=isolation)
    begun_s = time.monotonic()
    result = run_trial(asked, cluster, lanes)
    wall_s = time.monotonic() - begun_s
    if result.status not in ("completed", "invalid"):  # too short for some sensors, which is no matter here
        raise SystemExit(f"trial {number} is {result.status}: {result.reason}")
    spans = pq.read_table(folder / "spans.parquet")
    steps = spans.filter(pc.equal(spans["phase"].cast("string"), "step"))
    steps_s = (pc.max(steps["end_mono_ns"]).as_py() - pc.min(steps["start_mono_ns"]).as_py()) / 1e9
    build_s = float(result.tags["build_time_s"])
    return {
        "isolation": isolation,
        "wall_s": wall_s,
        "steps_s": steps_s,
        "build_s": build_s,
        "overhead_s": wall_s - steps_s - build_s,
        "workers_s": float(result.tags["group_start_s"]),
        "lost": f"; its workers are replaced: {lost}" if (lost := result.tags.get("group_lost")) else "",
    }


def compare(given: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Fresh and warm trials in one cluster."""
    spec = specification(given, given.engine)
    trials = []
    faults: list[str] = []
    with connect() as cluster, Lanes() as lanes:
        kinds = ["fresh"] * given.fresh + ["warm"] * (given.warm + 1)
        for number, isolation in enumerate(kinds):
            trials.append(one(root, spec, number, isolation, cluster, lanes))
            print(
                f"{isolation:5s} {trials[-1]['wall_s']:7.2f} s = overhead {trials[-1]['overhead_s']:.2f} + build "
                f"{trials[-1]['build_s']:.2f} + steps {trials[-1]['steps_s']:.2f}{trials[-1]['lost']}",
                file=sys.stderr,
                flush=True,
            )
        if given.faults:
            faults = fail(given, root, cluster, lanes)
    first = next(trial for trial in trials if trial["isolation"] == "warm")
    fresh = [trial for trial in trials if trial["isolation"] == "fresh"]
    warm = [trial for trial in trials if trial["isolation"] == "warm"][1:]  # the first starts the lane
    found = {
        "device": given.device,
        "ranks": given.ranks,
        "fresh_s": statistics.median(trial["overhead_s"] for trial in fresh),
        "warm_s": statistics.median(trial["overhead_s"] for trial in warm),
        "fresh_with_build_s": statistics.median(trial["overhead_s"] + trial["build_s"] for trial in fresh),
        "warm_with_build_s": statistics.median(trial["overhead_s"] + trial["build_s"] for trial in warm),
        "fresh_range_s": [min(t["overhead_s"] for t in fresh), max(t["overhead_s"] for t in fresh)],
        "warm_range_s": [min(t["overhead_s"] for t in warm), max(t["overhead_s"] for t in warm)],
        "lane_start_s": first["workers_s"],
        "num_fresh": len(fresh),
        "num_warm": len(warm),
    }
    found["ratio"] = found["fresh_s"] / found["warm_s"]
    bound_s = WARM_BELOW_S.get(given.device, GPU_WARM_BELOW_S)
    found["met"] = found["warm_s"] < bound_s and found["ratio"] >= RATIO_AT_LEAST
    found["lines"] = [
        "| what | measured | range | target |",
        "|---|---|---|---|",
        row("fresh Ray Train run, overhead a trial", found["fresh_s"], found["fresh_range_s"], ""),
        row("warm lane, overhead a trial", found["warm_s"], found["warm_range_s"], f"< {bound_s:g} s"),
        f"| fresh over warm | {found['ratio']:.1f} | | >= {RATIO_AT_LEAST:g} |",
        f"| with the build: fresh | {found['fresh_with_build_s']:.2f} s | | |",
        f"| with the build: warm | {found['warm_with_build_s']:.2f} s | | |",
        f"| first start of the lane | {found['lane_start_s']:.2f} s | | |",
        *faults,
    ]
    return found


def fail(given: argparse.Namespace, root: Path, cluster: Cluster, lanes: Lanes) -> list[str]:
    """Trials that fail, each followed by a good one."""
    lines = ["", "| a trial that fails | status | took | cost | next trial | took |", "|---|---|---|---|---|---|"]
    for number, name in enumerate(("RunsOutOfMemory", "Raises"), start=100):
        results, took_s = [], []
        for offset, seed in ((0, 1), (10, 0)):
            spec = specification(given, f"trial_overhead:{name}")
            measure = Measure(warmup_steps=4, min_steps=8, min_seconds=0.0, profile_steps=0)
            folder = root / "study" / "trials" / f"{spec.trial_id}-{number + offset}"
            asked = Attempt(spec=spec, repeat=number + offset, measure=measure, seed=seed, folder=folder)
            begun_s = time.monotonic()
            results.append(run_trial(asked, cluster, lanes))
            took_s.append(time.monotonic() - begun_s)
            print(name, results[-1].status, results[-1].reason, f"{took_s[-1]:.1f} s", file=sys.stderr)
        bad, good = results
        lost = bad.tags.get("group_lost", "")
        cost = f"its workers, {good.tags.get('group_restart_s', '?')} s" if lost else "nothing"
        lines.append(
            f"| {name}: {bad.reason} | {bad.status} | {took_s[0]:.1f} s | {cost} | {good.status} | {took_s[1]:.1f} s |"
        )
    return lines


def row(what: str, value_s: float, bounds_s: list[float], target: str) -> str:
    """A line of the table."""
    return f"| {what} | {value_s:.2f} s | {bounds_s[0]:.2f} to {bounds_s[1]:.2f} s | {target} |"


def queue(given: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Many different trials of an engine that takes 10 ms, as one study."""
    import queued_trials  # beside this file

    one = specification(given, queued_trials.ENGINE)
    workloads = (replace(one.workload, seq_len=128 + number) for number in range(given.queue))
    found = queued_trials.run_queue([replace(one, workload=workload) for workload in workloads], root)
    return found | {"lines": queued_trials.table(found)}


def main() -> None:
    """Measures, prints, and writes what it found where `--out` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", help="a device of the catalog")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--fresh", type=int, default=3)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--faults", action="store_true", help="also: what trials that fail cost the next one")
    parser.add_argument("--queue", type=int, default=0, help="instead: so many trials of a 10 ms engine")
    parser.add_argument("--storage", type=Path, help="of --queue: a folder to keep; the same command continues there")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device(given.device)  # a name nobody knows is said before Ray starts
    # The workers find this file as a module: its engine is named as a user names an own one.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with tempfile.TemporaryDirectory(prefix="wattune-overhead-") as folder:
        found = queue(given, given.storage or Path(folder)) if given.queue else compare(given, Path(folder))
    lines = found.pop("lines")
    head = (
        f"{datetime.now(UTC):%Y-%m-%d}, {given.device} x{given.ranks}, {os.cpu_count()} processors (load "
        f"{os.getloadavg()[0]:.1f}), Python {platform.python_version()}, torch {version('torch')}, Ray {version('ray')}"
    )
    text = "\n".join(["# What a trial costs beside its steps", "", head, "", *lines, ""])
    if given.out:
        given.out.write_text(text)
    print(json.dumps(found | {"conditions": head}) if given.json else text)


if __name__ == "__main__":
    main()

"""Plans that a study measures in ten minutes, and where the seconds of a trial go: the same plans in one or two trees.

    python benchmarks/study_economics.py [--cases dense,mixture] [--before TREE] [--most-s 500] [--csv FILE]
    python benchmarks/study_economics.py --device cpu --cases tiny     no GPU: two gloo ranks, simulated sensors

Every case is a study of its own in a storage of its own, so that nothing is compiled yet: `wattune run` as a user calls
it. Each study has an equal share of `--most-s`; what is left then is stopped as by Ctrl-C. The other tree's studies run
in turns with this one's. Of n results, the first of which is stored a seconds after the command began and the others c
apart, ten minutes hold 1 + (600 - a) / c.

Measured shares are of the time from the command (cold) or the first result (warm) to the last result. Parts are means
over the trials after the first, as each trial records them. `driver_cpu_s` are the processor seconds a trial of the
command and of the processes that drive trials. The step time of each plan is compared between the trees.
"""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import psutil
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from harness import Found, Rows, benchmark

HERE = Path(__file__).resolve().parents[1]
SPAN_S = 600.0
STOP_S = 60.0  # longest a study may take to end when it is stopped

LLAMA = {"name": "llama3_8b", "hidden_size": 3072, "num_heads": 24, "num_kv_heads": 8, "ffn_hidden_size": 8192}
"""Widths of a model of 3 billion parameters at 28 layers."""
TINY = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 4, "num_kv_heads": 2}
GATHERED = {"sharding": ["zero1"], "overlap": ["grad_param"]}
CASES: dict[str, dict[str, Any]] = {
    "dense": {
        "model": {**LLAMA, "num_layers": 8},
        "space": {"tp": [1, 2], "pp": [1, 2], "micro_batch_size": [1, 2, 4], **GATHERED},
    },
    "dense_megatron": {
        "model": {**LLAMA, "num_layers": 8},
        "engine": "megatron",
        "space": {"tp": [1, 2], "micro_batch_size": [1, 2, 4], **GATHERED},
    },
    "mixture": {
        "model": {"name": "gpt_oss_20b_like", "num_layers": 8},
        "space": {"ep": [1, 2], "tp": [1, 2], "micro_batch_size": [1, 2], "recompute": ["none", "full"], **GATHERED},
    },
    "three_billion": {
        "model": {**LLAMA, "num_layers": 28},
        "space": {"tp": [1, 2], "micro_batch_size": [1, 2, 4], **GATHERED},
    },
    "tiny": {
        "model": {"name": "llama3_8b", "vocab_size": 256, **TINY},
        "space": {"micro_batch_size": [1, 2, 4], "sharding": ["none", "zero1"]},
        "workload": {"mode": "pretrain", "seq_len": 32, "global_batch_size": 8},
    },
}
LEAST_PLANS = {"dense": 50, "mixture": 30, "three_billion": 22}
"""Plans in ten minutes, cold, on two H100."""
FIRST_WITHIN_S, TRIAL_WITHIN_S = 60.0, 9.0
LEAST_MEASURED = {"measured_cold_frac": 0.45, "measured_warm_frac": 0.60}
SAME_STEPS_FRAC = 0.005  # difference of step times between the trees, over all plans, that counts as none

PARTS = ("wait", "start", "build", "first_step", "warmup", "measure", "profile", "close")
FIGURES = ("first_result_s", "measured_cold_frac", "measured_warm_frac", "median_trial_s", "driver_cpu_s")
COLUMNS = ("case", "tree", "num_in_600_s", *FIGURES, "num_trials", "num_out_of_memory", *(f"{one}_s" for one in PARTS))


def space(case: str, given: Namespace) -> dict[str, Any]:
    """The document of a case's study."""
    is_cpu = given.device == "cpu"
    cluster = {"device": given.device, "num_nodes": 1, "devices_per_node": given.ranks}
    return {
        "study": case,
        "cluster": cluster | ({"simulate_sensors_of": "h200_sxm"} if is_cpu else {}),
        "engine": "torch",
        "workload": {"mode": "pretrain", "seq_len": 4096, "global_batch_size": 8}
        | ({"routing": "balanced"} if case == "mixture" else {}),
        "measure": {"warmup_steps": 5, "min_steps": 4, "min_seconds": given.window_s, "reference_every": 0},
        "objective": "maximize tokens_per_s",
        "search": {"strategy": "grid"},
    } | CASES[case]


class CpuTime:
    """Processor seconds of a command and of the processes that drive its trials, looked at while it runs."""

    def __init__(self, command: int) -> None:
        self._command, self._seen_s = psutil.Process(command), dict[int, float]()

    def look(self) -> None:
        """Looks once."""
        try:
            for process in (self._command, *self._command.children(recursive=True)):
                if process == self._command or process.name().startswith("ray::ImplicitFu"):
                    times = process.cpu_times()
                    self._seen_s[process.pid] = times.user + times.system
        except psutil.Error:  # one of them has just ended
            return

    @property
    def seconds(self) -> float:
        """All that was seen."""
        return sum(self._seen_s.values())


def run(
    case: str, tree: Path, folder: Path, most_s: float, given: Namespace
) -> tuple[dict[str, Any], dict[str, float]]:
    """Runs a case's study in a tree; returns its row, and the step time of every plan."""
    folder.mkdir(parents=True)
    (folder / "space.yaml").write_text(yaml.safe_dump(space(case, given)))
    paths = [str(tree / "platform"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    begun_s = time.time()
    with (folder / "output.txt").open("w") as output:
        command = [sys.executable, "-m", "wattune", "run", "space.yaml", "--storage", "storage"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        running = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        cpu = CpuTime(running.pid)
        while running.poll() is None and time.time() < begun_s + most_s:
            cpu.look()
            time.sleep(0.5)
        if running.poll() is None:
            running.send_signal(signal.SIGINT)
            running.wait(STOP_S)
    found = []
    for path in (folder / "storage" / case / "trials").glob("*/run.json"):
        result = json.loads(path.read_text())
        if result["status"] != "interrupted":
            found.append((path.stat().st_mtime, path.parent, result))
    if len(found) < 2:
        raise SystemExit(f"{case} in {tree}: {len(found)} results; see {folder / 'output.txt'}")
    return row(case, sorted(found, key=lambda one: one[0]), begun_s, cpu.seconds)


def measured_s(trial: Path) -> float:
    """Seconds from the first measured step of a trial to the end of its last; 0 where none was measured."""
    if not (trial / "spans.parquet").exists():
        return 0.0
    spans = pq.read_table(trial / "spans.parquet", columns=["step", "start_mono_ns", "end_mono_ns"])
    spans = spans.filter(pc.greater_equal(spans["step"], 0))
    return (pc.max(spans["end_mono_ns"]).as_py() - pc.min(spans["start_mono_ns"]).as_py()) / 1e9 if spans else 0.0


def row(
    case: str, found: list[tuple[float, Path, dict[str, Any]]], begun_s: float, cpu_s: float
) -> tuple[dict[str, Any], dict[str, float]]:
    """The figures of a study from its stored results, in the order they came."""
    stored_s = [stored for stored, _, _ in found]
    first_s, rest_s = stored_s[0] - begun_s, stored_s[-1] - stored_s[0]
    windows_s = [measured_s(trial) for _, trial, _ in found]
    cycle_s = rest_s / (len(found) - 1)
    warm = [result["numbers"] for _, _, result in found[1:]]
    figures: dict[str, Any] = {
        "case": case,
        "num_in_600_s": 1 + (SPAN_S - first_s) / cycle_s,
        "first_result_s": first_s,
        "measured_cold_frac": sum(windows_s) / (first_s + rest_s),
        "measured_warm_frac": sum(windows_s[1:]) / rest_s,
        "median_trial_s": statistics.median(late - soon for soon, late in itertools.pairwise(stored_s)),
        "driver_cpu_s": cpu_s / len(found),
        "num_trials": len(found),
        "num_out_of_memory": sum(result["status"] == "out_of_memory" for _, _, result in found),
    }
    for part in PARTS:
        told = [numbers.get(f"{part}_time_s") for numbers in warm]
        figures[f"{part}_s"] = statistics.mean(value or 0.0 for value in told) if any(told) else None
    steps_s = {
        result["trial_id"]: result["metrics"]["step_time_s"]
        for _, _, result in found
        if result["status"] == "completed" and "step_time_s" in result["metrics"]
    }
    return figures, steps_s


def same_steps(before: dict[str, float], now: dict[str, float]) -> tuple[str, float]:
    """Compares the step times of the plans that both trees measured; returns the line and the median ratio."""
    ratios = sorted(now[plan] / before[plan] for plan in now.keys() & before.keys()) or [1.0]
    median = statistics.median(ratios)
    spread = f"median {median:.4f} ({ratios[0]:.4f} to {ratios[-1]:.4f})"
    return f"step time, this tree over the other, {len(now.keys() & before.keys())} plans: {spread}", median


def missed(case: str, now: dict[str, Any], before: dict[str, Any] | None, ratio: float, is_cpu: bool) -> list[str]:
    """In what a case misses its bars."""
    wrong: list[str] = []
    if before is not None and now["num_in_600_s"] < before["num_in_600_s"]:
        wrong.append(f"{case}: {now['num_in_600_s']:.0f} plans in 600 s, the other tree {before['num_in_600_s']:.0f}")
    if is_cpu:
        return wrong
    if now["num_in_600_s"] < LEAST_PLANS.get(case, 0):
        wrong.append(f"{case}: {now['num_in_600_s']:.0f} plans in 600 s, bar {LEAST_PLANS[case]}")
    if case == "dense" and now["first_result_s"] > FIRST_WITHIN_S:
        wrong.append(f"{case}: first result after {now['first_result_s']:.0f} s, bar {FIRST_WITHIN_S:g} s")
    if case == "dense" and now["median_trial_s"] > TRIAL_WITHIN_S:
        wrong.append(f"{case}: median trial {now['median_trial_s']:.1f} s, bar {TRIAL_WITHIN_S:g} s")
    if case == "dense":
        wrong += [f"{case}: {one} {now[one]:.0%}" for one, least in LEAST_MEASURED.items() if now[one] < least]
    if abs(ratio - 1) > SAME_STEPS_FRAC:
        wrong.append(f"{case}: steps differ by {ratio - 1:+.2%}")
    return wrong


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--cases", default="dense,mixture", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--before", type=Path, help="another source tree, whose platform/ runs the same studies")
    parser.add_argument("--device", default="h100_sxm", help="a device of the catalog, or cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--window-s", type=float, default=4.0, help="least seconds of measured steps")
    parser.add_argument("--most-s", type=float, default=500.0, help="seconds for all studies together")
    parser.add_argument("--keep", type=Path, help="folder for the studies, else they are removed")


@benchmark(
    claim="Someone with ten minutes of GPUs measures fifty plans of a slice, and most of the time is measured steps.",
    bar=f"two H100, cold, plans in 600 s: {', '.join(f'{one} {least}' for one, least in LEAST_PLANS.items())}; dense: "
    f"first within {FIRST_WITHIN_S:g} s, median trial {TRIAL_WITHIN_S:g} s, measured shares "
    f"{' and '.join(f'{least:.0%}' for least in LEAST_MEASURED.values())}; never fewer plans than the other tree, and "
    f"its steps within {SAME_STEPS_FRAC:.1%}",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Runs the studies in turns and compares them."""
    cases, rows, notes, wrong = given.cases.split(","), Rows(*COLUMNS), [], []
    if unknown := set(cases) - CASES.keys():
        raise SystemExit(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    trees = {"this": HERE} | ({"before": given.before.resolve()} if given.before else {})
    share_s = given.most_s / (len(cases) * len(trees))
    with tempfile.TemporaryDirectory(prefix="wattune-economics-") as scratch:
        root = (given.keep or Path(scratch)).resolve()
        for number, case in enumerate(cases):
            found = {}
            for name in sorted(trees, reverse=bool(number % 2)):
                found[name] = run(case, trees[name], root / name / case, share_s, given)
                figures = {**found[name][0], "tree": name}
                rows.add(*(figures[column] for column in COLUMNS))
                print(figures, file=sys.stderr, flush=True)
            line, ratio = same_steps(found["before"][1], found["this"][1]) if given.before else ("", 1.0)
            notes += [f"{case}: {line}"] if line else []
            other = found["before"][0] if given.before else None
            wrong += missed(case, found["this"][0], other, ratio, given.device == "cpu")
    return Found(rows, notes, wrong)


if __name__ == "__main__":
    main()

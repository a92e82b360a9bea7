"""Plans that a study measures in ten minutes, and where the seconds of a trial go: the same plans in one or two trees.

    python benchmarks/study_economics.py [--cases dense,mixture] [--before TREE] [--most-s 500] [--csv FILE]
    python benchmarks/study_economics.py --cases dense --kept --long-window-s 12
    python benchmarks/study_economics.py --replay     no run: which recorded trials `run` would start, by their memory
    python benchmarks/study_economics.py --device cpu --cases tiny     no GPU: two gloo ranks, simulated sensors

Every case is a study of its own in a storage of its own, so that nothing is compiled yet: `wattune run` as a user calls
it. With `--kept` the same plans run again as a second study of that storage, with its kernels, and with
`--long-window-s` as another one with longer windows, by which the order of the first and its verdicts are judged. Each
study has an equal share of `--most-s`, or that of `--shares`; what is left then is stopped as by Ctrl-C. The other
tree's studies run in turns with this one's. Of n results, the first of which is stored a seconds after the command
began and the others c apart, ten minutes hold 1 + (600 - a) / c.

Measured shares are of the time from the command (cold) or the first result (warm) to the last result, and of the ten
minutes that would go on so (600 s). Parts are means over the trials after the first, as each trial records them;
`parts_error_frac` is how far they are from a trial's time, the largest. `announced_ratio` is the time that the study
announced over what it took, of all its trials where it ran to its end, else of those it named. The step time of
each plan is compared between the trees.
"""

import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from harness import Found, Rows, benchmark
from measured_tables import run_of

from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.cost.out_of_memory import CERTAIN, LIKELY, MemoryRisk
from wattune.plans.engines import CAPABILITIES
from wattune.ranking.difference import Counted, difference
from wattune.ranking.spreads import Spreads
from wattune.run import Numbers, Run
from wattune.storage.study import TrialFolder
from wattune.trial import TrialSpec

HERE = Path(__file__).resolve().parents[1]
SPAN_S = 600.0
STOP_S = 60.0  # longest a study may take to end when it is stopped

CASES: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "benchmarks/data/economics_cases.yaml").read_text())
"""Parts of each case's space that differ from all others."""
LEAST_PLANS = {"dense": 50, "mixture": 30, "three_billion": 22}
"""Plans in ten minutes, cold, on two H100."""
FIRST_WITHIN_S, TRIAL_WITHIN_S = 60.0, 9.0
COLD_FRAC, WARM_FRAC = 0.45, 0.60  # least measured shares: of a cold study, and of one with kernels after its first
OVER_MEGATRON = 1.15  # most that a step of torch's tp2 mbs1 takes, of Megatron's own
SAME_STEPS_FRAC = 0.005  # difference of step times between the trees, over all plans, that counts as none
LEAST_TAU, MOST_CONTRADICTED_FRAC = 0.95, 0.05
MOST_ANNOUNCED, MOST_PARTS_FRAC = 1.3, 0.02
MOST_OUT_OF_MEMORY = 2  # of forty trials

PARTS = ("wait", "start", "build", "first_step", "warmup", "measure", "profile", "close")
FIGURES = (
    "first_result_s", "measured_600_s_frac", "measured_cold_frac", "measured_warm_frac", "median_trial_s"
)  # fmt: skip
TOLD = ("announced_ratio", "parts_error_frac", "num_trials", "num_out_of_memory")
COLUMNS = ("case", "tree", "num_in_600_s", *FIGURES, *TOLD, *(f"{one}_s" for one in PARTS))
Results = dict[str, tuple[TrialSpec, Run]]


def space(case: str, kind: str, window_s: float, given: Namespace) -> dict[str, Any]:
    """The document of a case's study."""
    is_cpu = given.device == "cpu"
    cluster = {"device": given.device, "num_nodes": 1, "devices_per_node": given.ranks}
    found = {
        "cluster": cluster | ({"simulate_sensors_of": "h200_sxm"} if is_cpu else {}),
        "engine": "torch",
        "workload": {"mode": "pretrain", "seq_len": 4096, "global_batch_size": 8}
        | ({"routing": "balanced"} if case == "mixture" else {}),
        "measure": {"min_steps": 4, "min_seconds": window_s, "reference_every": 0},
        "objective": "maximize tokens_per_s",
        "search": {"strategy": "grid"},
    } | CASES[case]
    return found | {"study": f"{case}{kind}"}


def run(
    case: str, kind: str, tree: Path, folder: Path, most_s: float, given: Namespace
) -> tuple[dict[str, Any], Results]:
    """Runs a case's study in a tree; returns its row, and the result of every plan."""
    folder.mkdir(parents=True, exist_ok=True)
    window_s, name = given.long_window_s if kind == "_long" else given.window_s, f"{case}{kind}"
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(space(case, kind, window_s, given)))
    paths = [str(tree / "platform"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    begun_s = time.time()
    with (folder / f"{name}.txt").open("w") as output:
        command = [sys.executable, "-m", "wattune", "run", f"{name}.yaml", "--storage", "storage"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        running = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            ended: int | None = running.wait(most_s)
        except subprocess.TimeoutExpired:
            ended = None
            running.send_signal(signal.SIGINT)
            running.wait(STOP_S)
    found = results(folder / "storage" / name)
    if len(found) < 2:
        raise SystemExit(f"{name} in {tree}: {len(found)} results; see {folder / f'{name}.txt'}")
    told = announced(folder / f"{name}.txt", found, begun_s, is_whole=ended == 0)
    return row(name, found, begun_s, told)


def results(study: Path) -> list[tuple[float, Path, Run]]:
    """Results of a study in the order they were stored: time, folder, run."""
    found = []
    for path in (study / "trials").glob("*/run.json"):
        result = TrialFolder(path.parent).result()
        if result is not None and result.status != "interrupted":
            found.append((path.stat().st_mtime, path.parent, result))
    return sorted(found, key=lambda one: one[0])


def took_s(result: Run) -> float:
    """Seconds of a trial."""
    return (result.end_wall_ns - result.start_wall_ns) / 1e9


def announced(output: Path, found: list[tuple[float, Path, Run]], begun_s: float, *, is_whole: bool) -> float | None:
    """Announced over real time: of a whole study, else of the trials that it named first."""
    text = output.read_text()
    if is_whole and (total := re.search(r"^\d+ at once on .*; about (.*)$", text, re.MULTILINE)):
        return _seconds(total[1]) / (found[-1][0] - begun_s)
    named = re.search(r"^first: (.*)$", text, re.MULTILINE)
    each_s = [_seconds(one) for one in re.findall(r"\(about ([^)]*)\)", named[1])] if named else []
    ran = sorted(found, key=lambda one: one[2].start_wall_ns)[: len(each_s)]
    return sum(each_s[: len(ran)]) / sum(took_s(result) for _, _, result in ran) if each_s else None


def _seconds(text: str) -> float:
    """Seconds of `45 s`, `12:05 min` or `3:20 h`."""
    number, unit = text.split()[:2]
    large, _, small = number.partition(":")
    return float(large) if unit == "s" else 60.0 ** (1 + (unit == "h")) * (float(large) + float(small or 0) / 60)


def measured_s(trial: Path) -> float:
    """Seconds from the first measured step of a trial to the end of its last; 0 where none was measured."""
    if not (trial / "spans.parquet").exists():
        return 0.0
    spans = pq.read_table(trial / "spans.parquet", columns=["step", "start_mono_ns", "end_mono_ns"])
    spans = spans.filter(pc.greater_equal(spans["step"], 0))
    return (pc.max(spans["end_mono_ns"]).as_py() - pc.min(spans["start_mono_ns"]).as_py()) / 1e9 if spans else 0.0


def row(
    case: str, found: list[tuple[float, Path, Run]], begun_s: float, told: float | None
) -> tuple[dict[str, Any], Results]:
    """The figures of a study from its stored results, in the order they came."""
    stored_s = [stored for stored, _, _ in found]
    first_s, rest_s = stored_s[0] - begun_s, stored_s[-1] - stored_s[0]
    windows_s = [measured_s(trial) for _, trial, _ in found]
    cycle_s = rest_s / (len(found) - 1)
    warm = [result.numbers.known for _, _, result in found[1:]]
    figures: dict[str, Any] = {
        "case": case,
        "num_in_600_s": 1 + (SPAN_S - first_s) / cycle_s,
        "first_result_s": first_s,
        "measured_600_s_frac": statistics.mean(windows_s) * (1 + (SPAN_S - first_s) / cycle_s) / SPAN_S,
        "measured_cold_frac": sum(windows_s) / (first_s + rest_s),
        "measured_warm_frac": sum(windows_s[1:]) / rest_s,
        "median_trial_s": statistics.median(late - soon for soon, late in itertools.pairwise(stored_s)),
        "announced_ratio": told,
        "parts_error_frac": max(map(parts_error_frac, (result for _, _, result in found)), default=0.0),
        "num_trials": len(found),
        "num_out_of_memory": sum(result.status == "out_of_memory" for _, _, result in found),
    }
    for part in PARTS:
        parts_s = [numbers.get(f"{part}_time_s") for numbers in warm]
        figures[f"{part}_s"] = statistics.mean(value or 0.0 for value in parts_s) if any(parts_s) else None
    plans: Results = {}
    for _, trial, result in found:
        if result.status == "completed" and "step_time_s" in result.metrics:
            plans[result.trial_id] = TrialFolder(trial).spec(), result
    return figures, plans


def parts_error_frac(result: Run) -> float:
    """Distance of a trial's parts from its time, as a share of it; its wait is before it."""
    numbers, own_s = result.numbers.known, took_s(result)
    parts_s = [numbers.get(f"{part}_time_s") or 0.0 for part in PARTS if part != "wait"]
    return abs(sum(parts_s) / own_s - 1) if any(parts_s) else 0.0


def agreement(short: Results, long: Results) -> tuple[str, float, float]:
    """Compares a study with one of longer windows: a line, Kendall's tau of the plans, verdicts contradicted.

    A verdict is a pair of plans whose difference in throughput has a 95 % interval without 0. It is contradicted where
    the long measurement has them the other way round.
    """
    spreads = Spreads(list(short.values()))
    speed = {plan: (short[plan][1].metrics["tokens_per_s"], long[plan][1].metrics["tokens_per_s"]) for plan in long}
    alike = decided = wrong = pairs = 0
    for one, other in itertools.combinations(sorted(speed.keys() & short.keys()), 2):
        pairs += 1
        same = (speed[one][0] - speed[other][0]) * (speed[one][1] - speed[other][1]) > 0
        alike += same
        found = difference("tokens_per_s", *(Counted([short[plan][1]], spreads) for plan in (one, other)))
        told = found is not None and found.low is not None and found.high is not None and found.low * found.high > 0
        decided, wrong = decided + told, wrong + (told and not same)
    tau, bias = 2 * alike / max(pairs, 1) - 1, statistics.median(a / b for a, b in speed.values()) - 1
    line = f"{len(speed)} plans in longer windows: Kendall's tau {tau:.3f}, {wrong} of {decided} verdicts contradicted"
    return (
        f"{line}, {pairs - decided} undecided; tokens/s of the short ones {bias:+.2%} (median)",
        tau,
        wrong / max(decided, 1),
    )


def same_steps(before: Results, now: Results) -> tuple[str, float]:
    """Compares the step times of the plans that both trees measured; returns the line and the median ratio."""
    both = now.keys() & before.keys()
    ratios = sorted(now[one][1].metrics["step_time_s"] / before[one][1].metrics["step_time_s"] for one in both) or [1.0]
    median = statistics.median(ratios)
    spread = f"median {median:.4f} ({ratios[0]:.4f} to {ratios[-1]:.4f})"
    return f"step time, this tree over the other, {len(both)} plans: {spread}", median


def engines(found: Results) -> tuple[list[str], list[str]]:
    """Compares torch with other engines in one study, plan by plan: the lines, and in what the bar is missed."""
    runs = {(spec.engine, spec.plan.label): run.metrics for spec, run in found.values()}
    lines, slow = [], []
    for (engine, plan), other in runs.items():
        if engine != "torch" and (own := runs.get(("torch", plan))):
            ratio = own["step_time_s"] / other["step_time_s"]
            mfu = " and ".join(f"{one.get('mfu_frac', math.nan):.1%}" for one in (own, other))
            lines.append(f"{plan}: a step of torch takes {ratio:.3f} of {engine}'s; MFU {mfu}")
            slow += lines[-1:] if (engine, plan) == ("megatron", "tp2 mbs1") and ratio > OVER_MEGATRON else []
    return lines, slow


def missed(case: str, now: dict[str, Any], before: dict[str, Any] | None, ratio: float, is_cpu: bool) -> list[str]:
    """In what a case misses its bars."""
    wrong: list[str] = []
    if before is not None and now["num_in_600_s"] < before["num_in_600_s"]:
        wrong.append(f"{case}: {now['num_in_600_s']:.0f} plans in 600 s, the other tree {before['num_in_600_s']:.0f}")
    if is_cpu:
        return wrong
    least = {"num_in_600_s": LEAST_PLANS.get(case, 0)} | ({"measured_cold_frac": COLD_FRAC} if case == "dense" else {})
    most = {"first_result_s": FIRST_WITHIN_S, "median_trial_s": TRIAL_WITHIN_S} if case == "dense" else {}
    wrong += [f"{case}: {name} {now[name]:.3g}, bar {bar:g}" for name, bar in least.items() if now[name] < bar]
    wrong += [f"{case}: {name} {now[name]:.3g}, bar {bar:g}" for name, bar in most.items() if now[name] > bar]
    wrong += accounted(case, now)
    if abs(ratio - 1) > SAME_STEPS_FRAC:
        wrong.append(f"{case}: steps differ by {ratio - 1:+.2%}")
    return wrong


def accounted(case: str, now: dict[str, Any]) -> list[str]:
    """In what a study's account of its time and memory misses the bars."""
    wrong = []
    if now["parts_error_frac"] > MOST_PARTS_FRAC:
        wrong.append(f"{case}: parts of a trial are {now['parts_error_frac']:.1%} from its time")
    if (told := now["announced_ratio"]) is not None and not 1 / MOST_ANNOUNCED <= told <= MOST_ANNOUNCED:
        wrong.append(f"{case}: announced {told:.2f} of what it took")
    if now["num_out_of_memory"] > max(1.0, MOST_OUT_OF_MEMORY * now["num_trials"] / 40):
        wrong.append(f"{case}: {now['num_out_of_memory']} of {now['num_trials']} trials ran out of memory")
    return wrong


def replay() -> Found:
    """Starts the trials of `benchmarks/data` as `run` would: those that memory rules out never, likely ones last.

    What each told of memory corrects the next, as in a study. Trials of one table are one study.
    """
    rows, wrong, out_of_memory, ruled_out = Rows("table", "started", "out_of_memory", "rejected", "that_ran"), [], 0, 0
    for path in sorted((HERE / "benchmarks" / "data").glob("*_h[12]00*.parquet")):
        queue = [
            memory_of(one) for one in sorted(pq.read_table(path).to_pylist(), key=lambda one: one["start_wall_ns"])
        ]
        queue = [
            one for one in queue if one[0].engine in CAPABILITIES and one[1].status in ("completed", "out_of_memory")
        ]
        specs = list(dict.fromkeys(spec for spec, _ in queue))
        if not specs or any(spec.program for spec in specs):  # commands have no estimates
            continue
        risk = MemoryRisk(specs, estimate(specs, default_coefficients))
        begun, told = set[TrialSpec](), Counter[str]()
        while queue:
            spec, run = queue.pop(
                next((at for at, (one, _) in enumerate(queue) if one in begun or risk(one) < LIKELY), 0)
            )
            failed = run.status == "out_of_memory"
            if spec not in begun and risk(spec) > CERTAIN:
                told.update(rejected=1, that_ran=not failed)
                continue
            begun.add(spec)
            told.update(started=1, out_of_memory=failed)
            risk.note(spec, run)
        rows.add(path.stem, *(int(told[column]) for column in rows.columns[1:]))
        out_of_memory, ruled_out = max(out_of_memory, told["out_of_memory"]), ruled_out + told["that_ran"]
    wrong += [f"{out_of_memory} trials of a study ran out of memory"] if out_of_memory > MOST_OUT_OF_MEMORY else []
    wrong += [f"{ruled_out} plans were rejected that ran"] if ruled_out else []
    return Found(rows, [], wrong)


def memory_of(row: dict[str, Any]) -> tuple[TrialSpec, Run]:
    """Reads what a recorded trial told of memory."""
    told = {**json.loads(row["tags"] or "{}"), **json.loads(row.get("numbers") or "{}")}
    asked = told.get("memory_asked_bytes")
    run = replace(run_of(row), numbers=Numbers(memory_asked_bytes=int(float(asked)) if asked else None))
    return TrialSpec.from_json(json.loads(row["spec"])), run


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--cases", default="dense,mixture", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--before", type=Path, help="another source tree, whose platform/ runs the same studies")
    parser.add_argument("--device", default="h100_sxm", help="a device of the catalog, or cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--window-s", type=float, default=4.0, help="least seconds of measured steps")
    parser.add_argument("--kept", action="store_true", help="the same plans again, with the kernels of the first study")
    parser.add_argument("--long-window-s", type=float, default=0.0, help="and again, with windows so long")
    parser.add_argument("--most-s", type=float, default=500.0, help="seconds for all studies together")
    parser.add_argument("--shares", default="", help="seconds of each study of a case instead, such as 200,110,190")
    parser.add_argument("--replay", action="store_true", help="start the trials of benchmarks/data by their memory")
    parser.add_argument("--keep", type=Path, help="folder for the studies, else they are removed")


@benchmark(
    claim="Someone with ten minutes of GPUs measures fifty plans of a slice, and most of the time is measured steps.",
    bar=f"two H100, cold, plans in 600 s: {', '.join(f'{one} {least}' for one, least in LEAST_PLANS.items())}; dense: "
    f"first within {FIRST_WITHIN_S:g} s, median trial {TRIAL_WITHIN_S:g} s, measured {COLD_FRAC:.0%}, with kernels "
    f"{WARM_FRAC:.0%}; Kendall's tau {LEAST_TAU:g} to long windows, {MOST_CONTRADICTED_FRAC:.0%} of verdicts wrong; "
    f"parts within {MOST_PARTS_FRAC:.0%}, announced within 30%; {MOST_OUT_OF_MEMORY} of 40 trials out of memory; never "
    f"fewer plans than the other tree, and its steps within {SAME_STEPS_FRAC:.1%}",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Runs the studies in turns and compares them."""
    cases, rows, notes, wrong = given.cases.split(","), Rows(*COLUMNS), [], []
    if unknown := set(cases) - CASES.keys():
        raise SystemExit(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if given.replay:
        return replay()
    trees = {"this": HERE} | ({"before": given.before.resolve()} if given.before else {})
    kinds = ["", *(["_kept"] if given.kept else []), *(["_long"] if given.long_window_s else [])]
    share_s = given.most_s / (len(cases) * (len(trees) + len(kinds) - 1))
    shares_s = [float(each) for each in given.shares.split(",")] if given.shares else [share_s] * len(kinds)
    with tempfile.TemporaryDirectory(prefix="wattune-economics-") as scratch:
        root = (given.keep or Path(scratch)).resolve()
        for number, case in enumerate(cases):
            found = {}
            for name in sorted(trees, reverse=bool(number % 2)):
                for kind, most_s in zip(kinds if name == "this" else [""], shares_s, strict=False):
                    told = found[name + kind] = run(case, kind, trees[name], root / name / case, most_s, given)
                    figures = {**told[0], "case": f"{case}{kind}", "tree": name}
                    rows.add(*(figures[column] for column in COLUMNS))
                    print(figures, file=sys.stderr, flush=True)
            line, ratio = same_steps(found["before"][1], found["this"][1]) if given.before else ("", 1.0)
            notes += [f"{case}: {line}"] if line else []
            other = found["before"][0] if given.before else None
            wrong += missed(case, found["this"][0], other, ratio, given.device == "cpu")
            lines, slow = engines(found["this"][1])
            notes, wrong = [*notes, *lines], [*wrong, *slow]
            wrong += again(case, found, notes, given.device == "cpu")
    return Found(rows, notes, wrong)


def again(case: str, found: dict[str, tuple[dict[str, Any], Results]], notes: list[str], is_cpu: bool) -> list[str]:
    """In what a case's further studies miss their bars; adds what they say of its first one."""
    wrong: list[str] = []
    if "this_kept" in found and not is_cpu:
        kept = found["this_kept"][0]
        wrong += accounted(f"{case}_kept", kept)
        if case == "dense" and kept["measured_warm_frac"] < WARM_FRAC:
            wrong.append(f"{case}: {kept['measured_warm_frac']:.0%} measured with kernels, bar {WARM_FRAC:.0%}")
    if "this_long" in found:
        line, tau, contradicted_frac = agreement(found["this"][1], found["this_long"][1])
        notes.append(f"{case}: {line}")
        if "this_kept" in found:
            notes.append(f"{case}, kept kernels: {agreement(found['this_kept'][1], found['this_long'][1])[0]}")
        if not is_cpu and (tau < LEAST_TAU or contradicted_frac > MOST_CONTRADICTED_FRAC):
            wrong.append(f"{case}: {line}")
    return wrong


if __name__ == "__main__":
    main()

"""Projections of published runs to sizes that were left out, beside plain peers, through `wattune project`.

    python benchmarks/projection.py [--kept FILE.csv] [--out FOLDER]

Two questions of each source: the largest size from all smaller ones, and every size from the smallest alone. Peers are
a constant rate of each device, and the exact fit a (m + (p - 1) / v) + c where two sizes tell it. `--kept` adds rows
that are kept elsewhere, in the same columns: they are predicted, and fitted to by nothing.
"""

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from published_steps import read as published_steps

DATA = Path(__file__).parent / "data"
RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    "source", "submitter", "model", "num_layers", "gpus", "gpu", "tp", "pp", "cp", "ep", "vpp", "mbs", "microbatches",
    "global_batch", "seq_len", "precision", "recompute", "routing", "step_time_s", "tokens_per_s_per_gpu", "steps_read",
    "step_time_min_s", "step_time_max_s",
)  # fmt: skip
Row = dict[str, str]


def rows_of(path: Path) -> list[Row]:
    """Reads a table; a source is a release of one publisher, a blank stays one."""
    if path.suffix == ".parquet":
        found = pq.read_table(path).to_pylist()
    else:
        found = list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()))
    rows = [{name: "" if (value := one.get(name)) is None else str(value) for name in COLUMNS} for one in found]
    for one in rows:
        for name, value in one.items():
            one[name] = value.removesuffix(".0")
        if one["precision"].lower() not in ("", "bf16", "fp8") and "DGXC" in one["source"]:
            one["precision"] = one["precision"].upper()
    return [
        one
        for one in rows
        if one["gpus"] and one["global_batch"] and (one["step_time_s"] or one["tokens_per_s_per_gpu"])
    ]


def plan_of(row: Row) -> tuple[str, ...]:
    """Returns the key of the rows of one curve, without measurements and sizes."""
    told = ("source", "model", "gpu", "tp", "pp", "cp", "ep", "vpp", "mbs", "seq_len", "precision")
    return tuple(row[name] for name in told)


def families(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Groups rows of several sizes."""
    found: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for one in rows:
        found[plan_of(one)].append(one)
    return {key: own for key, own in found.items() if len({one["gpus"] for one in own}) > 1}


def asked(runs: Sequence[Row], truth: Sequence[Row], *more: str) -> list[dict[str, Any]]:
    """Asks the product's own command."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("runs.csv", "truth.csv")]
        for path, rows in zip(paths, (runs, truth), strict=True):
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)
        against = ["--against", str(paths[1])] if truth else []
        command = [sys.executable, "-m", "wattune", "project", str(paths[0]), *against, *more, "--json"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(answer.stderr)
    found: list[dict[str, Any]] = json.loads(answer.stdout)["projections"]
    return found


def shape(row: Row) -> tuple[float, float]:
    """Returns micro-batches with the bubble, and seconds of a step."""
    n = {name: float(row[name] or 1) for name in ("tp", "pp", "cp", "vpp", "mbs", "gpus", "global_batch", "seq_len")}
    batches = n["global_batch"] * n["tp"] * n["pp"] * n["cp"] / (n["gpus"] * n["mbs"])
    speed = float(row["tokens_per_s_per_gpu"] or 0) * n["gpus"]
    return batches + (n["pp"] - 1) / n["vpp"], float(row["step_time_s"] or 0) or n["global_batch"] * n[
        "seq_len"
    ] / speed


def peers(own: Sequence[Row], target: Row) -> tuple[float, float | None]:
    """Errors of a constant rate of each device by the largest run, and of the exact fit of the first and last size."""
    ordered = sorted(own, key=lambda one: float(one["gpus"]))
    (first, first_s), (last, last_s), (there, there_s) = map(shape, (ordered[0], ordered[-1], target))
    work = [float(one["global_batch"]) / float(one["gpus"]) for one in (ordered[-1], target)]
    constant = last_s * work[1] / work[0] / there_s - 1
    if abs(first - last) < 1e-6:
        return constant, None
    slope = (first_s - last_s) / (first - last)
    return constant, (last_s + slope * (there - last)) / there_s - 1


def predicted(known: dict[tuple[str, ...], list[Row]], question: str) -> list[dict[str, Any]]:
    """Predicts the left-out sizes of each family; families of one source are asked for together."""
    sources: dict[str, list[tuple[tuple[str, ...], list[Row], list[Row]]]] = defaultdict(list)
    for key, own in known.items():
        sizes = sorted({float(one["gpus"]) for one in own})
        at = sizes[-1] if question == "largest" else sizes[1]
        runs = [one for one in own if float(one["gpus"]) < at]
        sources[key[0]].append((key, runs, [one for one in own if float(one["gpus"]) >= at]))
    found = []
    for each in sources.values():
        runs, truth = ([row for one in each for row in one[place]] for place in (1, 2))
        answers = asked(runs, truth)[: len(truth)]
        families_of_truth = [(key, own) for key, own, rows in each for _ in rows]
        for row, answer, (key, own) in zip(truth, answers, families_of_truth, strict=True):
            step = answer["figures"]["step_time_s"]
            constant, exact = peers(own, row)
            found.append(
                {
                    "question": question, "family": " ".join(filter(None, key[1:])), "source": key[0][:40],
                    "num_devices": int(float(row["gpus"])),
                    "num_measured_devices": int(max(float(one["gpus"]) for one in own)),
                    "is_weak": abs(shape(own[-1])[0] - shape(row)[0]) < 1e-6, "prior": answer["prior"],
                    "measured_s": answer["truth_s"], "projected_s": step["value"], "low_s": step["low"],
                    "high_s": step["high"], "error_frac": answer["error_frac"], "constant_rate_error_frac": constant,
                    "exact_fit_error_frac": exact, "is_inside": answer["is_inside"],
                }
            )  # fmt: skip
    return found


def leave_families_out(found: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Share inside where each family's width is learned from all others, and the median half width."""
    scores = np.array([abs(np.log1p(one["error_frac"])) / (np.log(one["high_s"] / one["low_s"]) / 2) for one in found])
    names = np.array([one["family"] + one["source"] for one in found])
    inside, widths = [], []
    for name in set(names):
        others = scores[names != name]
        factor = np.quantile(others, min(0.9 * (1 + 1 / len(others)), 1.0))
        inside += list(scores[names == name] <= factor)
        widths += [
            factor * np.log(one["high_s"] / one["low_s"]) / 2 for one in found if one["family"] + one["source"] == name
        ]
    return float(np.mean(inside)), float(np.median(widths))


def quantiles(errors: Iterable[float | None]) -> str:
    """Median and 90th percentile of absolute errors."""
    known = np.abs([one for one in errors if one is not None])
    return f"{np.median(known):.1%} | {np.quantile(known, 0.9):.1%}" if len(known) else "- | -"


def ratio_log_std() -> float:
    """Error of a ratio of estimates of two sizes of one plan: 1.4826 times the median of absolute errors."""
    residuals: dict[str, list[float]] = defaultdict(list)
    for one in published_steps()[0]:
        sizes = ("cluster", "global_batch_size")
        plan = {name: value for name, value in one.asked.items() if name not in sizes}
        residuals[repr((one.group, one.row["model"], plan))].append(
            np.log(one.measured_s / one.found.figures["step_time_s"]["value"])
        )
    pairs = [abs(a - b) for own in residuals.values() for place, a in enumerate(own) for b in own[:place]]
    return float(1.4826 * np.median(pairs))


def speed(num_plans: int = 1000) -> tuple[float, float]:
    """CPU seconds and gigabytes of a table of so many plans."""
    base = {**dict.fromkeys(COLUMNS, ""), "model": "llama3_1_405b", "gpu": "H100", "gpus": "512", "tp": "8", "pp": "4"}
    base |= {"mbs": "1", "seq_len": "8192", "precision": "BF16"}
    rows = []
    for at in range(num_plans):
        layers, more = 4 + 4 * (at % 25), at // 25
        sizes: dict[str, float] = {"num_layers": layers, "global_batch": 64 * (1 + more), "seq_len": 4096 + 128 * more}
        tokens = sizes["global_batch"] * sizes["seq_len"]
        sizes["step_time_s"] = round(6 * 3.2e9 * layers * tokens / (512 * 4e14), 4)  # 400 TFLOP/s a device
        rows.append(base | {name: str(value) for name, value in sizes.items()})
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert len(asked(rows, [], "--to", "1024x8")) == num_plans
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, after.ru_maxrss / 1e6


def main() -> None:
    """Prints each row of the table beside its bar and its plain peers, and writes all rows."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kept", type=Path, help="rows to predict as well")
    options.add_argument("--out", type=Path, default=RESULTS)
    given = options.parse_args()
    began = time.monotonic()
    rows = [*rows_of(DATA / "published_steps.parquet"), *rows_of(DATA / "mlperf_v6_steps.csv")]
    known = families(rows)
    found = [*predicted(known, "largest"), *predicted(known, "every size from the smallest")]
    if given.kept:
        kept = rows_of(given.kept)
        for source in {one["source"] for one in kept}:
            for answer in asked(
                [one for one in rows if one["source"] == source], [one for one in kept if one["source"] == source]
            ):
                print("kept:", answer["name"], answer["num_devices"], answer["error_frac"], answer["is_inside"])
    with (given.out / "projection.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    largest = [one for one in found if one["question"] == "largest"]
    weak = [one for one in found if one["is_weak"] and "DGXC" in one["source"]]
    h100 = [
        one for one in largest if "H100" in one["family"] and ("MLPerf" in one["source"] or "DGXC" in one["source"])
    ]
    inside, width = leave_families_out(found)
    print("| figure | bar | found: median, p90 | constant rate | exact fit |\n|---|---|---|---|---|")
    for name, bar, own in (
        ("largest size of H100 families, Megatron and NeMo", "3 %", h100),
        ("weak scaling of DGX-C", "2 %, 6 %", weak),
        ("largest size of all families", "-", largest),
        ("all predicted rows", "-", found),
    ):
        each = [
            quantiles(one[key] for one in own)
            for key in ("error_frac", "constant_rate_error_frac", "exact_fit_error_frac")
        ]
        print(f"| {name} ({len(own)}) | {bar} | {' | '.join(one.replace(' | ', ', ') for one in each)} |")
    half = np.median([np.log(one["high_s"] / one["low_s"]) / 2 for one in found])
    share = np.mean([one["is_inside"] for one in found])
    print(f"intervals: {share:.1%} of {len(found)} inside, half width {half:.1%}")
    print(f"with the width of all other families: {inside:.1%} inside, half width {width:.1%}")
    print(f"error of a ratio: {ratio_log_std():.4f}")
    for one in largest:
        if "MLPerf" in one["source"]:
            exact = one["exact_fit_error_frac"]
            beside = "-" if exact is None else f"{exact:+.1%}"
            print(f"{one['family']} on {one['num_devices']:,}: {one['error_frac']:+.1%}, exact fit {beside}")
    v6 = [one for one in rows if "v6" in one["source"] and float(one["gpus"]) <= 2048]
    for one in asked(v6, [], "--to", "2048x4", "--global-batch-size", "16384"):
        step = one["figures"]["step_time_s"]
        ends = f"{step['low']:.2f} to {step['high']:.2f} s"
        print(f"{one['name']} on {one['num_devices']:,}, 16,384 sequences: {step['value']:.2f} s ({ends})")
    cpu_s, size_gb = speed()
    print(f"1,000 plans: {cpu_s:.1f} CPU-s, {size_gb:.2f} GB; all in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Compares the first steps of measured trials with their whole windows: the bias and scatter of a burst.

    python benchmarks/burst_noise.py docs/notebooks/data/dense_h200x4 --csv rows.csv

Each completed trial's window is cut into pieces of the burst's length. The first piece is what a burst would have
measured. The other pieces show the scatter of such a short window later on. Trials need their spans and telemetry.
"""

import argparse
import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wattune.analysis.summary import summarize
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.trial import TrialSpec, TrialStatus
from wattune.units import NS_PER_S

METRICS: Final = ("tokens_per_s", "energy_per_token_j", "node_device_power_peak_1s_w", "device_temp_max_c")


def pieces(spans: pa.Table, min_steps: int, min_seconds: float) -> list[tuple[int, int]]:
    """First and last measured step of each piece that is as long as a burst."""
    steps = spans.filter(pc.and_(pc.equal(spans["phase"], "step"), pc.greater_equal(spans["step"], 0)))
    found = steps.group_by("step").aggregate([("start_mono_ns", "min"), ("end_mono_ns", "max")]).sort_by("step")
    starts, ends = (found[name].to_numpy() / NS_PER_S for name in ("start_mono_ns_min", "end_mono_ns_max"))
    cut, first = [], 0
    for last in range(len(starts)):
        if last - first + 1 >= min_steps and ends[last] - starts[first] >= min_seconds:
            cut.append((first, last))
            first = last + 1
    return cut


def metrics_of(spec: TrialSpec, folder: TrialFolder, spans: pa.Table, piece: tuple[int, int]) -> Mapping[str, float]:
    """Metrics of some measured steps, as if no others had been measured."""
    first, last = piece
    step = spans["step"]
    kept = spans.filter(pc.and_(pc.greater_equal(step, first), pc.less_equal(step, last)))
    renumbered = pa.compute.cast(pc.subtract(kept["step"], first), kept.schema.field("step").type)
    kept = kept.set_column(kept.schema.get_field_index("step"), kept.schema.field("step"), renumbered)
    return summarize(spec, kept, folder.stored(), folder.manifests()).metrics


def rows_of(study: Path, min_steps: int, min_seconds: float) -> list[dict[str, Any]]:
    """One row for each metric of each completed trial."""
    rows = []
    for folder in StudyFolder(study).trials():
        spec, result = folder.read()
        spans = folder.spans()
        if result is None or result.status is not TrialStatus.COMPLETED or spans is None:
            continue
        cut = pieces(spans, min_steps, min_seconds)
        whole = metrics_of(spec, folder, spans, (0, int(pc.max(spans["step"]).as_py())))
        found = [metrics_of(spec, folder, spans, piece) for piece in cut]
        for name in METRICS:
            values = [one[name] for one in found if name in one]
            if name not in whole or len(values) < 3:
                continue
            logs = [math.log(value / whole[name]) for value in values]
            rows.append(
                {
                    "study": study.name,
                    "trial": spec.label,
                    "metric": name,
                    "num_steps": cut[0][1] + 1,
                    "num_pieces": len(values),
                    "first_frac": round(logs[0], 5),
                    "later_std_frac": round(float(np.std(logs[1:], ddof=1)), 5),
                }
            )
    return rows


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Prints every row, then the bias and scatter of each metric over the trials."""
    print("| trial | metric | steps | first piece against the whole | scatter of later pieces |\n|---|---|---|---|---|")
    by_metric = defaultdict(list)
    for row in rows:
        print(
            f"| {row['trial']} | {row['metric']} | {row['num_steps']} | {row['first_frac']:+.2%} | "
            f"{row['later_std_frac']:.2%} |"
        )
        by_metric[row["metric"]].append(row["first_frac"])
    for name, firsts in by_metric.items():
        ends = f"from {min(firsts):+.2%} to {max(firsts):+.2%}"
        print(f"{name}: mean {np.mean(firsts):+.2%} over {len(firsts)} trials, {ends}")


def main() -> None:
    """Reads the studies that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", type=Path, nargs="+")
    parser.add_argument("--min-steps", type=int, default=3)
    parser.add_argument("--min-seconds", type=float, default=1.5)
    parser.add_argument("--csv", type=Path, help="file for the rows")
    args = parser.parse_args()
    rows = [row for study in args.studies for row in rows_of(study, args.min_steps, args.min_seconds)]
    print_rows(rows)
    if args.csv and rows:
        with args.csv.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()

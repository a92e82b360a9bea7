#!/usr/bin/env python
"""Runs spaces one after another within a bound on time and keeps their trials as one Parquet table each.

    python benchmarks/collect_trials.py benchmarks/data/*.yaml --minutes 9 --storage DIR --out benchmarks/data

Predictions are fitted and tested on these tables. Each space gets the same share of the time that is left. A space that
was begun is continued: trials that are done do not run again. The table of a space is written after it, so that a run
that is cut short keeps what came before.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from wattune.metrics import METRICS
from wattune.run import Run
from wattune.search.space import load_space
from wattune.storage.study import StudyFolder
from wattune.trial import TrialSpec


def row(spec: TrialSpec, result: Run) -> dict[str, Any]:
    """One trial as a flat row: what it was, how it ended, and every metric it has."""
    plan = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(spec.plan).items()}
    plan["rank_order"] = str(plan["rank_order"])
    return {
        **{name: getattr(result, name) for name in ("trial_id", "repeat", "reason", "quality")},
        "status": str(result.status),
        "quality_reasons": list(result.quality_reasons),
        **{name: getattr(result, name) for name in ("start_wall_ns", "end_wall_ns")},
        "model": spec.model.name,
        "num_layers": spec.model.num_layers,
        "engine": spec.engine,
        "device": spec.cluster.device,
        "world_size": spec.cluster.world_size,
        "seq_len": spec.workload.seq_len,
        "global_batch_size": spec.workload.global_batch_size,
        **plan,
        "spec": json.dumps(spec.to_json(), sort_keys=True),
        "tags": json.dumps(dict(result.tags), sort_keys=True),
        "numbers": json.dumps(result.numbers.known, sort_keys=True),
        "prediction": None if result.prediction is None else json.dumps(asdict(result.prediction)),
        **{name: result.metrics.get(name) for name in METRICS},
    }


def export(study: StudyFolder, path: Path) -> int:
    """Writes every finished trial of a study; returns how many there are."""
    rows = [row(spec, result) for spec, result in study.results()]
    if rows:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")
    return len(rows)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spaces", nargs="+", type=Path)
    parser.add_argument("--minutes", type=float, required=True, help="for all spaces together")
    parser.add_argument("--storage", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
    given = parser.parse_args()
    end_s = time.monotonic() + 60 * given.minutes
    for index, space in enumerate(given.spaces):
        left_s = end_s - time.monotonic()
        share_s = left_s / (len(given.spaces) - index)
        if share_s < 30:
            print(f"{space}: no time left", flush=True)
            continue
        command = [sys.executable, "-m", "wattune", "run", str(space), "--storage", str(given.storage)]
        begun_s = time.monotonic()
        done = subprocess.run([*command, "--max-hours", f"{share_s / 3600:.4f}"], check=False)
        name = load_space(space).name
        num = export(StudyFolder.open(name, given.storage), given.out / f"{name}.parquet")
        took_s = time.monotonic() - begun_s
        print(f"{name}: {num} trials in {took_s:.0f} s of {share_s:.0f} s, exit code {done.returncode}", flush=True)


if __name__ == "__main__":
    main()

"""Runs experiments one after another in one call, and packs what came out after each: a call may be cut.

    python benchmarks/experiments.py --out DIR --minutes 8.5 recomputation fsdp_micro_batch prefill parallelism
    python benchmarks/experiments.py --out DIR --short              # every one on processors, sensors simulated

It needs two or four H100 or H200. It prints a line a claim, and writes DIR/experiments.tar with NAME.json, NAME.svg and
NAME.parquet of each; unpack it into `experiments/results`, then `wattune experiments page` writes the table.
"""

import argparse
import tarfile
import time
from pathlib import Path

from wattune.api.experiments import find_experiments, run_experiments
from wattune.errors import WattuneError
from wattune.orchestrate.cluster import connect
from wattune.view.effects import effect_text

ROOT = Path(__file__).resolve().parents[1]
SOAKED = ("micro_batch_heat",)
"""Longer than a call; named, they run all the same."""


def main() -> int:
    """Runs what was asked for; returns 1 where one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.5, help="no experiment starts that may end later")
    parser.add_argument("--short", action="store_true")
    given = parser.parse_args()
    folder, began_s, longest_s, failed = ROOT / "experiments", time.monotonic(), 0.0, 0
    given.out.mkdir(parents=True, exist_ok=True)
    results = given.out / "results"
    names = given.names or [name for name in find_experiments(folder) if name not in SOAKED]
    with connect():
        for name in names:
            start_s = time.monotonic()
            if start_s - began_s + longest_s > 60 * given.minutes:
                print(f"{name}: not run, the time is up", flush=True)
                continue
            try:
                storage = str(given.out / "studies")
                ran = run_experiments([name], folder=folder, results=results, storage=storage, short=given.short)
                for claim in ran[name]["claims"]:
                    print(f"{name}: {effect_text(claim)}, expected {claim['expected']}", flush=True)
            except WattuneError as error:
                failed = 1
                print(f"{name}: {error}", flush=True)
            took_s = time.monotonic() - start_s
            longest_s = max(longest_s, took_s)
            print(f"{name}: {took_s:.0f} s, {time.monotonic() - began_s:.0f} s in all", flush=True)
            with tarfile.open(given.out / "experiments.tar", "w") as packed:
                for path in sorted(results.glob("*")):
                    packed.add(path, path.name)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())

"""Runs experiments in one call, those of one work as one study, and packs what came out after each: a call may be cut.

    python benchmarks/experiments.py --out DIR --minutes 9 parallelism,traffic,swing:6 prefill:7.5 skewed_experts
    python benchmarks/experiments.py --out DIR --short              # every one on processors, sensors simulated

Names with commas between them run together. `:6` is the minute of the call after which no run of theirs starts; what is
there by then is judged. `:6:14` has windows of 14 s in place of their own, by which more of them are measured alike. It
needs two or four H100 or H200. It prints a line a claim, and writes DIR/experiments.tar with NAME.json, NAME.svg and
NAME.parquet of each; unpack it into `experiments/results`, then `wattune experiments page`
writes the table. DIR/runs.tar.xz has the studies without their telemetry, packed anew every half minute.
"""

import argparse
import subprocess
import tarfile
import threading
import time
from pathlib import Path

from wattune.api.experiments import find_experiments, run_experiments
from wattune.errors import WattuneError
from wattune.orchestrate.cluster import connect
from wattune.view.effects import effect_text

ROOT = Path(__file__).resolve().parents[1]
SOAKED = ("micro_batch_heat", "overlap_heat")
"""Longer than a call; named, they run all the same."""

PACK_EVERY_S = 30.0


def pack_runs(storage: Path, target: Path) -> None:
    """Packs studies without raw telemetry; a run that is being written may be missing."""
    part = target.with_name("runs.part")
    without = [f"--exclude={name}" for name in ("telemetry", "ml*", "report.html")]
    command = ["tar", "-C", str(storage), *without, "-cJf", str(part), "."]
    if storage.is_dir() and subprocess.run(command, check=False, capture_output=True).returncode in (0, 1):
        part.replace(target)


def main() -> int:
    """Runs what was asked for; returns 1 where one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="NAME,NAME:MINUTE:SECONDS")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--storage", type=Path, help="folder of the studies; else DIR/studies")
    parser.add_argument("--minutes", type=float, default=9.0, help="no run starts that may end later")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--repeats", type=int, help="in place of each experiment's own repeats")
    given = parser.parse_args()
    folder, began_s, failed, done = ROOT / "experiments", time.monotonic(), 0, threading.Event()
    given.out.mkdir(parents=True, exist_ok=True)
    results, storage = given.out / "results", given.storage or given.out / "studies"
    everything = ",".join(name for name in find_experiments(folder) if name not in SOAKED)

    def pack_often() -> None:
        while not done.wait(PACK_EVERY_S):
            pack_runs(storage, given.out / "runs.tar.xz")

    packer = threading.Thread(target=pack_often, daemon=True)
    packer.start()
    with connect():
        for stage in given.stages or [everything]:
            names, minute, window = (*stage.split(":"), "", "")[:3]
            start_s = time.monotonic()
            left_s = 60 * min(float(minute or given.minutes), given.minutes) - (start_s - began_s)
            if left_s <= 0:
                print(f"{names}: not run, the time is up", flush=True)
                continue
            try:
                asked = names.split(",")
                ran = run_experiments(
                    asked,
                    folder=folder,
                    results=results,
                    storage=str(storage),
                    short=given.short,
                    max_hours=left_s / 3600,
                    measure=({"min_seconds": float(window)} if window else {})
                    | ({"repeats": given.repeats} if given.repeats else {}),
                )
                for name, result in ran.items():
                    for claim in result["claims"]:
                        print(f"{name}: {effect_text(claim)}, expected {claim['expected']}", flush=True)
            except WattuneError as error:
                failed = 1
                print(f"{names}: {error}", flush=True)
            now_s = time.monotonic()
            print(f"{names}: {now_s - start_s:.0f} s, {now_s - began_s:.0f} s in all", flush=True)
            with tarfile.open(given.out / "experiments.tar", "w") as packed:
                for path in sorted(results.glob("*")):
                    packed.add(path, path.name)
    done.set()
    packer.join()
    pack_runs(storage, given.out / "runs.tar.xz")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())

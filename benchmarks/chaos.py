"""Kills processes of running studies at random and looks for anything lost, changed, doubled or left behind.

Each study runs on this machine's CPUs with simulated sensors. While it runs, one process of a kind drawn by the seed is
killed at a time drawn by the seed. Where the command ends early, the same command is run again until the study is
finished. After every kill and at the end the study folder, the tracking store, the processes and the temporary folder
are looked at. Exit code 1 on any breach.

    python benchmarks/chaos.py --kills 20 --seed 1 --out DIR
"""

import argparse
import csv
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from wattune.tracking.store import default_uri
from wattune.tracking.tracker import Tracker

MARK = "WATTUNE_CHAOS"
"""Variable that every process of a study inherits: its value is the study's."""

VICTIMS = {
    "driver": "",
    "worker": "RayTrainWorker",
    "train controller": "TrainController",
    "lane actor": "LaneKeeper",
    "trial driver": "ray::ImplicitFunc",
    "telemetry actor": "TelemetryActor",
    "sampler": "wattune.telemetry.sampler",
    "raylet": "raylet/raylet",
    "gcs": "gcs/gcs_server",
}
"""Kinds of processes, with a text in their command lines."""

SPACE = {
    "model": {
        "name": "llama3_8b",
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 256,
    },
    "cluster": {"device": "cpu", "num_nodes": 1, "devices_per_node": 2, "simulate_sensors_of": "h200_sxm"},
    "engine": "torch",
    "workload": {"mode": "pretrain", "seq_len": 32, "global_batch_size": 8},
    "space": {"micro_batch_size": [1, 2, 4], "sharding": ["none", "zero1"]},
    "measure": {"warmup_steps": 2, "min_steps": 4, "min_seconds": 2},
    "objective": "maximize tokens_per_s",
    "search": {"strategy": "grid"},
}

MOST_CALLS = 6
"""Calls after which a study that is not finished counts as never finishing."""

CALL_S = 600.0
"""Longest that a call may take."""


@dataclass
class Found:
    """Everything that went wrong, by kind."""

    breaches: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def breach(self, kind: str, study: str, what: str) -> None:
        """Notes a breach and prints it at once."""
        self.breaches.append(kind)
        print(f"  BREACH {kind} in {study}: {what}", flush=True)


def own(mark: str) -> list[psutil.Process]:
    """Lists the processes that inherited a study's mark, except this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def victim(kind: str, mark: str, driver: int) -> psutil.Process | None:
    """Finds a living process of a kind."""
    for process in own(mark):
        try:
            words = " ".join(process.cmdline())
            if process.pid == driver if kind == "driver" else process.pid != driver and VICTIMS[kind] in words:
                return process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return None


def final(study: Path) -> dict[str, str]:
    """Returns a digest of every result with a final status: what was acknowledged."""
    digests = {}
    for path in study.glob("trials/*/result.json"):
        content = path.read_bytes()
        if json.loads(content)["status"] not in ("interrupted", "infra_failed"):
            digests[path.parent.name] = hashlib.sha256(content).hexdigest()
    return digests


def left_in(folder: Path) -> list[str]:
    """Lists what a study left in its temporary folder: files, not empty folders.

    Compiled kernels stay on purpose. MLflow keeps an empty lock for each database.
    """
    found = sorted(path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    return [str(path) for path in found if "inductor" not in path.parts and not path.name.startswith("db_init_lock-")]


def run_study(number: int, kind: str, after_s: float, place: Path, found: Found) -> None:
    """Runs a study, kills one process of it, and lets it finish."""
    name = f"chaos{number}"
    mark, study = f"{os.getpid()}-{number}", place / "storage" / name
    temporary = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))
    space = place / f"{name}.yaml"
    space.write_text(yaml.safe_dump({"study": name, **SPACE}))
    environment = os.environ | {MARK: mark, "WATTUNE_STORAGE": str(place / "storage"), "TMPDIR": str(temporary)}
    row: dict[str, Any] = {
        "study": name,
        "victim": kind,
        "after_s": round(after_s, 1),
        "killed": False,
        "recover_s": "",
    }
    calls, kept, killed_s = 0, {}, 0.0
    finished = False
    while not finished and calls < MOST_CALLS:
        calls += 1
        with open(place / f"{name}.{calls}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "wattune", "run", str(space), "--json"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
            )
            begun_s = time.monotonic()
            while process.poll() is None and time.monotonic() - begun_s < CALL_S:
                time.sleep(0.1)
                if not row["killed"] and time.monotonic() - begun_s > after_s:
                    target = victim(kind, mark, process.pid)
                    if target is not None:
                        kept = final(study)
                        target.send_signal(signal.SIGKILL)
                        row["killed"], killed_s = True, time.monotonic()
                elif row["killed"] and row["recover_s"] == "" and final(study).keys() - kept.keys():
                    row["recover_s"] = round(time.monotonic() - killed_s, 1)
            if process.poll() is None:
                found.breach("hangs", name, f"call {calls} after a killed {kind} is not over after {CALL_S:g} s")
                process.kill()
            said = process.communicate()[0].decode()
        now = final(study)
        for trial, digest in kept.items():
            if trial not in now:
                found.breach("lost", name, trial)
            elif now[trial] != digest:
                found.breach("changed", name, trial)
        kept = now
        last = json.loads(said) if said.strip().startswith("{") else {}
        finished = bool(last.get("finished"))
    row |= {"calls": calls, "finished": finished, "trials": len(kept)}
    check_end(name, study, mark, temporary, found, finished=finished)
    found.rows.append(row)
    print(f"{name}: {kind} after {after_s:.1f} s, {row}", flush=True)


def check_end(name: str, study: Path, mark: str, temporary: Path, found: Found, *, finished: bool) -> None:
    """Looks at a study that is over: its trials, its store, and what it left behind."""
    if not finished:
        found.breach("unfinished", name, f"after {MOST_CALLS} calls")
    statuses = Counter(json.loads(path.read_text())["status"] for path in study.glob("trials/*/result.json"))
    if set(statuses) - {"completed"}:
        found.breach("blamed", name, f"no plan is at fault, but: {dict(statuses)}")
    for path in study.glob("trials/*/attempts/*/result.json"):
        if json.loads(path.read_text())["status"] == "completed":
            found.breach("twice", name, str(path.relative_to(study)))
    names = {path.parent.name for path in study.glob("trials/*/result.json")}
    tracked = {f"{trial}-{repeat}" for trial, repeat in Tracker(default_uri(study.parent), name).delivered()}
    if tracked != names:
        found.breach(
            "tracking", name, f"the store lacks {sorted(names - tracked)}, has more: {sorted(tracked - names)}"
        )
    deadline_s = time.monotonic() + 15
    while (alive := own(mark)) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    for process in alive:
        found.breach("left behind", name, f"process {process.pid} {' '.join(process.cmdline())[:100]}")
        process.kill()
    files = left_in(temporary)
    if files:
        found.breach("left behind", name, f"{len(files)} file(s) in the temporary folder, such as {files[:3]}")


def main() -> int:
    """Runs as many studies as kills are asked for; prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0, help="no study begins later than this")
    parser.add_argument("--longest-wait", type=float, default=40.0, help="latest kill after a call's start, seconds")
    parser.add_argument("--victims", nargs="*", choices=list(VICTIMS), default=list(VICTIMS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    drawn, found, begun_s = random.Random(options.seed), Found(), time.monotonic()
    for number in range(options.kills):
        if time.monotonic() - begun_s > 60 * options.minutes:
            break
        kind = options.victims[number % len(options.victims)]
        run_study(number, kind, drawn.uniform(0.5, options.longest_wait), options.out, found)
    print_table(found, options.out)
    return 1 if found.breaches else 0


def print_table(found: Found, out: Path) -> None:
    """Prints kills and times to recover by victim, and all breaches; writes the rows as CSV."""
    if found.rows:
        with open(out / "chaos.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(found.rows[0]))
            writer.writeheader()
            writer.writerows(found.rows)
    by_victim = defaultdict(list)
    for row in found.rows:
        by_victim[row["victim"]].append(row)
    print(f"\n{'victim':<18}{'kills':>6}{'finished':>10}{'calls, most':>13}{'recovered within, s':>21}")
    for kind, rows in by_victim.items():
        took = [row["recover_s"] for row in rows if row["recover_s"] != ""]
        kills, done = sum(row["killed"] for row in rows), sum(row["finished"] for row in rows)
        calls = max(row["calls"] for row in rows)
        print(f"{kind:<18}{kills:>6}{done:>10}{calls:>13}{max(took, default=float('nan')):>21.1f}")
    counts = Counter(found.breaches)
    kinds = ("lost", "changed", "twice", "blamed", "unfinished", "hangs", "tracking", "left behind")
    print("breaches: " + ", ".join(f"{kind} {counts[kind]}" for kind in kinds))


if __name__ == "__main__":
    sys.exit(main())

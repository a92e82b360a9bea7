"""Kills, stops and starves running studies at random and looks for anything lost, changed, doubled or left behind.

Each study runs on this machine's CPUs with simulated sensors, in a disk, a temporary folder and a shared memory of its
own. While it runs it meets hazards drawn by the seed at times drawn by the seed: SIGKILL or SIGSTOP to one of its
processes, a killed server, a full or read-only disk, a wall clock that jumps. Where the command ends early, it is run
again until the study is finished. Then everything is looked at. Exit code 1 on any breach.

    python benchmarks/chaos.py --kills 20 --seed 1 --csv chaos.csv
    python benchmarks/chaos.py --table --csv chaos.csv
    python benchmarks/chaos.py --deaths --csv deaths.csv    # stopped in every order of deaths, in place of hazards

With `--deaths` the first process is killed in the middle of a trial, or nobody, and a second later the command gets its
signal, as from `timeout` or systemd. Exit code 1 where an end took longer than 15 s or left files.
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
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_study import HAZARDS, Place, allowed, find, in_own_namespace, own, tell
from harness import Rows, conditions
from mlflow import MlflowClient

import wattune
from wattune.api.environment import git_commit
from wattune.orchestrate.ray_folder import remove_left
from wattune.storage.study import StudyFolder
from wattune.tracking.copies import Sent
from wattune.tracking.run import TRIAL_TAG, is_whole
from wattune.version import __version__

COLUMNS = ["study", "hazard", "num_before", "hit", "call_s", "held_s", "num_calls", "num_trials"]
COLUMNS += ["finished", "recover_s", "study_s", "breaches", "machine", "version"]
"""Of the table: `study` is seed and number, `num_before` counts the hazards the study met before this one."""

KINDS = ("lost", "changed", "twice", "blamed", "unreadable", "unfinished", "hangs", "not sent", "left behind")
"""Kinds of breaches."""

EXTRA_CALLS = 4
"""Calls beyond one for each hazard, after which a study that is not finished counts as never finishing."""

STILL_S, LATEST_S, NEXT_S, HELD_S = 900.0, 45.0, 8.0, 12.0
"""Longest that a call may go on without a new result (a busy machine takes minutes to start Ray and its workers), to a
call's first hazard (while Ray starts, too), from a recovery to the next hazard, and that a hazard is held."""

ORDERS = ("group", "group SIGHUP", "all", "driver", "gcs", "raylet", "worker", "lane actor", "result maker", "sampler")
"""Orders of deaths: the process group or every process gets the signal, or the driver does, after a kill of another."""

MOST_S, START_S = 15.0, 600.0
"""Longest that a stopped study may take to end, and to start before."""

SYNC_S = 300.0
SETTLED_S = 65.0
"""Age from which the next call removes a cluster's folder that has no owner."""


@dataclass
class Watched:
    """A study under hazards: what it acknowledged, what it met, and what went wrong."""

    place: Place
    label: str
    acknowledged: dict[str, str] = field(default_factory=dict)
    """Digest of every result that was seen with a final status, by trial."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    healed_s: float = 0.0
    """Time the latest hazard was over, until a result shows that the study goes on; 0 while nobody waits for one."""
    known: int = 0
    """Results at that time."""

    def breach(self, kind: str, what: str) -> None:
        """Notes a breach and prints it at once."""
        self.breaches.append(f"{kind}: {what}"[:300])
        print(f"  BREACH {kind} in {self.label}: {what}", flush=True)

    def look(self) -> None:
        """Compares what was acknowledged with what is there, and takes in what is new."""
        found = {}
        for path in self.place.study.glob("trials/*/run.json"):
            try:
                content = path.read_bytes()
                status = json.loads(content)["status"]
            except FileNotFoundError:  # moved to `attempts/` meanwhile
                continue
            except ValueError as error:
                self.breach("unreadable", f"{path.parent.name}: {error}")
                continue
            if status not in ("interrupted", "infra_failed"):
                found[path.parent.name] = hashlib.sha256(content).hexdigest()
        for trial, digest in self.acknowledged.items():
            if found.get(trial, digest) != digest:
                self.breach("changed", trial)
        for trial in self.acknowledged.keys() - found.keys():
            self.breach("lost", trial)
        self.acknowledged = found

    def run(self, hazards: list[str], drawn: random.Random) -> None:
        """Calls the command until the study is finished; the hazards come one after the other meanwhile."""
        waiting = list(hazards)
        most_calls, calls, finished, begun_s = len(hazards) + EXTRA_CALLS, 0, False, time.monotonic()
        while not finished and calls < most_calls:
            calls += 1
            finished = self._call(waiting, drawn, calls)
        self.look()
        for row in self.rows:
            row |= {"num_calls": calls, "num_trials": len(self.acknowledged), "finished": "yes" if finished else "no"}
            row |= {"study_s": round(time.monotonic() - begun_s, 1)}
        if not finished:
            self.breach("unfinished", f"after {calls} calls")

    def _call(self, waiting: list[str], drawn: random.Random, number: int) -> bool:
        """Runs the command once; returns whether the study is finished."""
        begun_s = moved_s = time.monotonic()
        there = self.acknowledged.keys()
        log = self.place.folder / "log.txt"
        process = self.place.start("run", str(self.place.space), log=log)
        next_s, heal_s = begun_s + drawn.uniform(0.5, LATEST_S), 0.0
        with ExitStack() as held:
            while process.poll() is None and time.monotonic() - moved_s < STILL_S:
                time.sleep(0.2)
                now_s = time.monotonic()
                self.look()
                if self.acknowledged.keys() != there:
                    there, moved_s = self.acknowledged.keys(), now_s
                if heal_s and now_s > heal_s:
                    held.close()
                    heal_s, self.healed_s, self.known = 0.0, time.monotonic(), len(self.acknowledged)
                elif self.healed_s and not heal_s and len(self.acknowledged) > self.known:
                    self.rows[-1]["recover_s"] = round(now_s - self.healed_s, 1)
                    self.healed_s, next_s = 0.0, now_s + drawn.uniform(0.2, NEXT_S)
                elif waiting and not heal_s and not self.healed_s and now_s > next_s:
                    hold_s = drawn.uniform(2.0, HELD_S)
                    hit = held.enter_context(self.place.under(waiting[0], process.pid, drawn))
                    if not hit:  # not there yet, or not any more
                        held.close()
                        next_s = now_s + 1.0
                        continue
                    hazard = waiting.pop(0)
                    lasts = hazard.startswith("stop ") or "disk" in hazard or "server" in hazard
                    heal_s = now_s + (hold_s if lasts else 0.0)
                    self.rows.append(
                        dict.fromkeys(COLUMNS, "")
                        | {"study": self.label, "hazard": hazard, "num_before": len(self.rows), "hit": hit}
                        | {"call_s": round(now_s - begun_s, 1), "held_s": round(heal_s - now_s, 1)}
                    )
                    print(f"  {self.label}: {hazard} ({hit}) {now_s - begun_s:.1f} s after call {number}", flush=True)
            if heal_s:  # the call ended first
                held.close()
                self.healed_s, self.known = time.monotonic(), len(self.acknowledged)
        if process.poll() is None:
            self.breach("hangs", f"call {number} has no new result after {STILL_S:g} s")
            process.kill()
        said = process.communicate(timeout=60)[0].decode(errors="replace")
        self.look()
        try:
            return bool(json.loads(said)["finished"])
        except (ValueError, KeyError):
            return False

    def check(self) -> None:
        """Looks at a study that is over: its trials, its copies elsewhere, and what it left behind."""
        study = self.place.study
        statuses = Counter(json.loads(path.read_text())["status"] for path in study.glob("trials/*/run.json"))
        if set(statuses) - {"completed"}:
            self.breach("blamed", f"no plan is at fault, but: {dict(statuses)}")
        for name, reason in StudyFolder(study).finished()[1].items():
            self.breach("unreadable", f"{name}: {reason}")
        for path in study.glob("trials/*/attempts/*/run.json"):
            if json.loads(path.read_text())["status"] == "completed":
                self.breach("twice", str(path.relative_to(study)))
        if self.place.servers:
            self._sync()
        self._check_copies({path.parent.name for path in study.glob("trials/*/run.json")})
        for process in self.place.remaining():
            self.breach("left behind", f"process {process.pid} {' '.join(process.cmdline())[:100]}")
        left = self.place.left()
        if left:  # Ray may write a last file after its end; the next call removes it, once it is not new
            time.sleep(SETTLED_S)
            remove_left(self.place.temporary / f"wattune-{os.getuid()}")
            left = self.place.left()
        if left:
            self.breach("left behind", f"{len(left)} file(s) and folder(s), such as {left[:4]}")

    def _sync(self) -> None:
        process = self.place.start("sync", self.place.name, log=self.place.folder / "log.txt")
        try:
            process.communicate(timeout=SYNC_S)
        except subprocess.TimeoutExpired:
            process.kill()
            self.breach("hangs", f"sync is not over after {SYNC_S:g} s")
        if code := process.wait(60):
            self.breach("not sent", f"sync ended with exit code {code}")

    def _check_copies(self, names: set[str]) -> None:
        """Compares the tracking store, and the storage where there is one, with the study's trials."""
        client = MlflowClient(self.place.tracking_uri())
        experiments = [one.experiment_id for one in client.search_experiments()]
        every = client.search_runs(experiments, max_results=1000)
        runs = [run for run in every if is_whole(run) and Sent.of_run(run).final]
        sent = Counter(run.data.tags[TRIAL_TAG] for run in runs if TRIAL_TAG in run.data.tags)
        if set(sent) != names:
            self.breach("not sent", f"runs lacking {sorted(names - set(sent))}, unknown {sorted(set(sent) - names)}")
        for name, count in sent.items():
            if count > 1:
                self.breach("twice", f"{count} runs of {name}")
        server = self.place.servers.get("storage server")
        if server is not None:
            there = {one.key: one.get()["Body"].read() for one in server.bucket().objects.all()}
            for name in names:
                path = f"{self.place.name}/trials/{name}/run.json"
                if there.get(f"here/{path}") != (self.place.study / "trials" / name / "run.json").read_bytes():
                    self.breach("not sent", f"the storage's {path} is missing or another")


def drawn_hazards(seed: int, kinds: list[str], count: int) -> list[str]:
    """Draws hazards so that each kind comes once before any comes again."""
    drawn, order = random.Random(seed), list[str]()
    while len(order) < count:
        order += drawn.sample(kinds, len(kinds))
    return order[:count]


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Appends rows to the table, made with its heading if need be."""
    fresh = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    """Reads the table; empty where there is none.

    Raises:
        SystemExit: The file has other columns.
    """
    if not path.exists():
        return []
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != COLUMNS:
            sys.exit(f"{path} has columns {reader.fieldnames}, expected {COLUMNS}; give --csv another file")
        return list(reader)


def show(rows: list[dict[str, str]]) -> int:
    """Prints hazards and times to recover by kind, and all breaches; returns the number of breaches."""
    by_hazard = defaultdict(list)
    for row in rows:
        by_hazard[row["hazard"]].append(row)
    print("| hazard | times | time to recover, median s | longest s | breaches |\n|---|---|---|---|---|")
    for hazard in sorted(by_hazard, key=[*HAZARDS, *sorted(by_hazard)].index):  # some are of processes that are no more
        took = sorted(float(row["recover_s"]) for row in by_hazard[hazard] if row["recover_s"])
        figures = f"{took[len(took) // 2]:.0f} | {took[-1]:.0f}" if took else "- | -"
        broken = sum(row["breaches"] != "none" for row in by_hazard[hazard])
        print(f"| {hazard} | {len(by_hazard[hazard])} | {figures} | {broken} |")
    found = {(row["study"], one) for row in rows for one in row["breaches"].split("; ") if one != "none"}
    counts = Counter(one.partition(":")[0] for _, one in found)
    print(f"\n{len(rows)} hazards in {len({row['study'] for row in rows})} studies: ", end="")
    print(", ".join(f"{kind} {counts[kind]}" for kind in KINDS))
    return len(found)


def stop(order: str, folder: Path) -> tuple[Any, ...]:
    """Runs a study, stops it in the middle of a trial, and returns a row of the table."""
    number = signal.SIGHUP if "SIGHUP" in order else signal.SIGTERM
    place = Place(folder, f"death{ORDERS.index(order)}", (), measure={"min_seconds": 120})
    log = place.folder / "log.txt"
    process = place.start("run", str(place.space), log=log, start_new_session=True)
    try:
        started_s = time.monotonic()
        while not (find("worker", place.mark, process.pid) and find("sampler", place.mark, process.pid)):
            if time.monotonic() - started_s > START_S:
                sys.exit(f"the study did not start within {START_S:g} s: {log.read_text()[-2000:]}")
            if process.poll() is not None:  # Ray does not start on a machine that is too busy
                process = place.start("run", str(place.space), log=log, start_new_session=True)
            time.sleep(0.3)
        time.sleep(3)
        if order in ("gcs", "raylet", "worker", "lane actor", "result maker", "sampler"):
            find(order, place.mark, process.pid)[0].kill()
            time.sleep(1)
        stopped_s = time.monotonic()
        if order.startswith("group"):
            os.killpg(process.pid, number)
        elif order == "all":
            tell(own(place.mark), number)
        else:
            process.send_signal(number)
        code = process.wait(300)
        driver_s = time.monotonic() - stopped_s
        while own(place.mark) and time.monotonic() - stopped_s < 300:
            time.sleep(0.1)
        all_s = time.monotonic() - stopped_s
        left, said = place.left(), log.read_text().splitlines()
        remove_left(place.temporary / f"wattune-{os.getuid()}")  # as every call does before it starts Ray
        remains = place.left()
    finally:
        process.kill()
        process.communicate(timeout=60)
        place.close(keep=False)
    remaining = ["; ".join(one[:4]) or "none" for one in (left, remains)]
    row = (order, number.name, round(driver_s, 1), round(all_s, 1), f"exit {code}", *remaining)
    print(row, "said:", said[-1:], file=sys.stderr, flush=True)
    return row


def deaths(orders: Sequence[str], table: Path) -> int:
    """Stops a study in each order; writes and prints a row of each; returns 1 where one ends late or leaves files."""
    rows = Rows("order", "signal", "driver_s", "all_s", "exit_code", "left", "left_after_next")
    with tempfile.TemporaryDirectory(prefix="deaths", ignore_cleanup_errors=True) as scratch:
        for order in orders:
            rows.add(*stop(order, Path(scratch)))
            rows.write(table)
    print(rows.markdown())
    return int(any(max(row[2:4]) > MOST_S or row[-1] != "none" for row in rows.cells))


def main() -> int:
    """Runs as many studies as it takes for the hazards asked for; writes and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="hazards to meet, those in --csv with this seed counted")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each", type=int, default=4, help="hazards that one study meets")
    parser.add_argument("--hazards", nargs="*", choices=HAZARDS, default=list(HAZARDS), metavar="HAZARD")
    parser.add_argument("--csv", type=Path, required=True, help="table that rows are appended to")
    parser.add_argument("--out", type=Path, help="folder that keeps the files of studies with a breach")
    parser.add_argument("--table", action="store_true", help="only print what --csv holds")
    parser.add_argument("--deaths", nargs="*", choices=ORDERS, metavar="ORDER", help="orders of deaths (all)")
    options = parser.parse_args()
    print(conditions(), "claim: whatever is killed, stopped or starved, a study loses nothing and ends; bar: no breach")
    before = [] if options.deaths is not None else read(options.csv)
    if options.table:
        return 1 if show(before) else 0
    in_own_namespace()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started and mounted is ended all the same
    if options.deaths is not None:
        return deaths(options.deaths or ORDERS, options.csv)
    refused = allowed()
    for hazard in options.hazards:
        if hazard in refused:
            print(f"left out: {hazard}, which {refused[hazard]}")
    hazards = drawn_hazards(options.seed, [one for one in options.hazards if one not in refused], options.kills)
    done = {row["study"] for row in before}
    for number in range(0, options.kills, options.each):
        label = f"{options.seed}-{number // options.each}"
        if label in done:
            continue
        with tempfile.TemporaryDirectory(prefix="chaos", ignore_cleanup_errors=True) as scratch:
            rows = met(label, hazards[number : number + options.each], options.out or Path(scratch))
        append(options.csv, rows)
    return 1 if show([row for row in read(options.csv) if row["study"].startswith(f"{options.seed}-")]) else 0


def met(label: str, hazards: list[str], folder: Path) -> list[dict[str, Any]]:
    """Runs one study to its end under hazards; returns a row for each that it met."""
    place = Place(folder.resolve(), f"chaos{label}", hazards)
    watched = Watched(place, label)
    try:
        watched.run(hazards, random.Random(label))
        watched.check()
    finally:
        place.close(keep=bool(watched.breaches))
    if watched.breaches and not watched.rows:
        watched.rows.append(dict.fromkeys(COLUMNS, "") | {"study": label, "hazard": hazards[0], "num_before": 0})
    version = f"{__version__} {git_commit(Path(wattune.__file__).parent)[:8]}".strip()
    for row in watched.rows:
        row |= {"machine": f"{os.cpu_count()} processors", "version": version}
        row["breaches"] = "; ".join(watched.breaches) or "none"
    print(f"{label}: {len(watched.rows)} of {hazards}, {watched.rows[-1] if watched.rows else 'none met'}", flush=True)
    return watched.rows


if __name__ == "__main__":
    sys.exit(main())

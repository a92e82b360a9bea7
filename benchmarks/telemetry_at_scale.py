"""Measures the cost of many nodes' telemetry to the head: bytes, processor and latency per node and second, and slopes.

    python benchmarks/telemetry_at_scale.py [--json]     # prints the rows of benchmarks/results/telemetry_at_scale.md

Up to twelve raylets of one cluster on this machine, each a node with a telemetry actor and a sampler at default tiers
on the replay backend: four H200s (tests/golden/h200x4/dp4), and the host's counters. Nothing is faked on the way: the
actors, samplers, files and tables are those of a trial. At the head (its raylet, the control store and the study's
driver) it is measured, with each number of nodes,

- what its connections carry and its processes compute while nothing is sampled, and while all nodes sample;
- how long a node's actor takes to answer, as for its clock offset;
- what it takes to bring a trial's tables home.

Samplers write to their own node: while a trial runs the head should carry no more with sampling than without.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a cluster for some minutes, without users
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("REPORTER_UPDATE_INTERVAL_MS", "3600000")

import ray
from ray.cluster_utils import Cluster as Raylets

from wattune.orchestrate.cluster import alive_nodes, connect
from wattune.orchestrate.telemetry_actor import telemetry_actor

ROOT: Final = Path(__file__).parent.parent
RECORDED: Final = ROOT / "tests/golden/h200x4/dp4/telemetry/node0"
NUM_NODES: Final = (1, 2, 4, 8, 12)
SETTLE_S: Final = 6.0
"""After nodes and actors have started: what they were sent for it is not what they cost."""
IDLE_S: Final = 8.0
SAMPLING_S: Final = 10.0
KEY: Final = "scale"
PROJECTED: Final = 1000


class Head:
    """The processes of the head, and what they have carried and computed so far."""

    def __init__(self, pids: Sequence[int]) -> None:
        """Names the processes.

        Args:
            pids: Of the head's Ray and of the driver.
        """
        self._processes = [psutil.Process(pid) for pid in pids]

    def used(self) -> tuple[dict[str, int], float]:
        """Bytes in and out by connection, and processor seconds, since they began."""
        listed = subprocess.run(["ss", "-tinpOH"], capture_output=True, text=True, check=True).stdout
        pids = {process.pid for process in self._processes}
        carried = {}
        for line in listed.splitlines():
            owner = re.search(r"pid=(\d+)", line)
            if owner and int(owner[1]) in pids:
                counts = re.findall(r"bytes_(?:sent|received):(\d+)", line)
                carried[" ".join(line.split()[:5])] = sum(map(int, counts))
        cpu_s = sum(sum(process.cpu_times()[:2]) for process in self._processes if process.is_running())
        return carried, cpu_s

    def over(self, seconds: float) -> tuple[float, float]:
        """Bytes per second and processors in use, over the next seconds."""
        (before, cpu_s), begun_s = self.used(), time.monotonic()
        time.sleep(seconds)
        (after, later_cpu_s), elapsed_s = self.used(), time.monotonic() - begun_s
        carried = sum(max(0, count - before.get(name, 0)) for name, count in after.items())
        return carried / elapsed_s, (later_cpu_s - cpu_s) / elapsed_s


def measure(head: Head, actors: Sequence[Any]) -> dict[str, float]:
    """Everything about one number of nodes."""
    time.sleep(SETTLE_S)
    idle_bytes_per_s, idle_cpus = head.over(IDLE_S)
    begun_s = time.monotonic()
    ray.get([actor.start.remote(KEY) for actor in actors], timeout=300)
    start_s = time.monotonic() - begun_s
    sampling_bytes_per_s, sampling_cpus = head.over(SAMPLING_S)
    latency_s = []
    for _ in range(20):
        for actor in actors:
            asked_s = time.perf_counter()
            ray.get(actor.wall_ns.remote())
            latency_s.append(time.perf_counter() - asked_s)
    (before, cpu_s), begun_s = head.used(), time.monotonic()
    recorded = ray.get([actor.stop.remote(KEY) for actor in actors], timeout=300)
    stop_s = time.monotonic() - begun_s
    after, later_cpu_s = head.used()
    ray.get([actor.forget.remote(KEY) for actor in actors])
    rows = [sum(table.num_rows for table in part.tables.values()) for part in recorded]
    recorded_s = [span_s(part.tables) for part in recorded]
    missed = sum(tier["missed_ticks"] for part in recorded for tier in part.manifest["tiers"].values())
    taken = sum(tier["ticks"] for part in recorded for tier in part.manifest["tiers"].values())
    return {
        "num_nodes": len(actors),
        "idle_bytes_per_s": idle_bytes_per_s,
        "sampling_bytes_per_s": sampling_bytes_per_s,
        "idle_cpus": idle_cpus,
        "sampling_cpus": sampling_cpus,
        "latency_median_s": float(np.median(latency_s)),
        "latency_p95_s": float(np.quantile(latency_s, 0.95)),
        "start_s": start_s,
        "home_bytes": float(sum(max(0, count - before.get(name, 0)) for name, count in after.items())),
        "home_cpu_s": later_cpu_s - cpu_s,
        "home_s": stop_s,
        "table_bytes": float(sum(table.nbytes for part in recorded for table in part.tables.values())),
        "rows_per_node": float(np.mean(rows)),
        "recorded_s": float(np.mean(recorded_s)),
        "missed_ticks_frac": missed / (missed + taken),
    }


def span_s(tables: Any) -> float:
    """From the first to the last reading of a node."""
    stamps = [table["mono_ns"].to_numpy() for table in tables.values() if table.num_rows]
    return float(max(one.max() for one in stamps) - min(one.min() for one in stamps)) / 1e9


def slope(rows: Sequence[dict[str, float]], name: str) -> tuple[float, float]:
    """Least-squares slope of a figure per node, and its standard error."""
    x = np.array([row["num_nodes"] for row in rows])
    y = np.array([row[name] for row in rows])
    (gradient, _), covariance = np.polyfit(x, y, 1, cov=True)
    return float(gradient), float(np.sqrt(covariance[0, 0]))


def run() -> list[dict[str, float]]:
    """Measures with a growing cluster."""
    rows = []
    with ExitStack() as stack:
        folders = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="w")))
        raylets = Raylets(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        stack.callback(raylets.shutdown)
        cluster = stack.enter_context(connect(raylets.address))
        on_head = [info.process.pid for kind in raylets.head_node.all_processes.values() for info in kind]
        head = Head([*on_head, os.getpid()])
        head_id = cluster.driver_node_id
        actors: dict[str, Any] = {}
        for wanted in NUM_NODES:
            while len(raylets.worker_nodes) < wanted:
                runtime = folders / f"runtime{len(raylets.worker_nodes)}"
                runtime.mkdir(mode=0o700)
                # The recorded devices are the same on every node, and have a lock each on a machine.
                raylets.add_node(num_cpus=1, env_vars={"WATTUNE_RUNTIME": str(runtime)}, wait=False)
            raylets.wait_for_nodes(timeout=120)
            nodes = [node for node in alive_nodes(cluster.nodes) if node.node_id != head_id]
            for node in nodes:
                if node.node_id not in actors:  # an actor whose handle is let go of ends
                    actors[node.node_id] = telemetry_actor(node, ["host", f"replay:{RECORDED.parent.parent}"])
            ray.get([actor.wall_ns.remote() for actor in actors.values()], timeout=300)
            rows.append(measure(head, list(actors.values())))
            print(f"{wanted} nodes measured", file=sys.stderr)
    return rows


def show(rows: Sequence[dict[str, float]]) -> None:
    """Prints the table, the slopes and what they come to."""
    print("| nodes | idle | sampling | idle | sampling | answer, median | p95 | tables home | in | ticks missed |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['num_nodes']:.0f} | {row['idle_bytes_per_s'] / 1e3:.1f} kB/s | "
            f"{row['sampling_bytes_per_s'] / 1e3:.1f} kB/s | "
            f"{row['idle_cpus']:.3f} CPU | {row['sampling_cpus']:.3f} CPU | "
            f"{row['latency_median_s'] * 1e3:.1f} ms | {row['latency_p95_s'] * 1e3:.1f} ms | "
            f"{row['home_bytes'] / 1e6:.2f} MB | {row['home_s']:.1f} s | {row['missed_ticks_frac']:.4f} |"
        )
    print("\n| per node | slope | standard error | at 1,000 nodes |")
    print("|---|---|---|---|")
    for row in rows:
        row["added_bytes_per_s"] = row["sampling_bytes_per_s"] - row["idle_bytes_per_s"]
        row["added_cpus"] = row["sampling_cpus"] - row["idle_cpus"]
    for name, text, scale, unit in (
        ("idle_bytes_per_s", "carried by the head, idle", 1e3, "kB/s"),
        ("added_bytes_per_s", "more while sampling", 1e3, "kB/s"),
        ("idle_cpus", "computed by the head, idle", 1, "CPU"),
        ("added_cpus", "more while sampling", 1, "CPU"),
        ("latency_median_s", "answer of an actor", 1e-3, "ms"),
        ("home_bytes", f"tables of {rows[-1]['recorded_s']:.0f} s brought home", 1e6, "MB"),
        ("home_cpu_s", "processor time of the head for them", 1, "s"),
    ):
        gradient, error = slope(rows, name)
        print(
            f"| {text} | {gradient / scale:.4g} {unit} | {error / scale:.2g} {unit} | "
            f"{PROJECTED * gradient / scale:.4g} {unit} |"
        )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = run()
    if arguments.json:
        print(json.dumps({"nodes": rows}))
    else:
        show(rows)


if __name__ == "__main__":
    main()

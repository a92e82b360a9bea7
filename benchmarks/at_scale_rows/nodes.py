"""Nodes: what the analysis of a trial and its telemetry cost as its nodes grow in number."""

import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from at_scale_rows import Fit, Row, measures
from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.orchestrate.telemetry_actor import NodeTelemetry, TelemetryActor
from wattune.plans.axes import Plan
from wattune.schema import SPANS
from wattune.simulation.sensors import simulate
from wattune.storage.study import TrialFolder
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S
from wattune.workload import Workload

NODES: Final = (8, 32, 128)
PER_NODE: Final = 8
STEPS, WARM = 30, 3
PHASES: Final = {
    "step": (0, 1),
    "forward": (0, 0.3),
    "backward": (0.3, 0.85),
    "wait": (0.85, 0.9),
    "optimizer": (0.9, 1),
}
TRIALS_AN_HOUR: Final = 60
MOST_MB_AN_HOUR, MOST_CPU_S = 50.0, 45.0
RECORDING: Final = Path(__file__).parents[2] / "tests" / "golden" / "h200x4" / "dp4"
CPU_S: Final = """
import sys, time
from pathlib import Path
from wattune.analysis.run_data import RunData
from wattune.analysis.summary import summarize

summarize(RunData.of(Path(sys.argv[1])))  # libraries are loaded, and files are in memory
begun_s = time.process_time()
assert summarize(RunData.of(Path(sys.argv[2]))).metrics["cluster_device_power_peak_1s_w"] > 0
print(time.process_time() - begun_s)
"""


def spans(num_nodes: int) -> pa.Table:
    """Equal steps of a second with their phases, one rank a device."""
    sizes = (num_nodes * PER_NODE, STEPS + WARM, len(PHASES))
    rank, step, phase = (each.ravel() for each in np.indices(sizes))
    start, end = (np.array(each) for each in zip(*PHASES.values(), strict=True))
    start_ns, end_ns = (((step + 5000 + share[phase] * 0.999) * NS_PER_S).astype(np.int64) for share in (start, end))
    named = {
        "node": (rank // PER_NODE, [f"node{number:03}" for number in range(num_nodes)]),
        "device": (rank % PER_NODE, [f"gpu{number}" for number in range(PER_NODE)]),
        "phase": (phase, list(PHASES)),
    }
    wall_ns = 1_795_000_000 * NS_PER_S
    columns = {
        **{
            name: pa.DictionaryArray.from_arrays(index.astype(np.int32), names)
            for name, (index, names) in named.items()
        },
        "rank": rank.astype(np.int32),
        "step": (step - WARM).astype(np.int32),
        "start_mono_ns": start_ns,
        "end_mono_ns": end_ns,
        "start_wall_ns": start_ns + wall_ns,
        "end_wall_ns": end_ns + wall_ns,
    }
    rows = len(rank)
    return pa.table([columns.get(one.name, pa.nulls(rows, one.type)) for one in SPANS], schema=SPANS)


def write_trial(folder: Path, num_nodes: int) -> None:
    """Writes a trial of simulated H200s, eight a node."""
    cluster = ClusterSpec(device="h200_sxm", num_nodes=num_nodes, devices_per_node=PER_NODE)
    workload = Workload(seq_len=4096, global_batch_size=num_nodes * PER_NODE * 2)
    plan = Plan(micro_batch_size=2, sharding="zero1")
    spec = TrialSpec(model=model("llama3_8b"), cluster=cluster, engine="torch", workload=workload, plan=plan)
    trial, own = TrialFolder(folder), spans(num_nodes)
    trial.write_spec(spec)
    trial.write_spans(own)
    for node, (tables, manifest) in simulate(spec, own, seed=0).items():
        trial.write_telemetry(node, tables, manifest)


def cpu_s(warm: Path, folder: Path) -> float:
    """Analyses a trial in a process of its own."""
    done = subprocess.run([sys.executable, "-c", CPU_S, warm, folder], capture_output=True, text=True, check=True)
    return float(done.stdout)


@measures(timeout_s=500)
def analysis() -> Iterator[Row]:
    """Analyses trials of more and more nodes from their files."""
    with tempfile.TemporaryDirectory() as root:
        write_trial(Path(root) / "warm", 1)
        took_s = []
        for number in NODES:
            write_trial(Path(root) / str(number), number)
            each = [cpu_s(Path(root) / "warm", Path(root) / str(number)) for _ in range(3)]
            took_s.append(min(each))
        ranks = NODES[-1] * PER_NODE
        spread_s = max(each) - min(each)
        yield Row(f"analysis of {ranks:,} ranks, CPU", "s", bar=MOST_CPU_S, value=took_s[-1], spread=spread_s)
        yield Fit.of([number * PER_NODE for number in NODES], took_s).row("CPU of the analysis against ranks", 1.15)


@measures(timeout_s=120)
def telemetry() -> Iterator[Row]:
    """Records the replay of four H200s as a trial's node does, and weighs what goes to the driver."""
    actor = TelemetryActor("at-scale", "n0", [f"replay:{RECORDING}?start_s=20"])
    with tempfile.TemporaryDirectory() as root:
        try:
            actor.start("trial")
            actor.ready("trial")
            time.sleep(10)
            actor.stop("trial")
            (mark := Path(root) / ".seen").touch()
            seen, unseen = (actor.recording("trial", one) for one in (mark, Path(root) / "not there"))
        finally:
            actor.release()

    def mb_an_hour(told: NodeTelemetry) -> float:
        return 128 * TRIALS_AN_HOUR * len(pickle.dumps(told)) / 1e6

    each = f"telemetry of 128 nodes at the driver, {TRIALS_AN_HOUR} trials an hour"
    yield Row(each, "MB/h", bar=MOST_MB_AN_HOUR, value=mb_an_hour(seen))
    yield Row(f"{each}, their rows of 10 s with it where nodes share no folder", "MB/h", value=mb_an_hour(unseen))

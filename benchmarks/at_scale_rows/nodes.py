"""Nodes: what the analysis of a trial and its telemetry cost as its nodes grow in number."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import ray

from at_scale_rows import Fit, Row, measures
from wattune.analysis.summary import Summary
from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.clock import ClockAnchor
from wattune.orchestrate import run_trial
from wattune.orchestrate.ask import on_node
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import connect
from wattune.orchestrate.lanes.messages import Answer, Place
from wattune.orchestrate.ray_settings import normal_priority
from wattune.orchestrate.telemetry_actor import NodeTelemetry, TelemetryActor
from wattune.orchestrate.trial_telemetry import TrialTelemetry
from wattune.plans.axes import Plan
from wattune.run import RunStatus
from wattune.schema import SPANS
from wattune.simulation.sensors import simulate
from wattune.storage.study import TrialFolder
from wattune.trial import Measure, TrialSpec
from wattune.units import NS_PER_S
from wattune.workers.outcome import RankOutcome
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


def write_trial(folder: Path, num_nodes: int) -> TrialSpec:
    """Writes a trial of simulated H200s, eight a node, and returns its specification."""
    cluster = ClusterSpec(device="h200_sxm", num_nodes=num_nodes, devices_per_node=PER_NODE)
    workload = Workload(seq_len=4096, global_batch_size=num_nodes * PER_NODE * 2)
    plan = Plan(micro_batch_size=2, sharding="zero1")
    spec = TrialSpec(model=model("llama3_8b"), cluster=cluster, engine="torch", workload=workload, plan=plan)
    trial, own = TrialFolder(folder), spans(num_nodes)
    trial.write_spec(spec)
    trial.write_spans(own)
    for node, (tables, manifest) in simulate(spec, own, seed=0).items():
        trial.write_telemetry(node, tables, manifest)
    return spec


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


class Beside(TrialTelemetry):
    """A trial's sensors, whose nodes work at normal priority: this machine has other work."""

    def beside(self, on: Callable[[Path], Summary], folder: Path) -> Summary:
        """Does work in another process, as on a node."""
        return ray.get(ray.remote(do).options(num_cpus=0).remote(on, folder))


def do(on: Callable[[Path], Summary], folder: Path) -> Summary:
    """Does a piece of work."""
    normal_priority()
    return on(folder)


class Nodes:
    """A process in the place of all nodes: posts that hold spans, and sensors whose files are in the folder."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder, self.spans = folder, spans(num_nodes)

    def tables(self, node: int) -> list[Any]:
        """References to what the post of a node holds."""
        rows = self.spans.num_rows // (self.spans["rank"][-1].as_py() + 1) * PER_NODE
        return [ray.put(([], [(self.spans.slice(node * rows, rows), None)]))]

    def recording(self, node: str) -> NodeTelemetry:
        """Returns what a node says of the files that it has written to the folder."""
        own = self.folder / "telemetry" / node
        manifest = json.loads((own / "manifest.json").read_bytes())
        files = {path: sha256(path.read_bytes()).hexdigest() for path in own.glob("*.parquet")}
        digests = {path.relative_to(self.folder).as_posix(): digest for path, digest in files.items()}
        return NodeTelemetry(node=node, manifest=manifest, losses=(), digests=digests)

    def forget(self) -> None:
        """Forgets nothing."""


@measures(timeout_s=580)
def head() -> Iterator[Row]:
    """Makes the result of a trial of 1,024 ranks, whose rows one of the nodes reads: the head's share of it."""
    num_nodes = NODES[-1]
    with tempfile.TemporaryDirectory() as root, connect() as real:
        made = Path(root) / "study" / "trials" / "made"
        spec = write_trial(made, num_nodes)
        named = [f"node{number:03}" for number in range(num_nodes)]
        nodes = [replace(real.nodes[0], name=name) for name in named]  # Ray has one node here, which does the work
        folder = made.rename(made.with_name(f"{spec.trial_id}-0"))
        process = on_node(Nodes, real.driver_node_id).remote(folder, num_nodes)
        held = [ref for one in ray.get([process.tables.remote(at) for at in range(num_nodes)]) for ref in one]
        places = [
            Place(rank=at, node=named[at // PER_NODE], slot=at % PER_NODE, device=f"gpu{at % PER_NODE}",
                  device_uuid=None, pid=at) for at in range(num_nodes * PER_NODE)
        ]  # fmt: skip
        facts = {f"version.library_{number}": "1.0" for number in range(30)}
        outcomes = [
            RankOutcome(rank=place.rank, status=RunStatus.COMPLETED, provenance=facts, build_time_s=1.0)
            for place in places
        ]
        answer = Answer(outcomes=tuple(outcomes), places=tuple(places), held=tuple(held))
        asked: Any = {
            node: SimpleNamespace(
                recording=SimpleNamespace(remote=lambda *_, name=node.name: process.recording.remote(name)),
                forget=SimpleNamespace(remote=lambda _: process.forget.remote()),
            )
            for node in nodes
        }
        attempt = Attempt(spec=spec, repeat=0, measure=Measure(), nodes=tuple(nodes), folder=folder)
        each_s = []
        for _ in range(2):
            sensed = Beside(key="key", sensed={}, node_power_w=dict, actors=asked)
            course = run_trial._Course(nodes=real, telemetry=sensed, answer=answer)
            begun_s = time.process_time()
            run_trial._conclude(attempt, course, ClockAnchor.now(), None)
            each_s.append(time.process_time() - begun_s)
            result = TrialFolder(folder).result()
            assert result is not None and result.metrics["cluster_device_power_peak_1s_w"] > 0
            (folder / "run.json").unlink()
    what = f"result of a trial of {num_nodes * PER_NODE:,} ranks, the head's CPU"
    yield Row(what, "CPU-s", bar=1.0, value=min(each_s), spread=max(each_s) - min(each_s))


@contextmanager
def s3_server() -> Iterator[str]:
    """An S3 server of this process, and the URL of a storage there."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="studies")
    try:
        yield "s3://studies/group"
    finally:
        server.stop()


@measures(timeout_s=120)
def telemetry() -> Iterator[Row]:
    """Records the replay of four H200s as a trial's node does, and weighs what goes to the driver."""
    actor = TelemetryActor("at-scale", "n0", [f"replay:{RECORDING}?start_s=20"])
    with tempfile.TemporaryDirectory() as root, s3_server() as url:
        try:
            actor.start("trial")
            actor.ready("trial")
            time.sleep(10)
            actor.stop("trial")
            (mark := Path(root) / ".seen").touch()
            seen, unseen = (actor.recording("trial", one) for one in (mark, Path(root) / "not there"))
            sent = actor.recording("trial", Path(root) / "study" / "trials" / "a" / "not there", None, url)
            assert sent.sent and not sent.unsent
        finally:
            actor.release()

    def mb_an_hour(told: NodeTelemetry) -> float:
        return 128 * TRIALS_AN_HOUR * len(pickle.dumps(told)) / 1e6

    each = f"telemetry of 128 nodes at the driver, {TRIALS_AN_HOUR} trials an hour"
    yield Row(each, "MB/h", bar=MOST_MB_AN_HOUR, value=mb_an_hour(seen))
    yield Row(f"{each}, which send their rows to a URL", "MB/h", bar=MOST_MB_AN_HOUR, value=mb_an_hour(sent))
    yield Row(f"{each}, their rows of 10 s with it where nodes share no folder", "MB/h", value=mb_an_hour(unseen))

"""Lanes: what a trial costs beside its steps as its ranks grow in number."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import psutil
import ray
from fake_ranks import PER_NODE, fake_cluster, fake_nodes
from trial_overhead import MODEL

from at_scale_rows import Fit, Row, measures
from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Cluster
from wattune.orchestrate.lanes.actor import DONE_METRIC
from wattune.orchestrate.lanes.client import Lanes
from wattune.plans.axes import Plan
from wattune.run import RunStatus
from wattune.storage.study import TrialFolder
from wattune.trial import Measure, TrialSpec
from wattune.workload import Workload

RANKS: Final = (8, 32, 128, 512, 1024, 4096)
MANY: Final = (1, 8, 32, 100)
"""Lanes that start at a time."""
TRIALS: Final = 5


def attempt_of(num_ranks: int) -> Attempt:
    """A trial on so many devices, eight a node."""
    num_nodes = num_ranks // PER_NODE
    cluster = ClusterSpec(device="cpu", num_nodes=num_nodes, devices_per_node=PER_NODE)
    workload = Workload(seq_len=128, global_batch_size=num_ranks)
    spec = TrialSpec(model=MODEL, cluster=cluster, engine="torch", workload=workload, plan=Plan(dtype="fp32"))
    return Attempt(spec=spec, repeat=0, measure=Measure(), nodes=fake_nodes(num_nodes))


def process(text: str) -> psutil.Process:
    """Returns the process of this program with a text in its name, once it has started."""
    while True:
        for one in psutil.Process().children(recursive=True):
            if text in " ".join(one.cmdline()):
                return one
        time.sleep(0.5)


def spent_s(text: str) -> float:
    """Processor seconds so far of this program's processes with a text in their names."""
    found = [one for one in psutil.Process().children(recursive=True) if text in " ".join(one.cmdline())]
    return sum(sum(one.cpu_times()[:2]) for one in found)


def overhead_s(cluster: Cluster, lanes: Lanes, root: Path, num_ranks: int, repeat: int) -> tuple[float, ...]:
    """Wall seconds of a trial without steps, until its nodes are free; processor seconds of its driver and its nodes.

    And the calls that its driver answers.
    """
    given = attempt_of(num_ranks)
    nodes, name = cluster.nodes[: num_ranks // PER_NODE], f"{given.trial_id}-{repeat}"
    attempt = replace(given, repeat=repeat, nodes=nodes, folder=root / "study" / "trials" / name)
    num_before = ray.get(lanes._keeper.taken.remote())
    before, begun_s = [spent_s(text) for text in ("FakeKeeper", "::Host")], time.perf_counter()
    is_done = ray.get(lanes.drive(attempt, cluster))[DONE_METRIC]
    taken_s = time.perf_counter() - begun_s
    work_s = [spent_s(text) - one_s for text, one_s in zip(("FakeKeeper", "::Host"), before, strict=True)]
    num_calls = ray.get(lanes._keeper.taken.remote()) - num_before
    if is_done:
        result = TrialFolder(attempt.folder).result()
        assert result is not None and result.status is RunStatus.COMPLETED, (
            result and f"{result.status}: {result.reason}"
        )
    else:
        ray.get(lanes.concluded(attempt))
    return taken_s, *work_s, num_calls


@measures(timeout_s=580)
def overhead() -> Iterator[Row]:
    """Cost of a whole trial beside its steps, against its ranks: driver, messages and folder are real."""
    wall_s: dict[int, float] = {}
    processor_s: dict[int, float] = {}
    sizes = RANKS[:-1]
    with TemporaryDirectory() as folder, fake_cluster(sizes[-1] // PER_NODE, Path(folder)) as (cluster, lanes, hosts):
        ray.get([host.release.remote() for host in hosts])
        for num_ranks in sizes:
            each = [overhead_s(cluster, lanes, Path(folder), num_ranks, repeat) for repeat in range(4)][1:]
            walls, processors, nodes_s, calls = zip(*each, strict=True)
            wall_s[num_ranks], processor_s[num_ranks] = min(walls), statistics.median(processors)
            what = f"trial of {num_ranks} ranks"
            yield Row(f"overhead of a {what}", "s", value=min(walls), spread=statistics.stdev(walls))
            spread_s = statistics.stdev(processors)
            yield Row(f"the driver's work for a {what}", "CPU-s", value=processor_s[num_ranks], spread=spread_s)
            spread_s = statistics.stdev(nodes_s)
            yield Row(f"its nodes' work for a {what}", "CPU-s", value=statistics.median(nodes_s), spread=spread_s)
            yield Row(f"calls that the driver answers in a {what}", "", value=statistics.median(calls))
    yield Fit.of(list(wall_s), list(wall_s.values())).row("overhead of a trial against ranks", bar=1.15)
    yield Fit.of(list(processor_s), list(processor_s.values())).row("the driver's work against ranks", bar=1.15)
    yield Row("overhead of a trial of 1,024 ranks by that of 8", "ratio", bar=3.0, value=wall_s[1024] / wall_s[8])


@measures(timeout_s=580)
def largest() -> Iterator[Row]:
    """One trial of 4,096 ranks on 512 nodes."""
    with TemporaryDirectory() as folder, fake_cluster(RANKS[-1] // PER_NODE, Path(folder)) as (cluster, lanes, hosts):
        ray.get([host.release.remote() for host in hosts])
        wall_s, processor_s, *_ = overhead_s(cluster, lanes, Path(folder), RANKS[-1], 0)
    yield Row("first trial of 4,096 ranks, start of its ranks included", "s", value=wall_s)
    yield Row("the driver's work for it", "CPU-s", value=processor_s)


def own_mb(text: str) -> float:
    """Memory that no other process shares, in MB, of this program's processes with a text in their names."""
    found = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(one.memory_full_info().uss for one in found if text in " ".join(one.cmdline())) / 1e6


def head_mb() -> float:
    """Memory of the process that drives the trials, of those that make results and of the study's own."""
    return sum(map(own_mb, ("FakeKeeper", "at_scale", "Aside")))


class Bare:
    """An actor that makes as many of Ray's calls as a lane does, one after another, and nothing else."""

    async def lane(self, hosts: list[Any], number: int, num_calls: int) -> None:
        """Calls one of the processes of the ranks."""
        for _ in range(num_calls):
            await hosts[number % len(hosts)].taken.remote()


def bare_s(bare: Any, hosts: list[Any], count: int, num_calls: int) -> float:
    """Seconds that the calls of so many lanes take side by side."""
    begun_s = time.perf_counter()
    ray.get([bare.lane.remote(hosts, number, num_calls) for number in range(count)])
    return time.perf_counter() - begun_s


@measures(timeout_s=580)
def many() -> Iterator[Row]:
    """Trials at a time, the head's memory of each, and the start of many lanes beside that of one."""
    num_trials, begun = 512, 0
    with TemporaryDirectory() as folder, fake_cluster(num_trials, Path(folder)) as (cluster, lanes, hosts):

        def start(count: int) -> float:
            """Starts trials on nodes of their own; returns the seconds until the ranks of all are in their steps."""
            nonlocal begun
            begun_s = time.perf_counter()
            for index in range(begun, begun + count):
                given = attempt_of(PER_NODE)
                place = Path(folder) / "study" / "trials" / f"{given.trial_id}-{index}"
                lanes.drive(replace(given, repeat=index, nodes=(cluster.nodes[index],), folder=place), cluster)
            begun += count
            while sum(ray.get([host.num_running.remote() for host in hosts])) < begun * PER_NODE:
                time.sleep(0.01)
            return float(max(ray.get([host.begun_s.remote() for host in hosts]))) - begun_s

        def answered() -> int:
            """Calls between processes so far."""
            return sum(ray.get([one.taken.remote() for one in (*hosts, lanes._keeper)]))

        start(1)
        bare = ray.remote(Bare).options(num_cpus=0, max_concurrency=1000).remote()
        middles: dict[int, tuple[float, float]] = {}
        for count in MANY:
            before, driven_s, repeats = answered(), spent_s("FakeKeeper"), 7 if count == 1 else 3
            each_s = [start(count) for _ in range(repeats)]
            driven_s = (spent_s("FakeKeeper") - driven_s) / repeats / count
            num_calls = round((answered() - before) / repeats / count)
            own_s = [bare_s(bare, hosts, count, num_calls) for _ in range(repeats + 1)][1:]
            middles[count] = statistics.median(each_s), statistics.median(own_s)
            what, spreads = f"{count} lane{'s' * (count > 1)}", (statistics.stdev(each_s), statistics.stdev(own_s))
            yield Row(f"start of {what}", "s", value=middles[count][0], spread=spreads[0])
            yield Row(f"the driver's work for each of {what}", "CPU-s", value=driven_s)
            yield Row(f"calls of Ray's, each of {what}", "", value=num_calls)
            yield Row(f"as many calls of Ray's alone, {what}", "s", value=middles[count][1], spread=spreads[1])
        (one_s, own_s), (all_s, all_own_s) = middles[MANY[0]], middles[MANY[-1]]
        what = f"{MANY[-1]} lanes by that of"
        yield Row(f"as many calls of Ray's alone, {what} one", "ratio", value=all_own_s / own_s)
        yield Row(f"start of {what} one", "ratio", bar=1.5, value=all_s / one_s)
        alone = f"start of {MANY[-1]} lanes by that of as many calls of Ray's alone"
        yield Row(alone, "ratio", value=all_s / all_own_s)  # no process starts in either, and it has no bar
        yield Row(f"start of {what} {MANY[-1]} one by one", "ratio", value=all_s / MANY[-1] / one_s)
        num_before, before_mb = begun, head_mb()
        start(num_trials - begun)
        progress = lanes.progress()
        at_a_time = sum(ray.get([host.num_running.remote() for host in hosts])) / PER_NODE
        yield Row("trials at a time on this machine", "", bar=512, value=min(at_a_time, len(progress)), at_least=True)
        each_mb = (head_mb() - before_mb) / (num_trials - num_before)
        yield Row("head's memory a running trial", "MB", bar=20, value=each_mb)
        yield Row(
            "threads of the process that drives the trials, 512 running",
            "",
            bar=256,
            value=process("FakeKeeper").num_threads(),
        )

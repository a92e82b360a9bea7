"""Nodes and ranks that are made up, for figures at scale: everything between the study and a rank's process is real.

Ranks are coroutines of a few processes. They call their lane as the workers of a GPU node do, by the post of their
node, and their steps are waits. Sensors record nothing. What is real: Ray Tune, the study's controller and folder, the
process that drives the trials, lanes, posts, messages, results and failures. What is not: Ray Train's workers, the
engines and the samplers, and the way from a rank to its post, which costs its own node alone.
"""

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import ray
from at_scale_rows.nodes import PER_NODE, PHASES, STEPS, WARM, spans
from ray import cloudpickle
from ray.actor import ActorHandle

from wattune.clock import ClockAnchor
from wattune.orchestrate.cluster import Cluster, Node, connect
from wattune.orchestrate.lanes import client
from wattune.orchestrate.lanes.actor import LaneKeeper
from wattune.orchestrate.lanes.client import Lanes
from wattune.orchestrate.lanes.lane import Lane
from wattune.orchestrate.lanes.messages import GroupKey, Place, Report, WorkerPlace
from wattune.orchestrate.lanes.post import Post
from wattune.orchestrate.run_trial import drive
from wattune.orchestrate.telemetry_actor import NodeTelemetry, Sensed
from wattune.run import RunStatus
from wattune.workers.outcome import RankOutcome

MOST_NODES: Final = 512
NUM_FACTS: Final = 30
"""Facts that a rank tells of its libraries and settings."""
HOSTS: Final = max(2, (os.cpu_count() or 1) - 2)
"""Processes whose coroutines the ranks are, and the posts and sensors of their nodes."""


@cache
def host_of(node_id: str) -> ActorHandle:
    """Returns the process of a node."""
    return ray.get_actor(f"host-{int(node_id, 16) % HOSTS}")


class NodePost(Post):
    """The post of a node that is made up: other nodes' posts and sensors are reached as actors are."""

    def _actor(self, name: str) -> Any:
        node_id = name.rpartition("-")[2]
        return _sensors(node_id) if name.startswith("telemetry") else _PostOf(self._keeper, node_id)


class _PostOf:
    """The handle of a node's post."""

    def __init__(self, keeper: ActorHandle, node_id: str) -> None:
        self.keeper, self.node_id = keeper, node_id

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        host = host_of(self.node_id)
        return SimpleNamespace(remote=lambda *given: host.post.remote(self.keeper, self.node_id, name, *given))


class Host:
    """A process of ranks, and of the sensors of their nodes."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.posts: dict[str, NodePost] = {}
        self.spans = spans(MOST_NODES)
        self.running = self.num_called = 0
        self.latest_s = 0.0  # on the machine's monotonic clock, which all its processes share
        self.own = cloudpickle.dumps(ray.get_runtime_context().current_actor)

    async def taken(self) -> int:
        """Calls that came from other processes so far."""
        return self.num_called

    async def release(self) -> None:
        """Lets the steps of every rank end, of this trial and of later ones."""
        self.go.set()

    async def num_running(self) -> int:
        """Ranks that are in their measured steps now."""
        return self.running

    async def begun_s(self) -> float:
        """Returns the time at which the latest of its ranks began its measured steps."""
        return self.latest_s

    async def post(self, keeper: ActorHandle, node_id: str, method: str, *given: Any) -> Any:
        """Calls the post of a node that is here."""
        self.num_called += 1
        return await getattr(self._post(keeper, node_id), method)(*given)

    def _post(self, keeper: ActorHandle, node_id: str) -> NodePost:
        if node_id not in self.posts:
            self.posts[node_id] = NodePost(keeper, node_id, "")
        return self.posts[node_id]

    async def sensors(self, method: str, node: str) -> Any:
        """Answers as a node's telemetry actor that reads nothing."""
        self.num_called += 1
        if method == "start":
            return Sensed(device_names={}, cpus=(), clock=ClockAnchor.now())
        if method == "mono_ns":
            return time.monotonic_ns()
        manifest: dict[str, Any] = {"devices": {}, "tiers": {}, "closed": True}
        answers: dict[str, Any] = {
            "ready": {},
            "fate": ("", 0),
            "recording": NodeTelemetry(node=node, manifest=manifest, losses=()),
        }
        return answers.get(method)

    async def serve(
        self, keeper: ActorHandle, lane: str, run: int, numbers: Sequence[int], nodes: Sequence[str]
    ) -> None:
        """Runs some ranks of a lane until it has no trial left; those of a node have its post between them."""
        self.num_called += 1
        for number in numbers:
            self._post(keeper, nodes[number // PER_NODE])
        await asyncio.gather(*(self._rank(lane, run, number, nodes[number // PER_NODE]) for number in numbers))

    async def _rank(self, lane: str, run: int, number: int, node_id: str) -> None:
        place = WorkerPlace(
            number=number,
            node_id=node_id,
            device_index=number % PER_NODE,
            device_uuid=None,
            pid=os.getpid(),
            actor=self.own,
        )
        post = self.posts[node_id]
        group, report = await post.call(lane, "join", run, place), None
        while (part := await post.call(lane, "next_trial", group, number, report)) is not None:
            if part.assignment is not None:
                await self._trial(post, lane, group, part, place)
            report = Report(problem=None, after=part.number)

    async def _trial(self, post: Post, lane: str, group: int, part: Any, place: WorkerPlace) -> None:

        async def call(name: str, *given: Any) -> Any:
            return await post.call(lane, name, group, part.number, *given)

        order = asyncio.create_task(call("stop_order"))
        if part.rank == 0:
            await call("report", "measure", 0, 1)
        await call("await_window")
        self.running, self.latest_s = self.running + 1, time.perf_counter()
        await asyncio.wait([asyncio.create_task(self.go.wait()), order], return_when=asyncio.FIRST_COMPLETED)
        self.running -= 1
        where = Place(
            rank=part.rank,
            node=_named(place.node_id),
            slot=part.slot.device,
            device=f"cpu{part.slot.device}",
            device_uuid=None,
            pid=place.pid,
        )
        status = RunStatus.ABORTED if order.done() else RunStatus.COMPLETED
        rows = (STEPS + WARM) * len(PHASES)
        outcome = RankOutcome(
            rank=part.rank,
            status=status,
            spans=self.spans.slice(part.rank * rows, rows),
            provenance={f"version.library_{number}": "1.0" for number in range(NUM_FACTS)},
            end_mono_ns=time.monotonic_ns(),
        )
        await call("deliver", outcome, where)
        await order


class _Sensors:
    """The handle of a node's telemetry actor."""

    def __init__(self, host: ActorHandle, node: str) -> None:
        self.host, self.node = host, node

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda *_: self.host.sensors.remote(name, self.node))


def _sensors(node_id: str) -> _Sensors:
    return _Sensors(host_of(node_id), _named(node_id))


def _named(node_id: str) -> str:
    return f"node{int(node_id, 16):03d}"


class FakeKeeper(LaneKeeper):
    """The process that drives the trials, whose lanes have fake ranks."""

    num_called = 0

    async def taken(self) -> int:
        """Calls that came from other processes so far: a trial's two, and those of posts."""
        return self.num_called + 2 * len(self._driven)

    async def call(self, lane: str, name: str, *arguments: Any, **more: Any) -> Any:
        """Counts a call of one worker."""
        self.num_called += 1
        return await super().call(lane, name, *arguments, **more)

    async def calls(self, lane: str, name: str, several: Sequence[Sequence[Any]]) -> Any:
        """Counts a call of several workers as the one it is."""
        self.num_called += 1
        return await super().calls(lane, name, several)

    def _lane(self, nodes: tuple[str, ...]) -> Lane:
        name = f"{'+'.join(nodes)}@{self._born}"
        if name not in self._lanes:

            async def launch(key: GroupKey, nodes: tuple[str, ...], _restarts: bool, run: int) -> None:
                shares: dict[ActorHandle, list[int]] = {}
                for number in range(key.world_size):  # a node's ranks are in one process, as its post is
                    shares.setdefault(host_of(nodes[number // PER_NODE]), []).append(number)
                served = [host.serve.remote(self.handle, name, run, share, nodes) for host, share in shares.items()]
                await asyncio.gather(*served)

            async def probe(_worker: WorkerPlace) -> str:
                return ""

            self._lanes[name] = Lane(nodes, launch, lambda _: None, probe)
        return self._lanes[name]

    def telemetry_actors(self, nodes: Sequence[Node], backends: Sequence[str]) -> list[Any]:  # noqa: ARG002
        """Sensors that read nothing."""
        return [_sensors(node.node_id) for node in nodes]

    def post(self, node_id: str) -> Any:
        """The post of a node."""
        return _PostOf(self.handle, node_id)

    async def close(self) -> None:
        """Ends every lane."""
        self._telemetry.clear()
        await super().close()


def fake_nodes(count: int) -> tuple[Node, ...]:
    """Nodes of eight processors, each a power domain of its own."""
    return tuple(
        Node(node_id=f"{index:056x}", name=f"node{index:03d}", num_cpus=PER_NODE, num_gpus=0, host=f"h{index}")
        for index in range(count)
    )


@contextmanager
def fake_cluster(num_nodes: int, storage: Path) -> Iterator[tuple[Cluster, Lanes, list[ActorHandle]]]:
    """A Ray cluster of this machine, fake nodes on it, lanes on these, and the processes of their ranks."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(Path(__file__).parent))
    with connect() as real, patch.object(client, "LaneKeeper", FakeKeeper):
        host = ray.remote(Host)
        hosts = [
            host.options(name=f"host-{number}", num_cpus=0, max_concurrency=100_000).remote() for number in range(HOSTS)
        ]
        ray.get([one.num_running.remote() for one in hosts])
        cluster = Cluster(nodes=fake_nodes(num_nodes), driver_node_id=real.driver_node_id)
        with Lanes(drive, storage) as lanes:
            yield cluster, lanes, hosts

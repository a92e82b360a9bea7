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
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import ray
from at_scale_rows.nodes import PER_NODE, PHASES, STEPS, WARM, spans
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
HOSTS: Final = 2
"""Processes whose coroutines the ranks are."""


class Host:
    """A process of ranks, and of the sensors of their nodes."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.posts: dict[str, Post] = {}
        self.spans = spans(MOST_NODES)
        self.running = 0

    async def release(self) -> None:
        """Lets the steps of every rank end, of this trial and of later ones."""
        self.go.set()

    async def hold(self) -> None:
        """Keeps ranks in their steps until they are released."""
        self.go.clear()

    async def num_running(self) -> int:
        """Ranks that are in their measured steps now."""
        return self.running

    async def sensors(self, method: str, node: str) -> Any:
        """Answers as a node's telemetry actor that reads nothing."""
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
        for node_id in {nodes[number // PER_NODE] for number in numbers} - self.posts.keys():
            self.posts[node_id] = Post(keeper)
        await asyncio.gather(*(self._rank(lane, run, number, nodes[number // PER_NODE]) for number in numbers))

    async def _rank(self, lane: str, run: int, number: int, node_id: str) -> None:
        place = WorkerPlace(
            number=number,
            node_id=node_id,
            device_index=number % PER_NODE,
            device_uuid=None,
            pid=os.getpid(),
            actor=ray.get_runtime_context().current_actor,
        )
        post = self.posts[node_id]
        group, report = await post.call(lane, "join", run, place), None
        while (part := await post.call(lane, "next_trial", group, number, report)) is not None:
            if part.assignment is not None:
                await self._trial(post, lane, group, part, place)
            report = Report(problem=None)

    async def _trial(self, post: Post, lane: str, group: int, part: Any, place: WorkerPlace) -> None:
        node = part.assignment.node_names[place.node_id]

        async def call(name: str, *given: Any) -> Any:
            return await post.call(lane, name, group, part.number, *given)

        order = asyncio.create_task(call("stop_order"))
        if part.rank == 0:
            await call("report", "measure", 0, 1)
        await call("await_window")
        self.running += 1
        await asyncio.wait([asyncio.create_task(self.go.wait()), order], return_when=asyncio.FIRST_COMPLETED)
        self.running -= 1
        where = Place(
            rank=part.rank,
            node=node,
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
    """A node's telemetry actor, which all nodes share."""

    def __init__(self, host: ActorHandle, node: str) -> None:
        self.host, self.node = host, node

    def __getattr__(self, name: str) -> "_Method":
        if name.startswith("_") or name == "host":
            raise AttributeError(name)
        return _Method(self.host, name, self.node)


class _Method:
    def __init__(self, host: ActorHandle, name: str, node: str) -> None:
        self.host, self.name, self.node = host, name, node

    def remote(self, *_: Any) -> Any:
        """Asks the process of the ranks."""
        return self.host.sensors.remote(self.name, self.node)


class FakeKeeper(LaneKeeper):
    """The process that drives the trials, whose lanes have fake ranks."""

    def _lane(self, nodes: tuple[str, ...]) -> Lane:
        name = f"{'+'.join(nodes)}@{self._born}"
        if name not in self._lanes:
            hosts = [ray.get_actor(f"host-{number}") for number in range(HOSTS)]

            async def launch(key: GroupKey, nodes: tuple[str, ...], _restarts: bool, run: int) -> None:
                shares: dict[int, list[int]] = {}
                for number in range(key.world_size):  # a node's ranks are in one process, as its post is
                    shares.setdefault(int(nodes[number // PER_NODE], 16) % HOSTS, []).append(number)
                served = [hosts[at].serve.remote(self.handle, name, run, share, nodes) for at, share in shares.items()]
                await asyncio.gather(*served)

            async def probe(_worker: WorkerPlace) -> str:
                return ""

            self._lanes[name] = Lane(nodes, launch, lambda _: None, probe, ray.put)
        return self._lanes[name]

    def telemetry_actors(self, nodes: Sequence[Node], backends: Sequence[str]) -> list[Any]:  # noqa: ARG002
        """Sensors that read nothing."""
        host = ray.get_actor("host-0")
        return [_Sensors(host, node.name) for node in nodes]

    async def close(self) -> None:
        """Ends every lane."""
        self._telemetry.clear()
        await super().close()


def fake_nodes(count: int) -> tuple[Node, ...]:
    """Nodes of eight processors, each a power domain of its own."""
    return tuple(
        Node(
            node_id=f"{index:056x}",
            name=f"node{index:03d}",
            address="",
            num_cpus=PER_NODE,
            num_gpus=0,
            host=f"h{index}",
        )
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
        cluster = Cluster(nodes=fake_nodes(num_nodes), driver_node_id=real.driver_node_id, others=real.nodes)
        with Lanes(drive, storage) as lanes:
            yield cluster, lanes, hosts

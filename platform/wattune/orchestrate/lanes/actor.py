"""The actor that holds every lane of a study and drives every trial there: mailbox of workers, owner of Train's runs.

A running trial is a coroutine here. What may wait for nodes or the disk for seconds is done in a thread of a pool, and
what needs a processor for long, the making of results, in a few processes beside it.
"""

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import uuid4

import pyarrow as pa
import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.core.generated import gcs_pb2
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from wattune.errors import TelemetryError
from wattune.orchestrate.ask import on_node
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Cluster, Node
from wattune.orchestrate.events import TrialProgress
from wattune.orchestrate.lanes.lane import Lane
from wattune.orchestrate.lanes.messages import Answer, Assignment, GroupKey, WorkerPlace
from wattune.orchestrate.lanes.post import LED, open_post, post_name
from wattune.orchestrate.lanes.ray_errors import death
from wattune.orchestrate.lanes.train_runs import Launcher
from wattune.orchestrate.telemetry_actor import NodeClocks, telemetry_actor
from wattune.plans.program import is_command

_log = logging.getLogger(__name__)

DONE_METRIC: Final = "done_trials"
"""The only metric that Ray Tune is told; it needs one. 0 where only the trial's nodes are free, 1 where it is done."""

MOST_CALLS: Final = 100_000
"""Calls that may wait at once: two per worker, one per driver."""

RELEASE_S: Final = 10.0
"""Longest the end of a study waits for a node's sampler, which its lease ends later anyway."""

LOOK_S: Final = 1.0
"""Seconds between two looks at a running trial's limit."""

CONCLUDED_S: Final = 60.0
"""Longest a trial waits before its measured steps while others are concluded: a disk may hang."""

MOST_THREADS: Final = 128
"""Trials whose sensors are started or stopped at the same time."""

MOST_ASIDE: Final = 4
"""Processes that make results; half the node's processors where that is less."""

NICENESS: Final = 10
"""Added to that of what makes results: the next trials may build and compile meanwhile."""

_T = TypeVar("_T")


class Aside:
    """A process beside the one that drives the trials, of which a study has a few."""

    def __init__(self) -> None:
        import scipy.signal  # noqa: F401 - the first result would wait a second for it

        os.nice(NICENESS)

    def do(self, work: Callable[[], _T]) -> _T:
        """Does a piece of work."""
        return work()


class LaneKeeper:
    """Lanes by name, and the trials that run there. `Lane` documents what a method of the same name means.

    A lane may be gone, with a node or with an earlier process of this actor.
    """

    def __init__(self, scratch: str, storage: Path | None, drive: "Drive") -> None:
        self._scratch, self._storage, self._drive = scratch, storage, drive
        self._driven: dict[str, asyncio.Task[None]] = {}
        """Trials by name, from their start until somebody has heard that their result is there."""
        self._concluding: dict[str, tuple[frozenset[str], asyncio.Event]] = {}
        """Nodes that work on a result, by the trial's name, and the event of its end."""
        self._node_id = ray.get_runtime_context().get_node_id()
        self._threads = ThreadPoolExecutor(MOST_THREADS)
        self._aside: dict[ActorHandle, int] = {}
        """Processes that make results, and how many each has to make."""
        self._lanes: dict[str, Lane] = {}
        self._born = uuid4().hex
        """Part of every lane's name, so that no worker takes a lane of a restarted actor for its own."""
        self._telemetry: dict[tuple[str, tuple[str, ...]], ActorHandle] = {}
        self.clocks = NodeClocks()
        self._posts: dict[str, ActorHandle] = {}
        """By node, of those where ranks run and this process does not."""
        self.handle: ActorHandle = ray.get_runtime_context().current_actor
        """By which workers call this process."""
        gc.freeze()  # its libraries stay: no collection looks through them again
        if num_orphans := remove_orphans():
            _log.warning("removed %d placement group(s) of the process that held the lanes before", num_orphans)

    async def ready(self) -> None:
        """Returns once this process takes calls: who waits for it, survives a death of the one before."""

    async def drive(self, attempt: Attempt, cluster: Cluster, _ready: None = None) -> dict[str, Any]:
        """Runs a trial until its nodes are free, and ends as `concluded` does where its result is there by then."""
        freed = asyncio.Event()
        task: asyncio.Task[None] = asyncio.create_task(self._drive(self, attempt, cluster, freed.set))
        task.add_done_callback(lambda _: freed.set())
        self._driven[attempt.name] = task
        await freed.wait()
        return await self.concluded(attempt.name) if task.done() else {DONE_METRIC: 0}

    async def concluded(self, name: str) -> dict[str, Any]:
        """Returns once the result of a trial that was driven is stored; raises what kept it from that."""
        await self._driven.pop(name)
        return {DONE_METRIC: 1, "done": True}

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Does what may wait for seconds; most of what waits longer are coroutines."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def aside(self, work: Callable[[], _T]) -> _T:
        """Does work that needs a processor for long in another process of this node."""
        most = max(1, min(MOST_ASIDE, (os.cpu_count() or 1) // 2))
        if len(self._aside) < most and all(self._aside.values()):
            self._add_aside()
        actor = min(self._aside, key=lambda one: self._aside[one])
        self._aside[actor] += 1
        try:
            done: _T = await actor.do.remote(work)
        finally:
            self._aside[actor] -= 1
        return done

    def _add_aside(self) -> None:
        actor = on_node(Aside, self._node_id, max_restarts=-1).remote()
        actor.do.remote(partial(bool, self._drive))  # to read this it loads what makes results
        self._aside[actor] = 0

    @contextlib.contextmanager
    def concluding(self, attempt: Attempt) -> Iterator[None]:
        """Says while its body runs that a trial's result is made: nothing is measured on nodes that work on it."""
        at_work, over = frozenset((self._node_id, *(node.node_id for node in attempt.nodes))), asyncio.Event()
        self._concluding[attempt.name] = (at_work, over)
        try:
            yield
        finally:
            del self._concluding[attempt.name]
            over.set()

    async def _await_conclusions(self, lane: Lane) -> None:
        beside = [(name, over) for name, (at_work, over) in self._concluding.items() if at_work & set(lane.nodes)]
        try:
            async with asyncio.timeout(CONCLUDED_S):
                for _, over in beside:
                    await over.wait()
        except TimeoutError:
            late = ", ".join(name for name, over in beside if not over.is_set())
            _log.warning("%s takes longer than %.0f s; trials are measured beside it", late, CONCLUDED_S)

    async def run(
        self,
        assignment: Assignment,
        over_limit: Callable[[], str | None] | None = None,
        await_sensors: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Runs one trial on its lane; other lanes on the same nodes make room first.

        Its measured steps begin once `await_sensors` has returned and the trials are concluded that are being concluded
        on its nodes. Nobody can hold the steps of a command: it begins then. `over_limit` is called once a second while
        it runs. A reason it returns ends the trial as `aborted`. Both are called in threads. Raises `TelemetryError`:
        `await_sensors` raised it; the trial has left its workers.
        """
        lane, name = self._lane(tuple(assignment.node_names)), assignment.attempt.name
        is_held = not is_command(assignment.spec)
        if not is_held:
            await self.in_thread(await_sensors)
            await self._await_conclusions(lane)
        running = asyncio.create_task(self._run(lane, assignment))
        if is_held:
            try:
                await self.in_thread(await_sensors)
            except TelemetryError as error:
                while not (await asyncio.wait([running], timeout=LOOK_S))[0]:
                    lane.stop_trial(name, str(error))
                raise
            await self._await_conclusions(lane)
        lane.open_window(assignment.window)
        while over_limit is not None and not (await asyncio.wait([running], timeout=LOOK_S))[0]:
            reason = await self.in_thread(over_limit)
            if reason is not None and lane.stop_trial(name, reason):
                break
        return await running

    async def _run(self, lane: Lane, assignment: Assignment) -> Answer:
        own = set(lane.nodes)
        rivals = [other for other in self._lanes.values() if other is not lane and not own.isdisjoint(other.nodes)]
        await asyncio.gather(*(other.make_room() for other in rivals))
        return await lane.run(assignment)

    async def prepare(self, key: GroupKey, nodes: Sequence[Node], backends: Sequence[str]) -> None:
        """See `Lane.prepare`; starts the nodes' telemetry actors too, and a process that makes results."""
        self._lane(tuple(node.node_id for node in nodes)).prepare(key)
        self.telemetry_actors(nodes, backends)
        self._add_aside()

    async def telemetry(self, nodes: Sequence[Node], backends: Sequence[str]) -> list[ActorHandle]:
        """See `telemetry_actors`."""
        return self.telemetry_actors(nodes, backends)

    def telemetry_actors(self, nodes: Sequence[Node], backends: Sequence[str]) -> list[ActorHandle]:
        """The telemetry actors of nodes. They live as long as this actor, which holds their handles."""
        keys = [(node.node_id, tuple(backends)) for node in nodes]
        for node, key in zip(nodes, keys, strict=True):
            if key not in self._telemetry:
                self._telemetry[key] = telemetry_actor(node, backends)
        return [self._telemetry[key] for key in keys]

    async def settle(self, assignment: Assignment) -> str:
        """See `Lane.settle`."""
        return await self._lane(tuple(assignment.node_names)).settle()

    async def progress(self) -> dict[str, TrialProgress]:
        """Progress of every running trial, by its name."""
        return {name: one for lane in self._lanes.values() for name, one in lane.progress().items()}

    def spans(self, name: str) -> dict[int, pa.Table]:
        """See `Lane.spans`."""
        lanes = list(self._lanes.values())  # a thread calls this, while others may be added
        return next((found for lane in lanes if (found := lane.spans(name))), {})

    async def forget_nodes(self, nodes: tuple[str, ...]) -> None:
        """Ends the lanes on nodes that are gone."""
        gone = [name for name, lane in self._lanes.items() if set(lane.nodes) & set(nodes)]
        lanes = [self._lanes.pop(name) for name in gone]
        self._telemetry = {key: actor for key, actor in list(self._telemetry.items()) if key[0] not in nodes}
        for node in nodes:
            self._posts.pop(node, None)
        await asyncio.gather(*(lane.close("a node of the lane is gone") for lane in lanes))

    async def close(self) -> None:
        """Ends every lane and every running sampler."""
        await asyncio.gather(
            *(lane.close("the study was stopped", interrupts=True) for lane in self._lanes.values()),
            *map(_release, list(self._telemetry.values())),
        )

    async def call(self, lane: str, name: str, *arguments: Any, **more: Any) -> Any:
        """Calls a method of a lane, for its workers. Of a lane that is gone the answer is None: they are to end."""
        found = self._lanes.get(lane)
        answer = getattr(found, name)(*arguments, **more) if found is not None else None
        return await answer if isawaitable(answer) else answer

    async def calls(self, lane: str, name: str, several: Sequence[Sequence[Any]]) -> Any:
        """Calls a method of a lane for several workers, each with arguments of its own; all are answered together."""
        found = self._lanes.get(lane)
        if name == "next_trial":
            return await found.next_trials(several) if found is not None else None
        return [found and getattr(found, name)(*arguments) for arguments in several]

    def post(self, node_id: str) -> ActorHandle:
        """Returns the post of a node, and starts it where it is not there."""
        if node_id not in self._posts:
            self._posts[node_id] = open_post(self.handle, self._born, node_id, self._node_id)
        return self._posts[node_id]

    def top(self, nodes: Sequence[Node]) -> tuple[ActorHandle | None, dict[Node, str]]:
        """Returns the post that asks the nodes of a trial, and names of posts for each; none where there are few nodes.

        The node of this process has no post, and is asked by that of another.
        """
        if len(nodes) <= LED:
            return None, {}
        first = next(node.node_id for node in nodes if node.node_id != self._node_id)
        ids = {node: first if node.node_id == self._node_id else node.node_id for node in nodes}
        leaders = [self.post(node_id) for node_id in [*ids.values()][::LED]]
        return leaders[0], {node: post_name(self._born, node_id) for node, node_id in ids.items()}

    def _lane(self, nodes: tuple[str, ...]) -> Lane:
        name = f"{'+'.join(nodes)}@{self._born}"
        if name not in self._lanes:
            launcher = Launcher(self.handle, name, self._scratch, self._storage, self.in_thread)
            launcher.post = self.post
            self._lanes[name] = launcher.lane = Lane(nodes, launcher.launch, _kill, _probe)
        return self._lanes[name]


Drive = Callable[[LaneKeeper, Attempt, Cluster, Callable[[], None]], Coroutine[Any, Any, None]]
"""Runs one trial on lanes and stores its result; calls what it is given last once the trial's nodes are free."""


async def _release(actor: ActorHandle) -> None:
    # A node that is gone or silent has nothing to release, or its sampler ends with its lease.
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(RELEASE_S):
            await actor.release.remote()


def _kill(worker: WorkerPlace) -> None:
    ray.kill(cloudpickle.loads(worker.actor), no_restart=True)


async def _probe(worker: WorkerPlace) -> str:
    """See `wattune.orchestrate.lanes.worker_group.Probe`."""
    try:
        await cloudpickle.loads(worker.actor).__ray_ready__.remote()
    except RayError as error:
        return death(error)
    return ""


def remove_orphans() -> int:
    """Removes the placement groups of earlier processes of the actor that calls it; returns their number.

    Ray keeps an actor's placement group until the actor *and* its job are over. This one is started again when its
    process is killed, and trials that want these devices would wait for them as long as the study runs (seen with Ray
    2.60). Train has an actor that removes the group of a dead controller, but tells it of the group only once all
    workers are up. Runs here do without it: it is one more process beside each group of workers.
    """
    own_id = ray.get_runtime_context().get_actor_id()
    # Not public: Ray has no public way to ask who made a placement group.
    table = ray._private.state.state._connect_and_get_accessor().get_placement_group_table()
    groups = [gcs_pb2.PlacementGroupTableData.FromString(entry) for entry in table]
    left = [
        ray.PlacementGroupID(group.placement_group_id)
        for group in groups
        if ray.ActorID(group.creator_actor_id).hex() == own_id
        and group.state != gcs_pb2.PlacementGroupTableData.REMOVED
    ]
    for group_id in left:
        remove_placement_group(PlacementGroup(group_id))
    return len(left)

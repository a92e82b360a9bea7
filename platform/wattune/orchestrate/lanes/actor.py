"""The actor that holds every lane of a study: mailbox between drivers and workers, owner of the Ray Train runs."""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.train import BackendConfig, FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from wattune.errors import WattuneError
from wattune.orchestrate.cluster import Node
from wattune.orchestrate.events import TrialProgress
from wattune.orchestrate.lanes.lane import Lane
from wattune.orchestrate.lanes.messages import (
    Answer,
    Assignment,
    GroupKey,
    WorkerPlace,
)
from wattune.orchestrate.lanes.placement_groups import remove_orphans
from wattune.orchestrate.telemetry_actor import telemetry_actor
from wattune.plans.engines import runs_program
from wattune.workers.environment import prepare_environment

_log = logging.getLogger(__name__)

MOST_CALLS: Final = 100_000
"""Calls that may wait at once: two per worker, one per driver."""

LOST_S: Final = 30.0
"""Longest a Train run waits for the lane's answer after workers failed."""

RELEASE_S: Final = 10.0
"""Longest the end of a study waits for a node's sampler, which its lease ends later anyway."""

KEEPER_ENDED: Final = "the process that holds the lanes ended"
KEEPER_REMEDY: Final = (
    "Ray starts it again, and the trial is tried again; if it repeats, look for what kills it on the study's node, "
    "such as a lack of memory (`dmesg`)"
)

_START_A_PROCESS: Final = ("DatasetsCallback", "PlacementGroupCleanerCallback")
"""Names of Train's callbacks that start a process beside a group of workers: for datasets, which a trial has none of,
and to remove the group's place when its controller has died, which `remove_orphans` does before the next start. Under
another name the process would be there again."""

_NVIDIA_ENVIRONMENT: Final = {
    # wattune aborts communicators itself, when the lane orders it, and torch asks for 0 then (`_abort_process_group`).
    # The worker's watchdog ends a hang: it knows how long steps take.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


class LaneKeeper:
    """Lanes by name. Every method is a remote call; `Lane` documents its meaning.

    A lane may be gone, with a node or with an earlier process of this actor.
    """

    def __init__(self, scratch: str, storage: Path | None = None) -> None:
        self._scratch, self._storage = scratch, storage
        self._lanes: dict[str, Lane] = {}
        self._born = uuid4().hex
        """Part of every lane's name, so that no worker takes a lane of a restarted actor for its own."""
        self._telemetry: dict[tuple[str, tuple[str, ...]], ActorHandle] = {}
        self._self: ActorHandle = ray.get_runtime_context().current_actor

    async def run(self, assignment: Assignment) -> Answer:
        """See `Lane.run`. Other lanes on the same nodes make room first."""
        lane = self._lane(tuple(assignment.node_names))
        rivals = [other for other in self._lanes.values() if other is not lane and set(other.nodes) & set(lane.nodes)]
        await asyncio.gather(*(other.make_room() for other in rivals))
        return await lane.run(assignment)

    async def prepare(self, key: GroupKey, nodes: Sequence[Node], backends: Sequence[str]) -> None:
        """See `Lane.prepare`; starts the nodes' telemetry actors too."""
        self._lane(tuple(node.node_id for node in nodes)).prepare(key)
        await self.telemetry(nodes, backends)

    async def telemetry(self, nodes: Sequence[Node], backends: Sequence[str]) -> list[ActorHandle]:
        """The telemetry actors of nodes. They live as long as this actor, which holds their handles."""
        keys = [(node.node_id, tuple(backends)) for node in nodes]
        for node, key in zip(nodes, keys, strict=True):
            if key not in self._telemetry:
                self._telemetry[key] = telemetry_actor(node, backends)
        return [self._telemetry[key] for key in keys]

    async def settle(self, nodes: tuple[str, ...]) -> str:
        """See `Lane.settle`."""
        return await self._lane(nodes).settle()

    async def open_window(self, nodes: tuple[str, ...], window: str) -> None:
        """See `Lane.open_window`."""
        self._lane(nodes).open_window(window)

    async def stop_trial(self, name: str, reason: str) -> bool:
        """See `Lane.stop_trial`."""
        lanes = [lane for lane in self._lanes.values() if lane.stop_trial(name, reason)]
        return bool(lanes)

    async def progress(self) -> dict[str, TrialProgress]:
        """Progress of every running trial, by its name."""
        return {name: one for lane in self._lanes.values() for name, one in lane.progress().items()}

    async def spans(self, name: str) -> dict[int, pa.Table]:
        """See `Lane.spans`."""
        return next((found for lane in self._lanes.values() if (found := lane.spans(name))), {})

    async def forget_nodes(self, nodes: tuple[str, ...]) -> None:
        """Ends the lanes on nodes that are gone."""
        gone = [name for name, lane in self._lanes.items() if set(lane.nodes) & set(nodes)]
        lanes = [self._lanes.pop(name) for name in gone]
        self._telemetry = {key: actor for key, actor in self._telemetry.items() if key[0] not in nodes}
        await asyncio.gather(*(lane.close("a node of the lane is gone") for lane in lanes))

    async def close(self) -> None:
        """Ends every lane and every running sampler."""
        await asyncio.gather(
            *(lane.close("the study was stopped", interrupts=True) for lane in self._lanes.values()),
            *map(_release, self._telemetry.values()),
        )

    async def call(self, lane: str, name: str, *arguments: Any, **more: Any) -> Any:
        """Calls a method of a lane, for its workers. Of a lane that is gone the answer is None: they are to end."""
        found = self._lanes.get(lane)
        answer = getattr(found, name)(*arguments, **more) if found is not None else None
        return await answer if isawaitable(answer) else answer

    def _lane(self, nodes: tuple[str, ...]) -> Lane:
        name = f"{'+'.join(nodes)}@{self._born}"
        if name not in self._lanes:
            launcher = _Launcher(self._self, name, self._scratch, self._storage)
            self._lanes[name] = Lane(nodes, launcher.launch, _kill, _probe, ray.put)
        return self._lanes[name]


async def _release(actor: ActorHandle) -> None:
    # A node that is gone or silent has nothing to release, or its sampler ends with its lease.
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(RELEASE_S):
            await actor.release.remote()


def _kill(worker: WorkerPlace) -> None:
    ray.kill(worker.actor, no_restart=True)


async def _probe(worker: WorkerPlace) -> str:
    """See `wattune.orchestrate.lanes.worker_group.Probe`."""
    try:
        await worker.actor.__ray_ready__.remote()
    except RayError as error:
        return death(error)
    return ""


def death(error: BaseException) -> str:
    """Returns Ray's words about a process that ended; empty if the error is of another kind, such as one it raised."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ActorUnavailableError | RayTaskError):  # it may come back; it raised an error
            return ""
        if isinstance(seen, RayActorError | WorkerCrashedError | NodeDiedError | OutOfMemoryError):
            return ray_words(seen)
        # Ray Train wraps what it found when it asked a worker.
        seen = getattr(seen, "health_check_failure", None) or seen.__cause__
    return ""


def ray_words(error: BaseException) -> str:
    """Returns Ray's words about a process that ended, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def ended_with_keeper(error: BaseException) -> bool:
    """Returns whether an actor ended because the process that holds the lanes, which owns it, did."""
    return isinstance(error, RayActorError) and "owner has died" in str(error)


class _Losses(UserCallback):  # type: ignore[misc]
    """Tells the lane at once that workers failed, and why. Train itself then starts others."""

    def __init__(self, keeper: ActorHandle, lane: str, run: int) -> None:
        self._keeper, self._lane, self._run = keeper, lane, run

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:  # noqa: ARG002
        number, first = min(worker_exceptions.items())
        reason = f"worker {number} of the group: {cause(first)}"
        died = {rank: why for rank, error in worker_exceptions.items() if (why := death(error))}
        try:
            wanted = ray.get(self._keeper.call.remote(self._lane, "lost", self._run, reason, died), timeout=LOST_S)
        except RayError as error:
            _log.warning("the process that holds the lanes did not answer: %s", error)
            wanted = False
        if not wanted:
            # The process that held this lane is gone, and Ray is about to end this one. Until then Train would start
            # other workers, in a placement group that comes too late for `remove_orphans`. Nobody would remove it, and
            # the next trial would wait for its devices.
            os._exit(1)


class _Launcher:
    """Starts the workers of one lane."""

    def __init__(self, keeper: ActorHandle, lane: str, scratch: str, storage: Path | None) -> None:
        self._keeper, self._lane, self._scratch, self._storage = keeper, lane, scratch, storage

    async def launch(self, key: GroupKey, nodes: tuple[str, ...], restarts: bool, number: int) -> None:
        """See `wattune.orchestrate.lanes.worker_group.Launch`."""
        scratch = tempfile.mkdtemp(dir=self._scratch)
        try:
            await asyncio.to_thread(self._fit, key, nodes, restarts, number, scratch)
        except Exception as error:
            raise RuntimeError(cause(error)) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _fit(self, key: GroupKey, nodes: tuple[str, ...], restarts: bool, number: int, scratch: str) -> None:
        if orphans := remove_orphans():
            _log.warning("removed %d placement group(s) of runs that were killed while they started", orphans)
        runs_command = runs_program(key.engine)
        own = _NVIDIA_ENVIRONMENT if key.has_gpus and not runs_command else {}
        environment = {**own, **dict(key.environment)}
        trainer = _of_commands() if runs_command else _of_ranks(key.device, self._storage)
        config = {"keeper": self._keeper, "lane": self._lane, "run": number}
        trainer(
            train_loop_config={**config, "device": key.device, "storage": self._storage},
            scaling_config=ScalingConfig(
                num_workers=key.world_size,
                use_gpu=key.has_gpus,
                resources_per_worker=dict(key.resources),
                placement_strategy="PACK",
                label_selector=[{"ray.io/node-id": node_id} for node_id in nodes for _ in range(key.devices_per_node)],
            ),
            run_config=RunConfig(
                name=f"lane-{number}",
                storage_path=scratch,
                # Train counts failures over a run's whole life; the lane has a breaker of its own.
                failure_config=FailureConfig(max_failures=-1 if restarts else 0, controller_failure_limit=1),
                callbacks=[_Losses(self._keeper, self._lane, number)],
                worker_runtime_env={"env_vars": environment} if environment else None,
            ),
        ).fit()


# What follows loads a library where it is needed, in the workers: the study's own process and Tune's import this module
# for its actor, Train's controller does for its callback, and torch would take each of them seconds and much memory.


class _Trainer(DataParallelTrainer):  # type: ignore[misc]
    """A run without the processes that Train starts beside workers.

    No trial needs them, and each loads pandas and Ray Data before the workers may begin.
    """

    def _create_default_callbacks(self) -> list[Any]:
        return [each for each in super()._create_default_callbacks() if type(each).__name__ not in _START_A_PROCESS]

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        return super()._initialize_and_run_controller(**{**settings, "scaling_policy": _Placed(self.scaling_config)})


class _Placed(FixedScalingPolicy):  # type: ignore[misc]
    """Workers on nodes that are there: nothing is asked of an autoscaler.

    Train asks an actor for the resources of its workers, at the start and every 20 s. The first run of a cluster starts
    it, and the workers wait until that process has loaded Ray Data.
    """

    def after_controller_start(self, train_run_context: Any) -> None:
        """Requests nothing."""

    def _maybe_send_resource_request(self) -> None:
        pass


def _of_commands() -> Callable[..., DataParallelTrainer]:
    """A command's worker joins no process group and touches no device: it only starts the command."""
    return partial(_Trainer, _serve_commands)


def _of_ranks(device: str, storage: Path | None) -> Callable[..., DataParallelTrainer]:
    return partial(_Trainer, _serve_ranks, backend_config=_RanksMeet(device, storage))


class _RanksMeet(BackendConfig):  # type: ignore[misc]
    """Train's `TorchConfig`, but that no process loads torch for it except the workers."""

    backend_cls = property(lambda _: _Meeting)

    def __init__(self, device: str, storage: Path | None) -> None:
        """Keeps what the environment of the workers depends on."""
        self.device, self.storage = device, storage


class _Meeting(Backend):  # type: ignore[misc]
    """Makes the one store that ranks meet in: each has a connection to it, and none to another rank before its trial.

    Train's own backend makes a process group, of gloo every rank with every other.
    """

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: _RanksMeet) -> None:
        """Called by Train's controller once all workers are up."""
        worker_group.execute(prepare_environment, backend_config.device, backend_config.storage)  # then they load torch
        address, port = worker_group.execute_single(0, get_address_and_port)
        count = len(worker_group)
        asked = [worker_group.execute_single_async(rank, _meet, address, port, rank, count) for rank in range(count)]
        ray.get(asked)


def _meet(address: str, port: int, rank: int, count: int) -> None:
    """Opens the store in which the ranks of every trial meet. Every worker runs it; the first holds the store."""
    from ray.train.torch.config import _set_torch_distributed_env_vars

    from wattune.workers.process_groups import open_store

    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    _set_torch_distributed_env_vars()
    open_store(address, port, holds=rank == 0, num_ranks=count)


def _serve_ranks(config: dict[str, Any]) -> None:
    from ray.train.torch.config import TorchConfigContextManager

    from wattune.orchestrate.lanes.worker import serve

    with TorchConfigContextManager():
        serve(config)


def _serve_commands(config: dict[str, Any]) -> None:
    prepare_environment(config["device"], config["storage"], runs_program=True)
    from wattune.orchestrate.lanes.command_worker import serve_commands

    serve_commands(config)


def cause(error: BaseException) -> str:
    """Finds the one line of a Ray error that says what happened.

    It is the message of the innermost cause, or that of wattune's own error around it.
    """
    workers = getattr(error, "worker_failures", None)
    if workers:
        number, first = min(workers.items())
        return f"worker {number} of the group: {cause(first)}"
    # Ray wraps the error an actor raised and keeps it in `cause`. A wrapped error of wattune is a `WattuneError` too.
    while isinstance(error, RayTaskError) or not isinstance(error, WattuneError):
        inner = getattr(error, "cause", None) or error.__cause__
        if inner is None:
            break
        error = inner
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, WattuneError) else f"{type(error).__name__}: {text}"

"""Ray Train's runs, which start the workers of lanes. Their controllers are coroutines of the lanes' process."""

import asyncio
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import ray
from ray.actor import ActorHandle
from ray.train import BackendConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.controller.state import RunningState
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import state as group_state
from ray.train.v2._internal.execution.worker_group import worker_group as group_of_workers
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.train.v2._internal.util import ObjectRefWrapper
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from wattune.engines.ahead import EARLY
from wattune.orchestrate.lanes.changes import LOOK_S
from wattune.orchestrate.lanes.lane import Lane
from wattune.orchestrate.lanes.messages import GroupKey
from wattune.orchestrate.lanes.ray_errors import cause, death
from wattune.plans.engines import runs_program
from wattune.plans.placement import Slot
from wattune.trial import TrialSpec
from wattune.workers.environment import prepare_environment

_log = logging.getLogger(__name__)

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Does what blocks in a thread."""

POLLED_PER_S: Final = 256
"""Workers that Train asks in a second whether they live; with more of them it asks each less often than every 2 s."""

_START_A_PROCESS: Final = ("DatasetsCallback", "PlacementGroupCleanerCallback")
"""Names of Train's callbacks that start a process beside a group of workers: for datasets, which a trial has none of,
and to remove the group's place when its controller has died, which `remove_orphans` does. Under another name the
process would be there again."""


class _Policy(DefaultFailurePolicy):  # type: ignore[misc]
    """Tells the lane at once that workers failed, and why. Train starts others only where the lane wants them."""

    def __init__(self, lane: Lane, run: int, config: FailureConfig) -> None:
        super().__init__(config)
        self._lane, self._run = lane, run

    def make_decision(self, training_failed_error: Exception) -> FailureDecision:
        """Called by the controller, in the loop of the lanes."""
        failures: dict[int, Exception] = getattr(training_failed_error, "worker_failures", {})
        decision = super().make_decision(training_failed_error)
        if not failures:
            return decision
        died = {rank: why for rank, error in failures.items() if (why := death(error))}
        wanted = self._lane.lost(self._run, cause(training_failed_error), died)
        return decision if wanted else FailureDecision.RAISE


class _Place(DefaultPlacementGroupHandle):  # type: ignore[misc]
    """The place of a lane's workers, given back once no group is in it: the next one may start in it."""

    num_groups = 1

    def shutdown(self) -> None:
        self.num_groups -= 1
        if not self.num_groups:
            super().shutdown()


class _Workers(group_of_workers.WorkerGroup):  # type: ignore[misc]
    """Workers of a lane, which hears how long they wait for their place: another job may have taken it."""

    place: Callable[..., bool]
    places: list[_Place]  # the latest of the lane

    def _create_placement_group(self, *given: Any) -> Any:
        wanted = self._worker_group_context
        bundles = [wanted.resources_per_worker] * wanted.num_workers
        for there in self.places:
            if there.num_groups and there.placement_group.bundle_specs == bundles:
                there.num_groups += 1
                return there
        asked_s, handle = time.monotonic(), super()._create_placement_group(*given)
        while not handle.wait(LOOK_S):
            if not self.place(asked_s, math.inf):
                handle.shutdown()
                raise RuntimeError("its place is not waited for any more")
        self.place(asked_s, time.monotonic())
        self.places[:] = [_Place(handle.placement_group)]
        return self.places[0]

    @staticmethod
    def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
        """Leaves out variables of Train's that cluster or job have anyway: for them Ray would start new processes."""
        return custom_runtime_env

    def _create_workers(self, num_workers: int, place: Any, resources: dict[str, float], **more: Any) -> Any:
        # A command's worker takes all devices of its node; beside others those of the next engine have room. A rank has
        # one processor at most, so that Ray gives it one thread as before.
        share_frac = 1.0 if resources.get("GPU", 0.0) > 1 else 0.4
        part = {name: round(share_frac * amount, 4) for name, amount in resources.items()}
        return super()._create_workers(num_workers, place, part, **more)


class _Controller(TrainController):  # type: ignore[misc]
    """Train's controller of one group of workers as a coroutine: as an actor each would be a process of 300 MB here.

    What blocks in it is done in threads.
    """

    _health_check_interval_s: float
    _latest_poll_time: float

    def __init__(self, in_thread: InThread, workers: type[_Workers], num_workers: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._in_thread, self.worker_group_cls = in_thread, workers
        self._health_check_interval_s = max(self._health_check_interval_s, num_workers / POLLED_PER_S)

    async def _poll_workers(self) -> Any:
        due_s, wanted = self._latest_poll_time + self._health_check_interval_s, True
        while wanted and (left_s := due_s - time.monotonic()) > 0.0:
            await asyncio.sleep(min(left_s, LOOK_S / 4))
            wanted = self.worker_group_cls.place()
        poll = partial(self._worker_group.poll_status, timeout=self._health_check_interval_s)
        status = await self._in_thread(poll)
        self._latest_poll_time = time.monotonic()
        return status

    async def _step(self) -> Any:
        step = super()._step
        if isinstance(self.get_state(), RunningState):
            return await step()
        return await self._in_thread(lambda: asyncio.run(step()))  # it starts or ends workers, and waits for them


class _Nobody:
    """In the place of the actor where Train's workers would meet to report, which none does: a process each group."""

    def options(self, **_: Any) -> "_Nobody":
        """Returns itself."""
        return self

    remote = options


class Launcher:
    """Starts the workers of one lane."""

    lane: Lane
    post: Callable[[str], ActorHandle]

    def __init__(self, keeper: ActorHandle, name: str, scratch: str, storage: Path | None, in_thread: InThread) -> None:
        """Starts nothing yet. The workers call the `keeper` by the lane's name; the rest is set before they start."""
        self._keeper, self._name, self._scratch, self._storage = keeper, name, scratch, storage
        self._in_thread = in_thread
        self._places: list[_Place] = []

    async def launch(self, key: GroupKey, nodes: tuple[str, ...], restarts: bool, number: int) -> None:
        """See `wattune.orchestrate.lanes.worker_group.Launch`."""
        scratch = tempfile.mkdtemp(dir=self._scratch)
        try:
            controller = await self._in_thread(partial(self._made, key, nodes, restarts, number, scratch))
            await controller.run()
            if (error := controller.get_training_failed_error()) is not None:
                raise error
        except Exception as error:
            raise RuntimeError(cause(error)) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _made(
        self, key: GroupKey, nodes: tuple[str, ...], restarts: bool, number: int, scratch: str
    ) -> TrainController:
        runs_command = runs_program(key.engine)
        environment = dict(key.environment)
        trainer = _of_commands() if runs_command else _of_ranks(key, self._storage, nodes)
        head = ray.get_runtime_context().get_node_id()
        for node_id in {*nodes} - {head} if not runs_command else ():
            self.post(node_id)
        config = {"keeper": self._keeper, "head": head, "lane": self._name, "run": number}
        kind = {"place": staticmethod(partial(self.lane.place, number)), "places": self._places}
        # Train counts failures over a run's whole life; the lane has a breaker of its own.
        failures = FailureConfig(max_failures=-1 if restarts else 0, controller_failure_limit=1)
        return trainer(
            train_loop_config={**config, "device": key.device, "engine": key.engine, "storage": self._storage},
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
                failure_config=failures,
                worker_runtime_env={"env_vars": environment} if environment else None,
            ),
        ).controller(self._in_thread, type("Workers", (_Workers,), kind), _Policy(self.lane, number, failures))


# What follows loads a library where it is needed, in the workers: the study's own process and Tune's import this module
# for its actor, Train's controller does for its callback, and torch would take each of them seconds and much memory.


class _Trainer(DataParallelTrainer):  # type: ignore[misc]
    """A run without the processes that Train starts beside workers.

    No trial needs them, and each loads pandas and Ray Data before the workers may begin.
    """

    def _create_default_callbacks(self) -> list[Any]:
        return [each for each in super()._create_default_callbacks() if type(each).__name__ not in _START_A_PROCESS]

    def controller(self, in_thread: InThread, workers: type[_Workers], policy: _Policy) -> _Controller:
        """Makes what `fit` would run in an actor and wait for."""
        group_of_workers.SynchronizationActor, group_state._shutdown_sync_actor = _Nobody(), lambda _: None
        return _Controller(
            in_thread,
            workers,
            self.scaling_config.num_workers,
            train_fn_ref=ObjectRefWrapper(self._get_train_func()),
            scaling_policy=_Placed(self.scaling_config),
            failure_policy=policy,
            train_run_context=self.train_run_context,
            callbacks=self._create_default_callbacks(),
        )


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


def _of_ranks(key: GroupKey, storage: Path | None, nodes: tuple[str, ...]) -> Callable[..., DataParallelTrainer]:
    return partial(_Trainer, _serve_ranks, backend_config=_RanksMeet(key, storage, nodes))


class _RanksMeet(BackendConfig):  # type: ignore[misc]
    """Train's `TorchConfig`, but that no process loads torch for it except the workers."""

    backend_cls = property(lambda _: _Meeting)

    def __init__(self, key: GroupKey, storage: Path | None, nodes: tuple[str, ...]) -> None:
        """Keeps what the environment of the workers depends on."""
        self.key, self.storage, self.nodes = key, storage, nodes


class _Meeting(Backend):  # type: ignore[misc]
    """Makes the one store that ranks meet in: each has a connection to it, and none to another rank before its trial.

    Train's own backend makes a process group, of gloo every rank with every other.
    """

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: _RanksMeet) -> None:
        """Called by Train's controller once all workers are up."""
        key = backend_config.key
        worker_group.execute(prepare_environment, key.device, backend_config.storage)  # then they load torch
        if key.coming or EARLY in os.environ:
            worker_group.execute_async(_compile_ahead, key.coming, backend_config.nodes)
        address, port = worker_group.execute_single(0, get_address_and_port)
        count = len(worker_group)
        asked = [worker_group.execute_single_async(rank, _meet, address, port, rank, count) for rank in range(count)]
        ray.get(asked)


def _compile_ahead(coming: Sequence[TrialSpec], nodes: tuple[str, ...]) -> None:
    """Compiles coming plans beside this worker, as the ranks that its device will be in them."""
    try:
        from wattune.engines.ahead import start

        context = ray.get_runtime_context()
        (own,) = context.get_accelerator_ids()["GPU"]
        device = os.environ["CUDA_VISIBLE_DEVICES"].split(",").index(own)
        start(coming, Slot(node=nodes.index(context.get_node_id()), device=device))
    except Exception:  # of any class: trials compile themselves
        _log.warning("no graphs are compiled ahead", exc_info=True)


def _meet(address: str, port: int, rank: int, count: int) -> None:
    """Opens the store in which the ranks of every trial meet. Every worker runs it; the first holds the store."""
    from ray.train.torch.config import _set_torch_distributed_env_vars

    from wattune.engines.model.compiler import start_compilers
    from wattune.workers.process_groups import open_store

    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    _set_torch_distributed_env_vars()
    open_store(address, port, holds=rank == 0, num_ranks=count)
    start_compilers()


def _serve_ranks(config: dict[str, Any]) -> None:
    from ray.train.torch.config import TorchConfigContextManager

    from wattune.orchestrate.lanes.worker import await_turn, serve

    if await_turn(config):
        with TorchConfigContextManager():  # it makes a context on the device
            serve(config)


def _serve_commands(config: dict[str, Any]) -> None:
    prepare_environment(config["device"], config["storage"], runs_program=True)
    from wattune.orchestrate.lanes.command_worker import serve_commands

    serve_commands(config)

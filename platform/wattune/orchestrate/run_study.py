"""A study on Ray Tune: the controller chooses trials, Tune starts them, lanes of warm workers run them.

Tune does little on purpose: it asks the controller for trials and starts them, as calls to the one process that drives
all trials, and hears only that a trial's nodes are free, and that it is done.
Results travel through the study folder, so a study continues from its folder whatever happened to Tune. Tune's own
restore is not used.
"""

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final
from uuid import uuid4

import ray
from ray import tune
from ray.air.execution._internal import RayActorManager, TrackedActor
from ray.exceptions import RayError
from ray.tune import TuneError
from ray.tune.execution import tune_controller
from ray.tune.search import Searcher

from wattune.engines.registry import check_libraries
from wattune.errors import EngineError
from wattune.orchestrate import lost_cluster
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Cluster
from wattune.orchestrate.demand import StudyNodes
from wattune.orchestrate.events import TrialProgress
from wattune.orchestrate.lanes.actor import DONE_METRIC
from wattune.orchestrate.lanes.client import STOPPED_S, Lanes
from wattune.orchestrate.lanes.messages import GroupKey
from wattune.orchestrate.ray_folder import scratch_place
from wattune.orchestrate.run_trial import drive
from wattune.orchestrate.scheduling.controller import Ending, StudyController
from wattune.orchestrate.study_metrics import StudyMetrics
from wattune.orchestrate.trial_telemetry import own_devices, sensor_backends
from wattune.storage.study import StudyFolder
from wattune.trial import TrialSpec

_log = logging.getLogger(__name__)

_ASK_S: Final = 1.0
"""Longest time that known progress of running trials is used."""

_ASKED_S: Final = 5.0
"""Longest a study's end waits for an answer about progress; who asks gives up earlier."""


def run_study(
    study: StudyFolder,
    controller: StudyController,
    cluster: Cluster,
    candidates: Iterable[TrialSpec] = (),
    begin: Callable[[], object] = lambda: None,
) -> Ending:
    """Runs the trials that a study's controller starts, and leaves every result in the study's folder.

    Node sets that share no power or thermal domain run trials side by side; on each, one follows another. `begin` is
    called once the study owns what candidates set. Raises `EngineError`: the cluster ended before the study; finished
    trials are in the folder, `PlanError`: a device cannot be set as candidates ask, or another study sets it.
    """
    _quiet_ray()
    with (
        Lanes(drive, study.path.parent) as lanes,
        tempfile.TemporaryDirectory(prefix="wattune-tune-", dir=scratch_place(), ignore_cleanup_errors=True) as scratch,
    ):
        own_devices(candidates, cluster, lanes)
        begin()
        nodes, progress = StudyNodes(cluster, lanes), _Progress(lanes)
        controller.watch(StudyMetrics(study.name))
        controller.open(cluster, nodes)
        if (first := controller.first()) is not None:  # they start while Tune does
            spec, taken, coming = first
            resources = cluster.only(taken).resources_per_rank(spec.cluster)
            key = replace(GroupKey.of(spec, resources), coming=coming)
            lanes.prepare(key, taken, sensor_backends(spec))
        # Not public: Tune has no way to run trials but as an actor each.
        tune_controller.RayActorManager = lambda **_: _OneDriver(lanes, cluster)
        tuner = tune.Tuner(
            _trial,
            tune_config=tune.TuneConfig(
                search_alg=_StudySearcher(controller, progress),
                num_samples=-1,  # the controller decides when the study ends and how many trials run at once
                metric=DONE_METRIC,
                mode="max",
            ),
            run_config=tune.RunConfig(name=study.name, storage_path=scratch, verbose=0),
        )
        try:
            tuner.fit()
        except KeyboardInterrupt:
            controller.interrupt(lost_cluster.found())
            lanes.close(STOPPED_S)
        except (TuneError, RayError, ConnectionError) as error:
            cause = _cause(error)
            controller.interrupt(cause)
            raise EngineError(
                f"the study was cut short: {cause}; finished trials are in {study.path}; run the same command to "
                "continue"
            ) from error
        finally:
            progress.close()
    assert controller.ending is not None, "Tune goes on until the controller has an ending"
    return controller.ending


def require_libraries(specs: Iterable[TrialSpec], cluster: Cluster) -> None:
    """Checks that the libraries of trials are installed, before the first one fails for good without them.

    It checks trials that can only run on this node. On other nodes their workers check it. Raises `EngineError`: an
    engine's library is not installed.
    """
    for spec in {(spec.engine, spec.cluster, spec.plan.dtype): spec for spec in specs}.values():
        if [node.node_id for node in cluster.fitting(spec.cluster)] == [cluster.driver_node_id]:
            check_libraries(spec)


def _cause(error: Exception) -> str:
    """Finds the one line that says why Ray gave up; for an error of a trial's process Tune gives a whole traceback."""
    said = str(error).strip() or type(error).__name__
    return (said.splitlines()[-1] if said.startswith("Traceback") else " ".join(said.split()))[:300]


def _quiet_ray() -> None:
    """Keeps Ray from printing stacks of drivers and logs of dead nodes: the controller reports how trials ended."""
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)

    def to_log(data: Mapping[str, Any], *_: Any, **__: Any) -> None:
        _log.info("%s", "\n".join(map(str, data.get("lines", ()))))

    # Not public: Ray 2.60 writes these messages to standard output and has no public switch for them.
    ray._private.worker.print_to_stdstream = to_log


def _trial(config: dict[str, Any]) -> None:
    """Tune's name of what it runs: `_Driven` stands in its place."""


class _Driven:
    """A trial as Tune sees it: what it would ask of an actor goes to the process that drives all trials."""

    def __init__(self, attempt: Attempt, lanes: Lanes, cluster: Cluster) -> None:
        self._attempt, self._lanes, self._cluster = attempt, lanes, cluster
        self._is_free = False
        # Tune calls each by its `remote`, as it does an actor's.
        self.train = SimpleNamespace(remote=self._next)
        self.stop = self.__ray_ready__ = self.__ray_terminate__ = SimpleNamespace(remote=lambda *_, **__: ray.put(None))
        self.get_auto_filled_metrics = SimpleNamespace(remote=lambda *_, **__: ray.put({}))

    def _next(self) -> Any:
        """Runs the trial until its nodes are free; the second time, if Tune asks again, until its result is there."""
        if self._is_free:
            return self._lanes.concluded(self._attempt)
        self._is_free = True
        return self._lanes.drive(self._attempt, self._cluster)


class _OneDriver(RayActorManager):  # type: ignore[misc]
    """Tune's manager of actors, without any: a process and a placement group a trial would cost the head 300 MB."""

    def __init__(self, lanes: Lanes, cluster: Cluster) -> None:
        super().__init__(resource_manager=self)
        self._lanes, self._cluster = lanes, cluster

    def add_actor(self, cls: Any, kwargs: Mapping[str, Any], resource_request: Any, **heard: Any) -> TrackedActor:  # noqa: ARG002
        """Begins a trial at once: the controller has given it nodes."""
        actor = TrackedActor(uuid4().int, **heard)
        driven = _Driven(kwargs["config"]["attempt"], self._lanes, self._cluster)
        self._live_actors_to_ray_actors_resources[actor] = (driven, None)
        ready = driven.__ray_ready__.remote()
        self._tracked_actors_to_state_futures[actor].add(ready)
        self._actor_state_events.track_future(ready, lambda _: self._actor_start_resolved(actor, ready))
        return actor

    def remove_actor(self, tracked_actor: TrackedActor, kill: bool = False, stop_future: Any = None) -> bool:
        """Forgets a trial that ended. There is nothing to kill where Tune comes late to forget it."""
        return not kill and bool(super().remove_actor(tracked_actor, stop_future=stop_future))

    def get_resource_futures(self) -> list[Any]:
        """Resources that are waited for."""
        return []

    def free_resources(self, acquired_resource: Any) -> None:
        """Takes back nothing."""

    def get_live_actors_resources(self) -> dict[str, float]:
        """Resources that trials hold of Tune's."""
        return {}

    def cleanup(self) -> None:
        """Ends nothing: the lanes end what runs."""


class _Progress:
    """Asks the workers of trials for their progress."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._asked_s = -_ASK_S
        self._known: Mapping[str, TrialProgress] = {}
        self._asking = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Asks no more, and waits for the answer that is under way: none may arrive while Ray is disconnected."""
        self._closed = True
        if self._asking.acquire(timeout=_ASKED_S):
            self._asking.release()

    def of(self, attempt: Attempt) -> Callable[[], TrialProgress | None]:
        """Returns a function that asks the workers of a trial."""

        def ask() -> TrialProgress | None:
            with self._asking:
                if not self._closed and time.monotonic() - self._asked_s >= _ASK_S:
                    self._known = self._lanes.progress()  # one answer has the progress of all trials
                    self._asked_s = time.monotonic()
                return self._known.get(attempt.name)

        return ask


class _StudySearcher(Searcher):  # type: ignore[misc]
    """Tune's view of the controller. A trial's failure raises nothing here: that would end the study."""

    def __init__(self, controller: StudyController, progress: _Progress) -> None:
        super().__init__(metric=DONE_METRIC, mode="max")
        self._controller, self._progress = controller, progress

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        attempt = self._controller.next(trial_id, self._progress.of)
        if attempt is not None:
            return {"attempt": attempt}
        if self._controller.ending is not None:
            return str(Searcher.FINISHED)
        return None

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if not result[DONE_METRIC]:
            self._controller.free(trial_id)

    def on_trial_complete(
        self,
        trial_id: str,
        result: dict[str, Any] | None = None,  # noqa: ARG002 - the study folder has it
        error: bool = False,
    ) -> None:
        self._controller.finish(trial_id, error=error)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the controller out: Tune pickles its arguments for a restore that is not used."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_controller", "_progress")}

    def save(self, checkpoint_path: str) -> None:
        """Saves nothing: the study folder has everything."""

    def restore(self, checkpoint_path: str) -> None:
        """Restores nothing: the study folder has everything."""

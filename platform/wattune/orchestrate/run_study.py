"""A study on Ray Tune: the controller chooses trials, Tune starts them, lanes of warm workers run them.

Tune does little on purpose. Its trainable runs one trial and reports only that its nodes are free, and that it is done.
Results travel through the study folder, so a study continues from its folder whatever happened to Tune. Tune's own
restore is not used.
"""

import contextlib
import logging
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import ray
from ray import tune
from ray.exceptions import RayError
from ray.tune import TuneError
from ray.tune.search import Searcher

from wattune.engines.registry import check_libraries
from wattune.errors import EngineError, TelemetryError
from wattune.orchestrate import lost_cluster
from wattune.orchestrate.ask import ask_all
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Cluster, Node
from wattune.orchestrate.cooldown import wait_until_cool
from wattune.orchestrate.demand import StudyNodes
from wattune.orchestrate.events import TrialProgress
from wattune.orchestrate.failures import Cause, Failure, is_of_the_machine
from wattune.orchestrate.lanes.client import STOPPED_S, Lanes
from wattune.orchestrate.lanes.messages import GroupKey
from wattune.orchestrate.ray_folder import scratch_place
from wattune.orchestrate.run_trial import conclude, run_trial
from wattune.orchestrate.scheduling.controller import Ending, StudyController
from wattune.orchestrate.study_metrics import StudyMetrics
from wattune.orchestrate.trial_telemetry import own_devices, sensor_backends
from wattune.run import Run, RunStatus
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.trial import TrialSpec

_log = logging.getLogger(__name__)

_DONE_METRIC: Final = "done_trials"
"""The only metric the trainable reports; Tune needs one. 0 where the trial's nodes are free, 1 where it is done."""

_ASK_S: Final = 1.0
"""Longest time that known progress of running trials is used."""

_ASKED_S: Final = 5.0
"""Longest a study's end waits for an answer about progress; who asks gives up earlier."""

_TEMPERATURES_S: Final = 30.0
"""Longest a node may take to report its temperatures."""


def run_study(
    study: StudyFolder,
    controller: StudyController,
    cluster: Cluster,
    candidates: Iterable[TrialSpec] = (),
    begin: Callable[[], object] = lambda: None,
) -> Ending:
    """Runs the trials that a study's controller starts, and leaves every result in the study's folder.

    Node sets that share no power or thermal domain run trials side by side; on each, one follows another. `begin` is
    called once the study owns what candidates set.

    Raises:
        EngineError: The cluster ended before the study; finished trials are in the folder.
        PlanError: A device cannot be set as candidates ask, or another study sets it.
    """
    _quiet_ray()
    with (
        Lanes(study.path.parent) as lanes,
        tempfile.TemporaryDirectory(prefix="wattune-tune-", dir=scratch_place(), ignore_cleanup_errors=True) as scratch,
    ):
        own_devices(candidates, cluster, lanes)
        begin()
        nodes, progress = StudyNodes(cluster, lanes), _Progress(lanes)
        controller.watch(StudyMetrics(study.name))
        controller.open(cluster, nodes)
        if (first := controller.first()) is not None:  # they start while Tune does
            spec, taken = first
            resources = cluster.only(taken).resources_per_rank(spec.cluster)
            lanes.prepare(GroupKey.of(spec, resources), taken, sensor_backends(spec))
        trainable = tune.with_resources(
            tune.with_parameters(_trainable, cluster=cluster, lanes=lanes), _here(cluster.driver_node)
        )
        tuner = tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(
                search_alg=_StudySearcher(controller, progress),
                num_samples=-1,  # the controller decides when the study ends and how many trials run at once
                metric=_DONE_METRIC,
                mode="max",
                reuse_actors=True,
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

    It checks trials that can only run on this node. On other nodes their workers check it.

    Raises:
        EngineError: An engine's library is not installed.
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


def _here(node: Node) -> tune.PlacementGroupFactory:
    """Pins the drivers of trials to the node of the study's folder, of whose resources they need almost nothing."""
    return tune.PlacementGroupFactory([{node.address: 0.001}], bundle_label_selector=[{"ray.io/node-id": node.node_id}])


def _trainable(config: dict[str, Any], *, cluster: Cluster, lanes: Lanes) -> None:
    """Runs one repeat of one trial for Tune."""
    attempt: Attempt | None = config["attempt"]
    if attempt is None:  # only its process is wanted
        tune.report({_DONE_METRIC: 1})
        return
    attempt = replace(attempt, tags={**cluster.tags, **attempt.tags})
    try:
        _run(attempt, cluster.only(attempt.nodes), lanes)
    except (RayError, ConnectionError):
        # An error of the cluster: the controller checks whether a node died, and then repeats the trial.
        TrialFolder(attempt.folder).write_error(traceback.format_exc())
        raise
    except Exception as error:  # not the trial's fault, but people look for it in its result
        _note_failure(attempt, error)
    tune.report({_DONE_METRIC: 1})


def _run(attempt: Attempt, cluster: Cluster, lanes: Lanes) -> None:
    measure = attempt.measure
    if measure.cooldown_temp_c is not None:
        tags, numbers = wait_until_cool(
            lambda: _temperatures_c(attempt, lanes), below_c=measure.cooldown_temp_c, max_s=measure.cooldown_max_s
        )
        attempt = replace(attempt, tags={**attempt.tags, **tags}, numbers=attempt.numbers | numbers)
    run_trial(attempt, cluster, lanes, lambda: tune.report({_DONE_METRIC: 0}))


def _note_failure(attempt: Attempt, error: Exception) -> None:
    """Stores the result of a trial that an error of this program ended, and the error's stack beside it."""
    folder, now_ns = TrialFolder(attempt.folder), time.time_ns()
    with contextlib.suppress(OSError):  # the disk may be what failed
        folder.write_error("".join(traceback.format_exception(error)))
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}; see error.txt"
    result = Run(
        trial_id=attempt.trial_id,
        repeat=attempt.repeat,
        status=RunStatus.CRASHED,
        reason=f"wattune failed: {said}",
        tags=dict(attempt.tags),
        numbers=attempt.numbers,
        prediction=attempt.predicted,
        start_wall_ns=now_ns,
        end_wall_ns=now_ns,
    )
    if is_of_the_machine(error):
        result = Failure(Cause.HEAD, f"the study's node failed: {said}").of(result)
    conclude(folder, result)


def _temperatures_c(attempt: Attempt, lanes: Lanes) -> dict[str, float]:
    """Temperature of every device of a trial's nodes; empty if one node does not report them."""
    backends, nodes = sensor_backends(attempt.spec), attempt.nodes
    try:
        # The lanes' actors, not new ones: an actor ends with the handle of its maker.
        actors = zip(nodes, lanes.telemetry_actors(nodes, backends), strict=True)
    except TelemetryError:
        return {}
    told, silent = ask_all({node.name: actor.temperatures_c.remote() for node, actor in actors}, _TEMPERATURES_S)
    if silent or not all(told.values()):
        return {}
    return {f"{node}/{name}": value for node, found in told.items() for name, value in found.items()}


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
        super().__init__(metric=_DONE_METRIC, mode="max")
        self._controller, self._progress = controller, progress
        self._spare: str | None = None
        """Tune's name of a trial of nothing: its process takes over while that of a trial makes a result."""

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        attempt = self._controller.next(trial_id, self._progress.of)
        if attempt is not None:
            return {"attempt": attempt}
        if self._controller.ending is not None:
            return str(Searcher.FINISHED)
        if self._spare is None and self._controller.hands_over:
            self._spare = trial_id
            return {"attempt": None}
        return None

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if not result[_DONE_METRIC]:
            self._controller.free(trial_id)

    def on_trial_complete(
        self,
        trial_id: str,
        result: dict[str, Any] | None = None,  # noqa: ARG002 - the study folder has it
        error: bool = False,
    ) -> None:
        if trial_id != self._spare:
            self._controller.finish(trial_id, error=error)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the controller out: Tune pickles its arguments for a restore that is not used."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_controller", "_progress")}

    def save(self, checkpoint_path: str) -> None:
        """Saves nothing: the study folder has everything."""

    def restore(self, checkpoint_path: str) -> None:
        """Restores nothing: the study folder has everything."""

"""A study on Ray Tune: the ledger proposes, Tune starts trials, lanes of warm workers run them.

Tune is kept thin on purpose. Its trainable runs one trial and reports nothing but that it is done; results travel
through the study folder, so a study continues from its folder whatever became of Tune. Tune's own restore is not used.
"""

import logging
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import ray
from ray import tune
from ray.exceptions import GetTimeoutError, RayError
from ray.tune import TuneError
from ray.tune.search import Searcher

from wattune.engines.libraries import check_libraries
from wattune.errors import EngineError, TelemetryError
from wattune.orchestrate.cluster import Cluster, Node, alive_nodes, has_left
from wattune.orchestrate.cooldown import wait_until_cool
from wattune.orchestrate.events import TrialProgress
from wattune.orchestrate.lanes.client import Lanes
from wattune.orchestrate.run_trial import TrialRequest, conclude, run_trial
from wattune.orchestrate.scheduling.controller import Ending, StudyController
from wattune.orchestrate.scheduling.trial_queue import RunningTrial, StudyRun
from wattune.orchestrate.trial_telemetry import sensor_backends
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.trial import TrialResult, TrialSpec, TrialStatus

_log = logging.getLogger(__name__)

_DONE_METRIC: Final = "done_trials"
"""The only thing the trainable reports; Tune insists on a metric."""

_ASK_S: Final = 1.0
"""How old what is known of running trials may be."""

_TEMPERATURES_S: Final = 30.0
"""Longest a node may take to say how warm it is."""


def run_study(study: StudyFolder, ledger: StudyController, run: StudyRun, cluster: Cluster) -> Ending:
    """Runs what a study's ledger proposes, and leaves every result in the study's folder.

    Node sets that share no power or thermal domain run trials side by side; on each, one follows another.

    Args:
        study: The study's folder; trials finished there are not run again.
        ledger: Says what runs where, and keeps what came of it.
        run: How to run it.
        cluster: Where to run it.

    Returns:
        Why it ended.

    Raises:
        EngineError: The cluster ended under the study; what was finished is in the folder.
    """
    _quiet_ray()
    with (
        Lanes() as lanes,
        tempfile.TemporaryDirectory(prefix="wattune-tune-", ignore_cleanup_errors=True) as scratch,
    ):
        alive = _Alive(cluster, lanes)
        ledger.open(cluster, alive, alive.has_left)
        trainable = tune.with_resources(tune.with_parameters(_trainable, lanes=lanes), _here(cluster.driver_node))
        tuner = tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(
                search_alg=_LedgerSearcher(ledger, _Dispatcher(study, run, cluster, lanes)),
                num_samples=-1,  # until the ledger says it is finished; how many at once is the ledger's, too
                metric=_DONE_METRIC,
                mode="max",
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(name=study.name, storage_path=scratch, verbose=0),
        )
        try:
            tuner.fit()
        except KeyboardInterrupt:
            ledger.interrupt()
        except (TuneError, RayError, ConnectionError) as error:
            raise EngineError(
                f"the study was cut short: {_cause(error)}; what was finished is in {study.path}, the same command "
                "continues"
            ) from error
    assert ledger.ending is not None, "Tune goes on until the ledger says why it ends"
    return ledger.ending


def require_libraries(specs: Iterable[TrialSpec], cluster: Cluster) -> None:
    """Looks for what trials need to be installed, before the first one fails for good without it.

    Only where they can run on no other node than this one; the workers of other nodes say it themselves.

    Raises:
        EngineError: An engine's library is not there.
    """
    for spec in {(spec.engine, spec.cluster): spec for spec in specs}.values():
        if [node.node_id for node in cluster.fitting(spec.cluster)] == [cluster.driver_node_id]:
            check_libraries(spec)


def _cause(error: Exception) -> str:
    """Why Ray gave up, in one line; of what a trial's own process raised, Tune gives the whole traceback."""
    said = str(error).strip() or type(error).__name__
    return (said.splitlines()[-1] if said.startswith("Traceback") else " ".join(said.split()))[:300]


def _quiet_ray() -> None:
    """Keeps Ray from printing stacks of drivers and logs of nodes that died: the ledger says what became of trials."""
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)

    def to_log(data: Mapping[str, Any], *_: Any, **__: Any) -> None:
        _log.info("%s", "\n".join(map(str, data.get("lines", ()))))

    # Not public; nothing public keeps these messages, which Ray 2.60 writes to standard output, from it.
    ray._private.worker.print_to_stdstream = to_log


def _here(node: Node) -> tune.PlacementGroupFactory:
    """Pins the drivers of trials to the node of the study's folder; they need next to nothing of it."""
    return tune.PlacementGroupFactory([{node.address: 0.001}], bundle_label_selector=[{"ray.io/node-id": node.node_id}])


class _Alive:
    """The nodes that are alive whenever it is called; lanes on those that left are forgotten."""

    def __init__(self, cluster: Cluster, lanes: Lanes) -> None:
        self._nodes, self._lanes = list(cluster.nodes), lanes
        self._missed: set[str] = set()

    def has_left(self, node: Node) -> bool:
        """Whether a node is gone, of which nothing is expected from then on until it answers again."""
        if has_left(node):
            self._missed.add(node.node_id)
            return True
        self._missed.discard(node.node_id)
        return False

    def __call__(self) -> list[Node]:
        listed = alive_nodes(self._nodes)
        self._missed &= {node.node_id for node in listed}
        now = [node for node in listed if node.node_id not in self._missed or not self.has_left(node)]
        alive = {node.node_id for node in now}
        gone = [node.node_id for node in self._nodes if node.node_id not in alive]
        if gone:
            self._lanes.forget_nodes(gone)
        self._nodes = now
        return now


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What Tune hands to the trainable: one trial, and where it runs."""

    request: TrialRequest
    cluster: Cluster

    def __repr__(self) -> str:
        """Short: Tune makes names of it."""
        return self.request.folder.name

    def __deepcopy__(self, _memo: dict[int, Any]) -> "_Work":
        """Itself: Tune copies every configuration, and nothing in this one changes."""
        return self


def _trainable(config: dict[str, Any], *, lanes: Lanes) -> None:
    """What Tune runs: one repeat of one trial."""
    work: _Work = config["work"]
    try:
        _run(work, lanes)
    except (RayError, ConnectionError):  # the cluster's: the ledger looks whether it is the node, and repeats the trial
        TrialFolder(work.request.folder).write_error(traceback.format_exc())
        raise
    except Exception as error:  # not the trial's fault, but its result is where people look
        _note_failure(work, error)
    tune.report({_DONE_METRIC: 1})


def _run(work: _Work, lanes: Lanes) -> None:
    request, measure = work.request, work.request.measure
    if measure.cooldown_temp_c is not None:
        waited = wait_until_cool(
            lambda: _temperatures_c(work, lanes), below_c=measure.cooldown_temp_c, max_s=measure.cooldown_max_s
        )
        request = replace(request, tags={**request.tags, **waited})
    run_trial(request, work.cluster, lanes)


def _note_failure(work: _Work, error: Exception) -> None:
    """Stores a trial that an error of this program ended, with the error's stack beside it."""
    request, now_ns = work.request, time.time_ns()
    folder = TrialFolder(request.folder)
    folder.write_error("".join(traceback.format_exception(error)))
    conclude(
        folder,
        TrialResult(
            trial_id=request.spec.trial_id,
            repeat=request.repeat,
            status=TrialStatus.CRASHED,
            reason=f"wattune failed: {type(error).__name__}: {' '.join(str(error).split())[:500]}; see error.txt",
            tags=dict(request.tags),
            start_wall_ns=now_ns,
            end_wall_ns=now_ns,
        ),
    )


def _temperatures_c(work: _Work, lanes: Lanes) -> dict[str, float]:
    """How warm every device of a trial's nodes is; empty where one of them does not say."""
    backends = sensor_backends(work.request.spec)
    nodes = work.cluster.nodes
    try:
        # The lanes' actors, not ones of our own: an actor ends with the handle of whoever made it.
        asked = [actor.temperatures_c.remote() for actor in lanes.telemetry_actors(nodes, backends)]
        told: list[Mapping[str, float]] = ray.get(asked, timeout=_TEMPERATURES_S)
    except (RayError, GetTimeoutError, TelemetryError):
        return {}
    if not all(told):
        return {}
    return {
        f"{node.name}/{name}": value for node, found in zip(nodes, told, strict=True) for name, value in found.items()
    }


class _Dispatcher:
    """Makes of a turn what Tune hands to the trainable, and asks how far it is."""

    def __init__(self, study: StudyFolder, run: StudyRun, cluster: Cluster, lanes: Lanes) -> None:
        self._study, self._run, self._cluster, self._lanes = study, run, cluster, lanes
        self._asked_s = -_ASK_S
        self._progress: Mapping[str, TrialProgress] = {}

    def work(self, ticket: RunningTrial) -> _Work:
        """A turn as Tune hands it to the trainable, on its nodes alone."""
        turn = ticket.turn
        request = TrialRequest(
            spec=turn.spec,
            repeat=turn.repeat,
            measure=turn.measure,
            seed=self._run.seed,
            folder=self._study.trial(turn.trial_id, turn.repeat).path,
            limits=self._run.limits,
            tags={**self._cluster.tags, **ticket.tags},
            isolation=self._run.isolation,
        )
        return _Work(request=request, cluster=self._cluster.only(ticket.nodes))

    def asks_progress(self, ticket: RunningTrial) -> Callable[[], TrialProgress | None]:
        """What asks the workers of a turn how far they are."""
        name = self._study.trial(ticket.turn.trial_id, ticket.turn.repeat).path.name

        def ask() -> TrialProgress | None:
            if time.monotonic() - self._asked_s >= _ASK_S:  # one answer tells of all trials
                self._progress = self._lanes.progress()
                self._asked_s = time.monotonic()
            return self._progress.get(name)

        return ask


class _LedgerSearcher(Searcher):  # type: ignore[misc]
    """Tune's view of the ledger. Nothing of a trial raises here: an exception in a callback would end the study."""

    def __init__(self, ledger: StudyController, dispatcher: _Dispatcher) -> None:
        super().__init__(metric=_DONE_METRIC, mode="max")
        self._ledger, self._dispatcher = ledger, dispatcher

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        ticket = self._ledger.next(trial_id, self._dispatcher.asks_progress)
        if ticket is not None:
            return {"work": self._dispatcher.work(ticket)}
        return str(Searcher.FINISHED) if self._ledger.ending is not None else None

    def on_trial_complete(
        self,
        trial_id: str,
        result: dict[str, Any] | None = None,  # noqa: ARG002 - the study folder has it
        error: bool = False,
    ) -> None:
        self._ledger.finish(trial_id, error=error)

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its arguments for a restore that is not used; the ledger stays with this process."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_ledger", "_dispatcher")}

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: the study folder has it."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore: the study folder has it."""

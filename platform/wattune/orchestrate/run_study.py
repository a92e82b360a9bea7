"""A study on Ray Tune: the strategy proposes, Tune starts trials, the study folder is the ledger.

Tune is kept thin on purpose. Its trainable runs one trial and reports nothing but that it is done; results travel
through the study folder, so a study continues from its folder whatever became of Tune. Tune's own restore is not used.
"""

import logging
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from ray import tune
from ray.tune.search import Searcher

from wattune.orchestrate.cluster import Cluster
from wattune.orchestrate.run_trial import TrialRequest, run_trial
from wattune.search.strategy import Strategy
from wattune.study import StudyFolder
from wattune.trial import Measure, TrialResult, TrialSpec, TrialStatus

_log = logging.getLogger(__name__)

_DONE_METRIC: Final = "done_trials"
"""The only thing the trainable reports; Tune insists on a metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEvent:
    """Something that happened to a trial, for whoever shows progress or tracks results."""

    kind: Literal["skipped", "started", "finished"]
    spec: TrialSpec
    repeat: int
    result: TrialResult | None = None
    """The result, unless the trial only started."""


Listener = Callable[[TrialEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """How a study is run, apart from what it searches."""

    measure: Measure
    num_trials: int
    """Different specifications to try, those already done in the folder included."""
    seed: int
    limits: Mapping[str, float]
    tags: Mapping[str, str]
    """Facts of the environment to keep with every result."""
    finalists: Callable[[], Sequence[TrialSpec]]
    """The best trials so far, best first; asked once, when the strategy has no more to propose."""


def run_study(study: StudyFolder, strategy: Strategy, run: StudyRun, cluster: Cluster, listener: Listener) -> bool:
    """Runs a study's trials, one after another, and leaves every result in its folder.

    Trials that share a machine share its power and its air, so they never overlap.

    Args:
        study: The study's folder; trials finished there are not run again.
        strategy: Proposes specifications and learns from results.
        run: How to run them.
        cluster: Where to run them.
        listener: Told of every trial; called from one thread at a time.

    Returns:
        Whether the study ran to its end; False after Ctrl-C, with the trial in flight marked interrupted.
    """
    ledger = _Ledger(study, strategy, run, listener)
    # Pinned to this node: the study folder is here.
    trainable = tune.with_resources(
        tune.with_parameters(_trainable, study=study, seed=run.seed, limits=run.limits, tags=run.tags, cluster=cluster),
        {"cpu": 0, cluster.driver_node.address: 0.001},
    )
    with tempfile.TemporaryDirectory(prefix="wattune-tune-", ignore_cleanup_errors=True) as scratch:
        tuner = tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(
                search_alg=_LedgerSearcher(ledger),
                num_samples=-1,  # until the ledger says it is finished
                max_concurrent_trials=1,
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
            return False
    return True


def _trainable(
    config: dict[str, Any],
    *,
    study: StudyFolder,
    seed: int,
    limits: Mapping[str, float],
    tags: Mapping[str, str],
    cluster: Cluster,
) -> None:
    """What Tune runs: one repeat of one trial."""
    spec = TrialSpec.from_json(config["spec"])
    request = TrialRequest(
        spec=spec,
        repeat=config["repeat"],
        measure=Measure(**config["measure"]),
        seed=seed,
        folder=study.trial(spec.trial_id, config["repeat"]).path,
        limits=limits,
        tags=tags,
    )
    run_trial(request, cluster)
    tune.report({_DONE_METRIC: 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """One repeat of one trial that is to run."""

    spec: TrialSpec
    repeat: int
    measure: Measure


class _Ledger:
    """What is to do, what runs, and what came of it, always as the study folder has it."""

    def __init__(self, study: StudyFolder, strategy: Strategy, run: StudyRun, listener: Listener) -> None:
        self._study, self._strategy, self._run, self._listener = study, strategy, run, listener
        self._asked = 0
        self._soaking = False
        self._pending: deque[_Turn] = deque()
        self._in_flight: dict[str, _Turn] = {}
        self._lock = threading.Lock()

    def next(self, tune_id: str) -> _Turn | None:
        """The next repeat to run, None when the study is finished."""
        with self._lock:
            while self._pending or self._refill():
                turn = self._pending.popleft()
                done = self._study.trial(turn.spec.trial_id, turn.repeat).result()
                if done is None or not done.status.is_final:
                    self._in_flight[tune_id] = turn
                    self._tell("started", turn, None)
                    return turn
                self._strategy.tell(turn.spec, done)
                self._tell("skipped", turn, done)
            return None

    def _refill(self) -> bool:
        """Puts the repeats of the next trial in line, or of the finalists; says whether there were any."""
        measure = self._run.measure
        proposed = self._strategy.ask(1) if self._asked < self._run.num_trials else []
        if proposed:
            self._asked += len(proposed)
            turns = [(spec, repeat, measure) for spec in proposed for repeat in range(measure.repeats)]
        elif measure.soak_finalists and not self._soaking:
            self._soaking = True
            soak = replace(measure, min_seconds=measure.soak_seconds)
            turns = [(spec, measure.repeats, soak) for spec in self._run.finalists()[: measure.soak_finalists]]
        else:
            return False
        self._pending += [_Turn(spec=spec, repeat=repeat, measure=how) for spec, repeat, how in turns]
        return bool(turns)

    def finish(self, tune_id: str, *, error: bool) -> None:
        """Reads what a trial left in its folder, and tells strategy and listener.

        A trial whose own driver died (Tune says error, or no result is there) gets the result `crashed`.
        """
        with self._lock:
            turn = self._in_flight.pop(tune_id)
            result = self._study.trial(turn.spec.trial_id, turn.repeat).result()
            if result is None or not result.status.is_final:
                why = "the trial's driver process ended" if error else "the trial left no result"
                result = self._close(turn, TrialStatus.CRASHED, why)
            self._strategy.tell(turn.spec, result)
            self._tell("finished", turn, result)

    def interrupt(self) -> None:
        """Marks what runs as interrupted, unless its result arrived at the last moment."""
        with self._lock:
            for turn in self._in_flight.values():
                if self._study.trial(turn.spec.trial_id, turn.repeat).result() is None:
                    self._tell("finished", turn, self._close(turn, TrialStatus.INTERRUPTED, "stopped by the user"))
            self._in_flight.clear()

    def _close(self, turn: _Turn, status: TrialStatus, reason: str) -> TrialResult:
        now_ns = time.time_ns()
        result = TrialResult(
            trial_id=turn.spec.trial_id,
            repeat=turn.repeat,
            status=status,
            reason=reason,
            tags=dict(self._run.tags),
            start_wall_ns=now_ns,
            end_wall_ns=now_ns,
        )
        folder = self._study.trial(turn.spec.trial_id, turn.repeat)
        folder.write_spec(turn.spec)
        folder.write_result(result)
        return result

    def _tell(self, kind: Literal["skipped", "started", "finished"], turn: _Turn, result: TrialResult | None) -> None:
        try:
            self._listener(TrialEvent(kind=kind, spec=turn.spec, repeat=turn.repeat, result=result))
        except Exception:  # a listener shows or sends results that are safe on disk; Tune would end the study for it
            _log.exception("a listener failed on trial %s-%d", turn.spec.trial_id, turn.repeat)


class _LedgerSearcher(Searcher):  # type: ignore[misc]
    """Tune's view of the ledger. Nothing raises here: an exception in Tune's callbacks would end the whole study."""

    def __init__(self, ledger: _Ledger) -> None:
        super().__init__(metric=_DONE_METRIC, mode="max")
        self._ledger = ledger

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        turn = self._ledger.next(trial_id)
        if turn is None:
            return str(Searcher.FINISHED)
        return {"spec": turn.spec.to_json(), "repeat": turn.repeat, "measure": asdict(turn.measure)}

    def on_trial_complete(
        self,
        trial_id: str,
        result: dict[str, Any] | None = None,  # noqa: ARG002 - the study folder has it
        error: bool = False,
    ) -> None:
        self._ledger.finish(trial_id, error=error)

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its arguments for a restore that is not used; the ledger stays with this process."""
        return {name: value for name, value in self.__dict__.items() if name != "_ledger"}

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: the study folder has it."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore: the study folder has it."""

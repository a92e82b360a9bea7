"""The controller of a study: starts trials and keeps their results as the study folder has them. No Ray here.

The folder is read once, when the controller is made. After that a trial costs the same however many were done before.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from wattune.errors import PlanError
from wattune.fidelity import UNPROFILED, role_of, role_tags
from wattune.orchestrate.attempt import PASSED_ON, Attempt
from wattune.orchestrate.events import Event, Listener, Preview, TrialEvent, TrialProgress
from wattune.orchestrate.failures import (
    CUT_OFF,
    RUNS_AGAIN,
    Cause,
    Failure,
    cut_short,
    failed_nodes,
    is_tried_again,
)
from wattune.orchestrate.power_limit import NODE_POWER, NODE_POWER_PEAK
from wattune.orchestrate.scheduling.node_wait import NodeWait
from wattune.orchestrate.scheduling.nodes import Slots
from wattune.orchestrate.scheduling.outlook import placement
from wattune.orchestrate.scheduling.run_order import workers_of
from wattune.orchestrate.scheduling.study_run import StudyRun
from wattune.orchestrate.scheduling.trial_queue import TrialQueue
from wattune.run import NO_NUMBERS, Numbers, Run, RunStatus
from wattune.scale_down.reading import read_run
from wattune.search.strategy import Strategy
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.trial import TrialSpec

if TYPE_CHECKING:
    from wattune.orchestrate.cluster import Cluster, Node
    from wattune.orchestrate.demand import StudyNodes

_log = logging.getLogger(__name__)

Ending = Literal["finished", "interrupted", "budget", "nodes", "failures"]
"""The end of a call: nothing is left, Ctrl-C, the budget is spent, nodes are missing for trials that are left, or the
cluster failed trials that are left (or all of a kind failed alike, and the rest was not started)."""

AskProgress = Callable[[Attempt], Callable[[], TrialProgress | None]]

LOOK_EVERY_S: Final = 1.0
"""Seconds between two looks at which nodes are alive."""

STOPPED: Final = f"stopped by the user{RUNS_AGAIN}"
"""Reason of trials that ran at a Ctrl-C, a SIGTERM or `ray job stop`.

Written first: the study may be killed right after.
"""

CONCLUDED_S: Final = 2.0
"""Longest a study that is stopped waits for the results of trials that are measured, of all node sets together."""
_RESULT_LOOK_S: Final = 0.05

_MAY_BE_A_DEAD_NODE: Final = (
    RunStatus.CRASHED,
    RunStatus.TIMED_OUT,
    RunStatus.INVALID,
    RunStatus.INFRA_FAILED,
)
"""Statuses of a trial whose node may have died."""


def recover(
    study: StudyFolder, tags: Mapping[str, str], numbers: Numbers = NO_NUMBERS
) -> tuple[list[tuple[TrialSpec, Run]], dict[str, str]]:
    """Reads a study that no process runs, and marks trials that ran when its last process died as `interrupted`.

    Returns its results, and the trials whose files cannot be read: they are left as they are, and not run again.
    """
    results: list[tuple[TrialSpec, Run]] = []
    unreadable: dict[str, str] = {}
    for folder in study.trials():
        try:
            spec, result = folder.read()
            trial_id, repeat = folder.key()
        except PlanError as error:
            unreadable[folder.path.name] = str(error)
            continue
        if result is None:
            result = Run(
                trial_id=trial_id,
                repeat=repeat,
                status=RunStatus.INTERRUPTED,
                reason=CUT_OFF,
                tags=dict(tags),
                numbers=numbers,
                start_wall_ns=folder.begun_wall_ns(),
                end_wall_ns=time.time_ns(),
            )
            folder.write_result(result)
        results.append((spec, result))
    return results, unreadable


class StudyController:
    """Chooses the next trial and keeps the results. Every method may be called from any thread."""

    def __init__(self, study: StudyFolder, strategy: Strategy, run: StudyRun, listener: Listener) -> None:
        """Reads the study folder, which this process holds, and marks trials that ran when the study last ended.

        The listener is called from one thread at a time.
        """
        self._begun_ns = time.monotonic_ns()
        self._study, self._strategy, self._run, self._listeners = study, strategy, run, [listener]
        self._queue = TrialQueue(strategy, run, *recover(study, run.tags, run.numbers))
        self._lock = threading.RLock()
        self._ending: Ending | None = None
        self._slots: Slots | None = None
        self._nodes: StudyNodes  # open() comes first
        self._looked_s = -math.inf
        self._wait, self._told_passed_on = NodeWait(), False
        self._running: dict[str, Attempt] = {}
        self._measured: set[str] = set()
        """Those that run whose steps are done, so that their nodes are free."""
        self.stopped: list[str] = []
        """Descriptions of what kept trials from starting that are left, if their nodes are there."""

    def begin(self, check: Callable[[Preview], object] | None = None) -> Preview:
        """Emits the preview, if `check` does not raise, and what is skipped; returns the work left, as far as known."""
        with self._lock:
            preview = self._queue.preview()
            if check is not None:
                check(preview)
            self._emit(preview)
            for spec, result in self._queue.skipped:
                if not self._strategy.learns:  # the queue has told a strategy that learns, before it asked it
                    self._strategy.tell(spec, read_run(spec, result))
                self._emit(_skipped(spec, result))
        return preview

    def watch(self, listener: Listener) -> None:
        """Calls one more listener from now on; what was skipped it hears at once."""
        with self._lock:
            for spec, result in self._queue.skipped:
                listener(replace(_skipped(spec, result), num_left=self._num_to_come))
            self._listeners.append(listener)

    def open(self, cluster: "Cluster", nodes: "StudyNodes") -> None:
        """Gives the study its nodes, and emits the placement of its trials."""
        with self._lock:
            self._slots, self._nodes = Slots(cluster, self._begun_ns), nodes
            self._emit(placement(self._queue.preview(self._slots), self._slots))
            self._look()  # before anything of this study holds a part of them

    def first(self) -> "tuple[TrialSpec, tuple[Node, ...], tuple[TrialSpec, ...]] | None":
        """Returns a trial of the kind that starts first, its nodes, whose workers may start at once, and what comes.

        None where a strategy chooses the kind later, where its workers are new anyway, or the nodes are not there.
        """
        with self._lock:
            spec, coming = self._of_first_kind(), self.coming()
            late = coming if self._strategy.learns else coming[1:]  # its workers come too late to compile the first
            return next(((spec, nodes, late) for nodes in self._opened.lanes(spec.cluster)), None) if spec else None

    def coming(self) -> tuple[TrialSpec, ...]:
        """Returns plans of that kind whose graphs can be compiled before they run, in order where it is known."""
        with self._lock:
            spec = self._of_first_kind()
            return self._queue.outlook.coming(spec, learns=self._strategy.learns) if spec else ()

    def _of_first_kind(self) -> TrialSpec | None:
        waiting = [one.spec for one in self._queue.first()[:1]]
        kinds = {workers_of(spec): spec for spec in waiting or self._run.candidates}
        (spec, *others) = kinds.values() or (None,)
        return None if others or self._run.isolation == "fresh" or (not waiting and spec and spec.program) else spec

    @property
    def ending(self) -> Ending | None:
        """The reason no trial will start any more; None while one may."""
        return self._ending

    @property
    def missing(self) -> list[str]:
        """Nodes that the trials left behind need and the cluster lacks, one text for each kind of cluster."""
        wanted = dict.fromkeys(
            [*(queued.spec.cluster for queued in self._queue.waiting.stranded), *self._wait.clusters]
        )
        return [self._opened.missing(spec) for spec in wanted]

    @property
    def num_left(self) -> int:
        """Trials that are left when nothing runs, as far as it is known: see `TrialQueue.num_left`."""
        return self._queue.num_left

    def next(self, tune_id: str, progress: AskProgress | None = None) -> Attempt | None:
        """Starts the next trial, under its name in the call of `finish`; None while none can start.

        It is None for good once `ending` is set. `progress` returns a function that asks a running trial for its
        progress.
        """
        with self._lock:
            self._look()
            while self._ending is None:
                self._tell_race()
                found = self._queue.pop(self._opened, self._affords)
                if found is not None:
                    running = self._placed(*found)
                    if not self._rejected(running) and self._begun(tune_id, running, progress):
                        return running
                elif self._ending is not None or not self._queue.refill(self._opened, idle=not self._running):
                    break
            self._tell_race()
            if self._ending is None and not self._running and not self._waits():
                self._ending = (
                    "nodes" if self._wait.clusters else "failures" if self._queue.waiting.failed else "finished"
                )
            return None

    def _waits(self) -> bool:
        """Returns whether nodes may still come, or come free, for trials while nothing runs."""
        if not self._wait.clusters:  # else the look at the nodes, once a second, has noted it
            self._note_wait()
        return self._wait.goes_on(self._run.wait_nodes_s, of_others=bool(self._queue.waiting))

    def _note_wait(self) -> None:
        if self._wait.note(self._queue, self._opened, self._nodes):
            self._emit(
                replace(placement(self._queue.preview(self._opened), self._opened), waits_for=self._wait.waits_for)
            )

    def _tell_race(self) -> None:
        if (step := self._queue.race_news()) is not None:
            self._emit(step)

    def free(self, tune_id: str) -> None:
        """Frees the nodes of a trial whose steps are done: another may start there while its result is made."""
        with self._lock:
            if (running := self._running.get(tune_id)) is None or tune_id in self._measured:
                return
            self._measured.add(tune_id)
            self._opened.release(running.nodes)
            self._queue.warm.freed(running.spec, running.repeat, running.tags["nodes"])
            if self._run.budget is not None:
                self._run.budget.settle(tune_id)

    def finish(self, tune_id: str, *, error: bool) -> None:
        """Reads the result that a trial left in its folder, and passes it to strategy and listener.

        A trial that the cluster failed is queued again, for other nodes if there are some, up to `MOST_TRIES`.
        """
        with self._lock:
            # It stays there until the end: after a Ctrl-C between any two of these lines `interrupt` concludes it.
            running = self._running[tune_id]
            folder = self._folder(running)
            result = self._ended_as(running, folder, error=error)
            self.free(tune_id)
            again = is_tried_again(result, folder.attempts()) or result.status is RunStatus.INTERRUPTED
            if again:
                self._queue.waiting.add_first(replace(running, avoid=failed_nodes(result)))
            elif not result.status.is_final:
                self._queue.give_up(running)
            self._conclude(running, result, again=again)
            if (stopped := self._queue.add_to_row(running.spec, result)) is not None:
                self.stopped.append(str(stopped))
                self._emit(stopped)
            self._measured.discard(tune_id)
            del self._running[tune_id]
            self._tell_race()  # the call may have ended before this result was made

    def _ended_as(self, running: Attempt, folder: TrialFolder, *, error: bool) -> Run:
        """Returns the result of a trial that ended, and writes it unless the trial has."""
        found = folder.result()
        dead = self._dead_nodes(running) if found is None or found.status in _MAY_BE_A_DEAD_NODE else ()
        result = found or self._ended(running, RunStatus.CRASHED, "the trial left no result")
        if dead:
            self._looked_s = -math.inf  # the repeat must not start there
            reason = f"node {', '.join(dead)} left the cluster"
            reason = reason if found is None else f"{reason}; {found.reason}"
            result = Failure(Cause.NODE_LOST, reason, dead).of(result)
        elif found is None and error:
            result = Failure(Cause.HEAD, "the process that drives the trials ended; Ray starts it again").of(result)
        if result is not found:
            self._keep(folder, result)
        return result

    def interrupt(self, cause: str = "") -> None:
        """Marks running trials as interrupted, unless their result arrived at the last moment.

        `cause` is the reason this call ended by itself; empty where a user stopped it.
        """
        reason, end_s = cut_short(cause) if cause else STOPPED, time.monotonic() + CONCLUDED_S
        with self._lock:
            self._ending = "interrupted"
            # First those whose steps run: whoever stops a study may kill it soon. The others are measured to their end.
            for tune_id, running in sorted(self._running.items(), key=lambda one: one[0] in self._measured):
                while tune_id in self._measured and time.monotonic() < end_s and self._folder(running).result() is None:
                    time.sleep(_RESULT_LOOK_S)
                ended = self._ended(running, RunStatus.INTERRUPTED, reason)
                stopped = self._folder(running).keep_result(ended)
                if not stopped.status.is_final:
                    self._queue.waiting.add_first(running)  # for whoever continues the study: it counts as left
                self._conclude(running, stopped)
                del self._running[tune_id]

    @property
    def _num_to_come(self) -> int:
        """Trials this call is expected to start after those that run now."""
        budget = self._run.budget
        return self._queue.num_left if budget is None else int(min(self._queue.num_left, budget.num_left))

    @property
    def _opened(self) -> Slots:
        assert self._slots is not None, "open() comes first"
        return self._slots

    def _look(self) -> None:
        """Notes nodes that died or joined, and what other jobs use, at most every `LOOK_EVERY_S`."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            if self._opened.update(self._nodes.alive(), self._nodes.used_by_others()):
                self._queue.waiting.reconsider()
            self._note_wait()

    def _affords(self, queued: Attempt) -> bool:
        budget = self._run.budget
        if budget is None or budget.allows(self._queue.expected_s(queued), queued.spec.cluster.world_size):
            return True
        self._ending = "budget"
        return False

    def _placed(self, queued: Attempt, nodes: "tuple[Node, ...]") -> Attempt:
        raced = self._run.search.finalists if queued.role == "race" else None
        folder, run = self._folder(queued), self._run
        num_attempts = len(folder.attempts())
        if folder.result() is not None:  # interrupted: it is set aside when this attempt begins
            num_attempts += 1
        left_out = run.measure.profile_steps is None and not self._queue.is_profiled(queued)
        tags = {**run.tags, "nodes": ",".join(node.name for node in nodes), **role_tags(queued.role)}
        return replace(
            queued,
            measure=replace(queued.measure, profile_steps=0) if left_out else queued.measure,
            nodes=nodes,
            folder=folder.path,
            seed=run.search.seed,
            limits=run.limits,
            free_since_ns=self._opened.free_since_ns(nodes),
            tags={**tags, "profile": UNPROFILED} if left_out else tags,
            numbers=replace(
                run.numbers,
                node_wait_s=self._wait.end(queued.spec.cluster),
                attempt=num_attempts + 1 if num_attempts else None,
                race_until_probability=None if raced is None else raced.until,
            ),
            isolation=run.isolation,
            alone=run.may_fill_memory(queued.spec),
            then=self._queue.outlook.then(queued.spec, self._opened),
            stop_above_s=self._queue.stop_above_s(queued),
        )

    def _rejected(self, running: Attempt) -> bool:
        """Stores a trial as rejected if results rule it out, or it is estimated above a hard limit; returns whether."""
        reason = self._run.rejects(running.spec) if self._run.rejects is not None else ""
        reason = reason or self._above_limit(running.spec)
        if reason:
            self._opened.release(running.nodes)
            self._conclude(running, self._write(running, RunStatus.REJECTED, reason))
        return bool(reason)

    def _above_limit(self, spec: TrialSpec) -> str:
        """Says that a trial is estimated above the hard limit; empty where it is not, or has no estimate."""
        limit_w = self._run.limits.get(NODE_POWER)
        if limit_w is None or self._run.estimate is None:
            return ""
        least_w = self._run.estimate(spec).get(NODE_POWER_PEAK, 0.0)
        told = f"{NODE_POWER_PEAK} is estimated at {least_w:.6g} or more, the hard limit {NODE_POWER} is {limit_w:.6g}"
        return told if least_w > limit_w else ""

    def _begun(self, tune_id: str, running: Attempt, progress: AskProgress | None) -> bool:
        """Begins a trial; returns whether the study's disk let it. If not, no other trial could begin either."""
        try:
            self._begin(tune_id, running, progress)
        except OSError as error:
            del self._running[tune_id]
            self._opened.release(running.nodes)
            self._queue.give_up(running)
            self._ending = "failures"
            self.stopped.append(f"nothing can be written in {self._study.path}: {error.strerror or error}")
            return False
        return True

    def _begin(self, tune_id: str, running: Attempt, progress: AskProgress | None) -> None:
        folder = self._folder(running)
        self._running[tune_id] = running  # first: after a Ctrl-C between any two of these lines `interrupt` marks it
        if folder.result() is not None:
            folder.set_aside()
        folder.write_spec(running.spec)  # from now on the folder shows that it runs
        if self._run.budget is not None:
            self._run.budget.spend(tune_id, running.spec.cluster.world_size, self._queue.expected_s(running))
        self._report("started", running, None, progress(running) if progress is not None else None)

    def _conclude(self, running: Attempt, result: Run, *, again: bool = False) -> None:
        if result.status.is_final:
            self._queue.note(running.spec, result, running.tags["nodes"])
            self._strategy.tell(running.spec, read_run(running.spec, result))
        if (told := result.tags.get(PASSED_ON, "")) and not self._told_passed_on:
            self._told_passed_on = True
            _log.warning("%s: %s", running.name, told)
        self._report("finished", running, result, again=again)

    def _dead_nodes(self, running: Attempt) -> tuple[str, ...]:
        """Names the nodes of a trial that are dead; empty if all live."""
        alive = {node.node_id for node in self._nodes.alive()}
        gone = self._nodes.left([node for node in running.nodes if node.node_id in alive])
        return tuple(node.name for node in running.nodes if node.node_id not in alive or node in gone)

    def _keep(self, folder: TrialFolder, result: Run) -> None:
        """Writes a result. Where the disk does not take it, the next call finds the trial cut off."""
        try:
            folder.write_result(result)
        except OSError as error:
            _log.warning("the result of trial %s cannot be written: %s", result.trial_id, error)

    def _write(self, running: Attempt, status: RunStatus, reason: str) -> Run:
        """Writes a result for a trial that does not start; what an earlier attempt measured is set aside."""
        folder = self._folder(running)
        if folder.result() is not None:
            folder.set_aside()
        result = self._ended(running, status, reason)
        folder.write_result(result)
        return result

    def _ended(self, running: Attempt, status: RunStatus, reason: str) -> Run:
        """Makes a result for a trial that left none, and writes its specification."""
        folder, now_ns = self._folder(running), time.time_ns()
        begun_ns = folder.begun_wall_ns() if (folder.path / "spec.json").exists() else now_ns
        with suppress(OSError):  # a full disk; where the trial began, it is there
            folder.write_spec(running.spec)
        return running.ended(status, reason, start_wall_ns=begun_ns, end_wall_ns=now_ns)

    def _folder(self, attempt: Attempt) -> TrialFolder:
        return self._study.trial(attempt.trial_id, attempt.repeat)

    def _report(
        self,
        kind: Literal["started", "finished"],
        running: Attempt,
        result: Run | None,
        progress: Callable[[], TrialProgress | None] | None = None,
        *,
        again: bool = False,
    ) -> None:
        self._emit(
            TrialEvent(
                kind=kind,
                spec=running.spec,
                repeat=running.repeat,
                result=result,
                role=running.role,
                again=again,
                nodes=running.node_names,
                progress=progress,
                num_left=self._num_to_come,
                predicted=running.predicted,
                expected_s=self._queue.announced_s(running) if kind == "started" else 0.0,
            )
        )

    def _emit(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:  # it shows or sends results that are safe on disk; Tune would end the study for it
                _log.exception("a listener failed on %s", type(event).__name__)


def _skipped(spec: TrialSpec, result: Run) -> TrialEvent:
    return TrialEvent(kind="skipped", spec=spec, repeat=result.repeat, result=result, role=role_of(result))

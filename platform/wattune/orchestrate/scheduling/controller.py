"""The ledger of a study: what runs, and what came of it, always as the study folder has it. No Ray here.

The folder is read once, when the ledger is opened; after that a trial costs the same however many were done before.
"""

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from wattune.orchestrate.events import Event, Listener, Placement, Preview, TrialEvent, TrialProgress
from wattune.orchestrate.scheduling.nodes import Slots
from wattune.orchestrate.scheduling.trial_queue import QueuedTrial, RunningTrial, StudyRun, TrialQueue
from wattune.search.strategy import Strategy
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.trial import TrialResult, TrialSpec, TrialStatus

if TYPE_CHECKING:
    from wattune.orchestrate.cluster import Cluster, Node

_log = logging.getLogger(__name__)

Ending = Literal["finished", "interrupted", "budget", "nodes"]
"""Why a study's call ended: nothing is left, Ctrl-C, the budget, or nodes are missing for what is left."""

AskProgress = Callable[[RunningTrial], Callable[[], TrialProgress | None]]

MOST_DEATHS: Final = 2
"""A trial whose run died so often is `crashed`: it may be what kills."""

LOOK_EVERY_S: Final = 1.0
"""How often the cluster is asked which nodes are alive."""

DIED_TAG: Final = "died"
"""Tag of a result whose run did not end by itself, in contrast to one that a person stopped."""

STOPPED: Final = "stopped by the user; the same command runs it again"
"""Reason of what ran at a Ctrl-C, a SIGTERM or `ray job stop`: the last word of a study that is killed right after."""

NO_ESTIMATE_TAG: Final = "no_estimate"
"""Tag of a result: why no estimate was held against the hard limits before it ran."""

LIMIT_METRICS: Final = {"node_device_power_w": "node_device_power_peak_1s_w"}
"""The metric each hard limit bounds."""

_MAY_BE_A_DEAD_NODE: Final = (TrialStatus.CRASHED, TrialStatus.TIMED_OUT, TrialStatus.INVALID)
"""Statuses with which a trial ends whose node died."""


def recover(study: StudyFolder, tags: Mapping[str, str]) -> list[tuple[TrialSpec, TrialResult]]:
    """Every result of a study; a trial that ran when the study's last process died is marked first.

    It is marked `interrupted`, to be run once more, or `crashed` where its run died `MOST_DEATHS` times.

    Args:
        study: A study nobody runs.
        tags: What to keep with the results written here.
    """
    found = []
    for folder in study.trials():
        spec, result = folder.spec(), folder.result()
        if result is None:
            trial_id, _, repeat = folder.path.name.rpartition("-")
            cut_off = TrialResult(
                trial_id=trial_id,
                repeat=int(repeat),
                status=TrialStatus.CRASHED,
                reason="the study's process ended while it ran",
                tags=dict(tags),
                start_wall_ns=folder.begun_wall_ns(),
                end_wall_ns=time.time_ns(),
            )
            result = _died(folder, cut_off)
            folder.write_result(result)
        found.append((spec, result))
    return found


def _died(folder: TrialFolder, result: TrialResult) -> TrialResult:
    """The result of a run that did not end by itself: to be run once more, unless that happened before."""
    earlier = [one.reason for one in folder.attempts() if one.tags.get(DIED_TAG) == "true"]
    tags, num_deaths = {**result.tags, DIED_TAG: "true"}, len(earlier) + 1
    if num_deaths < MOST_DEATHS:
        reason = f"{result.reason}; it is run once more"
        return replace(result, status=TrialStatus.INTERRUPTED, reason=reason, tags=tags)
    reason = f"its run died {num_deaths} times: {'; before that: '.join([result.reason, *reversed(earlier)])}"
    return replace(result, status=TrialStatus.CRASHED, reason=reason, tags=tags)


def will_repeat(result: TrialResult) -> bool:
    """Whether the same call runs the trial once more: what is in its folder is about to be set aside."""
    return result.status is TrialStatus.INTERRUPTED and result.tags.get(DIED_TAG) == "true"


class StudyController:
    """Says what runs next and keeps what came of it. Every method may be called from any thread."""

    def __init__(self, study: StudyFolder, strategy: Strategy, run: StudyRun, listener: Listener) -> None:
        """Reads the study folder and spans what was running when the study last ended.

        Args:
            study: The study's folder, held by this process.
            strategy: Proposes specifications and learns from results.
            run: How to run them.
            listener: Told of everything; called from one thread at a time.
        """
        self._study, self._strategy, self._run, self._listener = study, strategy, run, listener
        self._agenda = TrialQueue(strategy, run, recover(study, run.tags))
        self._lock = threading.RLock()
        self._ending: Ending | None = None
        self._slots: Slots | None = None
        self._alive: Callable[[], Sequence[Node]] = list
        self._has_left: Callable[[Node], bool] = lambda _node: False
        self._looked_s = -math.inf
        self._in_flight: dict[str, RunningTrial] = {}

    def begin(self) -> Preview:
        """Tells what is going to be done and what is skipped.

        Returns:
            What is going to be done, as far as it is known before the first trial.
        """
        with self._lock:
            preview = self._agenda.preview()
            self._emit(preview)
            for spec, result in self._agenda.skipped:
                if not self._strategy.learns:  # one that learns was told before it was asked
                    self._strategy.tell(spec, result)
                self._emit(TrialEvent(kind="skipped", spec=spec, repeat=result.repeat, result=result))
        return preview

    def open(
        self,
        cluster: "Cluster",
        alive: "Callable[[], Sequence[Node]]",
        has_left: "Callable[[Node], bool]",
    ) -> None:
        """Says where the study runs.

        Args:
            cluster: The cluster as it is now.
            alive: The nodes that are alive whenever it is called.
            has_left: Whether a node that counts as alive is gone; asked of the nodes of a trial that failed.
        """
        with self._lock:
            self._slots, self._alive, self._has_left = Slots(cluster), alive, has_left
            preview = self._agenda.preview()
            walls_s: dict[str, float] = defaultdict(float)
            devices_s: dict[str, float] = defaultdict(float)
            at_once: dict[str, int] = defaultdict(int)
            devices: dict[str, int] = defaultdict(int)
            lanes: dict[str, None] = {}
            missing = []
            for spec in preview.load_s:
                sets, load_s = self._slots.lanes(spec), preview.load_now_s.get(spec, 0.0)
                num_lanes = max(1, len(sets))
                walls_s[spec.device] += load_s / num_lanes
                devices_s[spec.device] += load_s * spec.world_size
                at_once[spec.device] = max(at_once[spec.device], len(sets))
                devices[spec.device] = max(devices[spec.device], num_lanes * spec.world_size)
                lanes |= {"+".join(node.name for node in nodes): None for nodes in sets}
                missing += [] if sets else [self._slots.missing(spec)]
            wall_s = max(walls_s.values(), default=0.0)
            self._emit(
                Placement(
                    lanes=tuple(lanes),
                    num_at_once=sum(at_once.values()),
                    wall_s=min(wall_s, preview.most_s),
                    cut_short=wall_s > preview.most_s,
                    device_s=sum(min(devices_s[kind], preview.most_s * count) for kind, count in devices.items()),
                    missing=tuple(missing),
                )
            )

    @property
    def ending(self) -> Ending | None:
        """Why nothing will be proposed any more, None while something may."""
        return self._ending

    @property
    def missing(self) -> list[str]:
        """What trials that are left want of the cluster and what it has, where that is why they did not run."""
        wanted = dict.fromkeys(turn.spec.cluster for turn in self._agenda.stranded)
        return [self._opened.missing(spec) for spec in wanted]

    @property
    def num_left(self) -> int:
        """Turns that are left when nothing runs, as far as it is known: see `TrialQueue.num_left`."""
        return self._agenda.num_left

    def next(self, tune_id: str, progress: AskProgress | None = None) -> RunningTrial | None:
        """What runs next, and where; None while nothing can, and for good once `ending` says why.

        Args:
            tune_id: By which `finish` names it.
            progress: Makes of a ticket what asks how far it is.
        """
        with self._lock:
            self._look()
            while self._ending is None:
                found = self._agenda.pop(self._opened, self._affords)
                if found is not None:
                    ticket, estimate = self._estimated(self._ticket(*found))
                    if not self._rejected(ticket, estimate):
                        self._begin(tune_id, ticket, progress)
                        return ticket
                elif self._ending is not None or not self._agenda.refill(self._opened, idle=not self._in_flight):
                    break
            if self._ending is None and not self._in_flight and not self._agenda.num_waiting:
                self._ending = "nodes" if self._agenda.stranded else "finished"
            return None

    def finish(self, tune_id: str, *, error: bool) -> None:
        """Reads what a trial left in its folder, and tells strategy and listener.

        A trial whose own driver or node died is interrupted and put in line once more; the second time it is crashed.

        Args:
            tune_id: As given to `next`.
            error: Whether the trial's driver process ended without returning.
        """
        with self._lock:
            ticket = self._in_flight[tune_id]  # until all is done: a Ctrl-C between any two of these lines ends it
            folder = self._folder(ticket.turn)
            result = folder.result()
            dead = self._dead_nodes(ticket) if result is None or result.status in _MAY_BE_A_DEAD_NODE else ""
            died = bool(dead) or (result is None and error) or (result is not None and not result.status.is_final)
            if result is None:
                why = "the trial's driver process ended" if error else "the trial left no result"
                result = self._write(ticket, TrialStatus.CRASHED, why)
            if died:
                reason = "; ".join(filter(None, (dead, result.reason)))
                result = _died(folder, replace(result, reason=reason))
                folder.write_result(result)
            self._opened.release(ticket.nodes)
            if not result.status.is_final:
                self._agenda.again(ticket.turn)
            self._conclude(ticket, result)
            del self._in_flight[tune_id]

    def interrupt(self) -> None:
        """Spans what runs as interrupted, unless its result arrived at the last moment."""
        with self._lock:
            self._ending = "interrupted"
            for tune_id, ticket in list(self._in_flight.items()):
                stopped = self._folder(ticket.turn).keep_result(self._ended(ticket, TrialStatus.INTERRUPTED, STOPPED))
                if not stopped.status.is_final:
                    self._agenda.again(ticket.turn)  # by whoever continues the study: it counts as left
                self._conclude(ticket, stopped)
                del self._in_flight[tune_id]

    @property
    def _num_to_come(self) -> int:
        """Turns this call is expected to start after those that run now."""
        budget = self._run.budget
        return self._agenda.num_left if budget is None else int(min(self._agenda.num_left, budget.num_left))

    @property
    def _opened(self) -> Slots:
        assert self._slots is not None, "open() comes first"
        return self._slots

    def _look(self) -> None:
        """Takes note of nodes that died or came, at most every `LOOK_EVERY_S`."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            if self._opened.update(self._alive()):
                self._agenda.reconsider()

    def _affords(self, turn: QueuedTrial) -> bool:
        budget = self._run.budget
        if budget is None or budget.allows(self._agenda.expected_s(turn)):
            return True
        self._ending = "budget"
        return False

    def _ticket(self, turn: QueuedTrial, nodes: "tuple[Node, ...]") -> RunningTrial:
        tags = {**self._run.tags, "nodes": ",".join(node.name for node in nodes)}
        tags |= {"reference": "true"} if turn.role == "reference" else {}
        tags |= {"soak": "true"} if turn.role == "finalist" else {}
        num_attempts = len(self._folder(turn).attempts())
        if self._folder(turn).result() is not None:  # interrupted: it is set aside when this one begins
            num_attempts += 1
        tags |= {"attempt": str(num_attempts + 1)} if num_attempts else {}
        return RunningTrial(turn=turn, nodes=nodes, tags=tags)

    def _estimated(self, ticket: RunningTrial) -> tuple[RunningTrial, Mapping[str, float]]:
        """What hard limits are held against. What cannot be estimated runs and says so; its limits are watched then."""
        if self._run.estimate is None or not self._run.limits:
            return ticket, {}
        try:
            return ticket, self._run.estimate(ticket.turn.spec)
        except Exception as error:  # an estimate is made of models of the user's own, too
            _log.warning("trial %s cannot be estimated", ticket.turn.trial_id, exc_info=True)
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return replace(ticket, tags={**ticket.tags, NO_ESTIMATE_TAG: why}), {}

    def _rejected(self, ticket: RunningTrial, estimate: Mapping[str, float]) -> bool:
        """Whether a trial is estimated above a hard limit; it is then stored as rejected, and nothing runs."""
        for limit, bound in self._run.limits.items():
            metric = LIMIT_METRICS[limit]
            if estimate.get(metric, -math.inf) > bound:
                reason = f"{metric} is estimated at {estimate[metric]:.6g}, the hard limit {limit} is {bound:.6g}"
                self._opened.release(ticket.nodes)
                self._conclude(ticket, self._write(ticket, TrialStatus.REJECTED, reason))
                return True
        return False

    def _begin(self, tune_id: str, ticket: RunningTrial, progress: AskProgress | None) -> None:
        folder = self._folder(ticket.turn)
        self._in_flight[tune_id] = ticket  # first: a Ctrl-C between any two of these lines spans it
        if folder.result() is not None:
            folder.set_aside()
        folder.write_spec(ticket.turn.spec)  # from now on the folder says that it runs
        if self._run.budget is not None:
            self._run.budget.spend()
        self._tell("started", ticket, None, progress(ticket) if progress is not None else None)

    def _conclude(self, ticket: RunningTrial, result: TrialResult) -> None:
        if result.status.is_final:
            self._agenda.note(ticket.turn.spec, result, ticket.tags["nodes"])
            self._strategy.tell(ticket.turn.spec, result)
        self._tell("finished", ticket, result)

    def _dead_nodes(self, ticket: RunningTrial) -> str:
        """Says which nodes of a trial are dead; empty where all live."""
        alive = {node.node_id for node in self._alive()}
        dead = [node.name for node in ticket.nodes if node.node_id not in alive or self._has_left(node)]
        return f"node {', '.join(dead)} left the cluster" if dead else ""

    def _write(self, ticket: RunningTrial, status: TrialStatus, reason: str) -> TrialResult:
        """Writes a result of a trial that has none of its own."""
        result = self._ended(ticket, status, reason)
        self._folder(ticket.turn).write_result(result)
        return result

    def _ended(self, ticket: RunningTrial, status: TrialStatus, reason: str) -> TrialResult:
        """What is said of a trial that has no result of its own; its specification is written."""
        folder, turn, now_ns = self._folder(ticket.turn), ticket.turn, time.time_ns()
        begun_ns = folder.begun_wall_ns() if (folder.path / "spec.json").exists() else now_ns
        folder.write_spec(turn.spec)
        return TrialResult(
            trial_id=turn.trial_id,
            repeat=turn.repeat,
            status=status,
            reason=reason,
            tags=dict(ticket.tags),
            start_wall_ns=begun_ns,
            end_wall_ns=now_ns,
        )

    def _folder(self, turn: QueuedTrial) -> TrialFolder:
        return self._study.trial(turn.trial_id, turn.repeat)

    def _tell(
        self,
        kind: Literal["started", "finished"],
        ticket: RunningTrial,
        result: TrialResult | None,
        progress: Callable[[], TrialProgress | None] | None = None,
    ) -> None:
        turn = ticket.turn
        self._emit(
            TrialEvent(
                kind=kind,
                spec=turn.spec,
                repeat=turn.repeat,
                result=result,
                role=turn.role,
                nodes=ticket.node_names,
                progress=progress,
                num_left=self._num_to_come,
            )
        )

    def _emit(self, event: Event) -> None:
        try:
            self._listener(event)
        except Exception:  # a listener shows or sends what is safe on disk; Tune would end the study for it
            _log.exception("a listener failed on %s", type(event).__name__)

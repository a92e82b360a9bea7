"""The trials that a study still has to run: repeats, reference trials, the race, and long runs. No Ray here."""

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.events import Preview, RaceStep, Role, RowStopped
from wattune.orchestrate.failures import CUT_OFF, MOST_ALIKE, Row
from wattune.orchestrate.scheduling.budget import Budget, Pace
from wattune.orchestrate.scheduling.nodes import Slots
from wattune.orchestrate.scheduling.race import Race, RaceRule
from wattune.orchestrate.scheduling.references import References, ordinary_plans
from wattune.orchestrate.scheduling.run_order import run_order, workers_of
from wattune.search.strategies.prediction import prediction_tag
from wattune.search.strategy import Strategy
from wattune.trial import FIRST_REFERENCE_REPEAT, Measure, TrialResult, TrialSpec, TrialStatus
from wattune.units import NS_PER_S

if TYPE_CHECKING:
    from wattune.orchestrate.cluster import Node

LOOK_AHEAD: Final = 32
"""Proposals that may wait for busy nodes while a strategy that learns is asked for one that fits free nodes."""

_WORTH_REPEATING: Final = (TrialStatus.COMPLETED, TrialStatus.INVALID)
"""Statuses of a first run after which a repeat is worth running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """Settings of a study, apart from its search space."""

    measure: Measure
    num_trials: int
    """Different specifications to try, including those already done in the folder."""
    seed: int
    limits: Mapping[str, float]
    tags: Mapping[str, str]
    """Facts of the environment, kept with every result."""
    finalists: Callable[[], Sequence[TrialSpec]]
    """Returns the best trials so far, best first; called once, when all others have run."""
    clusters: tuple[ClusterSpec, ...]
    """Clusters that trials may run on."""
    isolation: str = "warm"
    order: str = "shuffled"
    """See `wattune.orchestrate.scheduling.run_order.run_order`."""
    reference: TrialSpec | None = None
    """The trial that is measured again and again; None takes an ordinary one of `candidates` for each kind of
    workers."""
    candidates: Sequence[TrialSpec] = ()
    """Every trial of the space. Without any, the first trial that completes is the reference trial."""
    race: RaceRule | None = None
    """Settings of the race of finalists; None runs none."""
    budget: Budget | None = None
    retry: frozenset[TrialStatus] = frozenset()
    """Statuses of earlier calls' trials that run again, beside those that do anyway."""
    estimate: Callable[[TrialSpec], Mapping[str, float]] | None = None
    """Predicts metrics of a trial: the low ends of their intervals. A trial that is estimated above a hard limit is
    rejected instead of run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedTrial:
    """One repeat of one trial that waits to run."""

    spec: TrialSpec
    trial_id: str
    repeat: int
    measure: Measure
    role: Role = "trial"
    avoid: frozenset[str] = frozenset()
    """Names of nodes that failed it; others come first."""
    predicted: str = ""
    """The strategy's prediction when it proposed the trial, as a tag; empty where it made none."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.trial_id}-{self.repeat}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTrial:
    """A trial that runs, and its nodes."""

    queued: QueuedTrial
    nodes: "tuple[Node, ...]"
    tags: Mapping[str, str]
    """Facts of the study's environment and of this attempt."""

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of the nodes it runs on."""
        return tuple(node.name for node in self.nodes)


def _loads_s(costs: Iterable[tuple[ClusterSpec, float]]) -> dict[ClusterSpec, float]:
    """Adds up seconds of trials by the cluster they need."""
    loads_s: dict[ClusterSpec, float] = defaultdict(float)
    for cluster, cost_s in costs:
        loads_s[cluster] += cost_s
    return dict(loads_s)


class TrialQueue:
    """Waiting trials in the order they run, filled by the strategy and by results."""

    def __init__(
        self,
        strategy: Strategy,
        run: StudyRun,
        results: Iterable[tuple[TrialSpec, TrialResult]],
        unreadable: Iterable[str] = (),
    ) -> None:
        """Takes in the results of earlier calls, and queues all proposals of a strategy that does not learn.

        Args:
            strategy: Proposes specifications.
            run: Settings of the study.
            results: Results of earlier calls; trials whose result is not final run again.
            unreadable: Names of the folders of trials that cannot be read, which do not run.
        """
        self._strategy, self._run = strategy, run
        self._queues: dict[str, deque[tuple[int, QueuedTrial]]] = defaultdict(deque)
        self._num_queued = 0
        self._worthwhile: dict[tuple[str, int], Hashable] = {}
        self._num_worthwhile: Counter[Hashable] = Counter()
        self._stranded: list[QueuedTrial] = []
        self._asked: dict[str, TrialSpec] = {}
        self._referenced: dict[str, TrialSpec] = {}
        """Reference trials by id: one may be a trial that the strategy never asks for."""
        self._rounds_queued = not strategy.learns
        self._soaks_queued = False
        self._num_soaked = 0
        self._pace = Pace()
        every = run.measure.reference_every
        plans = ordinary_plans(run.candidates, seed=run.seed) if every else {}
        self._references = References(every=every, plans=plans, named=run.reference)
        self._race = Race(run.race, run.measure) if run.race is not None else None
        self._racing = False
        self._num_again = 0
        self._left_out = set(unreadable)
        """Folder names of trials that this call does not queue (again)."""
        self._given_up: list[QueuedTrial] = []
        self._rows: dict[Hashable, Row] = {}
        self._held: dict[Hashable, list[QueuedTrial]] = {}
        self._last: set[tuple[str, int]] = set()
        self.done: dict[tuple[str, int], TrialResult] = {}
        """Final results by trial and repeat."""
        for spec, result in sorted(results, key=lambda one: one[1].start_wall_ns):
            if not result.status.is_final or result.status in run.retry:
                self._num_again += 1
                if result.status is TrialStatus.INFRA_FAILED or result.reason == CUT_OFF:
                    self._last.add((result.trial_id, result.repeat))
                continue
            self.note(spec, result, result.tags.get("nodes", ""))
            if strategy.learns:
                strategy.tell(spec, result)
                if result.repeat < FIRST_REFERENCE_REPEAT:
                    self._asked[result.trial_id] = spec
        if not strategy.learns:
            specs = strategy.ask(run.num_trials)
            self._asked = {spec.trial_id: spec for spec in specs}
            planned = Counter(map(workers_of, specs))
            self._references.plan({workers: count * run.measure.repeats for workers, count in planned.items()})
            self._enqueue(self._rounds(specs))
        else:  # it chooses the workers later
            most = run.num_trials * run.measure.repeats
            self._references.plan({workers_of(spec): most for spec in run.candidates})

    @property
    def skipped(self) -> list[tuple[TrialSpec, TrialResult]]:
        """Trials the strategy asks for, and reference trials, that are done already."""
        specs = self._referenced | self._asked
        known = ((specs.get(trial_id), result) for (trial_id, _), result in self.done.items())
        return [(spec, result) for spec, result in known if spec is not None]

    @property
    def num_waiting(self) -> int:
        """Queued trials whose nodes exist."""
        return sum(map(len, self._queues.values()))

    @property
    def num_left(self) -> int:
        """Trials expected to run after those that run now, with repeats, reference trials, race and finalists.

        Its cost does not depend on their number: every event carries it.
        """
        run, measure = self._run, self._run.measure
        num_references = self._references.num_left(self._num_worthwhile)
        num_to_ask = max(0, run.num_trials - len(self._asked)) if self._strategy.learns else 0
        num_repeats = 0 if self._rounds_queued else (measure.repeats - 1) * len(self._asked)
        num_finalists = 0 if self._soaks_queued else max(0, measure.soak_finalists - self._num_soaked)
        waiting = sum(self._num_worthwhile.values()) + len(self._stranded) + len(self.failed)
        num_search = waiting + num_to_ask * measure.repeats + num_repeats
        return num_search + num_references + self._num_race(num_search) + num_finalists

    def _num_race(self, num_search: int) -> int:
        """The most repeats of the race after so many runs of the search; the race's own do not count as such."""
        if self._race is None:
            return 0
        return self._race.num_left if self._racing or not num_search else self._race.num_expected(num_search)

    @property
    def stranded(self) -> tuple[QueuedTrial, ...]:
        """Trials whose nodes do not exist."""
        return tuple(self._stranded)

    @property
    def failed(self) -> tuple[QueuedTrial, ...]:
        """Trials that this call does not start any more: the cluster failed them, or all of their kind failed."""
        return (*self._given_up, *(queued for held in self._held.values() for queued in held))

    def give_up(self, queued: QueuedTrial) -> None:
        """Leaves a trial that the cluster failed to a later call."""
        self._given_up.append(queued)
        self._left_out.add(queued.name)
        self._references.give_up(queued.trial_id, queued.repeat)
        if self._race is not None:
            self._race.give_up(queued.trial_id, queued.repeat)

    def add_to_row(self, spec: TrialSpec, result: TrialResult) -> RowStopped | None:
        """Adds the end of a trial to the row of failures of its workers.

        Returns:
            The row, if it is so long that no more trials for these workers start from now on.
        """
        workers = workers_of(spec)
        row = self._rows.get(workers, Row()).then(result)
        self._rows[workers] = row
        if row.count < MOST_ALIKE or workers in self._held:
            return None
        held = self._held[workers] = []
        for queue in self._queues.values():
            kept = [one for one in queue if workers_of(one[1].spec) != workers]
            held += [one[1] for one in queue if workers_of(one[1].spec) == workers and not self._is_needless(one[1])]
            queue.clear()
            queue.extend(kept)
        for queued in held:
            self._left_out.add(queued.name)
            self._uncount(queued.trial_id, queued.repeat)
        return RowStopped(cluster=spec.cluster, engine=spec.engine, result=result, count=row.count, num_held=len(held))

    def note(self, spec: TrialSpec, result: TrialResult, nodes: str) -> None:
        """Keeps a final result, and updates expected times and reference trials.

        Args:
            spec: The trial.
            result: Its result.
            nodes: Names of its nodes, joined by commas.
        """
        is_new = (result.trial_id, result.repeat) not in self.done
        is_long = self._run.measure.soak_finalists > 0 and result.repeat == self._run.measure.repeats
        self._num_soaked += is_new and is_long
        self.done[result.trial_id, result.repeat] = result
        if result.status is TrialStatus.COMPLETED and not is_long:
            self._pace.add(spec, (result.end_wall_ns - result.start_wall_ns) / NS_PER_S)
        if result.repeat == 0 and result.status not in _WORTH_REPEATING:
            for repeat in range(1, self._run.measure.repeats):
                self._uncount(result.trial_id, repeat)
        self._references.note(spec, result, nodes)
        if result.repeat >= FIRST_REFERENCE_REPEAT:
            self._referenced[result.trial_id] = spec
        if self._race is not None:
            self._race.note(spec, result)

    def again(self, queued: QueuedTrial) -> None:
        """Queues a trial before all others of its kind of device."""
        if self._holds(queued):
            return
        self._num_queued += 1
        self._queues[queued.spec.cluster.device].appendleft((-self._num_queued, queued))
        self._count(queued)

    def reconsider(self) -> None:
        """Queues stranded trials again: nodes have come or gone."""
        for queued in reversed(self._stranded):
            self.again(queued)
        self._stranded.clear()

    def pop(
        self, slots: Slots, affords: Callable[[QueuedTrial], bool]
    ) -> "tuple[QueuedTrial, tuple[Node, ...]] | None":
        """Takes the first trial whose nodes are free; within a kind of device none overtakes another.

        Args:
            slots: Free and taken nodes.
            affords: Returns whether the budget allows the trial; if it does not, nothing is taken.

        Returns:
            The trial that runs now and its nodes, or None.
        """
        heads = sorted((queue[0][0], device) for device, queue in self._queues.items() if queue)
        for _, device in heads:
            queue = self._queues[device]
            queued = self._head(queue, slots)
            if queued is None or not slots.is_free(queued.spec.cluster, queued.avoid):
                continue
            if not affords(queued):
                return None
            nodes = slots.take(queued.spec.cluster, queued.avoid)
            assert nodes is not None, "free a moment ago"
            reference = self._due_reference(queued, ",".join(node.name for node in nodes))
            if reference is None:
                queue.popleft()
                self._uncount(queued.trial_id, queued.repeat)
            return reference or queued, nodes
        return None

    def refill(self, slots: Slots, *, idle: bool) -> bool:
        """Queues the next proposal of a learning strategy, then repeats, then the race, then finalists.

        Args:
            slots: Free and taken nodes.
            idle: Whether nothing runs.

        Returns:
            True if it looked for new trials, so that `pop` is worth another call.
        """
        run, measure = self._run, self._run.measure
        if self._strategy.learns and len(self._asked) < run.num_trials and self._wants_more(slots):
            proposed = self._strategy.ask(1)
            if proposed:
                self._asked |= {spec.trial_id: spec for spec in proposed}
                trials = [self._trial(spec, 0, measure) for spec in proposed]
                self._enqueue(replace(one, predicted=prediction_tag(self._strategy, one.spec)) for one in trials)
                return True
        if self.num_waiting or not (idle or self._racing):
            return False
        if not self._rounds_queued:
            self._rounds_queued = True
            self._enqueue(self._rounds(list(self._asked.values())))
            return True
        if self._queue_of_race(slots):
            return True
        if not idle:
            return False
        if measure.soak_finalists and not self._soaks_queued and not self._stranded and not self._held:
            self._soaks_queued = True
            soak = replace(measure, min_seconds=measure.soak_seconds)
            finalists = run.finalists()[: measure.soak_finalists]
            self._enqueue(self._trial(spec, measure.repeats, soak, "finalist") for spec in finalists)
            return True
        return False

    def _queue_of_race(self, slots: Slots) -> bool:
        """Queues the next repeat of the race if it may start now; returns whether it did."""
        if self._race is None or self._stranded or self.failed:
            return False
        self._racing = True
        found = self._race.next(self._left_out)
        if found is None or (slots.exists(found[0].cluster) and not slots.is_free(found[0].cluster)):
            return False
        repeat = self._trial(*found, self._run.measure, "race")
        self._race.start(repeat.trial_id, repeat.repeat)
        self._enqueue([repeat])
        return True

    def race_news(self) -> RaceStep | None:
        """Returns how the race stands, once after each change; None while there is none."""
        return self._race.news() if self._race is not None and self._racing else None

    def expected_s(self, queued: QueuedTrial) -> float:
        """Expected seconds of a trial."""
        return self._pace.expected_s(queued.spec, queued.measure.min_seconds)

    def preview(self) -> Preview:
        """Previews the work that is left, as far as it is known now, and the part this call may do."""
        measure, budget = self._run.measure, self._run.budget or Budget()
        costs, num_references = self._queued_costs()
        first = self._run.clusters[0]  # a strategy that learns chooses the cluster later
        if self._strategy.learns:
            num_searched = sum(repeat < measure.repeats for _, repeat in self.done)
            num_asked = max(0, self._run.num_trials * measure.repeats - num_searched)
            costs += [(first, max(self._pace.typical_s, measure.min_seconds))] * num_asked
        num_finalists = max(0, measure.soak_finalists - self._num_soaked)
        num_race = self._num_race(len(costs) - num_references)
        costs += [(first, max(self._pace.typical_s, measure.min_seconds))] * num_race
        costs += [(first, measure.soak_seconds)] * num_finalists
        device_s = itertools.accumulate(cluster.world_size * took_s for cluster, took_s in costs)
        num_now = int(min(sum(one <= budget.left_device_s for one in device_s), budget.num_left))
        return Preview(
            num_left=len(costs),
            num_now=num_now,
            num_references=num_references,
            num_finalists=num_finalists,
            num_race=num_race,
            num_again=self._num_again,
            done=Counter(result.status for result in self.done.values()),
            load_s=_loads_s(costs),
            load_now_s=_loads_s(costs[:num_now]),
            most_s=budget.left_s,
            measured=self._pace.typical_s > 0,
        )

    def _queued_costs(self) -> tuple[list[tuple[ClusterSpec, float]], int]:
        """Cluster and expected seconds of every queued trial, in order; and the number of reference trials in it."""
        every = self._run.measure.reference_every
        costs: list[tuple[ClusterSpec, float]] = []
        counts: Counter[Hashable] = Counter()
        expected_s: dict[Hashable, float] = {}
        num_references = 0
        for _, queued in sorted((one for queue in self._queues.values() for one in queue), key=itemgetter(0)):
            if self._is_needless(queued):
                continue
            workers = workers_of(queued.spec)
            if workers not in expected_s:  # equal for all of them, and costly
                expected_s[workers] = self.expected_s(queued)
            # No reference trial follows the last trial.
            due = int(bool(every and counts[workers] and not counts[workers] % every))
            due += self._references.num_opening(workers) if not counts[workers] else 0
            num_references += due
            counts[workers] += 1
            costs += [(queued.spec.cluster, expected_s[workers])] * (1 + due)
        return costs, num_references

    def _rounds(self, specs: Sequence[TrialSpec]) -> list[QueuedTrial]:
        """Lists every repeat: in rounds of all trials, so that repeats are far apart, or together in a listed order."""
        ordered = run_order(specs, seed=self._run.seed, order=self._run.order)
        repeats = range(self._run.measure.repeats)
        pairs = [(spec, repeat) for repeat in repeats for spec in ordered]
        if self._run.order == "listed":
            pairs = [(spec, repeat) for spec in ordered for repeat in repeats]
        # A trial that may have ended its study, or that the cluster failed, must not keep the others from running.
        pairs.sort(key=lambda pair: bool(self._last) and (pair[0].trial_id, pair[1]) in self._last)
        return [self._trial(spec, repeat, self._run.measure) for spec, repeat in pairs]

    def _trial(self, spec: TrialSpec, repeat: int, measure: Measure, role: Role = "trial") -> QueuedTrial:
        return QueuedTrial(spec=spec, trial_id=spec.trial_id, repeat=repeat, measure=measure, role=role)

    def _enqueue(self, trials: Iterable[QueuedTrial]) -> None:
        for queued in trials:
            known = (queued.trial_id, queued.repeat) in self.done or queued.name in self._left_out
            if not known and not self._holds(queued):
                self._queues[queued.spec.cluster.device].append((self._num_queued, queued))
                self._num_queued += 1
                if not self._is_needless(queued):
                    self._count(queued)

    def _holds(self, queued: QueuedTrial) -> bool:
        """Keeps a trial from starting, if all of its kind failed; returns whether it does."""
        held = self._held.get(workers_of(queued.spec))
        if held is None:
            return False
        held.append(queued)
        self._left_out.add(queued.name)
        return True

    def _count(self, queued: QueuedTrial) -> None:
        """Counts a trial that is going to run."""
        key, workers = (queued.trial_id, queued.repeat), workers_of(queued.spec)
        if key not in self._worthwhile:
            self._worthwhile[key] = workers
            self._num_worthwhile[workers] += 1

    def _uncount(self, trial_id: str, repeat: int) -> None:
        """Stops counting a trial: it runs now, or never will."""
        workers = self._worthwhile.pop((trial_id, repeat), None)
        if workers is not None:
            self._num_worthwhile[workers] -= 1

    def _head(self, queue: deque[tuple[int, QueuedTrial]], slots: Slots) -> QueuedTrial | None:
        """Finds the first trial that is worth running and whose nodes exist; trials before it leave the queue."""
        while queue:
            queued = queue[0][1]
            if self._is_needless(queued):
                queue.popleft()
            elif not slots.exists(queued.spec.cluster):
                self._stranded.append(queue.popleft()[1])
                self._uncount(queued.trial_id, queued.repeat)
            else:
                return queued
        return None

    def _is_needless(self, queued: QueuedTrial) -> bool:
        """Returns whether a repeat would only confirm that its trial fails."""
        first = self.done.get((queued.trial_id, 0)) if queued.repeat else None
        return first is not None and first.status not in _WORTH_REPEATING

    def _due_reference(self, queued: QueuedTrial, nodes: str) -> QueuedTrial | None:
        """The next repeat of the reference trial, if it is due on these nodes; else None."""
        if queued.role not in ("trial", "race"):
            return None
        due = self._references.due(workers_of(queued.spec), nodes, opens=queued.role == "trial")
        return None if due is None else self._trial(*due, self._run.measure, "reference")

    def _wants_more(self, slots: Slots) -> bool:
        """Returns whether nodes are idle that another proposal might use."""
        if self.num_waiting + sum(map(len, self._held.values())) >= LOOK_AHEAD:
            return False
        return any(not self._queues[spec.device] and slots.is_free(spec) for spec in self._run.clusters)

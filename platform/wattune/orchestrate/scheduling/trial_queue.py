"""The trials that a study still has to run: repeats, reference trials, the race, and long runs. No Ray here."""

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.events import FirstTrial, Preview, RaceStep, Role, RowStopped
from wattune.orchestrate.failures import CUT_OFF, MOST_ALIKE, Row
from wattune.orchestrate.scheduling.budget import Budget, Pace
from wattune.orchestrate.scheduling.durations import Durations
from wattune.orchestrate.scheduling.nodes import Slots
from wattune.orchestrate.scheduling.race import Race
from wattune.orchestrate.scheduling.references import References, ordinary_plans
from wattune.orchestrate.scheduling.run_order import run_order, workers_of
from wattune.orchestrate.scheduling.study_run import QueuedTrial, StudyRun
from wattune.orchestrate.scheduling.waiting import WORTH_REPEATING, Waiting
from wattune.ranking.spreads import is_soak
from wattune.search.strategy import Strategy
from wattune.trial import (
    FIRST_REFERENCE_REPEAT,
    FIRST_SOAK_REPEAT,
    Measure,
    TrialResult,
    TrialSpec,
    TrialStatus,
    is_reference_repeat,
)
from wattune.units import NS_PER_S

if TYPE_CHECKING:
    from wattune.orchestrate.cluster import Node

SHOWN_FIRST: Final = 4
"""Most trials that a preview names as the first ones."""

LOOK_AHEAD: Final = 32
"""Proposals that may wait for busy nodes while a strategy that learns is asked for one that fits free nodes."""


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
        self.done: dict[tuple[str, int], TrialResult] = {}
        """Final results by trial and repeat."""
        self._waiting = Waiting(self.done, unreadable)
        self._asked: dict[str, TrialSpec] = {}
        self._referenced: dict[str, TrialSpec] = {}
        """Reference trials by id: one may be a trial that the strategy never asks for."""
        self._rounds_queued = not strategy.learns
        self._soaks_queued = False
        self._listed = {spec.trial_id for spec in run.candidates}
        self._soaked: set[str] = set()
        self._long: set[tuple[str, int]] = set()
        """Ordinary numbers that long runs have: earlier versions gave them the one after the repeats."""
        self._pace = Pace()
        self._durations = Durations(self._pace, run.duration_s)
        every = run.measure.reference_every
        plans = ordinary_plans(run.candidates, seed=run.seed) if every else {}
        self._references = References(every=every, plans=plans, named=run.reference)
        self._race = Race(run.race, run.measure) if run.race is not None else None
        self._racing = False
        self._num_again = 0
        self._rows: dict[Hashable, Row] = {}
        self._last: set[tuple[str, int]] = set()
        begun: set[str] = set()
        for spec, result in sorted(results, key=lambda one: one[1].start_wall_ns):
            if result.repeat < FIRST_REFERENCE_REPEAT:
                begun.add(result.trial_id)
            outdated = run.outdated is not None and run.outdated(result)
            if not result.status.is_final or result.status in run.retry or outdated:
                self._num_again += 1
                if result.status is TrialStatus.INFRA_FAILED or result.reason == CUT_OFF:
                    self._last.add((result.trial_id, result.repeat))
                continue
            self.note(spec, result, result.tags.get("nodes", ""))
            if strategy.learns:
                strategy.tell(spec, result)
                # A trial that the space does not list any more is none of those it may try.
                if result.repeat < FIRST_REFERENCE_REPEAT and self._is_listed(result.trial_id):
                    self._asked[result.trial_id] = spec
        if not strategy.learns:
            # What was begun counts first: a space that grew may draw others, and nothing measured goes to waste.
            proposed = strategy.ask(max(run.num_trials, len(run.candidates)))
            first = sorted(proposed, key=lambda spec: spec.trial_id not in begun)[: run.num_trials]
            chosen = {spec.trial_id for spec in first}
            specs = [spec for spec in proposed if spec.trial_id in chosen]
            self._asked = {spec.trial_id: spec for spec in specs}
            planned = Counter(map(workers_of, specs))
            self._references.plan({workers: count * run.measure.repeats for workers, count in planned.items()})
            self._waiting.add(self._rounds(specs))
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
        return len(self._waiting)

    @property
    def num_left(self) -> int:
        """Trials expected to run after those that run now, with repeats, reference trials, race and finalists.

        Its cost does not depend on their number: every event carries it.
        """
        run, measure = self._run, self._run.measure
        num_references = self._references.num_left(self._waiting.num_worthwhile)
        num_to_ask = max(0, run.num_trials - len(self._asked)) if self._strategy.learns else 0
        num_repeats = 0 if self._rounds_queued else (measure.repeats - 1) * len(self._asked)
        num_search = self._waiting.num_left + num_to_ask * measure.repeats + num_repeats
        # What is still measured may bring new leaders, whose long runs are not there.
        soaked = 0 if num_search else len(self._soaked)
        num_finalists = 0 if self._soaks_queued else max(0, measure.soak_finalists - soaked)
        return num_search + num_references + self._num_race(num_search) + num_finalists

    def _num_race(self, num_search: int) -> int:
        """The most repeats of the race after so many runs of the search; the race's own do not count as such."""
        if self._race is None:
            return 0
        return self._race.num_left if self._racing or not num_search else self._race.num_expected(num_search)

    @property
    def stranded(self) -> tuple[QueuedTrial, ...]:
        """Trials whose nodes do not exist."""
        return self._waiting.stranded

    @property
    def failed(self) -> tuple[QueuedTrial, ...]:
        """Trials that this call does not start any more: the cluster failed them, or all of their kind failed."""
        return self._waiting.failed

    def give_up(self, queued: QueuedTrial) -> None:
        """Leaves a trial that the cluster failed to a later call."""
        self._waiting.give_up(queued)
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
        num_held = self._waiting.hold(workers) if row.count >= MOST_ALIKE else None
        if num_held is None:
            return None
        return RowStopped(cluster=spec.cluster, engine=spec.engine, result=result, count=row.count, num_held=num_held)

    def note(self, spec: TrialSpec, result: TrialResult, nodes: str) -> None:
        """Keeps a final result, and updates expected times and reference trials.

        Args:
            spec: The trial.
            result: Its result.
            nodes: Names of its nodes, joined by commas.
        """
        is_long = is_soak(result)
        if is_long:
            self._soaked.add(result.trial_id)
            self._long.add((result.trial_id, result.repeat))
        self.done[result.trial_id, result.repeat] = result
        if result.status is TrialStatus.COMPLETED and not is_long:
            took_s = (result.end_wall_ns - result.start_wall_ns) / NS_PER_S
            self._pace.add(spec, took_s)
            self._durations.add(spec, self._run.measure, took_s)
        if result.repeat == 0 and result.status not in WORTH_REPEATING:
            for repeat in self._ordinary(result.trial_id)[1:]:
                self._waiting.uncount(result.trial_id, repeat)
        self._references.note(spec, result, nodes)
        if is_reference_repeat(result.repeat):
            self._referenced[result.trial_id] = spec
        if self._race is not None and self._is_listed(result.trial_id):
            self._race.note(spec, result)

    def again(self, queued: QueuedTrial) -> None:
        """Queues a trial before all others of its kind of device."""
        self._waiting.add_first(queued)

    def reconsider(self) -> None:
        """Queues stranded trials again: nodes have come or gone."""
        self._waiting.reconsider()

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
        for device in self._waiting.devices():
            queued = self._waiting.head(device, slots)
            if queued is None or not slots.is_free(queued.spec.cluster, queued.avoid):
                continue
            if not affords(queued):
                return None
            nodes = slots.take(queued.spec.cluster, queued.avoid)
            assert nodes is not None, "free a moment ago"
            reference = self._due_reference(queued, ",".join(node.name for node in nodes))
            if reference is None:
                self._waiting.take(queued)
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
                self._waiting.add(self._trial(spec, 0, measure) for spec in proposed)
                return True
        if self.num_waiting or not (idle or self._racing):
            return False
        if not self._rounds_queued:
            self._rounds_queued = True
            self._waiting.add(self._rounds(list(self._asked.values())))
            return True
        if self._queue_of_race(slots):
            return True
        if not idle:
            return False
        if measure.soak_finalists and not self._soaks_queued and not self.stranded and not self._waiting.holds_any:
            self._soaks_queued = True
            soak = replace(measure, min_seconds=measure.soak_seconds)
            self._waiting.add(self._trial(spec, FIRST_SOAK_REPEAT, soak, "finalist") for spec in self._unsoaked())
            return True
        return False

    def _unsoaked(self) -> list[TrialSpec]:
        """Lists the best trials of those that get a long run, without those that had theirs."""
        most = self._run.measure.soak_finalists
        best = self._run.finalists()[:most] if most else ()
        return [spec for spec in best if spec.trial_id not in self._soaked]

    def _is_listed(self, trial_id: str) -> bool:
        """Returns whether the space lists a trial. One that it has lost keeps its results, and runs no more."""
        return not self._listed or trial_id in self._listed

    def _queue_of_race(self, slots: Slots) -> bool:
        """Queues the next repeat of the race if it may start now; returns whether it did."""
        if self._race is None or self.stranded or self.failed:
            return False
        self._racing = True
        found = self._race.next(self._waiting.left_out)
        if found is None or (slots.exists(found[0].cluster) and not slots.is_free(found[0].cluster)):
            return False
        repeat = self._trial(*found, self._run.measure, "race")
        self._race.start(repeat.trial_id, repeat.repeat)
        self._waiting.add([repeat])
        return True

    def race_news(self) -> RaceStep | None:
        """Returns how the race stands, once after each change; None while there is none."""
        return self._race.news() if self._race is not None and self._racing else None

    def expected_s(self, queued: QueuedTrial) -> float:
        """Expected seconds of a trial."""
        return self._durations.expected_s(queued.spec, queued.measure)

    def announced_s(self, queued: QueuedTrial) -> float:
        """Seconds of a trial that the preview counted with; 0 where nothing tells trials apart."""
        return self._durations.announced_s(queued.spec, queued.measure)

    def preview(self) -> Preview:
        """Previews the work that is left, as far as it is known now, and the part this call may do."""
        measure, budget = self._run.measure, self._run.budget or Budget()
        self._durations.announce()
        costs, num_references = self._queued_costs()
        first = self._run.clusters[0]  # a strategy that learns chooses the cluster later
        usual_s = self._usual_s(costs)
        if self._strategy.learns:
            num_searched = sum(repeat in self._ordinary(trial_id) for trial_id, repeat in self.done)
            num_asked = max(0, self._run.num_trials * measure.repeats - num_searched)
            costs += [(first, usual_s)] * num_asked
        num_finalists = measure.soak_finalists if costs else len(self._unsoaked())
        num_race = self._num_race(len(costs) - num_references)
        costs += [(first, usual_s)] * num_race
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
            measured=self._durations.measured,
            first=self._first(),
            **self._predicted(),
        )

    def _usual_s(self, costs: Sequence[tuple[ClusterSpec, float]]) -> float:
        """Returns the expected time of a trial that is not chosen yet: the median of those that may be."""
        known_s = [one for one in self._predicted_s() if one is not None] if self._strategy.learns else []
        ratio = self._durations.ratio()
        times_s = [min(one * ratio, self._run.measure.timeout_s) for one in known_s] or [took_s for _, took_s in costs]
        return max(statistics.median(times_s) if times_s else self._pace.typical_s, self._run.measure.min_seconds)

    def _predicted_s(self) -> list[float | None]:
        """Returns the predicted times of queued trials; of all candidates where a strategy chooses as it learns."""
        if self._strategy.learns:
            return [self._durations.predicted_s(spec, self._run.measure) for spec in self._run.candidates]
        return [self._durations.predicted_s(one.spec, one.measure) for one in self._waiting.in_order()]

    def _predicted(self) -> dict[str, Any]:
        """Facts of a preview about predicted times."""
        predicted = self._predicted_s()
        known_s = [one for one in predicted if one is not None]
        return {
            "estimated": bool(known_s) and len(known_s) == len(predicted),
            "num_timeouts": sum(one > self._run.measure.timeout_s for one in known_s),
            "longest_s": max(known_s, default=0.0),
        }

    def _first(self) -> tuple[FirstTrial, ...]:
        """The trials that start first: the reference trial, if it opens the study, then the head of the queue."""
        waiting = self._waiting.in_order()[:SHOWN_FIRST]
        if not waiting:
            return ()
        workers = workers_of(waiting[0].spec)
        opening = [self._references.spec_of(workers)] * self._references.num_opening(workers)
        head = [self._trial(spec, FIRST_REFERENCE_REPEAT, self._run.measure, "reference") for spec in opening if spec]
        return tuple(
            FirstTrial(spec=one.spec, role=one.role, expected_s=self.expected_s(one))
            for one in [*head, *waiting][:SHOWN_FIRST]
        )

    def _queued_costs(self) -> tuple[list[tuple[ClusterSpec, float]], int]:
        """Cluster and expected seconds of every queued trial, in order; and the number of reference trials in it."""
        every = self._run.measure.reference_every
        costs: list[tuple[ClusterSpec, float]] = []
        counts: Counter[Hashable] = Counter()
        expected_s: dict[Hashable, float] = {}
        num_references = 0
        for queued in self._waiting.in_order():
            workers = workers_of(queued.spec)
            if workers not in expected_s or self._run.duration_s is not None:  # else equal for all of them, and costly
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
        numbers = {spec.trial_id: self._ordinary(spec.trial_id) for spec in ordered}
        pairs = [(spec, numbers[spec.trial_id][n]) for n in range(self._run.measure.repeats) for spec in ordered]
        if self._run.order == "listed":
            pairs = [(spec, repeat) for spec in ordered for repeat in numbers[spec.trial_id]]
        # A trial that may have ended its study, or that the cluster failed, must not keep the others from running.
        pairs.sort(key=lambda pair: bool(self._last) and (pair[0].trial_id, pair[1]) in self._last)
        return [self._trial(spec, repeat, self._run.measure) for spec, repeat in pairs]

    def _ordinary(self, trial_id: str) -> Sequence[int]:
        """Returns the numbers of a trial's ordinary repeats."""
        count = self._run.measure.repeats
        if not self._long:
            return range(count)
        free = (number for number in itertools.count() if (trial_id, number) not in self._long)
        return [*itertools.islice(free, count)]

    def _trial(self, spec: TrialSpec, repeat: int, measure: Measure, role: Role = "trial") -> QueuedTrial:
        return QueuedTrial(spec=spec, trial_id=spec.trial_id, repeat=repeat, measure=measure, role=role)

    def _due_reference(self, queued: QueuedTrial, nodes: str) -> QueuedTrial | None:
        """The next repeat of the reference trial, if it is due on these nodes; else None."""
        if queued.role not in ("trial", "race"):
            return None
        due = self._references.due(workers_of(queued.spec), nodes, opens=queued.role == "trial")
        return None if due is None else self._trial(*due, self._run.measure, "reference")

    def _wants_more(self, slots: Slots) -> bool:
        """Returns whether nodes are idle that another proposal might use."""
        if self.num_waiting + self._waiting.num_held >= LOOK_AHEAD:
            return False
        return any(not self._waiting.has(spec.device) and slots.is_free(spec) for spec in self._run.clusters)

"""The trials that a study still has to run: repeats, reference trials, the race, and long runs. No Ray here."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from wattune.analysis.metrics.step_breakdown import HOST_BOUND_FRAC
from wattune.fidelity import FIRST_BURST_REPEAT, FIRST_SOAK_REPEAT, Role, role_of
from wattune.metrics import METRICS
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.events import Preview, RaceStep, RowStopped, TrialEvent
from wattune.orchestrate.failures import FailuresInARow, may_end_calls
from wattune.orchestrate.scheduling.budget import Budget
from wattune.orchestrate.scheduling.durations import Durations, Pace
from wattune.orchestrate.scheduling.early_stop import EarlyStop
from wattune.orchestrate.scheduling.graphs import Start, WarmGraphs, graphs_of
from wattune.orchestrate.scheduling.ladder import Ladder
from wattune.orchestrate.scheduling.nodes import Reservation, Reservations, Slots, closed_domains
from wattune.orchestrate.scheduling.outlook import Outlook, loads_s
from wattune.orchestrate.scheduling.proposals import Proposals
from wattune.orchestrate.scheduling.race import Race
from wattune.orchestrate.scheduling.references import References, ordinary_plans
from wattune.orchestrate.scheduling.run_order import run_order, workers_of
from wattune.orchestrate.scheduling.study_run import StudyRun
from wattune.orchestrate.scheduling.waiting import WORTH_REPEATING, Waiting
from wattune.run import Run, RunStatus
from wattune.scale_down.reading import read_run
from wattune.search.strategy import Strategy
from wattune.storage.study import Unreadable
from wattune.trial import Measure, TrialSpec

if TYPE_CHECKING:
    from wattune.orchestrate.cluster import Node

LOOK_AHEAD: Final = 32
"""Proposals that may wait for busy nodes while a strategy that learns is asked for one that fits free nodes."""

_MOST_ASIDE: Final = 4
"""The same for nodes of one kind of device. A proposal that waits knows less than one made later."""


class TrialQueue:
    """Waiting trials in the order they run, filled by the strategy and by results."""

    def __init__(
        self,
        strategy: Strategy,
        run: StudyRun,
        results: Iterable[tuple[TrialSpec, Run]],
        unreadable: Unreadable,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes in the results of earlier calls, and queues all proposals of a strategy that does not learn.

        Trials whose result is not final run again; those whose folders are unreadable do not.
        """
        self._strategy, self._run, self._clock_s = strategy, run, clock_s
        self._unreadable = unreadable
        self._reservations = Reservations()
        self._ahead: list[Reservation] = []
        """Reservations as of the last look for a trial that may start."""
        self.done: dict[tuple[str, int], Run] = {}
        """Final results by trial and repeat."""
        self.waiting = Waiting(self.done, unreadable)
        self._asked: dict[str, TrialSpec] = {}
        self._proposals = Proposals(strategy)
        self._referenced: dict[str, TrialSpec] = {}
        """Reference trials by id: one may be a trial that the strategy never asks for."""
        self._rounds_queued = not strategy.learns and run.search.ladder is None
        self._soaks_queued = False
        self._listed = {spec.trial_id: spec for spec in run.candidates}
        self._soaked: set[str] = set()
        self._host_bound: dict[str, float] = {}
        """Largest share of a step in which devices waited for their host, of each trial that was profiled."""
        self._pace, self.warm = Pace(), WarmGraphs()
        self._durations = Durations(self._pace, run.duration_s, ahead=run.isolation != "fresh")
        if run.duration_s is not None:
            self._durations.beside.take(run.earlier())
        every = run.measure.reference_every
        plans = (
            ordinary_plans(run.candidates, seed=run.search.seed, waits=run.waits, out_of_memory=run.out_of_memory)
            if every
            else {}
        )
        self._references = References(every=every, plans=plans, named=run.reference)
        raced, ladder = run.search.finalists, run.search.ladder
        self._race = None if raced is None else Race(raced, run.question, run.measure)
        self._racing = False
        self._ladder = None if ladder is None else Ladder(ladder, run.question)
        self._early_stop = EarlyStop(run.question) if run.search.early_stop else None
        self.outlook = Outlook(run, self.waiting, self._references, self._durations, self._ladder)
        self._num_again = 0
        self._rows: dict[Hashable, FailuresInARow] = {}
        self._last: set[tuple[str, int]] = set()
        begun: set[str] = set()
        for stored, result in sorted(results, key=lambda one: one[1].start_wall_ns):
            spec = self._listed.get(result.trial_id, stored)  # the candidate itself: strategies look it up
            role = role_of(result)
            if role in ("trial", "race"):
                begun.add(result.trial_id)
            outdated = run.outdated is not None and run.outdated(result)
            if not result.status.is_final or result.status in run.retry or outdated:
                self._num_again += self._is_listed(result.trial_id)
                if runs_last := result.status is RunStatus.INFRA_FAILED or may_end_calls(result):
                    self._last.add((result.trial_id, result.repeat))
                self._proposals.add(spec, result, runs_last=runs_last)
                continue
            self.note(spec, result, result.tags.get("nodes", ""))
            if strategy.learns:
                strategy.tell(spec, read_run(spec, result))
                # A trial that the space does not list any more is none of those it may try.
                if role in ("trial", "race", "burst") and self._is_listed(result.trial_id):
                    self._asked[result.trial_id] = spec
        self.warm.forget()  # the workers of earlier calls have ended
        if not strategy.learns:
            # What was begun counts first: a space that grew may draw others, and nothing measured goes to waste.
            proposed = strategy.ask(max(run.num_trials, len(run.candidates)))
            first = sorted(proposed, key=lambda spec: spec.trial_id not in begun)[: run.num_trials]
            chosen = {spec.trial_id for spec in first}
            specs = [spec for spec in proposed if spec.trial_id in chosen]
            self._asked = {spec.trial_id: spec for spec in specs}
            planned = Counter(map(workers_of, specs))
            self._references.plan({workers: run.num_full(count) for workers, count in planned.items()})
            self.waiting.add(self._bursts(specs) if self._ladder is not None else self._rounds(specs))
        else:  # it chooses the workers later
            self._proposals.keep(self._asked, self._is_listed)
            self._references.plan(dict.fromkeys(map(workers_of, run.candidates), run.num_full(run.num_trials)))

    @property
    def skipped(self) -> list[tuple[TrialSpec, Run]]:
        """Trials the strategy asks for, and reference trials, that are done already."""
        specs = self._referenced | self._asked
        known = ((specs.get(trial_id), result) for (trial_id, _), result in self.done.items())
        return [(spec, result) for spec, result in known if spec is not None]

    @property
    def num_left(self) -> int:
        """Trials expected to run after those that run now, with repeats, reference trials, race and finalists.

        Its cost does not depend on their number: every event carries it.
        """
        run, measure = self._run, self._run.measure
        num_references = self._references.num_left(self.waiting.num_worthwhile)
        num_to_ask = max(0, run.num_trials - len(self._asked)) if self._strategy.learns else 0
        num_repeats = 0 if self._rounds_queued else (measure.repeats - 1) * len(self._asked)
        num_search = self.waiting.num_left + num_to_ask * measure.repeats + num_repeats
        if self._ladder is not None and not self._rounds_queued:
            num_search = (
                self.waiting.num_left
                + num_to_ask
                + self._ladder.num_full_left(len(self._asked) + num_to_ask, measure.repeats)
            )
        # What is still measured may bring new leaders, whose long runs are not there.
        soaked = 0 if num_search else len(self._soaked)
        num_finalists = 0 if self._soaks_queued else max(0, measure.soak_finalists - soaked)
        return num_search + num_references + self._num_race(num_search) + num_finalists

    def _num_race(self, num_search: int) -> int:
        """The most repeats of the race after so many runs of the search; the race's own do not count as such."""
        if self._race is None:
            return 0
        return self._race.num_left if self._racing or not num_search else self._race.num_expected(num_search)

    def give_up(self, queued: Attempt) -> None:
        """Leaves a trial that the cluster failed to a later call."""
        self.waiting.give_up(queued)
        self._references.give_up(queued.trial_id, queued.repeat)
        if self._race is not None:
            self._race.give_up(queued.trial_id, queued.repeat)

    def add_to_row(self, spec: TrialSpec, result: Run) -> RowStopped | None:
        """Adds the end of a trial to the row of failures of its workers; returns a row that is too long to go on."""
        workers = workers_of(spec)
        any_ran = any(one.status is RunStatus.COMPLETED for one in self.done.values())
        row = self._rows.get(workers, FailuresInARow(any_ran=any_ran)).then(result)
        self._rows[workers] = row
        num_held = self.waiting.hold(workers) if row.ends_study(result) else None
        if num_held is None:
            return None
        return RowStopped(cluster=spec.cluster, engine=spec.engine, result=result, count=row.count, num_held=num_held)

    def note(self, spec: TrialSpec, result: Run, nodes: str) -> None:
        """Keeps a final result, and updates expected times and reference trials."""
        role = role_of(result)
        if role == "finalist":
            self._soaked.add(result.trial_id)
        self.done[result.trial_id, result.repeat] = result
        if (waits := result.metrics.get("host_bound_frac")) is not None:
            self._host_bound[result.trial_id] = max(waits, self._host_bound.get(result.trial_id, 0.0))
        if self._run.learns_memory is not None and self._run.learns_memory(spec, result):
            self.waiting.put_last(self._run.runs_late)
        start = self.warm.told(spec, result, nodes)
        if self._ladder is not None and self._is_listed(result.trial_id):
            self._ladder.note(spec, result, start)
        if role == "burst":  # it is no measure of pace, drift or finalists
            return
        if self._early_stop is not None:
            self._early_stop.note(spec, result)
        if result.status is RunStatus.COMPLETED and role != "finalist":
            wait_s = result.numbers.cooldown_s or 0.0
            self._pace.add(spec, result.took_s + wait_s, start, result.numbers.start_time_s or 0.0)
            self._durations.add(spec, self._run.measure, result, start, wait_s)
        if result.repeat == 0 and result.status not in WORTH_REPEATING:
            for repeat in range(1, self._run.measure.repeats):
                self.waiting.uncount(result.trial_id, repeat)
        self._references.note(spec, result, nodes)
        if role == "reference":
            self._referenced[result.trial_id] = spec
        if self._race is not None and self._is_listed(result.trial_id):
            self._race.note(spec, result)

    def pop(self, slots: Slots, affords: Callable[[Attempt], bool]) -> "tuple[Attempt, tuple[Node, ...]] | None":
        """Takes the first trial that may start now.

        Within a kind of device, trials start in order. One whose nodes are busy is overtaken only by trials that do not
        keep it waiting (`wattune.orchestrate.scheduling.nodes`).
        """
        ahead = self._ahead = []
        for device in self.waiting.devices():
            heads = self.waiting.heads(device, slots)
            for queued in heads:
                closed = self._closed(queued, slots, ahead)
                if closed is None:
                    if queued is heads[0]:
                        ahead.append(self._reservations.keep(queued, slots, self._clock_s()))
                elif queued is heads[0] and not affords(queued):
                    return None
                elif queued is heads[0] or self._leaves_enough(queued, heads[0]):
                    return self._start(queued, slots, closed)
        return None

    def _closed(self, queued: Attempt, slots: Slots, ahead: Sequence[Reservation]) -> frozenset[str] | None:
        """The domains that a trial leaves to those ahead of it, all of theirs if it can; None if it cannot start."""
        end_s = self._clock_s() + self.expected_s(queued) if self.knows_times else math.inf
        for closed in (closed_domains(ahead, math.inf), closed_domains(ahead, end_s)):
            if slots.is_free(queued.spec.cluster, queued.avoid, closed=closed):
                return closed
        return None

    def _leaves_enough(self, queued: Attempt, first: Attempt) -> bool:
        """Returns whether the budget allows a trial and then still the one that it overtakes."""
        budget = self._run.budget
        if budget is None:
            return True
        own_s, first_s = self.expected_s(queued), self.expected_s(first)
        device_s = own_s * queued.spec.cluster.world_size + first_s * first.spec.cluster.world_size
        return budget.num_left > 1 and own_s <= budget.left_s and device_s <= budget.left_device_s

    def _start(self, queued: Attempt, slots: Slots, closed: frozenset[str]) -> "tuple[Attempt, tuple[Node, ...]]":
        """Takes nodes for a trial, or for the reference trial that is due before it."""
        until_s = self._clock_s() + self.expected_s(queued)
        nodes = slots.take(queued.spec.cluster, queued.avoid, closed=closed, until_s=until_s)
        assert nodes is not None, "free a moment ago"
        reference = self._due_reference(queued, ",".join(node.name for node in nodes))
        if reference is None:
            self.waiting.take(queued)
        return reference or queued, nodes

    def refill(self, slots: Slots, *, idle: bool) -> bool:
        """Queues promoted trials and the next proposal of a strategy, then repeats, then the race, then finalists.

        `idle` says that nothing runs. Returns whether it looked for new trials, so that `pop` is worth another call.
        """
        run, measure = self._run, self._run.measure
        if self._promotes(slots, searching=True, idle=idle):
            return True
        searches = self._strategy.learns and len(self._asked) < run.num_trials and self._wants_more(slots, idle=idle)
        if searches and (proposed := self._proposed()):
            self._asked |= {spec.trial_id: spec for spec in proposed}
            first = (
                [self._trial(spec, 0, measure) for spec in proposed] if self._ladder is None else self._bursts(proposed)
            )
            self.waiting.add(map(self._proposals.with_prediction, first))
            return True
        if self.waiting or not (idle or self._racing):
            return False
        if self._promotes(slots, searching=False, idle=idle):
            return True
        if not self._rounds_queued:
            self._rounds_queued = True
            asked = list(self._asked.values())
            self.waiting.add(self._rounds(self._ladder.promoted(asked) if self._ladder is not None else asked))
            return True
        if self._queue_of_race(slots, idle=idle):
            return True
        if not idle:
            return False
        if (
            measure.soak_finalists
            and not self._soaks_queued
            and not self.waiting.stranded
            and not self.waiting.holds_any
        ):
            self._soaks_queued = True
            soak = replace(measure, min_seconds=measure.soak_seconds)
            self.waiting.add(self._trial(spec, FIRST_SOAK_REPEAT, soak, "finalist") for spec in self._unsoaked())
            return True
        return False

    def _proposed(self) -> list[TrialSpec]:
        """Returns the next trial of a strategy that learns, or none."""
        pace, warm, least_s = self._pace, self.warm, self._run.measure.min_seconds
        timed = (lambda spec: pace.expected_s(spec, least_s, warm.start_of(spec))) if self.knows_times else None
        return self._proposals.next(self._run.num_trials - len(self._asked), timed)

    def _unsoaked(self) -> list[TrialSpec]:
        """Lists the best trials of those that get a long run, without those that had theirs."""
        most = self._run.measure.soak_finalists
        best = self._run.finalists()[:most] if most else ()
        return [spec for spec in best if spec.trial_id not in self._soaked]

    def _is_listed(self, trial_id: str) -> bool:
        """Returns whether the space lists a trial. One that it has lost keeps its results, and runs no more."""
        return not self._listed or trial_id in self._listed

    def _queue_of_race(self, slots: Slots, *, idle: bool) -> bool:
        """Queues the next repeat of the race if it may start now, or nothing else runs; returns whether it did."""
        if self._race is None or self.waiting.stranded or self.waiting.failed:
            return False
        self._racing = True
        found = self._race.next(self.waiting.left_out)
        if found is None or not (idle or slots.is_free(found[0].cluster) or not slots.exists(found[0].cluster)):
            return False
        repeat = self._trial(*found, self._run.measure, "race")
        self._race.start(repeat.trial_id, repeat.repeat)
        self.waiting.add([repeat])
        return True

    def race_news(self) -> RaceStep | None:
        """Returns how the race stands, once after each change; None while there is none."""
        return self._race.news() if self._race is not None and self._racing else None

    def expected_s(self, queued: Attempt, start: Start | None = None) -> float:
        """Expected seconds of a trial that starts so; else where the workers are that suit it best."""
        start = start or self.warm.start_of(queued.spec)
        if self._ladder is not None and queued.role == "burst":
            return self._ladder.pace.expected_s(queued.spec, queued.measure.min_seconds, start)
        return self._durations.expected_s(queued.spec, queued.measure, start)

    def announced_s(self, queued: Attempt) -> float:
        """Seconds of a trial that the preview counted with; 0 where nothing tells trials apart."""
        return 0.0 if queued.role == "burst" else self._durations.announced_s(queued.spec, queued.measure)

    @property
    def knows_times(self) -> bool:
        """True if expected times come from trials that ran; else they are the least that settings allow."""
        return self._pace.typical_s > 0

    def is_profiled(self, queued: Attempt) -> bool:
        """Returns whether anything reads the figures of a run's profiled pass.

        Breakdowns and expected scatter are of plans: the first run of each tells them, and repeat 0, which people look
        at. A plan that waits for its host has a pass in every run, since that pace is taken out of it, and so has the
        long run of a finalist.
        """
        read = (METRICS[name] for name in self._run.question.needed)
        asked = any(one.group == "step_breakdown" or "kernels" in one.tables for one in read)
        waits = self._host_bound.get(queued.trial_id)
        always = queued.role == "finalist" or not queued.repeat
        return asked or always or waits is None or waits >= HOST_BOUND_FRAC

    def stop_above_s(self, queued: Attempt) -> float | None:
        """Mean step time above which a trial's measurement ends early; None measures it to its end.

        Only the search's own trials may: what is repeated to see scatter or drift, or to settle, is compared whole.
        """
        return self._early_stop.stop_above_s(queued.spec) if self._early_stop and queued.role == "trial" else None

    def first(self) -> tuple[TrialEvent, ...]:
        """Returns the trials that start first, as far as they are known."""
        return self.outlook.first(self.expected_s)

    def preview(self, slots: Slots | None = None) -> Preview:
        """Previews the work that is left, as far as it is known now, and the part this call may do, on known nodes."""
        measure, budget = self._run.measure, self._run.budget or Budget()
        self._durations.announce()
        costs, num_references = self.outlook.queued_costs(slots)
        first = self._run.clusters[0]  # a strategy that learns chooses the cluster later
        usual_s, num_asked = self.outlook.usual_s(costs, learns=self._strategy.learns), 0
        if self._ladder is not None:
            num_bursts = max(0, self._run.num_trials - len(self._asked)) if self._strategy.learns else 0
            costs += [(first, max(self._ladder.pace.typical_s, self._ladder.settings.burst.min_seconds))] * num_bursts
            num_asked = self._ladder.num_full_left(len(self._asked) + num_bursts, measure.repeats)
        elif self._strategy.learns:
            num_searched = sum(one in self._asked and repeat < self._run.measure.repeats for one, repeat in self.done)
            num_asked = max(0, self._run.num_trials * measure.repeats - num_searched)
        if num_asked and not costs:
            costs, num_asked = [(first, usual_s + self.outlook.starts_s())], num_asked - 1
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
            load_s=loads_s(costs),
            load_now_s=loads_s(costs[:num_now]),
            most_s=budget.left_s,
            unreadable=self._unreadable,
            measured=self.knows_times,
            first=self.first(),
            changes=self._run.changes,
            workloads=tuple(dict.fromkeys(spec.workload for spec in self._run.candidates)),
            space_number=self._run.numbers.space or 1,
            num_kept=len(self._run.candidates),
            num_drawn=self._run.num_trials,
            **self.outlook.predicted(learns=self._strategy.learns),
        )

    def _rounds(self, specs: Sequence[TrialSpec]) -> list[Attempt]:
        """Lists every repeat: in rounds of all trials, so that repeats are far apart, or together in a listed order."""
        ordered = run_order(specs, seed=self._run.search.seed, order=self._run.search.order, graphs_of=graphs_of)
        repeats = range(self._run.measure.repeats)
        pairs = [(spec, repeat) for repeat in repeats for spec in ordered]
        if self._run.search.order == "listed":
            pairs = [(spec, repeat) for spec in ordered for repeat in repeats]
        pairs.sort(key=lambda pair: self._runs_last(*pair))
        return [self._trial(spec, repeat, self._run.measure) for spec, repeat in pairs]

    def _runs_last(self, spec: TrialSpec, repeat: int) -> bool:
        """Returns whether a run must not keep others from running.

        It may have ended its study, the cluster failed it, or it is likely to run out of memory.
        """
        return (bool(self._last) and (spec.trial_id, repeat) in self._last) or self._run.runs_late(spec)

    def _bursts(self, specs: Sequence[TrialSpec]) -> list[Attempt]:
        """Lists the bursts of trials, in the order they run."""
        assert self._ladder is not None, "a burst is the first step of a ladder"
        burst, number = self._ladder.burst(self._run.measure), FIRST_BURST_REPEAT
        ordered = run_order(specs, seed=self._run.search.seed, order=self._run.search.order)
        ordered.sort(key=lambda spec: self._runs_last(spec, number))
        return [self._trial(spec, number, burst, "burst") for spec in ordered if (spec.trial_id, 0) not in self.done]

    def _promotes(self, slots: Slots, *, searching: bool, idle: bool) -> bool:
        """Queues the full measurement of the next trial that is worth it; returns whether there was one."""
        if self._ladder is None or self._rounds_queued or not self._wants_more(slots, idle=idle):
            return False
        spec = self._ladder.next(self.waiting.left_out, searching=searching)
        if spec is None:
            return False
        self.waiting.add([self._proposals.with_prediction(self._trial(spec, 0, self._run.measure))])
        return True

    def _trial(self, spec: TrialSpec, repeat: int, measure: Measure, role: Role = "trial") -> Attempt:
        return Attempt(spec=spec, repeat=repeat, measure=measure, role=role)

    def _due_reference(self, queued: Attempt, nodes: str) -> Attempt | None:
        """The next repeat of the reference trial, if it is due on these nodes; else None."""
        if queued.role not in ("trial", "race"):
            return None
        due = self._references.due(workers_of(queued.spec), nodes, opens=queued.role == "trial")
        return None if due is None else self._trial(*due, self._run.measure, "reference")

    def _wants_more(self, slots: Slots, *, idle: bool) -> bool:
        """Returns whether nodes are idle that another proposal might use; where nothing runs, one waits for nodes."""
        if len(self.waiting) + self.waiting.num_held >= LOOK_AHEAD:
            return False
        closed = closed_domains(self._ahead, math.inf)
        waiting = self.waiting.clusters | {queued.spec.cluster for queued in self.waiting.stranded}
        return any(
            cluster not in waiting
            and self.waiting.count(cluster.device) < _MOST_ASIDE
            and (idle or slots.is_free(cluster, closed=closed))
            for cluster in self._run.clusters
        )

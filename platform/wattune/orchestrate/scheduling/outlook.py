"""Outlook of a study: the trials that are left and how long they take, as far as it is known now. No Ray here."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final

from wattune.catalog.hardware import ClusterSpec
from wattune.fidelity import FIRST_REFERENCE_REPEAT
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.events import Placement, Preview, TrialEvent
from wattune.orchestrate.scheduling.durations import Durations
from wattune.orchestrate.scheduling.graphs import Start, WarmGraphs, one_of_each
from wattune.orchestrate.scheduling.ladder import Ladder
from wattune.orchestrate.scheduling.nodes import Slots
from wattune.orchestrate.scheduling.references import References
from wattune.orchestrate.scheduling.run_order import workers_of
from wattune.orchestrate.scheduling.study_run import StudyRun
from wattune.orchestrate.scheduling.waiting import Waiting
from wattune.trial import TrialSpec

PROCESSORS_BESIDE: Final = 4  # of each device, at least, where the next engine's workers start beside a trial
SHOWN_FIRST: Final = 4
"""Most trials that a preview names as the first ones."""


def loads_s(costs: Iterable[tuple[ClusterSpec, float]]) -> dict[ClusterSpec, float]:
    """Adds up seconds of trials by the cluster they need."""
    loads_s: dict[ClusterSpec, float] = defaultdict(float)
    for cluster, cost_s in costs:
        loads_s[cluster] += cost_s
    return dict(loads_s)


def _start_after(warm: WarmGraphs, spec: TrialSpec) -> Start:
    """Returns how a trial starts, one after another as on one set of nodes, and notes that it ran."""
    return warm.ran(spec, "", new_workers=warm.start_of(spec, "") == "new_workers")


class Outlook:
    """Times and order of the trials that wait."""

    def __init__(
        self, run: StudyRun, waiting: Waiting, references: References, durations: Durations, ladder: Ladder | None
    ) -> None:
        """Looks at the parts of a queue, which go on changing."""
        self._run, self._waiting, self._references = run, waiting, references
        self._durations, self._ladder = durations, ladder

    def usual_s(self, costs: Sequence[tuple[ClusterSpec, float]], *, learns: bool) -> float:
        """Returns the expected time of a trial that is not chosen yet: the median of those that may be."""
        known_s = [one for one in self._predicted_s(learns=learns) if one is not None] if learns else []
        durations = self._durations
        if known_s:  # it may find its graphs there or not
            beside_s, ratio = durations.beside.usual_s(self._run.candidates[0]), durations.ratio()
            steps_s = statistics.median(min(one * ratio, self._run.measure.timeout_s) for one in known_s)
            return max(steps_s, self._run.measure.min_seconds) + beside_s + durations.wait_s
        times_s = [took_s for _, took_s in costs]
        return max(statistics.median(times_s) if times_s else durations.pace.typical_s, self._run.measure.min_seconds)

    def starts_s(self) -> float:
        """Returns the seconds that the first starts of each kind of workers take beyond usual ones."""
        first = {workers_of(spec): spec for spec in self._run.candidates if self._run.duration_s is not None}
        beside = self._durations.beside
        return sum(max(beside.expected_s(spec, "new_workers") - beside.usual_s(spec), 0.0) for spec in first.values())

    def _predicted_s(self, *, learns: bool) -> list[float | None]:
        """Returns the predicted times of queued trials; of all candidates where a strategy chooses as it learns."""
        if learns:
            return [self._durations.predicted_s(spec, self._run.measure) for spec in self._run.candidates]
        return [self._durations.predicted_s(one.spec, one.measure) for one in self._waiting.in_order()]

    def predicted(self, *, learns: bool) -> dict[str, Any]:
        """Facts of a preview about predicted times."""
        predicted = self._predicted_s(learns=learns)
        known_s = [one for one in predicted if one is not None]
        return {
            "estimated": bool(known_s) and len(known_s) == len(predicted),
            "num_timeouts": sum(one > self._run.measure.timeout_s for one in known_s),
            "longest_s": max(known_s, default=0.0),
        }

    def first(self, expected_s: Callable[[Attempt, Start], float]) -> tuple[TrialEvent, ...]:
        """The trials that start first: the reference trial, if it opens the study, then the head of the queue."""
        waiting = self._waiting.in_order()[:SHOWN_FIRST]
        if not waiting:
            return ()
        workers = workers_of(waiting[0].spec)
        opening = [self._references.spec_of(workers)] * self._references.num_opening(workers)
        repeat, measure, warm = FIRST_REFERENCE_REPEAT, self._run.measure, WarmGraphs()
        head = [Attempt(spec=one, repeat=repeat, measure=measure, role="reference") for one in opening if one]
        first = [(one, expected_s(one, _start_after(warm, one.spec))) for one in [*head, *waiting][:SHOWN_FIRST]]
        return tuple(
            TrialEvent(kind="started", spec=one.spec, repeat=one.repeat, role=one.role, expected_s=took_s)
            for one, took_s in first
        )

    def coming(self, first: TrialSpec, *, learns: bool) -> tuple[TrialSpec, ...]:
        """Returns plans that run first or soon on the workers of a first one, one for each set of graphs."""
        plans = self._run.candidates if learns else [one.spec for one in self._waiting.in_order()]
        same = [one for one in plans if workers_of(one) == workers_of(first)]
        return one_of_each(same, by_share=learns)

    def then(self, spec: TrialSpec, slots: Slots) -> TrialSpec | None:
        """Returns the trial after one that runs, where its workers may start beside it."""
        heads = [one.spec for one in self._waiting.heads(spec.cluster.device, slots)[:1]]
        return next((one for one in heads if self._starts_beside(spec, one, slots)), None)

    def _starts_beside(self, spec: TrialSpec, then: TrialSpec, slots: Slots) -> bool:
        """Returns whether a trial needs another engine where one before it runs, and processors are to spare there."""
        if then.cluster != spec.cluster or then.engine == spec.engine or self._run.isolation == "fresh":
            return False
        lanes, least = slots.lanes(spec.cluster), PROCESSORS_BESIDE * spec.cluster.devices_per_node
        return len(lanes) == 1 and all(node.num_cpus >= least for node in lanes[0])

    def queued_costs(self, slots: Slots | None) -> tuple[list[tuple[ClusterSpec, float]], int]:
        """Cluster and expected seconds of every queued trial, in order; and the number of reference trials in it."""
        before: TrialSpec | None = None
        every = self._run.measure.reference_every
        costs: list[tuple[ClusterSpec, float]] = []
        counts: Counter[Hashable] = Counter()
        warm = WarmGraphs()
        num_references = 0
        for queued in self._waiting.in_order():
            workers = workers_of(queued.spec)
            start = _start_after(warm, queued.spec)
            if self._ladder is not None and queued.role == "burst":  # no reference trial comes before it
                burst_s = self._ladder.pace.expected_s(queued.spec, queued.measure.min_seconds, start)
                costs.append((queued.spec.cluster, burst_s))
                continue
            is_beside = before is not None and slots is not None and self._starts_beside(before, queued.spec, slots)
            before = queued.spec
            expected_s = self._durations.expected_s(queued.spec, queued.measure, start, is_beside=is_beside)
            # No reference trial follows the last trial.
            due = int(bool(every and counts[workers] and not counts[workers] % every))
            due += self._references.num_opening(workers) if not counts[workers] else 0
            num_references += due
            counts[workers] += 1
            costs += [(queued.spec.cluster, expected_s)]
            costs += [(queued.spec.cluster, self._durations.expected_s(queued.spec, queued.measure, "warm"))] * due
        return costs, num_references


def placement(preview: Preview, slots: Slots) -> Placement:
    """Computes the placement of a study's trials on free nodes.

    Trials of one kind of device share its nodes, so their times add up. Kinds of devices run side by side.
    """
    walls_s: dict[str, float] = defaultdict(float)
    devices_s: dict[str, float] = defaultdict(float)
    at_once: dict[str, int] = defaultdict(int)
    devices: dict[str, int] = defaultdict(int)
    lanes: dict[str, None] = {}
    missing = []
    for spec in preview.load_s:
        sets, load_s = slots.lanes(spec), preview.load_now_s.get(spec, 0.0)
        num_lanes = max(1, len(sets))
        walls_s[spec.device] += load_s / num_lanes
        devices_s[spec.device] += load_s * spec.world_size
        at_once[spec.device] = max(at_once[spec.device], len(sets))
        devices[spec.device] = max(devices[spec.device], num_lanes * spec.world_size)
        lanes |= {"+".join(node.name for node in nodes): None for nodes in sets}
        missing += [] if sets else [slots.missing(spec)]
    wall_s = max(walls_s.values(), default=0.0)
    return Placement(
        lanes=tuple(lanes),
        num_at_once=sum(at_once.values()),
        wall_s=min(wall_s, preview.most_s),
        cut_short=wall_s > preview.most_s,
        device_s=sum(min(devices_s[kind], preview.most_s * count) for kind, count in devices.items()),
        missing=tuple(missing),
    )

"""Expected times of trials: steps by their estimate, starts and builds by trials that ran. No Ray here."""

import math
import statistics
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from copy import deepcopy
from typing import Final

from wattune.orchestrate.scheduling.graphs import Start, WarmGraphs, compiles_ahead, graphs_of, waited_for_workers
from wattune.orchestrate.scheduling.run_order import workers_of
from wattune.run import Run, RunStatus
from wattune.search.forecast import around_s, duration_s
from wattune.trial import Measure, TrialSpec

BESIDE_STEPS_S: Final[Mapping[Start, float]] = {"new_workers": 40.0, "new_graphs": 8.0, "warm": 2.2}
"""Seconds of a trial on GPUs beside its steps, by its start, before anything was measured: sensors, workers, build,
compiling, profile and end. Medians of 83 trials of the torch engine on two H200 (`dense_llama_h200x2`, `moe_ep_h200x2`
and its guided part in `benchmarks/data`)."""
NEW_WORKERS_S: Final = 20.0
"""Of new workers of the torch engine since they start beside Tune: six studies (`results/study_economics.md`)."""
START_BESIDE_S: Final = 8.7
"""Of new workers that start beside the last trial of another engine: 0.55 s for 9.3 on two H200 (the same page)."""

KEPT_FRAC: Final = 0.75
"""Share of a first step's time, beyond a step's, that kept kernels save: 0.66 to 0.84 of nine plans on two H200 and two
H100 that an earlier study in the storage had compiled, 0.76 to 0.82 of five that were compiled ahead on two H200
(`benchmarks/results/study_economics.md`)."""


class Pace:
    """Times of trials so far, which predict those of the next ones."""

    def __init__(self) -> None:
        self._took_s: dict[Hashable, list[float]] = defaultdict(list)
        self._by_start_s: dict[tuple[Hashable, Start], list[float]] = defaultdict(list)

    def add(self, spec: TrialSpec, took_s: float, start: Start | None = None, start_s: float = 0.0) -> None:
        """Adds the time of a trial, how it started where that is known, and the seconds that its start took.

        New workers start once: their start is not expected of trials that start otherwise.
        """
        workers = workers_of(spec)
        insort(self._took_s[workers], took_s - start_s if start == "new_workers" else took_s)
        if start is not None:
            insort(self._by_start_s[workers, start], took_s)

    @property
    def typical_s(self) -> float:
        """The median of all times; 0 before the first."""
        seen = [value for one in self._took_s.values() for value in one]
        return statistics.median(seen) if seen else 0.0

    def expected_s(self, spec: TrialSpec, least_s: float, start: Start | None = None) -> float:
        """Predicts the time of a trial.

        It is the median of trials for the same workers that started alike, else of all trials for the same workers,
        else of all trials, and never less than `least_s`.
        """
        workers = workers_of(spec)
        alike = self._by_start_s.get((workers, start)) if start is not None else None
        seen = alike or self._took_s.get(workers)
        return max(least_s, statistics.median(seen) if seen else self.typical_s)


class BesideSteps:
    """Seconds of trials beside their steps, by how they start; learned from trials that ran, in this study or others.

    `BESIDE_STEPS_S` counts as one trial. Those of the same device, number of ranks and engine count, else all.
    """

    def __init__(self, *, ahead: bool) -> None:
        self._own_s: dict[Hashable, tuple[float, int]] = {}
        """Sum and number: a trial costs the same however many there were. All as if they had found no kernels."""
        self._compiled_s: dict[Hashable, float] = {}
        """Time of first steps beyond a step's, by graphs that an earlier study compiled."""
        self._ahead = ahead
        """True where graphs of coming plans are compiled beside the first trials, and found as kept kernels are."""

    def take(self, results: Iterable[tuple[TrialSpec, Run]]) -> None:
        """Takes results of other studies, whatever their order."""
        warm = WarmGraphs()
        for spec, result in sorted(results, key=lambda one: one[1].start_wall_ns):
            start = warm.ran(spec, result.tags.get("nodes", ""), new_workers=waited_for_workers(result))
            steps = result.numbers.warmup_steps  # what was asked for is not known: at most five without a word
            self.add(spec, Measure() if steps is None else Measure(warmup_steps=min(steps, 5)), result, start)
            compiled_s = (result.numbers.first_step_time_s or 0.0) - result.metrics.get("step_time_s", math.inf)
            if (key := _kernels(spec)) is not None and compiled_s > self._compiled_s.get(key, 0.0):
                self._compiled_s[key] = compiled_s

    def add(self, spec: TrialSpec, measure: Measure, result: Run, start: Start) -> None:
        """Takes a result. One that did not complete, or whose steps are not known, tells nothing."""
        step_s, window_s = result.metrics.get("step_time_s"), result.numbers.window_s
        if result.status is not RunStatus.COMPLETED or not step_s or not window_s:
            return
        own_s = result.took_s - window_s
        own_s = max(own_s - around_s(step_s, measure, on_cpu=spec.cluster.device == "cpu"), 0.0)
        own_s += self._saved_s(spec, start)
        for key in (_kind(spec, start), start):
            sum_s, num = self._own_s.get(key, (0.0, 0))
            self._own_s[key] = sum_s + own_s, num + 1

    def expected_s(self, spec: TrialSpec, start: Start) -> float:
        """Returns the expected seconds of a trial that starts so."""
        sum_s, num = self._own_s.get(_kind(spec, start)) or self._own_s.get(start, (0.0, 0))
        is_quick = start == "new_workers" and spec.engine == "torch"
        own_s = ((NEW_WORKERS_S if is_quick else BESIDE_STEPS_S[start]) + sum_s) / (1 + num)
        return max(own_s - self._saved_s(spec, start), min(own_s, BESIDE_STEPS_S["warm"]))

    def _saved_s(self, spec: TrialSpec, start: Start) -> float:
        """Returns what kernels save that are kept or compiled ahead; a warm trial holds its own."""
        if start == "warm":
            return 0.0
        is_ahead = self._ahead and start == "new_graphs" and compiles_ahead(spec)
        usual_s = BESIDE_STEPS_S["new_graphs"] - BESIDE_STEPS_S["warm"] if is_ahead else 0.0
        return KEPT_FRAC * max(self._compiled_s.get(_kernels(spec), 0.0), usual_s)

    def usual_s(self, spec: TrialSpec) -> float:
        """Returns the expected seconds of a trial on warm workers that may hold its graphs or not."""
        return (self.expected_s(spec, "new_graphs") + self.expected_s(spec, "warm")) / 2


def _kind(spec: TrialSpec, start: Start) -> Hashable:
    return spec.cluster.device, spec.cluster.world_size, spec.engine, start


def _kernels(spec: TrialSpec) -> Hashable:
    graphs = graphs_of(spec)
    return None if graphs is None else (spec.cluster.device, graphs)


class Durations:
    """Expected seconds of trials, better with each one that ended."""

    def __init__(
        self, pace: Pace, predict: Callable[[TrialSpec, Measure], float | None] | None = None, *, ahead: bool = False
    ) -> None:
        self.pace, self._predict = pace, predict
        self.beside = BesideSteps(ahead=ahead)
        self._ratios: dict[Hashable, list[float]] = defaultdict(list)
        self._all_ratios: list[float] = []
        self._waits_s: list[float] = []
        self._announced_wait_s = 0.0
        self._announced_beside = self.beside
        self._announced: dict[Hashable, float] = {}

    @property
    def wait_s(self) -> float:
        """The median time that trials waited for their devices to cool; no prediction has it."""
        return statistics.median(self._waits_s) if self._waits_s else 0.0

    def add(self, spec: TrialSpec, measure: Measure, result: Run, start: Start, wait_s: float = 0.0) -> None:
        """Adds a trial that completed, how it started, and how long it waited before for its devices to cool."""
        insort(self._waits_s, wait_s)
        predicted_s, step_s = self.predicted_s(spec, measure), result.metrics.get("step_time_s")
        if not predicted_s or not step_s:
            return
        ratio = duration_s(step_s, measure, on_cpu=spec.cluster.device == "cpu") / predicted_s
        insort(self._ratios[workers_of(spec)], ratio)
        insort(self._all_ratios, ratio)
        self.beside.add(spec, measure, result, start)

    def predicted_s(self, spec: TrialSpec, measure: Measure) -> float | None:
        """Predicts the seconds of a trial's steps, without those that ran; None where nothing predicts it."""
        return self._predict(spec, measure) if self._predict is not None else None

    def expected_s(
        self, spec: TrialSpec, measure: Measure, start: Start | None = None, *, is_beside: bool = False
    ) -> float:
        """Returns the expected seconds of a trial; `is_beside` says that its new workers start beside the one before.

        A prediction of its steps is multiplied by the median of measured over predicted ones, of trials for the same
        workers, else of all; it does not exceed `timeout_s`, at which the trial is ended. What trials take beside their
        steps comes on top, by how they start. Without a prediction it is what such trials took, and at least
        `min_seconds`. The wait until devices are cool comes on top of both.
        """
        predicted_s = self.predicted_s(spec, measure)
        if predicted_s is None:
            return self.pace.expected_s(spec, measure.min_seconds, start)
        steps_s = max(measure.min_seconds, min(predicted_s * self.ratio(workers_of(spec)), measure.timeout_s))
        own_s = self.beside.expected_s(spec, start or "warm")
        if is_beside and start == "new_workers":
            own_s = max(own_s - START_BESIDE_S, self.beside.expected_s(spec, "new_graphs"))
        return steps_s + own_s + self.wait_s

    def announce(self) -> None:
        """Keeps the corrections of this moment: a preview shows times by them."""
        self._announced = {workers: self.ratio(workers) for workers in [*self._ratios, None]}
        self._announced_wait_s = self.wait_s
        self._announced_beside = deepcopy(self.beside)

    def announced_s(self, spec: TrialSpec, measure: Measure) -> float:
        """Returns the seconds of a warm trial that the last preview counted with; 0 where nothing predicts it."""
        predicted_s = self.predicted_s(spec, measure)
        if predicted_s is None:
            return 0.0
        ratio = self._announced.get(workers_of(spec), self._announced.get(None, 1.0))
        steps_s = max(measure.min_seconds, min(predicted_s * ratio, measure.timeout_s))
        return steps_s + self._announced_beside.expected_s(spec, "warm") + self._announced_wait_s

    def ratio(self, workers: Hashable = None) -> float:
        """Returns the median of measured over predicted time of these workers' trials, else of all; 1 before any."""
        ratios = self._ratios.get(workers) or self._all_ratios
        return statistics.median(ratios) if ratios else 1.0

"""Expected times of trials: predicted where there is an estimate, corrected by those that ran. No Ray here."""

import statistics
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Hashable

from wattune.orchestrate.scheduling.graphs import Start
from wattune.orchestrate.scheduling.run_order import workers_of
from wattune.trial import Measure, TrialSpec


class Pace:
    """Times of trials so far, which predict those of the next ones."""

    def __init__(self) -> None:
        self._took_s: dict[Hashable, list[float]] = defaultdict(list)
        self._by_start_s: dict[tuple[Hashable, Start], list[float]] = defaultdict(list)

    def add(self, spec: TrialSpec, took_s: float, start: Start | None = None) -> None:
        """Adds the time of a trial, and how it started where that is known."""
        workers = workers_of(spec)
        insort(self._took_s[workers], took_s)
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


class Durations:
    """Expected seconds of trials, better with each one that ended."""

    def __init__(self, pace: Pace, predict: Callable[[TrialSpec, Measure], float | None] | None = None) -> None:
        self._pace, self._predict = pace, predict
        self._ratios: dict[Hashable, list[float]] = defaultdict(list)
        self._all_ratios: list[float] = []
        self._waits_s: list[float] = []
        self._announced_wait_s = 0.0
        self._announced: dict[Hashable, float] = {}

    @property
    def measured(self) -> bool:
        """True once a trial has ended."""
        return self._pace.typical_s > 0

    @property
    def typical_s(self) -> float:
        """The median time of the trials that ended; 0 before the first."""
        return self._pace.typical_s

    @property
    def wait_s(self) -> float:
        """The median time that trials waited for their devices to cool; no prediction has it."""
        return statistics.median(self._waits_s) if self._waits_s else 0.0

    def add(self, spec: TrialSpec, measure: Measure, took_s: float, wait_s: float = 0.0) -> None:
        """Adds the time of a trial, and how long it waited before for its devices to cool."""
        insort(self._waits_s, wait_s)
        predicted_s = self.predicted_s(spec, measure)
        if predicted_s:
            insort(self._ratios[workers_of(spec)], took_s / predicted_s)
            insort(self._all_ratios, took_s / predicted_s)

    def predicted_s(self, spec: TrialSpec, measure: Measure) -> float | None:
        """Predicts the seconds of a trial, without those that ran; None where nothing predicts it."""
        return self._predict(spec, measure) if self._predict is not None else None

    def expected_s(self, spec: TrialSpec, measure: Measure, start: Start | None = None) -> float:
        """Returns the expected seconds of a trial.

        A prediction is multiplied by the median of measured over predicted time, of trials for the same workers, else
        of all. Without a prediction it is what such trials took, and at least `min_seconds`. Neither exceeds
        `timeout_s`, at which the trial is ended. The wait until devices are cool comes on top of both.
        """
        predicted_s = self.predicted_s(spec, measure)
        if predicted_s is None:
            return self._pace.expected_s(spec, measure.min_seconds, start)
        return (
            max(measure.min_seconds, min(predicted_s * self.ratio(workers_of(spec)), measure.timeout_s)) + self.wait_s
        )

    def announce(self) -> None:
        """Keeps the corrections of this moment: a preview shows times by them."""
        self._announced = {workers: self.ratio(workers) for workers in [*self._ratios, None]}
        self._announced_wait_s = self.wait_s

    def announced_s(self, spec: TrialSpec, measure: Measure) -> float:
        """Returns the seconds of a trial that the last preview counted with; 0 where nothing predicts it."""
        predicted_s = self.predicted_s(spec, measure)
        if predicted_s is None:
            return 0.0
        ratio = self._announced.get(workers_of(spec), self._announced.get(None, 1.0))
        return max(measure.min_seconds, min(predicted_s * ratio, measure.timeout_s)) + self._announced_wait_s

    def ratio(self, workers: Hashable = None) -> float:
        """Returns the median of measured over predicted time of these workers' trials, else of all; 1 before any."""
        ratios = self._ratios.get(workers) or self._all_ratios
        return statistics.median(ratios) if ratios else 1.0

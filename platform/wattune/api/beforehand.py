"""Knowledge of a study before its first trial: estimates, and results of the other studies of its storage.

The results are read once and the candidates estimated once, whoever asks.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from wattune.api.spaces import GUIDED, StudyPlan, keep_plan
from wattune.catalog.hardware import ClusterSpec, DeviceSpec
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import Coefficients, Estimates, estimate
from wattune.cost.out_of_memory import CERTAIN, MemoryRisk
from wattune.cost.tables import EstimatedMetric
from wattune.errors import PlanError
from wattune.fidelity import is_burst, is_soak
from wattune.fitting.device import MeasuredTrial
from wattune.fitting.memory import measured_excess
from wattune.fitting.store import read_fit
from wattune.plans.program import is_command
from wattune.ranking.spreads import learned_scatter
from wattune.run import Numbers, RunStatus
from wattune.search.forecast import MEMORY_RULE, Unfitting, duration_s
from wattune.search.strategies.protocol import Observation, Strategy
from wattune.storage.known_results import ESTIMATES, kept
from wattune.storage.study import StudyFolder
from wattune.trial import Measure, TrialSpec, ids_of

CPU: Final = "cpu"

MOST_EARLIER: Final = 500
"""Most results of earlier studies that a search starts from: fitting costs time with the cube of their number."""


class OtherStudies:
    """The other studies of a storage: what their trials measured, and the coefficients of predictions that follow."""

    def __init__(self, storage: Path, *, apart_from: str = "") -> None:
        """Reads nothing yet of the local studies; trials of the one that is predicted (`apart_from`) do not count."""
        self._storage, self._apart_from = storage, apart_from
        self.coefficients = cache(self._coefficients)
        """Finds a device's coefficients: its fit in the storage, and defaults where that has none. Raises `PlanError`
        where it cannot be predicted."""

    def _coefficients(self, device: DeviceSpec) -> Coefficients:
        # Where trials held more memory than their prediction's interval, predictions of that engine and model hold it.
        default, fit = default_coefficients(device), read_fit(self._storage, device.name)
        memory = fit.memory if fit is not None and fit.memory is not None else default.memory
        peaks = [
            (spec, result.metrics["memory_peak_bytes"])
            for spec, result in self.results([device])
            if spec.cluster.simulate_sensors_of is None and "memory_peak_bytes" in result.metrics
            if not is_command(spec)
        ]
        found = replace(default, memory=replace(memory, excess_bytes=measured_excess(peaks, memory)))
        if fit is None:
            return found
        step_time, power = fit.step_time or default.step_time, fit.power or default.power
        return replace(found, step_time=step_time, power=power, fit=fit.label)

    @cached_property
    def studies(self) -> list[list[MeasuredTrial]]:
        """The full measurements of each study, newest first. One that cannot be read is left out: it is another's."""
        paths = [path.parent for path in self._storage.glob("*/study.yaml") if path.parent.name != self._apart_from]
        found = []
        for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
            with suppress(PlanError):
                results = StudyFolder(path).results()
                found.append([one for one in results if one[1].metrics and not is_burst(one[1])])
        return found

    def results(self, devices: Sequence[DeviceSpec], *, each_once: bool = False) -> list[MeasuredTrial]:
        """Returns the results that are of some devices, newest study first, at most `MOST_EARLIER`.

        A device of a study's own is another one where its figures are, whatever its name. `each_once` takes one
        ordinary result of each trial, a completed one where there is one. Repeats of a trial are no other plans that
        agree with it, and those of a reference trial would crowd out the rest.
        """
        found: list[MeasuredTrial] = []
        places: dict[TrialSpec, int] = {}
        names, wanted = {one.name for one in devices}, {one.counted for one in devices}
        for results in self.studies:
            for spec, result in results:
                if spec.cluster.device not in names or (each_once and is_soak(result)):
                    continue
                if spec.cluster.own_device is not None and spec.cluster.rank_device.counted not in wanted:
                    continue
                place = places.get(spec) if each_once else None
                if place is None:
                    places[spec] = len(found)
                    found.append((spec, result))
                elif found[place][1].status is not RunStatus.COMPLETED and result.status is RunStatus.COMPLETED:
                    found[place] = spec, result
            if len(found) >= MOST_EARLIER:
                break
        return found[:MOST_EARLIER]


class Beforehand:
    """Estimates of a study's candidates, and what earlier studies measured."""

    planned: StudyPlan
    """The study, with the candidates that the estimates are of."""

    def __init__(
        self,
        planned: StudyPlan,
        storage: Path,
        specs: Sequence[TrialSpec] | None = None,
        study: Path | None = None,
    ) -> None:
        """Reads and computes nothing yet; `specs` stand in for the candidates, and a `study` keeps their estimates."""
        self.planned = planned
        self._storage, self._study = storage, study
        self._specs = planned.candidates.specs if specs is None else specs
        self._others = OtherStudies(storage, apart_from=planned.name)

    @property
    def coefficients(self) -> Callable[[DeviceSpec], Coefficients]:
        """Finds a device's coefficients as its predictions take them; raises `PlanError` where there are none."""
        return self._others.coefficients

    @cached_property
    def _earlier(self) -> list[MeasuredTrial]:
        """Results that teach something of the candidates: of the same devices, and of the same command or none."""
        devices = [cluster.rank_device for cluster in self.planned.spec.clusters]
        programs = {_program(spec) for spec in self._specs}
        found = self._others.results(devices, each_once=True)
        return [(spec, result) for spec, result in found if _program(spec) in programs]

    def earlier(self) -> list[MeasuredTrial]:
        """Returns results of the storage's other studies on the same devices."""
        return self._others.results([cluster.rank_device for cluster in self.planned.spec.clusters])

    def scatter(self) -> Numbers:
        """Returns the scatter that the storage's other studies on the same devices lead to expect."""
        devices = {cluster.device for cluster in self.planned.spec.clusters if cluster.simulate_sensors_of is None}
        each = self._others.studies if devices else ()  # simulated sensors learn nothing: nothing is read for them
        return learned_scatter([one for one in results if one[0].cluster.device in devices] for results in each)

    def _predict(self, specs: Sequence[TrialSpec]) -> Estimates | None:
        """Predicts metrics of specifications; None where one of them runs on a device without estimates."""
        if any(spec.cluster.simulate_sensors_of is not None or is_command(spec) for spec in specs):
            return None
        try:
            return estimate(specs, self._others.coefficients)
        except PlanError:
            return None

    @cached_property
    def estimates(self) -> Estimates | None:
        """Estimates of the candidates; None where one of them has none."""
        made = partial(self._predict, self._specs)
        return made() if self._study is None else self._kept_estimates(self._study, made)

    def _kept_estimates(self, study: Path, make: Callable[[], Estimates | None]) -> Estimates | None:
        """Returns the candidates' estimates that a study keeps, else those that are made now."""

        def made() -> dict[str, Any]:
            return {} if (found := make()) is None else asdict(found)

        follows_from = self.planned.spec.document, ids_of(self._specs), [*map(self._told, self.planned.spec.clusters)]
        found = kept(study / ESTIMATES, len(self._specs), made, *follows_from)
        columns = {name: EstimatedMetric(**one) for name, one in found.get("columns", {}).items()}
        return Estimates(**{**found, "columns": columns}) if found else None

    def _told(self, cluster: ClusterSpec) -> Coefficients | None:
        """Returns what predictions of a cluster follow from."""
        with suppress(PlanError):
            return self._others.coefficients(cluster.sensed_device)
        return None

    def keep(self, study: Path) -> None:
        """Leaves plans and estimates with a study, for who asks it later."""
        keep_plan(self.planned, study)
        self._kept_estimates(study, lambda: self.estimates)

    @cached_property
    def _places(self) -> Mapping[TrialSpec, int]:
        return {spec: place for place, spec in enumerate(self._specs)}

    @cached_property
    def out_of_memory(self) -> MemoryRisk:
        """Probability that each candidate runs out of memory; 0 where it has no estimate."""
        return MemoryRisk(self._specs, self.estimates)

    def rejects(self, spec: TrialSpec) -> str:
        """Returns the reason not to start a candidate that trials of this study have shown not to fit; else empty."""
        risk = self.out_of_memory
        named = self.planned.spec.search.reference
        if not risk.learned(spec) or spec.trial_id == named or (probability := risk(spec)) <= CERTAIN:
            return ""
        return (
            f"{MEMORY_RULE}: by the trials of its engine and model that ran and that ran out of memory it would "
            f"too, with a probability of {probability:.2f}; --try-all runs it"
        )

    def fitting(self, study: StudyFolder) -> "Beforehand":
        """Rejects the candidates that run out of memory with a probability above `CERTAIN`, by the rule `memory`.

        A trial that began in the study's folder stays, whatever is estimated. Returns what is known of the others, and
        of the trial that `search.reference` names.
        """
        found, kept = self.estimates, self.planned.kept
        over = np.flatnonzero(self.out_of_memory.estimated > CERTAIN).tolist()
        if found is None or not over:
            return self
        begun, named = study.begun(), self.planned.spec.search.reference
        over = [place for place in over if (own := kept[place].trial_id) != named and not begun(own)]
        fits = np.setdiff1d(np.arange(len(kept)), over)
        unfitting = tuple(Unfitting(kept, found, np.array(over, np.intp)))
        candidates = replace(
            self.planned.candidates,
            kept=tuple(kept[place] for place in fits),
            rejected=(*self.planned.rejected, *unfitting),
        )
        other = self.of(replace(self.planned, candidates=candidates))
        other.estimates = found.take(fits)
        return other

    def of(self, planned: StudyPlan, specs: Sequence[TrialSpec] | None = None) -> "Beforehand":
        """Returns what is known of another plan of the study, or of `specs`: the other studies are not read again."""
        other = Beforehand(planned, self._storage, specs)
        other._others = self._others
        return other

    def _estimated(self, spec: TrialSpec) -> tuple[Estimates, int] | None:
        """Returns the estimates that a trial is among, and its place; None where it has none."""
        place = self._places.get(spec)
        if self.estimates is not None and place is not None:
            return self.estimates, place
        own = self._predict([spec])  # others may be on devices without estimates
        return None if own is None else (own, 0)

    def warm(self) -> list[Observation]:
        """Returns results of earlier studies, each with the estimate of its trial where all have one."""
        seen = self._earlier
        found = self._predict([spec for spec, _ in seen]) if seen and self.estimates is not None else None
        figures = {} if found is None else {name: column.value.tolist() for name, column in found.columns.items()}
        return [
            Observation(spec=spec, result=result, estimate={name: column[place] for name, column in figures.items()})
            for place, (spec, result) in enumerate(seen)
        ]

    def strategy(self) -> Strategy:
        """Makes the study's strategy with all that is known before its first trial.

        `model_guided` gets estimates of all candidates, and the results that earlier studies in the storage have of the
        same devices. Others get nothing. Trials on processors have no estimates: what they take is not in the catalog.
        Nor have commands, whose earlier results are those of the same command.
        """
        if self.planned.spec.search.strategy != GUIDED:
            return self.planned.strategy()
        found = self._predict([spec.read_as for spec in self._specs]) if self.planned.spec.targets else self.estimates
        columns = None if found is None else found.columns
        return self.planned.strategy(estimates=columns, warm=self.warm())

    def lowest_figures(self) -> Callable[[TrialSpec], Mapping[str, float]] | None:
        """Returns the estimator of hard limits: the low end of every figure of a trial. None where nothing is limited.

        A trial is refused only where even the low end is above a limit. Trials with simulated sensors have no estimate:
        their ranks run on processors, so their power is not that of a device at work. Nor have those of a device whose
        peaks the catalog does not know: the limit is watched while they run.
        """
        if not self.planned.spec.limits:
            return None

        def lowest(spec: TrialSpec) -> Mapping[str, float]:
            found = self._estimated(spec)
            return {} if found is None else {name: float(c.low[found[1]]) for name, c in found[0].columns.items()}

        return lowest

    def waits_for_host(self, spec: TrialSpec) -> bool:
        """Tells whether a slow host makes a trial's step longer. What has no estimate is taken as steady."""
        found = self._estimated(spec)
        if found is None:
            return False
        step, place = found[0].columns["step_time_s"], found[1]
        return bool(step.high[place] - step.value[place] > 1.01 * (step.value[place] - step.low[place]))

    def durations(self) -> Callable[[TrialSpec, Measure], float | None] | None:
        """Returns the predictor of how long a trial takes. None where a device of the study has no estimates.

        It knows the trials that fit. One that does not ends while it is built, and nothing predicts when.
        """
        if self.estimates is None:
            return None
        times_s = self.estimates.columns["step_time_s"].value.tolist()

        def expected(spec: TrialSpec, measure: Measure) -> float | None:
            place = self._places.get(spec)
            on_cpu = spec.cluster.device == CPU
            return None if place is None else duration_s(times_s[place], measure, on_cpu=on_cpu)

        return expected


def _program(spec: TrialSpec) -> tuple[str, ...]:
    """Returns the command that a trial runs; empty for built-in engines, whose work is one another's."""
    return spec.program.command if spec.program is not None else ()

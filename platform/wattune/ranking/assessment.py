"""Assessment of one trial: its figures as intervals, its distance to every bound, and a verdict by the constraints.

A figure is an interval: from the trial's repeats, or for a single run from the scatter of the study's reference trial
or of its own steps (`wattune.intervals`). A bound holds only if every repeat keeps it. The probability that the true
value keeps it is given beside.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, TypeAlias

from wattune.intervals import Interval, Reference, interval, reference
from wattune.objective import Constraint, Objective
from wattune.trial import QUALITIES, TrialResult, TrialSpec, TrialStatus
from wattune.units import NS_PER_S

Results: TypeAlias = Sequence[tuple[TrialSpec, TrialResult]]
"""Specification and result of every repeat of a study's trials, in any order."""

_UNCERTAINTIES: Final = {
    **dict.fromkeys(
        ("step_time_s", "tokens_per_s", "tokens_per_s_per_device", "mfu_frac"), "step_time_uncertainty_frac"
    ),
    **dict.fromkeys(("energy_per_step_j", "energy_per_token_j", "tokens_per_j"), "energy_per_step_uncertainty_frac"),
}
"""Metrics that are a mean over steps or its inverse, with the metric that has the uncertainty of one run's mean."""

_UNDECIDED: Final = (TrialStatus.INTERRUPTED, TrialStatus.INFRA_FAILED, TrialStatus.INVALID)
"""Statuses of a repeat that are not about the configuration: it is left out if another repeat completed."""


class Verdict(StrEnum):
    """Verdict on a trial by the constraints."""

    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"
    """A metric that the objective or a constraint needs was not measured."""
    INTERRUPTED = "interrupted"
    """Its study was stopped, or died, or the cluster failed it: the same command runs it again."""
    FAILED = "failed"
    """It ran and did not complete, or it will never run."""


class Spreads:
    """Scatter and drift of every metric of one study by the reference trial's repeats, computed at first use."""

    def __init__(self, results: Results) -> None:
        """Finds the reference trial's runs, separately for every set of nodes.

        Args:
            results: Results of one study.
        """
        references = {result.trial_id for _, result in results if result.tags.get("reference") == "true"}
        self._runs: dict[str, list[TrialResult]] = {}
        for _, result in results:
            counts = result.status is TrialStatus.COMPLETED and result.tags.get("soak") != "true"
            if result.trial_id in references and counts:
                self._runs.setdefault(_nodes(result), []).append(result)
        self._known: dict[tuple[str, str], Reference | None] = {}

    def reference(self, nodes: str, metric: str) -> Reference | None:
        """Returns the reference of a metric on a set of nodes, None if fewer than two runs measured it."""
        key = nodes, metric
        if key not in self._known:
            runs = [result for result in self._runs.get(nodes, ()) if metric in result.metrics]
            runs.sort(key=lambda run: (run.start_wall_ns, run.repeat))
            self._known[key] = reference([run.metrics[metric] for run in runs], [_at_s(run) for run in runs])
        return self._known[key]

    def references(self, metric: str) -> dict[str, Reference]:
        """Returns the references of a metric by the nodes they ran on."""
        found = {nodes: self.reference(nodes, metric) for nodes in sorted(self._runs)}
        return {nodes: one for nodes, one in found.items() if one is not None}

    def interval(self, counted: Sequence[TrialResult], metric: str, *, corrected: bool = True) -> Interval | None:
        """Computes a metric over repeats of one trial, None if one of them did not measure it.

        The long run of a finalist is a different measurement, of a hot machine. It is left out if there is an ordinary
        repeat, so that all trials are ranked by the same kind of run. Bounds must still hold in it.

        Args:
            counted: The repeats that completed.
            metric: Name of the metric.
            corrected: True to remove the reference trial's drift.
        """
        if not counted or any(metric not in result.metrics for result in counted):
            return None
        counted = [result for result in counted if result.tags.get("soak") != "true"] or counted
        values = [result.metrics[metric] for result in counted]
        own = self.reference(_nodes(counted[0]), metric)
        if corrected:
            drifts = [self.reference(_nodes(result), metric) for result in counted]
            pairs = zip(values, drifts, counted, strict=True)
            values = [drift.corrected(value, _at_s(run)) if drift else value for value, drift, run in pairs]
        of_steps = counted[0].metrics.get(_UNCERTAINTIES.get(metric, "")) if len(counted) == 1 else None
        if len(values) == 1 and own is None and of_steps is None:  # as `interval` has it, ten times as fast
            return Interval(value=values[0], low=values[0], high=values[0], method="none", num_runs=1)
        return interval(values, reference=own, steps_frac=of_steps)


def _nodes(result: TrialResult) -> str:
    return result.tags.get("nodes", "")


def _at_s(result: TrialResult) -> float:
    return result.start_wall_ns / NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """Distance of a trial to one bound, in the repeat that is closest to it or furthest past it."""

    constraint: str
    metric: str
    got: float
    bound: float
    slack: float
    """Distance to the bound on the allowed side, in the metric's unit; negative if violated."""
    slack_frac: float | None
    """The slack as a fraction of the bound; None where the bound is 0."""
    repeat: int
    holds: bool
    holds_probability: float | None
    """Probability that the true value keeps the bound; None where the metric's scatter is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTrial:
    """One assessed trial with all its repeats."""

    study: str
    """Name of the study if several are ranked together, else empty."""
    spec: TrialSpec
    trial_id: str
    verdict: Verdict
    rank: int | None
    """1 plus the number of feasible trials whose interval lies wholly above its own; None unless feasible."""
    objective: Interval | None
    """The objective's metric without the reference trial's drift; None if a repeat did not measure it."""
    margins: tuple[Margin, ...]
    """One per constraint that could be checked, in the constraints' order."""
    missing: tuple[str, ...]
    """Metrics that the objective and the constraints need and some repeat did not measure."""
    reason: str
    """Text that says why it is not feasible; empty for feasible trials."""
    repeats: tuple[TrialResult, ...]
    """Every repeat in order, including those that do not count."""
    quality: str
    """The worst of the counted repeats' qualities."""
    simulated: bool
    """True if telemetry of any counted repeat was simulated instead of measured."""
    spreads: Spreads = field(repr=False, compare=False)
    """Scatter of its study."""

    @property
    def label(self) -> str:
        """Short name of the plan, such as `dp2 tp2 mbs4 zero1`."""
        return self.spec.label

    @property
    def setting(self) -> dict[str, str]:
        """Study, model, cluster and engine: they separate it from trials of the same plan."""
        spec = self.spec
        return {
            "study": self.study,
            "model": spec.model.name,
            "cluster": spec.cluster.label,
            "engine": spec.engine,
        }

    @property
    def counted(self) -> tuple[TrialResult, ...]:
        """The repeats that completed, which intervals and margins use; for the reference trial, its runs too."""
        return completed(self.repeats)

    @property
    def failing(self) -> tuple[Margin, ...]:
        """The margins of the constraints that do not hold."""
        return tuple(margin for margin in self.margins if not margin.holds)

    def interval(self, metric: str) -> Interval | None:
        """Computes a metric over the completed repeats, None if one of them did not measure it."""
        return self.spreads.interval(self.counted, metric)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        return {
            "rank": self.rank,
            "study": self.study,
            "trial_id": self.trial_id,
            "verdict": str(self.verdict),
            "label": self.label,
            "model": self.spec.model.name,
            "num_parameters": self.spec.model.num_parameters,
            "num_active_parameters": self.spec.model.num_active_parameters,
            "cluster": self.spec.cluster.label,
            "engine": self.spec.engine,
            "dp": self.spec.plan.dp(self.spec.cluster.world_size),
            "plan": _shallow(self.spec.plan),
            "objective": _shallow(self.objective) if self.objective else None,
            "margins": [_shallow(margin) for margin in self.margins],
            "missing": list(self.missing),
            "reason": self.reason,
            "quality": self.quality,
            "simulated": self.simulated,
            "repeats": [
                {
                    "repeat": result.repeat,
                    "status": str(result.status),
                    "reason": result.reason,
                    "quality": result.quality,
                    "quality_reasons": list(result.quality_reasons),
                    "metrics": dict(result.metrics),
                }
                for result in self.repeats
            ],
        }


def _shallow(record: Any) -> dict[str, Any]:
    """Returns a flat dataclass as plain data; `dataclasses.asdict` would deep-copy each value of ten thousand rows."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def finite(result: TrialResult) -> TrialResult:
    """Returns the result without NaN and infinite figures: such a metric counts as not measured."""
    if all(map(math.isfinite, result.metrics.values())):
        return result
    return replace(result, metrics={name: value for name, value in result.metrics.items() if math.isfinite(value)})


def completed(repeats: Iterable[TrialResult]) -> tuple[TrialResult, ...]:
    """Returns the repeats that ran to their end and were measured well enough."""
    return tuple(result for result in repeats if result.status is TrialStatus.COMPLETED)


def _margin(constraint: Constraint, repeats: Sequence[TrialResult], spreads: Spreads) -> Margin | None:
    """Computes the margin of the worst repeat, None if no repeat can be checked."""
    checked = [(slack, result) for result in repeats if (slack := constraint.slack(result.metrics)) is not None]
    if not checked:
        return None
    slack, result = min(checked, key=lambda pair: pair[0])
    bound = constraint.bound(result.metrics)
    assert bound is not None, "a slack has a bound"
    # A bound is on the measured value, so drift of the machine stays in it.
    found = spreads.interval(repeats, constraint.metric, corrected=False)
    below = constraint.operator.startswith("<")
    likely = None if found is None else found.probability_at_most(bound) if below else found.probability_at_least(bound)
    return Margin(
        constraint=str(constraint),
        metric=constraint.metric,
        got=result.metrics[constraint.metric],
        bound=bound,
        slack=slack,
        slack_frac=slack / abs(bound) if bound else None,
        repeat=result.repeat,
        holds=bool(constraint.holds(result.metrics)),
        holds_probability=likely,
    )


def assess_trial(
    study: str,
    spec: TrialSpec,
    repeats: tuple[TrialResult, ...],
    spreads: Spreads,
    objective: Objective,
    constraints: Sequence[Constraint],
) -> RankedTrial:
    """Assesses a trial with all its repeats; it is not ranked yet.

    Args:
        study: Name of the study, empty if only one is ranked.
        spec: Specification of the trial.
        repeats: Its results, in order.
        spreads: Scatter of the study.
        objective: The metric to maximize or minimize.
        constraints: Bounds that must hold in every repeat.
    """
    counted = completed(repeats)
    broken = [result for result in repeats if result.status not in (TrialStatus.COMPLETED, *_UNDECIDED)]
    failures = broken or ([] if counted else list(repeats))
    margins = tuple(margin for bound in constraints if (margin := _margin(bound, counted, spreads)) is not None)
    needed = dict.fromkeys([objective.metric, *(name for bound in constraints for name in bound.missing({}))])
    missing = [name for name in needed if any(name not in result.metrics for result in counted)]
    failing = [margin for margin in margins if not margin.holds]
    if failures:
        runs_again = not broken and any(not result.status.is_final for result in failures)
        verdict = Verdict.INTERRUPTED if runs_again else Verdict.FAILED
        share = "" if len(repeats) == 1 else f" ({len(failures)} of {len(repeats)} repeats)"
        reason = "; ".join(sorted({": ".join(filter(None, (str(r.status), r.reason))) for r in failures})) + share
    elif failing:
        verdict = Verdict.INFEASIBLE
        reason = "; ".join(f"{margin.constraint} fails at {margin.got:.6g}" for margin in failing)
    elif missing:
        verdict, reason = Verdict.UNKNOWN, f"not measured: {', '.join(missing)}"
    else:
        verdict, reason = Verdict.FEASIBLE, ""
    return RankedTrial(
        study=study,
        spec=spec,
        trial_id=repeats[0].trial_id,
        verdict=verdict,
        rank=None,
        objective=spreads.interval(counted, objective.metric),
        margins=margins,
        missing=tuple(missing),
        reason=reason,
        repeats=repeats,
        quality=min((result.quality for result in counted), key=QUALITIES.index, default=""),
        simulated=any(is_simulated(result) for result in counted),
        spreads=spreads,
    )


def is_simulated(result: TrialResult) -> bool:
    """Returns true if a result's telemetry was simulated instead of measured, by its tag or its quality reasons."""
    return result.tags.get("simulated") == "true" or "simulated" in result.quality_reasons

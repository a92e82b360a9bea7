"""One trial, judged: its figures as intervals, its distance to every bound, and what the constraints say of it.

A figure is an interval: of the trial's repeats, or of a single run by the scatter of the study's reference, or by that
of its own steps (`wattune.intervals`). A bound is kept only if every repeat keeps it; how likely the true value keeps
it stands beside.
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
"""Metrics that are a mean over steps or its inverse, and what says how far one run's mean is known."""

_UNDECIDED: Final = (TrialStatus.INTERRUPTED, TrialStatus.INVALID)
"""Statuses of a repeat that say nothing about the configuration: it is left out where another repeat completed."""


class Verdict(StrEnum):
    """What the constraints say of a trial."""

    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"
    """A metric the objective or a constraint needs was not measured."""
    INTERRUPTED = "interrupted"
    """Its study was stopped, or died, before anything was measured: the same command runs it again."""
    FAILED = "failed"
    """It ran and did not complete, or never will run."""


class Spreads:
    """What the reference trial's repeats say of every metric of one study, worked out when first asked for."""

    def __init__(self, results: Results) -> None:
        """Finds the reference trial's runs, on every set of nodes by themselves.

        Args:
            results: Of one study.
        """
        references = {result.trial_id for _, result in results if result.tags.get("reference") == "true"}
        self._runs: dict[str, list[TrialResult]] = {}
        for _, result in results:
            counts = result.status is TrialStatus.COMPLETED and result.tags.get("soak") != "true"
            if result.trial_id in references and counts:
                self._runs.setdefault(_nodes(result), []).append(result)
        self._known: dict[tuple[str, str], Reference | None] = {}

    def reference(self, nodes: str, metric: str) -> Reference | None:
        """The reference trial of a metric on a set of nodes, None where fewer than two runs measured it."""
        key = nodes, metric
        if key not in self._known:
            runs = [result for result in self._runs.get(nodes, ()) if metric in result.metrics]
            runs.sort(key=lambda run: (run.start_wall_ns, run.repeat))
            self._known[key] = reference([run.metrics[metric] for run in runs], [_at_s(run) for run in runs])
        return self._known[key]

    def references(self, metric: str) -> dict[str, Reference]:
        """The reference trials of a metric by the nodes they ran on."""
        found = {nodes: self.reference(nodes, metric) for nodes in sorted(self._runs)}
        return {nodes: one for nodes, one in found.items() if one is not None}

    def interval(self, counted: Sequence[TrialResult], metric: str, *, corrected: bool = True) -> Interval | None:
        """A metric over repeats of one trial, None where one of them did not measure it.

        A finalist's long run is another measurement, of a hot machine: it is left out where an ordinary repeat is
        there, so that all trials are ranked by the same one. Bounds have to hold in it all the same.

        Args:
            counted: The repeats that completed.
            metric: What of them.
            corrected: Whether what the reference trial drifted by in the meantime is taken out.
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
    """How a trial stands to one constraint, in the repeat that comes closest to its bound or furthest past it."""

    constraint: str
    metric: str
    got: float
    bound: float
    slack: float
    """Distance to the bound on the allowed side, in the metric's unit; negative is violated."""
    slack_frac: float | None
    """The same as a fraction of the bound; None where the bound is 0."""
    repeat: int
    holds: bool
    holds_probability: float | None
    """How likely the true value keeps the bound; None where nothing tells how the metric scatters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTrial:
    """One trial with all its repeats, judged."""

    study: str
    """The study's name where several are ranked together, else empty."""
    spec: TrialSpec
    trial_id: str
    verdict: Verdict
    rank: int | None
    """1 plus the number of feasible trials whose interval lies wholly above its own; None unless feasible."""
    objective: Interval | None
    """The objective's metric, the reference trial's drift taken out; None where a repeat did not measure it."""
    margins: tuple[Margin, ...]
    """One per constraint that could be checked, in the constraints' order."""
    missing: tuple[str, ...]
    """Metrics the objective and the constraints need that some repeat did not measure."""
    reason: str
    """Why it is not feasible, in words; empty for feasible trials."""
    repeats: tuple[TrialResult, ...]
    """Every repeat in order, those left out included."""
    quality: str
    """The worst of the counted repeats' qualities."""
    simulated: bool
    """Whether telemetry of any counted repeat was computed instead of measured."""
    spreads: Spreads = field(repr=False, compare=False)
    """Of its study."""

    @property
    def label(self) -> str:
        """The plan in short, such as `dp2 tp2 mbs4 zero1`."""
        return self.spec.label

    @property
    def setting(self) -> dict[str, str]:
        """What tells it from trials of the same plan: study, model, cluster and engine."""
        spec = self.spec
        return {
            "study": self.study,
            "model": spec.model.name,
            "cluster": spec.cluster.label,
            "engine": spec.engine,
        }

    @property
    def counted(self) -> tuple[TrialResult, ...]:
        """The repeats that completed: those intervals and margins are over, the reference trial's included."""
        return completed(self.repeats)

    @property
    def failing(self) -> tuple[Margin, ...]:
        """The margins of the constraints that do not hold."""
        return tuple(margin for margin in self.margins if not margin.holds)

    def interval(self, metric: str) -> Interval | None:
        """A metric over the completed repeats, None where one of them did not measure it."""
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
    """A flat dataclass as plain data; `dataclasses.asdict` copies every value of ten thousand rows deeply."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def finite(result: TrialResult) -> TrialResult:
    """The result without figures that are no number: such a metric was not measured."""
    if all(map(math.isfinite, result.metrics.values())):
        return result
    return replace(result, metrics={name: value for name, value in result.metrics.items() if math.isfinite(value)})


def completed(repeats: Iterable[TrialResult]) -> tuple[TrialResult, ...]:
    """The repeats that ran to their end and were measured well enough."""
    return tuple(result for result in repeats if result.status is TrialStatus.COMPLETED)


def _margin(constraint: Constraint, repeats: Sequence[TrialResult], spreads: Spreads) -> Margin | None:
    """The margin of the worst repeat, None where no repeat can be checked."""
    checked = [(slack, result) for result in repeats if (slack := constraint.slack(result.metrics)) is not None]
    if not checked:
        return None
    slack, result = min(checked, key=lambda pair: pair[0])
    bound = constraint.bound(result.metrics)
    assert bound is not None, "a slack has a bound"
    # A bound is on what was there: nothing the machine drifted by is taken out.
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
    """A trial with all its repeats, not ranked yet.

    Args:
        study: The study's name, empty where it needs none.
        spec: What ran.
        repeats: What came of it, in order.
        spreads: Of the study.
        objective: What is maximized or minimized.
        constraints: What has to hold in every repeat.
    """
    counted = completed(repeats)
    broken = [result for result in repeats if result.status not in (TrialStatus.COMPLETED, *_UNDECIDED)]
    failures = broken or ([] if counted else list(repeats))
    margins = tuple(margin for bound in constraints if (margin := _margin(bound, counted, spreads)) is not None)
    needed = dict.fromkeys([objective.metric, *(name for bound in constraints for name in bound.missing({}))])
    missing = [name for name in needed if any(name not in result.metrics for result in counted)]
    failing = [margin for margin in margins if not margin.holds]
    if failures:
        runs_again = not broken and any(result.status is TrialStatus.INTERRUPTED for result in failures)
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
    """Whether a result's telemetry was computed instead of measured, by its tag or its quality reasons."""
    return result.tags.get("simulated") == "true" or "simulated" in result.quality_reasons

"""Ranking: which trials keep every bound, in which order, and what every other one lacks.

Repeats of a trial are an interval, from its worst to its best, never a mean: two trials whose intervals overlap share
a rank, since the measurement does not tell them apart. A bound is kept only if every repeat keeps it.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

import pyarrow as pa

from wattune.errors import SpaceError, closest
from wattune.objective import Constraint, Objective
from wattune.plan.axes import AXES
from wattune.schema import METRICS
from wattune.trial import TrialResult, TrialSpec, TrialStatus

QUALITIES: Final = ("invalid", "", "indicative", "publishable")
"""Qualities from worst to best; empty is a result that nobody judged."""

_UNDECIDED: Final = (TrialStatus.INTERRUPTED, TrialStatus.INVALID)
"""Statuses of a repeat that say nothing about the configuration: it is left out where another repeat completed."""


class Verdict(StrEnum):
    """What the constraints say of a trial."""

    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"
    """A metric the objective or a constraint needs was not measured."""
    FAILED = "failed"
    """It did not complete."""


class Interval(NamedTuple):
    """Least and largest value over the repeats of a trial; equal where there was one."""

    low: float
    high: float


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTrial:
    """One trial with all its repeats, judged."""

    spec: TrialSpec
    trial_id: str
    verdict: Verdict
    rank: int | None
    """1 plus the number of feasible trials whose interval lies wholly above its own; None unless feasible."""
    objective: Interval | None
    """The objective's metric over the repeats, None where one of them did not measure it."""
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

    @property
    def label(self) -> str:
        """The plan in short, such as `dp2 tp2 mbs4 zero1`."""
        return self.spec.label

    @property
    def counted(self) -> tuple[TrialResult, ...]:
        """The repeats that completed: those the interval and the margins are over."""
        return _counted(self.repeats)

    @property
    def failing(self) -> tuple[Margin, ...]:
        """The margins of the constraints that do not hold."""
        return tuple(margin for margin in self.margins if not margin.holds)

    def interval(self, metric: str) -> Interval | None:
        """A metric over the completed repeats, None where one of them did not measure it."""
        return _interval(self.counted, metric)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        return {
            "rank": self.rank,
            "trial_id": self.trial_id,
            "verdict": str(self.verdict),
            "label": self.label,
            "model": self.spec.model.name,
            "cluster": self.spec.cluster.label,
            "engine": self.spec.engine,
            "dp": self.spec.plan.dp(self.spec.cluster.world_size),
            "plan": asdict(self.spec.plan),
            "objective": self.objective._asdict() if self.objective else None,
            "margins": [asdict(margin) for margin in self.margins],
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All trials of a study, judged: what `rank` prints and the report draws."""

    objective: Objective
    constraints: tuple[Constraint, ...]
    where: tuple[Constraint, ...]
    feasible: tuple[RankedTrial, ...]
    """By rank; within a shared rank the better worst repeat first."""
    infeasible: tuple[RankedTrial, ...]
    """By objective: the first is what the bounds cost."""
    unknown: tuple[RankedTrial, ...]
    failed: tuple[RankedTrial, ...]
    num_filtered: int
    """Trials `where` left out before ranking."""

    @property
    def trials(self) -> tuple[RankedTrial, ...]:
        """Every judged trial in the order it is listed."""
        return self.feasible + self.infeasible + self.unknown + self.failed

    @property
    def best(self) -> RankedTrial | None:
        """The first feasible trial, None where nothing is feasible."""
        return self.feasible[0] if self.feasible else None

    @property
    def qualities(self) -> dict[str, int]:
        """Measured trials by quality, the best quality first."""
        counts = Counter(row.quality for row in self.trials if row.counted)
        return {quality: counts[quality] for quality in reversed(QUALITIES) if counts[quality]}

    @property
    def simulated(self) -> bool:
        """Whether any ranked figure comes from simulated telemetry."""
        return any(row.simulated for row in self.trials)

    @property
    def note(self) -> str:
        """What a reader must know before comparing rows: qualities, simulation, trials left out."""
        measured = [row for row in self.trials if row.counted]
        listed = ", ".join(f"{count} {quality or 'not judged'}" for quality, count in self.qualities.items())
        parts = [f"quality: {listed}" if listed else "nothing was measured"]
        simulated = sum(row.simulated for row in measured)
        if simulated:
            share = "all" if simulated == len(measured) else f"{simulated} of {len(measured)}"
            parts.append(f"SIMULATED telemetry in {share} measured trials")
        if self.num_filtered:
            parts.append(f"{self.num_filtered} left out by {' and '.join(map(str, self.where))}")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`: every row of every list, with its repeats."""
        return {
            "objective": str(self.objective),
            "constraints": [str(constraint) for constraint in self.constraints],
            "where": [str(constraint) for constraint in self.where],
            "note": self.note,
            "qualities": self.qualities,
            "simulated": self.simulated,
            "num_filtered": self.num_filtered,
            **{str(verdict): [row.to_json() for row in getattr(self, verdict)] for verdict in Verdict},
        }

    def to_table(self) -> pa.Table:
        """One row per trial, for `ranking.parquet`; the metadata says what was asked."""
        rows = [row.to_json() for row in self.trials]
        for row, trial in zip(rows, self.trials, strict=True):
            row["plan"] = {**row["plan"], "rank_order": str(trial.spec.plan.rank_order)}
            row["repeats"] = [{**repeat, "metrics": list(repeat["metrics"].items())} for repeat in row["repeats"]]
        metadata = {
            "wattune.objective": str(self.objective),
            "wattune.constraints": "\n".join(map(str, self.constraints)),
            "wattune.where": "\n".join(map(str, self.where)),
            "wattune.note": self.note,
            "wattune.simulated": str(self.simulated).lower(),
        }
        return pa.Table.from_pylist(rows, schema=_TABLE.with_metadata(metadata))


_AXIS_TYPES: Final = {"count": pa.int32(), "choice": pa.string(), "layout": pa.list_(pa.int32()), "order": pa.string()}


def _struct(**types: pa.DataType) -> pa.DataType:
    return pa.struct(list(types.items()))


_TABLE: Final = pa.schema(
    {
        "rank": pa.int32(),
        "trial_id": pa.string(),
        "verdict": pa.string(),
        "label": pa.string(),
        "model": pa.string(),
        "cluster": pa.string(),
        "engine": pa.string(),
        "dp": pa.int32(),
        "plan": _struct(**{name: _AXIS_TYPES[axis.kind] for name, axis in AXES.items()}),
        "objective": _struct(low=pa.float64(), high=pa.float64()),
        "margins": pa.list_(
            _struct(
                constraint=pa.string(),
                metric=pa.string(),
                got=pa.float64(),
                bound=pa.float64(),
                slack=pa.float64(),
                slack_frac=pa.float64(),
                repeat=pa.int32(),
                holds=pa.bool_(),
            )
        ),
        "missing": pa.list_(pa.string()),
        "reason": pa.string(),
        "quality": pa.string(),
        "simulated": pa.bool_(),
        "repeats": pa.list_(
            _struct(
                repeat=pa.int32(),
                status=pa.string(),
                reason=pa.string(),
                quality=pa.string(),
                quality_reasons=pa.list_(pa.string()),
                metrics=pa.map_(pa.string(), pa.float64()),
            )
        ),
    }.items()
)
"""Columns of `ranking.parquet`: those of a row's JSON; values are in the units of the metrics they stand for."""


def rank(
    results: Sequence[tuple[TrialSpec, TrialResult]],
    objective: Objective,
    constraints: Sequence[Constraint],
    *,
    where: Sequence[Constraint] = (),
) -> Ranking:
    """Judges every trial and puts the feasible ones in order.

    A trial with a repeat that ran and failed is failed, whatever its other repeats gave: it cannot be relied on. A
    repeat that was interrupted, or whose measurement is invalid, is left out where another one completed.

    Args:
        results: Specification and result of every repeat, in any order.
        objective: What is maximized or minimized.
        constraints: What has to hold in every repeat.
        where: What a trial must hold, in every completed repeat, to be ranked at all; the others are only counted.
    """
    specs: dict[str, TrialSpec] = {}
    repeats: dict[str, list[TrialResult]] = {}
    for spec, result in results:
        specs[result.trial_id] = spec
        repeats.setdefault(result.trial_id, []).append(_finite(result))
    chosen = {trial_id: ordered for trial_id, ordered in repeats.items() if _passes(ordered, where)}
    judged: dict[Verdict, list[RankedTrial]] = {verdict: [] for verdict in Verdict}
    for trial_id, unordered in chosen.items():
        ordered = tuple(sorted(unordered, key=lambda result: result.repeat))
        row = _judge(trial_id, specs[trial_id], ordered, objective, constraints)
        judged[row.verdict].append(row)

    def best_first(row: RankedTrial) -> tuple[int, float, float, str]:
        low, high = _score(row, objective)
        return (row.rank or 0, -low, -high, row.trial_id)

    return Ranking(
        objective=objective,
        constraints=tuple(constraints),
        where=tuple(where),
        feasible=tuple(sorted(_with_ranks(judged[Verdict.FEASIBLE], objective), key=best_first)),
        infeasible=tuple(sorted(judged[Verdict.INFEASIBLE], key=best_first)),
        unknown=tuple(sorted(judged[Verdict.UNKNOWN], key=best_first)),
        failed=tuple(sorted(judged[Verdict.FAILED], key=lambda row: (row.reason, row.trial_id))),
        num_filtered=len(repeats) - len(chosen),
    )


def pareto_front(rows: Iterable[RankedTrial], metric_a: str, metric_b: str) -> list[RankedTrial]:
    """The rows that no other row beats in one metric without losing in the other, best `metric_a` first.

    Every row stands for its worst repeat in each metric; a row that did not measure both is not on the front.

    Args:
        rows: Usually the feasible rows of a ranking.
        metric_a: A metric that has a better direction.
        metric_b: Another one.

    Raises:
        SpaceError: A metric is unknown, or neither direction of it is better.
    """
    worst_a, worst_b = _worst(metric_a), _worst(metric_b)
    points = [(a, b, row) for row in rows if (a := worst_a(row)) is not None and (b := worst_b(row)) is not None]
    points.sort(key=lambda point: (-point[0], -point[1], point[2].trial_id))
    front: list[tuple[float, float, RankedTrial]] = []
    for a, b, row in points:
        if not front or b > front[-1][1] or (a, b) == front[-1][:2]:
            front.append((a, b, row))
    return [row for _, _, row in front]


def _worst(metric: str) -> Callable[[RankedTrial], float | None]:
    """What a row's worst repeat has of a metric, turned so that more is better."""
    if metric not in METRICS:
        raise SpaceError(f'unknown metric "{metric}" for a Pareto front; {closest(metric, METRICS)}')
    better = METRICS[metric].better
    if better == "none":
        raise SpaceError(
            f"{metric} cannot span a Pareto front: neither more nor less of it is better by itself; "
            "choose a metric with a direction, such as tokens_per_s or energy_per_token_j"
        )

    def worst(row: RankedTrial) -> float | None:
        interval = row.interval(metric)
        if interval is None:
            return None
        return interval.low if better == "higher" else -interval.high

    return worst


def _finite(result: TrialResult) -> TrialResult:
    """The result without figures that are no number: such a metric was not measured."""
    if all(map(math.isfinite, result.metrics.values())):
        return result
    return replace(result, metrics={name: value for name, value in result.metrics.items() if math.isfinite(value)})


def _counted(repeats: Iterable[TrialResult]) -> tuple[TrialResult, ...]:
    return tuple(result for result in repeats if result.status is TrialStatus.COMPLETED)


def _passes(repeats: Sequence[TrialResult], where: Sequence[Constraint]) -> bool:
    counted = _counted(repeats)
    return not where or (bool(counted) and all(bound.holds(result.metrics) for bound in where for result in counted))


def _interval(repeats: Sequence[TrialResult], metric: str) -> Interval | None:
    values = [result.metrics[metric] for result in repeats if metric in result.metrics]
    return Interval(min(values), max(values)) if values and len(values) == len(repeats) else None


def _score(row: RankedTrial, objective: Objective) -> Interval:
    """The objective's interval turned so that more is better; below everything where it was not measured."""
    if row.objective is None:
        return Interval(-math.inf, -math.inf)
    low, high = row.objective
    return Interval(low, high) if objective.maximize else Interval(-high, -low)


def _with_ranks(rows: Sequence[RankedTrial], objective: Objective) -> list[RankedTrial]:
    lows = sorted(_score(row, objective).low for row in rows)
    return [replace(row, rank=1 + len(lows) - bisect_right(lows, _score(row, objective).high)) for row in rows]


def _margin(constraint: Constraint, repeats: Iterable[TrialResult]) -> Margin | None:
    """The margin of the worst repeat, None where no repeat can be checked."""
    checked = [(slack, result) for result in repeats if (slack := constraint.slack(result.metrics)) is not None]
    if not checked:
        return None
    slack, result = min(checked, key=lambda pair: pair[0])
    bound = constraint.bound(result.metrics)
    assert bound is not None, "a slack has a bound"
    return Margin(
        constraint=str(constraint),
        metric=constraint.metric,
        got=result.metrics[constraint.metric],
        bound=bound,
        slack=slack,
        slack_frac=slack / abs(bound) if bound else None,
        repeat=result.repeat,
        holds=bool(constraint.holds(result.metrics)),
    )


def _judge(
    trial_id: str,
    spec: TrialSpec,
    repeats: tuple[TrialResult, ...],
    objective: Objective,
    constraints: Sequence[Constraint],
) -> RankedTrial:
    counted = _counted(repeats)
    broken = [result for result in repeats if result.status not in (TrialStatus.COMPLETED, *_UNDECIDED)]
    failures = broken or ([] if counted else list(repeats))
    margins = tuple(margin for bound in constraints if (margin := _margin(bound, counted)) is not None)
    needed = dict.fromkeys([objective.metric, *(name for bound in constraints for name in bound.missing({}))])
    missing = [name for name in needed if any(name not in result.metrics for result in counted)]
    failing = [margin for margin in margins if not margin.holds]
    if failures:
        verdict = Verdict.FAILED
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
        spec=spec,
        trial_id=trial_id,
        verdict=verdict,
        rank=None,
        objective=_interval(counted, objective.metric),
        margins=margins,
        missing=tuple(missing),
        reason=reason,
        repeats=repeats,
        quality=min((result.quality for result in counted), key=QUALITIES.index, default=""),
        simulated=any(is_simulated(result) for result in counted),
    )


def is_simulated(result: TrialResult) -> bool:
    """Whether a result's telemetry was computed instead of measured, by its tag or its quality reasons."""
    return result.tags.get("simulated") == "true" or "simulated" in result.quality_reasons

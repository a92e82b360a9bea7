"""Assessment of one trial: its figures as intervals, its distance to every bound, and a verdict by the constraints.

A figure is an interval from the scatter of all runs of its study (`wattune.ranking.spreads`). A bound holds, breaks or
is undecided at a stated risk (`wattune.ranking.bounds`). A trial is feasible if all bounds hold, infeasible if one
breaks, and else undecided.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import repeat
from statistics import median
from typing import Any, Final

from wattune.fidelity import is_burst, measuring
from wattune.intervals import Interval
from wattune.metrics import METRICS
from wattune.objective import Objective, Question
from wattune.ranking.bounds import Holds, Margin, margins
from wattune.ranking.spreads import Spreads
from wattune.run import QUALITIES, Recorded, Run, RunStatus
from wattune.scale_down.reading import SCALED
from wattune.trial import TrialSpec
from wattune.units import format_probability, format_quantity

NOT_ITS_OWN: Final = (RunStatus.INTERRUPTED, RunStatus.INFRA_FAILED, RunStatus.INVALID)
"""Statuses of a repeat that are not about the configuration: it is left out if another repeat completed."""


class Verdict(StrEnum):
    """Verdict on a trial by the constraints."""

    FEASIBLE = "feasible"
    """Every bound holds at the stated risk."""
    UNDECIDED = "undecided"
    """No bound breaks, and the runs do not decide at least one: more repeats may."""
    BEHIND = "behind"
    """No bound breaks and one is open, but another plan is better in any case: whether it holds changes no answer."""
    INFEASIBLE = "infeasible"
    """A bound breaks at the stated risk."""
    UNKNOWN = "unknown"
    """A metric that the objective or a constraint needs was not measured."""
    BURST = "burst"
    """A few steps were measured, and it was not promoted to a full measurement."""
    INTERRUPTED = "interrupted"
    """Its study was stopped, or died, or the cluster failed it: the same command runs it again."""
    FAILED = "failed"
    """It ran and did not complete, or it will never run."""


SIZES: Final = ("seq_len", "batch")
"""Parts of a trial's setting that are sizes of its workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTrial:
    """One assessed trial with all its repeats."""

    study: str
    """Name of the study if several are ranked together, else empty."""
    spec: TrialSpec
    trial_id: str
    verdict: Verdict
    rank: int | None
    """1 plus the number of feasible trials that are told to be better; None unless feasible."""
    best_probability: float | None
    """Probability that it is the best trial that keeps every bound; None unless its bounds hold or are open."""
    objective: Interval | None
    """The objective's metric without drift and node offsets; None if a repeat did not measure it."""
    margins: tuple[Margin, ...]
    """One per constraint that could be checked, in the constraints' order."""
    missing: tuple[str, ...]
    """Metrics that the objective and the constraints need and some repeat did not measure."""
    reason: str
    """Text that says why it is not feasible; empty for feasible trials."""
    repeats: tuple[Run, ...]
    """Every repeat in order, including those that do not count."""
    quality: str
    """The worst quality, over the counted repeats, of the groups of metrics that its objective and bounds use."""
    simulated: bool
    """True if telemetry of any counted repeat was simulated instead of measured."""
    counted: tuple[Run, ...] = field(repr=False, compare=False)
    """The repeats that completed, which intervals and margins use; for the reference trial, its runs too."""
    spreads: Spreads = field(repr=False, compare=False)
    """Scatter of its study."""
    behind: str = ""
    """Text that names the plan that is better in any case, such as `slower than dp2 mbs4 in any case`; else empty."""
    name: str = ""
    """Name of the plan among those it is ranked with; empty where the plan's own is one (`wattune.search.names`)."""

    @property
    def label(self) -> str:
        """Short name of the plan, such as `dp2 tp2 mbs4 zero1`, with the sizes of the workload where trials differ."""
        return self.name or self.spec.label

    @property
    def setting(self) -> dict[str, str]:
        """Study, model, cluster, engine and sizes of the workload: they separate it from trials of the same plan."""
        spec = self.spec
        return {
            "study": self.study,
            "model": spec.model.name,
            "cluster": spec.cluster.label,
            "engine": spec.engine,
            "seq_len": str(spec.workload.seq_len) if spec.workload.is_known else "",
            "batch": str(spec.workload.global_batch_size) if spec.workload.is_known else "",
        }

    @property
    def recorded(self) -> Recorded | None:
        """The recorded command; None for a trial."""
        return self.repeats[0].recorded

    @property
    def marks(self) -> tuple[str, ...]:
        """Words for figures that were not measured as they stand: `simulated`, `scaled_down`."""
        scaled = any(SCALED in run.tags for run in self.counted)
        return (*(("simulated",) if self.simulated else ()), *((SCALED,) if scaled else ()))

    @property
    def failing(self) -> tuple[Margin, ...]:
        """The margins of the constraints that break."""
        return tuple(margin for margin in self.margins if margin.verdict is Holds.BREAKS)

    @property
    def undecided(self) -> tuple[Margin, ...]:
        """The margins of the constraints that the runs do not decide."""
        return tuple(margin for margin in self.margins if margin.verdict is Holds.UNDECIDED)

    def interval(self, metric: str) -> Interval | None:
        """Computes a metric over the completed repeats, None if one of them did not measure it."""
        return self.spreads.interval(self.counted, metric)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        own = ("rank", "best_probability", "study", "trial_id", "reason", "behind", "quality", "simulated")
        of = self.recorded and {"command": [*self.recorded.command], "exit_code": self.recorded.exit_code}
        return {
            **{name: getattr(self, name) for name in own},
            "verdict": str(self.verdict),
            "label": self.label,
            "model": self.spec.model.name,
            "num_parameters": self.spec.model.num_parameters if self.spec.model.is_known else None,
            "num_active_parameters": self.spec.model.num_active_parameters if self.spec.model.is_known else None,
            "cluster": self.spec.cluster.label,
            "engine": self.spec.engine,
            "dp": self.spec.plan.dp(self.spec.cluster.world_size),
            "plan": shallow(self.spec.plan),
            **({"flags": dict(self.spec.flags)} if self.spec.flags else {}),
            **({"recording": of | {"machine": dict(self.recorded.machine)}} if of and self.recorded else {}),
            "objective": shallow(self.objective) if self.objective else None,
            "margins": [margin.to_json() for margin in self.margins],
            "missing": list(self.missing),
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


def shallow(record: Any) -> dict[str, Any]:
    """Returns a flat dataclass as plain data; `dataclasses.asdict` would deep-copy each value of ten thousand rows."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def finite(result: Run) -> Run:
    """Returns the result without NaN and infinite figures: such a metric counts as not measured."""
    if all(map(math.isfinite, result.metrics.values())):
        return result
    return replace(result, metrics={name: value for name, value in result.metrics.items() if math.isfinite(value)})


def completed(repeats: Iterable[Run]) -> tuple[Run, ...]:
    """Returns the repeats that ran to their end and were measured well enough; a burst never is."""
    return tuple(result for result in repeats if result.status is RunStatus.COMPLETED and not is_burst(result))


def group_quality(result: Run, groups: Iterable[str]) -> str:
    """Returns the worst quality of a result among some groups of metrics; the whole result's without a tag of each."""
    tags = [result.tags.get(f"quality_{group}") for group in groups]
    named = [tag for tag in tags if tag in QUALITIES]
    if not tags or len(named) < len(tags):
        return result.quality
    return min(named, key=QUALITIES.index)


def assess_trials(
    study: str,
    trials: Sequence[tuple[TrialSpec, tuple[Run, ...]]],
    spreads: Spreads,
    question: Question,
    *,
    judged: bool = True,
    known: dict[Any, dict[str, Any]] | None = None,
) -> list[RankedTrial]:
    """Assesses trials with all their repeats, together; they are not ranked yet.

    The name of the study is empty if only one is ranked. Where nobody asks for a verdict, bounds are not `judged`. What
    is `known` of the same results by bound and by metric, and by trial, is not computed again, and what is new added.
    """
    needed, known = question.needed, {} if known is None else known
    ids, metric = [repeats[0].trial_id for _, repeats in trials], question.objective.metric
    groups = {METRICS[name].group for name in needed}
    every = [completed(repeats) for _, repeats in trials]
    simulated = [any(map(is_simulated, counted)) for counted in every]
    columns = []
    for one in question.constraints if judged else ():
        told = known.setdefault((one, question.risk), {})
        new = [place for place, trial_id in enumerate(ids) if trial_id not in told]
        runs, of_new = [measuring(every[place], one.metric) for place in new], [simulated[place] for place in new]
        got = margins(one, runs, spreads, risk=question.risk, simulated=of_new)
        told.update(zip((ids[place] for place in new), got, strict=True))
        columns.append([told[trial_id] for trial_id in ids])
    objectives = known.setdefault(metric, {})
    each = zip(*columns, strict=True) if columns else repeat((), len(trials))
    rows = []
    for (spec, repeats), trial_id, counted, made_up, found in zip(trials, ids, every, simulated, each, strict=True):
        if trial_id not in objectives:
            objectives[trial_id] = spreads.interval(counted, metric)
        own = tuple(one for one in found if one is not None)
        missing = [name for name in needed if any(name not in result.metrics for result in measuring(counted, name))]
        bursts = [result for result in repeats if is_burst(result) and result.status is RunStatus.COMPLETED]
        verdict, reason = (
            _failed(repeats, counted, bursts)
            or (None if counted else _burst(bursts, question.objective))
            or _broken_bound(own)
            or ((Verdict.UNKNOWN, f"not measured: {', '.join(missing)}") if missing else None)
            or _open_bound(own)
            or (Verdict.FEASIBLE, "")
        )
        rows.append(
            RankedTrial(
                study=study,
                spec=spec,
                trial_id=trial_id,
                rank=None,
                best_probability=None,
                repeats=repeats,
                spreads=spreads,
                verdict=verdict,
                objective=objectives[trial_id],
                counted=counted,
                margins=own,
                missing=tuple(missing),
                reason=reason,
                quality=min((group_quality(result, groups) for result in counted), key=QUALITIES.index, default=""),
                simulated=made_up,
            )
        )
    return rows


_Verdict = tuple[Verdict, str]
"""A verdict and its reason."""


def _failed(repeats: Sequence[Run], counted: Sequence[Run], bursts: Sequence[Run]) -> _Verdict | None:
    """Judges runs of which one failed by itself, or none was measured."""
    broken = [result for result in repeats if result.status not in (RunStatus.COMPLETED, *NOT_ITS_OWN)]
    failures = broken or ([] if counted or bursts else list(repeats))
    if not failures:
        return None
    runs_again = not broken and any(not result.status.is_final for result in failures)
    share = "" if len(repeats) == 1 else f" ({len(failures)} of {len(repeats)} repeats)"
    reasons = sorted({": ".join(filter(None, (str(one.status), one.reason))) for one in failures})
    return Verdict.INTERRUPTED if runs_again else Verdict.FAILED, "; ".join(reasons) + share


def _burst(bursts: Sequence[Run], objective: Objective) -> _Verdict | None:
    """Judges runs of which only bursts were measured."""
    if not bursts:
        return None
    value = bursts[0].metrics.get(objective.metric)
    shown = "not measured" if value is None else format_quantity(objective.metric, value)
    return Verdict.BURST, f"{objective.metric} {shown} in a burst; not promoted to a full measurement"


def _broken_bound(margins: Sequence[Margin]) -> _Verdict | None:
    broken = [f"{one.constraint} fails at {one.got:.6g}" for one in margins if one.verdict is Holds.BREAKS]
    return (Verdict.INFEASIBLE, "; ".join(broken)) if broken else None


def _open_bound(margins: Sequence[Margin]) -> _Verdict | None:
    undecided = [
        f"{one.constraint} undecided at {one.got:.6g}, P {format_probability(one.holds_probability or 0.0)}"
        + (f" ({one.unsettled})" if one.unsettled else "")
        for one in margins
        if one.verdict is Holds.UNDECIDED
    ]
    return (Verdict.UNDECIDED, "; ".join(undecided)) if undecided else None


def is_simulated(result: Run) -> bool:
    """Returns true if a result's telemetry was simulated instead of measured, by its tag or its quality reasons."""
    return result.tags.get("simulated") == "true" or "simulated" in result.quality_reasons


def start_up_text(rows: Iterable[RankedTrial]) -> str:
    """Says what commands cost before and after their measured steps, in the median; empty without commands."""
    known = [run.metrics for row in rows for run in row.counted]
    start_up_s = [one["startup_s"] for one in known if "startup_s" in one]
    overhead = [one["overhead_frac"] for one in known if "overhead_frac" in one]
    if not start_up_s or not overhead:
        return ""
    return (
        f"each command started anew: {format_quantity('startup_s', median(start_up_s))} to its first step, "
        f"{100 * median(overhead):.0f} % of its run outside of measured steps"
    )

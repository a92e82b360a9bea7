"""Kept candidates with their estimates: which cannot fit, which bound each is expected to break, and their order."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

import numpy as np
import pyarrow as pa

from wattune.arrays import Floats, Ints
from wattune.catalog.hardware import DeviceSpec
from wattune.cost.coefficients import Origin
from wattune.cost.estimate import Coefficients, Estimates, Find, estimate
from wattune.cost.out_of_memory import CERTAIN, out_of_memory_probability, usable_bytes
from wattune.objective import Constraint, Objective
from wattune.plans.effective import effective
from wattune.plans.rules import engine_combination, violations
from wattune.search.names import namer
from wattune.search.prune import Candidate, Candidates, LeftOut, combinations
from wattune.search.space import StudySpec
from wattune.steps.steady import least_warmup, num_profiled
from wattune.trial import Measure, TrialSpec

MEMORY_RULE: Final = "memory"
"""Rule of candidates that run out of memory with a probability above `CERTAIN`."""

MEMORY_RISK: Final = "memory of the device"
"""Name of that bound among the bounds that a candidate may break."""

FALLBACK: Final = Objective(metric="tokens_per_s", maximize=True)
"""Order where the objective has no estimate."""

_ORIGINS: Final[Mapping[Origin, str]] = {
    "measured here": "measurements of such devices",
    "same chip": "measurements of a device with the same chip",
    "published kernels": "published kernels",
    "datasheet": "its datasheet",
}
"""Origins of coefficients in words for people."""

_LIKELY: Final = 0.5
"""Probability above which a bound is expected to break."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoefficientSource:
    """The coefficients that estimates of some clusters come from, all of one device."""

    clusters: tuple[str, ...]
    """Their labels."""
    device: DeviceSpec
    coefficients: Coefficients
    """As they hold for the clusters' number of nodes."""

    @property
    def text(self) -> str:
        """A line for people: clusters, and the origin of each kind of figure."""
        kinds: dict[Origin, list[str]] = {}
        for kind, origin in self.coefficients.origins.items():
            kinds.setdefault(origin, []).append(kind)
        origins = "; ".join(f"{', '.join(of_origin)} from {_ORIGINS[origin]}" for origin, of_origin in kinds.items())
        fit = f" (fit {self.coefficients.fit})" if self.coefficients.fit else ""
        fit += f", as {software} runs it" if (software := self.coefficients.step_time.software) else ""
        excess = "".join(
            f"; {name} {size_bytes / 1e9:+.2f} GB, as measured trials held"
            for name, size_bytes in self.coefficients.memory.excess_bytes.items()
        )
        links = f"; links {unmeasured} not measured" if (unmeasured := self.coefficients.unmeasured_links) else ""
        return f"{', '.join(self.clusters)}: {origins}{links}{fit}{excess}"


class Unfitting(Sequence[LeftOut]):
    """Candidates that do not fit. Their reasons have figures of their own, so those of a million are not all kept."""

    def __init__(self, kept: Sequence[Candidate], found: Estimates, places: Ints) -> None:
        """Takes all candidates with their estimates, and the places of those that cannot fit."""
        self._kept, self._found, self._places = kept, found, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[one] for one in range(len(self))[number]]
        place = int(self._places[number])
        candidate = self._kept[place]
        return LeftOut(config=candidate.config, rule=MEMORY_RULE, reason=_reason(candidate.spec, self._found, place))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Candidates that may fit, best expectation first, and those that cannot."""

    kept: tuple[Candidate, ...]
    """First those that are expected to keep every bound, then the others; each by the objective's estimate. Figures
    of a small trial are those of the large plan that it stands for."""
    estimates: Estimates
    """In the same order."""
    risks: Mapping[str, Floats]
    """Probability that each bound breaks, by its text, in the same order."""
    rejected: Sequence[LeftOut]
    """Those that cannot fit, by the rule `memory`. Each reason is written when it is read."""
    objective: Objective
    """The objective of the order: the study's, or `FALLBACK`."""
    unestimated: tuple[str, ...]
    """The study's objective and bounds that no estimate speaks of."""
    sources: tuple[CoefficientSource, ...]

    def namer(self) -> Callable[[TrialSpec], str]:
        """Returns what names the candidates' plans, with the sizes of the workload where those differ."""
        return namer(one.spec.read_as.workload for one in self.kept)

    def breaks(self, position: int) -> dict[str, float]:
        """Returns the bounds that a candidate is expected to break, each with the probability, likeliest first."""
        found = {bound: float(risk[position]) for bound, risk in self.risks.items() if risk[position] > _LIKELY}
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    def to_json(self, top: int | None = None) -> dict[str, Any]:
        """Returns plain data for `wattune plan --estimate --json`, of the first `top` candidates."""
        name = self.namer()
        return {
            "num_kept": len(self.kept),
            "kept": [self._one(position, name) for position in range(len(self.kept))[:top]],
            "rejected": [{"config": dict(r.config), "rule": r.rule, "reason": r.reason} for r in self.rejected],
            "sorted_by": str(self.objective),
            "unestimated": list(self.unestimated),
            "sources": [
                {
                    "clusters": list(one.clusters),
                    "device": one.device.name,
                    "fit": one.coefficients.fit,
                    "unmeasured_links": one.coefficients.unmeasured_links,
                    **one.coefficients.origins,
                }
                for one in self.sources
            ],
        }

    def _one(self, position: int, name: Callable[[TrialSpec], str]) -> dict[str, Any]:
        candidate, found = self.kept[position], self.estimates
        return {
            "trial_id": candidate.trial_id,
            "config": dict(candidate.config),
            "plan": name(candidate.spec.read_as),
            **({"runs_on": candidate.spec.cluster.label} if candidate.spec.stands_for else {}),
            "notes": list(candidate.notes),
            **found.whole(position),
            "breaks": {bound: float(risk[position]) for bound, risk in self.risks.items()},
        }

    def table(self) -> pa.Table:
        """Returns every kept candidate as Arrow: trial, plan, all columns of the estimates, and the risks."""
        name, specs = self.namer(), [one.spec.read_as for one in self.kept]
        names = pa.table(
            {
                "trial_id": [one.trial_id for one in self.kept],
                "model": [spec.model.name for spec in specs],
                "cluster": [spec.cluster.label for spec in specs],
                "engine": [spec.engine for spec in specs],
                "plan": [name(spec) for spec in specs],
            }
        )
        figures = self.estimates.table()
        for name in figures.column_names:
            names = names.append_column(name, figures[name])
        for bound, risk in self.risks.items():
            names = names.append_column(f"estimate.breaks.{bound}", pa.array(risk))
        return names


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One plan before anything runs: figures, where time and memory go, and the rule that rejects it, if one does."""

    spec: TrialSpec
    """The plan as it would run, with model, cluster, engine and workload."""
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """`value`, `low` and `high` of each predicted metric: a 95 % interval, in the metric's unit. Empty, with the parts,
    where another rule than `memory` rejects the plan."""
    step_parts_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step by part, on the average rank; they add up to `step_time_s`. A part that is 0 is left out."""
    memory_parts_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes of the fullest rank by part; they add up to `memory_peak_bytes`. A part that is 0 is left out."""
    limited_by: str = ""
    """The largest use of the step's time, one of `wattune.cost.estimate.LIMITS`; empty without figures."""
    engine: str = ""
    """The engine, or the software that the plan is estimated for."""
    source: str = ""
    """The coefficients behind the figures, in words; empty without figures."""
    rule: str = ""
    """The first rule that rejects the plan; empty where none does."""
    reason: str = ""
    """Cause in words with its figures, and what to do."""

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, by the names of `wattune plan --estimate --json`."""
        spec = self.spec
        return {
            "model": spec.model.name,
            "cluster": spec.cluster.label,
            "engine": self.engine,
            "seq_len": spec.workload.seq_len,
            "global_batch_size": spec.workload.global_batch_size,
            "plan": spec.label,
            "estimate": dict(self.figures),
            **{name: getattr(self, name) for name in ("step_parts_s", "memory_parts_bytes", "limited_by")},
            **{name: getattr(self, name) for name in ("source", "rule", "reason")},
        }


def estimate_one(study: StudySpec, find: Find) -> Estimate:
    """Estimates the only combination of a space; of software that wattune does not run, its engine's gaps are none.

    Raises `PlanError` where its device cannot be predicted.
    """
    spec, config = next(combinations(study))
    spec = replace(spec, plan=effective(spec)[0])
    software = find(spec.cluster.sensed_device).step_time.software
    engine = software or spec.engine
    first = next((one for one in violations(spec) if not (software and one.rule == engine_combination.__name__)), None)
    if first is not None:
        return Estimate(spec=spec, engine=engine, rule=first.rule, reason=first.reason)
    found = estimate([spec], find)
    over = np.flatnonzero(out_of_memory_probability([spec], found) > CERTAIN)
    rejected = next(iter(Unfitting([Candidate(spec=spec, config=config)], found, over)), None)
    whole = found.whole(0)
    return Estimate(
        spec=spec,
        engine=engine,
        figures=whole["estimate"],
        step_parts_s=whole["step_parts_s"],
        memory_parts_bytes=whole["memory_parts_bytes"],
        limited_by=whole["limited_by"],
        source=_sources([spec], find)[0].text,
        rule=rejected.rule if rejected else "",
        reason=rejected.reason if rejected else "",
    )


def forecast(candidates: Candidates, objective: Objective, bounds: Sequence[Constraint], find: Find) -> Forecast:
    """Estimates every kept candidate, rejects those that cannot fit and orders the rest.

    Raises `PlanError` where a device cannot be predicted.
    """
    kept, once = candidates.kept, cache(find)
    specs = [one.spec.read_as for one in kept]
    found = estimate(specs, once)
    exceeds = out_of_memory_probability(specs, found)
    fits = exceeds <= CERTAIN
    ordered = objective if objective.metric in found.columns else FALLBACK
    risks, unestimated = _risks(specs, bounds, found)
    risks = {MEMORY_RISK: exceeds, **risks}
    order = _order(found, risks, ordered, np.flatnonzero(fits))
    return Forecast(
        kept=tuple(kept[place] for place in order.tolist()),
        estimates=found.take(order),
        risks={bound: risk[order] for bound, risk in risks.items()},
        rejected=Unfitting(kept, found, np.flatnonzero(~fits)),
        objective=ordered,
        unestimated=(*((str(objective),) if ordered is not objective else ()), *unestimated),
        sources=_sources(specs, once),
    )


def _sources(specs: Sequence[TrialSpec], find: Find) -> tuple[CoefficientSource, ...]:
    """Returns the coefficients that estimates come from; clusters of one device that share them are named together."""
    clusters = {id(spec.cluster): spec.cluster for spec in specs}.values()
    found: list[CoefficientSource] = []
    for cluster in dict.fromkeys(clusters):
        device, own = cluster.sensed_device, find(cluster.sensed_device).on(cluster)
        same = ((n, one) for n, one in enumerate(found) if (one.device, one.coefficients.fit) == (device, own.fit))
        alike = (n for n, one in same if one.coefficients.origins == own.origins)
        place = next((n for n in alike if found[n].coefficients.unmeasured_links == own.unmeasured_links), None)
        if place is None:
            found.append(CoefficientSource(clusters=(cluster.label,), device=device, coefficients=own))
        else:
            labels = dict.fromkeys((*found[place].clusters, cluster.label))
            found[place] = replace(found[place], clusters=tuple(labels))
    return tuple(found)


def duration_s(step_time_s: float, measure: Measure, *, on_cpu: bool) -> float:
    """Computes how long a trial's steps take: warm-up, measured window and profile. Building the model comes on top.

    The window has `min_steps` steps and `min_seconds` seconds at least, whichever takes longer. Warm-up may go on after
    its least, until step time is stable.
    """
    num_steps = measure.missing_steps(0, 0.0, step_time_s) if step_time_s > 0 else 0
    return num_steps * step_time_s + around_s(step_time_s, measure, on_cpu=on_cpu)


def around_s(step_time_s: float, measure: Measure, *, on_cpu: bool) -> float:
    """Computes how long a trial's steps outside of its measured window take: warm-up and profile."""
    profiled = (
        measure.profile_steps if measure.profile_steps is not None else 0 if on_cpu else num_profiled(step_time_s)
    )
    return (least_warmup(measure.warmup_steps) + profiled) * step_time_s


def _order(found: Estimates, risks: Mapping[str, Floats], objective: Objective, fits: Ints) -> Ints:
    """Sorts the candidates that fit: expected to keep all bounds first, then by the objective; ties as they were."""
    value = found.columns[objective.metric].value[fits]
    breaks = np.max([risk[fits] for risk in risks.values()], axis=0, initial=0.0) > _LIKELY
    return fits[np.lexsort((-value if objective.maximize else value, breaks))]


def _risks(
    specs: Sequence[TrialSpec], bounds: Sequence[Constraint], found: Estimates
) -> tuple[dict[str, Floats], list[str]]:
    """Computes the probability that each bound breaks, and lists those that no estimate speaks of."""
    risks: dict[str, Floats] = {}
    unestimated = []
    for bound in bounds:
        column = found.columns.get(bound.metric)
        if column is None or bound.limit_metric not in (None, "device_power_limit_w"):
            unestimated.append(str(bound))
            continue
        held: Floats | float = bound.factor
        if bound.limit_metric is not None:
            held = bound.factor * _per_cluster(specs, lambda spec: spec.cluster.sensed_device.power_limit_w or np.nan)
        above = column.probability_above(held)
        risks[str(bound)] = above if bound.operator.startswith("<") else 1.0 - above
    return risks, unestimated


def _per_cluster(specs: Sequence[TrialSpec], figure: Any) -> Floats:
    """Computes a figure of each candidate's cluster, once for every cluster."""
    known: dict[int, float] = {}
    values = np.empty(len(specs))
    for place, spec in enumerate(specs):
        key = id(spec.cluster)
        if key not in known:
            known[key] = figure(spec)
        values[place] = known[key]
    return values


def _reason(spec: TrialSpec, found: Estimates, place: int) -> str:
    """Says how many bytes are needed, and for what."""
    peak = found.columns["memory_peak_bytes"]
    parts = sorted(((float(part[place]), name) for name, part in found.memory_parts_bytes.items()), reverse=True)
    listed = ", ".join(f"{name} {size / 1e9:.1f} GB" for size, name in parts if size >= 0.05e9)
    room = spec.cluster.sensed_device
    usable, stated = usable_bytes(room), room.memory_bytes or math.inf
    has = f"leaves a program {usable / 1e9:.1f}" if peak.value[place] > usable else f"has {stated / 1e9:.1f}"
    return (
        f"stage {found.stage[place]} needs {peak.value[place] / 1e9:.1f} GB, and {room.name} {has} GB: {listed}; "
        "use a larger tp or pp, a smaller micro_batch_size, sharding, or recompute"
    )

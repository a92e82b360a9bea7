"""The result of a trial: status, metrics, quality and tags, from its ranks' outcomes and its folder."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from wattune.analysis.metrics.experts import expert_imbalance_frac
from wattune.analysis.summary import Summary, summarize
from wattune.orchestrate.lanes.messages import Answer
from wattune.orchestrate.power_limit import NODE_POWER, NODE_POWER_PEAK
from wattune.storage.study import TrialFolder
from wattune.trial import TrialResult, TrialSpec, TrialStatus
from wattune.workers.loop import RankOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTrial:
    """One repeat of one trial that has ended, before its measurement is assessed."""

    spec: TrialSpec
    repeat: int
    answer: Answer
    """The answer of its lane."""
    limits: Mapping[str, float]
    """Hard limits of the study."""
    tags: Mapping[str, str]
    """Facts to keep with the result."""
    start_wall_ns: int
    """Wall time at which it began."""


def status_of(spec: TrialSpec, answer: Answer) -> tuple[TrialStatus, str]:
    """Status and reason of a run, from its first failure and not from its measurement.

    Args:
        spec: The trial.
        answer: The answer of its lane.
    """
    if answer.interrupted:
        return TrialStatus.INTERRUPTED, answer.failure
    silent = sorted(set(range(spec.cluster.world_size)) - {one.rank for one in answer.outcomes})
    lost = f"rank {', '.join(map(str, silent))} ended without reporting" if silent and answer.outcomes else ""
    cause = answer.cause
    if cause is not None and cause.status is not TrialStatus.COMPLETED:
        # Ranks that were ended because of another rank's failure add nothing to the reason.
        said = "" if cause.status in (TrialStatus.TIMED_OUT, TrialStatus.ABORTED, TrialStatus.OUT_OF_MEMORY) else lost
        return cause.status, "; ".join(filter(None, (said, cause.reason)))
    if silent or answer.failure:
        return TrialStatus.CRASHED, "; ".join(filter(None, (lost, answer.failure))) or "no rank reported"
    return TrialStatus.COMPLETED, ""


def trial_result(ended: EndedTrial, folder: TrialFolder, spans: pa.Table | None) -> TrialResult:
    """Assesses a trial whose spans and telemetry are in its folder.

    Args:
        ended: The trial.
        folder: Its folder.
        spans: Spans of all ranks.
    """
    spec, answer = ended.spec, ended.answer
    status, reason = status_of(spec, answer)
    summary = Summary(quality="")
    if status is TrialStatus.COMPLETED:
        summary = summarize(
            spec,
            spans,
            folder.stored(),
            folder.manifests(),
            kernels=folder.kernels(),
            memory_peak_bytes=[outcome.memory_peak_bytes for outcome in answer.outcomes],
            expert_imbalance_frac=expert_imbalance_frac(
                [outcome.expert_tokens for outcome in answer.outcomes], ended.spec.plan.ep
            ),
        )
        status, reason = against_limits(summary, ended.limits)
    facts = {
        "engine": spec.engine,
        "device": spec.cluster.device,
        "simulated": str(spec.cluster.simulate_sensors_of is not None).lower(),
    }
    return TrialResult(
        trial_id=spec.trial_id,
        repeat=ended.repeat,
        status=status,
        reason=reason,
        metrics=summary.metrics,
        quality=summary.quality,
        quality_reasons=summary.quality_reasons,
        tags={**ended.tags, **summary.tags, **facts, **rank_tags(answer.outcomes, answer.cause)},
        start_wall_ns=ended.start_wall_ns,
        end_wall_ns=time.time_ns(),
    )


def rank_tags(outcomes: Sequence[RankOutcome], cause: RankOutcome | None) -> dict[str, str]:
    """Tags of warm-up, memory and profile.

    Args:
        outcomes: Outcomes of the ranks that reported.
        cause: The failure the lane heard of first, if there was one.
    """
    if not outcomes:
        return {}
    tags: dict[str, str] = {}
    built = [outcome for outcome in outcomes if outcome.build_time_s]  # a rank that was stopped has no build time
    if built:
        tags["warmup_steps"] = str(built[0].num_warmup_steps)
        tags["steady"] = str(all(outcome.steady for outcome in built)).lower()
        tags["build_time_s"] = f"{max(outcome.build_time_s for outcome in built):.3f}"
    fullest = max(outcomes, key=lambda outcome: outcome.memory_peak_bytes)
    if fullest.memory_peak_bytes:
        tags["memory_peak_rank"] = str(fullest.rank)
    if reserved_bytes := max(outcome.memory_reserved_peak_bytes for outcome in outcomes):
        tags["memory_reserved_peak_bytes"] = str(reserved_bytes)
    tags |= outcomes[0].facts
    if unprofiled := {outcome.rank: outcome for outcome in outcomes if "profile" in outcome.facts}:
        # The first failure is the cause. The lane knows which was first: clocks of different nodes do not compare.
        heard = unprofiled.get(cause.rank) if cause is not None else None
        first = heard or min(unprofiled.values(), key=lambda outcome: outcome.end_mono_ns)
        tags["profile"] = first.facts["profile"]
    return tags


def against_limits(summary: Summary, limits: Mapping[str, float]) -> tuple[TrialStatus, str]:
    """Status and reason of a trial that ran to its end, from hard limits and measurement quality."""
    limit_w, peak_w = limits.get(NODE_POWER), summary.metrics.get(NODE_POWER_PEAK)
    if limit_w is not None and peak_w is not None and peak_w > limit_w:
        return TrialStatus.ABORTED, f"node power reached {peak_w:.6g} W over 1 s, the hard limit is {limit_w:.6g} W"
    if summary.quality == "invalid":
        return TrialStatus.INVALID, f"measurement quality: {', '.join(summary.quality_reasons)}"
    return TrialStatus.COMPLETED, ""

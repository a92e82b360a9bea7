"""What came of a trial: its status, metrics and quality, from what its ranks and sensors brought home."""

import time
from collections.abc import Mapping, Sequence

import pyarrow as pa

from wattune.analysis.metrics.experts import expert_imbalance_frac
from wattune.analysis.summary import summarize
from wattune.orchestrate.lanes.messages import Answer
from wattune.storage.study import TrialFolder
from wattune.trial import TrialResult, TrialSpec, TrialStatus


def status_of(spec: TrialSpec, answer: Answer) -> tuple[TrialStatus, str]:
    """How a trial's run ended, before anything is said of its measurement: the first failure names it.

    Args:
        spec: What ran.
        answer: What its lane said.
    """
    if answer.interrupted:
        return TrialStatus.INTERRUPTED, answer.failure
    silent = sorted(set(range(spec.cluster.world_size)) - {one.rank for one in answer.outcomes})
    lost = f"rank {', '.join(map(str, silent))} ended without a word" if silent and answer.outcomes else ""
    cause = answer.cause
    if cause is not None and cause.status is not TrialStatus.COMPLETED:
        # Ranks that were ended because of another one's failure have nothing to add to it.
        said = "" if cause.status in (TrialStatus.TIMED_OUT, TrialStatus.ABORTED, TrialStatus.OUT_OF_MEMORY) else lost
        return cause.status, "; ".join(filter(None, (said, cause.reason)))
    if silent or answer.failure:
        return TrialStatus.CRASHED, "; ".join(filter(None, (lost, answer.failure))) or "no rank said a word"
    return TrialStatus.COMPLETED, ""


def trial_result(
    spec: TrialSpec,
    repeat: int,
    folder: TrialFolder,
    answer: Answer,
    spans: pa.Table | None,
    *,
    limits: Mapping[str, float],
    tags: Mapping[str, str],
    start_wall_ns: int,
) -> TrialResult:
    """The result of a trial whose spans and telemetry are in its folder.

    Args:
        spec: What ran.
        repeat: Which repeat of it.
        folder: Where it is kept.
        answer: What its lane said.
        spans: Spans of all ranks.
        limits: Hard limits of the study.
        tags: Facts to keep with the result.
        start_wall_ns: When the trial began.
    """
    status, reason = status_of(spec, answer)
    metrics: Mapping[str, float] = {}
    quality, tags = "", dict(tags)
    quality_reasons: tuple[str, ...] = ()
    outcomes = answer.outcomes
    if status is TrialStatus.COMPLETED:
        summary = summarize(
            spec,
            spans,
            folder.stored(),
            folder.manifests(),
            kernels=folder.kernels(),
            memory_peak_bytes=[outcome.memory_peak_bytes for outcome in outcomes],
            expert_imbalance_frac=expert_imbalance_frac([one.expert_tokens for one in outcomes], spec.plan.ep),
        )
        metrics, quality, quality_reasons = summary.metrics, summary.quality, summary.quality_reasons
        tags |= summary.tags
        status, reason = against_limits(metrics, limits, quality, quality_reasons)
    tags |= {
        "engine": spec.engine,
        "device": spec.cluster.device,
        "simulated": str(spec.cluster.simulate_sensors_of is not None).lower(),
    }
    if built := [
        outcome for outcome in outcomes if outcome.build_time_s
    ]:  # a rank that was stopped knows nothing of it
        tags["warmup_steps"] = str(built[0].num_warmup_steps)
        tags["steady"] = str(all(outcome.steady for outcome in built)).lower()
        tags["build_time_s"] = f"{max(outcome.build_time_s for outcome in built):.3f}"
    if outcomes:
        fullest = max(outcomes, key=lambda outcome: outcome.memory_peak_bytes)
        if fullest.memory_peak_bytes:
            tags["memory_peak_rank"] = str(fullest.rank)
        if reserved_bytes := max(outcome.memory_reserved_peak_bytes for outcome in outcomes):
            tags["memory_reserved_peak_bytes"] = str(reserved_bytes)
        tags |= outcomes[0].facts
        if unprofiled := {outcome.rank: outcome for outcome in outcomes if "profile" in outcome.facts}:
            # The first is the cause: the one the lane heard of first, as clocks of different nodes do not compare.
            heard = unprofiled.get(answer.cause.rank) if answer.cause is not None else None
            first = heard or min(unprofiled.values(), key=lambda outcome: outcome.end_mono_ns)
            tags["profile"] = first.facts["profile"]
    return TrialResult(
        trial_id=spec.trial_id,
        repeat=repeat,
        status=status,
        reason=reason,
        metrics=metrics,
        quality=quality,
        quality_reasons=quality_reasons,
        tags=tags,
        start_wall_ns=start_wall_ns,
        end_wall_ns=time.time_ns(),
    )


def against_limits(
    metrics: Mapping[str, float], limits: Mapping[str, float], quality: str, reasons: Sequence[str]
) -> tuple[TrialStatus, str]:
    """What hard limits and quality make of a trial that ran to its end."""
    limit_w, peak_w = limits.get("node_device_power_w"), metrics.get("node_device_power_peak_1s_w")
    if limit_w is not None and peak_w is not None and peak_w > limit_w:
        return TrialStatus.ABORTED, f"node power reached {peak_w:.6g} W over 1 s, the hard limit is {limit_w:.6g} W"
    if quality == "invalid":
        return TrialStatus.INVALID, f"measurement quality: {', '.join(reasons)}"
    return TrialStatus.COMPLETED, ""

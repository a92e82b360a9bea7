"""The result of a trial: status, metrics, quality and tags, from its ranks' outcomes and its folder."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from wattune.analysis.metrics.utilization import expert_imbalance_frac
from wattune.analysis.run_data import RunData
from wattune.analysis.summary import Summary, summarize
from wattune.fidelity import STOPPED_EARLY
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Node
from wattune.orchestrate.command_result import command_told, leading, num_answers
from wattune.orchestrate.failures import Cause, Failure
from wattune.orchestrate.lanes.messages import Answer
from wattune.orchestrate.power_limit import NODE_POWER, NODE_POWER_PEAK
from wattune.plans.program import is_command
from wattune.run import INVALID, Numbers, Run, RunStatus
from wattune.storage.study import TrialFolder
from wattune.trial import TrialSpec
from wattune.workers.outcome import FRAGMENTATION, RankOutcome
from wattune.workers.provenance import agreed

_Ending = tuple[RunStatus, str, Failure | None]
"""Status and reason of a run, and the failure of the cluster where it was one."""


def status_of(spec: TrialSpec, answer: Answer, nodes: Sequence[Node] = ()) -> _Ending:
    """Returns how a run ended, by its first failure and not by its measurement."""
    if answer.interrupted:
        return RunStatus.INTERRUPTED, answer.failure, None
    heard = answer.completed | {one.rank for one in answer.outcomes}
    silent = sorted(set(range(num_answers(spec))) - heard)
    part = "node" if is_command(spec) else "rank"
    lost = f"{part} {', '.join(map(str, silent))} ended without reporting" if silent and heard else ""
    cause = answer.cause
    failed = cause is not None and cause.status is not RunStatus.COMPLETED
    stands = failed and cause is not None and cause.status in (RunStatus.ABORTED, RunStatus.OUT_OF_MEMORY)
    if answer.deaths and not stands:  # errors and hangs of the other ranks follow from them
        return _of_deaths(answer, {node.node_id: node.name for node in nodes})
    if failed and cause is not None:
        # Ranks that were ended because of another rank's failure add nothing to the reason.
        said = "" if stands or cause.status is RunStatus.TIMED_OUT else lost
        reason = "; ".join(filter(None, (said, cause.reason)))
        at_fault = tuple(place.node for place in answer.places if place.rank == cause.rank)
        told = cause.command and cause.command.cause
        unfit = Failure(told or Cause.NODE_UNFIT, reason, at_fault)
        return cause.status, reason, unfit if cause.status is RunStatus.INFRA_FAILED else None
    if silent or answer.failure:
        reason = "; ".join(filter(None, (lost, answer.failure))) or "no rank reported"
        return RunStatus.INFRA_FAILED, reason, Failure(answer.infra or Cause.WORKERS_LOST, reason)
    return RunStatus.COMPLETED, "", None


def _of_deaths(answer: Answer, node_names: Mapping[str, str]) -> _Ending:
    """Ending of a run whose workers died: of themselves, for want of memory, or by a signal from outside."""
    for death in answer.deaths:
        if death.words:  # the rest may have been ended because of it
            return RunStatus.CRASHED, f"rank {death.rank}: {death.words.splitlines()[0]}", None
    for death in answer.deaths:
        if death.out_of_memory:
            node = node_names.get(death.node_id, death.node_id)
            reason = f"rank {death.rank}: its process was ended because the memory of node {node} ran out"
            return RunStatus.OUT_OF_MEMORY, reason, None
    names = dict.fromkeys(node_names[death.node_id] for death in answer.deaths if death.node_id in node_names)
    ranks = ", ".join(str(death.rank) for death in answer.deaths)
    reason = f"rank {ranks} ended without reporting, killed from outside: {answer.deaths[0].why}"
    return RunStatus.INFRA_FAILED, reason, Failure(Cause.WORKER_KILLED, reason, tuple(names))


def trial_result(
    attempt: Attempt,
    answer: Answer,
    spans: pa.Table | None,
    *,
    start_wall_ns: int,
    beside: Callable[[Callable[[Path], Summary], Path], Summary] | None = None,
) -> Run:
    """Assesses a trial whose spans, which are those of all ranks, and telemetry are in its folder.

    `beside` does the analysis where it costs less than here.
    """
    spec, folder = attempt.spec, TrialFolder(attempt.folder)
    status, reason, failure = status_of(spec, answer, attempt.nodes)
    numbers = attempt.numbers | rank_numbers(answer.outcomes)
    # The proof on one rank: they ended because all had one.
    proof = next((outcome.stopped_early for outcome in answer.outcomes if outcome.stopped_early), "")
    tags = {**attempt.tags, **({STOPPED_EARLY: proof} if proof else {})}
    if is_command(spec):
        told, numbers = command_told(answer.outcomes, answer.places, numbers, has_steps=spans is not None)
        tags |= told
    summary = Summary(quality="", numbers=numbers)
    if status is RunStatus.COMPLETED:
        peaks, metrics = _peaks(answer.outcomes), told_by_ranks(answer.outcomes, spec.plan.ep)
        known = numbers

        def analysed(path: Path) -> Summary:
            return summarize(RunData.of(path).of_trial(tags, known, memory_peak_bytes=peaks, told=metrics))

        summary = analysed(folder.path) if beside is None else beside(analysed, folder.path)
        status, reason = against_limits(summary, attempt.limits)
    facts = {
        "engine": spec.engine,
        "device": spec.cluster.device,
        "simulated": str(spec.cluster.simulate_sensors_of is not None).lower(),
    }
    result = replace(
        attempt.ended(status, reason, start_wall_ns=start_wall_ns, end_wall_ns=time.time_ns()),
        metrics=summary.metrics,
        quality=summary.quality,
        quality_reasons=summary.quality_reasons,
        tags={**tags, **summary.tags, **facts, **rank_tags(answer.outcomes, answer.cause)},
        numbers=numbers | summary.numbers,
    )
    return result if failure is None else failure.of(result)


def told_by_ranks(outcomes: Sequence[RankOutcome], ep: int) -> dict[str, float]:
    """Returns metrics that only the ranks know."""
    command = leading(outcomes)
    found = {
        "expert_imbalance_frac": expert_imbalance_frac([outcome.expert_tokens for outcome in outcomes], ep),
        "startup_s": None if command is None else command.startup_s,
        "overhead_frac": None if command is None else command.overhead_frac,
        "memory_retries_per_step_count": max(
            (one.allocator_retries / max(len(one.losses), 1) for one in outcomes if one.memory_reserved_peak_bytes),
            default=None,
        ),
    }
    return {name: value for name, value in found.items() if value is not None}


def _peaks(outcomes: Sequence[RankOutcome]) -> list[int]:
    """Returns every rank's highest memory; none where a command's processes told none."""
    return [one.memory_peak_bytes for one in outcomes if one.command is None or one.memory_peak_bytes]


def rank_numbers(outcomes: Sequence[RankOutcome]) -> Numbers:
    """Returns numbers of warm-up, memory and time; `start` and `close` are only the ranks' own parts of those."""
    built = [outcome for outcome in outcomes if outcome.build_time_s]  # a rank that was stopped has no build time
    slowest = max(built or outcomes, key=lambda outcome: outcome.build_time_s, default=None)
    parts_s = {} if slowest is None else {name: round(own_s, 3) for name, own_s in slowest.parts_s.items()}
    fullest = max(outcomes, key=lambda outcome: outcome.memory_peak_bytes, default=None)
    return Numbers(
        warmup_steps=built[0].num_warmup_steps if built else None,
        build_time_s=round(slowest.build_time_s, 3) if built and slowest else parts_s.get("build"),
        start_time_s=parts_s.get("start"),
        first_step_time_s=parts_s.get("compile"),
        warmup_time_s=parts_s.get("warmup"),
        measure_time_s=parts_s.get("measure"),
        profile_time_s=parts_s.get("profile"),
        close_time_s=parts_s.get("close"),
        ahead_cpu_s=round(sum(one.ahead_cpu_s for one in outcomes), 2) or None,
        ahead_failed=sum(one.ahead_failed for one in outcomes) or None,
        memory_peak_rank=fullest.rank if fullest is not None and fullest.memory_peak_bytes else None,
        memory_asked_bytes=max((one.out_of_memory.needed_bytes for one in outcomes if one.out_of_memory), default=0)
        or None,
        memory_reserved_peak_bytes=max((one.memory_reserved_peak_bytes for one in outcomes), default=0) or None,
    )


def rank_tags(outcomes: Sequence[RankOutcome], cause: RankOutcome | None) -> dict[str, str]:
    """Tags of warm-up, engine and profile; `cause` is the failure the lane heard of first, if there was one."""
    if not outcomes:
        return {}
    tags: dict[str, str] = {}
    built = [outcome for outcome in outcomes if outcome.build_time_s]  # a rank that was stopped has no build time
    if built:
        tags["steady"] = str(all(outcome.steady for outcome in built)).lower()
    if cause is not None and cause.out_of_memory is not None and cause.out_of_memory.is_fragmentation:
        tags["out_of_memory"] = FRAGMENTATION
    tags |= outcomes[0].facts
    tags |= agreed({outcome.rank: outcome.provenance for outcome in outcomes if outcome.provenance})
    if unprofiled := {outcome.rank: outcome for outcome in outcomes if "profile" in outcome.facts}:
        # The first failure is the cause. The lane knows which was first: clocks of different nodes do not compare.
        heard = unprofiled.get(cause.rank) if cause is not None else None
        first = heard or min(unprofiled.values(), key=lambda outcome: outcome.end_mono_ns)
        tags["profile"] = first.facts["profile"]
    return tags


def against_limits(summary: Summary, limits: Mapping[str, float]) -> tuple[RunStatus, str]:
    """Status and reason of a trial that ran to its end, from hard limits and measurement quality."""
    limit_w, peak_w = limits.get(NODE_POWER), summary.metrics.get(NODE_POWER_PEAK)
    if limit_w is not None and peak_w is not None and peak_w > limit_w:
        return RunStatus.ABORTED, f"node power reached {peak_w:.6g} W over 1 s, the hard limit is {limit_w:.6g} W"
    if summary.quality == INVALID:
        return RunStatus.INVALID, f"measurement quality: {', '.join(summary.quality_reasons)}"
    return RunStatus.COMPLETED, ""

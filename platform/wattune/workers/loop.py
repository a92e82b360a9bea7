"""The measuring loop, the same for every engine: build, warm up until step time is stable, measure, profile, close.

Steps are measured in rounds, and ranks agree on a round's length before it begins: no measured step carries a
collective of ours. The steps that ended the warm-up by being stable are the first round; where an earlier window was
not, ranks agreed on that between two of them. A second is enough where they predicted the step time; a third adds the
missing steps. Where a measurement may end early (`wattune.workers.early_stop`), rounds are shorter, and ranks agree on
that between two.
"""

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import torch
import torch.distributed as dist

from wattune.clock import ClockAnchor
from wattune.run import RunStatus
from wattune.steps.steady import WINDOW_STEPS, is_stable, least_warmup, most_warmup, num_profiled
from wattune.trial import Measure, TrialSpec
from wattune.workers.device import allocator_retries, device_memory
from wattune.workers.early_stop import loses, steps_to_look
from wattune.workers.engine import Engine, ExpertTokens, Ranks, StepSpans
from wattune.workers.out_of_memory import first_line, is_out_of_memory, out_of_memory_of
from wattune.workers.outcome import RankOutcome
from wattune.workers.phases import Span, spans_table
from wattune.workers.profiler import kernels_table, profiled_steps
from wattune.workers.watchdog import Progress


class _NonFiniteLossError(ArithmeticError):
    """The loss became infinite or not a number."""


def measure_trial(
    engine: Engine,
    spec: TrialSpec,
    measure: Measure,
    ranks: Ranks,
    *,
    node: str,
    device: str,
    seed: int,
    stop_above_s: float | None = None,
    progress: Progress | None = None,
    await_window: Callable[[], None] = lambda: None,
) -> RankOutcome:
    """Runs one trial on one rank; every rank of the default process group calls it with the same arguments.

    Returns the outcome. Out of memory and a loss that is not finite are outcomes; the spans so far are kept. An error
    of the profiled pass is a fact (`profile`) of a completed outcome. After any failure other ranks may wait in a
    collective for this one: the owner of the group must free them. Raises `Exception`: anything else the engine raised;
    the worker's runner reports it and ends the group.

    Args:
        engine: A new engine.
        spec: The trial's specification.
        measure: Lengths of warm-up and measurement.
        ranks: This rank's position.
        node: The rank's node, by the name its telemetry uses.
        device: The rank's device on that node, by the name its telemetry uses.
        seed: Seed of weights and data, the same on every rank.
        stop_above_s: Mean step time above which the trial loses: measuring ends once the steps prove it on every
            rank (`wattune.workers.early_stop`). None measures to the end.
        progress: Called between the parts of the trial.
        await_window: Returns once nothing beside the trial disturbs its measured steps any more. It is called after the
            first step, which compiles, so that the steps which settle come after the wait.
    """
    report = progress if progress is not None else _silent
    anchor = ClockAnchor.now()
    steps: list[tuple[int, StepSpans]] = []
    build_time_s, num_warmup_steps, steady = 0.0, 0, False
    status, reason, stopped_early = RunStatus.COMPLETED, "", ""
    memory_peak_bytes, reserved_peak_bytes, retries = 0, 0, 0
    out_of_memory, read_profile, facts = None, _no_profile, {}
    expert_tokens: ExpertTokens = ()
    try:
        report("build", 0, 1)
        start_ns = time.monotonic_ns()
        engine.build(spec, ranks, seed=seed)
        build_time_s = (time.monotonic_ns() - start_ns) / 1e9
        num_warmup_steps, steady, taken, before = _warm_up(engine, measure, ranks, steps, report, await_window)
        done = len(taken)
        if done:
            report("measure", done, done, time.monotonic() - _starts_s(steps, done)[0])
        while missing := _agree(_missing_steps([result for _, result in steps], done, measure), ranks):
            report("measure", done, done + missing)
            now = missing if stop_above_s is None else min(missing, steps_to_look(done, measure.min_steps))
            for step in range(done, done + now):
                steps.append((step, _checked(engine.step())))  # noqa: PERF401 - a failed step keeps those before it
            done += now
            if stop_above_s is not None and now < missing:
                proof = loses(_starts_s(steps, done), stop_above_s)
                if _all_ranks(proof is not None):
                    stopped_early = f"{done} of {done + missing - now} steps: {proof}"
                    break
        memory_peak_bytes = engine.memory_peak_bytes()
        reserved_peak_bytes = device_memory(ranks.device).get("reserved_peak_bytes", 0)
        retries = allocator_retries(ranks.device) - before
        expert_tokens = _summed([*taken, engine.expert_tokens()])
        facts = dict(engine.facts())
        if profile_steps := _agree(_profile_steps(steps, measure, ranks), ranks):
            report("profile", 0, profile_steps)
            read_profile = _profile(engine, spec, ranks, profile_steps)
    except _NonFiniteLossError as error:
        status, reason = RunStatus.CRASHED, f"non_finite_loss: {error}"
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        out_of_memory = out_of_memory_of(error, ranks)
        status, reason = RunStatus.OUT_OF_MEMORY, str(out_of_memory)
    end_mono_ns = time.monotonic_ns()
    report("close", 0, 1)
    # Not before: reading a large trace takes longer than a step, which a watchdog would take for a hang. Beside the
    # close, which mostly waits for NCCL.
    with ThreadPoolExecutor(1) as beside:
        reading = beside.submit(read_profile)
        engine.close()
        kernels, problem = reading.result()
    facts |= {"profile": problem} if problem else {}
    return RankOutcome(
        rank=ranks.rank,
        status=status,
        reason=reason,
        spans=spans_table(_numbered(steps), node=node, device=device, rank=ranks.rank, anchor=anchor),
        losses=tuple(result.loss for step, result in steps if step >= 0),
        num_warmup_steps=num_warmup_steps,
        steady=steady,
        stopped_early=stopped_early,
        build_time_s=build_time_s,
        memory_peak_bytes=memory_peak_bytes,
        memory_reserved_peak_bytes=reserved_peak_bytes,
        allocator_retries=retries,
        out_of_memory=out_of_memory,
        kernels=kernels,
        expert_tokens=expert_tokens,
        facts=facts,
        end_mono_ns=end_mono_ns,
    )


def _profile_steps(steps: Sequence[tuple[int, StepSpans]], measure: Measure, ranks: Ranks) -> int:
    if measure.profile_steps is not None:
        return measure.profile_steps
    step_s = statistics.median(_step_time_s(result) for _, result in steps[-WINDOW_STEPS:])
    return 0 if ranks.device == "cpu" else num_profiled(step_s)


Profile = tuple[pa.Table | None, str]
"""Kernels of profiled steps, or the reason there are none: the measured result is kept in both cases."""


def _no_profile() -> Profile:
    return None, ""


def _profile(engine: Engine, spec: TrialSpec, ranks: Ranks, num_steps: int) -> Callable[[], Profile]:
    """Runs further steps under the profiler; returns a function that reads their kernels."""
    try:
        spans, trace = profiled_steps(engine.step, num_steps, on_gpu=ranks.device != "cpu")
    except Exception as error:  # any error at all: the pass only explains what was measured before it
        failed = None, _profile_problem(error, ranks)
        return lambda: failed

    def read() -> Profile:
        try:
            return kernels_table(trace(), spans, rank=ranks.rank, devices_per_node=spec.cluster.devices_per_node), ""
        except Exception as error:  # as above
            return None, _profile_problem(error, ranks)

    return read


def _profile_problem(error: Exception, ranks: Ranks) -> str:
    problem = f"rank {ranks.rank}: {type(error).__name__}: {first_line(error)}"
    if is_out_of_memory(error):
        problem = f"out of memory, {out_of_memory_of(error, ranks, outside='profile')}"
    traceback.clear_frames(error.__traceback__)  # they hold the activations of a step
    return f"missing, since the profiled pass failed: {problem}"


def _silent(_part: str, _done: int, _total: int, _ago_s: float = 0.0) -> None:
    """Reports progress to nobody."""


def _checked(result: StepSpans) -> StepSpans:
    if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
        raise _NonFiniteLossError(f"loss {result.loss}, gradient norm {result.grad_norm}")
    return result


def _step_time_s(result: StepSpans) -> float:
    (step,) = (span for span in result.spans if span.phase == "step")
    return (step.end_mono_ns - step.start_mono_ns) / 1e9


def _starts_s(steps: Sequence[tuple[int, StepSpans]], num_measured: int) -> list[float]:
    """Returns the starts of the measured steps on this rank's clock."""
    spans = [span for _, result in steps[len(steps) - num_measured :] for span in result.spans if span.phase == "step"]
    return [span.start_mono_ns / 1e9 for span in spans]


def _warm_up(
    engine: Engine,
    measure: Measure,
    ranks: Ranks,
    steps: list[tuple[int, StepSpans]],
    report: Progress,
    await_window: Callable[[], None],
) -> tuple[int, bool, Sequence[ExpertTokens], int]:
    """Runs steps until the latest are stable on every rank, or there were too many.

    Returns the steps of warm-up, whether those after it were stable, what each of these sent to experts, as they count
    as measured, and the allocator's retries before them.
    """
    least, most = least_warmup(measure.warmup_steps), most_warmup(measure.warmup_steps)
    times_s: list[float] = []
    taken: list[ExpertTokens] = []
    retries: list[int] = []
    gc.collect()
    report("compile", 0, 1)
    while len(times_s) < most:
        if len(times_s) == 1:
            report("warmup", 1, most)
            await_window()
        retries.append(allocator_retries(ranks.device))
        result = _checked(engine.step())
        times_s.append(_step_time_s(result))
        taken.append(engine.expert_tokens())
        steps.append((-len(times_s), result))  # numbered from the end once the end is known
        number = len(times_s) - WINDOW_STEPS
        if number >= least and _all_ranks(is_stable(times_s[number:])):
            steps[number:] = [(step, result) for step, (_, result) in enumerate(steps[number:])]
            return number, True, taken[number:], retries[number]
    return most, False, (), allocator_retries(ranks.device)


def _summed(taken: Sequence[ExpertTokens]) -> ExpertTokens:
    return tuple(tuple(map(sum, zip(*layer, strict=True))) for layer in zip(*taken, strict=True))


def _missing_steps(results: Sequence[StepSpans], num_measured: int, measure: Measure) -> int:
    """Steps still to measure for the least number and the least seconds, by the median of the latest steps."""
    recent_s = statistics.median(_step_time_s(result) for result in results[-max(num_measured, WINDOW_STEPS) :])
    measured_s = sum(_step_time_s(result) for result in results[len(results) - num_measured :])
    return measure.missing_steps(num_measured, measured_s, recent_s)


def _numbered(steps: Sequence[tuple[int, StepSpans]]) -> list[tuple[int, tuple[Span, ...]]]:
    """Steps with their spans; warm-up steps renumbered so that the last one is -1 and time runs upward."""
    num_warmup = sum(step < 0 for step, _ in steps)
    return [(index - num_warmup, result.spans) for index, (_, result) in enumerate(steps)]


def _collective_device() -> torch.device:
    """Returns the device that small tensors must be on for the default group's backend."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _all_ranks(flag: bool) -> bool:
    """Returns True where the flag is set on every rank."""
    tensor = torch.tensor([int(flag)], device=_collective_device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return bool(tensor.item())


def _agree(number: int, ranks: Ranks) -> int:
    """Rank 0's number, on every rank."""
    tensor = torch.tensor([number if ranks.rank == 0 else 0], device=_collective_device())
    dist.broadcast(tensor, src=0)
    return int(tensor.item())

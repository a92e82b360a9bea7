"""Step times and throughput."""

from collections.abc import Mapping

import numpy as np

from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.steps import Steps
from wattune.arrays import Floats
from wattune.cost.flops import workload_flop_per_token
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S


def step_times_s(steps: Steps) -> Floats:
    """Returns every measured step's time, that of the slowest rank, in order of steps; shape (steps,)."""
    result: Floats = steps.duration_s().max(axis=1)
    return result


def step_to_step_s(steps: Steps) -> Floats:
    """Returns the time from each measured step's start to the next one's; the last step has no next and is left out."""
    return np.diff(np.sort(steps.start_ns.min(axis=1))) / NS_PER_S


def speed_metrics(
    aligned: Aligned, spec: TrialSpec | None, tokens_per_step: float | None = None
) -> Mapping[str, float]:
    """Computes step time and throughput.

    `window_s`: length of the window; only without steps, as in a recording of a command.
    `step_time_s`: median over steps of the slowest rank's time; `step_time_p95_s`: their 95th percentile, linear
    between steps. `tokens_per_s`: all tokens of the measured steps over the window; `tokens_per_s_per_device`: that
    over the ranks. `mfu_frac`: model FLOPs of those tokens (`wattune.cost.flops`) a second, over the ranks' dense peak
    in the plan's data type.

    Without a specification there are no figures of a device.
    """
    if aligned.steps is None:
        return {"window_s": aligned.duration_s}
    times_s = step_times_s(aligned.steps)
    metrics = {"step_time_s": float(np.median(times_s)), "step_time_p95_s": float(np.percentile(times_s, 95))}
    if tokens_per_step is None and spec is not None:
        tokens_per_step = spec.tokens_per_step
    if not tokens_per_step:
        return metrics
    tokens_per_s = len(times_s) * tokens_per_step / aligned.duration_s
    metrics["tokens_per_s"] = tokens_per_s
    if spec is None:
        return metrics
    world_size, workload = spec.cluster.world_size, spec.workload
    metrics["tokens_per_s_per_device"] = tokens_per_s / world_size
    peak_flop_per_s = spec.cluster.rank_device.peak_flop_per_s(spec.plan.dtype)
    if peak_flop_per_s and spec.model.is_known and workload.is_known:
        flop_per_s = tokens_per_s * workload_flop_per_token(spec.model, workload)
        metrics["mfu_frac"] = flop_per_s / (world_size * peak_flop_per_s)
    return metrics

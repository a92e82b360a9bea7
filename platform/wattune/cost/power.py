"""Power of devices and nodes over a step, from the seconds its ranks spend in each kind of work."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from wattune.arrays import Bools, Floats
from wattune.catalog.hardware import DeviceSpec, chip_of
from wattune.cost.batch import Batch
from wattune.cost.clock import compute_w, slowed_frac
from wattune.cost.coefficients import PowerCoefficients
from wattune.cost.tables import EstimatedMetric, StepTime

PEAK_WINDOW_S: Final = 1.0
"""Window of the peaks, as in the metrics of those names."""

FULL_FRAC: Final = 0.975
"""Share of the power limit from which a peak of 1 s fills it."""
HELD_FRAC: Final = 1.01
"""Most of the power limit that means of a second reach: 1.002 in 119 trials on H200, 1.01 in the 315 below."""

SECOND_FRAC: Final = 1.018
"""Highest second of a run over the highest that equal steps have, where the limit leaves room: seconds scatter. The
median is 1.016 of 47 trials on H200 whose mean is below 0.95 of the limit, and 1.023 of 36 on H100."""
ROOM_FRAC: Final = 0.1
"""Share of the power limit that a peak leaves, at which `PowerCoefficients.peak_error_frac` holds."""
STEP_SHARE: Final = 0.5
"""Of what a wrong step moves a peak at most, what it moves it by. 50 trials below the limit moved by 0.3 of it,
plans that wait for their host by 0.5 to 0.7: what only a slower host adds counts whole."""

SHORT_WINDOWS: Final = {0.1: (1.11, 0.05), 0.02: (1.29, -0.08)}
"""Factors by window in seconds: on the power of work under the limit, since kernels differ, and on what the limit took
from it: a device is slowed later than 0.1 s, and within 20 ms work under a deep limit differs less. Fitted to 315
trials of 9 models and engines on H100 and H200 (`tests/golden/test_predicted_power.py`); assumed for other devices.
Peaks of 1 s reach 1.01 times the limit there, those of 100 ms 1.25 and those of 20 ms 1.40 times."""

SHORT_PEAK_ERROR_FRAC: Final = 0.19
"""Half width of their 95 % interval: it holds 95 % of the 315 not outdated, each family predicted by others."""

NODE_PEAK_FRAC: Final = 0.985
"""Peak of 100 ms of a node over the sum of its devices' own: not all are highest at once. With it estimates of the
nodes of the same trials are right in the median."""

PROFILE_ERROR_FRAC: Final = 0.15
"""Share by which a power profile may change power and energy; see `wattune.cost.estimate.PROFILE_FRACS`."""

CLOCK_ERROR: Final = 0.08
"""Half width of the 95 % interval of the lost clock, as a share of the clock: 119 trials on H200 are 3.2 points off in
the median and 7.7 at the 95th percentile, 83 on H100 2.1 and 6.7."""

FINE_GRAINED: Final = ("exposed_comm_tp_s", "exposed_comm_cp_s", "exposed_comm_ep_s")
"""Communication inside every layer: it alternates with compute within milliseconds. So do gathers of weights where
they are fully sharded."""

H200: Final = PowerCoefficients(
    idle_w=118.4,
    active_w=146.9,
    matrix_w=868.1,
    memory_w=463.3,
    link_w=75.6,
    exponent=1.516,
    limit_w=700.0,
    wait_w=65.9,
    matrix_memory_frac=0.24,
    memory_frac=0.67,
    regulated_frac=0.99,
    origin="measured here",
    error_frac=0.04,
    peak_error_frac=0.056,
    full_peak_error_frac=0.038,
)
"""Fitted to 122 trials of 99 configurations on two and on four H200s; `wattune.fitting.power` says what is assumed. A
fit to the 119 of 96 that `benchmarks/measured_tables.py` still takes is the same within 2 %. With what their steps add,
the errors hold 95 % of those in estimates by fits without their model and engine (`wattune.fitting.device`)."""

H200_PRIOR: Final = PowerCoefficients(
    idle_w=118.4,  # a process holds the device, highest clock: `tests/golden/h200x4`
    active_w=82.0,  # this and memory_w: fitted to h200_gemm_bf16 of AIConfigurator 095f58a (Apache-2.0)
    matrix_w=755.0,  # 692.6 W at 0.753 of the clock, 0.90 of the peak rate there: `tests/golden/h200x1/idle_busy`
    memory_w=490.0,
    link_w=55.0,  # assumed, as the next
    wait_w=90.0,
    exponent=1.5,  # between the 1 of a constant voltage and the 3 of one that falls with the clock
    matrix_memory_frac=0.24,  # this and the next: least squares of `dram_active_frac` in benchmarks/data
    memory_frac=0.67,
    limit_w=700.0,
    regulated_frac=0.99,  # 692.6 W of 700 by the energy counter: `tests/golden/h200x1/idle_busy`
    origin="published kernels",
    error_frac=0.3,
    peak_error_frac=0.3,
)
"""Coefficients of an H200 known without any trial. Fits start there."""

H200_PEAK_FLOP_PER_S: Final = 989.4e12

DATASHEET_ERROR_FRAC: Final = 0.3
"""Assumed where only a power limit is known."""


def power_coefficients(device: DeviceSpec) -> PowerCoefficients | None:
    """Returns the coefficients of a device without a fit of its own; None where its power limit is unknown.

    A board of the space with a catalog device's chip has that device's: a lower limit changes no watts of a kernel.

    A device other than H200 is `H200_PRIOR` scaled. `matrix_w` follows the peak rate and the energy of an operation,
    which is the same on devices of one process. All else draws the same share of the power limit. Blackwell has
    2.3 times the peak of an H200 with 1.4 times its limit, so its clock falls further: products on a B200 reach 0.49 of
    its peak (SimuMax, `b200_bf16_ceperm.json`, commit e691807, Apache-2.0), on an H200 0.70 (AIConfigurator 095f58a).
    """
    device = chip_of(device)
    if device.name == "h200_sxm":
        return H200
    if device.power_limit_w is None:
        return None
    share = device.power_limit_w / H200_PRIOR.limit_w
    peak = device.peak_bf16_flop_per_s
    watts = ("idle_w", "active_w", "memory_w", "link_w", "wait_w")
    return replace(
        H200_PRIOR,
        **{name: share * getattr(H200_PRIOR, name) for name in watts},
        limit_w=device.power_limit_w,
        matrix_w=(share if peak is None else device.matrix_energy * peak / H200_PEAK_FLOP_PER_S) * H200_PRIOR.matrix_w,
        origin="datasheet",
        error_frac=DATASHEET_ERROR_FRAC,
        peak_error_frac=DATASHEET_ERROR_FRAC,
    )


def predict(batch: Batch, step: StepTime, coefficients: PowerCoefficients) -> dict[str, EstimatedMetric]:
    """Predicts power, energy and lost clock of candidates, by the names of their metrics.

    `device_power_mean_max_w`, the mean of the device that draws most, is no metric: the temperature follows it. An
    interval holds the error of the power model, and what a wrong step time adds.

    The clock while computing is that of `step`, which `wattune.cost.clock` solved together with time. Ranks of all
    stages are in phase: between the warm-up and the cool-down of a pipeline every stage computes. Stages of `step`
    behind a candidate's last one are ignored; a limit of infinity is none.
    """
    c, activity, step_s = coefficients, step.activity, step.step_time_s
    limit_w = batch.limit_w[:, None]
    stages = np.arange(activity.matrix_s.shape[1]) < batch.pp[:, None]
    fine = _fine(batch, step)
    phases = hot_s, hot_w, cold_s, cold_w = _phases(step, c, limit_w, fine)
    mean_w = np.where(stages, (hot_s * hot_w + cold_s * cold_w) / np.maximum(hot_s + cold_s, 1e-12), 0.0)
    peak_w = _peak_w(*_gaps(step, c, phases), PEAK_WINDOW_S)
    peak_w = np.maximum(peak_w, np.minimum(SECOND_FRAC * peak_w, c.regulated_frac * limit_w))
    peak_w = np.where(stages, np.clip(peak_w, mean_w, np.maximum(limit_w, mean_w)), 0.0)
    peak_100ms_w, peak_20ms_w = _short_peaks_w(batch, step, c, fine, phases)
    peak_100ms_w = np.where(stages, np.maximum(peak_100ms_w, peak_w), 0.0)
    peak_20ms_w = np.where(stages, np.maximum(peak_20ms_w, peak_100ms_w), 0.0)
    compute_s = activity.matrix_s + activity.memory_s
    lost = np.where(stages, compute_s * (1.0 - activity.clock_frac) / np.maximum(hot_s + cold_s, 1e-12), 0.0)
    device_mean_w = mean_w.sum(1) / batch.pp
    tokens = batch.workload.global_batch_size * batch.workload.seq_len
    moved = _sensitivity(c, device_mean_w, hot_s, hot_w, stages)
    of_step = moved * step.half_width_frac
    of_second = of_step - (1.0 - STEP_SHARE) * moved * np.minimum(step.error_frac, step.longer_frac)
    # A longer step moves no peak that work alone fills.
    mixed = (fine * activity.collective_s.max(1) / np.maximum(hot_s.max(1), 1e-12)).clip(0.0, 1.0)
    of_peak, of_short = (
        of_any * np.where((hot_s.max(1) < window_s) | step.fills_memory, 1.0, mixed)
        for of_any, window_s in ((of_second, PEAK_WINDOW_S), (of_step, max(SHORT_WINDOWS)))
    )
    # Where the limit slows work down, work gets back as clock what a longer step waits: the mean of a second stays.
    room = room_frac(np.where(stages, peak_w, np.inf).min(1), peak_w.sum(1) / batch.pp, limit_w[:, 0])
    full = (room == 0.0) & (c.full_peak_error_frac is not None)
    least = c.peak_error_frac if c.full_peak_error_frac is None else c.full_peak_error_frac
    own_peak = least + (c.peak_error_frac - least) * room / ROOM_FRAC
    short_frac = max(c.peak_error_frac, SHORT_PEAK_ERROR_FRAC)
    profile = PROFILE_ERROR_FRAC * batch.profiled
    of_mean = _joined(c, c.error_frac, of_step, device_mean_w) + profile
    of_peak = np.where(full & np.logical_not(step.fills_memory), 0.0, of_peak)
    of_second = _joined(c, own_peak, of_peak, peak_w.max(1)) + profile
    of_short = _joined(c, short_frac, of_short, peak_100ms_w.max(1)) + profile
    # A limit holds means of a second or more, so none is higher than it.
    held_w, on_node = HELD_FRAC * batch.limit_w, batch.cluster.devices_per_node
    within, deficit = EstimatedMetric.within, lost.sum(1) / batch.pp
    energy_j = device_mean_w * batch.cluster.world_size * step_s / tokens
    node_100ms_w = _worst_node_w(batch, np.maximum(NODE_PEAK_FRAC * peak_100ms_w, peak_w))
    return {
        "device_power_mean_w": within(device_mean_w, of_mean).below(held_w),
        "device_power_mean_max_w": within(mean_w.max(1), of_mean).below(held_w),
        "device_power_peak_1s_w": within(peak_w.max(1), of_second).below(held_w),
        "device_power_peak_100ms_w": within(peak_100ms_w.max(1), of_short),
        "device_power_peak_20ms_w": within(peak_20ms_w.max(1), of_short),
        "node_device_power_mean_w": within(_worst_node_w(batch, mean_w), of_mean).below(held_w * on_node),
        "node_device_power_peak_1s_w": within(_worst_node_w(batch, peak_w), of_second).below(held_w * on_node),
        "node_device_power_peak_100ms_w": within(node_100ms_w, of_short),
        # Time and power of the model err independently.
        "energy_per_token_j": within(energy_j, np.hypot(c.error_frac, step.half_width_frac) + profile),
        "clock_deficit_frac": EstimatedMetric(
            value=deficit,
            low=np.maximum(deficit - (CLOCK_ERROR + profile), 0.0),
            high=np.minimum(deficit + (CLOCK_ERROR + profile), 1.0),
        ),
    }


def _joined(c: PowerCoefficients, own_frac: Floats | float, of_step: Floats, watts: Floats) -> Floats:
    """Joins both errors; that of the step takes no device below its idle power."""
    most = 1.0 - c.idle_w / np.maximum(watts, c.idle_w)
    return np.minimum(np.hypot(own_frac, of_step), np.maximum(own_frac, most))


def _sensitivity(c: PowerCoefficients, mean_w: Floats, hot_s: Floats, hot_w: Floats, stages: Bools) -> Floats:
    """Computes how much a wrong step time moves the mean power, d ln P / d ln t, at most.

    P = (E_hot + P_cold (t - t_hot)) / t. A step that is longer by waits or by the host draws less: its slope is
    P_wait / P - 1. One that is longer by work draws more: P_hot / P - 1. Nothing tells which part is wrong, so the
    steeper one counts.
    """
    busy_s = np.where(stages, hot_s, 0.0).sum(1)
    working_w = np.where(stages, hot_s * hot_w, 0.0).sum(1) / np.maximum(busy_s, 1e-12)
    idle = 1.0 - (c.idle_w + c.wait_w) / np.maximum(mean_w, 1e-9)
    work = working_w / np.maximum(mean_w, 1e-9) - 1.0
    return np.asarray(np.maximum(np.maximum(idle, work), 0.0))


def _phases(
    step: StepTime, c: PowerCoefficients, limit_w: Floats | float, fine: Floats
) -> tuple[Floats, Floats, Floats, Floats]:
    """Returns seconds and watts, [candidates, stages], of work with the communication in it, and of the long rest.

    `fine` is the share of exposed communication that alternates with work.
    """
    activity = step.activity
    room_w = np.clip(c.regulated_frac * limit_w - c.idle_w, 0.0, 1e9)  # infinite times no time is not a number
    above_idle_w = compute_w(
        c,
        matrix_s=activity.matrix_s,
        memory_s=activity.memory_s,
        matrix_frac=activity.matrix_frac,
        overlapped_s=activity.overlapped_s,
    )
    collective_w, wait_w = np.minimum(c.active_w + c.link_w, room_w), np.minimum(c.wait_w, room_w)
    compute_s, fine_s = activity.matrix_s + activity.memory_s, fine[:, None] * activity.collective_s
    # A rank that waits for a slower one spins in the collective that both are in.
    spin_s = np.minimum(step.parts_s.get("straggler_s", np.zeros(len(compute_s)))[:, None], activity.idle_s)
    coarse_s, idle_s = activity.collective_s - fine_s + spin_s, activity.idle_s - spin_s
    slowed = slowed_frac(c.exponent, activity.clock_frac, activity.clock_frac / np.maximum(activity.held_frac, 1e-12))
    hot_j = compute_s * above_idle_w * slowed + fine_s * collective_w
    coarse_j = coarse_s * collective_w
    # The limit acts on the mean of compute and communication: together they stay below it.
    kept = np.minimum(1.0, room_w * (compute_s + fine_s + coarse_s) / np.maximum(hot_j + coarse_j, 1e-12))
    hot_s, cold_s = compute_s + fine_s, coarse_s + idle_s
    return (
        hot_s,
        c.idle_w + kept * hot_j / np.maximum(hot_s, 1e-12),
        cold_s,
        c.idle_w + (kept * coarse_j + idle_s * wait_w) / np.maximum(cold_s, 1e-12),
    )


def _fine(batch: Batch, step: StepTime) -> Floats:
    """Computes the share of exposed communication that alternates with compute."""
    zero = np.zeros_like(step.step_time_s)
    exposed = sum((values for name, values in step.parts_s.items() if name.startswith("exposed_comm_")), zero)
    inside = sum((step.parts_s[name] for name in FINE_GRAINED if name in step.parts_s), zero)
    inside = inside + np.where(batch.sharding == 3, step.parts_s.get("exposed_comm_dp_s", zero), 0.0)
    return np.asarray(inside / np.maximum(exposed, 1e-12))


def room_frac(least_w: Floats, mean_w: Floats, limit_w: Floats) -> Floats:
    """Computes the share of the power limit that peaks leave: 0 where that of the device that draws least fills it.

    A device near its limit is held by it, whatever its work would draw; one further below is not.
    """
    left = np.clip(1.0 - mean_w / limit_w, 1.0 - FULL_FRAC, 0.5)
    return np.where(least_w >= FULL_FRAC * limit_w, 0.0, left)


def _gaps(
    step: StepTime, c: PowerCoefficients, phases: tuple[Floats, Floats, Floats, Floats], frac: float = 1.0
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """Returns seconds and watts of work with its gaps, and of what is left of the rest.

    In gaps a device waits for its host, or a stage in each micro-batch for one with more work. Any window holds them.
    """
    hot_s, hot_w, cold_s, cold_w = phases
    a, host_s = step.activity, step.parts_s.get("other_s", np.zeros(len(cold_s)))[:, None]
    used_s = a.matrix_s + a.memory_s + a.collective_s
    gap_s = np.minimum(host_s + used_s.max(axis=1, keepdims=True) - used_s, a.idle_s)
    gap_j, busy_s, left_s = gap_s * (c.idle_w + c.wait_w), hot_s + gap_s, np.maximum(cold_s - gap_s, 0.0)
    left_w = np.maximum((cold_s * cold_w - gap_j) / np.maximum(left_s, 1e-12), c.idle_w)
    return (busy_s, (hot_s * hot_w + frac * gap_j) / np.maximum(busy_s, 1e-12)), (left_s, left_w)


def _short_peaks_w(
    batch: Batch, step: StepTime, c: PowerCoefficients, fine: Floats, phases: tuple[Floats, Floats, Floats, Floats]
) -> Iterator[Floats]:
    """Predicts the peaks of `SHORT_WINDOWS`, [candidates, stages], beyond the limit where the device goes beyond it."""
    hot_s, hot_w, *cold = phases
    locked = np.ones_like(hot_s) * batch.locked_frac[:, None]
    unslowed = replace(step.activity, clock_frac=locked, held_frac=locked)
    _, free_w, _, _ = _phases(replace(step, activity=unslowed), c, np.inf, fine)
    for window_s, (held_frac, beyond_frac) in SHORT_WINDOWS.items():
        watts = held_frac * hot_w + beyond_frac * (free_w - hot_w)
        yield _peak_w(*_gaps(step, c, (hot_s, watts, cold[0], cold[1]), held_frac), window_s)


def _peak_w(one: tuple[Floats, Floats], other: tuple[Floats, Floats], window_s: float) -> Floats:
    """Computes the highest mean over a window of a load that repeats two phases, each (seconds, watts).

    The window holds whole steps and a part of one. The part has as much of the hotter phase as the phase and the part
    are long.
    """
    swap = other[1] > one[1]
    high_s, high_w = np.where(swap, other[0], one[0]), np.where(swap, other[1], one[1])
    low_s, low_w = np.where(swap, one[0], other[0]), np.where(swap, one[1], other[1])
    step_s = np.maximum(high_s + low_s, 1e-9)
    whole = np.floor(window_s / step_s)
    part_s = window_s - whole * step_s
    part_high_s = np.minimum(part_s, high_s)
    joules = whole * (high_s * high_w + low_s * low_w) + part_high_s * high_w + (part_s - part_high_s) * low_w
    return np.asarray(joules / window_s)


def _worst_node_w(batch: Batch, stage_w: Floats) -> Floats:
    """Sums a figure of each stage's device over the devices of a node, and returns the highest node.

    Ranks are placed in order, pipeline stages outermost (`wattune.plans.placement` with `topology`). Where a stage
    fills whole nodes, the highest node is one of the highest stage.
    """
    on_node, world = batch.cluster.devices_per_node, batch.cluster.world_size
    of_stage = world // batch.pp
    if batch.cluster.num_nodes == 1:
        return np.asarray(stage_w.sum(1) * of_stage)
    highest = np.where(of_stage >= on_node, stage_w.max(1) * on_node, 0.0)
    split = np.flatnonzero(of_stage < on_node)
    if split.size:
        first = np.arange(stage_w.shape[1]) * of_stage[split, None]
        last = first + of_stage[split, None]
        for node in range(batch.cluster.num_nodes if stage_w.shape[1] * on_node > world else stage_w.shape[1]):
            begin, end = node * on_node, (node + 1) * on_node
            devices = np.clip(np.minimum(last, end) - np.maximum(first, begin), 0, None)
            highest[split] = np.maximum(highest[split], (devices * stage_w[split]).sum(1))
    return np.asarray(highest)

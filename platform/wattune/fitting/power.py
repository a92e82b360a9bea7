"""Power coefficients of a device, fitted to measured trials, with a table of measured kernels as prior."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from wattune.arrays import Bools, Floats, Ints
from wattune.cost.batch import Batch, batches
from wattune.cost.clock import compute_w, slowed_frac, working_clock_frac
from wattune.cost.coefficients import PowerCoefficients
from wattune.cost.power import H200_PRIOR, ROOM_FRAC
from wattune.cost.tables import Activity, StepTime
from wattune.fitting.interval import half_width
from wattune.trial import TrialSpec

FULL_TENSOR_FRAC: Final = 0.936
"""`tensor_active_frac` of 8192^3 bf16 products without pause on one H200 (`tests/golden/h200x1/idle_busy`)."""

FULL_MATRIX_FRAC: Final = 0.90
"""Their achieved over peak rate at the highest clock: 670 of 989.4 TFLOP/s at 1,491 of 1,980 MHz."""

COLLECTIVE_LINK_FRAC: Final = 0.70
"""NVLink bytes over peak while a large collective runs: bus bandwidth 345 of 450 GB/s at 2 to 8 devices, less gaps."""

FITTED: Final = ("active_w", "matrix_w", "memory_w", "link_w", "wait_w", "exponent")
LOW: Final = np.array([0.0, 100.0, 100.0, 0.0, 0.0, 1.0])
HIGH: Final = np.array([600.0, 2000.0, 2000.0, 400.0, 400.0, 3.0])

PRIOR_FRAC: Final = 0.3
"""Scatter that is granted to a coefficient of the prior, relative."""
TRIAL_FRAC: Final = 0.04
"""Scatter of a trial's mean power about the model, relative."""
CLOCK_FRAC: Final = 0.04
"""Scatter of a trial's clock about the model."""

PARTS: Final = tuple(f"exposed_comm_{name}_frac" for name in ("tp", "pp", "cp", "dp", "ep"))

PREDICTED: Final = ("device_power_mean_w", "node_device_power_peak_1s_w")
NEEDED: Final = (
    *("step_time_s", "compute_frac", "exposed_comm_frac", "straggler_frac", "bubble_frac"),
    *("tensor_active_frac", "dram_active_frac", "nvlink_of_peak_frac", "clock_deficit_frac", *PREDICTED),
)
"""Metrics without which a trial says nothing of power."""

MIN_CONFIGURATIONS: Final = 8
"""Fewer say nothing of the error on others."""
SURE_CONFIGURATIONS: Final = 19
"""Fewer cannot promise 95 %, and say nothing of a class of them."""

MeasuredSteps = tuple[Ints, Batch, StepTime]
"""Trials of one batch: their positions among the rows they came from, the batch, and what was measured of their steps
in the form of a prediction."""


def has_activity(row: Mapping[str, Any]) -> bool:
    """Tells whether a trial was completed and has every metric of `NEEDED`."""
    return row["status"] == "completed" and all(row[name] is not None for name in NEEDED)


def measured_steps(rows: Sequence[Mapping[str, Any]]) -> list[MeasuredSteps]:
    """Reads activity from completed trials.

    The tensor cores' share gives seconds in products. What `dram_active_frac` has beyond them gives seconds in
    memory-bound kernels, at least the rest of `compute_frac`: some lie in time that no span explains. NVLink bytes
    beyond those of exposed communication were sent beside compute. The lost clock was lost while computing. Every stage
    gets the mean over all devices: metrics do not tell stages apart. `rows` are those of `benchmarks/data`, each with
    `has_activity`: a specification as JSON in `spec`, and metrics.
    """
    specs = [TrialSpec.from_json(json.loads(row["spec"])) for row in rows]
    return [
        (positions, batch, _step(batch, [rows[place] for place in positions])) for positions, batch in batches(specs)
    ]


def _step(batch: Batch, rows: Sequence[Mapping[str, Any]]) -> StepTime:
    def metric(name: str) -> Floats:
        return np.array([row[name] for row in rows], np.float64)

    step_s, exposed = metric("step_time_s"), metric("exposed_comm_frac")
    straggler, bubble = metric("straggler_frac"), metric("bubble_frac")
    matrix = np.minimum(metric("tensor_active_frac") / FULL_TENSOR_FRAC, metric("compute_frac"))
    left = np.maximum(1.0 - matrix - exposed - straggler - bubble, 0.0)
    dram = metric("dram_active_frac") - H200_PRIOR.matrix_memory_frac * matrix
    memory = np.clip(dram / H200_PRIOR.memory_frac, 0.0, left)
    memory = np.maximum(memory, metric("compute_frac") - matrix)
    compute = matrix + memory
    beside = np.clip(metric("nvlink_of_peak_frac") / COLLECTIVE_LINK_FRAC - exposed, 0.0, compute)
    clock = np.clip(1.0 - metric("clock_deficit_frac") / np.maximum(compute, 1e-9), 0.3, 1.0)

    def seconds(share: Floats) -> Floats:
        return np.repeat((share * step_s)[:, None], int(batch.pp.max()), axis=1)

    ones = np.ones_like(seconds(compute))
    # A kind of communication that a plan does not have has no metric: nothing of the step is its own.
    shares = {name: np.array([row[name] or 0.0 for row in rows]) for name in PARTS}
    idle = np.maximum(1.0 - compute - exposed, 0.0)
    shares |= {"compute_frac": compute, "straggler_frac": np.minimum(straggler, idle)}
    shares["other_frac"] = 1.0 - sum(shares.values(), np.zeros_like(compute))
    return StepTime(
        parts_s={name.replace("_frac", "_s"): share * step_s for name, share in shares.items()},
        activity=Activity(
            matrix_s=seconds(matrix),
            memory_s=seconds(memory),
            collective_s=seconds(exposed),
            idle_s=seconds(idle),
            overlapped_s=seconds(beside),
            matrix_frac=ones * FULL_MATRIX_FRAC,
            clock_frac=ones * clock[:, None],
            held_frac=ones,
        ),
        error_frac=np.zeros_like(step_s),
        longer_frac=np.zeros_like(step_s),
    )


def fit_power(rows: Sequence[Mapping[str, Any]], prior: PowerCoefficients, *, limit_w: float) -> PowerCoefficients:
    """Fits the power of each kind of work and the clock under the limit.

    Residuals are mean power at the measured clock, the clock that the limit leaves, and distances from the prior. Idle
    power is the prior's. It is also what to believe of work that the trials do not tell apart; `limit_w` is of devices
    of trials that did not measure theirs.
    """
    from scipy.optimize import least_squares  # takes 0.3 s

    steps = [(step, [rows[place] for place in positions]) for positions, _, step in measured_steps(rows)]
    activity = np.concatenate([_shares(step) for step, _ in steps], axis=1)
    matrix, memory, collective, idle, beside, clock = activity
    power_w = np.array([row["device_power_mean_w"] for _, each in steps for row in each])
    limits_w = np.array([row.get("device_power_limit_w") or limit_w for _, each in steps for row in each])
    start = np.array([getattr(prior, name) for name in FITTED])
    full = np.full_like(matrix, FULL_MATRIX_FRAC)

    def residuals(values: Floats) -> Floats:
        c = replace(prior, **dict(zip(FITTED, values.tolist(), strict=True)))
        dynamic = compute_w(c, matrix_s=matrix, memory_s=memory, matrix_frac=full, overlapped_s=beside)
        own, solved = (
            working_clock_frac(c, dynamic, matrix + memory, collective, each_w)
            for each_w in (np.maximum(limits_w, c.limit_w), limits_w)
        )
        slowed = np.where(limits_w < c.limit_w, slowed_frac(c.exponent, clock, own), clock**c.exponent)
        above_idle = (matrix + memory) * dynamic * slowed + collective * (c.active_w + c.link_w) + idle * c.wait_w
        return np.concatenate(
            [
                ((c.idle_w + above_idle) / power_w - 1.0) / TRIAL_FRAC,
                (solved - clock) * (matrix + memory) / CLOCK_FRAC,
                (values / np.maximum(start, 1.0) - 1.0) / PRIOR_FRAC,
            ]
        )

    found = least_squares(residuals, np.clip(start, LOW, HIGH), bounds=(LOW, HIGH), x_scale="jac")
    return replace(prior, origin="measured here", **dict(zip(FITTED, found.x.tolist(), strict=True)))


def with_intervals(
    found: PowerCoefficients, mean: Floats, peak: Floats, room: Floats, configurations: Sequence[str]
) -> PowerCoefficients:
    """Returns coefficients with intervals that hold 95 % of trials of which no fit has seen the kind.

    `mean` and `peak` are how wide an interval must be beyond what its step's own adds. Peaks that fill the limit (of
    no `room`) are apart where there are enough; others are as much wider as they leave room, never surer than trials
    scatter.
    """
    of = np.array(configurations)
    if len({*configurations}) < MIN_CONFIGURATIONS:
        return found

    def width(needed: Floats, which: Bools, least: int) -> float | None:
        each = of[which].tolist()
        return half_width(1.0 / (1.0 + needed[which]) - 1.0, each) if len({*each}) >= least else None

    every, full = np.full(len(of), True), room == 0.0
    apart = width(peak, full, SURE_CONFIGURATIONS)
    if apart is None:
        of_peak = max(width(peak, every, MIN_CONFIGURATIONS) or 0.0, TRIAL_FRAC)
    else:
        wider = np.maximum(peak - apart, 0.0) * ROOM_FRAC / np.maximum(room, 1e-9)
        of_peak = apart + (width(wider, ~full, MIN_CONFIGURATIONS) or 0.0)
    return replace(
        found,
        error_frac=max(width(mean, every, MIN_CONFIGURATIONS) or 0.0, TRIAL_FRAC),
        peak_error_frac=of_peak,
        full_peak_error_frac=apart,
    )


def _shares(step: StepTime) -> Floats:
    """Returns shares of a step: products, memory-bound, collectives, idle, overlapped; and the clock. One stage's."""
    a, spin_s = step.activity, step.parts_s["straggler_s"]
    matrix_s, memory_s, collective_s, idle_s, overlapped_s = (
        each[:, 0] for each in (a.matrix_s, a.memory_s, a.collective_s, a.idle_s, a.overlapped_s)
    )
    seconds = (matrix_s, memory_s, collective_s + spin_s, idle_s - spin_s, overlapped_s)
    shares: Floats = np.stack([*(each / step.step_time_s for each in seconds), a.clock_frac[:, 0]])
    return shares

"""Division of a step's time into compute and waits, from spans alone and only if spans can separate them."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from wattune.analysis.signals.readings import codes, integers
from wattune.analysis.signals.series import Floats, Ints
from wattune.analysis.signals.steps import Steps
from wattune.plan.axes import Plan
from wattune.plan.parallel import pipeline_bubble_ratio
from wattune.units import NS_PER_S

MODEL: Final = ("forward", "backward")
OPTIMIZER: Final = "optimizer"
WAIT: Final = "wait"

GATHERS_INSIDE: Final = ("zero2", "zero3")
"""Shardings that move gradients or parameters in the middle of forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Seconds of every rank in every measured step by part, each of shape (steps, ranks).

    Together they are the rank's own step time.
    """

    compute_s: Floats
    exposed_comm_s: Floats
    bubble_s: Floats
    straggler_s: Floats
    other_s: Floats


def divide(spans: pa.Table, steps: Steps, plan: Plan, *, num_micro_batches: int) -> Division | None:
    """Divides the time of the measured steps by their spans.

    Marked compute is the time in `forward`, `backward` or `optimizer` and not in `wait`; marked wait is the time in
    `wait`. Spans of one rank may nest and overlap; no moment counts twice.

    - compute: marked compute.
    - bubble: marked wait, up to what an ideal schedule idles: `pipeline_bubble_ratio` of the slowest rank's forward and
      backward time.
    - straggler: the rest of marked wait, up to the difference between the slowest rank's compute in that step and this
      rank's: uneven stages and slow devices.
    - exposed communication: marked wait that is still left: communication that no compute hides.
    - other: time outside all phases.

    Args:
        spans: Spans of all ranks.
        steps: The measured steps.
        plan: How the model was laid out.
        num_micro_batches: Micro-batches a replica runs per step.

    Returns:
        The division, None if spans cannot divide the steps. Communication of tensor, context and expert parallelism and
        of `zero2` and `zero3` runs inside `forward` and `backward`, so the plan may have none of them. Every rank must
        have marked forward or backward in every step, and one of several ranks must have marked a wait.
    """
    if plan.tp > 1 or plan.cp > 1 or plan.ep > 1 or plan.sharding in GATHERS_INSIDE:
        return None
    phases = PhaseSpans.of(spans, steps)
    wait_s = phases.time_s(WAIT)
    model_s = phases.time_s(*MODEL, WAIT) - wait_s
    busy_s = phases.time_s(*MODEL, OPTIMIZER, WAIT) - wait_s
    if not np.all(model_s > 0) or (len(steps.rank) > 1 and not np.any(wait_s > 0)):
        return None
    ideal_s = pipeline_bubble_ratio(plan, num_micro_batches) * model_s.max(axis=1, keepdims=True)
    bubble_s = np.minimum(wait_s, ideal_s)
    straggler_s = np.minimum(wait_s - bubble_s, busy_s.max(axis=1, keepdims=True) - busy_s)
    return Division(
        compute_s=busy_s,
        exposed_comm_s=wait_s - bubble_s - straggler_s,
        bubble_s=bubble_s,
        straggler_s=straggler_s,
        other_s=steps.duration_s() - busy_s - wait_s,
    )


def decompose_metrics(division: Division | None) -> dict[str, float]:
    """Computes shares of rank-time in the measured steps, over every rank's own step time; they sum to 1.

    `compute_frac`, `exposed_comm_frac`, `bubble_frac`, `straggler_frac`, `other_frac`: see `divide`. If `other_frac` is
    above 0.05, the decomposition explains too little to rely on.

    Args:
        division: From `divide`; None gives no metrics.
    """
    if division is None:
        return {}
    parts = {
        "compute_frac": division.compute_s,
        "exposed_comm_frac": division.exposed_comm_s,
        "bubble_frac": division.bubble_s,
        "straggler_frac": division.straggler_s,
        "other_frac": division.other_s,
    }
    whole_s = sum(float(part.sum()) for part in parts.values())
    # Rounding may make a part slightly negative.
    return {name: max(float(part.sum()) / whole_s, 0.0) for name, part in parts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpans:
    """The phases inside measured steps, each rank's intervals ordered by start."""

    names: list[str]
    phase: Ints
    """Index into `names`."""
    cell: Ints
    """Index into the flattened (steps, ranks)."""
    start_ns: Ints
    """Times on a separate axis for every rank: the ranks' axes do not overlap."""
    end_ns: Ints
    shape: tuple[int, int]

    @classmethod
    def of(cls, spans: pa.Table, steps: Steps) -> "PhaseSpans":
        """Selects the spans of the measured steps, clipped to the rank's own step."""
        phase, names = codes(spans, "phase")
        number, rank = integers(spans, "step"), integers(spans, "rank")
        inside = np.array([name != "step" for name in names], bool)[phase]
        rows = np.flatnonzero(inside & np.isin(number, steps.number) & np.isin(rank, steps.rank))
        column = np.searchsorted(steps.rank, rank[rows])
        where = np.searchsorted(steps.number, number[rows]), column
        own_axis_ns = column * (int(steps.end_ns.max()) - int(steps.start_ns.min()) + 1)
        bounds_ns = steps.start_ns[where], steps.end_ns[where]
        start_ns, end_ns = (
            np.clip(integers(spans, f"{edge}_mono_ns")[rows] + steps.anchor_ns[column], *bounds_ns) + own_axis_ns
            for edge in ("start", "end")
        )
        order = np.argsort(start_ns, kind="stable")
        return cls(
            names=names,
            phase=phase[rows][order],
            cell=np.ravel_multi_index(where, steps.start_ns.shape)[order],
            start_ns=start_ns[order],
            end_ns=end_ns[order],
            shape=steps.start_ns.shape,
        )

    def time_s(self, *phases: str) -> Floats:
        """Returns seconds each rank spent in any of the phases in each step, each moment once; shape (steps, ranks)."""
        chosen = np.array([name in phases for name in self.names], bool)[self.phase]
        start_ns, end_ns, cell = self.start_ns[chosen], self.end_ns[chosen], self.cell[chosen]
        # The new part of an interval begins where all earlier ones have ended.
        covered_ns = np.concatenate([start_ns[:1], np.maximum.accumulate(end_ns)[:-1]])
        new_ns = np.maximum(end_ns - np.maximum(start_ns, covered_ns), 0)
        size = self.shape[0] * self.shape[1]
        result: Floats = np.bincount(cell, new_ns, minlength=size).reshape(self.shape) / NS_PER_S
        return result

"""Division of a step's time into compute and waits, from spans alone and only if spans can separate them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from wattune.analysis.signals.readings import integers
from wattune.analysis.signals.steps import Steps
from wattune.arrays import Floats, Ints
from wattune.errors import PlanError
from wattune.plans.axes import Plan
from wattune.plans.parallel import coordinates
from wattune.plans.schedule import Pass, passes, replay
from wattune.storage.parquet import codes
from wattune.units import NS_PER_S

MODEL: Final = ("forward", "backward")
OPTIMIZER: Final = "optimizer"
WAIT: Final = "wait"

GATHERS_INSIDE: Final = ("zero2", "zero3")
"""Shardings that move gradients or parameters in the middle of forward and backward."""

HOST_BOUND_FRAC: Final = 0.1
"""Share of a step that devices may wait for their host before speed and power follow its pace. Plans on two H200 that
wait up to 0.07 of it repeat to 1 % (`benchmarks/data/moe_ep_h200x2.parquet`), those on one that wait for 0.12 to 0.16
to 4 to 6 % (`benchmarks/data/dense_llama_1b_h200.parquet` and its ladder)."""

UNDIVIDED_WAIT: Final = "wait"
"""Waiting that cannot be divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Seconds of every rank in every measured step by part, each (steps, ranks): together the rank's own step time."""

    compute_s: Floats
    waits_s: Mapping[str, Floats]
    """Either `exposed_comm`, `bubble` and `straggler`, or `wait` alone where it cannot be divided."""
    other_s: Floats


def divide(spans: pa.Table, steps: Steps, plan: Plan, *, num_micro_batches: int) -> Division | None:
    """Divides the time of the measured steps by their spans.

    Marked compute is the time in `forward`, `backward` or `optimizer` and not in `wait`; marked wait is the time in
    `wait`. Spans of one rank may nest and overlap; no moment counts twice. Marked wait is attributed in this order:

    - With a pipeline first the idle time of its replay (`replayed`), as far as the rank waited as long: bubble, and
      straggler for what unequal stages and replicas add.
    - Without one first the difference between the slowest rank's compute in that step and this rank's: straggler.
    - The rest is exposed communication: communication that no compute hides.

    Time outside all phases is other.

    None if spans cannot divide the steps. Communication of tensor, context and expert parallelism and of `zero2` and
    `zero3` runs inside `forward` and `backward`, so the plan may have none of them. Every rank must have marked forward
    or backward in every step, and one of several ranks must have marked a wait. The wait is not divided if a pipeline
    cannot be replayed.
    """
    if plan.tp > 1 or plan.cp > 1 or plan.ep > 1 or plan.sharding in GATHERS_INSIDE:
        return None
    phases = PhaseSpans.of(spans, steps)
    wait_s = phases.time_s(WAIT)
    model_s = phases.time_s(*MODEL, WAIT) - wait_s
    busy_s = phases.time_s(*MODEL, OPTIMIZER, WAIT) - wait_s
    if not np.all(model_s > 0) or (len(steps.rank) > 1 and not np.any(wait_s > 0)):
        return None
    waits_s: dict[str, Floats] = {UNDIVIDED_WAIT: wait_s}
    idle = replayed(phases, steps, plan, num_micro_batches, model_s) if plan.pp > 1 else None
    if idle is not None:
        idle_s, bubble_share = idle
        explained_s = np.minimum(wait_s, idle_s)
        bubble_s = bubble_share * explained_s
        waits_s = {
            "exposed_comm": wait_s - explained_s,
            "bubble": bubble_s,
            "straggler": explained_s - bubble_s,
        }
    elif plan.pp == 1:
        straggler_s = np.minimum(wait_s, busy_s.max(axis=1, keepdims=True) - busy_s)
        waits_s = {"exposed_comm": wait_s - straggler_s, "bubble": np.zeros_like(wait_s), "straggler": straggler_s}
    return Division(compute_s=busy_s, waits_s=waits_s, other_s=steps.duration_s() - busy_s - wait_s)


def decompose_metrics(division: Division | None) -> dict[str, float]:
    """Computes shares of rank-time in the measured steps, over every rank's own step time.

    `compute_frac`, `exposed_comm_frac`, `bubble_frac`, `straggler_frac`, `other_frac`: see `divide`. They sum to 1. If
    waiting cannot be divided, its three parts are absent. If `other_frac` is above 0.05, the decomposition explains too
    little to rely on.
    """
    if division is None:
        return {}
    parts = {"compute": division.compute_s, **division.waits_s, "other": division.other_s}
    whole_s = sum(float(part.sum()) for part in parts.values())
    # Rounding may make a part slightly negative.
    return {
        f"{name}_frac": max(float(part.sum()) / whole_s, 0.0) for name, part in parts.items() if name != UNDIVIDED_WAIT
    }


def host_bound_frac(busy_s: float, own_s: float, step_time_s: float, division: Division | None) -> float:
    """Computes the share of a step in which a device neither runs anything nor waits in its spans: for its host.

    Waiting that a collective's kernel does is in the busy time and in the spans, and counts once: what is accounted for
    is the longer one of the busy time, and of its part without collectives with the waiting of the spans. `busy_s` and
    `own_s` are the mean time of a step in which a device runs anything, and the same without collectives. The waits of
    `division` count as they are in the step of `step_time_s`, the median, or in the two around it: in another one ranks
    may have waited for a checkpoint.
    """
    waits_s = 0.0
    if division is not None:
        step_s = sum(division.waits_s.values(), division.compute_s + division.other_s).max(axis=1)
        middle = np.argsort(step_s, kind="stable")[(len(step_s) - 1) // 2 : len(step_s) // 2 + 1]
        waits_s = sum(float(part[middle].mean()) for part in division.waits_s.values())
    return max(1.0 - max(busy_s, own_s + waits_s) / step_time_s, 0.0)


def replayed_shares(
    spans: pa.Table, steps: Steps, plan: Plan, *, num_micro_batches: int
) -> dict[int, tuple[float, float]] | None:
    """Computes every rank's idle time in the replay over its measured steps, as shares of its time in them.

    Communication inside passes counts as the stage's time, so any plan with a pipeline can be replayed.

    By rank: the share of the bubble, and of the idle time that unequal stages and replicas add. None if it cannot be
    replayed.
    """
    phases = PhaseSpans.of(spans, steps)
    model_s = phases.time_s(*MODEL, WAIT) - phases.time_s(WAIT)
    idle = replayed(phases, steps, plan, num_micro_batches, model_s) if np.all(model_s > 0) else None
    if idle is None:
        return None
    idle_s, bubble_share = idle
    whole_s = steps.duration_s().sum(axis=0)
    bubble = (idle_s * bubble_share).sum(axis=0) / whole_s
    rest = (idle_s * (1 - bubble_share)).sum(axis=0) / whole_s
    return dict(zip(steps.rank.tolist(), zip(bubble.tolist(), rest.tolist(), strict=True), strict=True))


def replayed(
    phases: "PhaseSpans", steps: Steps, plan: Plan, num_micro_batches: int, model_s: Floats
) -> tuple[Floats, Floats] | None:
    """Replays every measured step's pipeline with each stage's own measured passes and free communication.

    The ranks at one place of their stages are a pipeline of their own: a replica, or a slice of one. They all end
    together, because they reduce gradients. A rank idles from its own passes to the end of the slowest
    replica. Of all ranks' idle time, the bubble is what the same schedule idles if every stage and replica takes the
    mean time of each pass. The rest comes from unequal stages and replicas. Every rank's idle time is divided alike.

    Returns the idle time of every rank in every step, shape (steps, ranks), and the part of it that equal stages would
    idle too, shape (steps, 1).

    `model_s` is every rank's forward and backward time, shape (steps, ranks). None if the marked passes are not those
    of a schedule: some are missing, or their order changes between steps or replicas.
    """
    num_ranks = len(steps.rank)
    if num_ranks % plan.pp or steps.rank.tolist() != list(range(num_ranks)):
        return None
    stages: list[list[int]] = [[] for _ in range(plan.pp)]
    for rank in range(num_ranks):
        stages[coordinates(rank, plan, num_ranks).pp].append(rank)
    orders, durations_s = [], []
    for stage, ranks in enumerate(stages):
        found = phases.passes(ranks, stage, plan, num_micro_batches)
        if found is None:
            return None
        order, each_s = found
        # A wait inside a pass is none of its compute.
        each_s = each_s * (model_s[:, ranks] / each_s.sum(axis=0))
        orders.append(order)
        durations_s.append(dict(zip(order, each_s, strict=True)))
    if len({frozenset(order) for order in orders}) > 1:
        return None
    mean_s = {one: np.mean([stage_s[one] for stage_s in durations_s], axis=(0, 2)) for one in orders[0]}
    try:
        end_s = replay(orders, durations_s).max(axis=1, keepdims=True)
        equal_s = replay(orders, [mean_s] * plan.pp)[:, np.newaxis]
    except PlanError:
        return None
    idle_s = np.maximum(end_s - model_s, 0.0)
    bubble_s = np.maximum(equal_s * num_ranks - model_s.sum(axis=1, keepdims=True), 0.0)
    all_s = idle_s.sum(axis=1, keepdims=True)
    share = np.divide(bubble_s, all_s, out=np.zeros_like(all_s), where=all_s > 0)
    return idle_s, np.minimum(share, 1.0)


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
    micro_batch: Ints
    """-1 where it was not marked."""
    chunk: Ints
    """-1 where it was not marked."""
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
            micro_batch=_or_none(spans, "micro_batch")[rows][order],
            chunk=_or_none(spans, "chunk")[rows][order],
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
        return np.bincount(cell, new_ns, minlength=size).reshape(self.shape) / NS_PER_S

    def behind_s(self) -> Floats:
        """Returns seconds from each rank's last pass to its optimizer in each step, 0 where one of them lacks."""
        kinds = [np.array([name in of for name in self.names], bool)[self.phase] for of in (MODEL, (OPTIMIZER,))]
        ends_ns, starts_ns = np.zeros((2, self.shape[0] * self.shape[1]), np.int64)
        np.maximum.at(ends_ns, self.cell[kinds[0]], self.end_ns[kinds[0]])
        np.maximum.at(starts_ns, self.cell[kinds[1]], self.start_ns[kinds[1]])
        return np.where(ends_ns > 0, np.maximum(starts_ns - ends_ns, 0), 0).reshape(self.shape) / NS_PER_S

    def exchange_s(self) -> float:
        """Computes how long two stages exchange results, by the rank that waits least between its passes.

        An end of the pipeline exchanges before its forward or its backward passes alone, so the longer median counts.
        """
        own = np.flatnonzero(np.array([name in MODEL for name in self.names], bool)[self.phase])
        inside = self.cell[own[1:]] == self.cell[own[:-1]]
        after, before = own[1:][inside], own[:-1][inside]
        wait_s = np.maximum(self.start_ns[after] - self.end_ns[before], 0) / NS_PER_S
        rank, kind = self.cell[after] % self.shape[1], self.phase[after]
        told = [[wait_s[(rank == one) & (kind == each)] for each in np.unique(kind)] for one in np.unique(rank)]
        return min((max(float(np.median(one)) for one in each if len(one)) for each in told), default=0.0)

    def passes(
        self, ranks: Sequence[int], stage: int, plan: Plan, num_micro_batches: int
    ) -> tuple[list[Pass], Floats] | None:
        """Returns the passes of one stage in the order its ranks ran them.

        If spans do not number micro-batches, their order is taken for the schedule's (`wattune.plans.schedule.passes`).

        Their seconds have shape (passes, steps, replicas). None unless every rank ran all passes once in every step,
        always in the same order.
        """
        is_pass = np.array([name in MODEL for name in self.names], bool)[self.phase]
        backward = np.array([name == MODEL[1] for name in self.names], bool)[self.phase]
        chosen = np.flatnonzero(is_pass & np.isin(self.cell % self.shape[1], ranks))
        trains = bool(backward[chosen].any())
        count = num_micro_batches * plan.vpp * (1 + trains)
        num_cells = self.shape[0] * len(ranks)
        # Spans of one rank and step together; they are in order of start already.
        chosen = chosen[np.argsort(self.cell[chosen], kind="stable")]
        if len(chosen) != count * num_cells or np.any(np.diff(self.cell[chosen].reshape(-1, count), axis=1)):
            return None
        kinds, micro_batches, chunks = (
            each[chosen].reshape(-1, count) for each in (backward, self.micro_batch, self.chunk)
        )
        if np.any(kinds != kinds[0]) or np.any(micro_batches != micro_batches[0]) or np.any(chunks != chunks[0]):
            return None
        found = [
            Pass(back, micro_batch, chunk if chunk >= 0 or plan.vpp > 1 else 0)
            for back, micro_batch, chunk in zip(
                kinds[0].tolist(), micro_batches[0].tolist(), chunks[0].tolist(), strict=True
            )
        ]
        expected = _expected(stage, plan, num_micro_batches, trains)
        if micro_batches.max() < 0 and [one.backward for one in found] == [one.backward for one in expected]:
            found = expected
        if set(found) != {
            Pass(back, micro_batch, chunk)
            for back in (False, True)[: 1 + trains]
            for micro_batch in range(num_micro_batches)
            for chunk in range(plan.vpp)
        }:
            return None
        each_s = (self.end_ns - self.start_ns)[chosen].reshape(self.shape[0], len(ranks), count) / NS_PER_S
        return found, np.moveaxis(each_s, 2, 0)


def _expected(stage: int, plan: Plan, num_micro_batches: int, trains: bool) -> list[Pass]:
    """Returns the passes of a stage in the schedule's order; empty if the schedule does not exist."""
    try:
        return passes(
            stage, num_stages=plan.pp, num_chunks=plan.vpp, num_micro_batches=num_micro_batches, trains=trains
        )
    except PlanError:
        return []


def _or_none(spans: pa.Table, name: str) -> Ints:
    """Returns an integer column with nulls as -1."""
    values: Ints = spans[name].fill_null(-1).to_numpy().astype(np.int64, copy=False)
    return values

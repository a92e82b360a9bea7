"""Gain of another placement of a plan, with its interval, and whether it pays for a restart."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from wattune.arrays import Floats, Ints
from wattune.cost.batch import batches
from wattune.cost.clock import LIMIT_EXPONENT
from wattune.cost.memory.defaults import default_coefficients
from wattune.cost.memory.predict import predict
from wattune.cost.out_of_memory import usable_bytes
from wattune.cost.step_time.pipeline import pipeline_s
from wattune.errors import PlanError
from wattune.placement.min_max import grouped, min_max
from wattune.placement.slots import SlotMap, SlotReading
from wattune.plans.axes import Plan
from wattune.plans.parallel import num_micro_batches, stage_layers
from wattune.plans.rules import violations
from wattune.trial import TrialSpec
from wattune.units import format_quantity

LEAST_PROBABILITY: Final = 0.95
"""P(gain > 0) from which a placement is recommended."""

MODEL_ERROR: Final = 0.005
"""Standard error of a gain beside the map's: 40 moves between two stages, less scatter (`placement_on_gpus.md`)."""

HYSTERESIS: Final = 2.0
"""Standard errors that a gain over an earlier choice of placement must have: else a plan would go back and forth."""


@dataclass(frozen=True, slots=True)
class Move:
    """One change of placement and its gain in steps a second, with 95 % interval, standard error and P(gain > 0)."""

    what: str
    plan: Plan
    needs: str
    """Reason that no run makes it; empty where `wattune run` does."""
    gain_frac: float
    low_frac: float
    high_frac: float
    error_frac: float
    probability: float


@dataclass(frozen=True, slots=True)
class PlacementAdvice:
    """The moves that a map offers to a plan, first those that a run can make, by gain; and the recommended one."""

    study: str
    spec: TrialSpec
    moves: Sequence[Move]
    chosen: Move | None
    why: str
    """The reason that it pays or that nothing does, with the number that would have to change."""
    restart_s: float


class Pipe:
    """A plan's pipeline on a map: draws of its layers' time, of what its ends take besides, and of every slot."""

    def __init__(
        self,
        spec: TrialSpec,
        work_s: Floats,
        slowness: Floats,
        backward_frac: float,
        optimizer_s: Floats | float = 0.0,
        strain: float = 0.0,
    ) -> None:
        """Takes draws of each stage's micro-batch, (draws, stages), and of each slot, (draws, slots).

        A layer's time is that of inner stages, of two stages that of the first: its embedding takes next to nothing.
        The optimizer's seconds, of each stage, go with its layers. `strain` is the power above idle of a device that
        computes all the time, without a limit, over what its limit leaves: above 1 the slowest stage is slowed most.
        """
        plan, world_size = spec.plan, spec.cluster.world_size
        self.spec, self.slowness, self.backward_frac, self.strain = spec, slowness, backward_frac, strain
        self.optimizer_s, self.measured_s = np.asarray(optimizer_s), work_s
        self.rest_s = 0.0  # of a step beside passes and optimizer: it stays as it is
        self.layers = np.array([[len(chunk) for chunk in stage] for stage in stage_layers(spec.model, plan)]).T
        self.micro_batches = num_micro_batches(plan, world_size, spec.workload.global_batch_size)
        self.order = np.array(range(world_size) if isinstance(plan.rank_order, str) else plan.rank_order)
        work_s = work_s / self._slowed(work_s[:, None] * self._of_ranks(self.order)).mean(axis=1)
        totals, inner = self.layers.sum(axis=0), slice(1, -1) if plan.pp > 2 else slice(0, 1)
        self.layer_s = (work_s[:, inner] / totals[inner]).mean(axis=1)
        self.ends_s = work_s - self.layer_s[:, None] * totals

    def _of_ranks(self, order: Ints) -> Floats:
        """Slowness of each stage, (draws, replicas, stages): that of its slowest slot."""
        plan = self.spec.plan
        of_rank = self.slowness[:, order].reshape(len(self.slowness), plan.pp, -1, plan.cp * plan.tp).max(-1)
        return np.moveaxis(of_rank, 1, 2)

    def _slowed(self, stages_s: Floats) -> Floats:
        """Computes how much longer the limit makes stages, the last axis: each is busy for its share of a round."""
        share = stages_s / stages_s.max(-1, keepdims=True)
        return np.asarray(np.maximum(1.0, share * self.strain) ** (1 / LIMIT_EXPONENT))

    def stages_s(self, layers: Ints, order: Ints) -> Floats:
        """Seconds of a micro-batch, (draws, replicas, chunks, stages)."""
        chunk_s = self.layer_s[:, None, None] * layers
        chunk_s[:, 0, :-1] += self.ends_s[:, :-1]
        chunk_s[:, -1, -1] += self.ends_s[:, -1]
        free_s = chunk_s[:, None] * self._of_ranks(order)[:, :, None, :]
        totals_s = longer_s = free_s.sum(2)
        for _ in range(8 if self.strain > 1.0 else 0):  # shrinks what is missing to a third each time
            longer_s = totals_s * self._slowed(longer_s)
        return np.asarray(free_s * (longer_s / totals_s)[:, :, None])

    def step_s(self, layers: Ints | None = None, order: Ints | None = None) -> Floats:
        """Seconds of every draw's step: sum t_i + (m - 1) max t_i; of few micro-batches, or chunks, the schedule."""
        layers, order = self.layers if layers is None else layers, self.order if order is None else order
        stages_s = self.stages_s(layers, order)
        if self.spec.plan.vpp == 1 and self.micro_batches >= 16 * self.spec.plan.pp:  # else the ends count: a layer
            passes_s = stages_s.sum((2, 3)) + (self.micro_batches - 1) * stages_s.max((2, 3))
        else:
            flat, b = stages_s.reshape(-1, *stages_s.shape[2:]), self.backward_frac
            count = np.full(len(flat), self.micro_batches)
            passes_s = pipeline_s(flat * (1 - b), flat * b, count, trains=b > 0).reshape(stages_s.shape[:2])
        optimizer_s = (self.optimizer_s * layers.sum(axis=0) / self.layers.sum(axis=0)).max()
        return np.asarray(passes_s.max(-1) + self.rest_s + optimizer_s)

    def choices(self) -> dict[str, tuple[Ints, Ints]]:
        """Finds the best layers and orders on the measured map: by exchanges alone, by layers alone, and by both."""
        cluster, pp, chunks = self.spec.cluster, self.spec.plan.pp, np.arange(self.spec.plan.vpp)[:, None]
        slowness, size, totals = self.slowness[0], cluster.world_size // pp, self.layers.sum(axis=0)
        fixed = float(self.layer_s[0]), self.ends_s[0], int(totals.sum())
        now = slowness[self.order].reshape(pp, size).max(axis=1)
        found = {"swap ranks": (totals, self.order)}
        found["split layers"] = min_max(now, *fixed, blocks=np.arange(pp))[1], self.order
        groups = grouped(slowness, size, min(cluster.domain, cluster.devices_per_node), cluster.devices_per_node)
        if groups is not None:
            of_group = slowness[groups[0]].max(axis=1)
            for what, counts in (("swap ranks", totals), ("swap ranks, split layers", None)):
                places, units, _ = min_max(of_group, *fixed, blocks=groups[1], counts=counts)
                found[what] = units, groups[0][places].ravel()
        for what, (units, order) in found.items():
            split = units // len(chunks) + (chunks < units % len(chunks))
            found[what] = (self.layers if (units == totals).all() else split), order
        return found

    def moves(self) -> list[Move]:
        """Returns what `wattune run` can do and gains on the measured map, and what needs more than a plan."""
        now_s, plan, nodes = self.step_s(), self.spec.plan, self.spec.cluster.num_nodes
        tried, found = {plan}, list[Move]()
        strange = np.exp(MODEL_ERROR * np.random.default_rng(0).standard_normal(len(now_s) - 1))

        def add(what: str, other_s: Floats, moved: Plan = plan, needs: str = "") -> None:
            gain, maps = now_s / other_s, (now_s / other_s)[1:] * strange - 1.0
            low, high = np.quantile(maps, [0.025, 0.975]).tolist()
            error, probability = float(maps.std()), float((maps > 0).mean())
            found.append(Move(what, moved, needs, float(gain[0]) - 1.0, low, high, error, probability))

        for what, (layers, order) in self.choices().items():
            layout = () if (layers == layers.flat[0]).all() else tuple(layers.ravel().tolist())
            slots = "topology" if (order == np.arange(len(order))).all() else tuple(order.tolist())
            moved = replace(plan, layout=layout, rank_order=slots)
            if moved not in tried and not list(violations(replace(self.spec, plan=moved))):
                add(what, self.step_s(layers, order), moved)
            tried.add(moved)
        stages_s, rest_s = self.stages_s(self.layers, self.order), self.rest_s + float(self.optimizer_s.max())
        # Time goes with the watts above idle to the power of -1 / LIMIT_EXPONENT; their sum over stages stays.
        equal_s = (stages_s.sum(2) ** LIMIT_EXPONENT).mean((1, 2)) ** (1 / LIMIT_EXPONENT)
        needs = "nothing runs it: one limit is set for all devices; at most, where limits slow them"
        add("shift power", (plan.pp + self.micro_batches - 1) * equal_s + rest_s, needs=needs)
        number, longest_s = stages_s.shape[1], stages_s.max((2, 3))
        if number > 1 and plan.vpp == 1:
            total = self.micro_batches * number
            counts = min_max(longest_s[0], 1.0, np.zeros(number), total, blocks=np.arange(number))[1]
            uneven_s = (stages_s.sum((2, 3)) + (counts - 1) * longest_s).max(-1) + rest_s
            needs = f"nothing runs it: {counts.tolist()} micro-batches a replica, and engines give all alike"
            add("uneven micro-batches", uneven_s, needs=needs)
        if nodes > 1:
            slow = np.sort(self.slowness.reshape(len(now_s), nodes, -1).max(-1), axis=1)
            aside_s = now_s * slow[:, -2] / slow[:, -1] * nodes / (nodes - 1)
            add("set the slowest node aside", aside_s, needs=f"needs a study of {nodes - 1} nodes; at most")
        return found


def place_plan(
    spec: TrialSpec,
    slots: SlotMap,
    own: Sequence[SlotReading],
    passes: tuple[float, Floats | float, float],
    times_s: tuple[float, float, float],
    peak_bytes: float | None = None,
) -> PlacementAdvice:
    """Finds the exact best placements of a measured plan on a map, and recommends one that surely pays for a restart.

    `own` are readings of one run of the plan, by slot, `passes` what `Pipe` takes after them. `times_s` are step,
    restart and horizon. `peak_bytes`, else its estimate, is what runs took: a layout that needs more is none.
    Raises `PlanError` where the map is of other machines or cannot compare the plan's slots, or there is one stage.
    """
    (step_time_s, restart_s, horizon_s), rows = times_s, slots.rows
    works, devices = sorted({one.work for one in own}), [one.device for one in own]
    if spec.plan.pp < 2:
        raise PlanError(f"{spec.label}: a plan of one stage has no layers to place; choose one with pp of 2 or more")
    if strange := ({*devices} - {*slots.devices}) or ({*works} - {*slots.works}):
        lacking = "/".join(map(str, min(strange)))
        raise PlanError(f"the map is of other machines or plans: it has no {lacking}; measure both together")
    where = [slots.devices.index(one) for one in devices]
    if len({rows[one]["group"] for one in where}) > 1 or not slots.degrees:
        raise PlanError("; ".join(one for one in slots.notes if "look alike" in one or "twice" in one))
    of_stage = slots.work_s[:, [slots.works.index(one) for one in works]]
    pipe = Pipe(spec, of_stage, slots.slowness[:, where], *passes)
    pipe.rest_s = step_time_s - float(pipe.step_s()[0])
    moves, least = _in_memory(spec, pipe.moves(), peak_bytes), restart_s / horizon_s
    # What a run can do first, by gain; the least change first where gains are alike.
    moves.sort(key=lambda one: (one.needs != "", -round(one.gain_frac, 3)))
    ours = [one for one in moves if one.plan != spec.plan]
    errors = HYSTERESIS if spec.plan.layout or spec.plan.rank_order != "topology" else 0.0
    sure = [one for one in ours if one.probability >= LEAST_PROBABILITY and one.gain_frac > errors * one.error_frac]
    chosen = next((one for one in sure if not one.needs and one.gain_frac > least), None)
    if sure:
        best = chosen or sure[0]
        lost, back = (format_quantity("restart_s", one) for one in (restart_s, restart_s / best.gain_frac))
        why, but = f"{best.what}: it pays for a restart of {lost} after {back}", f"but {best.needs}"
        why = why if chosen else f"nothing pays here: {why}, {but if best.needs else 'beyond the horizon'}"
    else:
        slowest = int(pipe.slowness[0].argmax())
        slower, half = (100 * rows[where[slowest]][key] for key in ("slower_frac", "slower_half_frac"))
        missing = _missing(pipe, slowest, max([least, *(HYSTERESIS * one.error_frac for one in ours)]))
        why = f"device {devices[slowest][0]}/{devices[slowest][1]} would have to be {missing} slower than the others"
        why = f"nothing pays here: {why}; it is {slower:.1f} % ± {half:.1f}"
    return PlacementAdvice("", spec, moves, chosen, why, restart_s)


def _in_memory(spec: TrialSpec, moves: Sequence[Move], peak_bytes: float | None) -> list[Move]:
    """Says of layouts that do not fit what they need: the plan's peak times the ratio of estimates."""
    usable, specs = usable_bytes(spec.cluster.sensed_device), [spec, *(replace(spec, plan=one.plan) for one in moves)]
    peaks, coefficients = np.zeros(len(specs)), default_coefficients(spec.cluster.sensed_device.name)
    for rows, batch in batches(specs):
        peaks[rows] = predict(batch, coefficients).peak_bytes
    needed = (peak_bytes or peaks[0]) / peaks[0] * peaks[1:]
    words = [format_quantity("memory_peak_bytes", one) for one in (usable, *needed.tolist())]
    return [
        replace(one, needs=f"needs {text} of a device's memory; it leaves {words[0]}")
        if need > usable and one.plan.layout != spec.plan.layout
        else one
        for one, need, text in zip(moves, needed, words[1:], strict=True)
    ]


def _missing(pipe: Pipe, slowest: int, least: float) -> str:
    """Finds by bisection how slow a slot would have to be for a gain that counts."""
    beside = pipe.backward_frac, pipe.optimizer_s, pipe.strain
    there = Pipe(pipe.spec, pipe.measured_s[:1], pipe.slowness[:1].copy(), *beside)
    there.rest_s, others, low, high = pipe.rest_s, float(np.delete(pipe.slowness[0], slowest).mean()), 0.0, 1.0

    def gains(slower: float) -> bool:
        there.slowness[0, slowest] = others * (1.0 + slower)
        return any(float((there.step_s() / there.step_s(*one))[0]) - 1.0 > least for one in there.choices().values())

    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if gains(middle) else (middle, high)
    return f"{100 * high:.1f} %" if gains(high) else "more than 100 %"

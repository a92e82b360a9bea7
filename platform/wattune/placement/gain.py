"""Gain of another placement of a plan, with its interval, and whether it pays for a restart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from wattune.arrays import Floats, Ints
from wattune.cost.batch import batches
from wattune.cost.clock import LIMIT_EXPONENT
from wattune.cost.defaults import memory_coefficients
from wattune.cost.memory.predict import predict
from wattune.cost.out_of_memory import usable_bytes
from wattune.cost.step_time.pipeline import STEADY_ROUNDS, replay_s
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

MODEL_ERROR: Final = 0.004
"""Standard error of a gain beside the map's: it holds 19 of 20 moves between two stages (`placement_on_gpus.md`)."""

LONG_ERROR, LIMIT_SHARE_ERROR = 0.25, 0.3
"""That of what the place of the slowest of more than two stages makes of a gain (0.17 on two, up to 0.17 for one layer
moved on four, beyond assumed), and of what the power limit does (`placement_on_gpus.md`)."""

RISES_S, FALLS_S = 0.012, 0.03
"""Times in which the clock of a device at its power limit rises in a wait and falls in a pass: passes of two H100 and
of three pairs of H200 (`placement_on_gpus.md`)."""

MOST_STRAIN: Final = 2.0
"""End of the search for a strain: matrix units that work all the time would draw 1.6 to 1.8 on H100 and H200."""

MAPS: Final = range(9)
"""The map and its draws on which the best placements are found again. Our choice: they tell 0 where all agree."""

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


class Regulated:
    """Passes of a device whose power without a limit strains it: its clock rises in waits, and falls while it works."""

    def __init__(self, strain: float) -> None:
        self.strain, self.free, self.busy_s, self.full_s = strain, np.ones(()), np.zeros(()), np.zeros(())
        self.later_s: tuple[Any, Any] = 0.0, 0.0  # of all passes behind the first: what they take, and at full clock
        self.has_begun = False

    def __call__(self, lasts_s: Floats, wait_s: Floats) -> Floats:
        """Computes how long a pass takes after a wait that lasts so long at the full clock."""
        longer = max(self.strain, 1.0) ** (1 / LIMIT_EXPONENT)
        self.free = 1.0 - (1.0 - self.free) * np.exp(-wait_s / RISES_S)
        full_s = np.zeros(())
        for _ in range(8 if longer > 1.0 else 0):  # each leaves at most 0.28 of what the one before was off by
            full_s = self.free * FALLS_S * -np.expm1(-(longer * lasts_s - (longer - 1.0) * full_s) / FALLS_S)
        takes_s: Floats = longer * lasts_s - (longer - 1.0) * full_s
        self.free = self.free * np.exp(-takes_s / FALLS_S)
        self.busy_s, self.full_s = self.busy_s + takes_s, self.full_s + full_s
        if self.has_begun:
            self.later_s = self.later_s[0] + takes_s, self.later_s[1] + lasts_s
        self.has_begun = True
        return takes_s


def strain_of_waiting(drawn: float, stages: Sequence[int], pipe: Callable[[float], "Pipe"]) -> float:
    """Finds the strain of devices that wait from what they draw while they work, over what the limit leaves above idle.

    In passes longer than `FALLS_S` the limit slows them too, so they draw less. `pipe` has their stages.
    """
    strain = drawn
    for _ in range(8 if drawn > 1.0 else 0):
        paces = [pipe(strain).paces[one] for one in stages]
        full_frac = float(np.median([(one.full_s / one.busy_s).mean() for one in paces]))
        strain = min(1.0 + (drawn - 1.0) / full_frac, MOST_STRAIN)
    return strain


class Pipe:
    """A plan's pipeline on a map: draws of its layers' time, of what its ends take besides, and of every slot."""

    def __init__(
        self,
        spec: TrialSpec,
        work_s: Floats,
        slowness: Floats,
        backward_frac: Floats | float,
        optimizer_s: Floats | float = 0.0,
        strain: Floats | float = 0.0,
        exchange_s: float = 0.0,
        behind_s: float = 0.0,
    ) -> None:
        """Takes draws of each stage's micro-batch, (draws, stages), and of each slot, (draws, slots).

        A layer's time is that of inner stages, of two stages that of the first: its embedding takes next to nothing.
        The optimizer's seconds, of each stage, go with its layers, one of which takes what the least has. `strain` is
        that of `Regulated`, of each slot: up to 1 no limit slows it. `exchange_s` passes in each exchange with a
        neighbour: inner stages have two a micro-batch. `backward_frac`, of each stage or of all, is the share of
        backward passes. `behind_s` lie between the last pass of the first stage, which ends last, and its optimizer:
        they go with it.
        """
        plan, world_size = spec.plan, spec.cluster.world_size
        self.spec, self.slowness, self.backward_frac = spec, slowness, np.broadcast_to(backward_frac, plan.pp)
        self.strain = np.broadcast_to(strain, world_size)
        self.optimizer_s = np.broadcast_to(np.asarray(optimizer_s, float), plan.pp)
        self.measured_s, self.exchange_s = work_s, exchange_s
        self.exchanges_s = exchange_s * np.array([1] + [2] * (plan.pp - 2) + [1])
        self.behind_s = behind_s
        self.rest_s = 0.0  # of a step beside all that: it stays as it is
        self.layers = np.array([[len(chunk) for chunk in stage] for stage in stage_layers(spec.model, plan)]).T
        self.micro_batches = num_micro_batches(plan, world_size, spec.workload.global_batch_size)
        self.order = np.array(range(world_size) if isinstance(plan.rank_order, str) else plan.rank_order)
        own_s, of_ranks = np.broadcast_to(work_s, (len(slowness), plan.pp)), self._of_ranks(self.order)
        for _ in range(4 if self.strain.max() > 1.0 else 0):  # until stages take under the limit what was measured
            run_s = self._run((own_s[:, None] * of_ranks)[:, :, None], self.order)[1]
            own_s = own_s * (work_s[:, None] * of_ranks / run_s).mean(axis=1)
        self.update_s = float((self.optimizer_s / self.layers.sum(axis=0)).min())
        totals, inner = self.layers.sum(axis=0), slice(1, -1) if plan.pp > 2 else slice(0, 1)
        self.layer_s = (own_s[:, inner] / totals[inner]).mean(axis=1)
        self.ends_s = own_s - self.layer_s[:, None] * totals

    def _of_ranks(self, order: Ints) -> Floats:
        """Slowness of each stage, (draws, replicas, stages): that of its slowest slot."""
        plan = self.spec.plan
        of_rank = self.slowness[:, order].reshape(len(self.slowness), plan.pp, -1, plan.cp * plan.tp).max(-1)
        return np.moveaxis(of_rank, 1, 2)

    def stages_s(self, layers: Ints, order: Ints) -> Floats:
        """Seconds of a micro-batch without a limit, (draws, replicas, chunks, stages)."""
        chunk_s = self.layer_s[:, None, None] * layers
        chunk_s[:, 0, :-1] += self.ends_s[:, :-1]
        chunk_s[:, -1, -1] += self.ends_s[:, -1]
        return np.asarray(chunk_s[:, None] * self._of_ranks(order)[:, :, None, :])

    def _run(self, stages_s: Floats, order: Ints) -> tuple[Floats, Floats]:
        """Seconds of all passes, and of a micro-batch on each stage: sum t_i + (m - 1) max t_i, or the schedule."""
        slots = order.reshape(self.spec.plan.pp, -1)
        slowest = np.take_along_axis(slots, self.slowness[0, slots].argmax(axis=1)[:, None], axis=1)
        (pp, vpp), m, b = (self.spec.plan.pp, self.spec.plan.vpp), self.micro_batches, self.backward_frac
        paces = [Regulated(one) for one in self.strain[slowest[:, 0]].tolist()] if self.strain.max() > 1.0 else []
        self.paces = paces
        each_s = stages_s.sum(2)
        if not paces and vpp == 1 and m >= 16 * pp:  # else its ends count: a layer
            ends_s = each_s.sum(-1) + 2 * (pp - 1) * self.exchange_s
            return ends_s + (m - 1) * (each_s + self.exchanges_s).max(-1), each_s
        few, flat = min(m, STEADY_ROUNDS * pp), stages_s.reshape(-1, vpp, pp)
        passes = flat * (1 - b), flat * b, few
        passes_s = replay_s(*passes, trains=bool(b.max() > 0), paces=paces, exchange_s=self.exchange_s).reshape(
            each_s.shape[:2]
        )
        if paces:  # a measured micro-batch has its first pass as its others, which follow shorter waits
            each_s = each_s * np.stack([one.later_s[0] / one.later_s[1] for one in paces], -1).reshape(each_s.shape)
        return passes_s + (m - few) * (each_s + self.exchanges_s).max(-1), each_s

    def step_s(self, layers: Ints | None = None, order: Ints | None = None) -> Floats:
        """Seconds of every draw's step."""
        layers, order = self.layers if layers is None else layers, self.order if order is None else order
        updates_s = self.optimizer_s + self.update_s * (layers - self.layers).sum(axis=0)
        tail_s = self.rest_s + self.behind_s * updates_s[0] / max(self.optimizer_s[0], 1e-12) + updates_s.max()
        return np.asarray(self._run(self.stages_s(layers, order), order)[0].max(-1) + tail_s)

    def first(self, *beside: Any, maps: slice = slice(1)) -> "Pipe":
        """Makes a pipe of the measured map alone, or of others."""
        return Pipe(self.spec, self.measured_s[maps], self.slowness[maps].copy(), self.backward_frac, *beside)

    def luck(self) -> dict[str, float]:
        """Finds what each choice gains by the map's scatter: a bootstrap, draws for the map, and it for the truth."""
        beside = self.optimizer_s, self.strain, self.exchange_s, self.behind_s
        pipes = [self.first(*beside, maps=slice(one, one + 1)) for one in MAPS[: len(self.slowness)]]
        bests = [one.choices() for one in pipes]
        found = dict.fromkeys(bests[0], 0.0)
        for there, best in zip(pipes[1:], bests[1:], strict=True):
            for what, ours in bests[0].items():
                won, lost = (np.log(one.step_s(*ours) / one.step_s(*best[what])) for one in (there, pipes[0]))
                found[what] += float((won - lost)[0]) / len(bests[1:])
        return found

    def unsure(self, layers: Ints, order: Ints) -> float:
        """Standard error of a gain beside the map's: shares of what the limit and many stages' ends do to it."""
        gains = []
        for pipe in (self.first(0.0, self.strain), self.first()):
            runs = [pipe._run(pipe.stages_s(*one), one[1]) for one in ((self.layers, self.order), (layers, order))]
            ends_s = [(ends.max(), (s.sum(-1) + (self.micro_batches - 1) * s.max(-1)).max()) for ends, s in runs]
            gains.append(-np.diff(ends_s, axis=0)[0] / float(self.step_s()[0]))
        of_ends = LONG_ERROR * (gains[0][0] - gains[0][1]) * (self.spec.plan.pp > 2)
        return float(np.linalg.norm([MODEL_ERROR, of_ends, LIMIT_SHARE_ERROR * (gains[0][0] - gains[1][0])]))

    def choices(self) -> dict[str, tuple[Ints, Ints]]:
        """Finds the best layers and orders on the measured map: by exchanges alone, by layers alone, and by both.

        Where a large stage costs less of the step early, the best such swap of two stages' layers is a choice, too.
        """
        cluster, pp, chunks = self.spec.cluster, self.spec.plan.pp, np.arange(self.spec.plan.vpp)[:, None]
        slowness, size, totals = self.slowness[0], cluster.world_size // pp, self.layers.sum(axis=0)
        fixed = float(self.layer_s[0]), self.ends_s[0] + self.exchanges_s, int(totals.sum())
        now = slowness[self.order].reshape(pp, size).max(axis=1)
        found = {"swap ranks": (totals, self.order)}
        found["split layers"] = min_max(now, *fixed, blocks=np.arange(pp))[1], self.order
        groups = grouped(slowness, size, min(cluster.domain, cluster.devices_per_node), cluster.devices_per_node)
        if groups is not None:
            of_group = slowness[groups[0]].max(axis=1)
            for what, counts in (("swap ranks", totals), ("swap ranks, split layers", None)):
                places, units, _ = min_max(of_group, *fixed, blocks=groups[1], counts=counts)
                found[what] = units, groups[0][places].ravel()
        one_map = self.first(self.optimizer_s, self.strain, self.exchange_s, self.behind_s)
        for what, (units, order) in list(found.items()):
            later = [(i, j) for j in range(pp) for i in range(j) if "layers" in what and units[i] < units[j]]
            swapped = [units[[{i: j, j: i}.get(stage, stage) for stage in range(pp)]] for i, j in later]
            split = [one // len(chunks) + (chunks < one % len(chunks)) for one in (units, *swapped)]
            found[what] = (self.layers if (units == totals).all() else split[0]), order
            early = [found[what], *((one, order) for one in split[1:])]
            found[f"{what}, large ones early"] = min(early, key=lambda one: float(one_map.step_s(*one)[0]))
        return found

    def moves(self) -> list[Move]:
        """Returns what `wattune run` can do and gains on the measured map, and what needs more than a plan."""
        now_s, plan, nodes = self.step_s(), self.spec.plan, self.spec.cluster.num_nodes
        tried, found = {plan}, list[Move]()
        strange, lucks = np.random.default_rng(0).standard_normal(len(now_s) - 1), self.luck()

        def add(what: str, other_s: Floats, moved: Plan = plan, needs: str = "", unsure: float = MODEL_ERROR) -> None:
            gain = now_s / other_s * np.exp(-lucks.get(what, 0.0))
            maps = gain[1:] * np.exp(unsure * strange) - 1.0
            low, high = np.quantile(maps, [0.025, 0.975]).tolist()
            error, probability = float(maps.std()), float((maps > 0).mean())
            found.append(Move(what, moved, needs, float(gain[0]) - 1.0, low, high, error, probability))

        for what, (layers, order) in self.choices().items():
            layout = () if (layers == layers.flat[0]).all() else tuple(layers.ravel().tolist())
            slots = "topology" if (order == np.arange(len(order))).all() else tuple(order.tolist())
            moved = replace(plan, layout=layout, rank_order=slots)
            if moved not in tried and not list(violations(replace(self.spec, plan=moved))):
                add(what, self.step_s(layers, order), moved, unsure=self.unsure(layers, order))
            tried.add(moved)
        stages_s = self._run(self.stages_s(self.layers, self.order), self.order)[1]
        rest_s = self.rest_s + self.behind_s + float(self.optimizer_s.max())
        # Time goes with the watts above idle to the power of -1 / LIMIT_EXPONENT; their sum over stages stays.
        equal_s = (stages_s**LIMIT_EXPONENT).mean((1, 2)) ** (1 / LIMIT_EXPONENT)
        needs = "nothing runs it: one limit is set for all devices; at most, where limits slow them"
        add("shift power", (plan.pp + self.micro_batches - 1) * equal_s + rest_s, needs=needs)
        number, longest_s = stages_s.shape[1], stages_s.max(2)
        if number > 1 and plan.vpp == 1:
            total = self.micro_batches * number
            counts = min_max(longest_s[0], 1.0, np.zeros(number), total, blocks=np.arange(number))[1]
            uneven_s = (stages_s.sum(2) + (counts - 1) * longest_s).max(-1) + rest_s
            needs = f"nothing runs it: {counts.tolist()} micro-batches a replica, and engines give all alike"
            add("uneven micro-batches", uneven_s, needs=needs)
        if nodes > 1:
            slow = np.sort(self.slowness.reshape(len(now_s), nodes, -1).max(-1), axis=1)
            aside_s = now_s * slow[:, -2] / slow[:, -1] * nodes / (nodes - 1)
            add(
                "set the slowest node aside",
                aside_s,
                needs=f"needs a study of {nodes - 1} nodes, without {{}}; at most",
            )
        return found


def place_plan(
    spec: TrialSpec,
    slots: SlotMap,
    own: Sequence[SlotReading],
    beside: tuple[Floats | float, Floats | float, Floats | float, float, float],
    times_s: tuple[float, float, float],
    peak_bytes: float | None = None,
) -> PlacementAdvice:
    """Finds the exact best placements of a measured plan on a map, and recommends one that surely pays for a restart.

    `own` are readings of one run of the plan, by slot, `beside` what `Pipe` takes after them, for the strain what each
    slot's device draws while it works: NaN where it never waits, 0 where no limit slows it. `times_s` are step,
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
    drawn, slowness = np.broadcast_to(beside[2], len(own)), slots.slowness[:, where]
    waiting = sorted({one.work[1] for one, ratio in zip(own, drawn, strict=True) if ratio > 0})

    def pipe_of(one: float, maps: slice = slice(1)) -> Pipe:
        return Pipe(spec, of_stage[maps], slowness[maps], *beside[:2], np.where(drawn == 0, 0.0, one), *beside[3:])

    strain = strain_of_waiting(float(np.median(drawn[drawn > 0])), waiting, pipe_of) if waiting else 0.0
    pipe = pipe_of(strain, slice(None))
    pipe.rest_s = step_time_s - float(pipe.step_s()[0])
    slowest, least = int(pipe.slowness[0].argmax()), restart_s / horizon_s
    moves = [replace(one, needs=one.needs.format(devices[slowest][0])) for one in pipe.moves()]
    moves = _in_memory(spec, moves, peak_bytes)
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
        slower, half = (100 * rows[where[slowest]][key] for key in ("slower_frac", "slower_half_frac"))
        missing = _missing(pipe, slowest, max([least, *(HYSTERESIS * one.error_frac for one in ours)]))
        why = f"device {devices[slowest][0]}/{devices[slowest][1]} would have to be {missing} slower than the others"
        why = f"nothing pays here: {why}; it is {slower:.1f} % ± {half:.1f}"
    return PlacementAdvice("", spec, moves, chosen, why, restart_s)


def _in_memory(spec: TrialSpec, moves: list[Move], peak_bytes: float | None) -> list[Move]:
    """Says of layouts that do not fit what they need: the plan's peak times the ratio of estimates."""
    usable, specs = usable_bytes(spec.cluster.sensed_device), [spec, *(replace(spec, plan=one.plan) for one in moves)]
    peaks, coefficients = np.zeros(len(specs)), memory_coefficients(spec.cluster.sensed_device.name)
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
    there = pipe.first(pipe.optimizer_s, pipe.strain, pipe.exchange_s, pipe.behind_s)
    there.rest_s, others, low, high = pipe.rest_s, float(np.delete(pipe.slowness[0], slowest).mean()), 0.0, 1.0

    def gains(slower: float) -> bool:
        there.slowness[0, slowest] = others * (1.0 + slower)
        return any(float((there.step_s() / there.step_s(*one))[0]) - 1.0 > least for one in there.choices().values())

    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if gains(middle) else (middle, high)
    return f"{100 * high:.1f} %" if gains(high) else "more than 100 %"

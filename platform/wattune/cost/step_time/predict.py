"""Step time of candidates: passes of every stage, their pipeline, and what follows the last pass."""

from functools import reduce
from typing import Final

import numpy as np

from wattune.arrays import Floats, Ints
from wattune.cost.batch import Batch
from wattune.cost.clock import LIMIT_ERROR, clock_frac, dynamic_w
from wattune.cost.coefficients import PowerCoefficients, StepTimeCoefficients
from wattune.cost.flops import held_weights
from wattune.cost.memory.torch_engine import offloaded_bytes
from wattune.cost.step_time.facts import FACTS, EngineFacts
from wattune.cost.step_time.links import Links, host_bytes_per_s
from wattune.cost.step_time.pipeline import bubble_ratio, pipeline_s
from wattune.cost.step_time.replica import Weights, beside
from wattune.cost.step_time.traffic import LayerTraffic, expert_imbalance, layer_traffic
from wattune.cost.step_time.work import KernelShapes, Machine, PassTimes, ends_work, layer_work
from wattune.cost.tables import Activity, StepTime

PARTS: Final = (
    "compute_s",
    "bubble_s",
    *(f"exposed_comm_{kind}_s" for kind in ("tp", "pp", "cp", "dp", "ep")),
    "straggler_s",
    "other_s",
)
"""Names of the parts, those of the measured decomposition with `_s` for `_frac`."""

FP8_ERROR_FRAC: Final = 0.35
"""Least half width of the 95 % interval of a step in fp8. Of 19 runs on one H200 one is further from its prediction; it
waits for its host (`benchmarks/data/dense_llama_1b_h200.parquet`). No plan of several devices was measured."""

TP_WAITS_FRAC: Final = 0.02
"""Further waits of tensor parallel ranks, over compute: they meet in every layer. With micro-batches of two and four, 2
to 6 % of such steps are waits and gaps, of others 0.4 to 1 % (`benchmarks/data/dense_llama*`, `moe_ep_h200x2`)."""

SLOW_HOST, FAST_HOST = 2.0, 0.75
"""Times that a host may take of its predicted time: the steps of 62 runs on one H200 that waited for it took 0.75 to
2.08 times the predicted, by the day (`benchmarks/data/dense_*_1b_h200*.parquet`)."""


def predict(batch: Batch, coefficients: StepTimeCoefficients, power: PowerCoefficients) -> StepTime:
    """Predicts the step time of every candidate.

    Returns times in the order of the batch. Stages of `activity` that a candidate does not have are 0. Raises
    `PlanError` where the catalog does not have the peaks of the device.
    """
    model = StepModel(batch, coefficients, power)
    parts = {name: np.empty(len(batch)) for name in PARTS}
    stages = {name: np.zeros((len(batch), int(batch.pp.max()))) for name in Activity.__slots__}
    slow_host_frac, fast_host_frac = np.empty((2, len(batch)))
    pipeline = batch.pp * (batch.vpp.max() + 1) + batch.vpp
    for key in np.unique(pipeline).tolist():
        rows = np.flatnonzero(pipeline == key)
        slow_host_frac[rows], fast_host_frac[rows] = model.predict(rows, parts, stages)
    held = np.where(stages["held_frac"] > 0, stages["held_frac"], 1.0).min(axis=1)
    error_frac = np.hypot(_error_frac(batch, coefficients), LIMIT_ERROR * np.log(held))
    return StepTime(
        parts_s=parts,
        activity=Activity(**stages),
        error_frac=np.maximum(error_frac, fast_host_frac),
        longer_frac=np.maximum(error_frac, slow_host_frac),
    )


def _error_frac(batch: Batch, coefficients: StepTimeCoefficients) -> float:
    model = batch.model
    family = StepTimeCoefficients.family(batch.engine, model.name, model.num_layers, batch.cluster.world_size)
    return max(coefficients.error_frac_of(family), FP8_ERROR_FRAC if batch.dtype == "fp8" else 0.0)


class StepModel:
    """A batch with everything that does not depend on the pipeline."""

    def __init__(self, batch: Batch, coefficients: StepTimeCoefficients, power: PowerCoefficients) -> None:
        self.batch, self.power = batch, power
        self.coefficients = coefficients = coefficients.with_host(batch.cluster.host_speed)
        self.facts: EngineFacts = FACTS[coefficients.software or batch.engine]
        self.machine = Machine.of(batch.device, batch.dtype, coefficients)
        self.links = Links.of(batch.cluster, coefficients.link, rank_order=batch.rank_order)
        self.trains = batch.workload.mode != "prefill"
        self.updates = 1.0 if batch.workload.mode == "pretrain" else 0.0
        """Share of the weights that has gradients; adapters are too few to count."""
        self.offloaded_bytes = offloaded_bytes(batch) if batch.offload.any() else np.zeros(len(batch))
        """Of each layer and micro-batch, copied to host memory and back."""
        self._shapes()

    def _shapes(self) -> None:
        """Predicts work and traffic of distinct shapes, and finds the shape of every candidate (`shape_of`)."""
        batch = self.batch
        columns = (
            batch.tp, batch.cp, batch.ep, batch.etp, batch.micro_batch_size, batch.recompute,
            (batch.sharding == 3) & (batch.dp * batch.cp > 1), batch.loss_chunks > 1, batch.overlap == 3,
            batch.vocabulary,
        )  # fmt: skip
        key = np.zeros(len(batch), np.int64)
        for column in columns:
            _, codes = np.unique(column, return_inverse=True)
            key = key * (codes.max() + 1) + codes
        _, first, self.shape_of = np.unique(key, return_index=True, return_inverse=True)
        tp, cp, ep, etp, _, recompute, gathers, loss_again, overlaps_tp, vocabulary = (
            np.asarray(column[first], float) for column in columns
        )
        tokens = batch.local_tokens[first].astype(float)
        shapes = KernelShapes(
            tp=tp, cp=cp, ep=ep, etp=etp, tokens=tokens, recompute=recompute, gathers=gathers, loss_again=loss_again
        )
        self.layer = layer_work(self.machine, batch.model, batch.workload, shapes, self.facts)
        self.first, self.last = ends_work(
            self.machine, vocabulary, batch.model.hidden_size, batch.workload, shapes, self.facts
        )
        products_s = self.layer.forward.matrix_s
        self.traffic = reduce(
            LayerTraffic.__add__,
            (
                layer_traffic(self.machine, self.links, kind, shapes, self.facts, products_s, overlaps_tp) * share
                for kind, share in batch.model.shares
            ),
        )
        self.imbalance = expert_imbalance(batch.model, batch.workload, ep)

    def predict(self, rows: Ints, parts: dict[str, Floats], stages: dict[str, Floats]) -> list[Floats]:
        """Predicts candidates with one pipeline and writes their rows.

        Returns how much longer and shorter their steps are, relative, by `SLOW_HOST` and `FAST_HOST`.
        """
        pipeline = StepPipeline(self, rows)
        for name, values in pipeline.parts().items():
            parts[name][rows] = values
        for name, by_stage in pipeline.activity().items():
            stages[name][rows, : by_stage.shape[1]] = by_stage
        m, held_s = pipeline.m, pipeline.held_s()
        return [_mean(each.sum(axis=1)) * m / held_s for each in (pipeline.slow_host_s, pipeline.fast_host_s)]


class StepPipeline:
    """Candidates with the same stages and chunks. Arrays are [candidates, chunks, stages] or [candidates, stages]."""

    def __init__(self, model: StepModel, rows: Ints) -> None:
        self.model, self.rows = model, rows
        batch = model.batch
        self.pp, self.vpp = int(batch.pp[rows[0]]), int(batch.vpp[rows[0]])
        self.m = batch.num_micro_batches[rows]
        self.in_domain = model.links.world_size <= model.links.domain
        self.layers = batch.layers[rows, : self.pp * self.vpp].reshape(-1, self.vpp, self.pp).astype(float)
        self.is_first = np.zeros((1, self.vpp, self.pp))
        self.is_first[0, 0, 0] = 1.0
        self.is_last = np.zeros((1, self.vpp, self.pp))
        self.is_last[0, -1, -1] = 1.0
        self.sharding = self._column(batch.sharding)
        self.overlap = self._column(batch.overlap)
        self.weights = self._weights()
        self.send_s = self._send_s()
        self.forward, self.backward = self._work("forward"), self._work("backward")
        self._replicas()
        self._clock()
        self._passes()

    def _column(self, values: Ints) -> Floats:
        return values[self.rows].astype(float)[:, None, None]

    def _spread(self, values: Floats) -> Floats:
        return values[self.model.shape_of[self.rows]][:, None, None]

    def _work(self, direction: str) -> PassTimes:
        """Adds the work of a chunk's layers and ends in one direction, with the passes over its gradients."""
        model = self.model
        if direction == "backward" and not model.trains:
            nothing = np.zeros_like(self.layers)
            return PassTimes(nothing, nothing, nothing, nothing, nothing)
        kinds = []
        for name in ("matrix_s", "memory_s", "host_s", "stall_s", "flop"):
            layer, first, last = (
                self._spread(getattr(getattr(part, direction), name)) for part in (model.layer, model.first, model.last)
            )
            kinds.append(layer * self.layers + first * self.is_first + last * self.is_last)
        matrix_s, memory_s, host_s, stall_s, flop = kinds
        return PassTimes(matrix_s, memory_s + self._state_s(direction), host_s, stall_s, flop)

    def _state_s(self, direction: str) -> Floats:
        """Predicts copies of gathered weights and the accumulation of gradients, of one pass."""
        facts, weights = self.model.facts, self.weights
        held = weights.dense + weights.experts
        copied = np.where(self.sharding == 3, 2.0 * self.model.machine.item_bytes, 0.0) * (weights.dense_group.size > 1)
        size_bytes = copied * held
        if direction == "backward":
            kept = np.where(self.sharding < 2, facts.grad_bytes, facts.reduced_bytes)
            size_bytes = size_bytes + self.model.updates * kept * held
        return self.model.machine.moving_s(size_bytes, 0)

    def _weights(self) -> Weights:
        """Counts parameters of every chunk on one rank."""
        batch, links = self.model.batch, self.model.links
        model = batch.model
        tp, cp, ep, etp, dp = (self._column(getattr(batch, name)) for name in ("tp", "cp", "ep", "etp", "dp"))
        vocabulary = self.model.batch.vocabulary[self.rows].astype(float)[:, None, None]
        h = model.hidden_size
        split_ends = tp if self.model.facts.splits_ends else 1.0
        held = [(*held_weights(kind), share) for kind, share in model.shares]
        dense = sum((cut / tp + whole) * share for cut, whole, share in held) * self.layers
        ends = self.is_first + self.is_last
        if model.tied_embeddings and self.pp == 1:
            ends = ends / 2
        held_ends = vocabulary * h / split_ends * ends
        dense = dense + held_ends
        ffn = sum(
            kind.ffn_matrices * h * kind.ffn_hidden_size * kind.num_experts * share for kind, share in model.shares
        )
        experts = ffn / (ep * etp) * self.layers
        copies = self._column(batch.dp_replicate)
        dense_ranks = dp * cp / copies
        expert_ranks = dp * cp * tp / (ep * etp) / copies
        units = self.layers + ends
        joins = self.model.facts.joins_ends
        return Weights(
            dense=dense,
            experts=experts,
            units=units,
            first_frac=held_ends / np.maximum(dense, 1.0) if joins else 1.0 / np.maximum(units, 1.0),
            dense_group=links.group(dense_ranks, tp),
            expert_group=links.group(expert_ranks, ep * etp),
            dense_copies=links.group(copies, tp * dense_ranks),
            expert_copies=links.group(copies, ep * etp * expert_ranks),
        )

    def _replicas(self) -> None:
        """Predicts gathering and reducing: what is exposed in each pass, once a step, and what runs beside compute."""
        facts, weights, links = self.model.facts, self.weights, self.model.links
        trains, updates = float(self.model.trains), self.model.updates
        copies_s = updates * weights.sum_copies_s(links, item_bytes=facts.sent_grad_bytes)
        beside_tp = (self.overlap == 3) & facts.hides_replicas_beside_tp
        hides_reduce = ((self.overlap == 1) | (self.overlap == 2) | beside_tp).astype(float)
        hides_gather = ((self.overlap == 2) | beside_tp).astype(float)
        hides_reduce = hides_reduce * (self.sharding >= facts.hides_reduction_from)
        each, every = (self.sharding == 3).astype(float), (self.sharding >= 2).astype(float)
        once = ((self.sharding == 1) | (self.sharding == 2)) * trains
        hides_once = hides_gather * (not facts.gathers_in_update)
        gathers_s = weights.gather_s(links, self.model.machine.item_bytes)
        reduces_s = weights.reduce_s(links, scatter=self.sharding > 0, item_bytes=facts.sent_grad_bytes)
        whole_s = [work.matrix_s + work.memory_s for work in (self.forward, self.backward)]
        kinds = [(gathers_s[0] + gathers_s[1], reduces_s[0] + reduces_s[1], *whole_s, copies_s)]
        if facts.shards_experts_apart and self.model.batch.model.is_moe:
            # What computes next is gathered beside what comes before it, and a reduction runs beside what comes after:
            # experts move beside the rest of a layer, which takes less time than they do.
            layer = self.model.layer
            parts_s = [
                (np.asarray(one.experts_s), one.matrix_s + one.memory_s) for one in (layer.forward, layer.backward)
            ]
            experts_s = [self._spread(part_s) * self.layers for part_s, _ in parts_s]
            rest_s = [self._spread(all_s - part_s) * self.layers for part_s, all_s in parts_s]
            others = gathers_s[1], reduces_s[1], *rest_s, 0.0 * copies_s
            kinds = [(gathers_s[0], reduces_s[0], *experts_s, copies_s), others]
        found = list[tuple[Floats, ...]]()
        for gather_s, reduce_s, forward_s, backward_s, copied_s in kinds:
            first_s, last_s = gather_s * weights.first_frac, updates * reduce_s * weights.first_frac
            reduced_s = updates * reduce_s
            ahead = beside(each * gather_s, forward_s, hides_gather, each * first_s)
            again = beside(trains * each * gather_s, backward_s, hides_gather, each * first_s)
            # Gathers and reductions take turns on one communicator: the same work hides no two of them. Where weights
            # are gathered again, the next pass gathers behind the last reduction.
            behind = beside(every * reduced_s, backward_s - again[1], hides_reduce, each * last_s)
            sum_s = (1.0 - every) * reduced_s + copied_s
            end = beside(sum_s, backward_s, hides_reduce, sum_s * weights.first_frac)
            begin = beside(once * gather_s, forward_s, hides_once, once * first_s)
            late_s = (every - each) * hides_reduce * last_s
            found.append((*ahead, *again, *behind, end[0] + begin[0], end[1] + begin[1], late_s))
        sums = [np.sum(column, axis=0) for column in zip(*found, strict=True)]
        self.gather_forward_s, self.over_forward_s, self.gather_backward_s, over_s, self.reduce_backward_s = sums[:5]
        self.over_backward_s = over_s + sums[5]
        self.once_s, self.over_once_s = sums[6].sum(axis=1) + sums[8].max(axis=1), sums[7].sum(axis=1)
        self.update_s = self._update_s()

    def _update_s(self) -> Floats:
        """Predicts the optimizer: gradient norm, clipping and update of this rank's shard, [candidates, stages]."""
        weights, facts, machine = self.weights, self.model.facts, self.model.machine
        sharded = self.sharding > 0
        held = weights.dense / np.where(sharded, weights.dense_group.size, 1.0)
        held = held + weights.experts / np.where(sharded, weights.expert_group.size, 1.0)
        usual_frac = machine.coefficients.kernel.memory_frac
        update_bytes = facts.update_bytes * usual_frac / (facts.update_frac or usual_frac)
        size_bytes = self.model.updates * (update_bytes * held + 6.0 * (weights.dense + weights.experts))
        return machine.moving_s(size_bytes.sum(axis=1), 100 * self.model.updates)

    def _clock(self) -> None:
        """Solves the clock of every stage: the power of its passes, averaged over them, under the limit."""
        model = self.model
        work = self.forward + self.backward
        traffic = self._traffic()
        device_s = work.matrix_s + work.memory_s + work.stall_s + sum(traffic.values())
        busy_s = np.maximum(device_s, work.host_s).sum(axis=1)
        link_s = (sum(traffic.values()) + self.over_forward_s + self.over_backward_s).sum(axis=1)
        at_full_w = dynamic_w(
            model.power,
            work.flop.sum(axis=1) / busy_s / model.machine.flop_per_s,
            (0.35 * work.matrix_s + work.memory_s).sum(axis=1) / busy_s * model.coefficients.kernel.memory_frac,
            np.minimum(link_s / busy_s, 1.0),
        )
        limit_w = model.batch.limit_w[self.rows, None]
        self.own_clock = clock_frac(model.power, at_full_w, np.maximum(limit_w, model.power.limit_w))
        self.clock = np.minimum(clock_frac(model.power, at_full_w, limit_w), model.batch.locked_frac[self.rows, None])

    def _traffic(self) -> dict[str, Floats]:
        """Adds exposed communication of a micro-batch by kind."""
        forward, backward = self._traffic_of("forward"), self._traffic_of("backward")
        return {kind: forward[kind] + backward[kind] for kind in forward}

    def _traffic_of(self, direction: str) -> dict[str, Floats]:
        if direction == "backward" and not self.model.trains:
            return {kind: np.zeros_like(self.layers) for kind in ("tp", "cp", "ep", "dp", "pp")}
        traffic = self.model.traffic
        kinds = {
            kind: self._spread(getattr(traffic, f"{kind}_{direction}_s")) * self.layers for kind in ("tp", "cp", "ep")
        }
        if direction == "forward":
            return {**kinds, "dp": self.gather_forward_s, "pp": np.roll(self.send_s, 1, axis=2) * (1 - self.is_first)}
        return {
            **kinds,
            "dp": self.gather_backward_s + self.reduce_backward_s,
            "pp": self.send_s * (1 - self.is_last),
        }

    def _send_s(self) -> Floats:
        """Predicts the activations of a micro-batch on their way from each stage to the next, where both sit."""
        batch, links = self.model.batch, self.model.links
        if self.pp == 1:
            return np.zeros_like(self.layers)
        split = self._column(batch.tp) if self.model.facts.splits_sequence else 1.0
        size_bytes = self._column(batch.local_tokens) * batch.model.hidden_size * self.model.machine.item_bytes / split
        # Of interleaved stages too: published chunks of one and two layers tell of no sends beside work.
        return links.to_next_stage_s(self.pp, size_bytes)

    def pass_s(self, direction: str, clock: Floats, lead_s: Floats | float = 0.0) -> tuple[Floats, ...]:
        """Predicts passes at a clock: computing, communication, what holds them up, what waits for no network."""
        work, over_s = getattr(self, direction), getattr(self, f"over_{direction}_s")
        copied_bytes = self.model.offloaded_bytes[self.rows][:, None, None] * self.layers
        copy_s = copied_bytes / host_bytes_per_s(self.model.batch.device.name)
        slowed_s = self.model.coefficients.link.slowdown_frac * over_s
        compute_s = work.matrix_s / clock + work.memory_s + slowed_s
        traffic_s = np.asarray(sum(self._traffic_of(direction).values()))
        # Copies of activations run beside all else, one layer behind the passes; those that take longer hold up.
        excess_s = np.maximum(np.maximum(work.host_s - lead_s, copy_s) - compute_s - traffic_s, work.stall_s)
        held_s = compute_s + traffic_s + excess_s
        if not self.in_domain:
            # Waits for the network are no help, nor is the clock that they let rise: see `held_s`.
            held_s = np.maximum(np.maximum(work.matrix_s + work.memory_s, work.host_s), copy_s)
        return compute_s, traffic_s, excess_s, held_s

    def _passes(self) -> None:
        """Predicts every pass at the clock of its stage, and the pipeline of them."""
        clock, nothing = self.clock[:, None, :], np.zeros_like(self.layers)
        self.compute_s, self.excess_s, self.held_pass_s, self.slow_host_s, self.fast_host_s = (nothing,) * 5
        durations: list[Floats] = []
        compute_s, traffic_s, _, _ = self.pass_s("backward", clock)
        lead_s = np.maximum(compute_s + traffic_s - self.backward.host_s, 0.0)
        later = (1.0 - 1.0 / self.m)[:, None, None]
        for direction, work in (("forward", self.forward), ("backward", self.backward)):
            compute_s, traffic_s, excess_s, held_s = self.pass_s(direction, clock)
            if direction == "forward":
                # What a backward pass leaves the host, it is ahead in the next forward pass, but for a step's first.
                less_s = later * (excess_s - self.pass_s(direction, clock, lead_s)[2])
                excess_s = excess_s - less_s
            self.compute_s, self.excess_s = self.compute_s + compute_s, self.excess_s + excess_s
            self.held_pass_s = self.held_pass_s + held_s
            self.slow_host_s = self.slow_host_s + np.maximum(SLOW_HOST * work.host_s - held_s, 0.0)
            waits_s = np.maximum(held_s - compute_s - (traffic_s if self.in_domain else 0.0), 0.0)
            self.fast_host_s = self.fast_host_s + np.minimum(waits_s, (1.0 - FAST_HOST) * work.host_s)
            durations.append(compute_s + traffic_s + excess_s)
        self.comm = self._traffic()
        self.passes_s = pipeline_s(durations[0], durations[1], self.m, trains=self.model.trains)
        self.busy_s = (durations[0] + durations[1]).sum(axis=1) * self.m[:, None]

    def parts(self) -> dict[str, Floats]:
        """Adds the parts of a step on the average rank."""
        m, batch = self.m, self.model.batch
        per_step = {kind: _mean(seconds.sum(axis=1)) * m for kind, seconds in self.comm.items()}
        compute_s = _mean(self.compute_s.sum(axis=1)) * m
        busy_s = _mean(self.busy_s)
        bubble_s = np.minimum(bubble_ratio(self.pp, self.vpp, m) * busy_s, np.maximum(self.passes_s - busy_s, 0.0))
        slowed_s = self.over_once_s * self.model.coefficients.link.slowdown_frac
        tail_s = self.once_s + self.update_s + slowed_s
        uneven_s = np.maximum(self.passes_s - busy_s - bubble_s, 0.0) + tail_s.max(axis=1) - _mean(tail_s)
        imbalance = self.model.imbalance[self.model.shape_of[self.rows]]
        uneven_s = uneven_s + (imbalance - 1) * self._expert_s()
        if batch.cluster.world_size > 1:
            waits_frac = self.model.coefficients.overhead.straggler_frac + TP_WAITS_FRAC * (batch.tp[self.rows] > 1)
            uneven_s = uneven_s + waits_frac * compute_s
        self.parts_s = {
            "compute_s": compute_s + _mean(self.update_s + slowed_s),
            "bubble_s": bubble_s,
            "exposed_comm_tp_s": per_step["tp"],
            "exposed_comm_pp_s": per_step["pp"],
            "exposed_comm_cp_s": per_step["cp"],
            "exposed_comm_dp_s": per_step["dp"] + _mean(self.once_s),
            "exposed_comm_ep_s": per_step["ep"],
            "straggler_s": uneven_s,
            "other_s": _mean(self.excess_s.sum(axis=1)) * m,
        }
        return self.parts_s

    def held_s(self) -> Floats:
        """Returns the seconds of a step that a slower host is compared with.

        Over several nodes those without what nodes wait for each other: a longer wait makes no host surer.
        """
        held_s = _mean(self.held_pass_s.sum(axis=1)) * self.m
        if self.in_domain:
            return np.maximum(sum(self.parts_s.values(), np.zeros(len(self.rows))), held_s)
        return held_s

    def _expert_s(self) -> Floats:
        """Estimates the time of experts in a step, without what a lower clock adds."""
        if not self.model.batch.model.is_moe:
            return np.zeros(len(self.rows))
        layer = self.model.layer
        pass_s = self._spread(np.asarray(layer.forward.experts_s) + layer.backward.experts_s)
        expert_s: Floats = (pass_s * self.layers).sum(axis=1).mean(axis=1) * self.m
        return expert_s

    def activity(self) -> dict[str, Floats]:
        """Divides the step of every stage by what its devices do."""
        step_s = sum(self.parts_s.values())[:, None]
        m = self.m[:, None]
        work = self.forward + self.backward
        full_s = work.matrix_s.sum(axis=1) * m
        matrix_s = full_s / self.clock
        slowed_s = self.over_once_s * self.model.coefficients.link.slowdown_frac
        memory_s = self.compute_s.sum(axis=1) * m - matrix_s + self.update_s + slowed_s
        collective_s = np.sum([one.sum(axis=1) for one in self.comm.values()], axis=0) * m + self.once_s
        over_s = (self.over_forward_s + self.over_backward_s).sum(axis=1) * m + self.over_once_s
        used_s = matrix_s + memory_s + collective_s
        # The slowest stage may be busier than the average rank's step by rounding only.
        step_s = np.maximum(step_s, used_s)
        flop = work.flop.sum(axis=1) * m
        # The optimizer runs below the limit: of all compute only the passes are slowed.
        passes = self.compute_s.sum(axis=1) * m / np.maximum(matrix_s + memory_s, 1e-12)
        clock = 1.0 - (1.0 - self.clock) * passes
        return {
            "matrix_s": matrix_s,
            "memory_s": memory_s,
            "collective_s": collective_s,
            "idle_s": step_s - used_s,
            "overlapped_s": np.minimum(over_s, matrix_s + memory_s),
            "matrix_frac": flop / np.maximum(full_s, 1e-12) / self.model.machine.flop_per_s,
            "clock_frac": clock,
            "held_frac": np.minimum(clock / (1.0 - (1.0 - self.own_clock) * passes), 1.0),
        }


def _mean(by_stage: Floats) -> Floats:
    mean: Floats = by_stage.mean(axis=1)
    return mean

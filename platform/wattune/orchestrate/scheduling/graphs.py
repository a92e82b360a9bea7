"""Compiled graphs: which trials share them, and which of them the warm workers hold. No torch here.

On GPUs the first trial with new shapes compiles, and those after it with the same shapes do not. On four H200s that is
22 to 31 s against 5 to 8 s beside build and steps with Megatron-Core, 7 to 12 s against 4 to 8 s with the torch engine
(`benchmarks/results/run_order.md`).
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Final, Literal

from wattune.catalog.models import ModelSpec
from wattune.orchestrate.scheduling.run_order import workers_of
from wattune.plans.program import is_command
from wattune.run import Run
from wattune.trial import TrialSpec

Start = Literal["new_workers", "new_graphs", "warm"]
"""The start of a trial: its workers are made first; warm workers compile; or warm workers hold all it needs."""

PLANS_KEPT: Final = 24
"""Different plans of which a process keeps graphs: `wattune.engines.model.compiler.MOST_VARIANTS`. At the next one it
forgets all."""


def graphs_of(spec: TrialSpec) -> Hashable:
    """Returns a key that is equal for trials which run the same compiled graphs.

    It may differ for trials that share graphs: they are then not run side by side, no more. The shapes of a layer's
    inputs and weights decide, and on which side of a graph something is recomputed. Stages, layers, replicas do not.

    - `torch`: attention is computed again inside a layer's graph. Graphs of tensor parallel layers name their process
      groups, which every degree and the split into replicas and shards decide.
    - `deepspeed`: with tensor parallel, or experts under ZeRO-3, nothing is compiled. ZeRO-3 puts other weights in.
    - `megatron`: norms and attention are graphs of their own; recomputing runs them without gradients too.
    - on CPUs nothing is compiled.
    """
    plan, engine = spec.plan, spec.engine
    if is_command(spec):  # what it compiles is its own and ends with it
        return None
    if spec.cluster.device == "cpu":
        return None
    work = spec.workload
    shapes = (
        engine,
        _layer(spec.model),
        work.mode,
        work.seq_len,
        work.lora,
        plan.micro_batch_size,
        plan.tp,
        plan.cp,
        plan.dtype,
        plan.loss_chunks,
    )
    if engine == "torch":
        groups = (
            plan.pp,
            plan.ep,
            plan.etp,
            plan.dp(spec.cluster.world_size),
            plan.sharding == "none",
            plan.rank_order,
        )
        return shapes, plan.recompute == "selective", groups if plan.tp > 1 else None
    if engine == "deepspeed":
        if plan.tp > 1 or (plan.sharding == "zero3" and spec.model.is_moe):
            return engine, None
        return shapes, plan.recompute == "selective", plan.sharding == "zero3"
    return shapes, plan.recompute


def compiles_ahead(spec: TrialSpec) -> bool:
    """Returns whether a trial's graphs can be compiled before it runs, in a process beside workers on NVIDIA GPUs.

    Those of other engines, and where weights are frozen, in fp8 or offloaded, are known once they run.
    """
    plan, work = spec.plan, spec.workload
    is_plain = work.mode == "pretrain" and work.lora is None and plan.dtype != "fp8" and plan.offload == "none"
    return spec.engine == "torch" and is_plain and spec.cluster.rank_device.vendor == "nvidia"


def one_of_each(specs: Iterable[TrialSpec], *, by_share: bool) -> tuple[TrialSpec, ...]:
    """Returns one plan for each set of graphs that can be compiled before its trial, in order; `PLANS_KEPT` at most.

    `by_share` puts those first that most plans share, where nobody knows which plans run first.
    """
    found: dict[Hashable, list[TrialSpec]] = defaultdict(list)
    for spec in filter(compiles_ahead, specs):
        found[graphs_of(spec)].append(spec)
    each = sorted(found.values(), key=lambda one: -len(one) if by_share else 0)
    return tuple(min(plans, key=lambda one: one.plan.pp) for plans in each[:PLANS_KEPT])  # every rank has every part


def waited_for_workers(result: Run) -> bool:
    """Returns whether workers were made for a trial, by its number `group_start_s`; False where nothing says so."""
    return bool(result.numbers.group_start_s)


@lru_cache(maxsize=64)
def _layer(model: ModelSpec) -> ModelSpec:
    """Returns a model whose number of layers does not count."""
    return replace(model, num_layers=0)


class WarmGraphs:
    """The graphs that warm workers hold, by the nodes they run on."""

    def __init__(self) -> None:
        self._lanes: dict[str, tuple[Hashable, dict[TrialSpec, Hashable]]] = {}
        """The kind of workers of each set of nodes, and their graphs by plan."""
        self._starts: dict[tuple[str, int], Start] = {}
        """Of trials whose nodes are free and whose results are being made."""

    def start_of(self, spec: TrialSpec, nodes: str | None = None) -> Start:
        """Predicts how a trial starts on nodes (names joined by commas); None takes those where it starts soonest."""
        lanes = list(self._lanes.values()) if nodes is None else [self._lanes[nodes]] if nodes in self._lanes else []
        own = [held.values() for workers, held in lanes if workers == workers_of(spec)]
        if not own:
            return "new_workers"
        graphs = graphs_of(spec)
        return "warm" if any(graphs in held for held in own) else "new_graphs"

    def ran(self, spec: TrialSpec, nodes: str, *, new_workers: bool) -> Start:
        """Notes a trial that ran, whose workers may have been made for it; returns how it started."""
        start: Start = "new_workers" if new_workers else self.start_of(spec, nodes)
        if start == "new_workers" or nodes not in self._lanes:
            self._lanes[nodes] = workers_of(spec), {}
        _, held = self._lanes[nodes]
        if spec not in held and len(held) >= PLANS_KEPT:
            held.clear()
        held[spec] = graphs_of(spec)
        return start

    def freed(self, spec: TrialSpec, repeat: int, nodes: str) -> None:
        """Notes a trial whose nodes are free: the next one is chosen before this one's result is there."""
        start = self.start_of(spec, nodes)
        self._starts[spec.trial_id, repeat] = self.ran(spec, nodes, new_workers=start == "new_workers")

    def told(self, spec: TrialSpec, result: Run, nodes: str) -> Start:
        """Notes the result of a trial; returns how it started."""
        start, is_new = self._starts.pop((result.trial_id, result.repeat), None), waited_for_workers(result)
        return self.ran(spec, nodes, new_workers=is_new) if start is None or is_new else start

    def forget(self) -> None:
        """Forgets all workers: they ended with the call that made them."""
        self._lanes.clear()

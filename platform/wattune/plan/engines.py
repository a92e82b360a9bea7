"""What each engine can do, and what a setting really does: data and arithmetic, no training library."""

import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.errors import PlanError, closest
from wattune.plan.axes import Plan

MODES: Final = ("pretrain", "lora", "prefill")
"""Kinds of work a search space may ask for."""

ABOVE_1: Final = range(2, sys.maxsize)
"""Any degree that splits something."""


class WorkloadLike(Protocol):
    """The part of a workload that decides whether a plan fits it."""

    @property
    def mode(self) -> str:
        """One of `MODES`."""

    @property
    def seq_len(self) -> int:
        """Tokens of one sequence."""

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step over all ranks."""


class Configuration(Protocol):
    """What planning reads of a trial; `wattune.trial.TrialSpec` is one."""

    @property
    def model(self) -> ModelSpec:
        """What is trained."""

    @property
    def cluster(self) -> ClusterSpec:
        """Where."""

    @property
    def engine(self) -> str:
        """By which engine."""

    @property
    def workload(self) -> WorkloadLike:
        """On what."""

    @property
    def plan(self) -> Plan:
        """Laid out how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A combination of axis values an engine cannot run."""

    setting: Mapping[str, Container[Any]]
    """Axis to values; the combination is met where every axis has one of its values."""
    why: str
    unless_transformer_engine: bool = False
    """Whether TransformerEngine on the cluster lifts it."""

    def met_by(self, configuration: Configuration) -> bool:
        """Whether a configuration is such a combination."""
        if self.unless_transformer_engine and configuration.cluster.transformer_engine:
            return False
        plan = configuration.plan
        return all(getattr(plan, axis) in values for axis, values in self.setting.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one engine can run."""

    name: str
    built: bool = False
    """Whether wattune has an adapter for it."""
    vendors: tuple[str, ...]
    """Vendors of the devices it runs on, as `DeviceSpec.vendor`."""
    modes: tuple[str, ...] = ("pretrain",)
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    etp_is_tp: bool = True
    """Whether experts can only be split by the same tensor parallel degree as the rest."""
    fills_pipeline: bool = False
    """Whether its 1F1B schedule needs at least as many micro-batches as stages."""
    expert_row_bytes: int = 1
    """What the width of an expert's matrices, in bytes on one rank, must be a multiple of."""
    exclusions: tuple[Exclusion, ...] = ()
    source: str
    """Where the limits come from."""


_ZERO_2_3: Final = ("zero2", "zero3")

CAPABILITIES: Final[dict[str, Capabilities]] = {
    engine.name: engine
    for engine in (
        Capabilities(
            name="torch",
            built=True,
            vendors=("nvidia", "amd", "cpu"),
            fills_pipeline=True,
            expert_row_bytes=16,  # torch.nn.functional.grouped_mm: "strides should be multiple of 16 bytes"
            exclusions=(
                Exclusion(setting={"cp": ABOVE_1}, why="its attention sees whole sequences"),
                Exclusion(setting={"overlap": ("tp",)}, why="its tensor parallel collectives are not split up"),
            ),
            source="torch 2.13, torch.distributed.pipelining.schedules: Schedule1F1B, ScheduleInterleaved1F1B",
        ),
        Capabilities(
            name="megatron",
            vendors=("nvidia", "amd"),
            etp_is_tp=False,
            exclusions=(
                Exclusion(
                    setting={"cp": ABOVE_1},
                    why="only TransformerEngine's attention takes split sequences",
                    unless_transformer_engine=True,
                ),
                Exclusion(
                    setting={"overlap": ("tp",)},
                    why="the overlapped collectives are TransformerEngine's",
                    unless_transformer_engine=True,
                ),
                Exclusion(
                    setting={"sharding": _ZERO_2_3}, why="its distributed optimizer shards the optimizer state only"
                ),
            ),
            source="megatron-core 0.16.1 and 0.19.2, local layer specification with own RMSNorm; run on 4 H200",
        ),
        Capabilities(
            name="deepspeed",
            vendors=("nvidia", "amd", "cpu"),
            exclusions=(
                Exclusion(setting={"cp": ABOVE_1}, why="it has no context parallel attention"),
                Exclusion(setting={"vpp": ABOVE_1}, why="its pipeline schedule has one chunk a stage"),
                Exclusion(setting={"pp": ABOVE_1, "tp": ABOVE_1}, why="automatic tensor parallel needs pp=1"),
                Exclusion(
                    setting={"pp": ABOVE_1, "sharding": _ZERO_2_3}, why="PipelineEngine refuses ZeRO above stage 1"
                ),
                Exclusion(setting={"ep": ABOVE_1, "sharding": ("zero3",)}, why="its expert layer refuses ZeRO stage 3"),
                Exclusion(setting={"overlap": ("tp",)}, why="its tensor parallel overlap runs its own examples only"),
            ),
            source="deepspeed 0.19.8: runtime/pipe/engine.py, moe/layer.py, AutoTP; run with gloo on two ranks",
        ),
    )
}
"""Every engine by name. Editing a limit is editing one line here."""


def built_engines() -> tuple[str, ...]:
    """Names of the engines wattune can run."""
    return tuple(engine.name for engine in CAPABILITIES.values() if engine.built)


def built_engine(name: str) -> Capabilities:
    """What a built engine can do.

    Raises:
        PlanError: There is no such engine, or it is not built yet.
    """
    if name not in CAPABILITIES:
        raise PlanError(f'unknown engine "{name}"; {closest(name, CAPABILITIES)}')
    if not CAPABILITIES[name].built:
        raise PlanError(f"engine {name} is not built yet; built: {', '.join(built_engines())}")
    return CAPABILITIES[name]


def effective(configuration: Configuration) -> tuple[Plan, tuple[str, ...]]:
    """The plan that really runs: every setting that does nothing there is set to its neutral value.

    Two configurations that differ in nothing else than such settings do equal work and are one trial.

    Returns:
        The plan, and one text per setting that was changed, saying why; no text means the plan as it was.
    """
    plan, model, world_size = configuration.plan, configuration.model, configuration.cluster.world_size
    folds: dict[str, tuple[Any, str]] = {}

    if plan.etp != plan.tp and not model.is_moe:
        folds["etp"] = plan.tp, f"{model.name} has no experts"
    if plan.layout and len(plan.layout) == plan.pp * plan.vpp and plan.layout == _even(model, plan):
        folds["layout"] = (), "it is the even split"
    if plan.rank_order == tuple(range(world_size)):
        folds["rank_order"] = "topology", "it is the order of the topology"

    sharding, replicated = plan.sharding, _has_replicas(model, plan, world_size)
    if sharding != "none" and not replicated:
        sharding = "none"
        folds["sharding"] = "none", "no replicas to share it with at dp=1"
    if plan.overlap in ("grad", "grad_param") and not replicated:
        folds["overlap"] = "none", "no gradients to reduce at dp=1"
    elif plan.overlap == "grad_param" and sharding == "none":
        folds["overlap"] = "grad", "no parameters to gather at sharding=none"
    elif plan.overlap == "tp" and plan.tp == 1:
        folds["overlap"] = "none", "nothing to overlap at tp=1"

    if not folds:
        return plan, ()
    texts = tuple(
        f"{axis}={_text(getattr(plan, axis))} acts as {_text(to)}: {why}" for axis, (to, why) in folds.items()
    )
    return replace(plan, **{axis: to for axis, (to, _) in folds.items()}), texts


def _even(model: ModelSpec, plan: Plan) -> tuple[int, ...] | None:
    """The layout an empty one stands for, None where layers do not split evenly."""
    num_virtual = plan.pp * plan.vpp
    return None if model.num_layers % num_virtual else (model.num_layers // num_virtual,) * num_virtual


def _has_replicas(model: ModelSpec, plan: Plan, world_size: int) -> bool:
    """Whether some weight is held by more than one rank, so that gradients are reduced and state can be shared.

    Context parallel ranks hold the same weights as data parallel ones do; experts have replicas of their own. A world
    that the degrees do not divide has none of this to ask about and counts as replicated: nothing is folded there.
    """
    if world_size % (plan.tp * plan.pp * plan.cp):
        return True
    dense = world_size // (plan.tp * plan.pp)
    return dense > 1 or (model.is_moe and dense * plan.tp > plan.etp * plan.ep)


def _text(value: Any) -> str:
    return ("even" if not value else str(list(value))) if isinstance(value, tuple) else str(value)

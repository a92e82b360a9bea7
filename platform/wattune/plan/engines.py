"""What each engine can do, and what a setting really does: data and arithmetic, no training library."""

import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.errors import PlanError, closest
from wattune.plan.axes import Plan

MODES: Final = ("pretrain", "lora", "prefill")
"""Kinds of work a search space may ask for."""

ROUTINGS: Final = ("balanced", "skew", "learned")
"""Ways to choose the experts of a token: `wattune.trial.Routing.by`."""

ABOVE_1: Final = range(2, sys.maxsize)
"""Any degree that splits something."""


class LoraLike(Protocol):
    """The part of adapters that decides whether a plan fits them."""

    @property
    def rank(self) -> int:
        """Inner width."""

    @property
    def targets(self) -> Sequence[str]:
        """Linear layers they stand beside."""


class RoutingLike(Protocol):
    """The part of routing that decides whether it can be followed."""

    @property
    def by(self) -> str:
        """One of `ROUTINGS`."""

    @property
    def skew(self) -> float:
        """Exponent of Zipf's law."""


class WorkloadLike(Protocol):
    """The part of a workload that decides whether a plan fits it."""

    @property
    def mode(self) -> str:
        """One of `MODES`."""

    @property
    def lora(self) -> LoraLike | None:
        """Adapters to train, where `mode` is `lora`."""

    @property
    def routing(self) -> RoutingLike | None:
        """How tokens are sent to experts."""

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
    transformer_engine: bool | None = None
    """Met only where the cluster has TransformerEngine, or has it not; in either case where it is None."""
    mode: str = ""
    """The mode of work it is met in; any where it is empty."""
    of_experts: bool = False
    """Whether it is met by models with experts only."""

    def met_by(self, configuration: Configuration) -> bool:
        """Whether a configuration is such a combination."""
        if self.transformer_engine not in (None, configuration.cluster.transformer_engine):
            return False
        if self.mode not in ("", configuration.workload.mode) or (self.of_experts and not configuration.model.is_moe):
            return False
        plan = configuration.plan
        return all(getattr(plan, axis) in values for axis, values in self.setting.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """A setting that acts as another one in an engine."""

    setting: Mapping[str, Container[Any]]
    """Axis to values; it applies where every axis has one of its values."""
    axis: str
    to: Any
    why: str
    needs_replicas: bool = False
    """Whether it applies only where some weight is held by more than one rank."""
    needs_training: bool = False
    """Whether it applies only where something is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLimits:
    """What an engine's expert layer is made for: whole SwiGLU experts without bias that drop no token."""

    why: str
    """Which layer that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one engine can run."""

    name: str
    vendors: tuple[str, ...]
    """Vendors of the devices it runs on, as `DeviceSpec.vendor`."""
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    etp_is_tp: bool = True
    """Whether experts can only be split by the same tensor parallel degree as the rest."""
    fills_pipeline: bool = False
    """Whether its 1F1B schedule, which prompts do not run through, needs as many micro-batches as stages at least."""
    rounds_of_pp: bool = True
    """Whether interleaved stages take micro-batches in rounds of `pp`; else equal rounds of `pp` or more will do."""
    expert_row_bytes: int = 1
    """What the width of an expert's matrices, in bytes on one rank, must be a multiple of."""
    experts: "ExpertLimits | None" = None
    """What its own expert layer cannot do; None where it runs any expert of the catalog."""
    least_experts_per_token: int = 1
    """Experts a token must be sent to at least."""
    splits_expert_bias: bool = True
    """Whether experts with biases can be split by tensor parallelism."""
    splits_ends: bool = True
    """Whether tensor parallel also splits the vocabulary (embedding, logits) and the sequence between the layers."""
    splits_adapters: bool = True
    """Whether tensor parallel splits adapters by their rank."""
    interleaves_prompts: bool = False
    """Whether stages of several chunks can run forward only."""
    exclusions: tuple[Exclusion, ...] = ()
    equivalences: tuple["Equivalence", ...] = ()
    """Settings that act as others there, applied in this order after those that hold for every engine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables its processes need when they start: they are read once."""
    source: str
    """Where the limits come from."""


_ZERO_2_3: Final = ("zero2", "zero3")
_OVERLAPS_DP: Final = ("grad", "grad_param")

CAPABILITIES: Final[dict[str, Capabilities]] = {
    engine.name: engine
    for engine in (
        Capabilities(
            name="torch",
            vendors=("nvidia", "amd", "cpu"),
            fills_pipeline=True,
            rounds_of_pp=False,
            expert_row_bytes=16,  # torch.nn.functional.grouped_mm: "strides should be multiple of 16 bytes"
            exclusions=(
                Exclusion(setting={"cp": ABOVE_1}, why="its attention sees whole sequences"),
                Exclusion(
                    setting={"overlap": ("tp",)},
                    why="torch's asynchronous tensor parallel is a private switch of its compiler (2.11 to 2.13)",
                ),
            ),
            source="torch 2.11: torch.distributed.pipelining.schedules, torch._inductor.config._micro_pipeline_tp",
        ),
        Capabilities(
            name="megatron",
            vendors=("nvidia", "amd"),
            etp_is_tp=False,
            splits_adapters=False,
            interleaves_prompts=True,
            expert_row_bytes=16,  # torch.nn.functional.grouped_mm: "strides should be multiple of 16 bytes"
            least_experts_per_token=2,  # transformer_config.py: the softmax over one has no gradient
            splits_expert_bias=False,
            exclusions=(
                Exclusion(
                    setting={"cp": ABOVE_1},
                    why="only TransformerEngine's attention takes split sequences",
                    transformer_engine=False,
                ),
                Exclusion(
                    setting={"overlap": ("tp",)},
                    why="the overlapped collectives are TransformerEngine's",
                    transformer_engine=False,
                ),
                Exclusion(
                    setting={"cp": ABOVE_1},
                    why="of a prompt only the last token is judged, and one rank has it",
                    mode="prefill",
                ),
                Exclusion(
                    setting={},
                    why="adapters stand beside its own linear layers, and TransformerEngine's hold a norm too",
                    mode="lora",
                    transformer_engine=True,
                ),
                Exclusion(
                    setting={"sharding": _ZERO_2_3}, why="its distributed optimizer shards the optimizer state only"
                ),
            ),
            # Without it the collectives of sequence parallelism wait behind the matrix products they should run beside.
            environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            source="megatron-core 0.16.1 and 0.19.2: transformer/transformer_config.py, tensor_parallel/layers.py",
        ),
        Capabilities(
            name="deepspeed",
            vendors=("nvidia", "amd", "cpu"),
            etp_is_tp=False,
            expert_row_bytes=16,  # torch._grouped_mm: "strides should be multiple of 16 bytes"
            experts=ExpertLimits(why="its AutoEP layer is made for Mixtral's"),
            splits_ends=False,
            splits_adapters=False,
            exclusions=(
                Exclusion(setting={"cp": ABOVE_1}, why="it has no context parallel attention"),
                Exclusion(
                    setting={"pp": ABOVE_1, "dtype": ("bf16",)},
                    why="the optimizer of its bf16 pipeline wants experts to train",
                    mode="lora",
                    of_experts=True,
                ),
                Exclusion(
                    setting={"sharding": ("zero1", "zero2")},
                    why="these stages want experts to train",
                    mode="lora",
                    of_experts=True,
                ),
                Exclusion(setting={"vpp": ABOVE_1}, why="its pipeline schedule has one chunk a stage"),
                Exclusion(setting={"pp": ABOVE_1, "tp": ABOVE_1}, why="automatic tensor parallel needs pp=1"),
                Exclusion(
                    setting={"pp": ABOVE_1, "sharding": _ZERO_2_3}, why="PipelineEngine refuses ZeRO above stage 1"
                ),
                Exclusion(
                    setting={"tp": ABOVE_1, "ep": ABOVE_1, "sharding": ("zero1", "zero2")},
                    why="the norm it clips by then leaves out the experts of all tensor parallel ranks but one",
                ),
                Exclusion(setting={"overlap": ("tp",)}, why="its tensor parallel overlap runs its own examples only"),
            ),
            equivalences=(
                Equivalence(
                    setting={"pp": ABOVE_1, "dtype": ("bf16",), "sharding": ("none",)},
                    axis="sharding",
                    to="zero1",
                    why="its bf16 pipeline always shards the optimizer",
                    needs_replicas=True,
                    needs_training=True,
                ),
                Equivalence(
                    setting={"pp": ABOVE_1, "overlap": _OVERLAPS_DP},
                    axis="overlap",
                    to="none",
                    why="its pipeline reduces gradients after the last micro-batch",
                ),
                Equivalence(
                    setting={"sharding": ("none",), "overlap": _OVERLAPS_DP},
                    axis="overlap",
                    to="none",
                    why="without ZeRO it reduces gradients after the backward pass",
                ),
                Equivalence(
                    setting={"sharding": ("zero1", "zero2"), "overlap": ("grad_param",)},
                    axis="overlap",
                    to="grad",
                    why="below ZeRO-3 it gathers parameters in the update",
                ),
            ),
            source="deepspeed 0.19.8: runtime/{engine,pipe,zero}, module_inject/auto_*.py; run with gloo on four ranks",
        ),
    )
}
"""Every engine by name. Editing a limit is editing one line here."""


def capabilities(name: str) -> Capabilities:
    """What an engine can do.

    Raises:
        PlanError: There is no engine of that name.
    """
    if name not in CAPABILITIES:
        raise PlanError(f'unknown engine "{name}"; {closest(name, CAPABILITIES)}')
    return CAPABILITIES[name]


def effective(configuration: Configuration) -> tuple[Plan, tuple[str, ...]]:
    """The plan that really runs: every setting that does nothing there is set to its neutral value.

    Two configurations that differ in nothing else than such settings do equal work and are one trial.

    Returns:
        The plan, and one text per setting that was changed, saying why; no text means the plan as it was.
    """
    plan, model, world_size = configuration.plan, configuration.model, configuration.cluster.world_size
    equivalences: dict[str, tuple[Any, str]] = {}

    if plan.etp != plan.tp and not model.is_moe:
        equivalences["etp"] = plan.tp, f"{model.name} has no experts"
    if plan.layout and len(plan.layout) == plan.pp * plan.vpp and plan.layout == _even(model, plan):
        equivalences["layout"] = (), "it is the even split"
    if plan.rank_order == tuple(range(world_size)):
        equivalences["rank_order"] = "topology", "it is the order of the topology"

    sharding, replicated = plan.sharding, _has_replicas(model, plan, world_size)
    if sharding != "none" and not replicated:
        sharding = "none"
        equivalences["sharding"] = "none", "no replicas to share it with at dp=1"
    if plan.overlap in ("grad", "grad_param") and not replicated:
        equivalences["overlap"] = "none", "no gradients to reduce at dp=1"
    elif plan.overlap == "grad_param" and sharding == "none":
        equivalences["overlap"] = "grad", "no parameters to gather at sharding=none"
    elif plan.overlap == "tp" and plan.tp == 1:
        equivalences["overlap"] = "none", "nothing to overlap at tp=1"
    trains = configuration.workload.mode != "prefill"
    if not trains:
        equivalences |= _without_training(plan, equivalences)

    for equivalence in CAPABILITIES[configuration.engine].equivalences:
        now = replace(plan, **{axis: to for axis, (to, _) in equivalences.items()})
        met = all(getattr(now, axis) in values for axis, values in equivalence.setting.items())
        if met and (replicated or not equivalence.needs_replicas) and (trains or not equivalence.needs_training):
            equivalences[equivalence.axis] = equivalence.to, equivalence.why

    if not equivalences:
        return plan, ()
    texts = tuple(
        f"{axis}={_text(getattr(plan, axis))} acts as {_text(to)}: {why}" for axis, (to, why) in equivalences.items()
    )
    return replace(plan, **{axis: to for axis, (to, _) in equivalences.items()}), texts


def _without_training(plan: Plan, equivalences: Mapping[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
    """What does nothing where nothing is trained, given what does nothing anyway."""
    sharding, _ = equivalences.get("sharding", (plan.sharding, ""))
    overlap, _ = equivalences.get("overlap", (plan.overlap, ""))
    found: dict[str, tuple[Any, str]] = {}
    if plan.recompute != "none":
        found["recompute"] = "none", "mode=prefill has no backward pass"
    if sharding in ("zero1", "zero2"):
        found["sharding"] = "none", "mode=prefill has no gradients and no optimizer state"
    if overlap == "grad" or (overlap == "grad_param" and sharding != "zero3"):
        found["overlap"] = "none", "mode=prefill reduces no gradients"
    return found


def _even(model: ModelSpec, plan: Plan) -> tuple[int, ...] | None:
    """The layout an empty one stands for, None where layers do not split evenly."""
    num_virtual = plan.pp * plan.vpp
    return None if model.num_layers % num_virtual else (model.num_layers // num_virtual,) * num_virtual


def _has_replicas(model: ModelSpec, plan: Plan, world_size: int) -> bool:
    """Whether some weight is held by more than one rank, so that gradients are reduced and state can be shared.

    Context parallel ranks hold the same weights as data parallel ones do; experts have replicas of their own. A world
    that the degrees do not divide has none of this to ask about and counts as replicated: nothing is equivalent there.
    """
    if world_size % (plan.tp * plan.pp * plan.cp):
        return True
    dense = world_size // (plan.tp * plan.pp)
    return dense > 1 or (model.is_moe and dense * plan.tp > plan.etp * plan.ep)


def _text(value: Any) -> str:
    return ("even" if not value else str(list(value))) if isinstance(value, tuple) else str(value)

"""Limits of each engine and settings that act as others there: data, without a training library."""

import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Protocol

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import FEATURES, ModelSpec
from wattune.errors import PlanError, closest
from wattune.plans.axes import Plan
from wattune.workload import Workload

MODES: Final = ("pretrain", "lora", "prefill")
"""Kinds of work a search space may ask for."""

COMMAND: Final = "command"
"""Name of the engine that runs a command of the user's."""

ROUTINGS: Final = ("balanced", "skew", "learned")
"""Ways to choose the experts of a token: `wattune.workload.Routing.by`."""

ABOVE_1: Final = range(2, sys.maxsize)
"""Any degree that splits something."""


class Configuration(Protocol):
    """The parts of a trial that planning reads; `wattune.trial.TrialSpec` is one."""

    @property
    def model(self) -> ModelSpec:
        """The model that is trained."""

    @property
    def cluster(self) -> ClusterSpec:
        """The machines it runs on."""

    @property
    def engine(self) -> str:
        """Name of the engine that runs it."""

    @property
    def workload(self) -> Workload:
        """The data and the kind of work."""

    @property
    def plan(self) -> Plan:
        """The layout over ranks."""


def matches(setting: Mapping[str, Container[Any]], plan: Plan) -> bool:
    """Tells whether a plan has one of the values of `setting` on every axis there."""
    for axis, values in setting.items():  # noqa: SIM110 - asked millions of times
        if getattr(plan, axis) not in values:
            return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A combination of axis values an engine cannot run."""

    setting: Mapping[str, Container[Any]]
    """Values by axis; the plan has one of them on every axis."""
    why: str
    transformer_engine: bool | None = None
    """True: only with TransformerEngine on the cluster. False: only without. None: either way."""
    mode: str = ""
    """The mode of work that cannot run it; empty means every mode."""
    of_experts: bool = False
    """True where only models with experts cannot run it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """A setting that acts as another one in an engine."""

    setting: Mapping[str, Container[Any]]
    """Values by axis; it applies where the plan has one of them on every axis."""
    axis: str
    """The axis whose value acts as another one."""
    to: Any
    """The value that it acts as."""
    why: str
    needs_replicas: bool = False
    """True where it applies only if more than one rank holds some weight."""
    needs_training: bool = False
    """True where it applies only if something is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Abilities and limits of one engine."""

    name: str
    vendors: tuple[str, ...]
    """Vendors of the devices it runs on, as `DeviceSpec.vendor`."""
    runs_program: bool = False
    """True where it starts a program of the user's once a node, and nobody knows what a plan does in there."""
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    fp8_multiple: int = 1
    """Number that widths of linear layers and tokens of a micro-batch must be multiples of on each rank in fp8."""
    etp_is_tp: bool = True
    """True where experts can only be split by the tensor parallel degree of the rest."""
    fills_pipeline: bool = False
    """True where its 1F1B schedule needs at least as many micro-batches as stages. Prompts do not run through it."""
    rounds_of_pp: bool = True
    """True where interleaved stages take micro-batches in rounds of `pp`; else in equal rounds of `pp` or more."""
    expert_row_bytes: int = 1
    """Bytes that the width of an expert's matrices on one rank must be a multiple of."""
    experts_why: str = ""
    """Names its own expert layer, which takes whole SwiGLU experts without bias, and drops no token; empty where it
    runs any expert of the catalog."""
    least_experts_per_token: int = 1
    """Fewest experts that a token may be sent to."""
    splits_expert_bias: bool = True
    """True where tensor parallel can split experts with biases."""
    splits_wide_norms: bool = True
    """True where tensor parallel can split a norm over the width of all queries or keys."""
    splits_ends: bool = True
    """True where tensor parallel also splits the vocabulary (embedding, logits) and the sequence between layers."""
    splits_adapters: bool = True
    """True where tensor parallel splits adapters by their rank."""
    interleaves_prompts: bool = False
    """True where stages of several chunks can run forward only."""
    trains: frozenset[str] = frozenset()
    """Words of `wattune.catalog.models.FEATURES` for all that it trains beyond the plain decoder."""
    exclusions: tuple[Exclusion, ...] = ()
    equivalences: tuple[Equivalence, ...] = ()
    """Settings that act as others there, in the order `wattune.plans.effective` applies them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that its processes read once, when they start."""
    source: str
    """Origin of the limits: versions, files, runs."""


_ZERO_2_3: Final = ("zero2", "zero3")
_OVERLAPS_DP: Final = ("grad", "grad_param")

_OF_MEGATRON: Final = {
    "head widths of its own",
    "norms of queries and keys",
    "biases of queries, keys and values",
    "dense layers in a mixture",
    "shared experts",
    "other weights of experts",
}
"""Of `transformer_config.py`: `kv_channels`, `qk_layernorm`, `add_qkv_bias`, `moe_layer_freq`, `moe_shared_expert_*`,
`moe_router_*`. Its shared experts take no bias."""

_NOT_OF_TORCH: Final = {
    "other norms or biases of latent attention",
    "values of another width",
    "attention sinks",
    "Mamba2",
    "layers of one block",
    "another activation",
    "multi-token heads",
}

CAPABILITIES: Final[dict[str, Capabilities]] = {
    engine.name: engine
    for engine in (
        Capabilities(
            name="torch",
            vendors=("nvidia", "amd", "cpu"),
            dtypes=("bf16", "fp8", "fp32"),
            fp8_multiple=16,  # torch._scaled_mm: "trailing dimension of mat1 to be divisible by 16", "mat2 shape" alike
            fills_pipeline=True,
            rounds_of_pp=False,
            splits_wide_norms=False,
            trains=frozenset(FEATURES) - _NOT_OF_TORCH,
            expert_row_bytes=16,  # torch.nn.functional.grouped_mm: "strides should be multiple of 16 bytes"
            exclusions=(
                Exclusion(setting={"cp": ABOVE_1}, why="its attention sees whole sequences"),
                Exclusion(
                    setting={"overlap": ("tp",)},
                    why="torch's asynchronous tensor parallel is a private switch of its compiler (2.11 to 2.13)",
                ),
                Exclusion(
                    setting={"dtype": ("fp8",)},
                    why="torchao converts linear layers, and experts are grouped products",
                    of_experts=True,
                ),
                Exclusion(
                    setting={"dtype": ("fp8",)},
                    why="torchao's layers compute gradients of frozen weights too",
                    mode="lora",
                ),
            ),
            source="torch 2.11: torch.distributed.pipelining.schedules, torch._inductor.config._micro_pipeline_tp; "
            "torchao 0.18.0: float8/float8_linear.py",
        ),
        Capabilities(
            name="megatron",
            vendors=("nvidia", "amd"),
            dtypes=("bf16", "fp8", "fp32"),
            fp8_multiple=16,  # cuBLASLt, of which TransformerEngine's products are: dimensions in multiples of 16 bytes
            etp_is_tp=False,
            splits_adapters=False,
            interleaves_prompts=True,
            expert_row_bytes=16,  # torch.nn.functional.grouped_mm: "strides should be multiple of 16 bytes"
            least_experts_per_token=2,  # transformer_config.py: the softmax over one has no gradient
            splits_expert_bias=False,
            trains=frozenset(_OF_MEGATRON),
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
                    setting={"dtype": ("fp8",)},
                    why="its products in fp8 are TransformerEngine's",
                    transformer_engine=False,
                ),
                Exclusion(
                    setting={"dtype": ("fp8",)},
                    why="the tokens that come for an expert are no multiple of 16, as its products in fp8 need",
                    of_experts=True,
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
                    setting={"offload": ("activations",)},
                    why="its cpu_offloading is TransformerEngine's, and takes neither stages nor recomputation",
                ),
                Exclusion(
                    setting={"loss_chunks": ABOVE_1}, why="its own model computes the loss of all tokens at once"
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
            experts_why="its AutoEP layer is made for Mixtral's",
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
                Exclusion(
                    setting={"offload": ("activations",)},
                    why="its cpu_checkpointing moves what its own checkpointing keeps, and layers here use torch's",
                ),
                Exclusion(
                    setting={"loss_chunks": ABOVE_1}, why="its pipeline and ZeRO take the loss of all tokens at once"
                ),
                Exclusion(
                    setting={"dp_replicate": ABOVE_1},
                    why="hpZ copies weights alone, and MiCS needs ZeRO-3 with a model built inside its own context",
                ),
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
        Capabilities(
            name=COMMAND,
            vendors=("nvidia", "amd", "cpu"),
            runs_program=True,
            dtypes=("bf16", "fp8", "fp32"),
            etp_is_tp=False,
            rounds_of_pp=False,
            splits_ends=False,
            splits_adapters=False,
            interleaves_prompts=True,
            source="the user's own: nothing is known of it, so nothing is excluded",
        ),
    )
}
"""Every engine by name. Editing a limit is editing one line here."""


@lru_cache(maxsize=256)
def exclusions_of(engine: str, transformer_engine: bool, mode: str, is_moe: bool) -> tuple[Exclusion, ...]:
    """Returns the combinations that an engine cannot run, as far as plans of such a cluster and work may be one."""
    every = CAPABILITIES[engine].exclusions
    here = [one for one in every if one.transformer_engine in (None, transformer_engine) and one.mode in ("", mode)]
    return tuple(one for one in here if is_moe or not one.of_experts)


def runs_program(engine: str) -> bool:
    """Tells whether an engine starts a program of the user's; an engine of one's own does not."""
    return engine in CAPABILITIES and CAPABILITIES[engine].runs_program


def untrained(engine: str, model: ModelSpec) -> str:
    """Says what of a model an engine cannot train, and which engine can; empty where it trains all of it.

    Estimates need shapes alone, so this bars no plan from them.
    """
    if engine not in CAPABILITIES or runs_program(engine):
        return ""
    lacking = [word for word in model.features if word not in CAPABILITIES[engine].trains]
    if not lacking:
        return ""
    able = [
        name
        for name, one in CAPABILITIES.items()
        if set(model.features) <= one.trains and name != engine and not one.runs_program
    ]
    remedy = f"use engine {' or '.join(able)}" if able else "no engine here can, a command of your own may"
    return f"engine {engine} cannot train {model.name}, which has {', '.join(lacking)}; it is estimated alone: {remedy}"


def capabilities(name: str) -> Capabilities:
    """Returns the limits of an engine. Raises `PlanError` where no engine has that name."""
    if name not in CAPABILITIES:
        raise PlanError(f'unknown engine "{name}"; {closest(name, CAPABILITIES)}')
    return CAPABILITIES[name]

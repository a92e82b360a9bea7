"""Limits of each engine and settings that act as others there: data of `engines.toml`, without a training library."""

import sys
import tomllib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any, Final, Protocol

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import ModelSpec
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


def _read(name: str, entry: Mapping[str, Any]) -> Capabilities:
    """Makes the limits of an engine of its table in `engines.toml`."""
    parts: dict[str, Any] = {key: tuple(own) if isinstance(own, list) else own for key, own in entry.items()}
    parts["trains"] = frozenset(entry.get("trains", ()))
    for key, kind in (("exclusions", Exclusion), ("equivalences", Equivalence)):
        parts[key] = tuple(kind(**{**one, "setting": _setting(one["setting"])}) for one in entry.get(key, ()))
    return Capabilities(name=name, **parts)


def _setting(values: Mapping[str, Any]) -> dict[str, Container[Any]]:
    return {axis: ABOVE_1 if own == "above 1" else tuple(own) for axis, own in values.items()}


_FILE: Final = resources.files(__package__).joinpath("engines.toml").read_text(encoding="utf-8")
CAPABILITIES: Final[dict[str, Capabilities]] = {name: _read(name, each) for name, each in tomllib.loads(_FILE).items()}
"""Every engine by name, of `engines.toml`."""


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

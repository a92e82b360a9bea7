"""The grammar of a search space file: keys, types and bounds, and every problem in words with its path.

pydantic reads the file strictly: a boolean is not an integer, and an unknown key is an error. It goes on after a
problem, so one reading finds all of them. `wattune.search.problems` puts them in words.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetPydanticSchema, model_validator
from pydantic_core.core_schema import no_info_after_validator_function

from wattune.catalog.hardware import DEVICES, ClusterSpec, device, parse_cluster_label
from wattune.catalog.models import ACTIVATIONS, NORMS, POSITIONS, ModelSpec, model, scale_model
from wattune.errors import WattuneError, closest
from wattune.fidelity import DECIDED_BY_STEP_TIME, LEAST_BURST_STEPS
from wattune.objective import Constraint, Objective, parse_constraint, parse_objective
from wattune.plan.axes import AXES, Axis
from wattune.plan.engines import MODES, ROUTINGS, capabilities
from wattune.search.problems import Path, got, refuse
from wattune.search.strategy import check_strategy
from wattune.storage.study import check_study_name
from wattune.storage.versions import check_version
from wattune.trial import (
    FIRST_REFERENCE_REPEAT,
    LORA_TARGETS,
    TOKEN_DTYPES,
    Lora,
    Measure,
    TokenFile,
    Workload,
    check_trial_id,
)

LARGEST_COUNT: Final = 10**9
"""Upper bound of every count of a file: above any real one, and small enough for all arithmetic on it."""

LARGEST_WORLD: Final = 10**6
"""Most ranks of a cluster, layers of a model, and any degree. Planning lists ranks, stages and layers one by one."""

LONGEST_VALUE: Final = 2**16
"""Most entries of one value of an axis, such as a layout."""


def _named_by(parse: Callable[[str], object]) -> AfterValidator:
    """Accepts a text that one of wattune's own functions accepts, else passes on its message."""

    def check(text: str) -> str:
        try:
            parse(text)
        except WattuneError as error:
            raise refuse([((), str(error))]) from None
        return text

    return AfterValidator(check)


def _parsed_by(parse: Callable[[str], object]) -> GetPydanticSchema:
    """Takes a text and keeps what one of wattune's own functions makes of it; passes on its message otherwise."""

    def parsed(text: str) -> object:
        try:
            return parse(text)
        except WattuneError as error:
            raise refuse([((), str(error))]) from None

    return GetPydanticSchema(lambda _type, handler: no_info_after_validator_function(parsed, handler(str)))


def _one_of(names: tuple[str, ...]) -> AfterValidator:
    """Accepts a few names."""

    def check(text: str) -> str:
        if text not in names:
            raise refuse([((), f'unknown value "{text[:60]}"; {closest(text, names)}')])
        return text

    return AfterValidator(check)


def _one_or_more(value: Any) -> Any:
    """Returns a list: a single model, cluster or engine may stand without one."""
    return value if isinstance(value, list) else [value]


def _distinct(values: list[Any]) -> list[Any]:
    """Accepts a list whose entries mean different things. A repetition is always a slip."""
    meant = [value.resolve() if isinstance(value, ModelEntry | ClusterEntry) else value for value in values]
    repeated = _repetitions([repr(value) for value in meant])
    if repeated:
        raise refuse(repeated)
    return values


def _repetitions(texts: list[str]) -> list[tuple[Path, str]]:
    first = {text: index for index, text in reversed(list(enumerate(texts)))}
    return [((i,), f"the same as entry {first[text]}; remove one") for i, text in enumerate(texts) if first[text] < i]


def _axis_problem(axis: Axis, value: Any) -> str | None:
    """Says why an axis cannot have a value; None where it can."""
    if axis.kind == "count":
        most = LARGEST_COUNT if axis.name == "micro_batch_size" else LARGEST_WORLD
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
            return None
        return got(value, f"an integer from 1 to {most:,}")
    if isinstance(value, str) and value in axis.choices:
        return None
    if isinstance(value, str) and axis.kind == "choice":
        return f'unknown value "{value[:60]}"; {closest(value, axis.choices)}'
    if axis.kind == "choice":
        return got(value, " | ".join(axis.choices))
    least = 1 if axis.kind == "layout" else 0
    whole = isinstance(value, list) and 0 < len(value) <= LONGEST_VALUE
    if whole and all(type(item) is int and least <= item <= LARGEST_WORLD for item in value):
        return None
    what = "layers per stage, each at least 1" if axis.kind == "layout" else "device slots, each at least 0"
    return got(value, f"{' | '.join(axis.choices)}, or a list of {what}")


def _axes(space: dict[str, Any]) -> dict[str, list[Any]]:
    """Accepts axes that exist, each with a list of different values that it can have."""
    found: list[tuple[Path, str]] = []
    if not space:
        found.append(((), 'empty; name at least one axis with its values, such as "tp: [1, 2]"'))
    for name, values in space.items():
        if name not in AXES:
            found.append(((name,), f"unknown axis; {closest(name, AXES)}"))
        elif not isinstance(values, list):
            found.append(((name,), got(values, "a list of values, in brackets")))
        elif not values:
            found.append(((name,), f"empty; list values, or leave the axis out to take {AXES[name].neutral}"))
        else:
            wrong = [((i,), text) for i, value in enumerate(values) if (text := _axis_problem(AXES[name], value))]
            found += [((name, *path), text) for path, text in wrong or _repetitions([repr(value) for value in values])]
    if found:
        raise refuse(found)
    return space


def _readable(version: int) -> int:
    check_version(version, "this space")
    return version


Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Size = Annotated[int, Field(ge=1, le=LARGEST_WORLD)]
Positive = Annotated[float, Field(gt=0)]


class _Entry(BaseModel):
    """One mapping of the file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelEntry(_Entry):
    """`model`: a catalog name, fields that differ from the catalog's, and how far to scale it down."""

    name: Annotated[str, _named_by(model)]
    num_layers: Size | None = None
    hidden_size: Count | None = None
    ffn_hidden_size: Count | None = None
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    vocab_size: Count | None = None
    num_experts: CountOrZero | None = None
    num_experts_per_token: CountOrZero | None = None
    expert_capacity_factor: Positive | None = None
    norm: Annotated[str, _one_of(NORMS)] | None = None
    activation: Annotated[str, _one_of(ACTIVATIONS)] | None = None
    positions: Annotated[str, _one_of(POSITIONS)] | None = None
    rope_base: Positive | None = None
    max_positions: CountOrZero | None = None
    bias: bool | None = None
    tied_embeddings: bool | None = None
    scale_to: Annotated[str, _named_by(parse_cluster_label)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ModelEntry":
        found = _model_problems(self._overridden())
        if self.scale_to and self.num_layers:
            found.append((("scale_to",), f"chooses num_layers, which is given as {self.num_layers}; leave one out"))
        elif self.scale_to and not found:
            try:
                self.resolve()
            except WattuneError as error:
                found.append((("scale_to",), str(error).removeprefix("scale_to: ")))
        if found:
            raise refuse(found)
        return self

    def resolve(self) -> ModelSpec:
        """The model it names, overridden and scaled down."""
        spec = self._overridden()
        return scale_model(spec, parse_cluster_label(self.scale_to)) if self.scale_to else spec

    def _overridden(self) -> ModelSpec:
        return replace(model(self.name), **self.model_dump(exclude_none=True, exclude={"name", "scale_to"}))


def _model_problems(spec: ModelSpec) -> list[tuple[Path, str]]:
    """Says why a model of these fields cannot exist, field by field."""
    found: list[tuple[Path, str]] = []
    heads, kv_heads, experts, chosen = spec.num_heads, spec.num_kv_heads, spec.num_experts, spec.num_experts_per_token
    if spec.hidden_size % heads:
        found.append((("num_heads",), f"{heads} does not divide hidden_size={spec.hidden_size}; use a divisor"))
    elif spec.positions == "rope" and spec.head_size % 2:
        found.append((("num_heads",), f"{heads} makes head_size={spec.head_size}; rotary positions need an even one"))
    if heads % kv_heads:
        found.append((("num_kv_heads",), f"{kv_heads} does not divide num_heads={heads}; use a divisor"))
    if bool(chosen) != spec.is_moe or chosen > experts:
        allowed = f"1 to num_experts={experts}" if spec.is_moe else "0, as num_experts=0"
        found.append((("num_experts_per_token",), f"got {chosen}, allowed: {allowed}"))
    if spec.expert_capacity_factor is not None and not spec.is_moe:
        found.append((("expert_capacity_factor",), f"{spec.name} has num_experts=0; leave it out"))
    if (spec.positions == "learned") != (spec.max_positions > 0):
        allowed = "at least 1, as positions=learned" if spec.positions == "learned" else "0, as positions=rope"
        found.append((("max_positions",), f"got {spec.max_positions}, allowed: {allowed}"))
    return found


class ClusterEntry(_Entry):
    """`cluster`: the machines, as far as planning needs to know them."""

    device: Annotated[str, _named_by(device)]
    num_nodes: Size = 1
    devices_per_node: Size
    simulate_sensors_of: Annotated[str, _named_by(device)] | None = None
    transformer_engine: bool = False
    nvlink_domain_size: Count | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ClusterEntry":
        if self.num_nodes * self.devices_per_node > LARGEST_WORLD:
            text = f"{self.num_nodes:,} x {self.devices_per_node:,} ranks, allowed: {LARGEST_WORLD:,}; use fewer nodes"
            raise refuse([(("num_nodes",), text)])
        simulated = self.simulate_sensors_of
        if simulated and (self.device != "cpu" or simulated == "cpu"):
            real = sorted(DEVICES.keys() - {"cpu"})
            text = (
                f"got {simulated} on device {self.device}; only device cpu has its sensors simulated; leave it out"
                if self.device != "cpu"
                else f"got cpu, which has no sensors of its own; use one of: {', '.join(real)}, or leave it out"
            )
            raise refuse([(("simulate_sensors_of",), text)])
        return self

    def resolve(self) -> ClusterSpec:
        """The cluster it describes."""
        return ClusterSpec(**self.model_dump())


_TOKENS: Final = TokenFile(path="tokens.bin")
_LORA: Final = Lora(rank=1)


class TokensEntry(_Entry):
    """`workload.tokens`: a file to take tokens from."""

    path: Annotated[str, Field(min_length=1)]
    dtype: Annotated[str, _one_of(tuple(TOKEN_DTYPES))] = _TOKENS.dtype

    def problem(self, seq_len: int) -> str | None:
        """Says why the file cannot be used, if it is on this machine. Its nodes may be other machines."""
        seen = FilePath(self.path)
        if not (seen.is_absolute() and seen.is_file()):  # a relative path starts in the workers' folder
            return None
        return TokenFile(path=self.path, dtype=self.dtype).problem(seq_len)


class LoraEntry(_Entry):
    """`workload.lora`: the adapters."""

    rank: Count
    targets: Annotated[list[Annotated[str, _one_of(LORA_TARGETS)]], Field(min_length=1), AfterValidator(_distinct)] = (
        list(_LORA.targets)
    )


def _routing(value: Any) -> Any:
    """Accepts a word, or the exponent of a skewed routing."""
    words = tuple(name for name in ROUTINGS if name != "skew")
    if isinstance(value, dict):
        if unknown := [name for name in value if name != "skew"]:
            raise refuse([((str(name),), "unknown key; use skew") for name in unknown])
        skew = value.get("skew")
        if isinstance(skew, int | float) and not isinstance(skew, bool) and 0 <= skew < math.inf:
            return value
        raise refuse([(("skew",), got(skew, "a number of at least 0, the exponent of Zipf's law"))])
    if isinstance(value, str) and value not in words:
        raise refuse([((), f'unknown value "{value[:60]}"; {closest(value, words)}, or a mapping such as {{skew: 1}}')])
    if not isinstance(value, str):
        raise refuse([((), got(value, f"{' | '.join(words)}, or a mapping such as {{skew: 1}}"))])
    return value


class WorkloadEntry(_Entry):
    """`workload`: the data and the kind of work."""

    mode: Annotated[str, _one_of(MODES)] = "pretrain"
    seq_len: Count
    global_batch_size: Count
    tokens: TokensEntry | None = None
    lora: LoraEntry | None = None
    routing: Annotated[Any, AfterValidator(_routing)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "WorkloadEntry":
        if self.mode == "lora" and self.lora is None:
            raise refuse([(("lora",), 'missing; mode: lora needs it, such as "lora: {rank: 16, targets: [q, v]}"')])
        if self.mode != "lora" and self.lora is not None:
            raise refuse([(("lora",), f"does nothing with mode: {self.mode}; leave it out, or use mode: lora")])
        if self.tokens is not None and (problem := self.tokens.problem(self.seq_len)):
            raise refuse([(("tokens",), problem)])
        return self

    def plain(self, *, has_experts: bool) -> dict[str, Any]:
        """The entry with every default spelled out; only where there are experts it has a routing."""
        balanced = "balanced" if has_experts else None
        return {**self.model_dump(), "routing": self.routing or balanced}

    def resolve(self, *, has_experts: bool) -> Workload:
        """The workload it describes."""
        written = self.plain(has_experts=has_experts)
        chosen = written["routing"]
        if isinstance(chosen, str):
            written["routing"] = {"by": chosen}
        elif chosen is not None:  # an exponent of 0 gives equal shares
            written["routing"] = {"by": "skew", "skew": float(chosen["skew"])} if chosen["skew"] else {"by": "balanced"}
        return Workload.from_json(written)


_MEASURE: Final = Measure()


class MeasureEntry(_Entry):
    """`measure`: how a trial is measured."""

    warmup_steps: CountOrZero = _MEASURE.warmup_steps
    min_steps: Count = _MEASURE.min_steps
    min_seconds: Annotated[float, Field(ge=0)] = _MEASURE.min_seconds
    profile_steps: CountOrZero | None = _MEASURE.profile_steps
    repeats: Annotated[int, Field(ge=1, le=FIRST_REFERENCE_REPEAT - 2)] = _MEASURE.repeats
    soak_finalists: CountOrZero = _MEASURE.soak_finalists
    soak_seconds: Positive = _MEASURE.soak_seconds
    timeout_s: Positive = _MEASURE.timeout_s
    stall_s: Positive = _MEASURE.stall_s
    reference_every: CountOrZero = _MEASURE.reference_every
    cooldown_temp_c: Positive | None = _MEASURE.cooldown_temp_c
    cooldown_max_s: Positive = _MEASURE.cooldown_max_s

    @model_validator(mode="after")
    def _consistent(self) -> "MeasureEntry":
        needed = {"min_seconds": self.min_seconds, "soak_seconds": self.soak_seconds if self.soak_finalists else 0.0}
        name = max(needed, key=needed.__getitem__)
        if needed[name] >= self.timeout_s:
            text = f"{self.timeout_s:g} leaves no time for {name}={needed[name]:g}; use more than that"
            raise refuse([(("timeout_s",), text)])
        return self


class LimitsEntry(_Entry):
    """`limits`: hard ones; a trial that is measured above one for 1 s is aborted, and never feasible."""

    node_device_power_w: Positive | None = None


ORDERS: Final = ("shuffled", "listed")
"""In which order trials run: drawn by the seed, or as the strategy lists them."""

ISOLATIONS: Final = ("warm", "fresh")
"""`warm`: workers run one trial after another. `fresh`: they start anew for each."""


class FinalistsEntry(_Entry):
    """`search.finalists`: the race that tells the best trials apart after the search."""

    until: Annotated[float, Field(gt=0.5, lt=1)]
    max_share: Annotated[float, Field(gt=0, le=1)]


class BurstEntry(_Entry):
    """`search.ladder.burst`: lengths of a burst."""

    min_steps: Annotated[int, Field(ge=LEAST_BURST_STEPS, le=LARGEST_COUNT)] = 3
    min_seconds: Annotated[float, Field(ge=0)] = 1.5


class LadderEntry(_Entry):
    """`search.ladder`: a burst of each trial, and a full measurement of the best share of them."""

    burst: BurstEntry = BurstEntry()
    promote: Annotated[float, Field(gt=0, lt=1)] = 0.25


class SearchEntry(_Entry):
    """`search`: who proposes trials, how many, in which order they run, and how much of each is measured."""

    strategy: Annotated[str, _named_by(check_strategy)] = "grid"
    num_trials: Count | None = None
    seed: CountOrZero = 0
    order: Annotated[str, _one_of(ORDERS)] = "shuffled"
    reference: Annotated[str, _named_by(check_trial_id)] | None = None
    finalists: FinalistsEntry | None = None
    ladder: LadderEntry | None = None
    early_stop: bool = False


class SpaceFile(_Entry):
    """The whole file."""

    version: Annotated[int, AfterValidator(_readable)] | None = None
    """Version of `study.yaml`, which wattune writes. A space written by hand needs none."""
    record: dict[str, Any] | None = None
    """Number of the space and digests in `study.yaml`, likewise; ignored here."""
    study: Annotated[str, _named_by(check_study_name)]
    model: Annotated[list[ModelEntry], Field(min_length=1), BeforeValidator(_one_or_more), AfterValidator(_distinct)]
    cluster: Annotated[
        list[ClusterEntry], Field(min_length=1), BeforeValidator(_one_or_more), AfterValidator(_distinct)
    ]
    engine: Annotated[
        list[Annotated[str, _named_by(capabilities)]],
        Field(min_length=1),
        BeforeValidator(_one_or_more),
        AfterValidator(_distinct),
    ]
    workload: WorkloadEntry
    space: Annotated[dict[str, Any], AfterValidator(_axes)]
    measure: MeasureEntry = MeasureEntry()
    isolation: Annotated[str, _one_of(ISOLATIONS)] = "warm"
    objective: Annotated[Objective, _parsed_by(parse_objective)]
    constraints: list[Annotated[Constraint, _parsed_by(parse_constraint)]] = []
    limits: LimitsEntry = LimitsEntry()
    search: SearchEntry = SearchEntry()

    @model_validator(mode="after")
    def _consistent(self) -> "SpaceFile":
        if self.workload.routing is not None and not self.has_experts:
            names = ", ".join(entry.name for entry in self.model)
            raise refuse([(("workload", "routing"), f"sends tokens to experts and {names} has none; leave it out")])
        if found := [*self._ladder_problems(), *self._early_stop_problems()]:
            raise refuse(found)
        return self

    def _ladder_problems(self) -> list[tuple[Path, str]]:
        if self.search.ladder is None:
            return []
        burst, full = self.search.ladder.burst, self.measure
        if burst.min_steps < full.min_steps or burst.min_seconds < full.min_seconds:
            return []
        text = (
            f"as long as a full measurement (measure.min_steps={full.min_steps}, measure.min_seconds="
            f"{full.min_seconds:g}); use less, or leave search.ladder out"
        )
        return [(("search", "ladder", "burst"), text)]

    def _early_stop_problems(self) -> list[tuple[Path, str]]:
        metric = self.objective.metric
        if not self.search.early_stop or metric in DECIDED_BY_STEP_TIME:
            return []
        text = f"ranks know step times alone, which do not decide {metric}; leave it out, or use one of "
        return [(("search", "early_stop"), text + ", ".join(DECIDED_BY_STEP_TIME))]

    @property
    def has_experts(self) -> bool:
        """True if any of its models has experts."""
        return any(entry.resolve().is_moe for entry in self.model)

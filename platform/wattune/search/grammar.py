"""The grammar of a search space file: keys, types and bounds, and every problem in words with its path.

pydantic reads the file strictly: a boolean is not an integer, and an unknown key is an error. It goes on after a
problem, so one reading finds all of them. `wattune.search.problems` puts them in words. `wattune.search.reference`
makes the JSON Schema and the page of these classes.
"""

import math
from itertools import product
from pathlib import Path as FilePath
from typing import Annotated, Any, ClassVar, Final

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from wattune.cost.estimate import unpredictable
from wattune.errors import PlanError, closest
from wattune.field_types import LARGEST_COUNT, LARGEST_WORLD, Count, Positive
from wattune.metrics import METRICS, PER_STEP_METRICS
from wattune.objective import Constraint, Objective, parse_constraint, parse_objective
from wattune.plans.axes import AXES, FOUND, SETTINGS, Axis
from wattune.plans.engines import CAPABILITIES, MODES, ROUTINGS, capabilities, runs_program
from wattune.plans.settings import setting_problem
from wattune.scale_down.cut import cluster_of
from wattune.search.cluster_entry import ClusterEntry, cluster_in_short
from wattune.search.command_entry import (
    COMMAND_SCHEMA,
    ENVIRONMENT_SCHEMA,
    FLAGS_SCHEMA,
    OF_PLAN,
    PLAN_SCHEMA,
    STEPS_SCHEMA,
    check_command,
    check_environment,
    check_flags,
    check_steps,
    command_problems,
)
from wattune.search.declared import keys_of
from wattune.search.fields import ALONE, Entry, JsonSchema, Text, distinct, named_by, one_of, parsed_by, repetitions
from wattune.search.model_entry import NAMES, ModelEntry
from wattune.search.plausible import implausible, never_measured
from wattune.search.problems import Path, got, refuse
from wattune.search.search_entry import Search, early_stop_problems, ladder_problems
from wattune.storage.format import FORMAT, check_format
from wattune.storage.study import check_study_name
from wattune.trial import Measure
from wattune.workload import OF_WORK, Lora, TokenFile, Workload

LONGEST_VALUE: Final = 2**16
"""Most entries of one value of an axis, such as a layout."""

_LARGEST_SETTING: Final = 10_000
"""Most watts or megahertz that an axis may ask for; a device's own range is a matter of rules."""


def _axis_problem(axis: Axis, value: Any) -> str | None:
    """Says why an axis cannot have a value; None where it can."""
    if axis.kind == "count":
        most = LARGEST_COUNT if axis.name == "micro_batch_size" else LARGEST_WORLD
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
            return None
        return got(value, f"an integer from 1 to {most:,}")
    choices = (FOUND, *axis.choices) if axis.kind == "setting" else axis.choices
    if isinstance(value, str) and value in choices:
        return None
    if axis.kind == "setting" and not axis.choices:
        whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST_SETTING
        return None if whole else got(value, f"{FOUND}, or an integer from 1 to {_LARGEST_SETTING:,}")
    if isinstance(value, str) and axis.kind in ("choice", "setting"):
        return f'unknown value "{value[:60]}"; {closest(value, choices)}'
    if axis.kind in ("choice", "setting"):
        return got(value, " | ".join(choices))
    least = 1 if axis.kind == "layout" else 0
    whole = isinstance(value, list) and 0 < len(value) <= LONGEST_VALUE
    if whole and all(type(item) is int and least <= item <= LARGEST_WORLD for item in value):
        return None
    what = "layers per stage, each at least 1" if axis.kind == "layout" else "device slots, each at least 0"
    return got(value, f"{' | '.join(axis.choices)}, or a list of {what}")


def _axes(space: dict[str, Any] | None) -> dict[str, list[Any]]:
    """Accepts axes that exist, each with a list of different values that it can have."""
    if space is None:
        raise refuse([((), got(space, "a mapping"))])
    found: list[tuple[Path, str]] = []
    if not space:
        found.append(((), 'empty; name at least one axis with its values, such as "tp: [1, 2]"'))
    for name, values in space.items():
        if name not in AXES:
            found.append(((name,), _not_an_axis(str(name))))
        elif not isinstance(values, list):
            found.append(((name,), got(values, "a list of values, in brackets")))
        elif not values:
            found.append(((name,), f"empty; list values, or leave the axis out to take {AXES[name].neutral}"))
        else:
            wrong = [((i,), text) for i, value in enumerate(values) if (text := _axis_problem(AXES[name], value))]
            found += [((name, *path), text) for path, text in wrong or repetitions([repr(value) for value in values])]
    if found:
        raise refuse(found)
    return space


def _plan_entries(plans: list[Any]) -> list[Any]:
    """Accepts plans: mappings of axes to one value each, with a mapping of flags, and what they are of."""
    found: list[tuple[Path, str]] = []
    for index, plan in enumerate(plans):
        if not isinstance(plan, dict) or not plan:
            found.append(((index,), got(plan, "a mapping of axes, such as {tp: 8, pp: 1}")))
            continue
        for name, value in plan.items():
            if name == "flags" and not isinstance(value, dict):
                found.append(((index, name), got(value, "a mapping of flags, each with its value")))
            elif name == "flags":
                try:
                    check_flags({flag: [own] for flag, own in value.items()})
                except PydanticCustomError as error:
                    found += [((index, name, path[0]), text) for path, text in (error.context or {})["found"]]
            elif name in OF_PLAN[:4]:
                if not isinstance(value, str):
                    found.append(((index, name), got(value, f"the name of one {name} of the file")))
            elif name not in (*AXES, *OF_PLAN, "dp"):
                found.append(((index, name), _not_an_axis(str(name))))
            elif text := _axis_problem(AXES.get(name, AXES["micro_batch_size"]), value):
                found.append(((index, name), text))
    if found := found or repetitions([repr(sorted(plan.items())) for plan in plans]):
        raise refuse(found)
    return plans


def _not_an_axis(name: str) -> str:
    if name in OF_WORK:
        return f"is no axis of a plan; list its values in workload.{name}"
    if name in ("model", "cluster", "engine"):
        return f"is no axis of a plan; list its values at the top of the file, as {name}"
    return f"unknown axis; {closest(name, AXES)}"


def _readable(found: int) -> int:
    check_format(found)
    return found


def _axes_schema() -> JsonSchema:
    """Describes the axes in JSON Schema: names, values, meanings."""
    properties: JsonSchema = {}
    for axis in AXES.values():
        most = LARGEST_COUNT if axis.name == "micro_batch_size" else LARGEST_WORLD
        count = {"type": "integer", "minimum": 1, "maximum": most}
        least = 1 if axis.kind == "layout" else 0
        several = {
            "type": "array",
            "items": {"type": "integer", "minimum": least, "maximum": LARGEST_WORLD},
            "minItems": 1,
            "maxItems": LONGEST_VALUE,
        }
        names = {"enum": [FOUND, *axis.choices] if axis.kind == "setting" else list(axis.choices)}
        setting = {"anyOf": [names, {"type": "integer", "minimum": 1, "maximum": _LARGEST_SETTING}]}
        items = {"count": count, "choice": names, "setting": names if axis.choices else setting}
        item = items.get(axis.kind, {"anyOf": [names, several]})
        properties[axis.name] = {
            "type": "array",
            "minItems": 1,
            "uniqueItems": True,
            "items": item,
            "description": f"{axis.meaning[0].upper()}{axis.meaning[1:]}. Left out: {axis.neutral}.",
        }
    return {"type": "object", "properties": properties, "additionalProperties": False, "minProperties": 1}


@keys_of(TokenFile)
class TokensEntry(Entry):
    """A file to take tokens from, instead of drawing them from the seed."""

    path: Annotated[str, Field(min_length=1, examples=["/data/corpus.bin"])]
    """Path on every node. A relative one starts in the workers' folder."""

    def problem(self, seq_len: int) -> str | None:
        """Says why the file cannot be used, if it is on this machine. Its nodes may be other machines."""
        seen = FilePath(self.path)
        if not (seen.is_absolute() and seen.is_file()):  # a relative path starts in the workers' folder
            return None
        return TokenFile(**self.model_dump()).problem(seq_len)


@keys_of(Lora, examples={"rank": 16})
class LoraEntry(Entry):
    """Low-rank adapters, trained beside frozen weights."""


_ROUTING_WORDS: Final = tuple(name for name in ROUTINGS if name != "skew")


def _routing(value: Any) -> Any:
    """Accepts a word, or the exponent of a skewed routing."""
    words = _ROUTING_WORDS
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


_ROUTING_SCHEMA: Final[JsonSchema] = {
    "anyOf": [
        {"enum": list(_ROUTING_WORDS)},
        {
            "type": "object",
            "properties": {"skew": {"type": "number", "minimum": 0}},
            "required": ["skew"],
            "additionalProperties": False,
        },
    ],
    "examples": ["balanced", {"skew": 1.2}],
}


class WorkloadEntry(Entry):
    """The data and the kind of work."""

    stand_ins: ClassVar = {"seq_len": 1, "global_batch_size": 1}

    mode: Annotated[list[Annotated[str, one_of(MODES)]], Field(min_length=1), *ALONE, AfterValidator(distinct)] = Field(
        default="pretrain", validate_default=True
    )
    """`pretrain` trains all weights, `lora` adapters, `prefill` nothing: prompts run forward. A list is a dimension."""
    seq_len: Annotated[list[Count], Field(min_length=1, examples=[4096]), *ALONE, AfterValidator(distinct)]
    """Tokens of a sequence. A list makes it a dimension of the study."""
    global_batch_size: Annotated[list[Count], Field(min_length=1, examples=[16]), *ALONE, AfterValidator(distinct)]
    """Sequences of a step over all ranks. A list makes it a dimension of the study."""
    tokens: TokensEntry | None = None
    """Source of the tokens. None draws them from the seed."""
    lora: LoraEntry | None = None
    """Adapters; `mode: lora` needs them."""
    routing: Annotated[Any, AfterValidator(_routing), WithJsonSchema(_ROUTING_SCHEMA)] | None = None
    """Routing of tokens to experts: `balanced`, `learned`, or the exponent of a skewed one. Left out: balanced."""

    def problems_as_a_whole(self, context: Any) -> list[tuple[Path, str]]:
        """Finds problems of keys that are valid one by one."""
        del context
        found: list[tuple[Path, str]] = []
        if "lora" in self.mode and self.lora is None:
            found.append((("lora",), 'missing; mode: lora needs it, such as "lora: {rank: 16, targets: [q, v]}"'))
        if "lora" not in self.mode and self.lora is not None:
            found.append(
                (("lora",), f"does nothing with mode: {', '.join(self.mode)}; leave it out, or use mode: lora")
            )
        if self.tokens is not None and (problem := self.tokens.problem(max(self.seq_len))):
            found.append((("tokens",), problem))
        return found

    def plain(self, *, has_experts: bool) -> dict[str, Any]:
        """The entry with every default spelled out; only where there are experts it has a routing."""
        balanced = "balanced" if has_experts else None
        sizes = {name: own[0] if len(own := getattr(self, name)) == 1 else list(own) for name in OF_WORK}
        return {**self.model_dump(), **sizes, "routing": self.routing or balanced}

    def resolve(self, *, has_experts: bool) -> tuple[Workload, ...]:
        """The workloads it describes: every mode with every sequence length and every batch."""
        written = self.plain(has_experts=has_experts)
        chosen = written["routing"]
        if isinstance(chosen, str):
            written["routing"] = {"by": chosen}
        elif chosen is not None:  # an exponent of 0 gives equal shares
            written["routing"] = {"by": "skew", "skew": float(chosen["skew"])} if chosen["skew"] else {"by": "balanced"}
        each = (
            dict(zip(OF_WORK, one, strict=True)) for one in product(self.mode, self.seq_len, self.global_batch_size)
        )
        adapters = {True: written["lora"], False: None}
        return tuple(Workload.from_json({**written, **one, "lora": adapters[one["mode"] == "lora"]}) for one in each)


@keys_of(Measure)
class MeasureEntry(Entry):
    """Measurement of a trial."""

    @property
    def settings(self) -> Measure:
        """The settings that trials are measured by."""
        return Measure(**self.model_dump())

    def problems_as_a_whole(self, context: Any) -> list[tuple[Path, str]]:
        """Finds problems of keys that are valid one by one."""
        del context
        own = self.settings
        needed = {"min_seconds": own.min_seconds, "soak_seconds": own.soak_seconds if own.soak_finalists else 0.0}
        name = max(needed, key=needed.__getitem__)
        if needed[name] >= own.timeout_s:
            text = f"{own.timeout_s:g} leaves no time for {name}={needed[name]:g}; use more than that"
            return [(("timeout_s",), text)]
        return []


class LimitsEntry(Entry):
    """Hard limits: a trial that is measured above one for 1 s is aborted, and never feasible."""

    node_device_power_w: Annotated[Positive, Field(examples=[2900])] | None = None
    """Power of all devices of a node together. None is no limit."""


ISOLATIONS: Final = ("warm", "fresh")
"""`warm`: workers run one trial after another. `fresh`: they start anew for each."""


_DIRECTIONS: Final = {"higher": "maximize", "lower": "minimize"}
_OBJECTIVES: Final = [f"{_DIRECTIONS[one.better]} {one.name}" for one in METRICS.values() if one.better in _DIRECTIONS]
_OBJECTIVE: Final = parsed_by(
    parse_objective,
    names=_OBJECTIVES,
    pattern=r"^\s*(maximize|minimize)\s+\w+\s*$",
    examples=["maximize tokens_per_s", "minimize energy_per_token_j"],
)
_CONSTRAINT: Final = parsed_by(
    parse_constraint,
    pattern=r"^\s*\w+\s*(<=|>=|<|>)\s*[+-]?[0-9.]+([eE][+-]?[0-9]+)?\s*(\*\s*\w+\s*)?$",
    examples=["node_device_power_peak_1s_w <= 2600", "device_power_mean_w <= 0.8 * device_power_limit_w"],
)


class SpaceFile(Entry):
    """A search space of wattune: what to train, where, which settings to try, and what the best one is."""

    stand_ins: ClassVar = {
        "study": "study",
        "model": {"name": "mixtral_8x7b"},
        "cluster": {"device": "cpu", "devices_per_node": 1},
        "engine": "torch",
        "workload": {"seq_len": 1, "global_batch_size": 1},
        "space": {"tp": [1]},
        "objective": "maximize tokens_per_s",
    }

    format: Annotated[int, AfterValidator(_readable), Field(examples=[FORMAT])] | None = None
    """Format of `study.yaml`, which wattune writes. A space written by hand needs none."""
    record: dict[str, Any] | None = None
    """Number of the space and digests in `study.yaml`, likewise; ignored here."""
    study: Annotated[str, named_by(check_study_name, examples=["llama_slice"])]
    """Name of the study and of its folder."""
    model: (
        Annotated[
            list[Annotated[ModelEntry, Text(lambda text: {"name": text}, NAMES, is_short=True)]],
            Field(min_length=1),
            *ALONE,
            AfterValidator(distinct),
        ]
        | None
    ) = None
    """Model to train: a catalog name, a mapping, or a list of them. Only a command needs none."""
    cluster: Annotated[
        list[Annotated[ClusterEntry, Text(cluster_in_short, {"examples": ["1x4 h200_sxm"]}, is_short=True)]],
        Field(min_length=1),
        *ALONE,
        AfterValidator(distinct),
    ]
    """Machines to train on: a text such as `1x4 h200_sxm`, a mapping, or a list of them."""
    engine: Annotated[
        list[Annotated[str, named_by(capabilities, names=tuple(CAPABILITIES))]],
        Field(min_length=1),
        *ALONE,
        AfterValidator(distinct),
    ]
    """Engine that trains: one, or a list."""
    command: Annotated[Any, AfterValidator(check_command), WithJsonSchema(COMMAND_SCHEMA)] | None = None
    """With `engine: command`: your command with each trial's values, for no shell, or `{run: COMMAND, warm: true}`."""
    env: Annotated[dict[str, Any], AfterValidator(check_environment), WithJsonSchema(ENVIRONMENT_SCHEMA)] = Field(
        default={}
    )
    """Variables that every trial's processes get, filled likewise."""
    flags: Annotated[dict[str, Any], AfterValidator(check_flags), WithJsonSchema(FLAGS_SCHEMA)] = Field(default={})
    """Axes of your own, each with its values; `command` or `env` uses them by name."""
    requires: Annotated[list[str], AfterValidator(distinct)] = Field(
        default=[], examples=[["tp * pp <= 8", "nccl_algo == Ring or tp == 1", "tp == 8 -> pp in [1, 2]"]]
    )
    """Conditions that every trial keeps: `FIELD OP VALUE`, `in [..]`, products, with `and`, `or`, `->`, parentheses."""
    steps: Annotated[Any, AfterValidator(check_steps), WithJsonSchema(STEPS_SCHEMA)] | None = None
    """With `engine: command`: where its steps come from. None is `auto`, the best source that is there."""
    workload: WorkloadEntry | None = None
    """The data and the kind of work. Only a command needs none."""
    space: Annotated[dict[str, Any] | None, AfterValidator(_axes), WithJsonSchema(_axes_schema())] = None
    """Axes to vary, each with its values. `dp` follows: ranks / (tp * pp * cp). Only flags can stand in for it."""
    plans: Annotated[
        list[Annotated[Any, WithJsonSchema(PLAN_SCHEMA)]],
        AfterValidator(_plan_entries),
        Field(examples=[[{"tp": 8, "pp": 1}, {"tp": 4, "pp": 2, "sharding": "zero1"}]]),
    ] = Field(default=[])
    """Plans in mind: a value of each axis, own `flags`, the model or size it is of, its `dp`; crossed with the rest."""
    measure: MeasureEntry = MeasureEntry()
    """Measurement of a trial."""
    isolation: Annotated[str, one_of(ISOLATIONS)] = "warm"
    """`warm`: workers run one trial after another. `fresh`: they start anew for each."""
    objective: Annotated[Objective, _OBJECTIVE]
    """`maximize METRIC` or `minimize METRIC` (`wattune metrics`)."""
    constraints: list[Annotated[Constraint, _CONSTRAINT]] = Field(default=[])
    """Bounds that the best trial holds: `METRIC OP NUMBER`, or `METRIC OP NUMBER * METRIC`."""
    limits: LimitsEntry = LimitsEntry()
    """Hard limits; a trial above one is aborted."""
    search: Search = Search()
    """The strategy that proposes trials, their number and order."""

    def problems_as_a_whole(self, context: Any) -> list[tuple[Path, str]]:
        """Finds problems of keys that are valid one by one."""
        del context
        measure = self.measure.settings
        found: list[tuple[Path, str]] = []
        found += command_problems(self)
        if self.workload is not None and self.workload.routing is not None and self.model and not self.has_experts:
            names = ", ".join(entry.name for entry in self.model)
            found.append((("workload", "routing"), f"sends tokens to experts and {names} has none; leave it out"))
        found += (
            self._settings()
            + self._scale_problems()
            + self._names_twice()
            + ladder_problems(self.search, measure.min_steps, measure.min_seconds)
        )
        found += early_stop_problems(self.search, self.objective.metric)
        if self.format is None:  # `study.yaml` was accepted once; a study goes on as it began
            clusters = [entry.resolve() for entry in self.cluster]
            found += implausible(self.objective, self.constraints, self.limits.node_device_power_w, clusters)
            found += never_measured(
                self.objective,
                self.constraints,
                engines=self.engine,
                clusters=clusters,
                profile_steps=measure.profile_steps,
            )
            found += self._incomparable()
        return found

    def _incomparable(self) -> list[tuple[Path, str]]:
        """Finds an objective of a step in a study whose steps have different sizes."""
        sizes = self.workload
        steps = {seq_len * batch for seq_len in sizes.seq_len for batch in sizes.global_batch_size} if sizes else {0}
        if len(steps) == 1 or self.objective.metric not in PER_STEP_METRICS:
            return []
        text = (
            f"{self.objective.metric} is of a step, and steps of this workload have {min(steps):,} to {max(steps):,} "
            "tokens; use tokens_per_s or energy_per_token_j"
        )
        return [(("objective",), text)]

    def _scale_problems(self) -> list[tuple[Path, str]]:
        """Finds targets that no small run of the space can have."""
        found: list[tuple[Path, str]] = []
        scaled = [(index, one.target) for index, one in enumerate(self.model or ()) if one.target]
        for (index, target), cluster in product(scaled, [entry.resolve() for entry in self.cluster]):
            try:
                device = cluster_of(target, cluster).sensed_device
                text = "" if device.power_limit_w is not None else unpredictable(device)
            except PlanError as error:
                text = str(error)
            if any(map(runs_program, self.engine)):
                text = "needs a built-in engine: nobody knows what a command computes; leave it out"
            found += [(("model", index, "scale_to"), text)] if text else []
        if scaled and self.limits.node_device_power_w is not None:
            text = "stops small runs, which are on other nodes than those it is of; bound the large ones by constraints"
            found.append((("limits", "node_device_power_w"), text))
        return found

    def _settings(self) -> list[tuple[Path, str]]:
        """Finds settings that no cluster of the space can have: bad input. Those that some can have are for rules."""
        clusters = [entry.resolve() for entry in self.cluster]
        written: list[tuple[Path, str, Any]]
        written = [(("space", a, at), a, v) for a, values in (self.space or {}).items() for at, v in enumerate(values)]
        written += [(("plans", at, a), a, v) for at, plan in enumerate(self.plans) for a, v in plan.items()]
        alike: dict[tuple[str, str], list[tuple[Path, Any]]] = {}
        for path, axis, value in written:
            problems = [setting_problem(one, axis, value) for one in clusters if axis in SETTINGS and value != FOUND]
            if problems and problems[0] and all(problems):  # values that are wrong alike are one line
                alike.setdefault((axis, problems[0].removeprefix(f"{axis}={value}")), []).append((path, value))
        found = [(axis, text, *zip(*each, strict=True)) for (axis, text), each in alike.items()]
        return [(paths[0], f"{axis}={', '.join(map(str, values))}{text}") for axis, text, paths, values in found]

    def _names_twice(self) -> list[tuple[Path, str]]:
        """Finds devices of the space's own that share a name and differ."""
        first: dict[str, tuple[int, Any]] = {}
        found: list[tuple[Path, str]] = []
        for index, own in enumerate(entry.resolve().own_device for entry in self.cluster):
            if own is None:
                continue
            earlier, same = first.setdefault(own.name, (index, own))
            if same != own:
                found.append((("cluster", index, "device", "name"), f"{own.name} is another device in entry {earlier}"))
        return found

    @property
    def has_experts(self) -> bool:
        """True if any of its models has experts."""
        return any(entry.resolve().is_moe for entry in self.model or ())

"""`command`, `env`, `flags`, `requires` and `steps` of a search space: the program that trials run.

The keys are checked against each other: a flag that nothing uses, or an axis whose values change nothing in the
command, is a problem of the space and never a silent repetition of one trial.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from wattune.errors import SpaceError, WattuneError
from wattune.metrics import METRICS, PER_STEP_METRICS
from wattune.objective import Constraint, Field, Objective, field_of
from wattune.plans.axes import AXES, SETTINGS, Plan
from wattune.plans.engines import CAPABILITIES, runs_program
from wattune.plans.program import (
    FILL_INS,
    FLAG_NAME,
    OF_CLUSTER,
    OF_WORKLOAD,
    PLACED,
    RUN_TIME,
    FlagValue,
    alone_in,
    is_arguments,
    names_in,
    shell_problem,
    shown_names,
    split_command,
    template_problem,
    text_of,
    used_names,
)
from wattune.search.fields import JsonSchema, repetitions
from wattune.search.plausible import asked_for
from wattune.search.problems import Path, got, refuse
from wattune.search.requirements import parse_requirement
from wattune.steps.source import KINDS, PRESETS, UNITS_NS, parse_source
from wattune.workload import OF_WORK

MOST_VALUES: Final = 1000
"""Most values of a flag."""

OF_PLAN: Final = ("model", "cluster", "engine", *OF_WORK)
"""Dimensions outside of a plan that an entry of `plans` may name: it is then crossed with that value alone."""

PLAN_SCHEMA: Final[JsonSchema] = {
    "type": "object",
    "properties": {  # the axes refer to those of `space`: `wattune.search.reference`
        "flags": {"type": "object"},
        **{name: {"type": "string"} for name in OF_PLAN[:4]},
        **{name: {"type": "integer", "minimum": 1} for name in (*OF_PLAN[4:], "dp")},
    },
    "additionalProperties": False,
    "minProperties": 1,
}
"""Description of an entry of `plans` in JSON Schema."""

LONGEST_TEXT: Final = 4096
"""Most characters of an argument, a variable's value or a flag's value."""

LARGEST_FLAG: Final = 2**64
"""Bound on whole numbers of a flag: models count in floats, which hold no number of hundreds of digits."""

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_OURS: Final = ("WATTUNE_", "RAY_")
_OWNED: Final = {
    "CUDA_VISIBLE_DEVICES": "says which devices a trial has",
    "HIP_VISIBLE_DEVICES": "says which devices a trial has",
    "ROCR_VISIBLE_DEVICES": "says which devices a trial has",
}
"""Variables that wattune or Ray set themselves."""

NEEDS_TOKENS: Final = ("tokens_per_s", "tokens_per_s_per_device", "energy_per_token_j", "tokens_per_j")
_NEEDS_STEPS: Final = (*PER_STEP_METRICS, *NEEDS_TOKENS, "mfu_frac", "startup_s", "overhead_frac")
_PYTHON: Final = re.compile(r"(\S*/)?(python[\d.]*|torchrun) (?!.*--(no-python|numa))(?!(-[^m\s]\S* )*-c )")
_WITHOUT_TOKENS: Final = ("optimizer", "pattern")
"""Sources of steps that tell no tokens."""

_NAMES: Final = ("engine", "device", "mode")
"""Fields of conditions that are names and no fill-ins."""


class SpaceLike(Protocol):
    """The parts of a space that its command is checked against; None where the file has no such key."""

    format: int | None
    engine: list[str]
    command: Any
    env: dict[str, Any]
    flags: dict[str, Any]
    requires: list[str]
    steps: Any
    plans: list[dict[str, Any]]
    space: dict[str, Any] | None
    model: Any
    workload: Any
    cluster: Any
    measure: Any
    objective: Objective
    constraints: list[Constraint]


def check_command(value: Any) -> Any:
    """Accepts a command: a text, a list of arguments, or a mapping with one of them as `run`, and `warm`."""
    if isinstance(value, dict):
        is_warm = value.get("warm", False)
        if value.keys() - {"warm"} != {"run"} or type(is_warm) is not bool or isinstance(value["run"], dict):
            raise refuse([((), got(value, "{run: COMMAND, warm: true}"))])
        check_command(value["run"])
        if is_warm and not _PYTHON.match(" ".join(split_command(value))):
            raise refuse([(("run",), "is no python SCRIPT, python -m MODULE or torchrun: use one, or leave out warm")])
        return value
    if not isinstance(value, str | list):
        raise refuse([((), got(value, 'a text such as "torchrun train.py --tp {tp}", or a list of arguments'))])
    if isinstance(value, list):
        wrong = [((i,), got(one, "a text; quote a number")) for i, one in enumerate(value) if not isinstance(one, str)]
        if wrong:
            raise refuse(wrong)
    _refuse_by(lambda: split_command(value))
    if any(len(one) > LONGEST_TEXT or "\0" in one for one in split_command(value)):
        raise refuse([((), f"has an argument of more than {LONGEST_TEXT} characters, or with a zero byte; shorten it")])
    return value


def check_environment(value: dict[str, Any]) -> dict[str, str]:
    """Accepts variables with texts or numbers, and keeps them as texts."""
    found: list[tuple[Path, str]] = []
    for name, own in value.items():
        if not _VARIABLE.fullmatch(str(name)):
            found.append(((name,), "is no name of a variable; use letters, digits and _"))
        elif str(name).startswith(_OURS):
            found.append(((name,), f"belongs to {'Ray' if name.startswith('RAY_') else 'wattune'}; leave it out"))
        elif name in _OWNED:
            found.append(((name,), f"{_OWNED[name]}, which wattune sets; leave it out"))
        elif isinstance(own, bool) or not isinstance(own, str | int | float):
            found.append(((name,), got(own, 'a text or a number, such as "{nccl_algo}"')))
        elif "\0" in str(own) or len(str(own)) > LONGEST_TEXT:
            found.append(((name,), f"has a zero byte or more than {LONGEST_TEXT} characters; shorten it"))
    if found:
        raise refuse(found)
    return {name: str(own) for name, own in value.items()}


def check_flags(value: dict[str, Any]) -> dict[str, list[FlagValue]]:
    """Accepts flags with lists of different values: numbers, texts, booleans, and lists of arguments.

    A single value that is no list may stand without one.
    """
    found: list[tuple[Path, str]] = []
    for name, written in value.items():
        values = written if isinstance(written, list) else [written]
        if not re.fullmatch(FLAG_NAME, str(name)):
            found.append(((name,), "is no name of a flag; use letters, digits and _, up to 64"))
        elif name in FILL_INS or name in (*AXES, *_NAMES):
            use = f"list its values in space.{name}" if name in AXES else "call the flag otherwise"
            found.append(((name,), f"means something already; {use}"))
        elif name in METRICS:
            found.append(((name,), "is a metric's name, so that conditions on it would mean two things; rename it"))
        elif not values:
            found.append(((name,), "empty; list values, or leave the flag out"))
        elif len(values) > MOST_VALUES:
            found.append(((name,), f"has {len(values):,} values, allowed: {MOST_VALUES:,}; list fewer"))
        else:
            wrong = [((i,), text) for i, one in enumerate(values) if (text := _flag_problem(one))]
            found += [((name, *path), text) for path, text in wrong or _alike(values)]
            if not wrong and len({isinstance(one, bool) for one in values}) > 1:
                found.append(((name,), "mixes true or false with other values; quote them all, or use one kind"))
    if found:
        raise refuse(found)
    return {name: list(values) if isinstance(values, list) else [values] for name, values in value.items()}


def _alike(values: list[FlagValue]) -> list[tuple[Path, str]]:
    """Finds values of a flag that an earlier one equals, as text or as number: 1 and 1.0 would be one trial."""
    values = [flag_value(one) for one in values]
    kinds = [(type(one) in (bool, tuple), one) for one in values]
    return repetitions([text_of(one) for one in values]) or repetitions([str(kinds.index(one)) for one in kinds])


def flag_value(written: Any) -> FlagValue:
    """Returns a value of a flag as a trial holds it: a list of arguments is a tuple of texts."""
    return tuple(map(text_of, written)) if isinstance(written, list) else written


def _flag_problem(value: Any) -> str | None:
    if isinstance(value, int) and abs(value) >= LARGEST_FLAG:
        return "is a number of more than 64 bits; quote it, or use a smaller one"
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return None
    if isinstance(value, str) and len(value) <= LONGEST_TEXT and value.isprintable():
        return None
    if isinstance(value, list) and not any(isinstance(one, bool | list) or _flag_problem(one) for one in value):
        return None
    return got(value, "a number, a text of one line, true or false, or a list of arguments")


def check_steps(value: Any) -> Any:
    """Accepts a source of steps."""
    _refuse_by(lambda: parse_source(value), "steps")
    return value


def _refuse_by(check: Any, key: str = "") -> None:
    try:
        check()
    except WattuneError as error:
        raise refuse([((), re.sub(rf"^{key}[.:]\s*", "", str(error)) if key else str(error))]) from None


_RUN: Final = [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]
_WARM: Final = {"properties": {"run": {"anyOf": _RUN}, "warm": {"type": "boolean"}}, "additionalProperties": False}
COMMAND_SCHEMA: Final[JsonSchema] = {
    "anyOf": [*_RUN, {"type": "object", "required": ["run"], **_WARM}],
    "examples": ["torchrun --nproc-per-node {devices_per_node} train.py --tp {tp} --lr {lr}"],
}
ENVIRONMENT_SCHEMA: Final[JsonSchema] = {
    "type": "object",
    "additionalProperties": {"type": ["string", "number"]},
    "examples": [{"NCCL_ALGO": "{nccl_algo}"}],
}
_SCALAR: Final = {"type": ["string", "number", "boolean"]}
_ARGUMENTS: Final = {"type": "array", "items": {"type": ["string", "number"]}}
_VALUE: Final = {"anyOf": [_SCALAR, _ARGUMENTS]}
FLAGS_SCHEMA: Final[JsonSchema] = {
    "type": "object",
    "propertyNames": {"pattern": f"^{FLAG_NAME}$"},
    "additionalProperties": {"anyOf": [{"type": "array", "items": _VALUE, "minItems": 1}, _SCALAR]},
    "examples": [{"lr": [0.001, 0.01], "plan": [["--tp", "8"], ["--tp", "4", "--pp", "2"]]}],
}
STEPS_SCHEMA: Final[JsonSchema] = {
    "anyOf": [
        {"enum": [*(kind for kind in KINDS if kind != "pattern"), *PRESETS]},
        {"type": "string", "pattern": f"^pattern(/({'|'.join(UNITS_NS)}))?:"},
        {
            "type": "object",
            "properties": {"pattern": {"type": "string"}, "unit": {"enum": list(UNITS_NS)}},
            "required": ["pattern"],
            "additionalProperties": False,
        },
    ],
    "examples": ["auto"],
}


Products = list[tuple[dict[str, Sequence[Any]], dict[str, Sequence[Any]]]]


def products(
    axes: Mapping[str, Sequence[Any]], flags: Mapping[str, Sequence[Any]], plans: Sequence[Mapping[str, Any]]
) -> Products:
    """Returns the values by axis and by flag of each plan of a space: what it says itself, crossed with the rest.

    A plan's own value stands in the place of those that `space` and `flags` list. Without plans there is one product.
    """
    return [
        (
            {**axes, **{name: [value] for name, value in plan.items() if name in AXES}},
            {**flags, **{name: [value] for name, value in plan.get("flags", {}).items()}},
        )
        for plan in plans or [{}]
    ]


def values_by_name(space: SpaceLike) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Returns all values of axes, and of flags, in the plans of a space; where an axis is left out, the neutral one."""
    found: tuple[dict[str, list[Any]], dict[str, list[Any]]] = ({}, {})
    each = products(space.space or {}, space.flags, space.plans)
    for product in each:
        for kind, names in enumerate(product):
            for name, values in names.items():
                left = any(name not in other[kind] for other in each) and kind == 0
                known = found[kind].setdefault(name, [getattr(Plan(), name)] if left else [])
                known += [value for value in values if value not in known]
    return found


def templates_of(space: SpaceLike) -> list[tuple[Path, str]]:
    """Lists every template of a space with its path."""
    command = space.command
    arguments = [] if command is None else list(split_command(command))
    places: list[Path] = [("command", *(["run"] if isinstance(command, dict) else ()))] * len(arguments)
    if isinstance(command, list):
        places = [("command", index) for index in range(len(arguments))]
    return [*zip(places, arguments, strict=True), *((("env", name), text) for name, text in space.env.items())]


def known_names(space: SpaceLike) -> list[str]:
    """Lists the names that templates of a space may use."""
    unknown = {PLACED, *(() if space.model else ("model",)), *(() if space.workload else OF_WORKLOAD)}
    if not any(map(runs_program, space.engine)):
        unknown |= set(RUN_TIME)
    return [name for name in (*FILL_INS, *values_by_name(space)[1]) if name not in unknown]


def fields_of(space: SpaceLike) -> dict[str, Field]:
    """Returns the fields that a requirement of a space may name."""
    numbers = (*OF_CLUSTER, *(OF_WORKLOAD if space.workload else ()))
    found = {
        name: Field(kind=int) if axis.kind == "count" else Field(kind=str, choices=axis.choices)
        for name, axis in AXES.items()
        if axis.kind in ("count", "choice")
    }
    found |= {name: Field(kind=int) for name in numbers}
    found |= {"engine": Field(kind=str, choices=tuple(CAPABILITIES)), "device": Field(kind=str)}
    found |= {"model": Field(kind=str)} if space.model else {}
    return found | {name: field_of(map(flag_value, values)) for name, values in values_by_name(space)[1].items()}


def command_problems(space: SpaceLike) -> list[tuple[Path, str]]:
    """Finds problems of a space's command, environment, flags and requirements with the rest of it."""
    return [
        *_missing(space),
        *_plans(space),
        *_templates(space),
        *_arguments(space),
        *_unused(space),
        *_without_effect(space),
        *_requirements(space),
        *(_questions(space) if space.format is None else ()),  # a stored study was accepted once
    ]


def _trained(space: SpaceLike) -> list[str]:
    """Returns the engines of a space that train by themselves."""
    return [engine for engine in space.engine if not runs_program(engine)]


def _missing(space: SpaceLike) -> Iterable[tuple[Path, str]]:
    trained = _trained(space)
    runs = len(trained) < len(space.engine)
    for key in ("model", "workload"):
        if trained and getattr(space, key) is None:
            yield (key,), "missing; add it"
    if space.space is None and not space.flags and not space.plans:
        # The keys named as KEY=VALUE make it silent where they are wrong: then it would only follow from that.
        yield ("space",), "missing, with flags={} and plans=[]; add axes, flags or plans"
    if runs and space.command is None:
        yield ("command",), 'missing; engine: command runs it, such as command: "torchrun train.py --tp {tp}"'
    if not runs:
        names = ", ".join(trained)
        if space.command is not None:
            yield ("command",), f"does nothing with engine: {names}; use engine: command, or leave it out"
        if space.steps is not None:
            yield ("steps",), f"does nothing with engine: {names}, which times its steps itself; leave it out"


def _plans(space: SpaceLike) -> Iterable[tuple[Path, str]]:
    """Finds what plans leave open, what they leave nothing of, and what they are of that the file has not."""
    if not space.plans:
        return
    sizes = space.workload
    own: dict[str, list[Any]] = {
        "model": [entry.name for entry in space.model or ()],
        "cluster": [entry.resolve().label for entry in space.cluster],
        "engine": space.engine,
        **{name: getattr(sizes, name) if sizes else [] for name in OF_WORK},
    }
    for index, plan in enumerate(space.plans):
        for name in OF_PLAN:
            if name in plan and plan[name] not in own[name]:
                yield (
                    ("plans", index, name),
                    f"got {plan[name]}, none of the file's own: {', '.join(map(str, own[name]))}",
                )
    each = products({}, {}, space.plans)
    for key, kind in (("space", 0), ("flags", 1)):
        for name in getattr(space, key) or {}:
            if all(name in product[kind] for product in each):
                yield (key, name), "does nothing, as each entry of plans has its own; leave it out"
    for name in dict.fromkeys(name for _, flags in each for name in flags if name not in space.flags):
        for index, (_, flags) in enumerate(each):
            if name not in flags:
                yield ("plans", index, "flags"), f"has no {name}, as other plans have; add it, or its value to flags"


def _templates(space: SpaceLike) -> Iterable[tuple[Path, str]]:
    known = known_names(space)
    trained = _trained(space)
    if space.command is not None and (problem := shell_problem(space.command)):
        yield ("command",), problem
    for path, template in templates_of(space):
        problem = template_problem(template, known)
        if problem:
            missing = {"model": "model", **dict.fromkeys(OF_WORKLOAD, "workload")}
            named = next((name for name in missing if f'"{{{name}}}"' in problem), None)
            if named is not None:
                problem = f'"{{{named}}}" has no value: the space has no {missing[named]}; add one'
            yield path, problem
        elif path[0] == "env" and trained and (late := sorted(used_names([template]) & set(RUN_TIME))):
            yield path, f"{{{late[0]}}} is known to commands only, and engine {trained[0]} has it too; leave it out"


def _arguments(space: SpaceLike) -> Iterable[tuple[Path, str]]:
    """Finds values that reach the program as one argument and are meant as several, and several where one goes."""
    flags = {name: [flag_value(one) for one in values] for name, values in values_by_name(space)[1].items()}
    for path, template in templates_of(space):
        for name in names_in(template):
            several = any(map(is_arguments, flags.get(name, ())))
            if several and (path[0] == "env" or alone_in(template) != name):
                yield path, f"{{{name}}} is several arguments by flags.{name}, so it stands alone as one of command's"
    arguments = () if space.command is None else split_command(space.command)
    for before, template in zip(("", *arguments), arguments, strict=False):
        for value in flags.get(alone_in(template) or "", ()):
            of_option = before.startswith("-") and "=" not in before and not str(value).startswith("-")
            if isinstance(value, str) and len(value.split()) > 1 and not of_option:
                text = f'"{value[:60]}" would reach the program as one argument with blanks; write the list '
                text += f"[{', '.join(map(quoted, value.split()))}] for several, or [{quoted(value)}] for one"
                yield ("flags", str(alone_in(template))), text


def quoted(text: str) -> str:
    """Writes a text as YAML takes it for one."""
    return f'"{text}"' if re.search(r"[\s,\[\]{}\"]|^[^A-Za-z-]", text) else text


def _unused(space: SpaceLike) -> Iterable[tuple[Path, str]]:
    """Finds flags and axes whose values would make trials that do the same."""
    names = used_names(template for _, template in templates_of(space))
    where = "command or env" if any(map(runs_program, space.engine)) else "env"
    axes, flags = values_by_name(space)
    for name in flags:
        if name not in names:
            yield ("flags", name), f"nothing uses it; write {{{name}}} in {where}, or leave it out"
    if not any(map(runs_program, space.engine)) or space.command is None:
        return
    shown = shown_names(names)
    if not _trained(space):  # of several engines each has its own axes, and `prune` drops the idle ones
        for axis, values in axes.items():
            if axis == PLACED and values != ["topology"]:
                yield ("space", axis), "places ranks, which a command's own launcher does; leave it out"
            elif axis not in (*shown, *SETTINGS) and len(values) > 1:
                text = f"has {len(values)} values and the command uses none; write {{{axis}}} in it, or keep one value"
                yield ("space", axis), text
    elif space.format is not None:  # a stored study was accepted once
        return
    # Nothing can drop these: tokens and FLOPs of a trial are those of its workload and model, whatever the command did.
    several = {name: getattr(space.workload, name) for name in ("seq_len", "global_batch_size") if space.workload}
    for name, values in several.items():
        if len(values) > 1 and name not in shown:
            text = f"has {len(values)} values and the command uses none; write {{{name}}} in it, or keep one value"
            yield ("workload", name), text
    if space.model and len(space.model) > 1 and "model" not in names:
        yield ("model",), f"has {len(space.model)} entries and the command uses none; write {{model}} in it"


def _without_effect(space: SpaceLike) -> Iterable[tuple[Path, str]]:
    """Finds settings that a command does not follow, and nodes that would train apart."""
    if _trained(space):
        return
    for key in ("tokens", "routing"):
        if space.workload is not None and getattr(space.workload, key) is not None:
            yield ("workload", key), "does nothing with engine: command, which reads its own data; leave it out"
    if space.measure.profile_steps:
        yield ("measure", "profile_steps"), "does nothing with engine: command; leave it out"
    meeting = {"rendezvous", "node_rank", "num_nodes", "world_size"}
    nodes = max(entry.resolve().num_nodes for entry in space.cluster)
    names = used_names(template for _, template in templates_of(space))
    if nodes > 1 and space.command is not None and not meeting & names:
        text = (
            f"runs on {nodes} nodes, and nothing tells its processes of each other; give it {{num_nodes}} and "
            "{rendezvous}, such as --nnodes {num_nodes} --rdzv-backend c10d --rdzv-endpoint {rendezvous}"
        )
        yield ("command",), text


def _requirements(space: SpaceLike) -> Iterable[tuple[Path, str]]:
    fields = fields_of(space)
    for index, text in enumerate(space.requires):
        try:
            parse_requirement(text, fields)
        except SpaceError as error:
            yield ("requires", index), str(error)


def _questions(space: SpaceLike) -> Iterable[tuple[Path, str]]:
    """Finds objectives and bounds on what no trial of the space can measure."""
    source = parse_source(space.steps).kind if space.steps is not None else "auto"
    trained = _trained(space)
    for path, metric in asked_for(space.objective, space.constraints):
        if metric == "total_energy_j" and trained:
            text = f"{metric} is of runs without steps, and engine {trained[0]} has steps; use energy_per_token_j"
            yield path, text
        if len(trained) == len(space.engine):
            continue
        lacking = [key for key in ("model", "workload") if getattr(space, key) is None]
        if metric == "mfu_frac" and lacking:
            yield path, f"mfu_frac needs the model and the workload of the command; add {' and '.join(lacking)}"
        elif metric in _NEEDS_STEPS and space.steps == "none":
            yield path, f"{metric} needs steps, and steps: none finds none; choose another source of steps"
        elif metric in NEEDS_TOKENS and space.workload is None and source in _WITHOUT_TOKENS:
            text = (
                f"{metric} needs tokens, and steps by {source} have none; add workload: {{seq_len: ..., "
                "global_batch_size: ...}, or choose another source of steps"
            )
            yield path, text

"""The program of a trial: the user's own command with its environment, filled with a configuration's values.

A template is text with fill-ins: `{name}` is a value, `{name?text}` is the text where the value is true, and
`{name=value?text}` is the text where it has that value. An argument that is one such choice and comes out empty is left
out. `{{` and `}}` are braces. No shell and no format language sees any of it.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from wattune.errors import SpaceError, closest
from wattune.plans.axes import AXES, SETTINGS, Plan
from wattune.plans.engines import Configuration, runs_program
from wattune.plans.parallel import num_micro_batches

FlagValue = int | float | str | bool | tuple[str, ...]
"""A value of a flag: a tuple is several arguments, where its fill-in stands alone."""

RUN_TIME: Final = ("node_rank", "rendezvous", "output_dir", "trial")
"""Fill-ins that only a running trial has: the node's number, `host:port` of node 0 with a port of its own, a folder
that is removed after the trial, and the trial's name."""

OF_CLUSTER: Final = ("devices_per_node", "num_nodes", "world_size", "dp")
OF_WORKLOAD: Final = ("seq_len", "global_batch_size", "num_micro_batches")

PLACED: Final = "rank_order"
"""The axis that no command can follow: its own launcher places the ranks."""

FILL_INS: Final = (
    *(name for name in AXES if name not in (PLACED, *SETTINGS)),
    *OF_CLUSTER,
    *OF_WORKLOAD,
    "model",
    *RUN_TIME,
)
"""Every name of a template that is not a flag."""

_DERIVED: Final[Mapping[str, tuple[str, ...]]] = {
    "dp": ("tp", "pp", "cp"),
    "num_micro_batches": ("tp", "pp", "cp", "micro_batch_size", "global_batch_size"),
}
"""Axes, and sizes of the workload, that a derived fill-in shows."""

_PART: Final = re.compile(r"\{\{|\}\}|\{(?P<name>\w+)(?:=(?P<value>[^{}?]*))?(?P<if>\?(?P<text>[^{}]*))?\}|[{}]")

FLAG_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
"""Pattern of a flag's name."""


_QUOTED: Final = re.compile(
    r"'[^']*'|\"(?:\\.|[^\"\\$`])*\"|\\.|\{\{|\}\}|(?<!\$)\{\w[^{}]*\}"
    r"|(?:(?<=sh\s-c\s)|(?<=sh\s-lc\s))\"(?:\\.|[^\"\\])*\"",
    re.DOTALL,
)
"""Text that a shell takes as it is, fill-ins, and `TEXT` of `bash -c "TEXT"`, which the inner shell obeys."""
_SHELL: Final = re.compile(
    r"\$[\w({$?@*!#]|`|&&|\|\||[0-9&]?>>?(?:&[0-9])?|<<?|[|;&]|(?:^|(?<=\s))~(?=/|\s|$)|\n(?=\s*\S)"
    r"|(?<=\s)#|(?<=\s)(?!\S*(?:=|://))(?=\S*\*)(?:\*\.\w|[^\s-]\S*/|/)\S*"
)
"""Variables, operators, home folders, further lines, comments, and names of files by a pattern."""
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_OF_SHELLS: Final = (
    "cd",
    "export",
    "source",
    ".",
    "set",
    "unset",
    "ulimit",
    "eval",
    "exec",
    "alias",
    "module",
    "if",
    "for",
    "while",
    "$",
)
"""Words that a shell obeys itself, and no program has."""


def shell_problem(command: str | Sequence[str] | Mapping[str, Any]) -> str | None:
    """Says which part of a command only a shell would obey, and how it is written instead; None where there is none.

    A text is looked through outside of its quotes. Of a list, whose arguments are meant as they are, the program alone,
    and a text that is all of it.
    """
    command = command["run"] if isinstance(command, Mapping) else command
    text = command if isinstance(command, str) else command[0] if len(command) == 1 else ""
    first = next(iter(text.split() or command), "")
    if _ASSIGNMENT.match(first) and not _SHELL.search(first):
        name, value = first.split("=", 1)
        return (
            f'begins with "{first[:60]}", which sets a variable in a shell, and no shell sees it; write env: '
            f"{{{name}: {value[:60] or '...'}}}, or env {first[:60]} before the program"
        )
    bare = _QUOTED.sub(lambda quoted: "{" if quoted[0] == "{{" else "_", text.replace("\\\n", " ").strip())
    found = _SHELL.search(bare)
    if first in _OF_SHELLS or _ASSIGNMENT.match(first):
        part = first
    elif found:
        part = found[0].replace("\n", "a second line")
    else:
        return None
    return (
        f'has "{part}", which a shell would obey, and no shell sees it; write [bash, -c, TEXT] for a shell, '
        "env: {NAME: VALUE} for a variable, or a list of arguments where it is meant as it stands"
    )


def text_of(value: Any) -> str:
    """Writes a value as an argument: `true` and `false` as YAML has them, numbers of a list joined by commas."""
    if isinstance(value, bool):
        return str(value).lower()
    if is_arguments(value):
        return shlex.join(value)
    if isinstance(value, tuple | list):
        return ",".join(map(text_of, value))
    return str(value)


def template_problem(template: str, known: Iterable[str]) -> str | None:
    """Says why a template cannot be filled with values of the known names; None where it can."""
    names = list(known)
    for found in _PART.finditer(template):
        name = found["name"]
        if found[0] in ("{", "}"):
            return (
                f'has a brace without its partner in "{template[:60]}"; write {{{{ and }}}} for braces that are meant'
            )
        if name is None:
            continue
        if name not in names:
            return f'"{{{name}}}" names nothing; {closest(name, names)}; write {{{{ for a brace that is meant'
        if found["value"] is not None and found["if"] is None:
            return f'"{found[0]}" asks and says nothing; write "{{{name}={found["value"]}?--option}}"'
    return None


def names_in(template: str) -> set[str]:
    """Returns the names that a template uses."""
    return {found["name"] for found in _PART.finditer(template) if found["name"] is not None}


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Fills a template without problems (`template_problem`)."""

    def part(found: re.Match[str]) -> str:
        if found["name"] is None:
            return found[0][0]
        value = values[found["name"]]
        if found["if"] is None:
            return text_of(value)
        wanted = found["value"]
        holds = (value is True or text_of(value) == "true") if wanted is None else text_of(value) == wanted
        return found["text"] if holds else ""

    return _PART.sub(part, template)


def filled_arguments(templates: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Fills the arguments of a command, each by itself; a choice that comes out empty is no argument.

    A fill-in that stands alone is as many arguments as its value has.
    """
    arguments: list[str] = []
    for template in templates:
        value = values.get(alone_in(template) or "")
        if is_arguments(value):
            arguments += value
        elif (text := filled(template, values)) or not is_choice(template):
            arguments.append(text)
    return arguments


def is_arguments(value: Any) -> TypeGuard[tuple[str, ...]]:
    """Tells whether a value is several arguments, or none: a tuple of texts."""
    return isinstance(value, tuple) and all(isinstance(one, str) for one in value)


def alone_in(template: str) -> str | None:
    """Returns the name of a fill-in that is a whole argument; None where there is more in it."""
    found = _PART.fullmatch(template)
    return found["name"] if found is not None and found["if"] is None else None


def is_choice(template: str) -> bool:
    """Tells whether a template is one or more choices and nothing else."""
    return "?" in template and not _PART.sub(lambda found: "" if found["if"] else found[0], template)


def split_command(command: str | Sequence[str] | Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a command's arguments: a text is split once, as a shell would, before anything is filled in.

    Raises `SpaceError` where quotes are not closed, or there is no program.
    """
    command = command["run"] if isinstance(command, Mapping) else command
    try:
        # A backslash stays before braces; blanks inside of a choice need quotes, as anywhere.
        arguments = shlex.split(command.replace("\\\n", " ")) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise SpaceError(f"cannot be split into arguments ({error}); close the quote, or write a list") from None
    if not arguments or not arguments[0]:
        raise SpaceError("names no program; write it first, such as torchrun or python")
    return tuple(arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Program of a trial, beside its plan: a command of the user's, variables of its environment, and flags."""

    command: tuple[str, ...] = ()
    """Templates of the arguments; empty where a built-in engine trains."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables and their templates, by name."""
    flags: tuple[tuple[str, FlagValue], ...] = ()
    """Flags and their values in this trial, in the order of the space."""
    steps: str = "auto"
    """Source of its steps: a word, a preset or `pattern/UNIT:REGULAR_EXPRESSION` (`wattune.steps.source`)."""
    warm: bool = False
    """True where its processes are forks of those that have made their imports."""

    @property
    def names(self) -> frozenset[str]:
        """Every name that its templates use."""
        return used_names((*self.command, *(template for _, template in self.environment)))

    def labelled(self, plan: str) -> str:
        """Returns a plan's short text with the flags, such as `dp2 mbs4 lr=0.01`."""
        words = plan.split()
        if self.command and "micro_batch_size" not in self.names:
            words = [word for word in words if word != "mbs1"]  # nobody asked for a micro-batch
        words += [f"{name}={text_of(value)}" for name, value in self.flags]
        return " ".join(words) or "as written"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Program":
        """Makes a program of plain data.

        Lists become tuples again. Raises `TypeError`, `ValueError` where it is none.
        """
        given = dict(data)
        given["environment"] = tuple((str(key), value) for key, value in given.get("environment", ()))
        pairs = given.get("flags", ())
        given["flags"] = tuple((str(key), tuple(value) if isinstance(value, list) else value) for key, value in pairs)
        given["command"] = tuple(given.get("command", ()))
        program = cls(**given)
        several = [text for _, value in program.flags if isinstance(value, tuple) for text in value]
        texts = (*program.command, *(text for _, text in program.environment), program.steps, *several)
        if not all(type(text) is str for text in texts) or type(program.warm) is not bool:
            raise TypeError("program: commands, variables and steps are texts, warm is true or false")
        if not all(type(value) in (int, float, str, bool, tuple) for _, value in program.flags):
            raise TypeError("program.flags: got a value that is no number, text, boolean or list of texts")
        return program


def used_names(templates: Iterable[str]) -> frozenset[str]:
    """Returns the names that templates use."""
    return frozenset(name for template in templates for name in names_in(template))


def shown_names(names: Iterable[str]) -> frozenset[str]:
    """Returns the names that a program's fill-ins depend on, those behind `dp` and micro-batches included."""
    used = frozenset(names)
    return used | {behind for name, several in _DERIVED.items() if name in used for behind in several}


def shown_axes(names: Iterable[str]) -> frozenset[str]:
    """Returns the axes among `shown_names`."""
    return shown_names(names) & AXES.keys()


def values_of(spec: Configuration, flags: Iterable[tuple[str, FlagValue]]) -> dict[str, Any]:
    """Returns the values a configuration gives its program, but `RUN_TIME`; an unnamed model or workload gives none."""
    plan: Plan = spec.plan
    cluster = spec.cluster
    values: dict[str, Any] = {name: getattr(plan, name) for name in AXES if name not in SETTINGS}
    values["layout"] = plan.layout or "even"
    values |= {name: getattr(cluster, name) for name in ("devices_per_node", "num_nodes", "world_size")}
    values["dp"] = plan.dp(cluster.world_size)
    if spec.workload.is_known:
        batch = spec.workload.global_batch_size
        values |= {"seq_len": spec.workload.seq_len, "global_batch_size": batch}
        values["num_micro_batches"] = num_micro_batches(plan, cluster.world_size, batch)
    if spec.model.is_known:
        values["model"] = spec.model.name
    return values | dict(flags)


def is_command(spec: Configuration) -> bool:
    """Tells whether a configuration runs a command of the user's."""
    return runs_program(spec.engine)

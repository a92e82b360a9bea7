"""The program and its verbs by name. Only the module of the verb that was asked for is loaded."""

import gc
import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

PANELS: Final = {
    "Write a search space": {"author": "init scale schema metrics catalog"},
    "Decide": {
        "decide": "frontier suggest place project",
        "export": "export",
        "experiments": "experiments",
        "results": "rank compare fit report analyze sync",
    },
    "Look at this machine": {"machine": "doctor record calibrate", "foreign": "import"},
    "Run a study": {"study": "plan estimate run"},
}
"""The headings of `wattune --help`, the modules of this package under each, and the verbs that each defines."""

VERBS: Final = {
    verb: (module, panel)
    for panel, modules in PANELS.items()
    for module, verbs in modules.items()
    for verb in verbs.split()
}
"""Module and heading of each verb, in the order of `wattune --help`."""


_VERB: Final = re.compile(r'(?s)\n@app\.command\((?:"(\w+)")?.*?\ndef (\w+)\(.*?-> None:\n    """(.*?)(?:"""|\n)')
"""A verb in the source of its module: a name that is a word of Python's, its function's, and the docstring's line."""


@cache
def lines_of(module: str) -> dict[str, str]:
    """Returns what each verb of a module does: the first line of its docstring, read without loading the module."""
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    return {name or function: line for name, function, line in _VERB.findall(source)}


class _Program(TyperGroup):
    """Lists every verb by its line, and loads the one that is called."""

    def __init__(self, *, commands: Any = None, **settings: Any) -> None:
        self.loaded: dict[str, TyperCommand] = dict(commands or {})
        super().__init__(**settings)

    def list_commands(self, ctx: Any) -> list[str]:
        """Lists the verbs, loaded or not."""
        del ctx
        return [*VERBS]

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """Returns a verb as the list of verbs shows it."""
        del ctx
        if cmd_name not in VERBS:
            return None
        module, panel = VERBS[cmd_name]
        return TyperCommand(cmd_name, help=lines_of(module)[cmd_name], rich_help_panel=panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Finds the command of the first argument."""
        return (args[0], load(args[0]), args[1:]) if args[0] in VERBS else super().resolve_command(ctx, args)


app = typer.Typer(
    name="wattune",
    cls=_Program,
    help="Finds the fastest, or cheapest in energy, training configuration a power and cooling budget allows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def load(verb: str) -> TyperCommand:
    """Returns the command of a verb with its options."""
    # What a program loads stays to its end: looking through it for garbage, while it grows and when it ends, costs each
    # command processor time and finds nothing.
    gc.disable()
    try:
        importlib.import_module(f"wattune.cli.{VERBS[verb][0]}")
    finally:
        gc.freeze()
        gc.enable()
    program = typer.main.get_command(app)
    assert isinstance(program, _Program)
    return program.loaded[verb]

"""The program and its verbs by name. Only the module of the verb that was asked for is loaded."""

import gc
import importlib
from typing import Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class Verb(NamedTuple):
    """A verb as `wattune --help` lists it."""

    module: str
    """The module of this package that defines it."""
    line: str
    """The first paragraph of its docstring."""


VERBS: Final = {
    "init": Verb(
        "author",
        "Writes a search space with comments, that plans. Asks for what no flag says, if a person is there to ask.",
    ),
    "scale": Verb(
        "author", "Writes the space of small runs that stand for the plans of a large one, and shows what they keep."
    ),
    "schema": Verb("author", "Prints the JSON Schema of search spaces, by which editors complete and check them."),
    "metrics": Verb(
        "author",
        "Lists every metric: its unit, what it means, which direction is better, and the tables it comes from.",
    ),
    "catalog": Verb("author", "Lists the devices, networks and models search spaces can name, with sources."),
    "frontier": Verb(
        "decide", "Shows what loosening a bound buys: the best measured plan at each value, and what is only predicted."
    ),
    "suggest": Verb(
        "decide", "Suggests what to measure next within a time, with the expected gain and the answer it may change."
    ),
    "place": Verb(
        "decide",
        "Finds which ranks and layers should move between devices, the gain, and whether it pays for a restart.",
    ),
    "project": Verb(
        "decide",
        "Projects measured plans to more nodes: step, speed, energy and power, with intervals that widen by distance.",
    ),
    "export": Verb(
        "export", "Writes a study's results as one table: a column for each setting and metric, with units."
    ),
    "experiments": Verb(
        "experiments",
        "Lists experiments with hardware, date, quality, answer and verdict; `run NAME` runs one, or several.",
    ),
    "rank": Verb(
        "results",
        "Ranks trials: feasible by objective with P(best), undecided, infeasible with what fails, unknown.",
    ),
    "compare": Verb(
        "results",
        "Shows which parts of a step make one trial faster or leaner than another; compares recordings too.",
    ),
    "fit": Verb(
        "results",
        "Fits the predictions of `plan --estimate` to measured trials; later plans of the device use them.",
    ),
    "report": Verb("results", "Writes a study's report.html and ranking.parquet anew."),
    "analyze": Verb("results", "Recomputes metrics and quality of a trial or recording from its folder alone."),
    "sync": Verb("results", "Sends trials, or a recording, that the tracking store or the storage's URL lacks."),
    "doctor": Verb("machine", "Says what this machine has, what it lacks, and what follows."),
    "record": Verb(
        "machine",
        "Records any command's energy, peaks and throttling, without Ray; ends with the command's exit code.",
    ),
    "import": Verb("foreign", "Makes a recording of other tools' logs: power, energy, temperatures, clocks."),
    "calibrate": Verb(
        "machine",
        "Measures what this machine's power sensors can resolve and what reading them costs; two minutes a GPU.",
    ),
    "plan": Verb(
        "study", "Lists what a search space would try, what a rule rejects, and which combinations are equivalent."
    ),
    "estimate": Verb(
        "study", "Predicts one plan's step, memory, power and temperature, with intervals and parts; needs no GPU."
    ),
    "run": Verb(
        "study",
        "Runs a study: real steps of every candidate, measured and ranked. Run again, it continues, also with more.",
    ),
}

PANELS: Final = {
    "author": "Write a search space",
    "decide": "Decide",
    "export": "Decide",
    "experiments": "Decide",
    "results": "Decide",
    "machine": "Look at this machine",
    "foreign": "Look at this machine",
    "study": "Run a study",
}
"""The heading over the verbs of each module."""


class _Program(TyperGroup):
    """Lists every verb by its line, and loads the one that is called."""

    def __init__(self, *, commands: Any = None, **settings: Any) -> None:
        self.loaded: dict[str, TyperCommand] = dict(commands or {})
        super().__init__(**settings)
        for name, verb in VERBS.items():
            self.add_command(TyperCommand(name, help=verb.line, rich_help_panel=PANELS[verb.module]))

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
        importlib.import_module(f"wattune.cli.{VERBS[verb].module}")
    finally:
        gc.freeze()
        gc.enable()
    program = typer.main.get_command(app)
    assert isinstance(program, _Program)
    return program.loaded[verb]

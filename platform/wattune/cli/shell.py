"""Things every verb shares: the program, its options, its two consoles, and how it ends."""

import errno
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from wattune.errors import WattuneError
from wattune.hard_stop import end_now
from wattune.masking import printable, without_secrets
from wattune.ranking.order import Ranking
from wattune.storage.documents import json_text
from wattune.version import __version__

WRONG_INPUT: Final = 2
NOTHING_FEASIBLE: Final = 3

_OF_THE_USER: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errors of files that were named wrong: nothing may be written, or nothing can be."""

_OF_THE_MACHINE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
"""Errors a disk or a mount has at any moment; like those of the user no fault of the program, so no traceback."""

_UNSEEN_WIDTH: Final = 160
"""Columns of tables that go to a file or a pipe."""

# Reasons, names and paths are printed as they are: a bracket in them is not markup.
out = Console(markup=False, width=None if sys.stdout.isatty() else _UNSEEN_WIDTH)
err = Console(markup=False, stderr=True, width=None if sys.stderr.isatty() else _UNSEEN_WIDTH)

app = typer.Typer(
    name="wattune",
    help="Finds the fastest, or cheapest in energy, training configuration a power and cooling budget allows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SpaceArgument = Annotated[Path, typer.Argument(help="Search space file.", show_default=False)]
StudyArgument = Annotated[str, typer.Argument(help="A study's name, folder or URL.", show_default=False)]
StorageOption = Annotated[
    str | None,
    typer.Option(
        help="Folder or URL studies are kept in; else $WATTUNE_STORAGE, else ~/wattune-studies.", show_default=False
    ),
]
TrackingOption = Annotated[
    str | None, typer.Option(help="MLflow store; else mlflow.db in the storage folder.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    try:
        sys.exit(exit_code_of(app))
    except SystemExit as ending:
        # Ray and MLflow take seconds at a process's end, and whoever stopped this one may kill what takes longer.
        end_now(ending.code if isinstance(ending.code, int) else 1 if ending.code else 0)
        raise


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Calls a command and returns its exit code; every failure wattune can explain is one message."""
    try:
        return command() or 0
    except WattuneError as error:
        print_error(str(error))
        return error.exit_code
    except OSError as error:
        if error.errno not in (*_OF_THE_USER, *_OF_THE_MACHINE):
            raise
        place = error.filename or "a file"
        print_error(f"{place}: {error.strerror}; fix its permissions or free space, or give --storage another folder")
        return WRONG_INPUT if error.errno in _OF_THE_USER else 1


def print_error(text: str) -> None:
    """Prints an error's message, without secrets and without what a terminal would obey."""
    err.print(f"error: {printable(without_secrets(text))}", style="red", highlight=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """Prints the one object `--json` promises."""
    print(json_text(data))  # noqa: T201


def print_line(text: str) -> None:
    """Prints a line whole, however long, for a person or a pipe to copy a path from."""
    out.print(text, highlight=False, soft_wrap=True)


def feasible_code(ranking: Ranking) -> int:
    """Returns exit code 3 where nothing is feasible, and says so; else 0."""
    if ranking.best is not None:
        return 0
    if ranking.undecided:
        err.print("nothing is surely feasible; repeat the undecided trials or raise --risk", style="yellow")
        return NOTHING_FEASIBLE
    err.print("nothing is feasible; loosen a constraint or widen the space", style="yellow")
    return NOTHING_FEASIBLE


def end_in_order() -> None:
    """Ends on a job's stop and on a closed terminal as on Ctrl-C; `nohup` still keeps a terminal's end away."""
    signal.signal(signal.SIGTERM, _as_interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _as_interrupt)


def _as_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _version(wanted: bool) -> None:
    if wanted:
        print(f"wattune {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version

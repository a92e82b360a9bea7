"""Things every verb shares: the program, its options, its two consoles, and how it ends."""

import errno
import itertools
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from wattune.cli.verbs import app
from wattune.errors import WattuneError
from wattune.forced_exit import end_now
from wattune.masking import printable, without_secrets
from wattune.version import __version__

if TYPE_CHECKING:
    from wattune.ranking.order import Ranking
    from wattune.view.table import View

WRONG_INPUT: Final = 2
NOTHING_FEASIBLE: Final = 3
INTERRUPTED: Final = 128 + signal.SIGINT
"""A shell's code for what Ctrl-C ended."""


_OF_THE_USER: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errors of files that were named wrong: nothing may be written, or nothing can be."""

_OF_THE_MACHINE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
"""Errors a disk or a mount has at any moment; like those of the user no fault of the program, so no traceback."""

_STDOUT_FD: Final = 1
_STDERR_FD: Final = 2

_COLORLESS: Final = "--no-color"

_UNSEEN_WIDTH: Final = 200
"""Columns of tables that go to a file or a pipe."""


class _Console(Console):
    """A console whose own colours are the only characters that a terminal obeys: names come from anybody's files."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Renders, with escapes and other control characters of texts spelled out."""
        for one in super().render(renderable, options):
            yield one if one.control else Segment(printable(one.text), one.style)


# Reasons, names and paths are printed as they are: a bracket in them is not markup.
out = _Console(markup=False, width=None if sys.stdout.isatty() else _UNSEEN_WIDTH)
err = _Console(markup=False, stderr=True, width=None if sys.stderr.isatty() else _UNSEEN_WIDTH)

SpaceArgument = Annotated[Path, typer.Argument(help="Search space file.")]


def complete_stored(incomplete: str) -> list[str]:
    """Lists the studies and recordings of the storage that begin with a text, for a shell to complete."""
    from wattune.storage.files import storage_path

    try:
        folder = storage_path()
        found = [one.parent.name for one in folder.glob("*/study.yaml")]
        found += [one.parent.name for one in folder.glob("recordings/*/manifest.json")]
    except (WattuneError, OSError):
        return []
    return sorted(name for name in found if name.startswith(incomplete))


StudyArgument = Annotated[
    str,
    typer.Argument(help="A study's name, folder or URL.", autocompletion=complete_stored),
]
LeaveOutOption = Annotated[
    list[str] | None,
    typer.Option(help="Feature of the config.json to train without; may be repeated."),
]
StorageOption = Annotated[
    str | None,
    typer.Option(help="Folder or URL studies are kept in; else $WATTUNE_STORAGE, else ~/wattune-studies."),
]
TrackingOption = Annotated[str | None, typer.Option(help="MLflow store; else mlflow.db in the storage folder.")]
WandbOption = Annotated[
    str | None,
    typer.Option(
        metavar="PROJECT",
        envvar="WATTUNE_WANDB",
        show_envvar=False,
        help="Send results to this project of Weights & Biases too; else $WATTUNE_WANDB.",
    ),
]
TensorboardOption = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        envvar="WATTUNE_TENSORBOARD",
        show_envvar=False,
        help="Write results there for TensorBoard too; else $WATTUNE_TENSORBOARD.",
    ),
]


class _Answer:
    """State of the one JSON object that standard output may have to hold."""

    wanted = False
    printed = False


def _want_json(wanted: bool) -> bool:
    _Answer.wanted = _Answer.wanted or wanted
    return wanted


JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        is_eager=True,  # before any other option can be refused
        callback=_want_json,
        help='Print one JSON object and nothing else; on failure {"error": {"what": ...}}.',
    ),
]


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    _Answer.wanted = _Answer.printed = False
    arguments = sys.argv[1:]
    verb = next((one for one in arguments if not one.startswith("-")), "")
    if verb != "record" and _COLORLESS in _before_command(arguments):  # after `record` it may be the command's
        without_color()
        arguments.remove(_COLORLESS)
    try:
        sys.exit(exit_code_of(lambda: app(arguments)))
    except SystemExit as ending:
        # Ray and MLflow take seconds at a process's end, and whoever stopped this one may kill what takes longer.
        end_now(ending.code if isinstance(ending.code, int) else 1 if ending.code else 0)
        raise


def _before_command(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments up to `--`: those behind it are a command's own."""
    return list(itertools.takewhile(lambda one: one != "--", arguments))


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Calls a command and returns its exit code; every failure wattune can explain is one message.

    A caller who asked for JSON gets the message as an object on standard output too.
    """
    try:
        return command() or 0
    except WattuneError as error:
        return failed(error)
    except SystemExit as leaving:  # typer's own ending: done, or wrong usage, which it has printed
        said = getattr(leaving.__context__, "format_message", None)
        if said is not None and leaving.code == WRONG_INPUT:
            _want_json("--json" in _before_command(sys.argv[1:]))
            _answer_error(said(), leaving.__context__, WRONG_INPUT)
        elif leaving.code in (INTERRUPTED, STOP.exit_code):
            _answer_error("interrupted", leaving, int(leaving.code))
        raise
    except KeyboardInterrupt as error:
        _answer_error("interrupted", error, STOP.exit_code)
        return STOP.exit_code
    except OSError as error:
        if error.errno not in (*_OF_THE_USER, *_OF_THE_MACHINE):
            _answer_error(f"{type(error).__name__}: {error}", error, 1)
            raise
        place = error.filename or "a file"
        what = f"{place}: {error.strerror}; fix its permissions or free space, or give --storage another folder"
        return _failed(what, error, WRONG_INPUT if error.errno in _OF_THE_USER else 1)
    except Exception as error:  # a fault of ours: the traceback follows
        _answer_error(f"{type(error).__name__}: {error}", error, 1)
        raise


def failed(error: WattuneError) -> int:
    """Prints an error as every command does; returns its exit code."""
    return _failed(str(error), error, error.exit_code)


def _failed(what: str, error: BaseException, code: int) -> int:
    _answer_error(what, error, code)
    print_error(what)
    return code


def _answer_error(what: str, error: BaseException | None, code: int) -> None:
    """Prints an error as the one object, where one was asked for and none was printed."""
    if _Answer.wanted and not _Answer.printed:
        found = {"what": printable(without_secrets(what)), "kind": type(error).__name__, "exit_code": code}
        print_json({"error": found})


def without_color() -> None:
    """Takes colors out of everything that is printed from now on, in processes that are started too."""
    os.environ["NO_COLOR"] = "1"
    out.no_color = err.no_color = True


def print_error(text: str) -> None:
    """Prints an error's message, without secrets and without what a terminal would obey."""
    err.print(f"error: {printable(without_secrets(text))}", style="red", highlight=False, soft_wrap=True)


def print_note(text: str) -> None:
    """Prints what does not make a command fail, likewise."""
    err.print(f"note: {printable(without_secrets(text))}", style="yellow", highlight=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """Prints the one object `--json` promises."""
    from wattune.storage.documents import json_text

    _Answer.printed = True
    print(json_text(data))  # noqa: T201


def answer(as_json: bool, data: Any, view: "View") -> None:
    """Prints what a verb found: the one object of `--json`, else its view."""
    from wattune.view.console import show

    print_json(data) if as_json else show(out, *view)


def print_line(text: str) -> None:
    """Prints a line whole, however long, for a person or a pipe to copy a path from."""
    out.print(text, highlight=False, soft_wrap=True)


def feasible_code(ranking: "Ranking") -> int:
    """Returns exit code 3 where nothing is feasible, and says so; else 0."""
    if ranking.best is not None:
        return 0
    if ranking.undecided:
        err.print("nothing is surely feasible; repeat the undecided trials or raise --risk", style="yellow")
        return NOTHING_FEASIBLE
    err.print("nothing is feasible; loosen a constraint or widen the space", style="yellow")
    return NOTHING_FEASIBLE


class Stop:
    """Handler of Ctrl-C, of a job's stop and of a closed terminal: says at once that it was heard, then interrupts."""

    def __init__(self) -> None:
        self.say: Callable[[str], None] = _say
        """Prints a line; a live view puts it above itself."""
        self.text = "stopping"
        self._number = int(signal.SIGINT)
        self._said = self._closed = False

    @property
    def exit_code(self) -> int:
        """A shell's code for what the signal ended: 130 for Ctrl-C."""
        return 128 + self._number

    def announce(self, number: int) -> None:
        """Says that the end has begun, also where it has to wait, such as for Ray's start."""
        self._number = number
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        if not self._said:
            self._said = True
            try:
                self.say(self.text)
            except RuntimeError:  # it came in the middle of a write to the same stream, which cannot be entered twice
                with suppress(OSError):
                    os.write(_STDERR_FD, f"{self.text}\n".encode())
            except (OSError, ValueError):  # the terminal is gone
                pass

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Handles the signal. Raises `KeyboardInterrupt`: always, but for a closed terminal once.

        The kernel tells the leader of its session and the group in its foreground, and one process may be both.
        """
        self.announce(number)
        if number == signal.SIGHUP and self._closed:
            return
        self._closed |= number == signal.SIGHUP
        raise KeyboardInterrupt

    def begin(self, text: str) -> None:
        """Begins to handle signals; what was heard before counts no more."""
        self.text, self._said, self._closed, self._number = text, False, False, int(signal.SIGINT)


def _leave_closed_terminal() -> None:
    """Has what is printed from now on go nowhere where its terminal was closed: every write would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (_STDOUT_FD, _STDERR_FD):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # one that is no terminal has another error
                os.dup2(nowhere, stream)
    os.close(nowhere)


def _say(text: str) -> None:
    err.print(text, highlight=False, soft_wrap=True)


STOP: Final = Stop()
"""The one handler of this process."""


def end_in_order(text: str = "stopping") -> None:
    """Says `text` and ends on Ctrl-C, a job's stop and a closed terminal, which `nohup` still keeps away."""
    STOP.begin(text)
    if threading.current_thread() is not threading.main_thread():  # signals do not arrive here
        return
    signal.signal(signal.SIGINT, STOP)
    signal.signal(signal.SIGTERM, STOP)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, STOP)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"wattune {__version__}")  # noqa: T201
        raise typer.Exit


def _colorless(wanted: bool) -> None:
    if wanted:
        without_color()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    no_color: Annotated[
        bool,
        typer.Option(
            _COLORLESS,
            callback=_colorless,
            is_eager=True,
            help="Print without colors; so does the variable NO_COLOR.",
        ),
    ] = False,
) -> None:
    del version, no_color

"""Tells what is no step: hooks that failed, and the exception that ended the program."""

from __future__ import annotations

import atexit
import sys

from .writer import EVENTS, LONGEST_TEXT, StepWriter

TYPE_CHECKING = False  # what type checkers take for true; `typing` loads longer than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, Final

_WRITER: Final = StepWriter(EVENTS)
_TOLD: Final[set[str]] = set()


def tell_problem(what: str, error: object) -> None:
    """Tells that a hook failed, once for each hook; the program goes on without it."""
    if what not in _TOLD:
        _TOLD.add(what)
        kind = f"{type(error).__name__}: " if isinstance(error, BaseException) else ""
        _WRITER.event("problem", text=f"{what}: {kind}{error}"[:LONGEST_TEXT])


def guarded(what: str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorates a hook, named in words, that returns nothing: its own error is told and never reaches the program."""

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except Exception as error:
                tell_problem(what, error)

        call.__doc__ = function.__doc__
        return call

    return decorate


@guarded("the exception that ended the program")
def tell_error(error: BaseException, traceback: TracebackType | None) -> None:
    """Tells the exception that ends the program, the first one only."""
    # torchrun's own exception only repeats that one of its ranks failed.
    if "error" in _TOLD or isinstance(error, KeyboardInterrupt) or type(error).__name__ == "ChildFailedError":
        return
    _TOLD.add("error")
    where = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        where = f" (in {code.co_name}, {code.co_filename}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    _WRITER.event("error", text=f"{type(error).__name__}: {error}".strip()[:LONGEST_TEXT] + where)


@guarded("the hook for the exception that ends the program")
def watch_errors() -> None:
    """Tells the exception that ends the program, before the hook that was there shows it.

    A program that sets a hook of its own later hides ours. What ended it is then told at its exit.
    """
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        tell_error(error, traceback)
        before(kind, error, traceback)

    sys.excepthook = told
    atexit.register(_tell_last)


def _tell_last() -> None:
    error = getattr(sys, "last_value", None)  # set for an exception that nothing caught
    if isinstance(error, BaseException):
        tell_error(error, error.__traceback__)

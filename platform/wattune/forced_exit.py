"""The end of a process that was asked to end, also where its main thread waits for an answer that never comes.

A signal's Python handler runs on the main thread, between two of its instructions. A call of a library that waits for a
dead server holds both up for minutes. Here a thread of its own learns of the signal from the interpreter's C handler
(`signal.set_wakeup_fd`), gives the process its time, and ends it.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Final

from wattune.deadline import within

END_WITHIN_S: Final = 10.0
"""Longest a process takes to end by itself after the first signal. With what follows it is gone after 15 s."""

_LAST_ACT_S: Final = 3.5
"""Longest that one last act may take."""

_FORCE_S: Final = 4.0
"""Time for all last acts; then the process ends without them."""

_STOPS: Final = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))

_last_acts: Final[list[Callable[[], object]]] = []

_asked: Final = threading.Event()


def asked() -> bool:
    """Returns whether a signal asked for the end of the process, inside the body of `ended_in_time`."""
    return _asked.is_set()


@contextlib.contextmanager
def last_act(action: Callable[[], object]) -> Iterator[None]:
    """Has an action called if the process is ended by force inside the body, such as ending other processes.

    Args:
        action: Is called from a thread. The latest is called first.
    """
    _last_acts.append(action)
    try:
        yield
    finally:
        _last_acts.remove(action)


@contextlib.contextmanager
def ended_in_time(
    message: str, code: int = 1, *, within_s: float = END_WITHIN_S, to_the_end: bool = False
) -> Iterator[None]:
    """Ends the process at last `within_s` after a SIGINT, SIGTERM or SIGHUP that came inside the body.

    The signals' handlers stay as they are, and a signal that the process ignores does not count. Nothing is done
    outside of the main thread, where no signal arrives.

    Args:
        message: A line for standard error, if the process is ended by force.
        code: Its exit code then.
        within_s: Time it has to end by itself.
        to_the_end: Whether the time goes on after the body, if a signal came inside it: what libraries do at the
            process's end takes time too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    over = threading.Event()
    threading.Thread(target=_wait, args=(reader, over, message, code, within_s), daemon=True, name="hard stop").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        if not (to_the_end and asked()):
            over.set()
            _asked.clear()
        os.close(writer)  # wakes the thread, which closes the other end


def end_now(code: int) -> None:
    """Ends the process where a signal asked for it, without what libraries do at its end; else does nothing.

    Args:
        code: Its exit code.
    """
    if asked():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _wait(reader: int, over: threading.Event, message: str, code: int, within_s: float) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)  # stays open: it is written to at the very end
    try:
        while True:
            came = os.read(reader, 1)
            if not came:
                return
            if came[0] in _STOPS:
                _asked.set()
                # From a thread without Python: it comes also where another holds the interpreter's lock for good.
                faulthandler.dump_traceback_later(within_s + _FORCE_S, exit=True, file=nowhere)
                break
        if over.wait(within_s):
            faulthandler.cancel_dump_traceback_later()
            return
    finally:
        os.close(reader)
    for action in reversed(_last_acts):
        with contextlib.suppress(Exception):  # each is tried, and the end comes in any case
            within(_LAST_ACT_S, action, name="last act")
    with contextlib.suppress(OSError):
        os.write(2, f"{message}\n".encode())
    os._exit(code)

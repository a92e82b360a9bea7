"""The end of a process that was asked to end, also where its main thread waits for an answer that never comes.

A signal's Python handler runs on the main thread, between two of its instructions. A call of a library that waits for a
dead server holds both up for minutes. Here a thread of its own learns of the signal from the interpreter's C handler
(`signal.set_wakeup_fd`), and ends the process where the main thread gets no further.

It gets further while its stack is one that was not seen since the signal: on a busy machine an orderly end takes long,
and a wait for what is dead, also one that looks again and again, is at the same few places all the time.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Final

from wattune.deadline import within

END_WITHIN_S: Final = 8.0
"""Longest that the main thread may stand still after the first signal. What it waits for by itself takes less."""

MOST_S: Final = 60.0
"""Longest an orderly end may take in all, however busy the machine is."""

_LOOK_S: Final = 0.25
"""Seconds between two looks at the main thread."""

_ACT_S: Final = 3.5
"""Longest that one last act may take, unless it asks for more."""

_LOCKED_S: Final = 4.0
"""Time after which the process ends without its last acts, where the interpreter's lock is held for good."""

_STOPS: Final = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))

_last_acts: Final[list[tuple[Callable[[], object], float]]] = []

_asked: Final = threading.Event()
_forced: Final = threading.Event()


def asked() -> bool:
    """Returns whether a signal asked for the end of the process, inside the body of `ended_in_time`."""
    return _asked.is_set()


@contextlib.contextmanager
def last_act(action: Callable[[], object], within_s: float = _ACT_S) -> Iterator[None]:
    """Has an action called, from a thread and the latest first, if the process is ended by force inside the body."""
    _last_acts.append((action, within_s))
    try:
        yield
    finally:
        _last_acts.remove((action, within_s))


@contextlib.contextmanager
def ended_in_time(
    last_word: Callable[[int], int],
    heard: Callable[[int], object] = lambda _number: None,
    *,
    within_s: float = END_WITHIN_S,
    most_s: float = MOST_S,
    to_the_end: bool = False,
) -> Iterator[None]:
    """Ends the process after a SIGINT, SIGTERM or SIGHUP that came inside the body, where it does not end by itself.

    The signals' handlers stay as they are, and a signal that the process ignores does not count. Nothing is done
    outside of the main thread, where no signal arrives. `last_word` is called after all last acts, with the signal's
    number; it says why and returns the exit code. `heard` is called with the number soon after the signal, also where
    the signal's own handler is held up. The main thread may stand still for `within_s`, and `most_s` is the longest in
    all. With `to_the_end` that time goes on after the body: what libraries do at the process's end takes time too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    over = threading.Event()
    arguments = (reader, over, last_word, heard, within_s, most_s)
    threading.Thread(target=_wait, args=arguments, daemon=True, name="hard stop").start()
    try:
        yield
    finally:
        while _forced.is_set():  # another thread says the last word
            time.sleep(most_s)
        signal.set_wakeup_fd(before)
        if not (to_the_end and asked()):
            over.set()
            _asked.clear()
        os.close(writer)  # wakes the thread, which closes the other end


def end_now(code: int) -> None:
    """Ends the process where a signal asked for it, without what libraries do at its end; else does nothing."""
    if asked():
        _leave(code)


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    os._exit(code)


def _wait(
    reader: int,
    over: threading.Event,
    last_word: Callable[[int], int],
    heard: Callable[[int], object],
    within_s: float,
    most_s: float,
) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)  # stays open: it is written to at the very end

    def limit(seconds: float) -> None:
        # From a thread without Python: it comes also where another holds the interpreter's lock for good.
        faulthandler.dump_traceback_later(seconds + _LOCKED_S, exit=True, file=nowhere)

    number = _first_stop(reader)
    if number is not None:
        _asked.set()
        if not _ends_by_itself(over, lambda: heard(number), within_s, most_s, limit):
            _forced.set()
            code = [128 + number]
            for action, act_s in [*reversed(_last_acts), (lambda: code.append(last_word(number)), _ACT_S)]:
                limit(act_s)
                with contextlib.suppress(Exception):  # each is tried, and the end comes in any case
                    within(act_s, action, name="last act")
            _leave(code[-1])
        faulthandler.cancel_dump_traceback_later()
    os.close(reader)  # not before: another signal writes to it


def _first_stop(reader: int) -> int | None:
    """Waits for a signal that asks for the end; None once the other end is closed."""
    while came := os.read(reader, 1):
        if came[0] in _STOPS:
            return came[0]
    return None


def _ends_by_itself(
    over: threading.Event,
    heard: Callable[[], object],
    within_s: float,
    most_s: float,
    limit: Callable[[float], None],
) -> bool:
    """Returns true once the end has come, false as soon as the main thread gets no further."""
    begun_s = moved_s = time.monotonic()
    seen: set[Hashable] = set()
    limit(within_s)
    while (now_s := time.monotonic()) - moved_s < within_s and now_s - begun_s < most_s:
        if over.wait(_LOOK_S):
            return True
        if not seen:
            threading.Thread(target=heard, daemon=True, name="heard").start()
        place = _place_of_main_thread()
        if place not in seen:
            seen.add(place)
            moved_s = time.monotonic()
            limit(within_s)
    return False


def _place_of_main_thread() -> Hashable:
    """Returns where the main thread is: the instruction of each of its calls."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    place = []
    while frame is not None:
        place.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(place)

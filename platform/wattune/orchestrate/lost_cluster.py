"""Ends a study whose cluster or folder is lost: a dead head or raylet, a clock by which Ray places no workers."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from wattune import forced_exit
from wattune.errors import EngineError

LOOK_S: Final = 0.5
"""Seconds between two looks."""

MOST_BACK_S: Final = 60.0
"""Largest step back of the wall clock that is waited for.

After a step back Ray (2.60) places no new workers for as long as the step: it takes a node's reports for old ones
(measured: `benchmarks/results/chaos.md`). The start of workers waits for 120 s, and a trial is tried twice.
"""

SILENT_S: Final = 30.0
"""Longest that the head of a cluster which was joined may be away, as while it is started again; Ray waits 60 s."""

_VITAL: Final = frozenset(("raylet", "gcs_server"))
"""Processes without which a cluster of our own cannot go on."""

_found: Final[list[str]] = []
"""The reason that `watched` ends its block. A process has one cluster, and one main thread to interrupt."""


def found() -> str:
    """Returns the reason that `watched` interrupts its block; empty where it does not.

    For those who are interrupted inside the block: an interrupt does not say whether a user or the watch sent it.
    """
    return _found[0] if _found else ""


def error() -> EngineError | None:
    """Returns the error that `watched` raises; None where it raises none."""
    if not _found:
        return None
    return EngineError(
        f"the study was cut short: {_found[0]}; finished trials are kept; run the same command to continue"
    )


@contextmanager
def watched(is_answering: Callable[[], bool] | None = None) -> Iterator[None]:
    """Ends the block within seconds where the cluster that this process starts in it cannot go on.

    Of a cluster that was joined `is_answering` says whether its head and this node's raylet are there.

    Ray itself takes a minute to give up a head or raylet that is dead, during its start too, and then ends the process
    it runs in. It never gives up what a clock that was set back keeps it from placing. A stop of the study comes first:
    it may be what ended the processes, as a signal to the whole process group does. Raises `EngineError`: its head or
    raylet ended, the wall clock was set back by more than `MOST_BACK_S`, or the folder that this process was started in
    is gone.
    """
    folder, answered_s = Path.cwd(), time.monotonic()
    vital: dict[str, psutil.Process] = {}
    ahead_s = _wall_ahead_s()
    over = threading.Event()
    _found.clear()

    def problem() -> str:
        nonlocal answered_s
        if not folder.is_dir():
            return f"the folder that it was started in, {folder}, is gone"
        if is_answering is not None:
            answered_s = time.monotonic() if is_answering() else answered_s
            silent_s = time.monotonic() - answered_s
            return f"the cluster's head is dead: no answer for {silent_s:.0f} s" if silent_s > SILENT_S else ""
        if len(vital) < len(_VITAL):  # it is being started
            vital.update(_children(_VITAL - vital.keys()))
        dead = [name for name, process in vital.items() if not _runs(process)]
        if dead:
            return f"Ray's {' and '.join(dead)} on this machine ended"
        back_s = ahead_s - _wall_ahead_s()
        if back_s > MOST_BACK_S:
            return f"the clock of this machine was set back by {back_s:.0f} s, and Ray would start no workers as long"
        return ""

    def watch() -> None:
        while not over.wait(LOOK_S):
            lost = problem()
            if lost:
                if not over.wait(LOOK_S) and not forced_exit.asked():
                    _found.append(lost)
                    _interrupt_main_thread()
                return

    threading.Thread(target=watch, daemon=True, name="cluster").start()
    try:
        yield
    finally:
        over.set()
        if (lost := error()) is not None:
            raise lost


def _children(names: Set[str]) -> dict[str, psutil.Process]:
    """Finds the processes of these names that this one started."""
    found = {}
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if (name := child.name()) in names:
                found[name] = child
    return found


def _wall_ahead_s() -> float:
    """Returns how far the wall clock is ahead of the monotonic one: a constant, until somebody sets it."""
    return time.time() - time.monotonic()


def _interrupt_main_thread() -> None:
    """Raises `KeyboardInterrupt` in the main thread, also where it waits in a system call.

    A process in the background of a shell ignores SIGINT; then it is SIGTERM, where somebody handles it.
    """
    main = threading.main_thread().ident
    for number in (signal.SIGINT, signal.SIGTERM):
        if main is not None and callable(signal.getsignal(number)):
            signal.pthread_kill(main, number)  # `_thread.interrupt_main` does not end a system call
            return


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

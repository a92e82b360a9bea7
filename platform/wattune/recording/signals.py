"""Signals of a recording: those that would end this process reach the recorded command instead."""

import os
import signal
import threading
from types import FrameType
from typing import Any, Final, Self

from wattune.workers.command.process import TerminalProcess

_RELAYED: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)
_FROM_TERMINAL: Final = frozenset({signal.SIGINT, signal.SIGQUIT})
"""Sent by a terminal to its whole foreground group: the command has them already."""


class SignalRelay:
    """While entered, signals that would end this process are passed on to the command instead."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The last one that came."""
        self._command: TerminalProcess | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Handlers are the main thread's; a call from another one leaves them to their owner. What is ignored already
        # (nohup, a script's background job) stays so, here and in the command.
        if threading.current_thread() is threading.main_thread():
            for number in _RELAYED:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def attach(self, command: TerminalProcess) -> None:
        """Passes signals on to this command from now on, one that came while it started included."""
        self._command = command
        if self.received is not None:
            self._pass_on(self.received)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._pass_on(self.received)

    def _pass_on(self, number: signal.Signals) -> None:
        # Never twice: many programs skip their clean-up at the second Ctrl-C.
        if self._command is not None and not (number in _FROM_TERMINAL and _in_foreground()):
            self._command.send(number)


def _in_foreground() -> bool:
    """Returns True where this process belongs to the foreground group of its terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)

"""A command run as if it had been started alone: same process group, terminal and environment; signals reach it."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Final, Self

from wattune.steps.pattern import OutputLines

_RELAYED: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)
_FROM_TERMINAL: Final = frozenset({signal.SIGINT, signal.SIGQUIT})
"""Sent by a terminal to its whole foreground group: the command has them already."""


Listener = Callable[[str, int], None]
"""Called with a line of a command's output, and its arrival on the monotonic clock; see
`wattune.steps.pattern.OutputLines`."""

LONGEST_LINE_BYTES: Final = 65536
"""A line that is longer is handed to the listener in parts."""

DRAIN_S: Final = 2.0
"""Longest wait for output after the command's end: a process it left behind may hold the pipe open."""


class Command:
    """A command that was started, and the monotonic times between which it ran."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: int | None = None,
        stderr: int | None = None,
        environment: Mapping[str, str] | None = None,
        listener: Listener | None = None,
    ) -> None:
        """Starts it.

        Args:
            command: The program and its arguments.
            stdout: The descriptor it writes to; None is this process's.
            stderr: The same for its errors.
            environment: Its environment; None is this process's.
            listener: Hears every line. The command then writes to pipes, and what it writes is passed on at once.
        """
        self.start_mono_ns = time.monotonic_ns()
        pipe = None if listener is None else subprocess.PIPE
        self._process = subprocess.Popen(
            command,
            stdout=pipe if pipe is not None else stdout,
            stderr=pipe if pipe is not None else stderr,
            env=None if environment is None else dict(environment),
        )
        self._readers: list[threading.Thread] = []
        self.unheard: Exception | None = None
        """The listener's error, after which it heard nothing more."""
        if listener is not None:
            ways = ((self._process.stdout, stdout, 1), (self._process.stderr, stderr, 2))
            for source, target, own in ways:
                assert source is not None, "both are pipes"
                arguments = (source.fileno(), own if target is None else target, listener)
                reader = threading.Thread(target=self._copy, args=arguments, daemon=True, name="output")
                reader.start()
                self._readers.append(reader)
        self.end_mono_ns = self.start_mono_ns
        # A thread that does nothing but wait sees the end at once; polling would see it late.
        self._waiter = threading.Thread(target=self._wait, daemon=True, name="command")
        self._waiter.start()

    def _wait(self) -> None:
        self._process.wait()
        self.end_mono_ns = time.monotonic_ns()
        for reader in self._readers:
            reader.join(DRAIN_S)

    def _copy(self, source: int, target: int, listener: Listener) -> None:
        """Copies output to where it belongs and hands its lines to the listener, until the pipe is closed."""
        lines = OutputLines(LONGEST_LINE_BYTES)
        while True:
            try:
                data = os.read(source, LONGEST_LINE_BYTES)
            except OSError:
                return
            mono_ns = time.monotonic_ns()
            left = memoryview(data)
            while left:
                try:
                    left = left[os.write(target, left) :]
                except OSError:  # nobody reads it any more, as behind `| head`: the command must still be drained
                    break
            try:
                for line, at_ns in lines.take(data, mono_ns) if self.unheard is None else ():
                    if line:
                        listener(line, at_ns)
            except Exception as error:  # raised where the recording ends: the command must be drained here too
                self.unheard = error
            if not data:
                return

    def ended_within(self, timeout_s: float | None) -> bool:
        """Waits for its end, at most `timeout_s`; None waits as long as it takes. Returns True where it has ended."""
        self._waiter.join(timeout_s)
        return not self._waiter.is_alive()

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal, unless it has ended."""
        self._process.send_signal(number)

    @property
    def exit_code(self) -> int:
        """After its end, as a shell gives it: 128 and the signal's number where one ended it."""
        code: int = self._process.returncode
        return 128 - code if code < 0 else code


class SignalRelay:
    """While entered, signals that would end this process are passed on to the command instead."""

    def __init__(self) -> None:
        """Changes nothing before it is entered."""
        self.received: signal.Signals | None = None
        """The last one that came."""
        self._command: Command | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Installs the handlers."""
        # Handlers are the main thread's; a call from another one leaves them to their owner. What is ignored already
        # (nohup, a script's background job) stays so, here and in the command.
        if threading.current_thread() is threading.main_thread():
            for number in _RELAYED:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Puts the earlier handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def attach(self, command: Command) -> None:
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

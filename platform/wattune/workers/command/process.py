"""A command's process: in the user's terminal or under a supervisor, its output line by line, and its end."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from wattune.steps.lines import OutputLines
from wattune.workers.command import supervisor

GRACE_S: Final = 10.0
"""Time that a command gets after SIGTERM until SIGKILL. torchrun passes the signal on and waits for its workers."""

LONGEST_LINE_BYTES: Final = 65536
"""A line that is longer is heard in parts."""

DRAIN_S: Final = 2.0
"""Longest wait for output after the end in a terminal: a process that was left behind may hold the pipe open."""

_OVER_S: Final = 5.0
"""Longest to wait for a supervisor after the time it has for ending everything."""

OnLine = Callable[[str, int], None]
"""Is called from a thread with every line of a command's output, and its arrival on the monotonic clock in ns; see
`wattune.steps.lines.OutputLines`."""


class _Heard:
    """A process whose output is read by threads."""

    def __init__(self, on_line: OnLine | None) -> None:
        self._on_line = on_line
        self._threads: list[threading.Thread] = []
        self.unheard: Exception | None = None
        """The error of `on_line`, after which it heard nothing more."""
        self.start_mono_ns = time.monotonic_ns()

    def _begin(self, name: str, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True, name=name)
        thread.start()
        return thread

    def _read_output(self, stream: IO[bytes], passed_to: int | None = None) -> None:
        """Hears a pipe until it is closed; what it reads is passed on at once to another descriptor."""
        assert self._on_line is not None, "a pipe is for somebody who hears it"
        lines, data = OutputLines(LONGEST_LINE_BYTES), b"-"
        resized = passed_to is not None and os.isatty(stream.fileno())
        with stream, suppress(OSError):  # of reading: the pipe is gone
            while data:
                data = os.read(stream.fileno(), LONGEST_LINE_BYTES)
                mono_ns = time.monotonic_ns()
                if passed_to is not None:
                    _write(passed_to, data)
                    if resized:
                        _resize(passed_to, stream.fileno())
                try:
                    for line, at_ns in lines.take(data, mono_ns) if self.unheard is None else ():
                        self._on_line(line, at_ns)
                except Exception as error:  # raised where the run ends: the command must be drained here too
                    self.unheard = error


def _between(target: int) -> tuple[int, int]:
    """Opens what stands between a command and where it writes: the end to read, and the end it writes to.

    It is a terminal where the target is one: programs then colour, draw bars and empty their buffers as if alone. It
    changes nothing on the way, since the target does. Keys and signals stay those of the user's terminal.
    """
    if not os.isatty(target):
        return os.pipe()
    read, written = os.openpty()
    how = termios.tcgetattr(target)
    how[1] &= ~termios.OPOST
    termios.tcsetattr(written, termios.TCSANOW, how)
    _resize(target, read)
    return read, written


def _resize(target: int, own: int) -> None:
    """Gives a terminal in between the size of the user's, which may be changed at any time."""
    with suppress(OSError):
        fcntl.ioctl(own, termios.TIOCSWINSZ, fcntl.ioctl(target, termios.TIOCGWINSZ, bytes(8)))


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    with suppress(OSError):  # nobody reads it any more, as behind `| head`: the command must still be drained
        while left:
            left = left[os.write(descriptor, left) :]


class TerminalProcess(_Heard):
    """A command run as if it had been started alone: same process group, terminal and environment."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        stdout: int | None = None,
        stderr: int | None = None,
        environment: Mapping[str, str] | None = None,
        on_line: OnLine | None = None,
    ) -> None:
        """Starts a program and its arguments, which no shell sees, with this process's own in the place of None.

        Where `on_line` hears every line, the command writes to a pipe, or to a terminal of its own where it would write
        to one, and what it writes is passed on at once.
        """
        super().__init__(on_line)
        targets = [1 if stdout is None else stdout, 2 if stderr is None else stderr]
        # One place for both stays one: what a program writes by turns to either comes in its order.
        apart = targets[: 1 if on_line and os.path.sameopenfile(*targets) else 2]
        heard = [] if on_line is None else [_between(target) for target in apart]
        given: list[int | None] = [heard[0][1], heard[-1][1]] if heard else [stdout, stderr]
        try:
            self._process = subprocess.Popen(arguments, stdout=given[0], stderr=given[1], env=environment)
        except BaseException:  # raised on: of a program that did not start nobody else closes what would be heard
            for read, _ in heard:
                os.close(read)
            raise
        finally:
            for _, written in heard:
                os.close(written)
        for (read, _), target in zip(heard, targets, strict=False):
            self._threads.append(self._begin("output", self._read_output, os.fdopen(read, "rb"), target))
        self.pid = self._process.pid
        self.end_mono_ns = self.start_mono_ns
        # A thread that does nothing but wait sees the end at once; polling would see it late.
        self._waiter = self._begin("command", self._wait)

    def _wait(self) -> None:
        self._process.wait()
        self.end_mono_ns = time.monotonic_ns()
        for thread in self._threads:
            thread.join(DRAIN_S)

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


class SupervisedProcess(_Heard):
    """A command under a supervisor, which leaves nothing of it. Start it from a thread that outlives it."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        on_line: OnLine,
        mark: str,
        cwd: str | Path | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """Starts a program and its arguments, which no shell sees.

        `mark` is a variable `NAME=VALUE` of the `environment` that no other process has: by it the last of them are
        found. `grace_s` is the time between SIGTERM and SIGKILL.
        """
        super().__init__(on_line)
        self._mark, self._grace_s = mark.encode(), grace_s
        self._facts: dict[str, Any] = {}
        self.others: Callable[[], list[int]] = list
        """Finds processes that belong to it and came of others: they end with it."""
        self.end_mono_ns: int | None = None
        """Time at which the command itself ended; None while it runs."""
        out, into = os.pipe()
        status, telling = os.pipe()
        try:
            program = [sys.executable, "-I", "-S", supervisor.__file__, str(telling), str(grace_s), *arguments]
            self._process = subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=into,
                stderr=into,
                env=environment,
                cwd=cwd,
                pass_fds=(telling,),
                start_new_session=True,
            )
        finally:
            os.close(into)
            os.close(telling)
        self._threads = [
            self._begin("output", self._read_output, os.fdopen(out, "rb")),
            self._begin("status", self._read_status, status),
        ]

    @property
    def exit_code(self) -> int | None:
        """Code that the command ended with, negative for a signal's number; None while it runs or where unknown."""
        code = self._facts.get("exit")
        return None if code is None else int(code)

    @property
    def command_pid(self) -> int | None:
        """Process of the command itself; None before it started."""
        return self._facts.get("pid")

    @property
    def failed_to_start(self) -> int | None:
        """Number of the operating system's error where the program could not be started."""
        number = self._facts.get("failed")
        return None if number is None else int(number)

    @property
    def has_ended(self) -> bool:
        """True once the command, or its supervisor, has ended."""
        return "exit" in self._facts or self._process.poll() is not None

    def pids(self) -> list[int]:
        """Returns the processes that came of the command and run now."""
        return supervisor.descendants(self._process.pid) + self.others()

    def stop(self, grace_s: float | None = None) -> None:
        """Asks it to end: SIGTERM to its process group, and SIGKILL to all of it after the grace time."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write(f"stop {self._grace_s if grace_s is None else grace_s}\n".encode())
            self._process.stdin.flush()

    def close(self) -> int:
        """Ends all of it, reads the rest of its output, and returns the number of its processes that would not end."""
        if not self.has_ended:
            self.stop()
        try:
            self._process.wait(self._grace_s + supervisor.KILL_S + _OVER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        left = supervisor.end_all(lambda: marked_pids(self._mark) + self.others())  # its supervisor may be killed
        for thread in self._threads:
            thread.join(1.0)
        return left

    def _read_status(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as stream:
            for line in stream:
                with suppress(ValueError):
                    self._facts |= json.loads(line)
                if self.end_mono_ns is None and "exit" in self._facts:
                    self.end_mono_ns = int(self._facts["mono_ns"])
        if self.end_mono_ns is None:
            self.end_mono_ns = time.monotonic_ns()


def marked_pids(mark: bytes) -> list[int]:
    """Returns the processes of this user whose environment has a variable `NAME=VALUE`."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            with suppress(OSError):  # it ended since, or is another user's
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
    return found

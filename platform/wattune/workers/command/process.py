"""A command that runs under its supervisor: its output line by line, its end, and nothing of it left afterwards."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from wattune.steps.pattern import Lines
from wattune.workers.command import supervisor

GRACE_S: Final = 10.0
"""Time that a command gets after SIGTERM until SIGKILL. torchrun passes the signal on and waits for its workers."""

_CHUNK: Final = 65536

_OVER_S: Final = 5.0
"""Longest to wait for a supervisor after the time it has for ending everything."""


class CommandProcess:
    """A command that was started. Start it from a thread that outlives it."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        on_line: Callable[[str, int], None],
        mark: str,
        cwd: str | Path | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """Starts it.

        Args:
            arguments: The program and its arguments; no shell sees them.
            environment: All of its variables.
            on_line: Called from a thread with every line of output and its arrival on the monotonic clock in ns; a line
                that ends with a carriage return has it at its end.
            mark: A variable `NAME=VALUE` of `environment` that no other process has: by it the last of them are found.
            cwd: Folder it starts in; None is this process's.
            grace_s: Time between SIGTERM and SIGKILL.
        """
        self._on_line, self._mark, self._grace_s = on_line, mark.encode(), grace_s
        self._facts: dict[str, Any] = {}
        self._stopped = False
        out, into = os.pipe()
        status, telling = os.pipe()
        self.start_mono_ns = time.monotonic_ns()
        self.end_mono_ns: int | None = None
        """Time at which the command itself ended; None while it runs."""
        try:
            program = [sys.executable, "-I", "-S", supervisor.__file__, str(telling), str(grace_s), *arguments]
            self._process = subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=into,
                stderr=into,
                env=dict(environment),
                cwd=cwd,
                pass_fds=(telling,),
                start_new_session=True,
            )
        finally:
            os.close(into)
            os.close(telling)
        self._readers = [
            threading.Thread(target=self._read_output, args=(out,), daemon=True, name="output"),
            threading.Thread(target=self._read_status, args=(status,), daemon=True, name="status"),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def exit_code(self) -> int | None:
        """Code that the command ended with, negative for a signal's number; None while it runs or where unknown."""
        code = self._facts.get("exit")
        return None if code is None else int(code)

    @property
    def failed_to_start(self) -> int | None:
        """Number of the operating system's error where the program could not be started."""
        number = self._facts.get("failed")
        return None if number is None else int(number)

    @property
    def has_ended(self) -> bool:
        """True once the command, or its supervisor, has ended."""
        return "exit" in self._facts or self._process.poll() is not None

    @property
    def was_stopped(self) -> bool:
        """True where `stop` asked it to end."""
        return self._stopped

    def pids(self) -> list[int]:
        """Returns the processes that came of the command and run now."""
        return supervisor.descendants(self._process.pid)

    def stop(self, grace_s: float | None = None) -> None:
        """Asks it to end: SIGTERM to its process group, and SIGKILL to all of it after the grace time.

        Args:
            grace_s: Another grace time than the usual one.
        """
        self._stopped = True
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write(f"stop {self._grace_s if grace_s is None else grace_s}\n".encode())
            self._process.stdin.flush()

    def close(self) -> int:
        """Ends all of it, waits for the end, and reads the rest of its output.

        Returns:
            Number of its processes that would not end.
        """
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
        left = self._end_marked()
        for reader in self._readers:
            reader.join(1.0)
        return left

    def _end_marked(self) -> int:
        """Kills what outlived its supervisor, which was itself killed then; returns how many would not end."""
        until_s = time.monotonic() + supervisor.KILL_S
        while left := marked_pids(self._mark):
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until_s:
                return len(left)
            time.sleep(0.02)
        return 0

    def _read_output(self, descriptor: int) -> None:
        lines = Lines(_CHUNK)
        with os.fdopen(descriptor, "rb", buffering=0) as stream:
            chunk = b"any"
            while chunk:
                chunk = stream.read(_CHUNK)
                for line, at_ns in lines.add(chunk, time.monotonic_ns()):
                    self._on_line(line, at_ns)

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

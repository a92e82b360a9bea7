"""The process between wattune and a user's command: it starts the command, and ends everything that came of it.

It runs as a program of its own (`python -I supervisor.py STATUS_FD GRACE_S PROGRAM ARGUMENTS`) and needs the standard
library alone. Its standard input is a pipe that wattune holds: a line `stop` (or `stop SECONDS_OF_GRACE`) ends the
command, and so does the end of the pipe, which comes when wattune's process dies, however it dies. Every process that
the command leaves behind becomes a child of this one (`PR_SET_CHILD_SUBREAPER`), also one that became a daemon, and is
ended with it.

Status lines on STATUS_FD are JSON: `{"pid": N}`, `{"failed": ERRNO}` where the program cannot be started,
`{"exit": CODE, "mono_ns": N}` with a negative signal where one ended it, and `{"over": NUMBER_LEFT}` at the very end.
"""

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
"""Numbers of prctl(2), from linux/prctl.h."""

KILL_S: Final = 10.0
"""Longest to wait for processes that were sent SIGKILL. One in an endless system call may not end at all."""

ORPHAN_GRACE_S: Final = 2.0
"""Time that a command gets to end by itself where wattune's process is gone."""


def main(arguments: list[str]) -> int:
    """Runs the command, and returns when nothing of it is left."""
    status_fd, grace_s, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    os.set_inheritable(status_fd, False)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    asked: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda asking, _frame: asked.append(asking))
    started, starting = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(command, libc, status_fd)
    os.close(starting)
    # The command's own end closes with `exec`. Before that, a signal would meet this program's handlers, or no group.
    os.read(started, 1)
    os.close(started)
    _tell(status_fd, pid=pid)
    return _Watch(pid, grace_s, status_fd, woken, asked).until_over()


def _become(command: list[str], libc: Any, status_fd: int) -> NoReturn:
    """Turns this process into the command, in a session of its own."""
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        # Python ignores the last two, and what is ignored stays so in the command.
        own = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ)
        for number in own:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.execvp(command[0], command)  # noqa: S606 - no shell is the point
    except OSError as error:
        _tell(status_fd, failed=error.errno)
    except BaseException:  # nothing may return into the supervisor's code from here
        _tell(status_fd, failed=-1)
    os._exit(127)


def _tell(status_fd: int, **facts: Any) -> None:
    try:
        os.write(status_fd, json.dumps(facts).encode() + b"\n")
    except OSError:  # wattune is gone
        return


class _Watch:
    """The time from the command's start until nothing of it is left."""

    def __init__(self, pid: int, grace_s: float, status_fd: int, woken: int, asked: list[int]) -> None:
        """Starts the watch. `asked` gets the signals that ask this process to end."""
        self._pid, self._grace_s, self._status_fd, self._woken, self._asked = pid, grace_s, status_fd, woken, asked
        self._exited = False
        self._kill_at_s: float | None = None

    def until_over(self) -> int:
        watched = [0, self._woken]
        while not self._exited or self._reap():
            left_s = None if self._kill_at_s is None else max(self._kill_at_s - time.monotonic(), 0.0)
            if self._exited:  # the rest of it gets the same time to end
                left_s = min(left_s if left_s is not None else self._grace_s, 0.05)
            ready = select.select(watched, [], [], left_s)[0]
            if self._woken in ready:
                os.read(self._woken, 4096)
            if 0 in ready:
                line = os.read(0, 4096)
                if not line:
                    watched.remove(0)
                self._stop(_grace_s(line, self._grace_s))
            if self._asked:
                self._stop(min(self._grace_s, ORPHAN_GRACE_S))
            self._reap()
            if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
                break
        left = end_all(lambda: descendants(os.getpid()), self._reap)
        self._reap()
        _tell(self._status_fd, over=left)
        return 0

    def _stop(self, grace_s: float) -> None:
        """Asks the command's process group to end, and sets the time at which all of it is killed."""
        until_s = time.monotonic() + grace_s
        if self._kill_at_s is None:
            try:
                os.killpg(self._pid, signal.SIGTERM)
            except ProcessLookupError:  # it ended since
                pass
        self._kill_at_s = until_s if self._kill_at_s is None else min(self._kill_at_s, until_s)

    def _reap(self) -> bool:
        """Takes note of every child that ended; returns whether any is left."""
        while True:
            try:
                pid, code = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._pid:
                self._exited = True
                _tell(self._status_fd, exit=os.waitstatus_to_exitcode(code), mono_ns=time.monotonic_ns())
                if self._kill_at_s is None:  # what it left behind is not asked for
                    self._kill_at_s = time.monotonic() + min(self._grace_s, ORPHAN_GRACE_S)


def _grace_s(line: bytes, usual_s: float) -> float:
    """Returns the seconds of grace that a line asks for; at the end of the input they are few."""
    words = line.split()
    if not words:
        return min(usual_s, ORPHAN_GRACE_S)
    try:
        return float(words[1]) if len(words) > 1 else usual_s
    except ValueError:
        return usual_s


def descendants(root: int) -> list[int]:
    """Returns the processes that came of one, by `/proc`; without those that have ended and wait for their parent."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib takes longer to import than all else here
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it ended since
            continue
        if fields[0] != b"Z":
            children.setdefault(int(fields[1]), []).append(int(name))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def end_all(find: Callable[[], list[int]], reap: Callable[[], object] = lambda: None) -> int:
    """Kills every process that is found, and those that they start meanwhile; returns how many would not end."""
    until_s = time.monotonic() + KILL_S
    while left := find():
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        reap()
        if time.monotonic() > until_s:
            return len(left)
        time.sleep(0.01)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

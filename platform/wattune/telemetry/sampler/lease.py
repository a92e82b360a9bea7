"""Leases, which limit a process' life, locks, which keep two off one device, and processes that live by both.

Leases and locks are files: they outlive their writer and need no server. Locks are flock(2)s: the kernel drops them
with the
process, however it ends.
"""

import contextlib
import faulthandler
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from wattune.errors import TelemetryError, WattuneError
from wattune.private_folder import NotPrivateError, is_stopped, own_folder, start_ticks
from wattune.units import s_to_ns

LEASE_S: Final = 10.0
"""Age of the lease at which a sampler closes its files and ends."""

RUNTIME_VARIABLE: Final = "WATTUNE_RUNTIME"
"""Another folder for device locks: for machines that play several nodes, and for tests."""

LONGEST_LOOK_S: Final = 2.0
"""Longest time between two looks at a lease that counts: a process that did not look for longer was stopped, and its
owner may have been stopped with it. Samplers look every 0.8 s."""

_POLL_S: Final = 0.1
_OWNER_LENGTH: Final = 48
"""Bytes of a lease: two numbers and blanks, so that the name of another owner leaves nothing of this one."""


class Lease:
    """A file that an owner keeps touching, as seen by the process that lives by it."""

    def __init__(self, path: Path, lease_s: float, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._path, self._lease_ns, self._clock_ns = path, s_to_ns(lease_s), clock_ns
        self._mtime_ns: int | None = None
        self._age_ns, self._looked_ns = 0, clock_ns()

    def expired(self) -> bool:
        """Returns True where its owner is gone: the file was not touched for the lease's length, or was deleted.

        The age is the time since a change was seen, never wall clock minus file time: stepping the wall clock must not
        end a recording. A node that stood still, a paused container or a suspended job must not end one either: when it
        goes on, its owner has most of the lease to renew it, see `LONGEST_LOOK_S`. Nor does the lease age while its
        owner alone is stopped, as by Ctrl-Z in its terminal: it is there and goes on.
        """
        try:
            mtime_ns = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return True
        now_ns = self._clock_ns()
        if not self._owner_is_stopped():
            self._age_ns += min(now_ns - self._looked_ns, s_to_ns(LONGEST_LOOK_S))
        self._looked_ns = now_ns
        if mtime_ns != self._mtime_ns:
            self._mtime_ns, self._age_ns = mtime_ns, 0
        return self._age_ns >= self._lease_ns

    def _owner_is_stopped(self) -> bool:
        try:
            words = self._path.read_text(errors="replace").split()
        except OSError:
            return False
        return len(words) == 2 and all(map(str.isdecimal, words)) and is_stopped(int(words[0]), int(words[1]))


def renew(path: Path) -> None:
    """Renews a lease, and names this process as its owner. Raises `FileNotFoundError`: there is none."""
    owner = f"{os.getpid()} {start_ticks(os.getpid()) or ''}".ljust(_OWNER_LENGTH).encode()
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(fd, _OWNER_LENGTH, 0) != owner:  # once: a disk that is full by now ends no recording here
            os.pwrite(fd, owner, 0)
        os.utime(fd)
    finally:
        os.close(fd)


class FileLock:
    """An exclusive lock on a file, held until `release`, or the end of every process that inherited it."""

    def __init__(self, fd: int) -> None:
        """Wraps a locked descriptor; use `take`."""
        self._fd = fd

    @classmethod
    def take(cls, path: Path, *, of_all_users: bool = False) -> "FileLock | None":
        """Takes the lock, the file made if need be; None where another process holds it.

        A lock `of_all_users` is in a folder they share. Each may open it to read, and Linux refuses `O_CREAT` on it.
        """
        flags = os.O_CLOEXEC | (os.O_RDONLY | os.O_NOFOLLOW if of_all_users else os.O_RDWR)
        is_there = of_all_users and os.path.lexists(path)
        fd = os.open(path, flags | (0 if is_there else os.O_CREAT), 0o644 if of_all_users else 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return cls(fd)

    def fileno(self) -> int:
        """The descriptor, to hand the lock on to a child process."""
        return self._fd

    def write_holder(self, pid: int) -> None:
        """Names the process that holds it, for messages and signals."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{pid} {start_ticks(pid) or ''}".encode(), 0)

    def release(self) -> None:
        """Closes this process's copy; the lock stays where a child inherited it."""
        os.close(self._fd)


def lock_holder(path: Path) -> int | None:
    """The process that holds a lock.

    0 where it did not say, or where that id is another process's now; None where nobody holds the lock.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid, _, started = os.pread(fd, 60, 0).decode(errors="replace").partition(" ")
        if not pid.isdecimal() or (started.isdecimal() and start_ticks(int(pid)) != int(started)):
            return 0
        return int(pid)
    else:
        return None
    finally:
        os.close(fd)


def runtime_folder() -> Path:
    """The folder where this user's samplers on this node meet, made if need be.

    Where `$WATTUNE_RUNTIME` is not set it depends on the user alone, not on `$TMPDIR` or `$XDG_RUNTIME_DIR`: a login
    shell and a Ray worker must find the same one. Raises `TelemetryError`: the folder is not this user's own.
    """
    path = Path(os.environ.get(RUNTIME_VARIABLE) or f"/tmp/wattune-locks-{os.getuid()}")  # noqa: S108 – checked below
    try:
        return own_folder(path, f"remove it, or set {RUNTIME_VARIABLE} to another one")
    except NotPrivateError as error:
        raise TelemetryError(str(error)) from None


class DeviceLocks:
    """The right to read a set of devices of one backend."""

    def __init__(self, backend: str, devices: Iterable[str], *, wait_s: float = 0.0) -> None:
        """Takes one lock a device in `runtime_folder`, all or none.

        A device is known by its uuid where it has one. Raises `TelemetryError`: another sampler reads one of them; the
        message names its process.
        """
        self._locks: list[FileLock] = []
        deadline_s = time.monotonic() + wait_s
        for device in devices:
            path = runtime_folder() / f"{re.sub(r'[^A-Za-z0-9._-]', '_', f'{backend}-{device}')}.lock"
            while (lock := FileLock.take(path)) is None:
                if time.monotonic() >= deadline_s:
                    self.release()
                    raise TelemetryError(
                        f"device {device} of backend {backend} is read by another sampler, process "
                        f"{lock_holder(path) or 'unknown'}, after lock_wait_s={wait_s:g}; attach to that one or stop it"
                    )
                time.sleep(_POLL_S)
            lock.write_holder(os.getpid())
            self._locks.append(lock)

    def release(self) -> None:
        """Releases the devices; may be called twice."""
        while self._locks:
            self._locks.pop().release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


LEASE: Final = "lease"
"""Name of the lease in the folder."""
_LOG_TAIL_LINES: Final = 12
_WAIT_S: Final = 0.02
READY_S: Final = 60.0
"""Longest one may take to be ready."""

_DETACH: Final = '( "$@" >&2 & echo $!; exec >&2; wait $! || echo "ended with exit status $?" ) &'
"""A shell that starts its arguments in the background, says their process id and ends. A second shell waits for them,
to write into their log how they ended: 137 is SIGKILL. Both are then nobody's children: Ray kills the children of an
actor that ends, and an owner would have to reap them."""


class DetachedProcess:
    """One such process. It outlives this object, and its owner for as long as the lease lasts."""

    what: ClassVar[str]
    """Its name in messages and files."""
    ready_file: ClassVar[str]
    """The file that it writes once it is ready."""

    def __init__(self, folder: Path) -> None:
        """Names one by its folder."""
        self.folder = folder
        self._lock, self._log = f"{self.what}.lock", f"{self.what}.log"

    def renew(self) -> None:
        """Renews the lease; to be called well within every `lease_s`.

        Raises `TelemetryError`: there is no lease: nobody was started here, or the folder was cleared.
        """
        try:
            renew(self.folder / LEASE)
        except FileNotFoundError:
            raise TelemetryError(f"{self.folder} has no {self.what}'s lease; start a {self.what} there first") from None

    def alive(self) -> bool:
        """Returns True while its process runs."""
        return lock_holder(self.folder / self._lock) is not None

    def end(self, timeout_s: float = 10.0) -> None:
        """Asks it to end in order, and kills it where that takes too long."""
        self._signal(signal.SIGTERM)
        if not self._ended_within(timeout_s):
            self._signal(signal.SIGKILL)
            self._ended_within(timeout_s)

    def _spawn(self, module: str, asked: Mapping[str, Any]) -> None:
        """Starts a module that calls `run_detached`, with what is asked of it."""
        command = [sys.executable, "-P", "-m", module, str(self.folder.absolute()), json.dumps(asked)]
        lock = FileLock.take(self.folder / self._lock)
        if lock is None:
            raise TelemetryError(f"a {self.what} starts or runs in {self.folder}; attach to it")
        try:
            (self.folder / LEASE).touch()
            self.renew()
            with open(self.folder / self._log, "wb") as log:
                shell = subprocess.run(
                    ["/bin/sh", "-c", _DETACH, "sh", *command],
                    check=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    # It is born with the lock and never lets go of it: to hold it is to be alive.
                    pass_fds=[lock.fileno()],
                    # A Ray worker may find wattune in a working directory that is on its own path only.
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                        "OPENBLAS_NUM_THREADS": "1",  # numpy starts one thread a processor otherwise
                    },
                )
            lock.write_holder(int(shell.stdout))
        finally:
            lock.release()

    def wait_until_ready(self, timeout_s: float = READY_S) -> None:
        """Waits until it has written its `ready_file`: until a sampler has opened its sensors.

        Raises `TelemetryError`: it ended or was too slow; the message holds the end of its log.
        """
        deadline_s = time.monotonic() + timeout_s
        while not (self.folder / self.ready_file).exists():
            if not self.alive():
                raise TelemetryError(f"the {self.what} in {self.folder} ended while starting:\n{self.last_words()}")
            if time.monotonic() > deadline_s:
                self._signal(signal.SIGKILL)
                raise TelemetryError(
                    f"the {self.what} in {self.folder} was not ready within timeout_s={timeout_s:g}; raise that, or "
                    f"see what blocks its driver:\n{self.last_words()}"
                )
            self.renew()
            time.sleep(_WAIT_S)

    @property
    def refused(self) -> bool:
        """True where it said why it ended: to start it again changes nothing."""
        return "error: " in self.last_words()

    def last_words(self) -> str:
        """Returns the end of its log."""
        lines = (self.folder / self._log).read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join(f"  {line}" for line in lines) or "  its log is empty"

    def _signal(self, number: signal.Signals) -> None:
        if pid := lock_holder(self.folder / self._lock):
            with contextlib.suppress(ProcessLookupError):  # it ended since
                os.kill(pid, number)

    def _ended_within(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_WAIT_S)
        return True


STOP_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def wait_for_signal(timeout_s: float) -> str | None:
    """Sleeps until a stop signal or a time-out.

    The stop signals must be blocked, so that they interrupt nothing else. Returns the signal's name, or None.
    """
    received = signal.sigtimedwait(STOP_SIGNALS, timeout_s)
    # Continued after a stop past its deadline, CPython 3.11 returns a signal number that was never filled in.
    if received is None or received.si_signo not in STOP_SIGNALS:
        return None
    return signal.Signals(received.si_signo).name


def run_detached(act: Callable[..., object]) -> int:
    """Calls `act(folder, **asked)` in this process, with what `_spawn` was given; returns the exit code.

    It is 0 after a stop, and that of an error otherwise, whose message is on standard error.
    """
    # Blocked before any thread is made, so that all inherit it and `wait_for_signal` gets every one.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    faulthandler.enable()  # a driver that crashes leaves a word in the log
    try:
        sys.stderr.write(f"ended: {act(Path(sys.argv[1]), **json.loads(sys.argv[2]))}\n")
    except (WattuneError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return getattr(error, "exit_code", 1)
    return 0

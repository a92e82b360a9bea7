"""Leases, which limit a sampler's life, and locks, which keep two samplers off one device.

Both are files: they outlive their writer and need no server. Locks are flock(2)s: the kernel drops them with the
process, however it ends.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Self

from wattune.errors import TelemetryError
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
    """Renews a lease, and names this process as its owner.

    Raises:
        FileNotFoundError: There is none.
    """
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
    def take(cls, path: Path) -> "FileLock | None":
        """Takes the lock, the file made if need be; None where another process holds it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    shell and a Ray worker must find the same one.

    Raises:
        TelemetryError: The folder is not this user's own.
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

        A device is known by its uuid where it has one.

        Raises:
            TelemetryError: Another sampler reads one of them; the message names its process.
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

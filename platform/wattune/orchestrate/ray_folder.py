"""The folder of a Ray cluster that wattune starts: private, and gone when the cluster is.

Ray makes its own session folder under a name that every user knows, with mode 0777: another user can replace a socket
in it and read what the trials wrote. A folder above it that only this user enters closes both.
"""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from wattune.forced_exit import asked
from wattune.private_folder import own_folder, temporary_folder
from wattune.telemetry.sampler.lease import FileLock, lock_holder

_PREFIX: Final = "ray-"
_LOCK: Final = "owner"
_FAILED: Final = "failed"
_TEMPORARY: Final = "tmp"

_BEGINS_S: Final = 60.0
"""Age below which a folder without a lock may be one that another study is making."""

_GONE_WITHIN_S: Final = 2.0
"""Longest that killed processes may take to be gone."""

KEPT_S: Final = 86_400.0
"""Time that the folder of a cluster stays whose study ended with an error."""

_LONGEST: Final = 38
"""Longest path of the folder: a socket's path has at most 107 bytes on Linux, and Ray's own part of it 69."""


_own: Final[list[Path]] = []
"""Folders of clusters that this process has started and not ended."""


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Makes the folder, and removes it at the end, with what killed processes of this user left before.

    After an error it stays for a day, for Ray's logs in it, or until another one has failed. Raises `NotPrivateError`:
    a folder above it is not this user's own.
    """
    base = temporary_folder()
    if len(os.fsencode(base)) + len(_PREFIX) + 9 > _LONGEST:
        base = own_folder(Path(f"/tmp/wattune-{os.getuid()}"))  # noqa: S108 – checked there
    remove_left(base)
    folder = base / f"{_PREFIX}{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    (folder / _TEMPORARY).mkdir(mode=0o700)
    lock = FileLock.take(folder / _LOCK)
    assert lock is not None, "nobody else knows the folder"
    lock.write_holder(os.getpid())
    _own.append(folder)
    try:
        yield folder
    except Exception:  # raised on: Ray's logs may say why, so they stay
        if not asked():  # a signal to the whole process group ends Ray first, and that is no riddle
            (folder / _FAILED).touch()
        raise
    finally:
        _own.remove(folder)
        lock.release()
        if not (folder / _FAILED).exists():
            shutil.rmtree(folder, ignore_errors=True)


def scratch_place() -> Path | None:
    """Returns the folder for this process's own temporary files of a study: that of the cluster it has started.

    None where it has started none; then they are where the machine has its temporary files.
    """
    return _own[-1] / _TEMPORARY if _own else None


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Lets processes that start inside the body put their temporary files into a cluster's folder.

    Workers that are killed leave sockets and spools behind. There they go with the cluster.
    """
    tempfile.gettempdir()  # this process has looked up its own by now, and keeps it
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder / _TEMPORARY)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def remove_left(base: Path) -> None:
    """Removes a folder's folders of clusters whose owner has ended, except the latest that was left for its logs."""
    failed_at_s = {}
    for path in base.glob(f"{_PREFIX}*/{_FAILED}"):
        with suppress(FileNotFoundError):  # another call removed it meanwhile
            failed_at_s[path.parent] = path.stat().st_mtime
    latest = max(failed_at_s, key=lambda folder: failed_at_s[folder], default=None)
    for folder in base.glob(f"{_PREFIX}*"):
        kept = folder == latest and time.time() - failed_at_s[folder] < KEPT_S
        # Ray's dashboard may write a last file, and make the folder anew, after the cluster has ended.
        # One from the future was made before the wall clock was set back.
        try:
            begins = not (folder / _LOCK).exists() and abs(time.time() - folder.lstat().st_mtime) < _BEGINS_S
        except FileNotFoundError:  # its study has ended, or another call removed it meanwhile
            continue
        if not kept and not begins and lock_holder(folder / _LOCK) is None:
            end_processes(folder)
            shutil.rmtree(folder, ignore_errors=True)


def remove_by_force(folder: Path) -> None:
    """Ends a cluster whose driver cannot any more, and removes its folder."""
    end_processes(folder)
    while folder.exists():  # the driver's own threads may write a last file meanwhile
        shutil.rmtree(folder, ignore_errors=True)


def end_processes(folder: Path) -> None:
    """Kills every process of a cluster that outlived it, and waits a moment until none of them writes any more.

    Its processes have their temporary files in its folder, and no other process has: the name is drawn at random.
    """
    own, place, killed = os.getpid(), str(folder / _TEMPORARY), list[psutil.Process]()
    for process in psutil.process_iter():
        try:
            if process.pid != own and process.environ().get("TMPDIR") == place:
                process.kill()
                killed.append(process)
        except psutil.Error:  # it has ended, or is another user's
            continue
    psutil.wait_procs(killed, timeout=_GONE_WITHIN_S)

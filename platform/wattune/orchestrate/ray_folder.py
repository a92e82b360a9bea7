"""The folder of a Ray cluster that wattune starts: private, and gone when the cluster is.

Ray makes its own session folder under a name that every user knows, with mode 0777: another user can replace a socket
in it and read what the trials wrote. A folder above it that only this user enters closes both.
"""

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from wattune.private_folder import own_folder, temporary_folder
from wattune.telemetry.sampler.lease import FileLock, lock_holder

_PREFIX: Final = "ray-"
_LOCK: Final = "owner"
_FAILED: Final = "failed"

KEPT_S: Final = 86_400.0
"""Time that the folder of a cluster stays whose study ended with an error."""

_LONGEST: Final = 38
"""Longest path of the folder: a socket's path has at most 107 bytes on Linux, and Ray's own part of it 69."""


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Makes the folder, and removes it at the end, with what killed processes of this user left before.

    After an error it stays for a day, for Ray's logs in it.

    Raises:
        NotPrivateError: A folder above it is not this user's own.
    """
    base = temporary_folder()
    if len(os.fsencode(base)) + len(_PREFIX) + 9 > _LONGEST:
        base = own_folder(Path(f"/tmp/wattune-{os.getuid()}"))  # noqa: S108 – checked there
    remove_left(base)
    folder = base / f"{_PREFIX}{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    lock = FileLock.take(folder / _LOCK)
    assert lock is not None, "nobody else knows the folder"
    lock.write_holder(os.getpid())
    try:
        yield folder
    except Exception:
        (folder / _FAILED).touch()
        raise
    finally:
        lock.release()
        if not (folder / _FAILED).exists():
            shutil.rmtree(folder, ignore_errors=True)


def remove_left(base: Path) -> None:
    """Removes folders of clusters whose owner has ended, except one that was left for its logs within a day.

    Args:
        base: The folder above them.
    """
    for folder in base.glob(f"{_PREFIX}*"):
        failed = folder / _FAILED
        kept = failed.exists() and time.time() - failed.stat().st_mtime < KEPT_S
        if not kept and (folder / _LOCK).exists() and lock_holder(folder / _LOCK) is None:
            shutil.rmtree(folder, ignore_errors=True)

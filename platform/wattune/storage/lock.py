"""The lock of a study: one process runs it at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from wattune.errors import PlanError
from wattune.storage.files import make_folder, nearest_existing

LOCK: Final = ".running"
"""File that the process which runs a study holds locked. A lock ends with its process, however that ends."""


@contextmanager
def if_idle(folder: Path) -> Iterator[bool]:
    """Locks a folder unless another process holds it. Yields whether it is locked now.

    Raises `PlanError`: its file system has no locks.
    """
    path = folder / LOCK
    while True:
        with open(path, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                idle = True
            except BlockingIOError:
                idle = False
            except OSError as error:
                raise PlanError(
                    f"the file system of {folder} has no locks: {error.strerror}; mount it with flock, or give "
                    "--storage a local folder or a URL"
                ) from error
            if idle and not _is_at(file.fileno(), path):
                continue  # the process that held it began nothing and removed the file
            yield idle
            return


@contextmanager
def run_lock(folder: Path, begun: Path) -> Iterator[None]:
    """Locks a folder for one runner. Makes the folder; it goes again unless the file `begun` is in it by then.

    Raises `PlanError`: another process holds it, it cannot be made, or cannot be written to.
    """
    above, _ = nearest_existing(folder)
    made = [one for one in (folder, *folder.parents) if one != above and one.is_relative_to(above)]
    make_folder(folder)
    try:
        with if_idle(folder) as idle:
            if not idle:
                raise PlanError(f"study {folder} is being run by another process; wait for it or stop it")
            try:
                yield
            finally:
                if not begun.exists():
                    (folder / LOCK).unlink(missing_ok=True)
    finally:
        with suppress(OSError):  # it holds a study, or something of somebody else
            for one in made:
                one.rmdir()


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether an open file is still the one that a path names."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

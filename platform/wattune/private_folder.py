"""Folders in a place that every user writes to, and processes named by an id: both checked before they are believed."""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from wattune.errors import WattuneError


class NotPrivateError(WattuneError):
    """A folder under a name anyone can guess that belongs to somebody else, or that others write to."""


def temporary_folder(*names: str) -> Path:
    """Returns a folder of this user's own in the machine's temporary folder, made if need be.

    `names` are folders below `<temporary folder>/wattune-<user id>`, outermost first; None is that folder itself.
    Raises `NotPrivateError`: one of them is not this user's own.
    """
    path = Path(tempfile.gettempdir()) / f"wattune-{os.getuid()}"
    own_folder(path)
    for name in names:
        path /= name
        own_folder(path)
    return path


def own_folder(path: Path, remedy: str = "remove it", *, shared: bool = False) -> Path:
    """Makes a folder that only this user reads and writes, or makes sure that an existing one is such.

    The name can be guessed, so another user may have made it first, or a link in its place: what is read there could be
    theirs, and what is written there would be theirs to read. The parent exists; `remedy` is the end of the message,
    after "belongs to ...". In a `shared` one everybody may leave files, and only root and this user those of others: it
    is sticky, and one of the two has it. Raises `NotPrivateError`: it is a link or no folder, belongs to another user,
    or others write to it.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        path.chmod(0o1777 if shared else 0o700)  # the process' mask counts in `mkdir`
    found, owners = path.lstat(), (0, os.getuid()) if shared else (os.getuid(),)
    is_open = found.st_mode & 0o022 and not (shared and found.st_mode & stat.S_ISVTX)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners or is_open:
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a link" if stat.S_ISLNK(found.st_mode) else "a file"
        wanted = "sticky folder of root or" if shared else "folder that only"
        raise NotPrivateError(
            f"{path} must be a {wanted} user {os.getuid()}{'' if shared else ' writes to'}, but is {kind} of user "
            f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}; {remedy}"
        )
    return path


def start_ticks(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since the machine did; None where it is gone or unknown.

    With the id it names one process for good: an id alone is given to another process later (proc(5), field 22).
    """
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def is_stopped(pid: int, started: int) -> bool:
    """Returns True while a process of this id and start stands still until somebody continues it (SIGSTOP, Ctrl-Z)."""
    fields = _stat(pid)
    return fields is not None and int(fields[19]) == started and fields[0] in ("T", "t")


def _stat(pid: int) -> list[str] | None:
    """Returns what the kernel says of a process, from its state on (proc(5), field 3); None where it is gone."""
    try:
        text = Path("/proc", str(pid), "stat").read_text(errors="replace")
    except OSError:
        return None
    # The command's name, in parentheses, may hold anything.
    return text.rpartition(")")[2].split()

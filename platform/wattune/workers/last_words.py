"""The words of a worker that a fatal signal of its own ended, and the kernel's count of processes it ended for memory.

A process that dies of a signal tells nobody which one. A segmentation fault or an abort comes from the work itself, and
Python's fault handler writes it down before the end. SIGKILL and SIGTERM come from outside and leave no words.
"""

import contextlib
import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from wattune.private_folder import NotPrivateError, temporary_folder

_COUNTERS: Final = (
    # cgroup 2, of the container or of the own group; cgroup 1; the whole machine.
    ("/sys/fs/cgroup{group}/memory.events", "oom_kill"),
    ("/sys/fs/cgroup/memory.events", "oom_kill"),
    ("/sys/fs/cgroup/memory/memory.oom_control", "oom_kill"),
    ("/proc/vmstat", "oom_kill"),
)
"""Files with the number of processes the kernel ended because memory ran out, nearest first, and the counter's name."""


def _folder() -> Path:
    """Returns this user's folder of last words; raises NotPrivateError where it belongs to somebody else."""
    return temporary_folder("last_words")


@contextmanager
def kept() -> Iterator[None]:
    """Keeps the words of a fatal signal that ends this process inside the body, for `last_words` on this node."""
    try:
        folder = _folder()
    except (NotPrivateError, OSError):
        yield
        return
    forget_dead()
    path = folder / str(os.getpid())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        faulthandler.enable(file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.disable()
            path.unlink(missing_ok=True)


def last_words(pid: int) -> str:
    """Returns what a process of this node wrote when a fatal signal ended it, and removes it; empty without any."""
    try:
        path = _folder() / str(pid)
        if path.lstat().st_uid != os.getuid() or path.is_symlink():
            return ""
        words = path.read_text(errors="replace")
    except (NotPrivateError, OSError):
        return ""
    if words:
        path.unlink(missing_ok=True)
    return words


def forget_dead() -> None:
    """Removes the files of processes that are gone."""
    with contextlib.suppress(NotPrivateError, OSError):
        for path in _folder().iterdir():
            if not Path("/proc", path.name).exists():
                path.unlink(missing_ok=True)


def num_oom_kills(root: Path = Path("/")) -> int:
    """Returns how many processes of this container or machine the kernel has ended because memory ran out."""
    group = ""
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        group = next((line[3:].rstrip("/") for line in lines if line.startswith("0::")), "")
    for place, name in _COUNTERS:
        with contextlib.suppress(OSError):
            lines = (root / place.format(group=group).lstrip("/")).read_text().splitlines()
            found = [int(line.split()[1]) for line in lines if line.split()[:1] == [name]]
            if found:
                return found[0]
    return 0

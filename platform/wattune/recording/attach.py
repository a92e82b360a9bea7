"""A job that runs already, recorded from outside. Its exit code is its parent's to know."""

import os
import select
import time
from pathlib import Path

from wattune.errors import PlanError


class AttachedProcess:
    """A process that somebody else started."""

    def __init__(self, pid: int) -> None:
        """Holds on to it, so that its number cannot become another's.

        Raises `PlanError`: there is no such process, or this user may not look at it.
        """
        folder, tries_left = Path(f"/proc/{pid}"), 10
        try:
            self._fd = os.pidfd_open(pid)
            while not (words := (folder / "cmdline").read_bytes().split(b"\0"))[0] and tries_left:
                tries_left -= 1  # for a moment of its start a program has none
                time.sleep(0.02)
            (folder / "environ").read_bytes()
        except PermissionError:
            raise PlanError(
                f"--attach {pid}: it is of user {folder.stat().st_uid}, and you are {os.getuid()}: its devices cannot "
                "be known; record as that user, or as root"
            ) from None
        except (ProcessLookupError, FileNotFoundError):
            raise PlanError(f"--attach {pid}: no process has this number; see `ps -ef`, or it has ended") from None
        except OSError as error:  # EINVAL of a thread
            raise PlanError(
                f"--attach {pid}: it is no process ({error.strerror}); give the process, not its thread"
            ) from None
        self.exit_code: int | None = None
        self.unheard: Exception | None = None
        self.pid, self.command = pid, [word.decode(errors="replace") for word in words if word]
        if not self.command:
            raise PlanError(f"--attach {pid}: it has ended, or is the kernel's own; give a program that runs")
        self.start_mono_ns = self.end_mono_ns = time.monotonic_ns()

    def ended_within(self, timeout_s: float) -> bool:
        """Waits for its end, at most so long. Returns True where it has ended."""
        waiting = select.poll()  # select(2) takes no descriptor from 1024 on
        waiting.register(self._fd, select.POLLIN)
        ended = bool(waiting.poll(timeout_s * 1000))
        self.end_mono_ns = time.monotonic_ns()
        return ended

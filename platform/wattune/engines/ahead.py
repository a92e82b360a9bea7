"""A process beside a worker that compiles the graphs of coming plans while the present one runs.

It lives as long as it has plans to compile. Each of its children holds a context on the worker's device (0.6 GB on an
H100), and processors.
"""

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, NoReturn

from wattune.trial import TrialSpec
from wattune.workers.command.supervisor import PR_SET_PDEATHSIG
from wattune.workers.engine import Ranks

_log = logging.getLogger(__name__)

RankOfPlan = tuple[TrialSpec, Ranks]
"""A plan, and the rank that this worker will be in it."""

_NICENESS: Final = 10
_COMPILERS: Final = "TORCHINDUCTOR_COMPILE_THREADS"
"""Processes that compile kernels for one that traces graphs; torch would start one for each processor."""
_MOST_COMPILERS: Final = 4
_AT_ONCE: Final = 3
"""Plans compiled at a time: one after another, their trials came as soon (two H100)."""


class Ahead:
    """The process of one worker, where there is one."""

    def __init__(self) -> None:
        """Starts nothing."""
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: list[RankOfPlan] = []

    def go_on(self, coming: Sequence[RankOfPlan] = ()) -> None:
        """Compiles what waits, unless the process is at what it was given before; what is new waits behind that."""
        self._waiting += coming
        if not self._waiting or self.pids:
            return
        environment = {_COMPILERS: str(min(_MOST_COMPILERS, os.cpu_count() or 1)), **os.environ}
        command = [sys.executable, "-m", "wattune.engines.ahead"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            told = [(spec.to_json(), asdict(ranks)) for spec, ranks in self._waiting]
            pipe.write(json.dumps(told).encode())
        self._waiting = []

    @property
    def pids(self) -> tuple[int, ...]:
        """The process and its children, which are on the worker's device; none once it has ended."""
        if self._process is None or self._process.poll() is not None:
            return ()
        pid = self._process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:  # it has ended meanwhile
            return ()
        return (pid, *map(int, children))

    def end(self) -> None:
        """Ends the process; what it was at is given up: the trials compile themselves."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def main() -> None:
    """Compiles the plans that standard input holds, some at a time. It ends with the thread that started it."""
    _end_with_parent(os.getppid())
    os.nice(_NICENESS)
    coming = json.load(sys.stdin.buffer)
    from wattune.engines.torch.ahead import compile_ahead  # loads what each of its children needs

    running, own = 0, os.getpid()
    for given, place in coming:
        if running == _AT_ONCE:
            os.wait()
            running -= 1
        running += 1
        if os.fork() == 0:
            _end_with_parent(own)
            _compile(TrialSpec.from_json(given), Ranks(**place), compile_ahead)
    for _ in range(running):
        os.wait()


def _compile(spec: TrialSpec, ranks: Ranks, compile_ahead: Callable[[TrialSpec, Ranks], None]) -> NoReturn:
    """Compiles one plan in a process of its own, and ends that."""
    try:
        compile_ahead(spec, ranks)
    except Exception:  # of any class: the trial compiles itself, and tells its own error
        _log.warning("the graphs of %s were not compiled ahead", spec.trial_id, exc_info=True)
    finally:
        os._exit(0)


def _end_with_parent(parent: int) -> None:
    """Has the kernel end this process with its parent; ends it now where that has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    main()

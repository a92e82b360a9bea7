"""A process beside a worker that compiles the graphs of plans that come, while the first ones start and run.

It takes processors that nothing else wants, and ends with its worker's process. Each plan that it is at holds a context
on the worker's device, 0.6 GB on an H200.
"""

import ctypes
import json
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Final, NoReturn

from wattune.plans.placement import Slot, place
from wattune.trial import TrialSpec
from wattune.workers.command.supervisor import PR_SET_PDEATHSIG
from wattune.workers.engine import Ranks

_log = logging.getLogger(__name__)

_NICENESS: Final = 19
_ENVIRONMENT: Final = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Each plan is compiled by one thread."""
_MOST_AT_ONCE: Final = 5
_PROCESSORS_EACH: Final = 4
"""Processors of a rank for each plan compiled beside it: a worker, its sampler and NCCL need some themselves."""

_started: list[subprocess.Popen[bytes]] = []
"""Held, since the process ends when its input does."""


def start(coming: Sequence[TrialSpec], slot: Slot) -> None:
    """Starts to compile plans for the rank on a slot while this process lives, unless its node has few processors."""
    each = len(os.sched_getaffinity(0)) // coming[0].cluster.devices_per_node
    if at_once := min(_MOST_AT_ONCE, each // _PROCESSORS_EACH):
        given = map(str, (at_once, slot.node, slot.device))
        command, environment = [sys.executable, "-m", "wattune.engines.ahead", *given], {**os.environ, **_ENVIRONMENT}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        process.stdin.write(json.dumps([spec.to_json() for spec in coming]).encode() + b"\n")
        process.stdin.flush()
        _started.append(process)


def pids() -> tuple[int, ...]:
    """Returns the processes that are on the worker's device, or may be soon."""
    found = []
    for process in _started:
        with suppress(OSError):  # it has ended
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            found += [process.pid, *map(int, children.split())]
    return tuple(found)


def hold(number: int) -> None:
    """Stops what compiles (SIGSTOP) while steps are measured, or lets it go on (SIGCONT)."""
    for pid in {*pids()} - {one.pid for one in _started}:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def end() -> None:
    """Ends it, for a trial that may need all of its device; what it has not compiled, trials compile themselves."""
    for process in _started:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def taken() -> tuple[float, int]:
    """Returns the processor seconds of plans that were compiled since the last call, and how many of these failed."""
    lines = [line.split() for process in _started if process.stdout is not None for line in process.stdout]
    return sum(float(cpu_s) for cpu_s, _ in lines), sum(failed != b"0" for _, failed in lines)


def main(at_once: int, node: int, device: int) -> None:
    """Compiles the plans in the first line of its input; writes processor seconds and status of each."""
    os.nice(_NICENESS)
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries may print
    waiting = json.loads(sys.stdin.buffer.readline())
    from wattune.engines.torch import ahead  # loads what each of its children needs

    running = 0
    while waiting or running:
        while waiting and running < at_once:
            given = waiting.pop(0)
            running += 1
            if os.fork() == 0:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                _compile(TrialSpec.from_json(given), Slot(node=node, device=device), ahead)
        if select.select([0], [], [], 0.1)[0]:  # told to end, or the worker has ended
            os._exit(0)  # children end with this process
        while running and (ended := os.wait4(-1, os.WNOHANG))[0]:
            running -= 1
            os.write(answers, f"{ended[2].ru_utime + ended[2].ru_stime:.2f} {ended[1]}\n".encode())


def _compile(spec: TrialSpec, slot: Slot, ahead: ModuleType) -> NoReturn:
    """Compiles one plan in a process of its own, and ends that."""
    code = 1
    try:
        rank, world_size = place(spec.plan, spec.cluster).index(slot), spec.cluster.world_size
        ranks = Ranks(rank=rank, world_size=world_size, local_rank=slot.device, device=f"cuda:{slot.device}")
        ahead.compile_ahead(spec, ranks)
        code = 0
    except Exception:  # of any class: the trial compiles itself, and tells its own error
        _log.warning("the graphs of %s were not compiled ahead", spec.trial_id, exc_info=True)
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""A process for each rank that compiles the graphs of plans that come, while workers start and the first plans run.

A study that starts its cluster here begins it before that, and its workers take it over; else each worker starts one.
It takes processors that nothing else wants, and ends with the process that began it. Each part of a plan that it is at
holds a context on the rank's device, 0.6 GB on an H200.
"""

import ctypes
import json
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from types import FrameType, ModuleType
from typing import IO, Any, Final, NoReturn

import psutil

from wattune.catalog.hardware import ClusterSpec
from wattune.plans.placement import Slot, place
from wattune.trial import TrialSpec
from wattune.workers.command.supervisor import PR_SET_PDEATHSIG
from wattune.workers.engine import Ranks
from wattune.workers.environment import prepare_environment

_log = logging.getLogger(__name__)

_ENVIRONMENT: Final = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}  # one thread a part
_PARTS: Final = ("layers", "head")
"""Of a plan, each in a process of its own: the first plan's trial begins its first step sooner than both were done."""
_MOST_AT_ONCE: Final = 5
_PROCESSORS_EACH: Final = 3  # of a rank for each part compiled beside it, and one for its worker
_HOLD: Final = signal.SIGURG  # stops what compiles, until SIGCONT; a process that does not hear it yet goes on

EARLY: Final = "WATTUNE_COMPILERS"
"""Names, to workers of a cluster here, the folder where each device's process that the study began answers."""

_beside: list[tuple[psutil.Process, IO[bytes], object]] = []
"""The processes for this worker's rank, their answers, and what holds the input of its own: they end when that does."""


def _begin(coming: Sequence[TrialSpec], slot: Slot, storage: Path | str = "", **streams: Any) -> list[Popen[bytes]]:
    each = len(os.sched_getaffinity(0)) // coming[0].cluster.devices_per_node if coming else 0
    if not (at_once := min(_MOST_AT_ONCE, (each - 1) // _PROCESSORS_EACH)):
        return []
    command = [sys.executable, "-m", __name__, *map(str, (at_once, slot.node, slot.device, storage))]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}  # as workers on our own cluster
    process = Popen(command, stdin=PIPE, env=environment, **streams)
    assert process.stdin is not None
    process.stdin.write(json.dumps([spec.to_json() for spec in coming]).encode() + b"\n")
    process.stdin.flush()
    return [process]


@contextmanager
def early(coming: Sequence[TrialSpec], storage: Path, is_here: Callable[[ClusterSpec], bool]) -> Iterator[None]:
    """Compiles plans until it is left, where this machine has their devices; workers of an own cluster take over."""

    def begin() -> list[Popen[bytes]]:  # in a thread, since drivers take seconds to answer
        started: list[Popen[bytes]] = []
        try:
            for device in range(coming[0].cluster.devices_per_node if is_here(coming[0].cluster) else 0):
                with open(f"{folder}/{device}", "wb") as answers, open(f"{folder}/said", "ab") as said:
                    started += _begin(coming, Slot(node=0, device=device), storage, stdout=answers, stderr=said)
                for one in started[-1:]:
                    Path(folder, f"{device}.pid").write_text(f"{one.pid}")
        except OSError:  # such as a full disk, or too many processes: it must not end the study
            _log.warning("coming plans are not compiled before workers start", exc_info=True)
        return started

    with TemporaryDirectory(prefix="wattune-ahead-") as folder, ThreadPoolExecutor(1) as side:
        os.environ[EARLY], begun = folder, side.submit(begin)
        try:
            yield
        finally:
            del os.environ[EARLY]
            for process in begun.result():
                process.kill()
                process.communicate()
            if begun.result() and (said := Path(folder, "said").read_text(errors="replace")):
                _log.info("compilers of coming plans said: %s", said)


def start(coming: Sequence[TrialSpec], slot: Slot) -> None:
    """Takes over what compiles plans for the rank on a slot, or starts it for as long as this process lives."""
    begun = Path(os.environ.get(EARLY, ""), f"{slot.device}.pid")
    if begun.exists():
        _beside.append((psutil.Process(int(begun.read_text())), begun.with_suffix("").open("rb"), None))
        return
    for process in _begin(coming, slot, stdout=PIPE):
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        _beside.append((psutil.Process(process.pid), process.stdout, process))


def pids() -> tuple[int, ...]:
    """Returns the processes that are on the worker's device, or may be soon."""
    found = []
    for process, *_ in _beside:
        with suppress(OSError):  # it has ended
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            found += [process.pid, *map(int, children.split())]
    return tuple(found)


def hold(number: int = _HOLD) -> None:
    """Stops what compiles while steps are measured, or lets it go on (SIGCONT)."""
    for process, *_ in _beside:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def end() -> None:
    """Ends it, for a trial that may need all of its device; what it has not compiled, trials compile themselves."""
    hold(signal.SIGKILL)  # its children end with it


def taken() -> tuple[float, int]:
    """Returns the processor seconds of parts that were compiled since the last call, and how many of these failed."""
    lines = [line.split() for _, answers, _ in _beside for line in answers]
    return sum(float(cpu_s) for cpu_s, _ in lines), sum(failed != b"0" for _, failed in lines)


def main(at_once: int, node: int, device: int, storage: str) -> None:
    """Compiles the plans in the first line of its input; writes processor seconds and status of each part."""
    own, held, stopped, children = os.getpid(), False, False, set[int]()

    def hear(number: int, _frame: FrameType | None) -> None:
        nonlocal held
        held = number == _HOLD

    for number in (_HOLD, signal.SIGCONT):
        signal.signal(number, hear)
    os.nice(19)
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries may print
    plans = [TrialSpec.from_json(one) for one in json.loads(sys.stdin.buffer.readline())]
    waiting = [(plan, part) for plan in plans for part in _PARTS]
    prepare_environment(plans[0].cluster.device, Path(storage) if storage else None)
    from wattune.engines.torch import ahead  # loads what each of its children needs

    while waiting or children:
        while waiting and len(children) < at_once and not held:
            if (child := os.fork()) == 0:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                if os.getppid() != own:  # it was killed meanwhile
                    os._exit(1)
                _compile(*waiting[0], Slot(node=node, device=device), ahead)
            children.add(child)
            del waiting[0]
        if held != stopped:  # one that was forked just as a window opened is stopped too
            stopped = held
            for child in children:
                os.kill(child, signal.SIGSTOP if stopped else signal.SIGCONT)
        if select.select([0], [], [], 0.1)[0]:  # told to end, or who began it has ended
            os._exit(0)  # children end with this process
        while children and (ended := os.wait4(-1, os.WNOHANG))[0]:
            children.remove(ended[0])
            os.write(answers, f"{ended[2].ru_utime + ended[2].ru_stime:.2f} {ended[1]}\n".encode())


def _compile(spec: TrialSpec, part: str, slot: Slot, ahead: ModuleType) -> NoReturn:
    """Compiles a part of one plan in a process of its own, and ends that."""
    code = 1
    try:
        rank, world_size = place(spec.plan, spec.cluster).index(slot), spec.cluster.world_size
        ranks = Ranks(rank=rank, world_size=world_size, local_rank=slot.device, device=f"cuda:{slot.device}")
        ahead.compile_ahead(spec, ranks, part)
        code = 0
    except Exception:  # of any class: the trial compiles itself, and tells its own error
        _log.warning("the %s of %s were not compiled ahead", part, spec.trial_id, exc_info=True)
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

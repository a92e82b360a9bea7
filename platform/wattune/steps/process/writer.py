"""The file in which a process tells its steps: one line a step, each with a checksum, written within 50 ms.

A file has a header, then steps and events, a line each. Every line ends in the checksum of what stands before it
(`line_of`). A step is `<index> <start_mono_ns> <end_mono_ns> <tokens or ->`. The header and events are JSON objects.

Nothing here raises into the program that is measured: where a file cannot be written, its steps are lost and the
program goes on.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import zlib
from _thread import allocate_lock

TYPE_CHECKING = False  # what type checkers take for true; `typing` loads longer than all of this
if TYPE_CHECKING:
    from typing import Any, Final

FORMAT_VERSION: Final = 1
"""Version of the files; a reader refuses others."""

FOLDER_VARIABLE: Final = "WATTUNE_STEPS"
"""Variable of the environment that names the folder of the files; without it nothing is written."""

SUFFIX: Final = ".steps"

EVENTS: Final = "process"
"""Source in the name of the file for what is no step: errors, and hooks that failed."""

FLUSH_EVERY_NS: Final = 50_000_000
"""Least time between two writes. A write takes some 65 us right after a step, when caches hold the step's data, so
writing costs 0.13 % at most, however short steps are (an H200's host, `benchmarks/results/step_hooks.md`). A process
that is killed loses the steps of that time."""

PEAK_EVERY_NS: Final = 1_000_000_000
"""Least time between two events with the peak memory: asking torch for it takes some 100 us."""

MOST_FILES: Final = 100
"""Most files of one process and source."""

LONGEST_TEXT: Final = 2000
"""Characters of a message that are kept."""

_RANK: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_LOCAL_RANK: Final = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_NODE_RANK: Final = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID", "OMPI_COMM_WORLD_NODE_RANK")
_WORLD_SIZE: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def line_of(body: str) -> bytes:
    """Returns a line of a step file: the body, its CRC-32 in eight hexadecimal digits, and the end of the line."""
    data = body.encode("utf-8", "backslashreplace")
    return b"%s %08x\n" % (data, zlib.crc32(data))


class StepWriter:
    """Writes one process's steps of one source. Threads may share it; a forked child begins a file of its own.

    `step` is what a training step pays for. It appends to a list, which needs no lock, and looks at one number. Where
    real work lies between two steps, the caches hold none of this: what takes half a microsecond in a loop then takes
    several (`benchmarks/results/step_hooks.md`), so few objects are touched.
    """

    __slots__ = (
        "_descriptor",
        "_failed",
        "_folder",
        "_index",
        "_lock",
        "_next_peak_ns",
        "_next_write_ns",
        "_pending",
        "source",
    )

    def __init__(self, source: str, folder: str | None = None) -> None:
        """Opens nothing yet: ranks and devices are known at the first step only.

        The file's name has its source. The folder is that of `FOLDER_VARIABLE` where none is given.
        """
        self.source = source
        self._folder = folder
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        atexit.register(self.flush)

    def _begin(self) -> None:
        self._lock = allocate_lock()
        self._descriptor = -1
        self._pending: list[tuple[int, int, int | None]] = []
        self._index = 0
        self._next_write_ns = 0
        self._next_peak_ns = 0
        self._failed = False

    def step(self, start_mono_ns: int, end_mono_ns: int, tokens: int | None = None) -> None:
        """Takes the next step with this rank's tokens, and writes what waits where the last write is old enough."""
        self._pending.append((start_mono_ns, end_mono_ns, tokens))
        if end_mono_ns >= self._next_write_ns:
            self._write_pending(end_mono_ns)

    def _write_pending(self, now_ns: int) -> None:
        # Held by another thread, which writes, or by this one, into whose write a signal's handler came.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._next_write_ns = now_ns + FLUSH_EVERY_NS
            self._flush()
            if now_ns >= self._next_peak_ns:
                self._next_peak_ns = now_ns + PEAK_EVERY_NS
                self._write(line_of(_json({"event": "peak", **peak_bytes()})))
        finally:
            self._lock.release()

    def flush(self) -> None:
        """Writes the steps that are not written yet."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        count = len(self._pending)  # other threads may append meanwhile
        taken = self._pending[:count]
        del self._pending[:count]
        if taken and not self._failed:
            self._write(b"".join(_step_line(self._index + at, each) for at, each in enumerate(taken)))
            self._index += count

    def event(self, name: str, **facts: Any) -> None:
        """Writes an event: plain data that is no step."""
        if self._failed:
            return
        with self._lock:
            self._flush()
            self._write(line_of(_json({"event": name, "mono_ns": time.monotonic_ns(), **facts})))

    def _write(self, data: bytes) -> None:
        try:
            if self._descriptor < 0:
                self._open()
            if not self._failed:
                os.write(self._descriptor, data)
        except Exception:  # a full disk, a folder that is gone: never the program's concern
            self._failed = True

    def _open(self) -> None:
        folder = os.environ.get(FOLDER_VARIABLE) if self._folder is None else self._folder  # each fork has its own
        self._failed = not folder
        if self._failed:
            return
        header = header_of(self.source)
        path = f"{folder}/{header['rank']}-{os.getpid()}-{self.source}"
        # A process that replaced itself by another program has its predecessor's id.
        for name in (path, *(f"{path}.{again}" for again in range(1, MOST_FILES))):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            try:
                self._descriptor = os.open(name + SUFFIX, flags, 0o600)
            except FileExistsError:
                continue
            os.write(self._descriptor, line_of(_json(header)))
            return
        self._failed = True


def _step_line(index: int, step: tuple[int, int, int | None]) -> bytes:
    """Returns the line of a step; without its tokens where they are no number."""
    start_mono_ns, end_mono_ns, tokens = step
    body = b"%d %d %d -" % (index, start_mono_ns, end_mono_ns)
    if tokens is not None:
        try:
            body = b"%d %d %d %d" % (index, start_mono_ns, end_mono_ns, tokens)
        except Exception:  # of any class: the program gave them
            return b"%s %08x\n" % (body, zlib.crc32(body))
    return b"%s %08x\n" % (body, zlib.crc32(body))


_loaded_mono_ns = 0
"""Time at which the latest library that trains was loaded; 0 before."""


def note_loaded() -> None:
    """Notes that a library that trains is loaded now."""
    global _loaded_mono_ns
    _loaded_mono_ns = time.monotonic_ns()


def header_of(source: str) -> dict[str, Any]:
    """Returns the header of this process's file: its place among the ranks, and its device where CUDA is in use.

    The rank is that of `torch.distributed` where a process group stands, else that of the launcher's variables, else 0.
    """
    header: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "source": source,
        "pid": os.getpid(),
        "rank": _first(_RANK, 0),
        "local_rank": _first(_LOCAL_RANK, None),
        "node_rank": _first(_NODE_RANK, None),
        "world_size": _first(_WORLD_SIZE, None),
        "program": sys.argv[0].rpartition("/")[2] if getattr(sys, "argv", None) else "",
        "mono_ns": time.monotonic_ns(),
        "loaded_mono_ns": getattr(sys.modules.get("_wattune_steps.writer"), "_loaded_mono_ns", _loaded_mono_ns) or None,
    }
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            header["rank"], header["world_size"] = distributed.get_rank(), distributed.get_world_size()
    except Exception as error:
        header["problem"] = f"torch.distributed does not tell the rank: {error}"[:LONGEST_TEXT]
    return {**header, **_device()}


def _first(names: tuple[str, ...], otherwise: int | None) -> int | None:
    """Returns the first of these variables that is a number."""
    for name in names:
        text = os.environ.get(name, "")
        if text.isascii() and text.isdigit():
            return int(text)
    return otherwise


def _cuda() -> Any:
    """Returns `torch.cuda` where this process uses it already; None else, since asking must not start CUDA."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _device() -> dict[str, Any]:
    """Returns index and UUID of this process's device; nothing where there is none."""
    try:
        cuda = _cuda()
        if cuda is None:
            return {}
        index = cuda.current_device()
        uuid = getattr(cuda.get_device_properties(index), "uuid", None)
        return {"device_index": index, **({} if uuid is None else {"device_uuid": str(uuid)})}
    except Exception as error:
        return {"device_problem": str(error)[:LONGEST_TEXT]}


def peak_bytes() -> dict[str, int]:
    """Returns the highest memory so far: torch's on this process's device, and the resident set of the process."""
    found = {}
    try:
        # Not getrusage: what it tells begins with the peak of the program that started this one.
        with open("/proc/self/status", "rb") as status:
            lines = [line for line in status if line.startswith(b"VmHWM:")]
        found["host_bytes"] = int(lines[0].split()[1]) * 1024  # Linux counts KiB
        cuda = _cuda()
        if cuda is not None:
            found["device_bytes"] = int(cuda.max_memory_allocated())
            found["device_reserved_bytes"] = int(cuda.max_memory_reserved())
    except Exception:  # what is not known is absent
        return found
    return found


def _json(facts: dict[str, Any]) -> str:
    import json  # not at the start of every Python program

    return json.dumps(facts)

"""The errors that mean that memory ran out, and what they say of it."""

import re
from typing import Final

import torch

from wattune.run import RunStatus
from wattune.workers.command.causes import kind_of
from wattune.workers.device import device_memory
from wattune.workers.engine import Ranks
from wattune.workers.outcome import OutOfMemory
from wattune.workers.phases import failed_phase

_REQUESTED: Final = re.compile(r"tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNIT_BYTES: Final = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def out_of_memory_of(error: BaseException, ranks: Ranks, *, outside: str = "build") -> OutOfMemory:
    """Reads an error for which `is_out_of_memory` holds; `outside` is where it was raised if in no phase."""
    found = _REQUESTED.search(str(error))
    return OutOfMemory(
        rank=ranks.rank,
        phase=failed_phase(error) or outside,
        message=first_line(error),
        requested_bytes=found and round(float(found[1]) * _UNIT_BYTES[found[2]]),
        **device_memory(ranks.device),
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True where an error means that host or device memory ran out.

    PyTorch has a class of its own only for what its device allocator is asked for. Its CPU allocator, the driver, and
    the libraries that take memory beside it (NCCL and RCCL, cuBLAS and hipBLAS, cuDNN and MIOpen) end up in a
    RuntimeError, the operating system in an OSError: their words are those by which a command's end is judged.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and kind_of(str(error)).status is RunStatus.OUT_OF_MEMORY


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""Memory that a finished trial left in its worker: the next trial must find as much as in a new process."""

import contextlib
import ctypes
import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

DEVICE_LEFT_BYTES: Final = 64 * 2**20
"""Most that may stay allocated on a GPU: only what a library keeps for itself does."""
DEVICE_RESERVED_BYTES: Final = 256 * 2**20
"""Most that may stay reserved on a GPU: the blocks around what may stay allocated."""
TENSOR_GROWTH_BYTES: Final = 64 * 2**20
"""Most that tensors on the host may hold beyond their memory before the worker's first trial."""
HOST_GROWTH_BYTES: Final = 2**30
"""Most that the process may have grown since its first trial: compilers cache, heaps fragment."""
FIRST_GROWTH_BYTES: Final = 4 * 2**30
"""Most that it may grow in its first trial, when CUDA, NCCL, the engine's libraries and the compiler are loaded: 1.2 to
1.5 GiB on two H200s (`benchmarks/results/trial_overhead.md`), and room for an engine that needs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """Memory and groups one worker holds between trials."""

    device_allocated_bytes: int = 0
    """Held by tensors on the GPU; 0 without one."""
    device_reserved_bytes: int = 0
    """Held by torch's allocator on the GPU; 0 without one."""
    tensor_bytes: int = 0
    """Held by tensors on the host."""
    host_bytes: int = 0
    """Resident memory of the process without a file behind it; pages of libraries are not a leak."""
    num_groups: int = 0
    """Process groups the engine did not end; they are ended now."""


def clean_up(device: str) -> None:
    """Frees all memory that can be freed without knowing its holder. Compiled code stays, for the next trial."""
    gc.collect()
    if torch.device(device).type == "cuda":
        with contextlib.suppress(AttributeError):  # not public; without it some workspaces count as left
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def leftovers(device: str, num_groups: int) -> Leftovers:
    """Measures what is held now; raises RuntimeError where the device no longer answers."""
    allocated = reserved = 0
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)  # where an earlier kernel failed, this says so
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    resident, shared = (int(pages) for pages in Path("/proc/self/statm").read_text().split()[1:3])
    return Leftovers(
        device_allocated_bytes=allocated,
        device_reserved_bytes=reserved,
        tensor_bytes=_tensor_bytes(),
        host_bytes=(resident - shared) * os.sysconf("SC_PAGESIZE"),
        num_groups=num_groups,
    )


def _tensor_bytes() -> int:
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        # Other kinds hold no memory of their own: those of compiled graphs only look like it, sharded ones have one.
        if type(found) in (torch.Tensor, torch.nn.Parameter) and found.device.type == "cpu":
            with contextlib.suppress(Exception):  # sparse ones have no storage
                storage = found.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def leak(before: Leftovers, after: Leftovers, *, is_first: bool = False) -> str | None:
    """Returns the reason a worker must not go on, None where its memory came back.

    `before` was held after its first trial; of tensors, before it. With `is_first` it had run none, so that it is what
    a process holds that has done nothing yet.
    """
    host_bound = FIRST_GROWTH_BYTES if is_first else HOST_GROWTH_BYTES
    bounds = (
        ("device memory allocated", after.device_allocated_bytes, DEVICE_LEFT_BYTES),
        ("device memory reserved", after.device_reserved_bytes, DEVICE_RESERVED_BYTES),
        ("host tensors more than before", after.tensor_bytes - before.tensor_bytes, TENSOR_GROWTH_BYTES),
        ("resident memory more than before", after.host_bytes - before.host_bytes, host_bound),
    )
    found = [
        f"{value / 2**20:.0f} MiB of {what} (at most {bound / 2**20:.0f})"
        for what, value, bound in bounds
        if value > bound
    ]
    return f"memory did not come back: {', '.join(found)}" if found else None

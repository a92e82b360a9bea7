"""Memory that a finished trial left in its worker: the next trial must find as much as in a new process."""

import contextlib
import ctypes
import gc
import os
from collections.abc import Mapping
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


def leftovers(device: str) -> dict[str, int]:
    """Measures the bytes that a worker holds between trials, by kind; raises RuntimeError where the device is lost.

    `allocated` by tensors on the GPU and `reserved` by torch's allocator there are 0 without one. `tensors` are on the
    host, `resident` is memory of the process without a file behind it: pages of libraries are not a leak.
    """
    allocated = reserved = 0
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)  # where an earlier kernel failed, this says so
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    resident, shared = (int(pages) for pages in Path("/proc/self/statm").read_text().split()[1:3])
    own_bytes = (resident - shared) * os.sysconf("SC_PAGESIZE")
    return {"allocated": allocated, "reserved": reserved, "tensors": _tensor_bytes(), "resident": own_bytes}


def _tensor_bytes() -> int:
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        # Other kinds hold no memory of their own: those of compiled graphs only look like it, sharded ones have one.
        if type(found) in (torch.Tensor, torch.nn.Parameter) and found.device.type == "cpu":
            with contextlib.suppress(Exception):  # sparse ones have no storage
                storage = found.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def leak(before: Mapping[str, int], after: Mapping[str, int], *, is_first: bool = False) -> str | None:
    """Returns the reason a worker must not go on, by `leftovers`, None where its memory came back.

    `before` was held after its first trial; of tensors, before it. With `is_first` it had run none, so that it is what
    a process holds that has done nothing yet.
    """
    host_bound = FIRST_GROWTH_BYTES if is_first else HOST_GROWTH_BYTES
    bounds = (
        ("device memory allocated", after["allocated"], DEVICE_LEFT_BYTES),
        ("device memory reserved", after["reserved"], DEVICE_RESERVED_BYTES),
        ("host tensors more than before", after["tensors"] - before["tensors"], TENSOR_GROWTH_BYTES),
        ("resident memory more than before", after["resident"] - before["resident"], host_bound),
    )
    found = [
        f"{value / 2**20:.0f} MiB of {what} (at most {bound / 2**20:.0f})"
        for what, value, bound in bounds
        if value > bound
    ]
    return f"memory did not come back: {', '.join(found)}" if found else None

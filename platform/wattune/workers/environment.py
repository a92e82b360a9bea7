"""Variables that a worker's process gets before it loads torch: what its user, or the node, has set stays as it is."""

import logging
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from wattune.catalog.hardware import device as device_of
from wattune.private_folder import NotPrivateError, own_folder, temporary_folder

_log = logging.getLogger(__name__)

ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names under which torch reads the settings of its allocator. The first is that of torch 2.9 and later."""

_EXPANDABLE: Final = "expandable_segments:True"
"""Segments that grow: freed pieces of other sizes are used again. Without it a trial ran out of memory while 14.7 GiB
were reserved and free, and 3.0 GiB were asked for (two H100, `pp2 mbs4 recompute=full`)."""

_NCCL_ERRORS: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""wattune aborts communicators itself, when the lane orders it, and torch asks for 0 then (`_abort_process_group`). The
worker's watchdog ends a hang: it knows how long steps take."""

_INDUCTOR: Final = "TORCHINDUCTOR_CACHE_DIR"
_TRITON: Final = "TRITON_CACHE_DIR"

KERNELS: Final = "kernels"
"""Beginning of the folder's name, in the storage, that keeps compiled kernels."""


def prepare_environment(device: str, storage: Path | None, *, runs_program: bool = False) -> None:
    """Sets what is not set yet in this process's environment. On processors nothing is compiled: nothing is set.

    Compiled kernels are kept in the storage of the studies, so that they outlive a container; where this node does not
    have it, in the machine's temporary files. Where a user's own program runs, its allocator is the program's affair.
    """
    vendor = device_of(device).vendor
    if vendor == "cpu":
        return
    if not runs_program:
        os.environ[_NCCL_ERRORS] = "0"  # here, since Ray starts new processes for what it sets itself
    if vendor == "nvidia" and not runs_program and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = _EXPANDABLE
    if _INDUCTOR not in os.environ:
        folder = kernels_folder(device, storage)
        os.environ[_INDUCTOR] = str(folder)
        os.environ.setdefault(_TRITON, str(folder / "triton"))


def kernels_folder(device: str, storage: Path | None) -> Path:
    """Returns the folder of compiled kernels of a device and this torch, which only this user writes to.

    Models share it: torch and Triton name what they keep by its content. Who loads it runs it, so a folder of another
    user's is not used.
    """
    try:
        build = f"torch{version('torch')}"
    except PackageNotFoundError:
        build = "torch"
    try:
        if storage is not None and storage.is_dir():
            top = own_folder(storage / f"{KERNELS}-{os.getuid()}")
        else:
            top = temporary_folder(KERNELS)
    except (OSError, NotPrivateError) as error:  # a storage that is read only, or somebody else's
        top = temporary_folder(KERNELS)
        _log.warning("compiled kernels are kept in %s: %s", top, error)
    folder = top / f"{device}-{build}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder

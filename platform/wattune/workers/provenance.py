"""The libraries, settings and kernels that a rank really runs with, as its own process finds them."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from wattune.version import __version__
from wattune.workers.environment import ALLOCATOR

LIBRARIES: Final = (
    "ray",
    "numpy",
    "triton",
    "megatron-core",
    "transformer-engine",
    "deepspeed",
    "flash-attn",
    "torchao",
)
"""Packages beside torch whose versions a trial's figures depend on."""

SETTINGS: Final = (
    "NCCL_",
    "RCCL_",
    "TORCH_NCCL_",
    "NVTE_",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVIDIA_TF32_OVERRIDE",
    *ALLOCATOR,
)
"""Beginnings of the names of variables that communication libraries, kernels and torch's allocator read."""

_DRIVERS: Final = ("sys/module/nvidia/version", "sys/module/amdgpu/version")
"""Files with the version of the device's kernel driver."""

ABSENT: Final = "absent"
"""Value of a rank that lacks what others have."""


def provenance(device: str) -> dict[str, str]:
    """Returns what this rank runs with, as tags of a result: `version.NAME`, `env.NAME` and `kernels.NAME`."""
    import torch  # not above: other processes read what a rank told, and need no torch

    on_gpu = torch.device(device).type == "cuda"
    settings = {f"env.{name}": value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}
    return {**_versions(on_gpu), **settings, **_kernels(on_gpu)}


@cache
def _versions(on_gpu: bool) -> dict[str, str]:
    import torch

    found = {"wattune": __version__, "torch": str(torch.__version__)}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if on_gpu:
        hip, cuda = torch.version.hip, torch.version.cuda
        found |= {name: text for name, text in (("hip", hip), ("cuda", None if hip else cuda)) if text}
        with suppress(AttributeError, RuntimeError):  # a torch that was built without it
            found["rccl" if hip else "nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        try:
            cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # another one is loaded beside torch's; what was measured is told with that
            cudnn = str(error).partition(". ")[0]
        if cudnn:
            found["miopen" if hip else "cudnn"] = str(cudnn)
        if driver := driver_version():
            found["driver"] = driver
    return {f"version.{name}": text for name, text in found.items()}


def driver_version(root: Path = Path("/")) -> str:
    """Returns the version of the device's kernel driver; empty where its module does not say it."""
    paths = (root / name for name in _DRIVERS)
    return next((path.read_text().strip() for path in paths if path.is_file()), "")


def _kernels(on_gpu: bool) -> dict[str, str]:
    """Choices that torch makes between kernels. Engines say their own (`Engine.facts`)."""
    import torch

    found = {"kernels.matmul_precision": torch.get_float32_matmul_precision()}
    if on_gpu:
        kinds = ("flash", "mem_efficient", "cudnn", "math")
        allowed = (kind for kind in kinds if getattr(torch.backends.cuda, f"{kind}_sdp_enabled", bool)())
        found["kernels.attention_allowed"] = ",".join(allowed)
        found["kernels.deterministic"] = str(torch.are_deterministic_algorithms_enabled()).lower()
    return found


def agreed(found: Mapping[int, Mapping[str, str]]) -> dict[str, str]:
    """Returns one value for each name; where ranks differ, each with its ranks: `rank0-2: 2.13.0; rank3: 2.12.1`."""
    merged = {}
    for name in sorted({name for own in found.values() for name in own}):
        ranks: dict[str, list[int]] = {}
        for rank in sorted(found):
            ranks.setdefault(found[rank].get(name, ABSENT), []).append(rank)
        parts = [f"rank{_listed(those)}: {value}" for value, those in ranks.items()]
        merged[name] = next(iter(ranks)) if len(ranks) == 1 else "; ".join(parts)
    return merged


def _listed(ranks: Sequence[int]) -> str:
    """Lists numbers in ascending order, with runs as their ends: `0-3,5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ",".join("-".join(map(str, run)) for run in runs)

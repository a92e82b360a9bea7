"""The device a rank drives, and the memory torch holds of it."""

import torch

from wattune.errors import EngineError
from wattune.plans.rules import violations
from wattune.trial import TrialSpec
from wattune.workers.engine import Ranks


def claim(spec: TrialSpec, ranks: Ranks) -> torch.device:
    """Makes a rank's device torch's current one, after checking that the specification can run there.

    Raises `EngineError`: the specification breaks a rule, or the ranks are not those of its cluster.
    """
    for violation in violations(spec):
        raise EngineError(f"{violation.rule}: {violation.reason}")
    if ranks.world_size != spec.cluster.world_size:
        raise EngineError(f"{spec.cluster.label} has {spec.cluster.world_size} ranks; got {ranks.world_size}")
    device = torch.device(ranks.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def device_memory(device: str) -> dict[str, int]:
    """Returns the memory torch holds of a device now, by the names of `OutOfMemory`.

    Nothing for a processor, whose allocator keeps no count.
    """
    if torch.device(device).type != "cuda":
        return {}
    return {
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(device),
        "total_bytes": torch.cuda.get_device_properties(device).total_memory,
    }


def allocator_retries(device: str) -> int:
    """Returns how often torch's allocator has given a device's memory back and asked anew; 0 for a processor."""
    return 0 if torch.device(device).type != "cuda" else int(torch.cuda.memory_stats(device)["num_alloc_retries"])


def device_uuid(device: str) -> str | None:
    """Returns the identity of a torch device as NVML writes it, such as `GPU-163b45e6-75c7-...`; None for a processor.

    `cuda:0` is whatever `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` make the first one; sensors number devices by
    bus address and see all of them. Only the identity is the same for both.
    """
    if torch.device(device).type != "cuda":
        return None
    return f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"

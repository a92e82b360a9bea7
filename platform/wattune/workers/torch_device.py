"""Which device a rank really drives."""

import torch


def device_uuid(device: str) -> str | None:
    """The identity of a torch device, as NVML writes it.

    `cuda:0` is whatever `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` make the first one; sensors number devices by
    bus address and see all of them. Only the identity is the same for both.

    Args:
        device: A torch device, such as `cuda:0` or `cpu`.

    Returns:
        Text such as `GPU-163b45e6-75c7-fc2e-765c-f19788620a68`; None for a processor.
    """
    if torch.device(device).type != "cuda":
        return None
    return f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"

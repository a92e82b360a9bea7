"""The norm of the gradient over all parameters, where DeepSpeed's own is another one.

Without ZeRO DeepSpeed averages the norms of data-parallel ranks, which hold different experts
(`runtime/utils.py`, `clip_grad_norm_`), and its bf16 optimizer leaves experts out
(`runtime/fp16/unfused_optimizer.py`). Clipping by such a norm would be another training run.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wattune.engines.model.hyperparameters import CLIP_NORM
from wattune.trial import TrialSpec


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], spec: TrialSpec) -> Tensor:
    """Scales this rank's gradients, each reduced over all that hold it, down to `CLIP_NORM` if they are above it.

    Returns the 2-norm over all parameters before, on the device, the same on every rank.
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    by_replicas: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in held:
        assert parameter.grad is not None
        by_replicas[_replicas(parameter, spec)].append(parameter.grad.float())
    square = torch.stack([nn.utils.get_total_norm(grads) ** 2 / count for count, grads in by_replicas.items()]).sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(held, CLIP_NORM, norm)
    return norm


def _replicas(parameter: nn.Parameter, spec: TrialSpec) -> int:
    """Ranks that hold the same piece of a parameter."""
    plan, world_size = spec.plan, spec.cluster.world_size
    stage = world_size // plan.pp
    if not getattr(parameter, "allreduce", True):  # DeepSpeed's mark of an expert
        return stage // plan.ep
    if getattr(parameter, "tensor_model_parallel", False):
        return stage // plan.tp
    return stage * (2 if getattr(parameter, "wattune_tied", False) else 1)

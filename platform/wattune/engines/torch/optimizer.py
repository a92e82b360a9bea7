"""AdamW over the shards a rank holds, with the true global gradient norm and clipping."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wattune.engines.model.hyperparameters import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY


@dataclass(frozen=True, slots=True)
class _Shard:
    """A parameter and its piece on this rank, which share memory."""

    whole: DTensor
    piece: nn.Parameter
    replicas: int
    """Ranks that hold this same piece."""
    is_summed: bool
    """Tells that each tensor parallel rank has an addend of its gradient."""


class ShardedAdamW:
    """AdamW works element by element, so each rank updates its pieces as plain tensors, fused into few kernels."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        tied: nn.Parameter | None = None,
        *,
        whole: Iterable[nn.Parameter] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Takes the sharded parameters of all model chunks of one rank; those that are trained are DTensors.

        `tied` is the one of them that another pipeline stage holds too. Those that are `whole` are held by every rank
        of the tensor parallel `group`, with an addend of their gradient.
        """
        self._shards, self._group, summed = [], group, set(whole)
        for each in parameters:
            if not each.requires_grad:
                continue
            assert isinstance(each, DTensor)
            replicas = (2 if each is tied else 1) * (dist.get_world_size(group) if each in summed else 1)
            for size, placement in zip(each.device_mesh.shape, each.placements, strict=True):
                replicas *= size if placement.is_replicate() else 1
            piece = nn.Parameter(each.to_local().detach())
            if piece.numel() > 0:  # a dimension may be shorter than the ranks that share it
                self._shards.append(_Shard(each, piece, replicas, each in summed))
        self._adamw = None
        if self._shards:
            self._adamw = torch.optim.AdamW(
                [shard.piece for shard in self._shards],
                lr=LEARNING_RATE,
                betas=BETAS,
                weight_decay=WEIGHT_DECAY,
                fused=True,
            )

    @torch.no_grad()
    def reduce(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Takes over the reduced gradients, and sums what each rank knows over all ranks, in one message.

        Before that, tensor parallel ranks sum the gradients of what each of them holds whole, in one message too.

        `loss` is this rank's addend, an fp32 scalar. Returns the loss and the 2-norm of the gradient over all
        parameters, on the device, the same on every rank.
        """
        for shard in self._shards:
            grad = shard.whole.grad
            assert isinstance(grad, DTensor), "gradients are reduced before the optimizer"
            shard.piece.grad = grad.to_local()
        self._add_addends([shard.piece for shard in self._shards if shard.is_summed])
        by_replicas: dict[int, list[Tensor]] = defaultdict(list)
        for shard in self._shards:
            assert shard.piece.grad is not None
            by_replicas[shard.replicas].append(shard.piece.grad)
        squares = [nn.utils.get_total_norm(grads) ** 2 / count for count, grads in by_replicas.items()]
        sums = torch.stack([loss, torch.stack(squares).sum() if squares else torch.zeros_like(loss)])
        dist.all_reduce(sums)
        return sums[0], sums[1].sqrt()

    @torch.no_grad()
    def step(self, grad_norm: Tensor) -> None:
        """Clips, updates and drops the gradients; the host does not wait for the norm."""
        if self._adamw is None:
            return
        nn.utils.clip_grads_with_norm_([shard.piece for shard in self._shards], CLIP_NORM, grad_norm)
        self._adamw.step()
        for shard in self._shards:
            shard.whole.grad = shard.piece.grad = None

    def _add_addends(self, pieces: list[nn.Parameter]) -> None:
        """Sums gradients over the tensor parallel ranks, which have the same pieces in the same order."""
        addends = [piece.grad.flatten() for piece in pieces if piece.grad is not None]
        if not addends:
            return
        sums = torch.cat(addends)
        dist.all_reduce(sums, group=self._group)
        for piece, own in zip(pieces, torch.split(sums, [each.numel() for each in addends]), strict=True):
            piece.grad = own.view_as(piece)

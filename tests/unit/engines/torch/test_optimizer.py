"""The optimizer over pieces is AdamW over the whole, and its norm that of the whole gradient."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from wattune.engines.model.hyperparameters import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY
from wattune.engines.torch.optimizer import ShardedAdamW


def parameter(whole: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(whole.clone(), init_device_mesh("cpu", (1,)), [Replicate()]))


def with_grad(each: nn.Parameter, grad: torch.Tensor) -> None:
    assert isinstance(each, DTensor)
    each.grad = distribute_tensor(grad, each.device_mesh, each.placements)


@pytest.mark.parametrize("size", [0.01, 100.0], ids=["below", "clipped"])
def test_updates_are_adamws_of_the_clipped_gradient(process_group: None, size: float) -> None:
    torch.manual_seed(0)
    wholes = [torch.randn(4, 3), torch.randn(5)]
    ours, theirs = [parameter(whole) for whole in wholes], [nn.Parameter(whole.clone()) for whole in wholes]
    sharded = ShardedAdamW(ours)
    plain = torch.optim.AdamW(theirs, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
    for _ in range(3):
        grads = [size * torch.randn_like(whole) for whole in wholes]
        for one, other, grad in zip(ours, theirs, grads, strict=True):
            with_grad(one, grad.clone())
            other.grad = grad.clone()
        loss, norm = sharded.reduce(torch.tensor(2.5))
        expected = nn.utils.clip_grad_norm_(theirs, CLIP_NORM)
        assert loss.item() == 2.5 and norm.item() == pytest.approx(expected.item())
        sharded.step(norm)
        plain.step()
        assert all(each.grad is None for each in ours)
    for one, other in zip(ours, theirs, strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.to_local(), other.detach())


def test_a_weight_that_two_stages_hold_counts_half(process_group: None) -> None:
    """The other half of its square comes from the other stage, with the sum over ranks."""
    one, tied = parameter(torch.zeros(1)), parameter(torch.zeros(1))
    sharded = ShardedAdamW([one, tied], tied)
    with_grad(one, torch.tensor([3.0]))
    with_grad(tied, torch.tensor([4.0]))
    _, norm = sharded.reduce(torch.tensor(0.0))
    assert norm.item() == pytest.approx((9 + 16 / 2) ** 0.5)


def test_frozen_weights_are_left_alone(process_group: None) -> None:
    frozen = parameter(torch.ones(2)).requires_grad_(False)
    sharded = ShardedAdamW([frozen])
    loss, norm = sharded.reduce(torch.tensor(1.5))
    sharded.step(norm)
    assert (loss.item(), norm.item()) == (1.5, 0.0)
    assert isinstance(frozen, DTensor) and torch.equal(frozen.to_local(), torch.ones(2))

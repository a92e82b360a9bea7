"""Collectives for FSDP2: whose memory gradients lie in, and what holds up compute where a plan asks for no overlap.

FSDP2 gathers weights and reduces gradients on streams of their own, beside compute. These stand in for its collectives
(`FSDPModule.set_custom_all_gather`, `set_custom_reduce_scatter`). Without overlap they make both streams wait for each
other, so that compute and communication alternate. On CPUs both are serial as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 deprecates the names that torch 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _OfCompute:
    """The stream that computes, on which it is made."""

    def __init__(self, device_type: str) -> None:
        """Takes the kind of device that computes, which need not be the GPU that is there too."""
        self._compute = None if device_type == "cpu" else torch.accelerator.current_stream()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _wait_for_compute(self) -> None:
        if self._compute is not None:
            torch.accelerator.current_stream().wait_stream(self._compute)

    def _hold_compute(self) -> None:
        if self._compute is not None:
            self._compute.wait_stream(torch.accelerator.current_stream())


class SerialAllGather(_OfCompute):
    """Gathers weights when what was computed before is done, and before anything after it."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """See `torch.distributed.all_gather_into_tensor`."""
        self._wait_for_compute()
        work = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        self._hold_compute()
        return work


class ReduceScatter(_OfCompute):
    """Reduces gradients of one part of the model into memory of the stream that computes.

    torch's allocator keeps free memory by stream. In that of FSDP2's own stream gradients lay from the backward pass to
    the update, and no forward pass could have it: 12 of the 89 GB that a mixture kept, of which 65 were ever in use at
    once (two H200, `benchmarks/results/allocator.md`).
    """

    def __init__(self, device_type: str, *, holds_compute: bool) -> None:
        """Takes the kind of device that computes, and whether no further backward pass begins before the end."""
        super().__init__(device_type)
        self.holds_compute = holds_compute
        self.stays = True
        """Tells that what is reduced next is kept as the gradient. What is only added to it is free at once for the
        stream that added it, and so must be its own."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for FSDP2.

        Its stream waits for compute before it asks for one to reduce into, and compute for it before the update, after
        which gradients are dropped: neither gets memory that the other still uses.
        """
        if self._compute is None or not self.stays:
            return super().allocate(size, dtype=dtype, device=device)
        with self._compute:
            return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """See `torch.distributed.reduce_scatter_tensor`."""
        work = _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        if self.holds_compute:
            self._hold_compute()
        return work


class HoldCompute(_OfCompute):
    """Ends a reduction over copies of the shards before any further backward pass is computed."""

    def __call__(self, reduced: Tensor) -> None:  # noqa: ARG002  (FSDP2 passes it)
        """See `FSDPModule.set_all_reduce_hook`."""
        self._hold_compute()

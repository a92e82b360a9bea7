"""Collectives for FSDP2 that hold up compute, for plans that ask for no overlap.

FSDP2 gathers weights and reduces gradients on streams of their own, beside compute. These stand in for its collectives
(`FSDPModule.set_custom_all_gather`, `set_custom_reduce_scatter`) and make both streams wait for each other, so that
compute and communication alternate. On CPUs both are serial as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 deprecates the names that torch 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Serial:
    """The common part of both collectives; made on the stream that computes."""

    def __init__(self, device_type: str) -> None:
        """Takes the kind of device that computes, which need not be the GPU that is there too."""
        self._compute = None if device_type == "cpu" else torch.accelerator.current_stream()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for FSDP2 to pack tensors into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _wait_for_compute(self) -> None:
        if self._compute is not None:
            torch.accelerator.current_stream().wait_stream(self._compute)

    def _hold_compute(self) -> None:
        if self._compute is not None:
            self._compute.wait_stream(torch.accelerator.current_stream())


class SerialAllGather(_Serial):
    """Gathers weights when what was computed before is done, and before anything after it."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """See `torch.distributed.all_gather_into_tensor`."""
        self._wait_for_compute()
        work = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        self._hold_compute()
        return work


class SerialReduceScatter(_Serial):
    """Reduces gradients before any further backward pass is computed."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """See `torch.distributed.reduce_scatter_tensor`."""
        work = _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self._hold_compute()
        return work


class HoldCompute(_Serial):
    """Ends a reduction over copies of the shards before any further backward pass is computed."""

    def __call__(self, reduced: Tensor) -> None:  # noqa: ARG002  (FSDP2 passes it)
        """See `FSDPModule.set_all_reduce_hook`."""
        self._hold_compute()

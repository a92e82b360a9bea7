"""One step's forward and backward passes over micro-batches, by torch's pipeline schedules.

A model without pipeline parallelism is a pipeline of one stage: the same schedule then accumulates its gradients.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from wattune.engines.model.decoder import Decoder
from wattune.engines.torch.fsdp_comm import ReduceScatter
from wattune.engines.torch.parallel import fsdp_modules
from wattune.plans.axes import Plan
from wattune.workers.recorder import Recorder


@contextmanager
def _as_raised() -> Iterator[None]:
    """Raises what a pass raised: torch's pipeline wraps it, and memory that ran out could not be told from a bug."""
    try:
        yield
    except RuntimeError as error:
        raise error.__cause__ or error from None


class Chunk(nn.Module):
    """A part of the model that one pipeline stage runs and, after the last part, the loss.

    It also keeps torch's pipeline from seeing the FSDP module, whose gathering and reduction `Stage` decides.
    """

    def __init__(self, decoder: Decoder, num_losses: int) -> None:
        """Takes the sharded part of the model and how many tokens of the global batch have a loss."""
        super().__init__()
        self.decoder = decoder
        self.num_losses = num_losses

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Activations for the next stage, or this micro-batch's addend of the mean loss over the global batch."""
        out: Tensor = self.decoder(x, targets)
        return out if self.decoder.head is None else out / self.num_losses


class Stage(PipelineStage):
    """A pipeline stage that spans its phases and reduces its gradients when the plan says so."""

    def __init__(
        self,
        chunk: Chunk,
        *,
        virtual_stage: int,
        plan: Plan,
        group: dist.ProcessGroup,
        boundary: Tensor,
        tokens: Tensor,
        recorder: Recorder,
        reduce: ReduceScatter,
    ) -> None:
        """Describes what passes between stages, so that torch need not run the model to find out.

        `virtual_stage` is the chunk's place in the model, from 0 to pp x vpp - 1. `boundary` and `tokens` are meta
        tensors like the activations between stages and like a micro-batch.
        """
        has_head = chunk.decoder.head is not None
        super().__init__(
            chunk,
            virtual_stage,
            plan.pp * plan.vpp,
            next(chunk.parameters()).device,
            input_args=(tokens if chunk.decoder.embedding is not None else boundary,),
            output_args=(boundary.new_empty((), dtype=torch.float32) if has_head else boundary,),
            group=group,
        )
        self._model: Any = chunk.decoder
        self._losses: list[Tensor] = []
        self._chunk = virtual_stage // plan.pp if plan.vpp > 1 else None
        self._keeps_weights = plan.sharding != "zero3"
        self._has_copies = plan.dp_replicate > 1
        self._reduces_every_time = plan.sharding in ("zero2", "zero3")
        self._reduces_in_backward = self._reduces_every_time or plan.overlap != "none"
        self._recorder = recorder
        self._reduce = reduce

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch forward."""
        with self._recorder.phase("forward", micro_batch=fwd_chunk_id, chunk=self._chunk), _as_raised():
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:
            self._losses.append(out.detach())
        return out

    def take_losses(self) -> list[Tensor]:
        """Addends of the mean loss, one a micro-batch since the last call; none off the last stage."""
        losses, self._losses = self._losses, []
        return losses

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """One micro-batch backward; gradients are reduced on the way only where the plan says so."""
        if not self.has_backward:  # schedules call it all the same
            return
        self._model.set_is_last_backward(False)  # `finish` waits for what is still under way
        self._model.set_reshard_after_backward(not self._keeps_weights)
        self._model.set_requires_gradient_sync(
            self._reduces_in_backward and (self._reduces_every_time or last_backward)
        )
        self._model.set_requires_all_reduce(last_backward or not self._has_copies)  # copies are summed once a step
        # Of what is reduced every time the first stays, and the rest is added to it; with copies sums are added, too.
        self._reduce.stays = not self._reduces_every_time or (bwd_chunk_id == 0 and not self._has_copies)
        with self._recorder.phase("backward", micro_batch=bwd_chunk_id, chunk=self._chunk), _as_raised():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the schedule calls this when a stage has done its last micro-batch, `finish` when all have."""

    def finish(self) -> None:
        """Reduces the gradients that are not yet, waits for all, and frees the gathered weights."""
        chunk = self.submod
        self.submod = self._model  # where torch's own method looks for an FSDP module
        try:
            super().perform_reduce_grad(1)
        finally:
            self.submod = chunk


class Pipeline:
    """All stages of this rank and the schedule that runs them."""

    def __init__(
        self, stages: list[Stage], plan: Plan, *, num_micro_batches: int, recorder: Recorder, trains: bool
    ) -> None:
        """Takes one stage per model chunk, in the order of the model."""
        self._stages = stages
        self._trains = trains
        self._tp = plan.tp
        self._gathers_first = trains and plan.sharding in ("zero1", "zero2") and plan.overlap != "grad_param"
        self._recorder = recorder
        arguments: dict[str, Any] = {
            "n_microbatches": num_micro_batches,
            "loss_fn": lambda loss, _targets: loss,  # the last chunk has computed it, inside its forward phase
            "scale_grads": False,
        }
        if not trains:
            self._schedule: Any = ScheduleGPipe(stages[0], n_microbatches=num_micro_batches)
        elif plan.vpp > 1:
            self._schedule = ScheduleInterleaved1F1B(list(stages), **arguments)
        else:
            self._schedule = Schedule1F1B(stages[0], **arguments)

    def run(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward and, in training, backward over all micro-batches of this replica's tokens [sequences, seq_len].

        Returns this rank's addend of the mean loss over the global batch, fp32; zero off the last stage.
        """
        if self._gathers_first:
            with self._recorder.phase("wait"):
                for unit in (unit for stage in self._stages for unit in fsdp_modules(stage.submod)):
                    unit.unshard()
        inputs = (tokens,) if self._stages[0].is_first else ()
        with torch.set_grad_enabled(self._trains):
            self._schedule.step(*inputs, target=targets, return_outputs=False, targets=targets)
        losses = self._stages[-1].take_losses()
        if not losses:
            return torch.zeros((), device=targets.device)
        # Every tensor-parallel rank of the last stage knows the whole loss of its replica.
        return torch.stack(losses).sum() / self._tp

    def finish(self) -> None:
        """Leaves reduced gradients on every trained parameter; see `Stage.finish`."""
        for stage in self._stages if self._trains else ():
            stage.finish()

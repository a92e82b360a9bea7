"""One step of DeepSpeed's pipeline engine, marked phase by phase, and the norm of the gradient over all parameters."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from torch import Tensor, nn

from wattune.engines.deepspeed.config import clips_outside
from wattune.engines.model.hyperparameters import CLIP_NORM
from wattune.trial import TrialSpec
from wattune.workers.recorder import Recorder

Instruction = Callable[..., None]


class PipelineSteps:
    """Runs `PipelineEngine.train_batch` or `eval_batch` with the instructions of its schedule inside phases."""

    def __init__(self, engine: Any, spec: TrialSpec, recorder: Recorder) -> None:
        """Takes the engine over: it runs the instructions below from now on."""
        self._engine, self._spec, self._recorder = engine, spec, recorder
        self._count = {"forward": 0, "backward": 0}
        self._loss: Tensor | None = None
        self._norm: Any = None
        own = dict(engine._INSTRUCTION_MAP)
        engine._INSTRUCTION_MAP = own | {
            schedule.ForwardPass: self._numbered("forward", _with_targets(own[schedule.ForwardPass])),
            schedule.BackwardPass: self._numbered("backward", own[schedule.BackwardPass]),
            schedule.ReduceGrads: self._reduce(own[schedule.ReduceGrads]),
            schedule.OptimizerStep: self._update(own[schedule.OptimizerStep]),
        }
        # Of the losses DeepSpeed's own aggregation would send after the update, the sum is known before it.
        engine._aggregate_total_loss = lambda: self._loss
        for weight, _ in engine.module.get_tied_weights_and_groups():
            weight.wattune_tied = True

    def run(self, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Any]:
        """One optimizer step; the loss and the gradient's norm."""
        self._count = {"forward": 0, "backward": 0}
        engine = self._engine
        engine.train_batch(batches if engine.is_first_stage() or engine.is_last_stage() else None)
        assert self._loss is not None
        return self._loss, self._norm

    def prompt(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
        """Every micro-batch forward; the loss."""
        self._count["forward"] = 0
        engine = self._engine
        mine = batches if engine.is_first_stage() or engine.is_last_stage() else None
        losses = engine.eval_batch(mine, reduce_output=None, bcast_loss=False)
        with self._recorder.phase("wait"):
            return self._summed(torch.stack(losses).sum() if losses else None)

    def _summed(self, total: Tensor | None) -> Tensor:
        """The mean loss of the global batch, of the losses of this rank's micro-batches where it has any."""
        engine = self._engine
        mine = torch.zeros((), device=engine.device) if total is None else total.detach().float().reshape(())
        loss: Tensor = mine / (engine.micro_batches * engine.dp_world_size)
        dist.all_reduce(loss)
        return loss

    def _numbered(self, phase: str, instruction: Instruction) -> Instruction:
        def run(engine: Any, **arguments: Any) -> None:
            number = self._count[phase]
            self._count[phase] += 1
            with self._recorder.phase(phase, micro_batch=number):
                instruction(engine, **arguments)

        return run

    def _reduce(self, instruction: Instruction) -> Instruction:
        def run(engine: Any, **arguments: Any) -> None:
            with self._recorder.phase("wait"):
                instruction(engine, **arguments)
                self._loss = self._summed(engine.total_loss)

        return run

    def _update(self, instruction: Instruction) -> Instruction:
        def run(engine: Any, **arguments: Any) -> None:
            with self._recorder.phase("optimizer"):
                self._norm = clip(engine.module.parameters(), self._spec) if clips_outside(self._spec) else None
                instruction(engine, **arguments)
                self._norm = engine.get_global_grad_norm() if self._norm is None else self._norm

        return run


def _with_targets(instruction: Instruction) -> Instruction:
    def run(engine: Any, buffer_id: int) -> None:
        if engine.is_last_stage():
            engine.module.expect(engine.pipe_buffers["labels"][buffer_id])
        instruction(engine, buffer_id=buffer_id)

    return run


# Without ZeRO DeepSpeed averages the norms of data-parallel ranks, which hold different experts (`runtime/utils.py`,
# `clip_grad_norm_`), and its bf16 optimizer leaves experts out (`runtime/fp16/unfused_optimizer.py`). Clipping by such
# a norm would be another training run.
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

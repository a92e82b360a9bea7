"""The DeepSpeed engine: ZeRO, its pipeline, automatic tensor and expert parallelism, on the torch engine's model."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wattune.engines.deepspeed.config import clips_outside, configuration
from wattune.engines.deepspeed.context import DeepSpeedSession, initialise_engine
from wattune.engines.deepspeed.model import Stages, compiler_of, route, whole_model
from wattune.engines.deepspeed.pipeline import PipelineSteps, clip
from wattune.engines.model.answering import Answering, Running
from wattune.engines.model.compiler import Compiler, begin_variant
from wattune.engines.model.routing import Routes
from wattune.trial import TrialSpec
from wattune.workers.device import claim
from wattune.workers.engine import Ranks, StepSpans
from wattune.workers.recorder import recorder_for


class DeepSpeedEngine(Answering):
    """Trains one specification; see `wattune.workers.engine.Engine`."""

    def build(self, spec: TrialSpec, ranks: Ranks, *, seed: int) -> None:
        """Makes process groups, this rank's part of the model, its optimizer and its data.

        Raises `EngineError` where the specification is one this engine cannot run.
        """
        device = claim(spec, ranks)
        self._session = DeepSpeedSession(device, ranks.local_rank)
        compiler = self._compiler or compiler_of(spec, device)
        begin_variant(("deepspeed", spec.model, spec.cluster, spec.workload, spec.plan, device, compiler))
        self._running = _Running(spec, ranks, device, seed, compiler)


class _Running(Running):
    def __init__(self, spec: TrialSpec, ranks: Ranks, device: torch.device, seed: int, compiler: Compiler) -> None:
        super().__init__(spec, ranks, device, compiler)
        plan = spec.plan
        config = configuration(spec, spec.model.num_parameters)
        if spec.model.is_moe:
            # DeepSpeed averages gradients over replicas.
            scale = 1 / (plan.micro_batch_size * self._num_micro_batches)
            self.routes = Routes(spec, seed, device, sequence_loss_scale=scale)
        model: nn.Module
        if plan.pp > 1:
            model = Stages(spec, device, seed, compiler, self.routes)
        else:
            model = whole_model(spec, device, seed, config, compiler, self.routes)
        self.engine = initialise_engine(model, config, device)
        route(self.engine.module)
        self.engine.train(self._trains)
        del model
        self.recorder = recorder_for(device)  # again: its peak leaves out what making the engine took
        self._pipeline = PipelineSteps(self.engine, spec, self.recorder) if plan.pp > 1 else None
        self._begin(ranks, device, seed)

    def step(self) -> StepSpans:
        batches = self._micro_batches()
        with self.recorder.phase("step"):
            loss, norm = self._train(batches) if self._trains else self._prompt(batches)
        # DeepSpeed writes -1 for a norm that is not finite.
        return StepSpans(spans=self._go_on(), loss=float(loss), grad_norm=float(norm) if norm >= 0 else math.inf)

    def _micro_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        tokens, targets = (whole.chunk(self._num_micro_batches) for whole in self._next)
        return zip(tokens, targets, strict=True)

    @torch.no_grad()
    def _prompt(self, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, float]:
        if self._pipeline is not None:
            return self._pipeline.prompt(batches), 0.0
        losses = []
        for index, (tokens, targets) in enumerate(batches):
            with self.recorder.phase("forward", micro_batch=index):
                losses.append(self.engine(tokens, targets))
        mean = torch.stack(losses).float().mean() / self._world_size
        with self.recorder.phase("wait") if self._world_size > 1 else nullcontext():
            dist.all_reduce(mean)
        return mean, 0.0

    def _train(self, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Any]:
        if self._pipeline is not None:
            return self._pipeline.run(batches)
        engine, phase = self.engine, self.recorder.phase
        engine.enable_backward_allreduce = False  # so that its wait is not marked as computing
        losses = []
        norm = None
        for index, (tokens, targets) in enumerate(batches):
            with phase("forward", micro_batch=index):
                loss = engine(tokens, targets)
            losses.append(loss.detach())
            with phase("backward", micro_batch=index):
                engine.backward(loss)
            is_last = index == self._num_micro_batches - 1
            with phase("wait" if self._world_size > 1 else "optimizer"):
                engine.allreduce_gradients()
                if is_last:
                    mean = torch.stack(losses).float().mean() / self._world_size
                    dist.all_reduce(mean)
            with phase("optimizer"):
                if is_last and clips_outside(self._spec):
                    norm = clip(engine.module.parameters(), self._spec)
                engine.step()
        return mean, engine.get_global_grad_norm() if norm is None else norm

    def close(self) -> None:
        """Ends what DeepSpeed has running and lets go of it.

        Its last loss refers to the engine through the hooks of its graph, where Python's collector does not look.
        """
        engine = self.engine
        engine.destroy()
        modules, parameters = list(engine.module.modules()), list(engine.module.parameters())
        for thing in (engine.optimizer, engine, *modules, *parameters):
            if thing is not None:  # without training there is no optimizer
                vars(thing).clear()
        del self.engine, self._pipeline

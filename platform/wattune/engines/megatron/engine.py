"""The Megatron-Core engine: its tensor, pipeline, expert and data parallelism, and its distributed optimizer."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

with warnings.catch_warnings():  # that there is neither Apex nor TransformerEngine, from each of its parts
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.schedules import get_schedule_table
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_layer import MoELayer

from wattune.engines.megatron import config as megatron_config
from wattune.engines.megatron.context import MegatronSession, fuse_updates
from wattune.engines.megatron.layers import chunk, finish, route
from wattune.engines.megatron.timers import PhaseTimers
from wattune.engines.megatron.weights import initialise
from wattune.engines.model.answering import Answering, Running
from wattune.engines.model.compiler import Compiler, begin_variant, compiler_for
from wattune.engines.model.decoder import DTYPES, Rotation
from wattune.engines.model.routing import Routes
from wattune.engines.registry import check_libraries
from wattune.trial import TrialSpec
from wattune.workers.device import claim
from wattune.workers.engine import Ranks, StepSpans


class MegatronEngine(Answering):
    """Trains one specification; see `wattune.workers.engine.Engine`."""

    def build(self, spec: TrialSpec, ranks: Ranks, *, seed: int) -> None:
        """Makes process groups, this rank's part of the model, its optimizer and its data.

        Raises `EngineError` where the specification is one this engine cannot run.
        """
        device = claim(spec, ranks)
        check_libraries(spec)
        self._session = session = MegatronSession()
        session.open(spec)
        compiler = self._compiler or compiler_for(device)
        begin_variant(("megatron", spec.model, spec.cluster, spec.workload, spec.plan, device, compiler))
        self._running = _Running(spec, ranks, session, device, seed, compiler)


class _Running(Running):
    def __init__(
        self,
        spec: TrialSpec,
        ranks: Ranks,
        session: MegatronSession,
        device: torch.device,
        seed: int,
        compiler: Compiler,
    ) -> None:
        super().__init__(spec, ranks, device, compiler)
        plan, workload = spec.plan, spec.workload
        engine = megatron_config.uses_transformer_engine(spec)
        self.facts = {**self.facts, "layers": "transformer_engine" if engine else "local"}
        self._replicas = ranks.world_size // plan.pp
        positions = torch.arange(workload.seq_len, device=device).expand(plan.micro_batch_size, -1)
        self._positions = own_part(positions, plan.cp, parallel_state.get_context_parallel_rank())
        with warnings.catch_warnings(action="ignore"):  # Megatron warns of what is missing and of what it prefers
            self._config = TransformerConfig(**megatron_config.transformer(spec))
            self._chunks = self._models(session, device, seed, compiler)
            if self._trains:
                self._chunks = self._replicated(self._chunks)
                self._optimizer = get_megatron_optimizer(
                    OptimizerConfig(**megatron_config.optimizer(spec)),
                    self._chunks,
                    config_overrides={},  # Megatron's own leave norms and biases out of weight decay
                    use_gloo_process_groups=False,
                )
                fuse_updates(self._optimizer)
        self._spans = self._hook(self._config)
        self._run = get_forward_backward_func()
        self._begin(ranks, device, seed)
        # NCCL wants every rank of a group in its first call, which a schedule's sends and receives are not.
        dist.all_reduce(torch.zeros(1, device=device), group=parallel_state.get_pipeline_model_parallel_group())

    def step(self) -> StepSpans:
        with self._spans.step():
            loss, grad_norm = self._train() if self._trains else self._prompt()
        return StepSpans(spans=self._go_on(), loss=loss.item(), grad_norm=float(grad_norm))

    def close(self) -> None:
        """Waits for weights still under way, and takes the model apart.

        Hooks of gradients and graphs of the last step refer to it where Python's collector does not look.
        """
        for part in self._chunks if self._trains else ():
            for group in (*part.bucket_groups, *part.expert_parallel_bucket_groups):
                if group.param_gather_handle is not None:
                    group.param_gather_handle.wait()
        for module in [module for part in self._chunks for module in part.modules()]:
            if isinstance(module, MoELayer):
                vars(module.token_dispatcher).clear()
            vars(module).clear()

    @torch.no_grad()
    def _prompt(self) -> tuple[Tensor, float]:
        return self._pass(forward_only=True), 0.0

    def _train(self) -> tuple[Tensor, Any]:
        for part in self._chunks:
            part.zero_grad_buffer()
        self._optimizer.zero_grad()
        loss = self._pass(forward_only=False)
        with self.recorder.phase("optimizer"):
            done, grad_norm, _ = self._optimizer.step()
        assert done, "only scaled losses make Megatron skip an update"
        return loss, grad_norm

    def _pass(self, *, forward_only: bool) -> Tensor:
        """All micro-batches through this rank's chunks; the mean loss of the global batch."""
        plan, workload = self._spec.plan, self._spec.workload
        several = len(self._chunks) > 1
        iterators = [self._inputs() for _ in self._chunks]
        losses = self._run(
            forward_step_func=self._forward,
            data_iterator=iterators if several else iterators[0],
            model=self._chunks if several else self._chunks[0],
            num_microbatches=self._num_micro_batches,
            seq_length=workload.seq_len,
            micro_batch_size=plan.micro_batch_size,
            forward_only=forward_only,
        )
        with self._after_micro_batches():
            mine = torch.stack(losses).sum() if losses else torch.zeros((), device=self._positions.device)
            # Every tensor and context parallel rank of the last stage knows the loss of its replica, or its part of it.
            loss = mine / (self._num_micro_batches * self._replicas)
            dist.all_reduce(loss)
        return loss

    def _models(self, session: MegatronSession, device: torch.device, seed: int, compiler: Compiler) -> list[Any]:
        """This rank's chunks, initialised."""
        spec, plan = self._spec, self._spec.plan
        numbers = list(range(plan.vpp)) if plan.vpp > 1 else [None]
        first, last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
        parts = []
        for number in numbers:
            ends = {"ignore_virtual": number is None, "vp_stage": number}
            part = chunk(spec, self._config, number, first=first(**ends), last=last(**ends)).to(device)
            initialise(part, spec.model, *session.shares(), seed, spec.workload.lora)
            parts.append(part.to(DTYPES[plan.held_dtype]))
        rotation = None
        if spec.model.positions == "rope" and not megatron_config.uses_transformer_engine(spec):
            dtype = DTYPES[plan.held_dtype]
            rotation = Rotation.table(spec.model, spec.workload.seq_len, device, dtype)
        finish(parts, rotation, compiler)
        if spec.model.is_moe:
            tp, rank = plan.tp, parallel_state.get_tensor_model_parallel_rank()
            self.routes = Routes(spec, seed, device, places=self._positions[0].chunk(tp)[rank])
            route(parts, self.routes)
        return [part.train(self._trains) for part in parts]

    def _replicated(self, parts: list[Any]) -> list[Any]:
        """Chunks made data parallel."""
        options = DistributedDataParallelConfig(**megatron_config.data_parallel(self._spec))
        return [
            # The first chunk reduces on the way; the others' gradients come in one piece, earlier than they are needed.
            DistributedDataParallel(self._config, options, part, disable_bucketing=index > 0)
            for index, part in enumerate(parts)
        ]

    def _hook(self, config: TransformerConfig) -> PhaseTimers:
        """Puts what Megatron calls on its way through a step into its configuration."""
        plan = self._spec.plan
        table = [(batch, 0) for batch in range(self._num_micro_batches)]
        if plan.vpp > 1:
            table = get_schedule_table(self._num_micro_batches, plan.vpp, config.microbatch_group_size_per_vp_stage)
        spans = PhaseTimers(self.recorder, table, plan.vpp)
        config.timers = spans
        config.finalize_model_grads_func = partial(_finalize, self._after_micro_batches)
        if megatron_config.data_parallel(self._spec)["overlap_grad_reduce"]:
            waits = [part.no_sync for part in self._chunks]
            config.no_sync_func = waits if len(waits) > 1 else waits[0]
        return spans

    def _inputs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Micro-batches of tokens and targets, or of the parts of them that this context parallel rank attends from."""
        cp, rank = self._spec.plan.cp, parallel_state.get_context_parallel_rank()
        tokens, targets = (own_part(whole, cp, rank).chunk(self._num_micro_batches) for whole in self._next)
        return zip(tokens, targets, strict=True)

    def _forward(self, inputs: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> tuple[Tensor, "LossFunction"]:
        """Runs one micro-batch through a chunk; Megatron calls it."""
        tokens, targets = next(inputs)
        if not self._trains:
            targets = targets[:, -1:]  # the one token after each prompt
        return model(tokens, self._positions, None, labels=targets), _summed_loss


LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def _summed_loss(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss Megatron derives once it has divided it, in place, by the tokens; and the mean to report."""
    total = losses.float().sum()
    return total, torch.tensor(losses.numel(), dtype=torch.int), total.detach() / losses.numel()


def own_part(whole: Tensor, cp: int, rank: int) -> Tensor:
    """The tokens of one context parallel rank, of [sequences, seq_len]: pieces `rank` and `2 cp - 1 - rank` of 2 cp.

    Early tokens attend to few, late ones to many; so each rank takes as much of both (Megatron-Core,
    `utils.get_batch_on_this_cp_rank`, which TransformerEngine's attention expects).
    """
    if cp == 1:
        return whole
    pieces = whole.chunk(2 * cp, dim=1)
    return torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]], dim=1)


def _finalize(phase: Callable[[], Any], *arguments: Any, **named: Any) -> None:
    with phase():
        finalize_model_grads(*arguments, **named)

"""The reference engine: a decoder trained by torch's own parallel libraries, on CPUs over gloo and on GPUs over NCCL.

From one seed every plan with the same global batch takes the same steps, within rounding; other engines are held to
it. Experts without a capacity are part of that; with a capacity, which tokens are dropped depends on the micro-batch.
"""

from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from wattune.engines.model.answering import Answering, Running
from wattune.engines.model.compiler import Compiler, begin_variant, compiler_for
from wattune.engines.model.decoder import DTYPES, Decoder, Rotation
from wattune.engines.model.lora import adapt
from wattune.engines.model.offload import Offload
from wattune.engines.model.routing import Routes
from wattune.engines.registry import check_libraries
from wattune.engines.torch.fsdp_comm import ReduceScatter
from wattune.engines.torch.mesh import Meshes
from wattune.engines.torch.optimizer import ShardedAdamW
from wattune.engines.torch.parallel import materialise
from wattune.engines.torch.pipeline import Chunk, Pipeline, Stage
from wattune.plans.parallel import coordinates, stage_layers
from wattune.trial import TrialSpec
from wattune.workers.device import claim
from wattune.workers.engine import Ranks, StepSpans


class TorchEngine(Answering):
    """Trains one specification; see `wattune.workers.engine.Engine`."""

    def build(self, spec: TrialSpec, ranks: Ranks, *, seed: int) -> None:
        """Makes process groups, this rank's part of the model, its optimizer and its data.

        Raises `EngineError` where the specification is one this engine cannot run.
        """
        check_libraries(spec)
        device = claim(spec, ranks)
        meshes = Meshes.create(
            spec.plan,
            world_size=ranks.world_size,
            rank=ranks.rank,
            device_type=device.type,
            has_experts=spec.model.is_moe,
        )
        compiler = self._compiler or compiler_for(device)
        # Graphs of tensor parallel layers name their process groups.
        own = meshes.identity if spec.plan.tp > 1 else None
        begin_variant((spec.model, spec.cluster, spec.workload, spec.plan, device, compiler, own))
        self._running = _Running(spec, ranks, meshes, device, seed, compiler)


class _Running(Running):
    def __init__(
        self, spec: TrialSpec, ranks: Ranks, meshes: Meshes, device: torch.device, seed: int, compiler: Compiler
    ) -> None:
        super().__init__(spec, ranks, device, compiler)
        plan, workload = spec.plan, spec.workload
        here = coordinates(ranks.rank, plan, ranks.world_size)
        self._group = meshes.dense("pp").get_group()
        if spec.model.is_moe:
            # Every tensor parallel rank routes all tokens, and their gradients are summed.
            scale = 1 / (workload.global_batch_size * plan.tp)
            self.routes = Routes(spec, seed, device, sequence_loss_scale=scale)
        layers = stage_layers(spec.model, plan)[here.pp]
        holds_compute = plan.sharding in ("zero2", "zero3") and plan.overlap == "none"
        reduce = ReduceScatter(device.type, holds_compute=holds_compute)
        decoders, whole = _decoders(spec, meshes, device, seed, layers, self.routes, reduce)
        for decoder in decoders:
            decoder.compile_with(compiler)
        self._tied = _tied_over_stages(decoders, spec) if plan.pp > 1 and workload.mode == "pretrain" else None
        boundary = torch.empty(
            (plan.micro_batch_size, workload.seq_len // plan.tp, spec.model.hidden_size),
            dtype=DTYPES[plan.held_dtype],
            device="meta",
            requires_grad=self._trains,
        )
        tokens = torch.empty((plan.micro_batch_size, workload.seq_len), dtype=torch.int64, device="meta")
        stages = [
            Stage(
                Chunk(decoder, workload.tokens_per_step if self._trains else workload.global_batch_size),
                virtual_stage=chunk * plan.pp + here.pp,
                plan=plan,
                group=self._group,
                boundary=boundary,
                tokens=tokens,
                recorder=self.recorder,
                reduce=reduce,
            )
            for chunk, decoder in enumerate(decoders)
        ]
        self._pipeline = Pipeline(
            stages, plan, num_micro_batches=self._num_micro_batches, recorder=self.recorder, trains=self._trains
        )
        parameters = (each for decoder in decoders for each in decoder.parameters())
        tensor_ranks = meshes.dense("tp").get_group()
        self._optimizer = ShardedAdamW(parameters, self._tied, whole=whole, group=tensor_ranks)
        self._begin(ranks, device, seed)
        # NCCL wants every rank of a group in its first call, which a schedule's sends and receives are not.
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)

    def step(self) -> StepSpans:
        """See `TorchEngine.step`."""
        with self.recorder.phase("step"):
            loss = self._pipeline.run(*self._next)
            with self._after_micro_batches():
                self._pipeline.finish()
                if self._tied is not None:
                    _add_from_other_end(self._tied, self._group)
                loss, grad_norm = self._optimizer.reduce(loss)
            if self._trains:
                with self.recorder.phase("optimizer"):
                    self._optimizer.step(grad_norm)
        return StepSpans(spans=self._go_on(), loss=loss.item(), grad_norm=grad_norm.item())


def _decoders(
    spec: TrialSpec,
    meshes: Meshes,
    device: torch.device,
    seed: int,
    chunks: list[range],
    routes: Routes | None,
    reduce: ReduceScatter,
) -> tuple[list[Decoder], list[nn.Parameter]]:
    """This rank's parts of the model, initialised and sharded, and the parameters tensor parallel leaves whole."""
    model, plan = spec.model, spec.plan
    rotation = None
    if model.positions == "rope":
        rotation = Rotation.table(model, spec.workload.seq_len, device, DTYPES[plan.held_dtype])
    decoders, whole = [], []
    for layers in chunks:
        with torch.device("meta"):
            decoder = Decoder(
                model,
                layers,
                rotation=rotation,
                recompute=plan.recompute,
                experts=meshes.expert_shard(plan),
                routes=routes,
            )
            if spec.workload.lora is not None:
                adapt(decoder, spec.workload.lora)
        if decoder.head is not None:
            decoder.head.last_only = spec.workload.mode == "prefill"
            decoder.head.loss_chunks = plan.loss_chunks
        whole += materialise(decoder, spec, meshes, device, seed, reduce)
        if plan.offload == "activations":
            decoder.offload = Offload(device, () if rotation is None else (rotation.cos, rotation.sin))
        decoders.append(decoder)
    return decoders, whole


def _tied_over_stages(decoders: list[Decoder], spec: TrialSpec) -> nn.Parameter | None:
    """The copy this rank holds of a weight that the first and the last stage share, None in between."""
    if not spec.model.tied_embeddings:
        return None
    first, last = decoders[0], decoders[-1]
    if first.embedding is not None:
        return cast(nn.Parameter, first.embedding.tokens.weight)
    return None if last.head is None else cast(nn.Parameter, last.head.output.weight)


def _add_from_other_end(tied: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Sums the gradients of a shared weight over the first and the last stage, whose shards are the same."""
    assert isinstance(tied.grad, DTensor)
    mine = tied.grad.to_local()
    theirs = torch.empty_like(mine)
    peer = dist.get_world_size(group) - 1 if dist.get_rank(group) == 0 else 0
    operations = [
        dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    mine += theirs

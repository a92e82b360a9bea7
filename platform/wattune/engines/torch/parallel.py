"""Turns a decoder into a rank's shards: tensor parallel by pieces of weights, data parallel by torch's FSDP2.

Data parallel is FSDP2 in every sharding, so that two trials differ by the sharding and by nothing else:

- `none`: a (dp, 1) mesh, so everything is replicated and gradients are all-reduced, as in DDP;
- `zero1`: optimizer state is sharded; gradients accumulate whole and are reduce-scattered once a step, weights are
  gathered once a step;
- `zero2`: as `zero1`, but gradients are reduce-scattered and kept sharded after every micro-batch;
- `zero3`: weights are freed after use too, and gathered again for each forward and backward pass.

DistributedDataParallel with ZeroRedundancyOptimizer is not used. It reduces all gradients over one group, where experts
need another; it takes DTensors only by a transform torch calls temporary; and with bf16 it would cast the weights
again for every micro-batch.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from wattune.engines.model.decoder import Decoder, Embedding, Head
from wattune.engines.model.experts import Experts
from wattune.engines.model.lora import freeze, lower_frozen
from wattune.engines.model.weights import Cut, initialise, round_values
from wattune.engines.torch.float8 import convert_layers
from wattune.engines.torch.fsdp_comm import HoldCompute, ReduceScatter, SerialAllGather
from wattune.engines.torch.mesh import Meshes
from wattune.engines.torch.tensor_parallel import cut_over, pad_vocabulary
from wattune.plans.axes import Plan
from wattune.plans.parallel import padded_vocab_size
from wattune.trial import TrialSpec


def materialise(
    decoder: Decoder, spec: TrialSpec, meshes: Meshes, device: torch.device, seed: int, reduce: ReduceScatter
) -> list[nn.Parameter]:
    """Turns a decoder on the meta device into this rank's shards of the initial model, layer by layer.

    Each part is cut by tensor parallel, filled, and sharded before the next one is allocated, so that no more than one
    layer is ever whole. Seed and full name of a parameter decide its initial value.

    Returns the parameters that every tensor parallel rank holds whole; none where there is one such rank.
    """
    model, plan = spec.model, spec.plan
    if plan.dtype == "fp8":
        convert_layers(decoder, device)
    cuts: dict[str, Cut] = {}
    if plan.tp > 1:
        pad_vocabulary(decoder, padded_vocab_size(model, spec.engine, plan.tp))
        cuts = cut_over(decoder, meshes.tensor_ranks())
    freeze(decoder, spec.workload.mode)
    is_tied = model.tied_embeddings and decoder.embedding is not None and decoder.head is not None
    parts: list[tuple[str, nn.Module | None]] = [("embedding", decoder.embedding)]
    parts += [(f"layers.{index}", layer) for index, layer in decoder.layers.items()]
    parts += [("head", decoder.head)]
    for name, part in parts:
        if part is None:
            continue
        part.to_empty(device=device)
        initialise(part, name, model, seed, cuts)
        if plan.held_dtype == "bf16":
            round_values(part, torch.bfloat16)
            lower_frozen(part, torch.bfloat16)
        if not (is_tied and isinstance(part, Embedding | Head)):  # a shared weight must lie in one unit: the root's
            _shard(part, plan, meshes, reduce)
    if is_tied:
        assert decoder.embedding is not None and decoder.head is not None
        decoder.head.output.weight = decoder.embedding.tokens.weight
    _shard(decoder, plan, meshes, reduce)
    if plan.tp == 1:
        return []
    cut_too = {each for part in decoder.modules() if isinstance(part, Experts) for each in part.parameters()}
    return [each for name, each in decoder.named_parameters() if name not in cuts and each not in cut_too]


def fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """Every unit of sharding in a module, outermost first."""
    return (unit for unit in module.modules() if isinstance(unit, FSDPModule))


def _shard(module: nn.Module, plan: Plan, meshes: Meshes, reduce: ReduceScatter) -> None:
    """Makes a module, its experts first, a unit of FSDP2.

    With bf16, and with fp8, the shards, the optimizer and the reduction of gradients stay in fp32, and weights are cast
    to bf16 when they are gathered: one copy, however many micro-batches are in flight.
    """
    policy = MixedPrecisionPolicy()
    if plan.held_dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    has_copies = plan.sharding == "none" or plan.dp_replicate > 1
    dims = ("replicate", "shard") if has_copies else ("shard",)
    units = [] if isinstance(module, Decoder) else [unit for unit in module.modules() if isinstance(unit, Experts)]
    for unit in [*units, module]:
        mesh = meshes.experts(*dims) if isinstance(unit, Experts) else meshes.dense(*dims)
        # A frozen weight that nothing shards would only be held twice.
        apart = {p for p in unit.parameters() if not p.requires_grad} if plan.sharding == "none" else None
        sharded = fully_shard(
            unit, mesh=mesh, mp_policy=policy, reshard_after_forward=plan.sharding == "zero3", ignored_params=apart
        )
        # The loss is a sum already divided by the tokens of the global batch, so gradients are summed. An average
        # would be wrong for experts, whose tokens come from more replicas than share their weights.
        if mesh.size() > 1:  # alone, FSDP2 would divide by 1 in a pass over all gradients
            sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if plan.sharding == "zero3" and plan.overlap != "grad_param":
            sharded.set_custom_all_gather(cast(Any, SerialAllGather(mesh.device_type)))
        sharded.set_custom_reduce_scatter(cast(Any, reduce))
        if reduce.holds_compute and has_copies:  # the hook is called behind the sum over copies, on its stream
            sharded.set_all_reduce_hook(HoldCompute(mesh.device_type))

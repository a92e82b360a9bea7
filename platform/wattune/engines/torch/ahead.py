"""Compiles a plan's graphs without running it: no weights, no data, no other ranks.

torch keeps generated code on disk under the graph and the shapes, strides and types of its inputs. Those are known from
the plan: here its layers are made of tensors without data (`FakeTensorMode`), in process groups that only have names
(torch's `fake` backend, which it has for that), and compiled. The trial then traces its graphs, and finds their code.
"""

from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from wattune.engines.model.compiler import Compiler, compile_only
from wattune.engines.model.decoder import DTYPES, Decoder, Layer, Rotation
from wattune.engines.torch.mesh import Meshes
from wattune.engines.torch.tensor_parallel import cut_over, pad_vocabulary
from wattune.plans.parallel import coordinates, padded_vocab_size, stage_layers
from wattune.trial import TrialSpec
from wattune.workers.engine import Ranks
from wattune.workers.process_groups import leave_groups


def compile_ahead(spec: TrialSpec, ranks: Ranks, part: str, compiler: Compiler | None = None) -> None:
    """Compiles the graphs that one rank of a plan will run, of its "layers" or its "head"; in no process group."""
    plan, model = spec.plan, spec.model
    device, dtype = torch.device(ranks.device), DTYPES[plan.held_dtype]
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else there would be a context on the first device too
    dist.init_process_group("fake", store=FakeStore(), rank=ranks.rank, world_size=ranks.world_size)
    try:
        meshes = Meshes.create(
            plan, world_size=ranks.world_size, rank=ranks.rank, device_type=device.type, has_experts=model.is_moe
        )
        here = coordinates(ranks.rank, plan, ranks.world_size)
        with FakeTensorMode():
            rotation = None
            if model.positions == "rope":
                rotation = Rotation.table(model, spec.workload.seq_len, device, dtype)
            for layers in stage_layers(model, plan)[here.pp]:
                with torch.device("meta"):
                    experts = meshes.expert_shard(plan)
                    decoder = Decoder(model, layers, rotation=rotation, recompute=plan.recompute, experts=experts)
                if plan.tp > 1:  # as `materialise` does, which fills and shards them too
                    pad_vocabulary(decoder, padded_vocab_size(model, spec.engine, plan.tp))
                    cut_over(decoder, meshes.tensor_ranks())
                decoder.compile_with(compiler or Compiler(backend=compile_only))
                _compile_part(decoder, part, spec, device)
    finally:
        leave_groups()
        torch._dynamo.reset()


def _compile_part(decoder: Decoder, part: str, spec: TrialSpec, device: torch.device) -> None:
    """Compiles one layer of each kind or, where it is here, the head with its loss."""
    plan, work, model, dtype = spec.plan, spec.workload, spec.model, DTYPES[spec.plan.held_dtype]
    shape = (plan.micro_batch_size, work.seq_len // plan.tp, model.hidden_size)
    x = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
    kinds = {model.kind_of(int(number)): cast(Layer, layer) for number, layer in decoder.layers.items()}
    for layer in kinds.values() if part == "layers" else ():
        _fill(layer, device, dtype)
        layer.compiled(x)
    if decoder.head is not None and part == "head":
        _fill(decoder.head, device, dtype)
        decoder.head.loss_chunks = plan.loss_chunks
        decoder.head(x, torch.empty((shape[0], work.seq_len), dtype=torch.int64, device=device))


def _fill(part: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Gives a part weights as FSDP2 gathers them, and the marks by which torch's compiler treats its modules so."""
    for module in part.modules():
        module._is_fsdp_managed_module = module._fsdp_use_orig_params = True  # type: ignore[assignment]
        for name, weight in list(module.named_parameters(recurse=False)):
            held = torch.empty(weight.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(held, requires_grad=weight.requires_grad))

"""Megatron-Core's process-wide state: made before an engine is built, undone after, so that the next finds none."""

import gc
import importlib
import logging
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from wattune.engines.megatron.config import model_parallel
from wattune.engines.model.experts import ExpertShard
from wattune.engines.model.tensor_ranks import TensorRanks
from wattune.trial import TrialSpec
from wattune.workers.process_groups import live_groups

_SEED = 1
"""Of Megatron's random states, which it demands to have and which nothing here draws from."""


class MegatronSession:
    """Megatron between the build and the close of one engine."""

    def __init__(self) -> None:
        self._groups = set(live_groups())
        self._has_user_buffers = False

    def open(self, spec: TrialSpec) -> None:
        """Makes Megatron's process groups on the default one; all ranks must call it together."""
        logging.getLogger("megatron").setLevel(logging.ERROR)  # it warns of itself, on every rank and in every trial
        parallel_state.destroy_model_parallel()  # what another library in this process may have left
        parallel_state.initialize_model_parallel(**model_parallel(spec))
        tensor_parallel.model_parallel_cuda_manual_seed(_SEED)
        if spec.plan.overlap == "tp":
            _make_user_buffers(spec)
            self._has_user_buffers = True

    @staticmethod
    def shares() -> tuple[TensorRanks, ExpertShard]:
        """Returns the part of every parameter that this rank holds, and of the experts."""
        state = parallel_state
        size, rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
        return TensorRanks(size=size, rank=rank), ExpertShard(
            tp=state.get_expert_tensor_parallel_world_size(),
            tp_rank=state.get_expert_tensor_parallel_rank(),
            ep=state.get_expert_model_parallel_world_size(),
            ep_rank=state.get_expert_model_parallel_rank(),
        )

    def close(self) -> None:
        """Destroys the groups made since, and forgets what Megatron remembers of them and of its tensors."""
        gc.collect()  # modules, hooks and buffers refer to each other
        if self._has_user_buffers:
            from transformer_engine.pytorch.module import base

            base.destroy_ub()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_global_memory_buffer()
        tensor_parallel.get_cuda_rng_tracker().reset()
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        _forget_auxiliary_losses()
        RotaryEmbedding.forward.cache_clear()  # rotations of the last models, with the models' frequencies
        for group in [group for group in live_groups() if group not in self._groups]:
            dist.destroy_process_group(group)


def _forget_auxiliary_losses() -> None:
    """Empties where Megatron logs auxiliary losses: a dictionary in 0.16, an object in 0.19."""
    kept = getattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER", None)
    if kept is not None:
        kept.clear()
    else:
        importlib.import_module("megatron.core.transformer.moe.moe_logging").destroy_moe_metrics_tracker()


def _make_user_buffers(spec: TrialSpec) -> None:
    """Memory through which TransformerEngine overlaps tensor parallel collectives; Megatron leaves it to its caller.

    As `megatron/training/initialize.py`, `_initialize_tp_communicators`. Not run yet: see docs/engines.md.
    """
    from transformer_engine.pytorch.module import base

    plan, workload = spec.plan, spec.workload
    rows = workload.seq_len * plan.micro_batch_size // plan.cp
    base.initialize_ub(
        shape=[rows, spec.model.hidden_size], tp_size=plan.tp, use_fp8=False, bootstrap_backend=dist.get_backend()
    )


def fuse_updates(optimizer: Any) -> None:
    """Has torch's AdamW run as one kernel; Megatron asks for it only where TransformerEngine or Apex has an own one."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if isinstance(inner, torch.optim.AdamW):
            for group in inner.param_groups:
                group["fused"], group["foreach"] = True, False

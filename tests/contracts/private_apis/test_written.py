"""Uses that are held by how libraries are written: their sources, and what their functions take.

Each key is a row of docs/dependencies.md.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from installed import get, parameters, source

Fact = Callable[[], object]
"""Returns what is otherwise, or nothing."""


def says(path: str, *texts: str) -> Fact:
    return lambda: [text for text in texts if text not in source(path)]


def takes(path: str, names: str) -> Fact:
    """Its parameters are `a b`; `a b ...` are the first ones, and `... a b` are among them."""

    def otherwise() -> list[str]:
        found, wanted = parameters(get(path)), names.replace("...", "").split()
        if names.startswith("..."):
            return sorted(set(wanted) - set(found))
        return [] if (found[: len(wanted)] if names.endswith("...") else found) == wanted else [path, *found]

    return otherwise


def has(path: str, *names: str) -> Fact:
    return lambda: [name for name in names if not hasattr(get(path), name)]


def is_a(path: str, kind: type) -> Fact:
    return lambda: [] if isinstance(get(path), kind) else [path]


def equals(path: str, value: Any) -> Fact:
    return lambda: [] if get(path) == value else [path]


TRAIN = "ray.train.v2._internal"
TRAINER = "ray.train.v2.api.data_parallel_trainer.DataParallelTrainer"
FIXED = f"{TRAIN}.execution.scaling_policy.fixed.FixedScalingPolicy"
UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer"
MEGATRON, DDP = "megatron.core", "megatron.core.distributed"

ROWS: dict[str, tuple[Fact, ...]] = {
    "deepspeed.comm.comm.cdb": (
        says("deepspeed.comm.comm.init_distributed", "global cdb"), has("deepspeed.comm.comm", "cdb"),
    ),
    "deepspeed.runtime.pipe.p2p._grid": (
        says("deepspeed.runtime.pipe.p2p.init_process_groups", "global _groups, _grid", "_grid = grid"),
    ),
    "deepspeed.module_inject.layers.set_autotp_mode": (
        takes("deepspeed.module_inject.layers.set_autotp_mode", "training"),
        is_a("deepspeed.module_inject.layers.TensorParallel_Layer.tp_overlap_comm", bool),
    ),
    "deepspeed.zero.partition_parameters.shutdown_init_context": (
        takes("deepspeed.zero.partition_parameters.shutdown_init_context", ""),
    ),
    "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer": (
        takes(f"{UNFUSED}.refresh_fp32_params", "self"),
        says(f"{UNFUSED}.initialize_optimizer_states", "self.optimizer.step()"),
    ),
    "deepspeed.ops.__compatible_ops__": (
        says("deepspeed.comm.torch", "__compatible_ops__.get(builder.NAME, False)"),
        says("deepspeed.ops.op_builder.cpu.comm", "deepspeed_shm_comm"),
    ),
    "deepspeed.pipe.PipelineModule._partition_layers": (
        says("deepspeed.pipe.PipelineModule.__init__", *(
            f"self.{name}" for name in ("_layer_specs", "_topo", "forward_funcs", "global_rank")
        )),
        takes("deepspeed.pipe.PipelineModule._partition_layers", "self method"),
        takes("deepspeed.pipe.PipelineModule._set_bounds", "self start stop"),
        takes("deepspeed.pipe.PipelineModule.get_tied_weights_and_groups", "self"),
    ),
    "deepspeed.DeepSpeedEngine.enable_backward_allreduce": (
        says("deepspeed.DeepSpeedEngine", "self.enable_backward_allreduce = True", "def allreduce_gradients("),
        takes("deepspeed.DeepSpeedEngine.destroy", "self"),
        takes("deepspeed.DeepSpeedEngine.get_global_grad_norm", "self"),
    ),
    "deepspeed allreduce": (
        says("deepspeed.runtime.utils.is_model_parallel_parameter", "tensor_model_parallel"),
        says("deepspeed.moe.utils.is_moe_param", "allreduce"),
        # What ours replaces: a mean of norms over ranks that hold different experts.
        says("deepspeed.runtime.utils", "clip_grad_norm_"),
    ),
    "deepspeed.utils.logging.logger": (is_a("deepspeed.utils.logging.logger", logging.Logger),),
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": (
        says(f"{MEGATRON}.transformer.moe.moe_utils", "if te_general_gemm is not None"),
    ),
    "megatron.core.transformer.moe.moe_utils.MoEAuxLossAutoScaler": (
        has(f"{MEGATRON}.transformer.moe.moe_utils.MoEAuxLossAutoScaler", "main_loss_backward_scale"),
    ),
    "megatron.core.fusions.fused_bias_swiglu.weighted_bias_swiglu_impl": (
        takes(f"{MEGATRON}.fusions.fused_bias_swiglu.weighted_bias_swiglu_impl", "input bias weights ..."),
    ),
    "megatron.core.distributed.DistributedDataParallel.bucket_groups": (
        says(f"{DDP}.DistributedDataParallel", "self.bucket_groups", "self.expert_parallel_bucket_groups"),
        says(f"{DDP}.param_and_grad_buffer", "self.param_gather_handle"),
        takes(f"{DDP}.DistributedDataParallel", "... disable_bucketing"),
    ),
    "megatron.core.transformer.moe.moe_layer.MoELayer.token_dispatcher": (
        says(f"{MEGATRON}.transformer.moe.moe_layer.MoELayer", "self.token_dispatcher"),
    ),
    "megatron.core.optimizer.get_megatron_optimizer": (
        takes(f"{MEGATRON}.optimizer.get_megatron_optimizer", "... config_overrides use_gloo_process_groups"),
        takes(f"{MEGATRON}.optimizer.ChainedOptimizer", "chained_optimizers ..."),
        takes(f"{MEGATRON}.optimizer.optimizer.MixedPrecisionOptimizer", "... optimizer"),
    ),
    "megatron.core.transformer linear_qkv": (
        says(f"{MEGATRON}.transformer.attention", "self.linear_qkv", "self.linear_proj"),
        says(f"{MEGATRON}.transformer.mlp", "self.linear_fc1", "self.linear_fc2"),
        says(f"{MEGATRON}.models.gpt.gpt_model", "self.embedding", "self.decoder", "self.output_layer"),
    ),
    "megatron.core sequence_parallel": (
        says(f"{DDP}.finalize_model_grads", '"sequence_parallel", False'),
        says(f"{DDP}.distributed_data_parallel", "getattr(param, 'allreduce', True)"),
        says(f"{MEGATRON}.tensor_parallel.layers.param_is_not_tensor_parallel_duplicate", "tensor_model_parallel"),
    ),
    "transformer_engine.pytorch.module.base.initialize_ub": (
        takes("transformer_engine.pytorch.module.base.initialize_ub", "... shape tp_size use_fp8 bootstrap_backend"),
        takes("transformer_engine.pytorch.module.base.destroy_ub", ""),
    ),
    "torch.distributed.distributed_c10d._abort_process_group": (
        says("torch.distributed.distributed_c10d._abort_process_group", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    ),
    "torch._dynamo.config.recompile_limit": (
        is_a("torch._dynamo.config.recompile_limit", int),
        is_a("torch._dynamo.config.accumulated_recompile_limit", int),
        takes("torch._dynamo.reset", ""),
    ),
    "torch._inductor.async_compile.maybe_warm_pool": (
        takes("torch._inductor.async_compile.maybe_warm_pool", ""),
        says("torch._dynamo.backends.inductor.inductor", "maybe_warm_pool()"),  # torch calls it at the first graph
    ),
    "torch._inductor.config._micro_pipeline_tp": (equals("torch._inductor.config._micro_pipeline_tp", False),),
    "mlflow.store.db.utils._safe_initialize_tables": (
        takes("mlflow.store.db.utils._safe_initialize_tables", "engine"),
        takes("mlflow.store.db.utils.create_sqlalchemy_engine_with_retry", "db_uri"),
        equals("mlflow.store.db.utils._logger.name", "mlflow.store.db.utils"),
    ),
    "ray._private.services.get_node": (
        takes("ray._private.services.get_node", "gcs_address node_id"),
        # Looked up in the module at every turn, and RuntimeError is what says "not yet".
        says("ray._private.node.Node.__init__", "ray._private.services.get_node(", "except RuntimeError"),
        says("ray._private.node.Node.__init__", "raylet_start_wait_time_s = 30"),
    ),
    "ray.init _temp_dir": (
        says("ray._private.worker.init", '_temp_dir: Optional[str] = kwargs.pop("_temp_dir", None)'),
        says("ray._private.worker.init", "temp_dir=_temp_dir"),
    ),
    "ray._private.ray_constants.ENABLE_RAY_CLUSTER": (
        equals("ray._private.ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"),
        is_a("ray._private.ray_constants.ENABLE_RAY_CLUSTER", bool),
        says("ray._private.services", "if not ray_constants.ENABLE_RAY_CLUSTER:"),
    ),
    "ray.experimental.internal_kv._internal_kv_get": (
        is_a("ray._private.ray_constants.DASHBOARD_ADDRESS", str),
        has("ray._private.ray_constants", "KV_NAMESPACE_DASHBOARD"),
        takes("ray.experimental.internal_kv._internal_kv_get", "key namespace"),
        # By the module's name, and whatever it gives ends the wait: the address is decoded and kept.
        says("ray._private.services.start_api_server", "ray.experimental.internal_kv._internal_kv_get("),
        says("ray._private.services.start_api_server", "if dashboard_url is not None:"),
    ),
    "ray._private.state.state._connect_and_get_accessor": (
        has("ray._raylet.GlobalStateAccessor", "get_placement_group_table"),
        takes("ray._private.state.state._connect_and_get_accessor", ""),
        takes("ray._private.state.state.actor_table", "actor_id ..."),
        says("ray._private.state", '"ActorClassName"', '"State"'),
    ),
    "ray.train.v2.api.data_parallel_trainer.DataParallelTrainer._create_default_callbacks": (
        says(f"{TRAINER}.fit", "callbacks=self._create_default_callbacks()"),
        says(f"{TRAINER}._create_default_callbacks", "DatasetsCallback(", "PlacementGroupCleanerCallback("),
        says(
            f"{TRAIN}.callbacks.placement_group_callback.PlacementGroupCleanerCallback.after_controller_start",
            "(PlacementGroupCleaner)",
        ),
        says(f"{TRAIN}.callbacks.datasets.RayDatasetShardProvider", "ray.remote(DatasetManager)"),
        # Nothing but a dataset's reader asks the workers for what it would have given them.
        says(f"{TRAIN}.execution.worker_group.worker", "dataset_shard_provider: Optional["),
    ),
    "ray.train.v2._internal.execution.scaling_policy.FixedScalingPolicy": (
        says(f"{FIXED}.make_decision_for_non_running_worker_group", "self._maybe_send_resource_request()"),
        says(f"{FIXED}.make_decision_for_running_worker_group", "self._maybe_send_resource_request()"),
        # Without a client nothing is asked for, and so nothing is to be taken back.
        says(f"{FIXED}.after_controller_start", "TrainAutoscalingCoordinatorClient("),
        says(f"{FIXED}._cancel_resource_request", "if self._coordinator_client is None:\n            return"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_it_is_written_as_it_was(row: str) -> None:
    assert [otherwise for fact in ROWS[row] if (otherwise := fact())] == []

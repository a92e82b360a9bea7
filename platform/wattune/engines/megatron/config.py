"""A trial's specification in Megatron-Core's own words: plain values for its configuration, no Megatron here."""

from typing import Any, Final

import torch.nn.functional as F  # noqa: N812  (its usual name)

from wattune.engines.model.decoder import DTYPES, NORM_EPSILON
from wattune.engines.model.hyperparameters import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY
from wattune.engines.model.routing import AUXILIARY_LOSS_COEFFICIENT
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec

_NORMS: Final = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}

FP8_RECIPE: Final = "tensorwise"
"""TransformerEngine's scaling by the largest value of each tensor, found anew for every product, as by torchao."""


def uses_transformer_engine(spec: TrialSpec) -> bool:
    """Returns True where the cluster has TransformerEngine: layers are then its own, else Megatron's and ours."""
    return spec.cluster.transformer_engine


def transformer(spec: TrialSpec) -> dict[str, Any]:
    """Arguments of `TransformerConfig` for an effective specification that breaks no rule.

    What the torch engine does not do is off: dropout, approximations (the fused GELU is the tanh form), so that the two
    engines differ by how they work and not by what they compute.
    """
    model, plan = spec.model, spec.plan
    bf16, swiglu, engine = plan.held_dtype == "bf16", model.activation == "swiglu", uses_transformer_engine(spec)
    options: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.dense_ffn_hidden_size or model.ffn_hidden_size,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_size,
        "normalization": _NORMS[model.norm],
        "layernorm_epsilon": NORM_EPSILON,
        "gated_linear_unit": swiglu,
        "activation_func": F.silu if swiglu else F.gelu,
        "add_bias_linear": model.bias,
        "add_qkv_bias": model.has_bias("qkv"),
        "qk_layernorm": model.qk_norm == "head",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": bf16,
        "params_dtype": DTYPES[plan.held_dtype],
        "pipeline_dtype": DTYPES[plan.held_dtype],
        "perform_initialization": False,  # `megatron_weights` fills them
        **_degrees(plan),
        "sequence_parallel": plan.tp > 1,
        "pipeline_model_parallel_layout": layout(spec),
        "deallocate_pipeline_outputs": plan.pp > 1,
        # Interleaved stages have work to do while they send, others wait for what they send: as Megatron's own script.
        "overlap_p2p_comm": plan.vpp > 1,
        "batch_p2p_comm": plan.vpp == 1,
        "tp_comm_overlap": plan.overlap == "tp",
        # Megatron's fused kernels are graphs of torch.compile; those that want Apex or TransformerEngine are not asked.
        "bias_activation_fusion": swiglu and not (model.bias and model.is_moe),
        # TransformerEngine's experts give back no bias to fuse (`TEGroupedMLP` refuses).
        "bias_dropout_fusion": not (engine and model.bias and model.is_moe),
        "masked_softmax_fusion": False,
        "apply_rope_fusion": engine and model.positions == "rope",
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": bf16,  # its gradient is bf16, whatever the logits are
        "cross_entropy_fusion_impl": "te" if engine else "native",
    }
    if plan.recompute == "full":
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif plan.recompute == "selective":
        options |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if plan.dtype == "fp8":
        options |= {"fp8": "hybrid", "fp8_recipe": FP8_RECIPE}
    if model.is_moe:
        options |= _experts(spec)
    return options


def _experts(spec: TrialSpec) -> dict[str, Any]:
    """Experts, the layers that have them, and routing: no token is dropped but by capacity.

    Only a learned routing has an auxiliary loss, taken over sequences: see `auxiliary_loss` of the torch engine.
    """
    model, routing = spec.model, spec.workload.routing
    learns = routing is not None and routing.by == "learned"
    return {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.ffn_hidden_size,
        "moe_router_topk": model.num_experts_per_token,
        "moe_router_pre_softmax": model.router_scores == "all",
        "moe_router_score_function": "sigmoid" if model.router_scores == "sigmoid" else "softmax",
        "moe_router_topk_scaling_factor": None if model.router_scale == 1.0 else model.router_scale,
        "moe_layer_freq": [int(model.kind_of(layer).is_moe) for layer in range(model.num_layers)],
        "moe_shared_expert_intermediate_size": model.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": model.shared_expert_gate,
        "moe_router_load_balancing_type": "seq_aux_loss" if learns else "none",
        "moe_aux_loss_coeff": AUXILIARY_LOSS_COEFFICIENT if learns else 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": uses_transformer_engine(spec),
        "moe_permute_fusion": uses_transformer_engine(spec),
        "moe_expert_capacity_factor": model.expert_capacity_factor,
        "moe_token_drop_policy": "position",
    }


def layout(spec: TrialSpec) -> str | None:
    """The layers of every stage in Megatron's words: `E` embedding, `t` a layer, `L` head and loss, `|` between stages.

    Entry i is chunk i // pp of stage i % pp, which is the order of the plan's layout too
    (`transformer/pipeline_parallel_layer_layout.py`). None where stages are even: Megatron's own split.
    """
    plan = spec.plan
    if not plan.layout:
        return None
    stages = ["t" * size for size in plan.layout]
    return f"E{'|'.join(stages)}L"


def data_parallel(spec: TrialSpec) -> dict[str, Any]:
    """Arguments of `DistributedDataParallelConfig`; gradients are reduced in fp32, as by the torch engine."""
    plan = spec.plan
    return {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": plan.overlap in ("grad", "grad_param"),
        "overlap_param_gather": plan.overlap == "grad_param" and plan.sharding == "zero1",
        "use_distributed_optimizer": plan.sharding == "zero1",
        "num_distributed_optimizer_instances": plan.dp_replicate,
        "check_for_nan_in_grad": False,
    }


def optimizer(spec: TrialSpec) -> dict[str, Any]:
    """Arguments of `OptimizerConfig`: the torch engine's AdamW, at a constant rate."""
    bf16 = spec.plan.held_dtype == "bf16"
    return {
        "optimizer": "adam",
        "lr": LEARNING_RATE,
        "min_lr": LEARNING_RATE,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "weight_decay": WEIGHT_DECAY,
        "clip_grad": CLIP_NORM,
        "bf16": bf16,
        "params_dtype": DTYPES[spec.plan.held_dtype],
        "use_distributed_optimizer": spec.plan.sharding == "zero1",
        "overlap_param_gather": data_parallel(spec)["overlap_param_gather"],
    }


def model_parallel(spec: TrialSpec) -> dict[str, Any]:
    """Arguments of `parallel_state.initialize_model_parallel`; its default order of ranks is `plan.parallel`'s."""
    copies = {"num_distributed_optimizer_instances": spec.plan.dp_replicate}
    return {**_degrees(spec.plan), **copies, "create_gloo_process_groups": False}


def _degrees(plan: Plan) -> dict[str, int | None]:
    """Returns degrees of parallelism by the names that Megatron's model and its process groups share."""
    return {
        "tensor_model_parallel_size": plan.tp,
        "pipeline_model_parallel_size": plan.pp,
        "virtual_pipeline_model_parallel_size": plan.vpp if plan.vpp > 1 else None,
        "context_parallel_size": plan.cp,
        "expert_model_parallel_size": plan.ep,
        "expert_tensor_parallel_size": plan.etp,
    }

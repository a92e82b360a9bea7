"""A trial's specification in DeepSpeed's own words: the configuration `deepspeed.initialize` takes."""

from typing import Any, Final

from wattune.engines.model.hyperparameters import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY
from wattune.plans.parallel import num_micro_batches
from wattune.trial import TrialSpec

STAGES: Final = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}
"""ZeRO stage of every `sharding`."""

LARGEST_BUCKET: Final = 500_000_000
"""Numbers in one collective of gradients or weights: DeepSpeed's default, which it allocates whatever the model."""
LARGEST_PREFETCH: Final = 50_000_000
"""Numbers ZeRO-3 gathers ahead: DeepSpeed's default."""

COLUMNS: Final = r".*(attention\.[qkv]|ffn\.(gate|up))(\.base|\.lora_b)?\.weight$"
ROWS: Final = r".*(attention\.o|ffn\.down)(\.base|\.lora_a)?\.weight$"
"""The linear layers automatic tensor parallel splits, by output and by input; it knows no model but Hugging Face's. Of
adapters the half that meets what is split is split with it. Embedding, norms and head stay whole on every rank, as in
DeepSpeed's own preset for Llama."""


def configuration(spec: TrialSpec, num_parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a trial, whose specification is effective and breaks no rule.

    Gradients are reduced and, where DeepSpeed can, accumulated in fp32 as by the torch engine, so that the two differ
    by how they work and not by what they compute. No bucket need be larger than the whole model's parameters.
    """
    plan, model = spec.plan, spec.model
    stage, bf16, trains = STAGES[plan.sharding], plan.dtype == "bf16", spec.workload.mode != "prefill"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": num_micro_batches(
            plan, spec.cluster.world_size, spec.workload.global_batch_size
        ),
        # Without ZeRO the norm DeepSpeed clips by is another one where there are experts: see `deepspeed_norm`.
        "gradient_clipping": 0.0 if clips_outside(spec) else CLIP_NORM,
        # Prompts need no optimizer, and the one it makes for bf16 all the same wants experts to train.
        "bf16": {"enabled": bf16 and (trains or stage == 3)},
        "communication_data_type": "fp32",
        "zero_optimization": _zero(spec, stage, num_parameters),
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # it would wait for the device in every micro-batch
    }
    if trains:
        config["optimizer"] = {
            "type": "AdamW",
            "params": {
                "torch_adam": True,  # DeepSpeed's own is compiled on first use
                "fused": True,
                "lr": LEARNING_RATE,
                "betas": list(BETAS),
                "weight_decay": WEIGHT_DECAY,
            },
        }
    if bf16 and stage > 0:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if plan.tp > 1:
        specs = [{"patterns": [pattern], "partition_type": kind} for kind, pattern in _SPLITS.items()]
        config["tensor_parallel"] = {
            "autotp_size": plan.tp,
            "partition_config": {"use_default_specs": False, "layer_specs": specs},
        }
    if model.is_moe:
        config["expert_parallel"] = {
            "enabled": True,
            "autoep_size": plan.ep,
            "moe_layer_pattern": r"(.*\.)?ffn$",
            "router_pattern": "router",
            "expert_pattern": "experts",
            "expert_w1": "gate",
            "expert_w2": "down",
            "expert_w3": "up",
            # The routing of Mixtral (Jiang et al. 2024, arXiv 2401.04088, section 2.1), as in `torch_experts`.
            "top_k": model.num_experts_per_token,
            "score_func": "softmax",
            "score_apply": "post",
            "route_norm": True,
            "use_grouped_mm": spec.cluster.device != "cpu",
        }
    return config


_SPLITS: Final = {"column": COLUMNS, "row": ROWS}


def clips_outside(spec: TrialSpec) -> bool:
    """Returns True where its optimizer holds plain gradients: they are then clipped here and not by DeepSpeed."""
    return spec.plan.sharding == "none" and not (spec.plan.dtype == "bf16" and spec.plan.pp > 1)


def _zero(spec: TrialSpec, stage: int, num_parameters: int) -> dict[str, Any]:
    plan, model = spec.plan, spec.model
    bucket = min(LARGEST_BUCKET, num_parameters + num_parameters % 2)  # ZeRO 1 and 2 want an even number
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": plan.overlap in ("grad", "grad_param"),
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if stage == 3:
        zero |= {
            # What DeepSpeed gathers beside compute is what it prefetches; without that it gathers on demand.
            "stage3_prefetch_bucket_size": min(LARGEST_PREFETCH, num_parameters) if plan.overlap == "grad_param" else 0,
            # Norms and biases stay whole, all matrices are sharded, at any width.
            "stage3_param_persistence_threshold": max(model.hidden_size, model.ffn_hidden_size),
            # It would replace `torch.nn.functional.linear` for all that this process runs from then on.
            "memory_efficient_linear": False,
        }
    return zero

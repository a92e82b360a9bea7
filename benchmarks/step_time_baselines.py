"""Baselines beside which an error of a predicted step time means something."""

import numpy as np

from wattune.catalog.models import ModelSpec
from wattune.cost.flops import workload_flop_per_token
from wattune.cost.step_time.pipeline import bubble_ratio
from wattune.plans.axes import Plan
from wattune.plans.parallel import num_micro_batches
from wattune.trial import TrialSpec

PASSES = {"none": 3.0, "selective": 3.0, "full": 4.0}
"""Forward passes' worth of products in a step, by recomputation."""


def model_flop(spec: TrialSpec) -> float:
    """Counts model FLOPs of a step."""
    return spec.workload.tokens_per_step * workload_flop_per_token(spec.model, spec.workload)


def at_rate(spec: TrialSpec, flop_per_s: float) -> float:
    """Returns the step time at a constant achieved rate of every device: constant MFU."""
    return model_flop(spec) / (flop_per_s * spec.cluster.world_size)


def roofline_s(spec: TrialSpec, speedup: float = 1.0) -> float:
    """Returns the step time at the datasheet's peak, with what is computed again and the ideal bubble."""
    peak = spec.cluster.sensed_device.peak_flop_per_s(spec.plan.dtype)
    assert peak is not None
    count = num_micro_batches(spec.plan, spec.cluster.world_size, spec.workload.global_batch_size)
    again = PASSES[spec.plan.recompute] / 3.0
    return at_rate(spec, peak * speedup) * again * (1 + _bubble(spec.plan, count))


def calculon_s(spec: TrialSpec, speedup: float = 1.0) -> float:
    """Restates Calculon's equations with the efficiencies of its A100 system file.

    Isaev et al. 2023 (Calculon, SC23), repository calculon-ai/calculon at 4f81f02 (Apache-2.0), systems/a100_80g.json:
    compute and memory add up; matrix efficiency 0.95 above 128 GFLOP, 0.9 above 16, 0.6 above 1; memory 0.9; links 0.6,
    network 0.9 of the datasheet. Nothing overlaps. Attention is fused, unlike there.
    """
    model, plan, workload, cluster = spec.model, spec.plan, spec.workload, spec.cluster
    device = cluster.sensed_device
    peak, bandwidth, link = device.peak_flop_per_s(plan.dtype), device.memory_bandwidth_bytes_per_s, None
    link = device.link_bandwidth_bytes_per_s
    assert peak and bandwidth and link
    h, kv, f = model.hidden_size, model.num_kv_heads * model.head_size, model.ffn_hidden_size
    tokens = plan.micro_batch_size * workload.seq_len / plan.cp

    def product_s(m: float, n: float, k: float) -> float:
        flop = 2 * m * n * k
        efficiency = next(rate for least, rate in ((128e9, 0.95), (16e9, 0.9), (1e9, 0.6), (0, 0.1)) if flop >= least)
        return flop / (peak * speedup * efficiency) + 2 * (m * k + k * n + m * n) / (bandwidth * 0.9)

    experts = model.num_experts_per_token if model.is_moe else 1
    gated = 2 if model.activation == "swiglu" else 1
    forward_s = product_s(tokens, (h + 2 * kv) / plan.tp, h) + product_s(tokens, h, h / plan.tp)
    forward_s += experts * (product_s(tokens, gated * f / plan.tp, h) + product_s(tokens, h, f / plan.tp))
    forward_s += 2 * tokens * workload.seq_len * h / plan.tp / (peak * 0.9)
    moved = tokens * (16 * h + 3 * gated * f) / plan.tp
    layer_s = PASSES[plan.recompute] * (forward_s + 2 * moved / (bandwidth * 0.9))
    if plan.tp > 1:
        layer_s += PASSES[plan.recompute] * 4 * 2 * tokens * h * (plan.tp - 1) / plan.tp / (link * 0.6)
    head_s = 3 * product_s(tokens, model.vocab_size / plan.tp, h)
    count = num_micro_batches(plan, cluster.world_size, workload.global_batch_size)
    passes_s = count * (layer_s * model.num_layers + head_s) / plan.pp
    return passes_s * (1 + _bubble(plan, count)) + _replicas_s(spec, model, count, link)


def _replicas_s(spec: TrialSpec, model: ModelSpec, count: int, link: float) -> float:
    """Predicts gradients in fp32 and weights in bf16 of one rank over the slower of link and network."""
    plan, cluster = spec.plan, spec.cluster
    dp = plan.dp(cluster.world_size)
    if dp == 1:
        return 0.0
    held = model.num_parameters / (plan.tp * plan.pp * (plan.ep if model.is_moe else 1))
    each = count if plan.sharding in ("zero2", "zero3") else 1
    gathers = 2 * count if plan.sharding == "zero3" else 1
    rate = link * 0.6 if cluster.num_nodes == 1 else min(link * 0.6, 50e9 * 0.9 * max(1, 8 // plan.tp))
    return held * (4 * each + 2 * gathers) * (dp - 1) / dp / rate


def _bubble(plan: Plan, count: int) -> float:
    """Returns idle over busy time of its pipeline."""
    return float(bubble_ratio(plan.pp, plan.vpp, np.array(count)))

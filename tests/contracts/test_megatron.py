"""The Megatron engine keeps the contract: the losses and gradient norms of the torch engine on one device.

Megatron-Core runs on GPUs only. Here its own models, schedules, data parallelism and optimizers run over gloo, with
`megatron_shim.py` in place of devices: that proves the map of weights, what the configuration means, the phases, and
that nothing is left behind. Kernels that only GPUs have are held to the same on GPUs, by
`benchmarks/torch_engine_on_gpus.py --engine megatron`.
"""

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from contract_cases import contract

from wattune.catalog.hardware import ClusterSpec
from wattune.plans.rules import violations
from wattune.trial import TrialSpec

HERE = Path(__file__).parent


case, LLAMA, GPT, MIXTRAL, BIASED = contract.case, contract.LLAMA, contract.GPT, contract.MIXTRAL, contract.BIASED
GATED, ROOMY, lora, prefill = contract.GATED, contract.ROOMY, contract.lora, contract.prefill
routed = contract.routed
DEEP = replace(LLAMA, name="deep", num_layers=6)
QWEN = replace(contract.SHORT, name="qwen", head_dim=6, qk_norm="head", biased_parts="qkv", tied_embeddings=True)
"""Heads wider together than the model, normed queries and keys, biases of theirs alone, tied ends."""
SHARING = replace(
    MIXTRAL, name="sharing", num_layers=4, num_dense_layers=1, dense_ffn_hidden_size=64, shared_ffn_hidden_size=32
)
GLM = replace(SHARING, name="glm", head_dim=12, qk_norm="head", router_scores="sigmoid", router_scale=2.5)
QWEN_MOE = replace(SHARING, name="qwen-moe", layer_kinds="FFD", router_scores="all", shared_expert_gate=True)
"""Dense layers among mixtures, shared experts, and the other ways to weigh experts."""
ON_ONE = [case(QWEN, 1, micro_batch_size=8)]
MIXED = [case(model, 1, micro_batch_size=8) for model in (GLM, QWEN_MOE)]
REFERENCES = [*contract.REFERENCES, case(DEEP, 1, micro_batch_size=8), *ON_ONE, *map(lora, ON_ONE), *MIXED]
REFERENCES += [routed(MIXED[0], *contract.LEARNED), routed(MIXED[1], *contract.SKEWED)]
OVERLAPPED = {"sharding": "zero1", "overlap": "grad_param"}

IN_CI = {
    "selective": case(LLAMA, 1, micro_batch_size=2, recompute="selective"),
    "gpt-full": case(GPT, 1, micro_batch_size=4, recompute="full"),
    "biased": case(BIASED, 1, micro_batch_size=4),
    "gated": case(GATED, 1, micro_batch_size=4),
    "mixtral-capacity-bf16": case(ROOMY, 1, micro_batch_size=4, dtype="bf16"),
    "qwen": case(QWEN, 1, micro_batch_size=2, recompute="selective"),
    "qwen-tp2": case(QWEN, 2, tp=2, micro_batch_size=4),
    "lora-qwen-tp2": lora(case(QWEN, 2, tp=2, micro_batch_size=4)),
    "glm-tp2": case(GLM, 2, tp=2, micro_batch_size=4),
    "glm-learned-ep2": routed(case(GLM, 2, ep=2, micro_batch_size=2), *contract.LEARNED),
    "qwen-moe": case(QWEN_MOE, 1, micro_batch_size=4),
    "qwen-moe-skewed-pp2-uneven": routed(case(QWEN_MOE, 2, pp=2, micro_batch_size=2, layout=(3, 1)), *contract.SKEWED),
    "gpt-tp2": case(GPT, 2, tp=2, micro_batch_size=4),
    "odd-tp2": case(contract.ODD, 2, tp=2, micro_batch_size=4),
    "odd-tied-tp2-bf16": case(contract.ODD_TIED, 2, tp=2, micro_batch_size=2, dtype="bf16"),
    "dp2-zero1-overlap-grad_param": case(LLAMA, 2, micro_batch_size=2, **OVERLAPPED),
    "gpt-pp2": case(GPT, 2, pp=2, micro_batch_size=2),
    "pp2-vpp2-uneven": case(DEEP, 2, pp=2, vpp=2, micro_batch_size=2, layout=(1, 2, 2, 1)),
    "lora-full": lora(case(LLAMA, 1, micro_batch_size=2, recompute="full")),
    "lora-dp2-zero1": lora(case(LLAMA, 2, micro_batch_size=2, **OVERLAPPED)),
    "lora-gpt-pp2": lora(case(GPT, 2, pp=2, micro_batch_size=2), "q", "up"),
    "lora-ep2": lora(case(MIXTRAL, 2, ep=2, micro_batch_size=2), *contract.ATTENTION),
    "prefill-accumulation": prefill(case(LLAMA, 1, micro_batch_size=2)),
    "prefill-gpt-tp2": prefill(case(GPT, 2, tp=2, micro_batch_size=4)),
    "prefill-pp2-vpp2": prefill(case(LLAMA, 2, pp=2, vpp=2, micro_batch_size=2)),
    "balanced-capacity-tp2-etp1": routed(case(contract.TIGHT, 2, tp=2, etp=1, micro_batch_size=2), *contract.BALANCED),
    "skewed-ep2-tp2-etp1": routed(case(MIXTRAL, 2, ep=2, tp=2, etp=1, micro_batch_size=4), *contract.SKEWED),
    "learned-ep2-full": routed(case(MIXTRAL, 2, ep=2, micro_batch_size=2, recompute="full"), *contract.LEARNED),
}
"""Every axis once, where it meets the most of Megatron's code."""

SLOW = {
    "ep2": case(MIXTRAL, 2, ep=2, micro_batch_size=2),
    "ep2-tp2-etp1": case(MIXTRAL, 2, ep=2, tp=2, etp=1, micro_batch_size=4),
    "lora-tp2": lora(case(LLAMA, 2, tp=2, micro_batch_size=4)),
    "pp2-uneven": case(LLAMA, 2, pp=2, micro_batch_size=2, layout=(3, 1)),
    "learned-ep2-tp2-etp1": routed(case(MIXTRAL, 2, ep=2, tp=2, etp=1, micro_batch_size=4), *contract.LEARNED),
    "accumulation": case(LLAMA, 1, micro_batch_size=1),
    "bf16": case(LLAMA, 1, micro_batch_size=4, dtype="bf16"),
    "mixtral-bf16": case(MIXTRAL, 1, micro_batch_size=4, dtype="bf16"),
    "mixtral-full": case(MIXTRAL, 1, micro_batch_size=4, recompute="full"),
    "dp2-none-overlap-none": case(LLAMA, 2, micro_batch_size=2),
    "dp2-none-overlap-grad": case(LLAMA, 2, micro_batch_size=2, overlap="grad"),
    "dp2-zero1-overlap-none": case(LLAMA, 2, micro_batch_size=2, sharding="zero1"),
    "dp2-zero1-bf16": case(LLAMA, 2, micro_batch_size=2, dtype="bf16", **OVERLAPPED),
    "tp2": case(LLAMA, 2, tp=2, micro_batch_size=4),
    "gpt-tp2-bf16": case(GPT, 2, tp=2, micro_batch_size=2, dtype="bf16"),
    "pp2-full-bf16": case(LLAMA, 2, pp=2, micro_batch_size=2, recompute="full", dtype="bf16"),
    "gpt-pp2-vpp2": case(GPT, 2, pp=2, vpp=2, micro_batch_size=2),
    "mixtral-tp2": case(MIXTRAL, 2, tp=2, micro_batch_size=4),
    "mixtral-etp2": case(MIXTRAL, 2, tp=1, etp=2, micro_batch_size=4),
    "mixtral-tp2-etp1": case(MIXTRAL, 2, tp=2, etp=1, micro_batch_size=4),
    "biased-ep2": case(BIASED, 2, ep=2, micro_batch_size=4),
    "tp2-pp2": case(LLAMA, 4, tp=2, pp=2, micro_batch_size=2),
    "gpt-tp2-pp2-vpp2": case(GPT, 4, tp=2, pp=2, vpp=2, micro_batch_size=2),
    "tp4": case(LLAMA, 4, tp=4, micro_batch_size=8),
    "pp4": case(LLAMA, 4, pp=4, micro_batch_size=2),
    "tp2-dp2-zero1": case(LLAMA, 4, tp=2, micro_batch_size=4, **OVERLAPPED),
    "pp2-vpp2-dp2-zero1": case(LLAMA, 4, pp=2, vpp=2, **OVERLAPPED),
    "ep2-dp4-zero1": case(MIXTRAL, 4, ep=2, **OVERLAPPED),
    "hsdp2-dp4-zero1": case(LLAMA, 4, sharding="zero1", dp_replicate=2),
    "hsdp2-dp4-zero1-grad_param": case(LLAMA, 4, dp_replicate=2, **OVERLAPPED),
    "hsdp2-dp4-zero1-bf16": case(LLAMA, 4, dp_replicate=2, dtype="bf16", **OVERLAPPED),
    "hsdp2-ep2-dp4-zero1": case(MIXTRAL, 4, ep=2, dp_replicate=2, **OVERLAPPED),
    "hsdp2-lora-dp4-zero1": lora(case(LLAMA, 4, sharding="zero1", dp_replicate=2)),
    "ep4": case(MIXTRAL, 4, ep=4, micro_batch_size=2),
    "ep2-pp2": case(MIXTRAL, 4, ep=2, pp=2, micro_batch_size=2),
    "ep2-etp2": case(MIXTRAL, 4, tp=1, ep=2, etp=2, micro_batch_size=2),
    "ep2-tp2": case(MIXTRAL, 4, ep=2, tp=2, micro_batch_size=2),
    "ep2-tp2-dp2-zero1": case(MIXTRAL, 4, ep=2, tp=2, etp=1, micro_batch_size=2, sharding="zero1"),
    "lora-bf16": lora(case(LLAMA, 1, micro_batch_size=4, dtype="bf16")),
    "lora-gpt-tp2-full": lora(case(GPT, 2, tp=2, micro_batch_size=4, recompute="full"), "q", "up"),
    "lora-tp2-pp2": lora(case(LLAMA, 4, tp=2, pp=2, micro_batch_size=2)),
    "lora-tp2-dp2-zero1": lora(case(LLAMA, 4, tp=2, micro_batch_size=2, **OVERLAPPED)),
    "glm-ep2-tp2-etp1-zero1": case(GLM, 4, ep=2, tp=2, etp=1, micro_batch_size=2, sharding="zero1"),
    "qwen-moe-pp2-vpp2": case(QWEN_MOE, 2, pp=2, vpp=2, micro_batch_size=2),
    "qwen-moe-tp2-full-bf16": case(QWEN_MOE, 2, tp=2, micro_batch_size=4, recompute="full", dtype="bf16"),
    "qwen-pp2-dp2-zero1": case(QWEN, 4, pp=2, micro_batch_size=2, **OVERLAPPED),
    "qwen-tp2-full-bf16": case(QWEN, 2, tp=2, micro_batch_size=4, recompute="full", dtype="bf16"),
    "prefill-bf16": prefill(case(LLAMA, 1, micro_batch_size=2, dtype="bf16")),
    "prefill-dp2": prefill(case(LLAMA, 2, micro_batch_size=2)),
    "prefill-gpt-pp2": prefill(case(GPT, 2, pp=2, micro_batch_size=2)),
    "prefill-ep2": prefill(case(MIXTRAL, 2, ep=2, micro_batch_size=2)),
    "prefill-tp2-pp2": prefill(case(LLAMA, 4, tp=2, pp=2, micro_batch_size=2)),
    "balanced-bf16": routed(case(MIXTRAL, 1, micro_batch_size=4, dtype="bf16"), *contract.BALANCED),
    "balanced-ep2": routed(case(MIXTRAL, 2, ep=2, micro_batch_size=2), *contract.BALANCED),
    "learned-pp2": routed(case(MIXTRAL, 2, pp=2, micro_batch_size=2), *contract.LEARNED),
    "learned-lora-ep2": routed(
        lora(case(MIXTRAL, 2, ep=2, micro_batch_size=2), *contract.ATTENTION), *contract.LEARNED
    ),
    "skewed-prefill-ep2": routed(prefill(case(MIXTRAL, 2, ep=2, micro_batch_size=2)), *contract.SKEWED),
    "balanced-ep2-pp2": routed(case(MIXTRAL, 4, ep=2, pp=2, micro_batch_size=2), *contract.BALANCED),
    "learned-ep2-dp4-zero1": routed(case(MIXTRAL, 4, ep=2, **OVERLAPPED), *contract.LEARNED),
}

PARITY = IN_CI | SLOW
ON_GPUS = PARITY | {
    f"compiled-{name}": replace(PARITY[name], compiler="aot_eager")
    for name in ("selective", "gpt-full", "mixtral-capacity-bf16", "tp2-pp2", "gpt-tp2-pp2-vpp2", "ep2-tp2-dp2-zero1")
}
"""Cases for GPUs, with norms and attention compiled too."""
REFUSED = {
    "cp2": case(LLAMA, 2, cp=2),
    "overlap-tp": case(LLAMA, 2, tp=2, overlap="tp"),
    "zero2": case(LLAMA, 2, sharding="zero2"),
    "biased-etp2": case(BIASED, 2, tp=2, micro_batch_size=4),
}


def spec_of(each: Any) -> TrialSpec:
    """Megatron's rules know no processor, so the trial says a GPU."""
    spec: TrialSpec = each.spec("megatron")
    return replace(spec, cluster=ClusterSpec(device="h200_sxm", devices_per_node=each.world_size))


@cache
def outcomes_of(is_slow: bool, world_size: int) -> dict[str, list[dict[str, Any]]]:
    """Runs the cases of continuous integration, of all world sizes, or the rest of one; outcomes by case and rank."""
    cases = SLOW if is_slow else IN_CI | REFUSED
    specs = {name: (spec_of(each), None) for name, each in cases.items() if world_size in (0, each.world_size)}
    return contract.run_specs(specs, HERE / "megatron_worker.py")


@cache
def references(is_slow: bool) -> dict[str, list[dict[str, Any]]]:
    """The torch engine on one device."""
    needed = {each.reference for each in (SLOW if is_slow else IN_CI).values()}
    specs = {each.reference: (each.spec("torch"), None) for each in REFERENCES if each.reference in needed}
    return contract.run_specs(specs)


def reference(name: str) -> dict[str, Any]:
    return references(name in SLOW)[PARITY[name].reference][0]


def outcomes(name: str) -> list[dict[str, Any]]:
    is_slow = name in SLOW
    return outcomes_of(is_slow, SLOW[name].world_size if is_slow else 0)[name]


pytestmark = [
    # Looked for, not loaded: its ranks load it, and every process of tests collects this file.
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="megatron-core is not installed: pip install 'wattune[megatron]'",
    ),
    pytest.mark.timeout(2 * contract.GROUP_TIMEOUT_S + 20),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
each_case = pytest.mark.parametrize("name", [*IN_CI, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])


@each_case
def test_every_plan_trains_as_the_torch_engine_on_one_device(name: str) -> None:
    chosen = PARITY[name]
    contract.check_training(chosen, reference(name), outcomes(name))


ROUTED = {name for name, each in PARITY.items() if each.workload.routing is not None}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PARITY if name in ROUTED]
)
def test_every_plan_sends_experts_the_same_tokens(name: str) -> None:
    chosen = PARITY[name]
    contract.check_expert_tokens(chosen, reference(name), outcomes(name))


@each_case
def test_spans_nest_and_count_micro_batches(name: str) -> None:
    spec = spec_of(PARITY[name])
    contract.check_spans(spec, outcomes(name))
    if spec.plan.pp > 1:
        contract.check_waiting(outcomes(name))


@each_case
def test_a_chunk_goes_backward_after_it_went_forward(name: str) -> None:
    """The spans' numbers come from counting what Megatron calls, so they must be in its order."""
    for outcome in outcomes(name):
        starts = {(span[0], span[3], span[4]): span[1] for span in outcome["spans"]}
        for (phase, micro_batch, chunk), start_ns in starts.items():
            if phase == "backward":
                assert starts["forward", micro_batch, chunk] < start_ns


@each_case
def test_memory_is_measured_and_given_back(name: str) -> None:
    for outcome in outcomes(name):
        assert outcome["memory_peak_bytes"] > 0
        assert (outcome["tensors_left"], outcome["groups_left"]) == (0, 0)


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_it_cannot_run_is_refused_and_closes(name: str) -> None:
    (violation, *_) = violations(spec_of(REFUSED[name]))
    for outcome in outcomes(name):
        assert violation.reason in outcome["error"]
        assert (outcome["tensors_left"], outcome["groups_left"]) == (0, 0)

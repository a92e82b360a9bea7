"""Every plan of an engine does the same arithmetic: as many operations of each kind in each data type.

A plan that computed its head or its loss in another type, or a product twice, would be told apart from the others by
that and not by how it is laid out. Exceptions are named here, with what they cost.
"""

import importlib.util
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from contract_cases import contract

HERE = Path(__file__).parent


case, routed, LLAMA, GPT, MIXTRAL = contract.case, contract.routed, contract.LLAMA, contract.GPT, contract.MIXTRAL
BF16 = {"dtype": "bf16"}
PLANS = {
    "llama-1": case(LLAMA, 1, micro_batch_size=4, **BF16),
    "gpt-1": case(GPT, 1, micro_batch_size=4, **BF16),
    "mixtral-1": routed(case(MIXTRAL, 1, micro_batch_size=4, **BF16), "balanced"),
    "llama-dp2": case(LLAMA, 2, micro_batch_size=4, **BF16),
    "llama-tp2": case(LLAMA, 2, tp=2, micro_batch_size=4, **BF16),
    "llama-pp2": case(LLAMA, 2, pp=2, micro_batch_size=4, **BF16),
    "gpt-tp2": case(GPT, 2, tp=2, micro_batch_size=4, **BF16),
    "gpt-pp2": case(GPT, 2, pp=2, micro_batch_size=4, **BF16),
    "mixtral-ep2": routed(case(MIXTRAL, 2, ep=2, micro_batch_size=4, **BF16), "balanced"),
    "mixtral-tp2": routed(case(MIXTRAL, 2, tp=2, micro_batch_size=4, **BF16), "balanced"),
}
ENGINES = {
    "torch": list(PLANS),
    "deepspeed": [name for name in PLANS if name != "mixtral-tp2"],
    "megatron": list(PLANS),
}
TOKENS = contract.WORKLOAD.tokens_per_step


def extra(engine: str, name: str) -> int:
    """Operations a plan does beside those on one device: what every tensor parallel rank computes whole."""
    chosen = PLANS[name]
    model, tp = chosen.model, chosen.axes.get("tp", 1)
    product = 3 * 2 * TOKENS * model.hidden_size * (tp - 1)  # forward, and both gradients
    if engine == "torch" and model.is_moe:  # the router, of every token
        return product * model.num_experts * model.num_layers
    return product * model.vocab_size if engine == "deepspeed" else 0  # the head


@cache
def flops_of(engine: str) -> dict[str, Counter[str]]:
    """Operations by kind and data type of every plan, summed over its ranks."""
    if engine == "megatron" and importlib.util.find_spec("megatron") is None:  # its ranks load it, not this process
        pytest.skip("megatron-core is not installed")
    specs = {}
    for name in ENGINES[engine]:
        spec = PLANS[name].spec(engine)
        if engine == "megatron":
            cluster = replace(spec.cluster, device="h200_sxm")
            spec = replace(spec, cluster=cluster)
        specs[name] = spec, PLANS[name].compiler
    by_rank = contract.run_specs(specs, HERE / "products_worker.py")
    return {name: sum((Counter(one["flops"]) for one in ranks), Counter()) for name, ranks in by_rank.items()}


@pytest.mark.timeout(2 * contract.GROUP_TIMEOUT_S + 20)
@pytest.mark.parametrize(
    ("engine", "name"), [(engine, name) for engine, names in ENGINES.items() for name in names if name[-2:] != "-1"]
)
def test_every_plan_does_the_arithmetic_of_one_device(engine: str, name: str) -> None:
    alone = flops_of(engine)[f"{PLANS[name].model.name}-1"]
    wanted = alone + Counter({"product torch.bfloat16": extra(engine, name)})
    assert flops_of(engine)[name] == wanted


@pytest.mark.timeout(2 * contract.GROUP_TIMEOUT_S + 20)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["llama-1", "gpt-1", "mixtral-1"])
def test_products_are_those_of_the_model_in_the_training_type(engine: str, name: str) -> None:
    model = PLANS[name].model
    hidden, kv = model.hidden_size, model.num_kv_heads * model.head_size
    attention, wide = 2 * hidden * hidden + 2 * hidden * kv, 3 if model.activation == "swiglu" else 2
    experts = max(model.num_experts_per_token, 1)
    layer = attention + experts * wide * hidden * model.ffn_hidden_size + model.num_experts * hidden
    matrices = model.num_layers * layer + model.vocab_size * hidden
    flops = flops_of(engine)[name]
    assert flops["product torch.bfloat16"] == 3 * 2 * TOKENS * matrices  # forward, and both gradients
    assert {key.split()[1] for key in flops} == {"torch.bfloat16"}
    assert {key.split()[0] for key in flops} == {"product", "attention", "attention_backward"}

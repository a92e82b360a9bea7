"""Each rule: when it speaks, with which numbers and which remedy, and that it is quiet otherwise."""

from dataclasses import replace

import pytest
from specs import trial_spec

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import MODELS
from wattune.plans.engines import CAPABILITIES
from wattune.plans.rules import RULES, violations
from wattune.workload import Lora, Routing

DENSE, MOE, LEARNED = MODELS["llama3_70b"], MODELS["mixtral_8x7b"], MODELS["gpt3_175b"]
LATENT = replace(DENSE, kv_lora_rank=512, rope_head_dim=64)


def spec(model=DENSE, *, world=16, device="h200_sxm", seq_len=2048, batch=64, **more):
    return trial_spec(model, on=f"1x{world} {device}", seq_len=seq_len, batch=batch, **more)


def adapted(model=DENSE, *, rank=8, targets=("q", "v"), **plan):
    return spec(model, mode="lora", lora=Lora(rank=rank, targets=targets), **plan)


def with_transformer_engine(model=DENSE, **axes):
    plain = spec(model, engine="megatron", **axes)
    return replace(plain, cluster=replace(plain.cluster, transformer_engine=True))


IN_FP8 = [name for name, own in CAPABILITIES.items() if "fp8" in own.dtypes]

BROKEN = {
    "world_size": (spec(tp=3), "tp*pp*cp=3*1*1=3 does not divide world_size=16", "{1, 2, 4, 8, 16}"),
    "adapters": (adapted(rank=6, tp=4), "tp=4 does not divide lora.rank=6", "a multiple of tp"),
    "routing": (
        spec(routing=Routing(by="balanced")),
        "workload.routing=balanced sends tokens to experts",
        "leave it out",
    ),
    "forward_only": (spec(mode="prefill", pp=2, vpp=2), "vpp=2 orders forward and backward passes", "vpp=1"),
    "engine_device": (spec(engine="megatron", device="cpu"), "megatron does not run on cpu", "{nvidia, amd}"),
    "dtype": (
        spec(dtype="fp8", engine="deepspeed"),
        "dtype=fp8 does not run on h200_sxm with engine deepspeed",
        "torch",
    ),
    "engine_combination": (spec(cp=2), "engine torch cannot run cp=2", "use cp=1"),
    "heads": (spec(replace(DENSE, num_heads=6, num_kv_heads=2), tp=4), "tp=4 does not divide num_heads=6", "{1, 2, 3"),
    "kv_heads": (spec(tp=16), "tp=16 does not divide num_kv_heads=8 of llama3_70b", "use tp in {1, 2, 4, 8}"),
    "experts": (spec(MOE, ep=16), "ep=16 does not divide num_experts=8", "use ep in {1, 2, 4, 8}"),
    "expert_groups": (spec(MOE, ep=4, pp=8), "ep*etp=4*1=4 does not divide dp*cp*tp=2", "use ep in {1, 2}"),
    "expert_tensor_parallel": (spec(MOE, tp=2, etp=1), "etp=1 is not tp=2", "use etp=2"),
    "expert_layer": (spec(MOE, engine="deepspeed", tp=2, ep=2), "splits no expert over etp=2 ranks", "use etp=1"),
    "feed_forward": (spec(replace(DENSE, ffn_hidden_size=1001), tp=2), "does not divide ffn_hidden_size=1001", "{1, 7"),
    "expert_rows": (
        spec(replace(MOE, ffn_hidden_size=1004), dtype="bf16"),
        "ffn_hidden_size/etp=1004/1=1004 of mixtral_8x7b is not a multiple of 8",
        "smaller etp",
    ),
    "fp8_widths": (
        spec(replace(DENSE, ffn_hidden_size=28688), tp=2, dtype="fp8"),
        "ffn_hidden_size/tp=28688/2 of llama3_70b is not a multiple of 16",
        "use dtype=bf16, or a smaller tp",
    ),
    "fp8_tokens": (
        spec(seq_len=1025, dtype="fp8"),
        "micro_batch_size*seq_len=1*1025=1025 is not a multiple of 16",
        "another micro_batch_size or seq_len",
    ),
    "positions": (spec(LEARNED, seq_len=4096), "seq_len=4096 exceeds the max_positions=2048", "at most 2048"),
    "sequence": (spec(tp=2, seq_len=1025), "cp*tp=1*2=2 does not divide seq_len=1025", "multiple of 2"),
    "interleaving": (spec(vpp=2), "vpp=2 interleaves pipeline stages and pp=1 has none", "vpp=1"),
    "layout": (spec(pp=2, layout=(40, 41)), "layout=[40, 41] has 81 layers and llama3_70b has num_layers=80", "equal"),
    "layers": (spec(world=32, pp=32), "pp=32 does not divide num_layers=80", "use pp in {1, 2, 4, 5, 8, 10, 16, 20}"),
    "copies": (
        spec(MOE, ep=8, sharding="zero3", dp_replicate=4),
        "dp_replicate=4 does not divide dp*cp*tp/(ep*etp)=2",
        "use dp_replicate in {1, 2}, or a smaller ep",
    ),
    "batch": (
        spec(micro_batch_size=3),
        "micro_batch_size*dp=3*16=48 does not divide global_batch_size=64",
        "{1, 2, 4}",
    ),
    "micro_batches": (spec(pp=4, micro_batch_size=8), "2 micro-batches do not fill pp=4", "larger global_batch_size"),
    "loss_chunks": (
        spec(seq_len=1024, micro_batch_size=2, loss_chunks=3),
        "loss_chunks=3 does not divide the 2048 tokens of a micro-batch",
        "use loss_chunks in {1, 2, 4, 8",
    ),
    "device_settings": (spec(power_limit_w=701), "power_limit_w=701 is outside what h200_sxm takes", "200 to 700 W"),
    "rank_order": (spec(rank_order=(0, 1)), "lists 2 slots for world_size=16", "one slot a rank"),
}


def test_every_rule_has_a_case_here():
    assert set(BROKEN) == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_names_numbers_and_remedy(name):
    broken, numbers, remedy = BROKEN[name]
    found = {violation.rule: violation.reason for violation in violations(broken)}
    assert numbers in found[name]
    assert remedy in found[name].split(";")[-1]


@pytest.mark.parametrize("name", BROKEN)
def test_a_valid_configuration_breaks_no_rule(name):
    rule = next(rule for rule in RULES if rule.__name__ == name)
    for valid in (
        spec(),
        spec(tp=2, pp=2, vpp=2, micro_batch_size=4),
        spec(MOE, tp=2, ep=4, sharding="zero1"),
        spec(sharding="zero3", dp_replicate=4),
        spec(MOE, ep=8, sharding="zero3", dp_replicate=2),
        spec(LEARNED),
        spec(pp=2, layout=(39, 41), rank_order=tuple(reversed(range(16)))),
        spec(device="cpu", world=1, dtype="fp32"),
        spec(tp=2, dtype="fp8"),
        spec(mode="prefill", seq_len=1025, dtype="fp8"),  # without gradients of weights nothing sums over tokens
        spec(device="cpu", world=1, dtype="fp8"),
        spec(device="mi300x", dtype="fp8"),
        with_transformer_engine(tp=2, dtype="fp8"),
        adapted(tp=2, targets=("q", "k", "v", "o", "gate", "up", "down")),
        adapted(MOE, targets=("q", "k", "v", "o")),
        spec(mode="prefill", pp=2, micro_batch_size=2),
        spec(mode="prefill", pp=4, micro_batch_size=8),  # 2 prompts through 4 stages: GPipe's forward half takes any
        spec(pp=4, vpp=2, batch=24),  # 6 micro-batches in 1 round, as torch's interleaved schedule has it
        spec(engine="megatron", pp=4, vpp=2, batch=32),
        with_transformer_engine(cp=2, tp=2, seq_len=1028),
    ):
        assert rule(valid) is None
        assert list(violations(valid)) == []


@pytest.mark.parametrize(
    ("broken", "rule", "words"),
    [
        (
            spec(device="a100_sxm_80gb", dtype="fp8"),
            "dtype",
            (
                "dtype=fp8 does not run on a100_sxm_80gb with engine torch: no fp8 peak of a100_sxm_80gb is known; use "
                "{bf16, fp32}, or where your own device has one give its peak_fp8_flop_per_s"
            ),
        ),
        (
            spec(engine="deepspeed", dtype="fp8"),
            "dtype",
            (
                "dtype=fp8 does not run on h200_sxm with engine deepspeed, which has no linear layers in it; use "
                f"{{bf16, fp32}}, or engine in {{{', '.join(IN_FP8)}}}"
            ),
        ),
        (
            spec(engine="megatron", dtype="fp8"),
            "engine_combination",
            (
                "engine megatron cannot run dtype=fp8: its products in fp8 are TransformerEngine's; use dtype in "
                "{bf16, fp32} or a cluster with transformer_engine"
            ),
        ),
        (
            with_transformer_engine(MOE, dtype="fp8"),
            "engine_combination",
            (
                "engine megatron cannot run dtype=fp8 with the experts of mixtral_8x7b: the tokens that come for an "
                "expert are no multiple of 16, as its products in fp8 need; use dtype in {bf16, fp32}"
            ),
        ),
        (
            with_transformer_engine(replace(DENSE, ffn_hidden_size=28688), tp=2, dtype="fp8"),
            "fp8_widths",
            (
                "ffn_hidden_size/tp=28688/2 of llama3_70b is not a multiple of 16, as products in fp8 need it on every "
                "rank; use dtype=bf16, or a smaller tp"
            ),
        ),
        (
            spec(MOE, dtype="fp8"),
            "engine_combination",
            (
                "engine torch cannot run dtype=fp8 with the experts of mixtral_8x7b: torchao converts "
                "linear layers, and experts are grouped products; use dtype in {bf16, fp32}"
            ),
        ),
        (
            adapted(dtype="fp8"),
            "engine_combination",
            (
                "engine torch cannot run dtype=fp8 with mode=lora: torchao's layers compute gradients of frozen "
                "weights too; use dtype in {bf16, fp32}"
            ),
        ),
    ],
    ids=["A100", "deepspeed", "megatron", "megatron experts", "megatron widths", "experts", "lora"],
)
def test_fp8_is_refused_where_it_cannot_run_with_what_to_do(broken, rule, words):
    assert [(each.rule, each.reason) for each in violations(broken)] == [(rule, words)]


def test_fp8_on_a_processor_is_refused_where_the_simulated_device_has_none():
    plain = spec(device="cpu", world=2, dtype="fp8")
    for simulated, fits in (("h200_sxm", True), ("mi250_gcd", False)):
        broken = list(violations(replace(plain, cluster=replace(plain.cluster, simulate_sensors_of=simulated))))
        assert not broken if fits else "cpu simulating mi250_gcd with engine torch: no fp8 peak" in broken[0].reason


def test_degrees_beyond_the_world_are_judged_by_the_world_alone():
    assert [violation.rule for violation in violations(spec(MOE, tp=32, ep=64, micro_batch_size=7))] == ["world_size"]


def test_several_rules_can_be_broken_at_once():
    names = [violation.rule for violation in violations(spec(tp=16, vpp=2, micro_batch_size=3))]
    assert names == ["kv_heads", "interleaving", "batch"]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (spec(ep=2), "ep=2 splits experts and llama3_70b has none; use ep=1"),
        (spec(pp=2, layout=(80,)), "has 1 entries for pp*vpp=2*1; list 2"),
        (spec(pp=2, layout=(80, 0)), "leaves a stage empty"),
        (spec(pp=16, vpp=2), "pp*vpp=16*2=32 does not divide num_layers=80 of llama3_70b; use vpp in {1, 5} at pp=16"),
        (spec(replace(DENSE, num_layers=5), pp=2), "use pp in {1, 5}, or a layout such as [3, 2]"),
        (
            spec(replace(DENSE, num_layers=6), pp=2, vpp=2),
            "use vpp in {1, 3} at pp=2, or a layout such as [2, 2, 1, 1]",
        ),
        (
            replace(
                spec(rank_order=(1, 2, 3, 0)), cluster=ClusterSpec(device="h200_sxm", num_nodes=2, devices_per_node=2)
            ),
            "moves rank 1 from node 0 to node 1; reorder ranks inside a node only",
        ),
        (spec(MOE, routing=Routing(by="even")), "workload.routing=even is none of {balanced, skew, learned}"),
        (spec(MOE, routing=Routing(by="skew", skew=-1.0)), "workload.routing.skew=-1.0 is no exponent of Zipf's law"),
        (spec(mode="lora"), "mode=lora has no workload.lora; give its rank and targets"),
        (adapted(MOE, targets=("q", "up")), "lora targets {up} are inside experts of mixtral_8x7b"),
        (adapted(LATENT, targets=("q", "v")), "lora targets {v} are none of llama3_70b, whose attention is latent"),
        (adapted(LEARNED, targets=("gate",)), "lora target gate is none of gpt3_175b, whose activation is gelu"),
        (spec(batch=24), "use a global_batch_size that is a multiple of dp=16"),
        (
            spec(engine="megatron", pp=4, vpp=2, batch=24, micro_batch_size=1),
            "6 micro-batches are not a multiple of pp=4, which vpp=2 needs; use vpp=1",
        ),
        (spec(pp=2, vpp=2, batch=40), "5 micro-batches do not make 2 equal rounds of at least pp=2, which vpp=2 needs"),
        (
            with_transformer_engine(cp=2, seq_len=1026),
            "2*cp*tp=2*2*1=4 does not divide seq_len=1026; use degrees whose",
        ),
        (with_transformer_engine(cp=2, tp=2, seq_len=1026), "cp*tp=2*2=4 does not divide seq_len=1026"),
        (spec(MOE, engine="megatron", world=6, etp=4, batch=6), "use etp in {1, 2, 3, 6}"),
    ],
)
def test_other_ways_to_break_a_rule(broken, words):
    assert any(words in violation.reason for violation in violations(broken))


def test_long_lists_of_remedies_are_cut():
    reason = next(violations(spec(batch=720_720, micro_batch_size=17))).reason
    assert reason.endswith("...}") and len(reason) < 250


def test_copies_divide_the_data_parallel_ranks():
    (violation,) = violations(spec(tp=2, sharding="zero1", dp_replicate=3))
    assert violation.reason == "dp_replicate=3 does not divide dp=8; use dp_replicate in {1, 2, 4, 8}"


@pytest.mark.parametrize(("engine", "runs"), [("torch", True), ("megatron", False), ("deepspeed", False)])
def test_offloaded_activations_by_engine(engine, runs):
    found = [violation.reason for violation in violations(spec(engine=engine, offload="activations"))]
    assert len(found) == (0 if runs else 1)
    assert all("offload=activations" in reason and "use offload in {none}" in reason for reason in found)


@pytest.mark.parametrize(("engine", "sharding", "runs"), [("megatron", "zero1", True), ("deepspeed", "zero3", False)])
def test_hybrid_sharding_by_engine(engine, sharding, runs):
    found = violations(spec(engine=engine, sharding=sharding, dp_replicate=2))
    assert [violation.rule for violation in found] == ([] if runs else ["engine_combination"])

"""Limits of engines: what they refuse, and what lifts a limit."""

import re
from dataclasses import replace

import pytest
from specs import trial_spec

from wattune.catalog.hardware import DEVICES
from wattune.catalog.models import FEATURES, MODELS
from wattune.errors import PlanError
from wattune.plans.axes import AXES
from wattune.plans.effective import effective
from wattune.plans.engines import CAPABILITIES, capabilities
from wattune.plans.parallel import padding_of
from wattune.plans.rules import violations
from wattune.workload import Lora, Workload

DENSE, MOE = MODELS["llama3_8b"], MODELS["mixtral_8x7b"]


def spec(model=DENSE, *, world=8, **more):
    return trial_spec(model, on=f"1x{world} h200_sxm", batch=64, **more)


def test_an_engine_is_found_by_its_name():
    assert capabilities("megatron") is CAPABILITIES["megatron"]
    with pytest.raises(PlanError, match='unknown engine "tortch"; did you mean "torch"'):
        capabilities("tortch")


def test_the_table_speaks_of_things_that_exist():
    for engine in CAPABILITIES.values():
        assert set(engine.vendors) <= {device.vendor for device in DEVICES.values()}
        assert set(engine.dtypes) <= set(AXES["dtype"].choices)
        assert engine.trains <= FEATURES.keys()
        for exclusion in engine.exclusions:
            for axis, values in exclusion.setting.items():
                assert AXES[axis].kind == "count" or set(values) <= set(AXES[axis].choices)


@pytest.mark.parametrize(
    ("engine", "plan", "words"),
    [
        ("torch", {"overlap": "tp", "tp": 2}, "overlap=tp"),
        ("megatron", {"sharding": "zero3"}, "use sharding in {none, zero1}"),
        ("deepspeed", {"pp": 2, "sharding": "zero2"}, "pp=2 with sharding=zero2"),
        ("deepspeed", {"pp": 2, "tp": 2}, "use pp=1 or tp=1"),
        ("deepspeed", {"vpp": 2, "pp": 2}, "one chunk a stage"),
        ("deepspeed", {"cp": 2}, "context parallel"),
        (
            "deepspeed",
            {"tp": 2, "ep": 2, "etp": 1, "sharding": "zero2"},
            "use tp=1 or ep=1 or sharding in {none, zero3}",
        ),
        ("deepspeed", {"tp": 2, "overlap": "tp"}, "use overlap in {none, grad, grad_param}"),
    ],
)
def test_an_engine_refuses_what_it_cannot_combine(engine, plan, words):
    found = list(violations(spec(MOE if "ep" in plan else DENSE, engine=engine, **plan)))
    assert [violation.rule for violation in found] == ["engine_combination"]
    assert words in found[0].reason


def test_transformer_engine_lifts_what_needs_it():
    without = next(violations(spec(engine="megatron", cp=2)))
    assert "a cluster with transformer_engine" in without.reason
    assert list(violations(spec(engine="megatron", cp=2, transformer_engine=True))) == []


def test_transformer_engine_lifts_overlapped_tensor_parallel():
    plan = {"tp": 2, "overlap": "tp"}
    (without,) = violations(spec(engine="megatron", **plan))
    assert "use overlap in {none, grad, grad_param} or a cluster with transformer_engine" in without.reason
    assert list(violations(spec(engine="megatron", transformer_engine=True, **plan))) == []


def in_mode(written, mode):
    lora = Lora(rank=4) if mode == "lora" else None
    return replace(written, workload=replace(written.workload, mode=mode, lora=lora))


def test_megatron_takes_adapters_beside_its_local_layers_only():
    assert list(violations(in_mode(spec(engine="megatron", tp=2), "lora"))) == []
    (found,) = violations(in_mode(spec(engine="megatron", tp=2, transformer_engine=True), "lora"))
    assert found.reason == (
        "engine megatron cannot run mode=lora with transformer_engine: adapters stand beside its own linear layers, "
        "and TransformerEngine's hold a norm too; use a cluster without transformer_engine"
    )


def test_megatron_interleaves_prompts_and_leaves_their_sequences_whole():
    assert list(violations(in_mode(spec(engine="megatron", pp=2, vpp=2), "prefill"))) == []
    assert [v.rule for v in violations(in_mode(spec(pp=2, vpp=2), "prefill"))] == ["forward_only"]
    (found,) = violations(in_mode(spec(engine="megatron", cp=2, transformer_engine=True), "prefill"))
    assert "cp=2 with mode=prefill: of a prompt only the last token is judged" in found.reason


def test_megatron_splits_experts_without_biases_only():
    biased = replace(MOE, bias=True, activation="gelu")
    (found,) = violations(spec(biased, engine="megatron", tp=2))
    assert (found.rule, "use etp=1" in found.reason) == ("expert_layer", True)
    assert list(violations(spec(biased, engine="megatron", tp=2, etp=1, ep=2))) == []
    assert list(violations(spec(biased, tp=2))) == []  # the torch engine does


def test_megatron_routes_a_token_to_two_experts_or_more():
    single = replace(MOE, num_experts_per_token=1)
    (found,) = violations(spec(single, engine="megatron"))
    assert (found.rule, "has num_experts_per_token=1; use 2" in found.reason) == ("expert_layer", True)
    assert list(violations(spec(single))) == []  # the torch engine does


def test_experts_may_be_split_otherwise_where_the_engine_can():
    assert [v.rule for v in violations(spec(MOE, tp=2, etp=1))] == ["expert_tensor_parallel"]
    assert list(violations(spec(MOE, tp=2, etp=1, engine="megatron"))) == []


@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        (replace(MOE, activation="gelu"), {}, "activation=gelu, bias=false; use SwiGLU experts without bias"),
        (replace(MOE, bias=True), {}, "bias=true"),
        (replace(MOE, expert_capacity_factor=1.25), {}, "drops no tokens .* expert_capacity_factor=1.25"),
        (MOE, {"tp": 2, "ep": 2}, "splits no expert over etp=2 ranks; use etp=1"),
        (MOE, {"tp": 2, "etp": 1}, "with tp=2 it needs ep of at least 2, and ep=1"),
    ],
)
def test_deepspeed_takes_the_experts_its_layer_is_made_for(model, plan, words):
    found = list(violations(spec(model, engine="deepspeed", **plan)))
    assert [violation.rule for violation in found] == ["expert_layer"]
    assert re.search(words, found[0].reason)
    assert list(violations(spec(model, ep=2, tp=2, etp=2))) == []  # the torch engine runs them


def test_deepspeed_splits_experts_under_every_sharding_and_beside_tensor_parallel():
    for plan in ({"sharding": "zero3", "ep": 4}, {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2, "ep": 2, "sharding": "zero1"}):
        assert list(violations(spec(MOE, engine="deepspeed", **plan))) == []


def test_deepspeed_splits_neither_vocabulary_nor_sequence():
    odd = replace(DENSE, vocab_size=50257)
    written = replace(spec(odd, engine="deepspeed", tp=2), workload=Workload(seq_len=4095, global_batch_size=64))
    assert list(violations(written)) == []
    assert padding_of(written) == 0
    other = replace(written, engine="torch")
    assert [v.rule for v in violations(other)] == ["sequence"]
    assert padding_of(other) == 50432 - 50257


@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        (MOE, {"sharding": "zero1"}, "sharding=zero1 with mode=lora with the experts of mixtral_8x7b"),
        (MOE, {"pp": 2}, "pp=2 with dtype=bf16 with mode=lora with the experts of mixtral_8x7b"),
        (MOE, {"sharding": "zero3"}, ""),
        (MOE, {"pp": 2, "dtype": "fp32"}, ""),
        (DENSE, {"sharding": "zero2"}, ""),
        (DENSE, {"tp": 8, "sharding": "none"}, ""),  # it leaves the rank of adapters whole
    ],
)
def test_deepspeed_takes_adapters_beside_frozen_experts_where_it_needs_none_to_train(model, plan, words):
    written = spec(model, engine="deepspeed", **plan)
    lora = replace(written, workload=replace(written.workload, mode="lora", lora=Lora(rank=3)))
    assert [v.rule for v in violations(lora)] == ["engine_combination"] * bool(words)
    assert words in "".join(v.reason for v in violations(lora))
    assert list(violations(replace(written, plan=effective(written)[0]))) == []

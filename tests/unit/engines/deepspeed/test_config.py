"""A trial in DeepSpeed's words."""

import re
from dataclasses import replace

import pytest
from specs import trial_spec
from tiny_models import LLAMA, MIXTRAL

from wattune.catalog.models import ModelSpec
from wattune.engines.deepspeed.config import COLUMNS, ROWS, clips_outside, configuration
from wattune.engines.model.hyperparameters import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY
from wattune.trial import TrialSpec


def spec(model: ModelSpec = LLAMA, *, world: int = 1, **axes: object) -> TrialSpec:
    return trial_spec(model, on=f"1x{world} cpu", engine="deepspeed", seq_len=8, batch=4, **({"dtype": "fp32"} | axes))


def test_what_the_configuration_says() -> None:
    config = configuration(spec(world=4, sharding="zero3", overlap="grad", dtype="bf16"), num_parameters=1_000)
    assert config["gradient_accumulation_steps"] == 1
    assert config["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 1_000,
        "allgather_bucket_size": 1_000,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 24,
        "memory_efficient_linear": False,
    }
    assert config["optimizer"]["params"]["torch_adam"]
    assert config["bf16"] == {"enabled": True} and config["data_types"] == {"grad_accum_dtype": "fp32"}
    ahead = configuration(spec(world=4, sharding="zero3", overlap="grad_param"), num_parameters=1_000)
    assert ahead["zero_optimization"]["stage3_prefetch_bucket_size"] == 1_000

    split = configuration(spec(world=2, tp=2), num_parameters=1_000)["tensor_parallel"]
    assert split["autotp_size"] == 2
    assert [each["patterns"] for each in split["partition_config"]["layer_specs"]] == [[COLUMNS], [ROWS]]
    column, row = re.compile(COLUMNS), re.compile(ROWS)
    for name, splits in (
        ("decoder.layers.3.attention.q.weight", (True, False)),
        ("decoder.layers.3.attention.q.base.weight", (True, False)),
        ("decoder.layers.3.attention.q.lora_a.weight", (False, False)),  # it meets what is whole
        ("decoder.layers.3.attention.q.lora_b.weight", (True, False)),
        ("decoder.layers.3.ffn.down.lora_a.weight", (False, True)),
        ("decoder.layers.3.ffn.down.lora_b.weight", (False, False)),
        ("decoder.layers.3.ffn.experts.down", (False, False)),
        ("decoder.head.output.weight", (False, False)),
    ):
        assert (bool(column.match(name)), bool(row.match(name))) == splits, name
    prompt = spec()
    prompt = replace(prompt, workload=replace(prompt.workload, mode="prefill"))
    assert "optimizer" not in configuration(prompt, num_parameters=1_000)
    experts = configuration(spec(MIXTRAL, world=2, ep=2), num_parameters=1_000)["expert_parallel"]
    assert (experts["autoep_size"], experts["top_k"], experts["use_grouped_mm"]) == (2, 2, False)


def test_the_optimizer_is_the_torch_engines() -> None:
    optimizer = configuration(spec(), num_parameters=1_000)["optimizer"]
    assert optimizer["type"] == "AdamW"
    assert optimizer["params"] == {
        "torch_adam": True,
        "fused": True,
        "lr": LEARNING_RATE,
        "betas": list(BETAS),
        "weight_decay": WEIGHT_DECAY,
    }


@pytest.mark.parametrize(
    ("axes", "outside"),
    [({}, True), ({"sharding": "zero1"}, False), ({"pp": 2}, True), ({"pp": 2, "dtype": "bf16"}, False)],
)
def test_gradients_are_clipped_once(axes: dict[str, object], outside: bool) -> None:
    each = spec(world=2, **axes)
    assert clips_outside(each) == outside
    assert configuration(each, num_parameters=1_000)["gradient_clipping"] == (0.0 if outside else CLIP_NORM)


def test_no_bucket_is_larger_than_the_model_nor_odd() -> None:
    for number, bucket in ((1_000, 1_000), (1_001, 1_002), (10**12, 500_000_000)):
        zero = configuration(spec(world=2, sharding="zero2"), num_parameters=number)["zero_optimization"]
        assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == bucket

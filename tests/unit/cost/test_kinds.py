"""Kinds of layers in estimates: parameters, work and memory of each as it is, and none for a plain decoder."""

from dataclasses import replace

import pytest
from specs import trial_spec

from wattune.catalog.models import MODELS, ModelSpec
from wattune.cost.batch import batches
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.cost.flops import attended, forward_flop_per_token
from wattune.cost.memory.shapes import shapes
from wattune.trial import TrialSpec

LLAMA = MODELS["llama3_8b"]
MIXTURE = MODELS["mixtral_8x7b"]
SEQ_LEN = 8192
VARIANTS: dict[str, ModelSpec] = {
    "head_dim": replace(LLAMA, head_dim=256),
    "qk_norm": replace(LLAMA, qk_norm="width"),
    "biases": replace(LLAMA, biased_parts="qkv o ffn head"),
    "norms": replace(LLAMA, norm_place="both"),
    "shared": replace(MIXTURE, shared_ffn_hidden_size=14336, shared_expert_gate=True),
    "dense": replace(MIXTURE, num_dense_layers=3, dense_ffn_hidden_size=28672),
    "latent": replace(
        LLAMA, num_kv_heads=32, head_dim=192, value_head_dim=128, rope_head_dim=64, kv_lora_rank=512, q_lora_rank=1536
    ),
    "hybrid": replace(
        LLAMA,
        layer_kinds="mdfd",
        ssm_num_heads=128,
        ssm_head_dim=64,
        ssm_state_size=128,
        ssm_num_groups=8,
        ssm_conv_size=4,
    ),
    "multi_token": replace(LLAMA, num_mtp_layers=1),
    "windows": replace(LLAMA, layer_kinds="SF", sliding_window=512),
}


def spec(model: ModelSpec, **axes: object) -> TrialSpec:
    return trial_spec(model, on="1x8 h200_sxm", seq_len=SEQ_LEN, batch=8, engine="torch", **axes)


def figures(model: ModelSpec, **axes: object) -> dict[str, float]:
    found = estimate([spec(model, **axes)], default_coefficients)
    return {name: float(found.columns[name].value[0]) for name in ("step_time_s", "memory_peak_bytes")}


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_of_a_rank_are_the_models_parameters(name: str) -> None:
    """Memory counts them by another way than `num_parameters`: matrix by matrix, cut over ranks."""
    model = VARIANTS[name]
    ((_, batch),) = batches([spec(model)])
    sizes = shapes(batch, splits_ends=True, rounds_of_pp=True)
    # A multi-token head counts as a layer and without its projection and norms, which are 0.4 % of this model.
    assert sum(sizes.total).item(0) == pytest.approx(model.num_parameters, rel=5e-3 if name == "multi_token" else 1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_work_follows_from_the_matrices_that_a_token_meets(name: str) -> None:
    """Without attention, work is 2 a weight: all but embedding, norms, biases, and what is in no matrix of Mamba2."""
    model = VARIANTS[name]
    short = forward_flop_per_token(model, 1)
    weights = model.num_active_parameters - model.embedding_parameters
    weights += model.num_mtp_layers * model.hidden_size * model.vocab_size  # its output is another product
    assert short / 2 == pytest.approx(weights, rel=4e-3)


def test_a_window_takes_attention_and_nothing_else() -> None:
    full, half, narrow = LLAMA, VARIANTS["windows"], replace(LLAMA, sliding_window=512)
    flop = [forward_flop_per_token(one, SEQ_LEN) for one in (full, half, narrow)]
    assert flop[0] > flop[1] > flop[2] and flop[0] - flop[1] == pytest.approx(flop[1] - flop[2])
    per_layer = 4 * LLAMA.hidden_size * (SEQ_LEN / 2 - (512 - 512**2 / (2 * SEQ_LEN)))
    assert flop[0] - flop[2] == pytest.approx(LLAMA.num_layers * per_layer)
    assert replace(LLAMA, sliding_window=SEQ_LEN).num_parameters == full.num_parameters
    assert attended(replace(LLAMA, sliding_window=2 * SEQ_LEN), SEQ_LEN) == SEQ_LEN / 2
    steps = [figures(one)["step_time_s"] for one in (full, half, narrow)]
    assert steps[0] > steps[1] > steps[2]


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("windows", "hybrid", "dense")])
def test_more_parameters_take_more_memory_and_time(name: str) -> None:
    plain = MIXTURE if VARIANTS[name].is_moe else LLAMA
    mine, theirs = figures(VARIANTS[name], sharding="zero3"), figures(plain, sharding="zero3")
    assert all(mine[figure] > theirs[figure] for figure in mine)


def test_a_pattern_is_the_mean_of_its_kinds() -> None:
    one = {name: figures(replace(LLAMA, layer_kinds=name, sliding_window=512))["step_time_s"] for name in ("S", "F")}
    both = figures(VARIANTS["windows"])["step_time_s"]
    assert both == pytest.approx((one["S"] + one["F"]) / 2, rel=1e-3)


def test_layers_that_are_all_dense_are_a_dense_model() -> None:
    dense = replace(MIXTURE, num_experts=0, num_experts_per_token=0)
    every = replace(MIXTURE, layer_kinds="D")
    assert every.kinds[0][0].num_experts == 0
    assert (every.num_parameters, forward_flop_per_token(every, 64)) == (
        dense.num_parameters,
        forward_flop_per_token(dense, 64),
    )


def test_the_first_layers_are_dense_and_the_pattern_is_cut_at_the_end() -> None:
    kinds = VARIANTS["dense"].kinds
    assert [(kind.num_experts, count) for kind, count in kinds] == [(0, 3), (8, 29)]
    gemma = replace(LLAMA, num_layers=62, layer_kinds="SSSSSF", sliding_window=1024)
    assert [(kind.sliding_window, count) for kind, count in gemma.kinds] == [(1024, 52), (0, 10)]

"""Models read from `config.json`: shapes, notes of what changes no count, and what would be counted wrong refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wattune.catalog.huggingface import read_config
from wattune.catalog.models import MODELS, ModelSpec
from wattune.errors import PlanError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rope_theta": 1e6,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "vocab_size": 32000,
}
QWEN2 = LLAMA | {
    "model_type": "qwen2",
    "intermediate_size": 29568,
    "rope_theta": 1e6,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3 = LLAMA | {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "rope_theta": 1e6,
    "vocab_size": 151936,
}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}
NEOX: dict[str, Any] = {
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "model_type": "gpt_neox",
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "rotary_pct": 0.25,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
NOISE = ["attn_pdrop", "embd_pdrop", "resid_pdrop"]


def read(tmp_path: Path, config: Any, *leave_out: str) -> ModelSpec:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return read_config(path, "own", leave_out)


def shape(spec: ModelSpec) -> tuple[Any, ...]:
    return tuple(getattr(spec, name) for name in ModelSpec.__dataclass_fields__ if name not in ("name", "source"))


@pytest.mark.parametrize(
    ("config", "leave_out", "name"),
    [
        (LLAMA, [], "llama3_70b"),
        (LLAMA | {"model_type": "mistral", "sliding_window": None}, [], "llama3_70b"),
        (MIXTRAL, [], "mixtral_8x7b"),
        (QWEN2, ["qkv_bias"], "qwen2_5_72b_like"),
        (QWEN3, ["qk_norm"], "qwen3_8b_like"),
        (LLAMA | {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0}}, [], "llama3_70b"),
    ],
    ids=["llama", "mistral", "mixtral", "qwen2", "qwen3", "transformers-5"],
)
def test_a_released_configuration_is_the_catalogs_model(tmp_path, config, leave_out, name):
    assert shape(read(tmp_path, config, *leave_out)) == shape(MODELS[name])


def test_experts_have_their_own_width(tmp_path):
    spec = read(tmp_path, QWEN3_MOE)
    assert (spec.ffn_hidden_size, spec.num_experts, spec.num_experts_per_token) == (768, 128, 8)


@pytest.mark.parametrize(
    ("config", "notes"),
    [
        (GPT2, NOISE),
        (NEOX, ["rotary_pct", "use_parallel_residual"]),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling"]),
        (LLAMA | {"rope_theta": None, "rope_parameters": {"rope_type": "yarn"}}, ["rope_parameters"]),
        (LLAMA | {"attention_dropout": 0.1}, ["attention_dropout"]),
        (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        (LLAMA | {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        (GPT2 | {"scale_attn_weights": False}, [*NOISE, "scale_attn_weights"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_changes_no_count_is_read_and_noted(tmp_path, config, notes):
    found = read(tmp_path, config)
    _, _, noted = found.source.partition("; not trained: ")
    assert sorted(filter(None, noted.split(", "))) == sorted(notes)
    assert shape(read(tmp_path, config, *notes)) == shape(found)


@pytest.mark.parametrize(
    ("config", "fields", "word", "without"),
    [
        (QWEN2, {"biased_parts": "qkv"}, "qkv_bias", {"biased_parts": ""}),
        (QWEN3, {"qk_norm": "head"}, "qk_norm", {"qk_norm": "none"}),
        (LLAMA | {"attention_bias": True}, {"biased_parts": "qkv o"}, "qkv_bias", {"biased_parts": ""}),
        (
            {"model_type": "gpt_oss"},
            {"biased_parts": "qkv o ffn router"},
            "qkv_bias",
            {"biased_parts": "ffn router"},
        ),
        (
            LLAMA | {"model_type": "mistral", "sliding_window": 4096},
            {"sliding_window": 4096, "layer_kinds": ""},
            "sliding_window",
            {"sliding_window": 0},
        ),
        (
            QWEN2 | {"use_sliding_window": True, "max_window_layers": 78},
            {"sliding_window": 131072, "layer_kinds": "F" * 78 + "SS"},
            "sliding_window",
            {"sliding_window": 0, "layer_kinds": ""},
        ),
        (
            QWEN3_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 5632},
            {"shared_ffn_hidden_size": 5632, "shared_expert_gate": True, "biased_parts": "qkv"},
            "shared_expert",
            {"shared_ffn_hidden_size": 0, "shared_expert_gate": False},
        ),
    ],
    ids=["qkv_bias", "qk_norm", "attention_bias", "attention_alone", "window", "windows", "shared_expert"],
)
def test_a_feature_is_a_field_and_can_be_left_out_by_its_word(tmp_path, config, fields, word, without):
    spec = read(tmp_path, config)
    assert {name: getattr(spec, name) for name in fields} == fields
    assert read(tmp_path, config, word) == replace(spec, **without)


def test_both_biases_of_a_llama_are_all_biases(tmp_path):
    assert read(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True}).bias is True
    assert read(tmp_path, LLAMA | {"mlp_bias": True}).biased_parts == "ffn"


def test_keys_that_are_left_out_have_the_types_own_defaults(tmp_path):
    kept = {"model_type": "mistral", "hidden_size": 2048, "num_attention_heads": 16, "sliding_window": None}
    spec = read(tmp_path, kept)
    assert (spec.num_kv_heads, spec.num_layers, spec.ffn_hidden_size, spec.sliding_window) == (8, 32, 14336, 0)
    assert read(tmp_path, kept | {"num_key_value_heads": None}).num_kv_heads == 16
    assert read(tmp_path, {"model_type": "mistral"}).sliding_window == 4096
    assert read(tmp_path, {"model_type": "gemma"}).tied_embeddings
    assert read(tmp_path, {"model_type": "qwen2"}).num_kv_heads == 32


def test_heads_wider_than_the_model_are_read(tmp_path):
    spec = read(tmp_path, LLAMA | {"hidden_size": 5120, "num_attention_heads": 32, "head_dim": 128})
    assert (spec.head_size, spec.query_width) == (128, 4096)


def test_layer_types_become_a_short_pattern(tmp_path):
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 4
    config = {"model_type": "gemma3_text", "num_hidden_layers": 12, "layer_types": types}
    assert read(tmp_path, config).layer_kinds == "SSF"
    with pytest.raises(PlanError, match=r"layer_types: 11 entries, allowed: a list of num_hidden_layers=12"):
        read(tmp_path, config | {"layer_types": types[1:]})
    with pytest.raises(PlanError, match=r"layer_types: got linear_attention, allowed: full_attention"):
        read(tmp_path, config | {"layer_types": ["linear_attention", *types[1:]]})


def test_a_vision_tower_is_named_and_left_out_by_its_word(tmp_path):
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vision_config": {"hidden_size": 8}}
    with pytest.raises(PlanError, match=r'vision_config: a part .* add "leave_out: \[vision_config\]"'):
        read(tmp_path, config)
    assert read(tmp_path, config, "vision_config").num_layers, "a decoder alone"
    with pytest.raises(PlanError, match=r"text_config\.hidden_size: got wide"):
        read(tmp_path, config | {"text_config": {"hidden_size": "wide"}}, "vision_config")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bert"}, 'model_type "bert"; readable: deepseek_v2, deepseek_v3'),
        ({"model_type": None}, "no model_type"),
        ({"head_dim": "128"}, "head_dim: got 128, allowed: an integer"),
        ({"head_dim": 3}, "head_dim: heads are 3 wide; rotary positions need an even width"),
        ({"hidden_act": "relu"}, "hidden_act: got relu, allowed: silu or swish or gelu"),
        ({"num_hidden_layers": None}, "num_hidden_layers: missing"),
        ({"vocab_size": -1}, "vocab_size: got -1"),
        ({"hidden_size": True}, "hidden_size: got True"),
        ({"hidden_size": 8190}, "num_attention_heads: 64 does not divide hidden_size=8190; give head_dim"),
        ({"num_key_value_heads": 7}, "num_key_value_heads: 7 does not divide num_attention_heads=64"),
        ({"num_key_value_head": 4, "num_key_value_heads": ...}, 'did you mean "num_key_value_heads"?'),
        ({"rope_theta": -1.0}, "rope_theta: got -1.0, allowed: a number above 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: got false, allowed: true or false"),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm: got true"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention: got true"),
        ({"model_type": "nemotron_h", "moe_latent_size": 64}, "moe_latent_size: got 64"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "hybrid_override_pattern: got MX, allowed"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*"}, "num_hidden_layers: got 80, and the list"),
        ({"model_type": "deepseek_v3", "attention_bias": True}, "attention_bias: got true"),
    ],
    ids=str,
)
def test_what_would_be_counted_wrong_is_refused_by_its_key(tmp_path, changes, words):
    config = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    with pytest.raises(PlanError) as caught:
        read(tmp_path, config)
    assert words in str(caught.value)
    with pytest.raises(PlanError):
        read(tmp_path, config, *changes)


def test_all_problems_are_named_at_once(tmp_path):
    with pytest.raises(PlanError) as caught:
        read(tmp_path, QWEN3_MOE | {"hidden_act": "relu", "num_experts": 4, "vocab_size": "many", "head_dim": 0})
    assert len(str(caught.value).split("\n")) == 3  # counts are not checked against each other where one is wrong
    with pytest.raises(PlanError, match="num_experts_per_tok: got 8, allowed: up to the number of experts, 4"):
        read(tmp_path, QWEN3_MOE | {"num_experts": 4})


def test_what_is_left_out_must_be_there(tmp_path):
    with pytest.raises(PlanError, match='the file has no "qkv_bias"'):
        read(tmp_path, LLAMA, "qkv_bias")
    for word, kind in (("qkv_bias", "phi"), ("sliding_window", "nemotron_h")):  # its other biases, its kinds of layers
        with pytest.raises(PlanError, match=f'the file has no "{word}"'):
            read(tmp_path, {"model_type": kind}, word)
    with pytest.raises(PlanError, match='the file has no "qvk_bias"; did you mean "qkv_bias"'):
        read(tmp_path, QWEN2, "qvk_bias")


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "NaN"], ids=["empty", "cut", "list", "deep", "nan"])
def test_a_file_that_is_no_configuration_is_one_message(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"config\.json"):
        read_config(path, "own")


def test_a_missing_or_huge_file_is_one_message(tmp_path):
    with pytest.raises(PlanError, match="cannot be read"):
        read_config(tmp_path / "none.json", "own")
    (tmp_path / "big.json").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(PlanError, match="larger than 1,048,576 bytes"):
        read_config(tmp_path / "big.json", "own")

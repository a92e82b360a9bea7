"""Models read from `config.json`: shapes of every type, and each feature that the decoder lacks refused by its name."""

import json
from pathlib import Path
from typing import Any

import pytest

from wattune.catalog.huggingface import MODEL_TYPES, read_config
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
    return read_config(path, "own", leave_out).model


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


def test_gpt2_has_its_published_parameters(tmp_path):
    spec = read(tmp_path, GPT2, *NOISE)
    assert spec.num_parameters == 124_439_808  # the tensors of the released checkpoint
    assert (spec.norm, spec.activation, spec.positions, spec.tied_embeddings) == ("layernorm", "gelu", "learned", True)


def test_experts_have_their_own_width(tmp_path):
    spec = read(tmp_path, QWEN3_MOE, "qk_norm")
    assert (spec.ffn_hidden_size, spec.num_experts, spec.num_experts_per_token) == (768, 128, 8)


@pytest.mark.parametrize(
    ("config", "features"),
    [
        (QWEN2, ["qkv_bias"]),
        (QWEN3, ["qk_norm"]),
        (GPT2, NOISE),
        (NEOX, ["rotary_pct", "use_parallel_residual"]),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling"]),
        (LLAMA | {"rope_theta": None, "rope_parameters": {"rope_type": "yarn"}}, ["rope_scaling"]),
        (LLAMA | {"model_type": "mistral", "sliding_window": 4096}, ["sliding_window"]),
        (QWEN2 | {"use_sliding_window": True}, ["qkv_bias", "sliding_window"]),
        (LLAMA | {"attention_bias": True}, ["attention_bias"]),
        (LLAMA | {"mlp_bias": True}, ["mlp_bias"]),
        (LLAMA | {"attention_dropout": 0.1}, ["attention_dropout"]),
        (QWEN3_MOE | {"norm_topk_prob": False}, ["norm_topk_prob", "qk_norm"]),
        (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        (LLAMA | {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        (GPT2 | {"scale_attn_weights": False}, [*NOISE, "scale_attn_weights"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_the_decoder_lacks_is_named_and_can_be_left_out(tmp_path, config, features):
    with pytest.raises(PlanError) as caught:
        read(tmp_path, config)
    lines = str(caught.value).split("\n")
    assert len(lines) == len(features)
    for feature in features:
        assert any(f"{feature}: " in line and f"leave_out: [{feature}]" in line for line in lines), feature
    assert read(tmp_path, config, *features).num_parameters > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma2"}, 'model_type "gemma2"; readable: gpt2, gpt_neox, llama'),
        ({"model_type": None}, "no model_type"),
        ({"head_dim": 256}, "head_dim: 64 heads of 256 are 16384 wide together, hidden_size=8192"),
        ({"head_dim": "128"}, "head_dim: got 128, allowed: an integer"),
        ({"hidden_act": "relu"}, "hidden_act: got relu; the decoder has silu or swish only"),
        ({"num_hidden_layers": None}, "num_hidden_layers: missing"),
        ({"vocab_size": -1}, "vocab_size: got -1"),
        ({"hidden_size": True}, "hidden_size: got True"),
        ({"num_key_value_heads": 7}, "num_key_value_heads: 7 does not divide 64"),
        ({"rope_theta": -1.0}, "rope_theta: got -1.0, allowed: a number above 0"),
    ],
    ids=str,
)
def test_what_cannot_be_represented_cannot_be_left_out(tmp_path, changes, words):
    with pytest.raises(PlanError) as caught:
        read(tmp_path, LLAMA | changes)
    assert words in str(caught.value)
    with pytest.raises(PlanError):
        read(tmp_path, LLAMA | changes, *changes)


def test_all_problems_are_named_at_once(tmp_path):
    with pytest.raises(PlanError) as caught:
        read(tmp_path, QWEN3_MOE | {"hidden_act": "relu", "num_experts": 4, "rope_scaling": {"type": "yarn"}})
    assert len(str(caught.value).split("\n")) == 4


def test_what_is_left_out_must_be_there(tmp_path):
    with pytest.raises(PlanError, match='the file has no "qkv_bias"'):
        read(tmp_path, LLAMA, "qkv_bias")
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


def test_every_type_is_tested():
    tested = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt2", "gpt_neox"}
    assert set(MODEL_TYPES) == tested | {"qwen2_moe"}


def test_a_shared_expert_is_named(tmp_path):
    config = QWEN3_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 5632}
    with pytest.raises(PlanError, match="shared_expert: each layer has an expert for all tokens"):
        read(tmp_path, config, "qkv_bias")

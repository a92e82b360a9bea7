"""Reads a model from the `config.json` of a Hugging Face checkpoint, without a network and without transformers.

Every key of the file is read, known to change no work, or refused by name. What the decoder of `wattune.engines.model`
cannot represent is never approximated silently: a space trains the rest if it lists the feature as left out.

Sources of the keys' meaning: `configuration_*.py` and `modeling_*.py` of transformers 4.57 for each model type.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from wattune.catalog.models import ModelSpec
from wattune.errors import PlanError, closest

ConfigJson = Mapping[str, Any]

LARGEST_CONFIG_BYTES: Final = 2**20
"""Largest file that is read. A real one has a few kilobytes."""

_LARGEST: Final = 10**9
"""Largest integer of a model, as in search spaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A model that was read from a file."""

    model: ModelSpec
    left_out: tuple[str, ...]
    """Features of the file that the space leaves out."""


@dataclass(slots=True)
class _Found:
    """Problems and features met while a file is read."""

    config: ConfigJson
    problems: list[str] = field(default_factory=list)
    features: dict[str, str] = field(default_factory=dict)
    """Features that the decoder lacks and that can be left out, each with a phrase for people."""
    uncounted: set[str] = field(default_factory=set)
    """Keys whose counts cannot be used: nothing is checked against them."""

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer; 1 where the file has none, which is then a problem."""
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) is int and 1 <= value <= _LARGEST:
            return value
        said = "missing" if value is None else f"got {str(value)[:40]}"
        self.problems.append(f"{key}: {said}, allowed: an integer from 1 to {_LARGEST:,}")
        self.uncounted.add(key)
        return 1

    def number(self, key: str, default: float) -> float:
        """Returns a positive number; the default where the file has none that can be used."""
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        self.problems.append(f"{key}: got {str(value)[:40]}, allowed: a number above 0")
        return default

    def require(self, key: str, allowed: Collection[Any], default: Any) -> None:
        """Notes a problem where a value is none of those that the decoder has."""
        value = self.config.get(key, default)
        if value not in allowed:
            texts = " or ".join(map(str, allowed))
            self.problems.append(f"{key}: got {str(value)[:40]}; the decoder has {texts} only")


_SILU: Final = ("silu", "swish")
_GELU: Final = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python")
"""Forms of GELU. The decoder computes the exact one; the tanh forms differ by less than 1e-3 and do the same work."""

_HARMLESS: Final = (
    "_attn_implementation _attn_implementation_autoset _name_or_path activation_function architectures "
    "attn_implementation auto_map bos_token_id chunk_size_feed_forward classifier_dropout "
    "dtype eos_token_id finetuning_task gradient_checkpointing id2label initializer_range is_decoder "
    "is_encoder_decoder label2id layer_norm_eps layer_norm_epsilon max_length max_position_embeddings "
    "max_window_layers model_type n_ctx num_labels output_attentions output_hidden_states output_router_logits "
    "pad_token_id pretraining_tp problem_type reorder_and_upcast_attn return_dict rms_norm_eps rope_scaling_factor "
    "router_aux_loss_coef sep_token_id summary_activation summary_first_dropout "
    "summary_proj_to_labels summary_type summary_use_proj task_specific_params tie_word_embeddings tokenizer_class "
    "torch_dtype torchscript transformers_version unk_token_id use_cache use_return_dict vocab_size"
)
"""Keys that change neither shapes nor work of a training step, or that every model type reads."""

_DROPOUTS: Final = (
    "attention_dropout",
    "attn_pdrop",
    "dropout",
    "embd_pdrop",
    "hidden_dropout",
    "hidden_dropout_prob",
    "resid_pdrop",
    "router_jitter_noise",
)
"""Keys of noise in training; the decoder has none."""


def read_config(path: Path, name: str, leave_out: Collection[str] = ()) -> Reading:
    """Reads a model from a `config.json`.

    `leave_out` are features to train without, by the names that a refusal gives them.

    Raises:
        PlanError: The file cannot be read, is of a model type that is not known, or describes what the decoder cannot
            represent and what is not left out. Every such key is named.
    """
    config = _config(path)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        said = f'model_type "{kind}"' if isinstance(kind, str) else "no model_type"
        raise PlanError(
            f"{path}: {said}; readable: {', '.join(sorted(_READERS))}; describe another by `like` and the fields that "
            "differ"
        )
    found = _Found(config)
    reader = _READERS[kind]
    spec = reader.read(found, name)
    _common(found, spec, reader.keys)
    for feature, phrase in found.features.items():
        if feature not in leave_out:
            found.problems.append(f'{feature}: {phrase}; add "leave_out: [{feature}]" to train without')
    for feature in leave_out:
        if feature not in found.features:
            known = f"; {closest(feature, found.features)}" if found.features else ""
            found.problems.append(f'leave_out: the file has no "{feature}"{known}')
    if found.problems:
        raise PlanError("\n".join(f"{path}: {problem}" for problem in found.problems))
    return Reading(model=spec, left_out=tuple(sorted(leave_out)))


def _config(path: Path) -> ConfigJson:
    try:
        if path.stat().st_size > LARGEST_CONFIG_BYTES:
            raise PlanError(f"{path}: is larger than {LARGEST_CONFIG_BYTES:,} bytes; give the config.json of a model")
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror}); give the path of a config.json") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: is not JSON; give the path of a config.json") from error
    if not isinstance(config, dict):
        raise PlanError(f"{path}: holds a {type(config).__name__}; a config.json is a mapping")
    return config


def _common(found: _Found, spec: ModelSpec, read: Collection[str]) -> None:
    """Notes what every model type may say: shapes that do not divide, noise, windows, and keys that nobody read."""
    config = found.config
    width = found.count("head_dim") if config.get("head_dim") is not None else None
    if not found.uncounted:
        if width is not None and width * spec.num_heads != spec.hidden_size:
            found.problems.append(
                f"head_dim: {spec.num_heads} heads of {width} are {spec.num_heads * width} wide together, "
                f"hidden_size={spec.hidden_size}; the decoder has heads that divide the hidden size"
            )
        elif spec.hidden_size % spec.num_heads:
            found.problems.append(f"num_attention_heads: {spec.num_heads} does not divide {spec.hidden_size}")
        if spec.num_heads % spec.num_kv_heads:
            found.problems.append(f"num_key_value_heads: {spec.num_kv_heads} does not divide {spec.num_heads}")
    for key in _DROPOUTS:
        if config.get(key):
            found.features[key] = f"got {str(config[key])[:40]}, and the decoder has no noise in training"
    scaling = config.get("rope_scaling")
    if scaling:
        found.features["rope_scaling"] = "the decoder's rotary frequencies are not scaled"
    window, used = config.get("sliding_window"), config.get("use_sliding_window", True)
    layers = config.get("layer_types")
    windowed = used and window is not None and (layers is None or any("sliding" in str(one) for one in layers))
    if windowed:
        found.features["sliding_window"] = f"got {str(window)[:40]}, and the decoder attends to all earlier tokens"
    elif layers is not None and any(one != "full_attention" for one in layers):
        found.features["layer_types"] = "the decoder has full attention only"
    handled = {*_HARMLESS.split(), *_DROPOUTS, *read}
    handled |= {"head_dim", "rope_scaling", "sliding_window", "use_sliding_window", "layer_types"}
    for key in sorted(config.keys() - handled):
        if config[key] not in (None, False, [], {}, 0, 0.0):
            found.features[key] = f"got {json.dumps(config[key])[:40]}, a key that is not known for this model type"


def _biases(found: _Found) -> bool:
    """Returns True where all linear layers have biases; notes those of a part, which the decoder cannot have."""
    attention, feed_forward = bool(found.config.get("attention_bias")), bool(found.config.get("mlp_bias"))
    if attention != feed_forward:
        key = "attention_bias" if attention else "mlp_bias"
        found.features[key] = "the decoder has biases in every linear layer or in none"
    return attention and feed_forward


def _rope_theta(found: _Found) -> float:
    """Returns the base of rotary frequencies where `rope_parameters` names it, as transformers 5 writes it."""
    own = found.config.get("rope_parameters")
    if not isinstance(own, dict):
        return 10_000.0
    if own.get("rope_type", "default") != "default":
        found.features["rope_scaling"] = "the decoder's rotary frequencies are not scaled"
    theta = own.get("rope_theta", 10_000.0)
    if isinstance(theta, int | float) and not isinstance(theta, bool) and 0 < theta < math.inf:
        return float(theta)
    found.problems.append(f"rope_parameters.rope_theta: got {str(theta)[:40]}, allowed: a number above 0")
    return 10_000.0


def _llama(found: _Found, name: str) -> ModelSpec:
    """Reads Llama and Mistral: RMSNorm, SwiGLU, rotary positions."""
    found.require("hidden_act", _SILU, "silu")
    heads = found.count("num_attention_heads")
    return ModelSpec(
        name=name,
        num_layers=found.count("num_hidden_layers"),
        hidden_size=found.count("hidden_size"),
        ffn_hidden_size=found.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=found.count("num_key_value_heads", heads),
        vocab_size=found.count("vocab_size"),
        rope_base=found.number("rope_theta", _rope_theta(found)),
        bias=_biases(found),
        tied_embeddings=bool(found.config.get("tie_word_embeddings", False)),
        source="config.json of a Hugging Face checkpoint",
    )


def _qwen2(found: _Found, name: str) -> ModelSpec:
    spec = _llama(found, name)
    found.features["qkv_bias"] = "q, k and v have biases; the decoder has them in every linear layer or in none"
    return spec


def _qwen3(found: _Found, name: str) -> ModelSpec:
    spec = _llama(found, name)
    found.features["qk_norm"] = "queries and keys have norms, which the decoder lacks"
    return spec


def _with_experts(found: _Found, spec: ModelSpec, *, experts: str, width: str) -> ModelSpec:
    num, chosen = found.count(experts), found.count("num_experts_per_tok")
    if chosen > num and not found.uncounted & {experts, "num_experts_per_tok"}:
        found.problems.append(f"num_experts_per_tok: got {chosen}, allowed: up to {experts}={num}")
    return replace(spec, ffn_hidden_size=found.count(width), num_experts=num, num_experts_per_token=chosen)


def _mixtral(found: _Found, name: str) -> ModelSpec:
    return _with_experts(found, _llama(found, name), experts="num_local_experts", width="intermediate_size")


def _qwen_moe(found: _Found, spec: ModelSpec) -> ModelSpec:
    config = found.config
    if not config.get("norm_topk_prob", False):
        found.features["norm_topk_prob"] = "weights of the chosen experts do not add up to 1; the decoder's do"
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        found.problems.append(
            "decoder_sparse_step, mlp_only_layers: some layers are dense; the decoder's are all alike"
        )
    return _with_experts(found, spec, experts="num_experts", width="moe_intermediate_size")


def _qwen2_moe(found: _Found, name: str) -> ModelSpec:
    if found.config.get("shared_expert_intermediate_size"):
        found.features["shared_expert"] = "each layer has an expert for all tokens, which the decoder lacks"
    return _qwen_moe(found, _qwen2(found, name))


def _qwen3_moe(found: _Found, name: str) -> ModelSpec:
    return _qwen_moe(found, _qwen3(found, name))


def _gpt2(found: _Found, name: str) -> ModelSpec:
    """Reads GPT-2: LayerNorm, GELU, learned positions, biases everywhere, one weight at both ends."""
    found.require("activation_function", _GELU, "gelu_new")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if found.config.get(key):
            found.features[key] = "which the decoder lacks"
    if not found.config.get("scale_attn_weights", True):
        found.features["scale_attn_weights"] = "scores of attention are not scaled, in the decoder they are"
    hidden, heads = found.count("n_embd", 768), found.count("n_head", 12)
    return ModelSpec(
        name=name,
        num_layers=found.count("n_layer", 12),
        hidden_size=hidden,
        ffn_hidden_size=found.count("n_inner", min(4 * hidden, _LARGEST)),
        num_heads=heads,
        num_kv_heads=heads,
        vocab_size=found.count("vocab_size", 50257),
        norm="layernorm",
        activation="gelu",
        positions="learned",
        max_positions=found.count("n_positions", 1024),
        bias=True,
        tied_embeddings=bool(found.config.get("tie_word_embeddings", True)),
        source="config.json of a Hugging Face checkpoint",
    )


def _gpt_neox(found: _Found, name: str) -> ModelSpec:
    """Reads GPT-NeoX: LayerNorm, GELU, rotary positions on a part of each head, attention beside the feed-forward."""
    found.require("hidden_act", _GELU, "gelu")
    if found.config.get("use_parallel_residual", True):
        found.features["use_parallel_residual"] = (
            "attention runs beside the feed-forward block, in the decoder before it"
        )
    if found.number("rotary_pct", 0.25) != 1.0:
        found.features["rotary_pct"] = "positions turn a part of each head, in the decoder all of it"
    if not found.config.get("attention_bias", True):
        found.problems.append("attention_bias: got False; the decoder has biases in every linear layer or in none")
    heads = found.count("num_attention_heads")
    return ModelSpec(
        name=name,
        num_layers=found.count("num_hidden_layers"),
        hidden_size=found.count("hidden_size"),
        ffn_hidden_size=found.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=heads,
        vocab_size=found.count("vocab_size"),
        norm="layernorm",
        activation="gelu",
        rope_base=found.number("rotary_emb_base", 10_000.0),
        bias=True,
        tied_embeddings=bool(found.config.get("tie_word_embeddings", False)),
        source="config.json of a Hugging Face checkpoint",
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the configurations of one model type."""

    read: Callable[[_Found, str], ModelSpec]
    keys: frozenset[str]
    """Keys that it reads, besides those of every type."""


_LLAMA_KEYS: Final = (
    "hidden_act num_attention_heads num_hidden_layers hidden_size intermediate_size num_key_value_heads rope_theta "
    "rope_parameters attention_bias mlp_bias"
)
_MOE_KEYS: Final = (
    "num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers "
    "shared_expert_intermediate_size"
)
_GPT2_KEYS: Final = (
    "activation_function n_embd n_head n_layer n_inner n_positions scale_attn_by_inverse_layer_idx "
    "add_cross_attention scale_attn_weights"
)
_NEOX_KEYS: Final = (
    "hidden_act num_attention_heads num_hidden_layers hidden_size intermediate_size rotary_emb_base rotary_pct "
    "use_parallel_residual attention_bias rope_theta partial_rotary_factor"
)


def _reader(read: Callable[[_Found, str], ModelSpec], *keys: str) -> _Reader:
    return _Reader(read, frozenset(" ".join(keys).split()))


_READERS: Final[dict[str, _Reader]] = {
    "llama": _reader(_llama, _LLAMA_KEYS),
    "mistral": _reader(_llama, _LLAMA_KEYS),
    "mixtral": _reader(_mixtral, _LLAMA_KEYS, "num_local_experts num_experts_per_tok"),
    "qwen2": _reader(_qwen2, _LLAMA_KEYS),
    "qwen2_moe": _reader(_qwen2_moe, _LLAMA_KEYS, _MOE_KEYS),
    "qwen3": _reader(_qwen3, _LLAMA_KEYS),
    "qwen3_moe": _reader(_qwen3_moe, _LLAMA_KEYS, _MOE_KEYS),
    "gpt2": _reader(_gpt2, _GPT2_KEYS),
    "gpt_neox": _reader(_gpt_neox, _NEOX_KEYS),
}
"""Readers by `model_type`."""

MODEL_TYPES: Final = tuple(sorted(_READERS))
"""Model types whose `config.json` can be read."""

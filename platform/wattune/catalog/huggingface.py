"""Reads a model from the `config.json` of a Hugging Face checkpoint, without a network and without transformers.

A key that the file leaves out has the default of its model type (`model_types.json`, written from the configuration
classes of transformers 5.23 and held to them by a test). A file is refused only where parameters or work would be
counted wrong, by the name of the key. What changes neither, such as scaled rotary frequencies, is noted.

Sources of the keys' meaning: `configuration_*.py` and `modeling_*.py` of transformers 5.23 for each model type.
"""

import difflib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from wattune.catalog.config_keys import TYPES, ConfigJson, Keys
from wattune.catalog.models import ModelSpec
from wattune.deadline import read_bounded
from wattune.errors import PlanError, closest
from wattune.field_types import LARGEST_COUNT, LARGEST_WORLD

LARGEST_CONFIG_BYTES: Final = 2**20
"""Largest file that is read. A real one has a few kilobytes."""


_NEUTRAL: Final[dict[str, float | None]] = {
    key: neutral
    for neutral, keys in (
        (0, "attention_dropout attn_pdrop dropout embd_pdrop embedding_dropout hidden_dropout hidden_dropout_prob"),
        (0, "resid_pdrop residual_dropout router_jitter_noise num_nextn_predict_layers clip_qkv"),
        (1, "embedding_multiplier logits_scaling residual_multiplier n_group"),
        (1, "partial_rotary_factor rotary_pct scale_attn_weights"),
        (None, "rope_scaling attn_logit_softcapping final_logit_softcapping quantization_config alibi"),
        (None, "use_parallel_residual scale_attn_by_inverse_layer_idx swiglu_limit use_bidirectional_attention"),
    )
    for key in keys.split()
}
"""Keys that change what is computed, and neither parameters nor, to first order, work; each with the value at which it
changes nothing. Multi-token heads are among them, since transformers trains without: `num_mtp_layers` adds them."""

_WITHOUT: Final[dict[str, tuple[str, ...]]] = {
    "qkv_bias": ("biased_parts",),
    "qk_norm": ("qk_norm",),
    "sliding_window": ("sliding_window", "layer_kinds"),
    "shared_expert": ("shared_ffn_hidden_size", "shared_expert_gate"),
    "attention_sinks": ("attention_sinks",),
}
"""Features that are counted and can be left out all the same, for an engine that lacks them, by the fields they set.
The first one tells whether a model has it. `qkv_bias` is the biases of attention; those of other parts stay."""


def read_config(path: Path, name: str, leave_out: Collection[str] = ()) -> ModelSpec:
    """Reads a model from a `config.json`; its source names the keys that change no count and are not trained.

    `leave_out` are features to train without, by the names that a refusal gives them. Raises `PlanError` where the file
    cannot be read, is of a model type that is not known, or describes what would be counted wrong and is not left out.
    Every such key is named.
    """
    config = _config(path)
    beside = "a part beside the decoder, whose parameters and work are not counted"
    vision = {key: beside for key in ("vision_config", "audio_config") if config.get(key)}
    where, text = "", config.get("text_config")
    kind = config.get("model_type")
    if isinstance(text, dict):
        inherited = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        where, config, kind = "text_config.", inherited | text, text.get("model_type", f"{kind}_text")
    if not isinstance(kind, str) or kind not in _READERS:
        said = f'model_type "{str(kind)[:60]}"' if isinstance(kind, str) else "no model_type"
        raise PlanError(
            f"{path}: {said}; readable: {', '.join(MODEL_TYPES)}; describe another by `like` and the fields that differ"
        )
    found = Keys(kind, config, where, features=vision)
    spec = _READERS[kind](found, name)
    _check(found, spec)
    plain = _DEFAULT | {"biased_parts": " ".join(one for one in spec.biased_parts.split() if one not in ("qkv", "o"))}
    counted = {word: names for word, names in _WITHOUT.items() if getattr(spec, names[0]) != plain[names[0]]}
    noted = [
        key
        for key, neutral in _NEUTRAL.items()
        if config.get(key) is not None and config[key] != neutral and (neutral == 1 or config[key])
    ]
    noted += ["rope_parameters"] if _scales_rotation(config.get("rope_parameters")) else []
    for feature, phrase in found.features.items():
        if feature not in leave_out:
            way = f'add "leave_out: [{feature}]", or --leave-out {feature}, to train without'
            found.problems.append(f"{feature}: {phrase}; {way}")
    known = [*found.features, *counted, *noted]
    for feature in leave_out:
        if feature not in known:
            near = f"; {closest(feature, known)}" if known else ""
            found.problems.append(f'leave_out: the file has no "{feature}"{near}')
    if found.problems:
        raise PlanError("\n".join(f"{path}: {problem}" for problem in found.problems))
    without = {one: plain[one] for word in leave_out for one in counted.get(word, ())}
    source = "config.json of a Hugging Face checkpoint" + (f"; not trained: {', '.join(noted)}" if noted else "")
    return replace(spec, source=source, **without)


_DEFAULT: Final[dict[str, Any]] = {name: each.default for name, each in ModelSpec.__dataclass_fields__.items()}


def _config(path: Path) -> ConfigJson:
    try:
        content = read_bounded(path, LARGEST_CONFIG_BYTES)
    except ValueError as error:
        raise PlanError(f"{path}: is {error}; give the config.json of a model") from error
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror}); give the path of a config.json") from error
    try:
        config = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: is not JSON; give the path of a config.json") from error
    if not isinstance(config, dict):
        raise PlanError(f"{path}: holds a {type(config).__name__}; a config.json is a mapping")
    return config


def _scales_rotation(parameters: Any) -> bool:
    """Tells whether rotary frequencies are scaled, as transformers 5 writes it: for all layers, or by their type."""
    if not isinstance(parameters, dict):
        return False
    parts = [parameters, *(one for one in parameters.values() if isinstance(one, dict))]
    return any(one.get("rope_type", "default") != "default" for one in parts)


def _check(found: Keys, spec: ModelSpec) -> None:
    """Notes shapes that cannot be, and keys that look like another one's name with a slip."""
    heads = "n_head" if found.kind == "gpt2" else "num_attention_heads"
    if not found.uncounted:
        if not spec.head_dim and spec.has_attention and spec.hidden_size % spec.num_heads:
            found.problem(heads, f"{spec.num_heads} does not divide hidden_size={spec.hidden_size}; give head_dim")
        elif spec.positions == "rope" and (spec.rope_head_dim or spec.head_size) % 2:
            found.problem("head_dim", f"heads are {spec.head_size} wide; rotary positions need an even width")
        if spec.num_heads % spec.num_kv_heads:
            found.problem("num_key_value_heads", f"{spec.num_kv_heads} does not divide {heads}={spec.num_heads}")
        if spec.num_experts_per_token > spec.num_experts:
            allowed = f"up to the number of experts, {spec.num_experts}"
            found.problem("num_experts_per_tok", f"got {spec.num_experts_per_token}, allowed: {allowed}")
    defaults = TYPES[found.kind]["defaults"]
    known = {*defaults, *TYPES[found.kind].get("aliases", ()), *_NEUTRAL}
    absent = [key for key in defaults if key not in found.given]
    for key in sorted(found.given.keys() - known):
        near = difflib.get_close_matches(key, absent, n=1, cutoff=0.92)
        if near and near[0] not in _OTHER_NAMES:
            found.problem(key, f'is no key of {found.kind}; did you mean "{near[0]}"?')


_OTHER_NAMES: Final = ("num_experts", "hidden_activation", "activation", "hidden_act")
"""Keys that another known one resembles."""


def _letters(found: Keys, key: str, num_layers: int, letter_of: Mapping[str, str]) -> str | None:
    """Returns the letters of a list that names each layer's type; None where it cannot be used, which is a problem."""
    names = found.config[key]
    if not isinstance(names, list) or len(names) != num_layers:
        said = f"{len(names)} entries" if isinstance(names, list) else f"got {str(names)[:40]}"
        found.problem(key, f"{said}, allowed: a list of num_hidden_layers={num_layers}")
        return None
    unknown = sorted({str(one)[:40] for one in names if not isinstance(one, str) or one not in letter_of})
    if unknown:
        found.problem(key, f"got {', '.join(unknown)}, allowed: {', '.join(letter_of)}")
        return None
    return "".join(letter_of[one] for one in names)


def _pattern(letters: str) -> str:
    """Returns the shortest pattern that gives the letters when it is repeated."""
    return letters[
        : next((size for size in range(1, len(letters)) if letters.startswith(letters[size:])), len(letters))
    ]


_LAYER_TYPES: Final = {"full_attention": "F", "attention": "F", "sliding_attention": "S"}


def _windows(found: Keys, num_layers: int) -> dict[str, Any]:
    """Reads which layers attend within a window, by the list of the file or as the type has it."""
    config = found.config
    if "sliding_window" not in config or found.kind in ("llama", "nemotron_h", "gpt2", "gpt_neox", "falcon"):
        return {}
    used = found.flag("use_sliding_window") if "use_sliding_window" in config else True
    window = found.count("sliding_window") if config["sliding_window"] is not None and used else 0
    letters: str | None = ("S" if window else "F") * num_layers
    every = {"gemma2": 2, "gpt_oss": 2, "olmo3": 4, "gemma3_text": config.get("sliding_window_pattern", 6)}
    if config.get("layer_types") is not None:
        letters = _letters(found, "layer_types", num_layers, _LAYER_TYPES)
    elif found.kind in every:
        period = every[found.kind]
        if type(period) is not int or period < 1:
            found.problem("sliding_window_pattern", f"got {str(period)[:40]}, allowed: an integer of at least 1")
            period = 1
        letters = "".join("S" if (layer + 1) % period else "F" for layer in range(num_layers))
    elif window and "max_window_layers" in config and found.kind != "qwen3_moe":
        most = found.count("max_window_layers", least=0)
        slides: Callable[[int], bool] = (
            (lambda layer: layer % 2 == 0 and layer < most)
            if found.kind == "qwen2_moe"
            else (lambda layer: layer >= most)
        )
        letters = "".join("S" if slides(layer) else "F" for layer in range(num_layers))
    pattern = _pattern(letters or "")
    if not window or "S" not in pattern:
        return {}
    return {"sliding_window": window, "layer_kinds": "" if pattern == "S" else pattern}


def _rope_theta(found: Keys) -> float:
    """Returns the base of rotary frequencies, of the full attention where layers differ in it."""
    own = found.config.get("rope_parameters")
    key = "rotary_emb_base" if "rotary_emb_base" in found.given else "rope_theta"
    if isinstance(own, dict) and found.given.get(key) is None:
        own = own["full_attention"] if isinstance(own.get("full_attention"), dict) else own
        theta = own.get("rope_theta", TYPES[found.kind]["defaults"]["rope_theta"])
        if isinstance(theta, int | float) and not isinstance(theta, bool) and 0 < theta < math.inf:
            return float(theta)
        found.problem("rope_parameters.rope_theta", f"got {str(theta)[:40]}, allowed: a number above 0")
    return found.number(key, 10_000.0)


def _biases(found: Keys, attention: str) -> dict[str, Any]:
    """Reads biases: those of attention's parts where `attention_bias` says so, and of the feed-forward block."""
    parts = attention.split() if found.flag("attention_bias") else []
    parts += ["o"] if found.flag("attention_out_bias") and "o" not in parts else []
    parts += ["ffn"] if found.flag("mlp_bias") else []
    return {"bias": True} if parts == ["qkv", "o", "ffn"] else {"biased_parts": " ".join(parts)}


def _decoder(found: Keys, name: str, *, attention: str = "qkv o", gated: bool = True, **fields: Any) -> ModelSpec:
    """Reads what most types share: RMSNorm, a gated block, rotary positions; `fields` are the type's own.

    `attention` are the parts that `attention_bias` gives biases.
    """
    num_layers, hidden = found.count("num_hidden_layers", most=LARGEST_WORLD), found.count("hidden_size")
    heads = found.count("num_attention_heads")
    width = found.count("head_dim") if found.config.get("head_dim") is not None else 0
    own: dict[str, Any] = {
        "num_layers": num_layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 0 if "ffn_hidden_size" in fields else found.count("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": heads if "num_kv_heads" in fields else found.count("num_key_value_heads", heads),
        "vocab_size": found.count("vocab_size"),
        "rope_base": _rope_theta(found) if fields.get("positions") != "learned" else 10_000.0,
        "tied_embeddings": found.flag("tie_word_embeddings"),
        "activation": found.activation(gated),
        "head_dim": 0 if width * heads == hidden else width,
        **_biases(found, attention),
        **_windows(found, num_layers),
    }
    return ModelSpec(name=name, **(own | fields))


def _mixture(
    found: Keys, name: str, *, experts: str, width: str = "moe_intermediate_size", dense: bool = False, **fields: Any
) -> ModelSpec:
    """Reads a mixture: `experts` and `width` are the keys of their number and inner width.

    With `dense` the first layers are dense, and shared experts are as wide as so many others.
    """
    own: dict[str, Any] = {
        "ffn_hidden_size": found.count(width),
        "num_experts": found.count(experts),
        "num_experts_per_token": found.count("num_experts_per_tok"),
        "router_scale": found.number("routed_scaling_factor", 1.0),
    }
    if dense:
        own["num_dense_layers"] = found.count("first_k_dense_replace", 0, least=0)
        own["dense_ffn_hidden_size"] = found.count("intermediate_size") if own["num_dense_layers"] else 0
        own["shared_ffn_hidden_size"] = found.count("n_shared_experts", 0, least=0) * own["ffn_hidden_size"]
    return _decoder(found, name, **(own | fields))


def _qwen_moe(found: Keys, name: str, **fields: Any) -> ModelSpec:
    key = (
        "num_local_experts"
        if "num_local_experts" in found.given and "num_experts" not in found.given
        else "num_experts"
    )
    spec = _mixture(found, name, experts=key, **fields)
    spec = replace(spec, router_scores="chosen" if found.flag("norm_topk_prob") else "all")
    step, only = found.count("decoder_sparse_step"), found.config.get("mlp_only_layers") or []
    if not isinstance(only, list) or not all(type(one) is int for one in only):
        found.problem("mlp_only_layers", f"got {str(only)[:40]}, allowed: a list of layers' numbers")
        only = []
    letters = "".join("D" if layer in only or (layer + 1) % step else "F" for layer in range(spec.num_layers))
    if "D" not in letters:
        return spec
    if spec.sliding_window:
        found.problem("use_sliding_window", "got true beside dense layers; no type of layer has both here")
    return replace(spec, layer_kinds=_pattern(letters), dense_ffn_hidden_size=found.count("intermediate_size"))


def _qwen2_moe(found: Keys, name: str) -> ModelSpec:
    shared = found.count("shared_expert_intermediate_size", 0, least=0)
    biases = "qkv" if found.flag("qkv_bias") else ""
    return _qwen_moe(found, name, biased_parts=biases, shared_ffn_hidden_size=shared, shared_expert_gate=shared > 0)


def _latent(found: Keys, name: str) -> ModelSpec:
    """Reads DeepSeek-V2 and V3: multi-head latent attention, dense layers first, shared experts."""
    if found.flag("attention_bias"):
        found.problem("attention_bias", "got true; biases of latent attention are not counted")
    rope, nope = found.count("qk_rope_head_dim"), found.count("qk_nope_head_dim")
    values = found.count("v_head_dim")
    heads = found.count("num_attention_heads")
    return _mixture(
        found,
        name,
        experts="n_routed_experts",
        dense=True,
        biased_parts="",
        num_kv_heads=heads,
        head_dim=rope + nope,
        value_head_dim=values if values != rope + nope else 0,
        rope_head_dim=rope,
        kv_lora_rank=found.count("kv_lora_rank"),
        q_lora_rank=found.count("q_lora_rank", 0, least=0),
        router_scores="sigmoid" if found.kind == "deepseek_v3" else "all",
    )


def _glm4_moe(found: Keys, name: str) -> ModelSpec:
    norm = "head" if found.flag("use_qk_norm") else "none"
    return _mixture(
        found, name, experts="n_routed_experts", dense=True, attention="qkv", qk_norm=norm, router_scores="sigmoid"
    )


def _gpt_oss(found: Keys, name: str) -> ModelSpec:
    biases = "qkv o ffn router" if found.flag("attention_bias") else "ffn router"
    own: dict[str, Any] = {"biased_parts": biases, "bias": False, "attention_sinks": True}
    return _mixture(found, name, experts="num_local_experts", width="intermediate_size", **own)


def _nemotron_h(found: Keys, name: str) -> ModelSpec:
    """Reads Nemotron-H: each layer is one block, Mamba2, attention, a dense feed-forward block or experts."""
    config, letters = found.config, {"M": "m", "*": "f", "-": "d", "E": "e"}
    words = dict(zip(("mamba", "linear_attention", "attention", "full_attention", "mlp", "moe"), "mmffde", strict=True))
    listed = next((key for key in ("layers_block_type", "layer_types") if found.given.get(key) is not None), None)
    pattern = config.get("hybrid_override_pattern")
    if listed is not None:
        names = config[listed]
        kinds = _letters(found, listed, len(names) if isinstance(names, list) else 0, words) or "m"
    elif pattern is None:
        kinds = "mefd"
    elif isinstance(pattern, str) and pattern and set(pattern) <= letters.keys():
        kinds = "".join(letters[one] for one in pattern)
    else:
        found.problem("hybrid_override_pattern", f"got {str(pattern)[:40]}, allowed: letters {' '.join(letters)}")
        kinds = "m"
    if found.given.get("num_hidden_layers") not in (None, len(kinds)):
        got = str(found.given["num_hidden_layers"])[:40]
        found.problem("num_hidden_layers", f"got {got}, and the list of layers has {len(kinds)}; leave one out")
    config["num_hidden_layers"] = len(kinds)
    for key, allowed in (("use_bias", False), ("use_conv_bias", True), ("moe_latent_size", None)):
        if config.get(key) != allowed:
            found.problem(key, f"got {str(config[key])[:40]}; parameters are counted for {json.dumps(allowed)} only")
    own: dict[str, Any] = {
        "layer_kinds": _pattern(kinds),
        "ssm_num_heads": found.count("mamba_num_heads"),
        "ssm_head_dim": found.count("mamba_head_dim"),
        "ssm_state_size": found.count("ssm_state_size"),
        "ssm_num_groups": found.count("n_groups"),
        "ssm_conv_size": found.count("conv_kernel"),
        "gated": False,
    }
    if "e" not in kinds:
        return _decoder(found, name, **own)
    own |= {"dense_ffn_hidden_size": found.count("intermediate_size")}
    own |= {"shared_ffn_hidden_size": found.count("moe_shared_expert_intermediate_size"), "router_scores": "sigmoid"}
    return _mixture(found, name, experts="n_routed_experts", **own)


def _gpt2(found: Keys, name: str) -> ModelSpec:
    """Reads GPT-2: LayerNorm, GELU, learned positions, biases everywhere, one weight at both ends."""
    if found.flag("add_cross_attention"):
        found.problem("add_cross_attention", "got true; parameters are counted for a decoder without")
    config = found.config
    for key, own in (("num_hidden_layers", "n_layer"), ("hidden_size", "n_embd"), ("num_attention_heads", "n_head")):
        config[key] = found.count(own)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return _decoder(
        found,
        name,
        gated=False,
        ffn_hidden_size=found.count("n_inner", min(4 * hidden, LARGEST_COUNT)),
        num_kv_heads=heads,
        norm="layernorm",
        positions="learned",
        max_positions=found.count("n_positions"),
        bias=True,
        biased_parts="",
    )


def _gpt_neox(found: Keys, name: str) -> ModelSpec:
    """Reads GPT-NeoX: LayerNorm, GELU, rotary positions, as many heads of keys."""
    has = found.flag("attention_bias")
    own: dict[str, Any] = {"bias": has, "biased_parts": "" if has else "ffn norm"}
    own["num_kv_heads"] = found.count("num_attention_heads")
    return _decoder(found, name, gated=False, norm="layernorm", **own)


def _phi(found: Keys, name: str) -> ModelSpec:
    """Reads Phi-1.5 and 2: biases everywhere, the output's too, and one LayerNorm for both blocks."""
    if found.flag("qk_layernorm"):
        found.problem("qk_layernorm", "got true; parameters are counted for queries and keys without norms")
    own: dict[str, Any] = {"bias": True, "biased_parts": "head", "norm_place": "shared"}
    return _decoder(found, name, gated=False, norm="layernorm", **own)


def _starcoder2(found: Keys, name: str) -> ModelSpec:
    has = found.flag("use_bias")
    own: dict[str, Any] = {"bias": has, "biased_parts": "" if has else "norm"}
    return _decoder(found, name, gated=False, norm="layernorm", **own)


def _falcon(found: Keys, name: str) -> ModelSpec:
    """Reads Falcon: one LayerNorm for both blocks, or two; one head of keys, or groups."""
    new, parallel = found.flag("new_decoder_architecture"), found.flag("parallel_attn")
    heads = found.count("num_attention_heads")
    grouped = found.count("num_kv_heads", heads)
    norms = found.count("num_ln_in_parallel_attn", 2 if new else 1)
    hidden, has = found.count("hidden_size"), found.flag("bias")
    return _decoder(
        found,
        name,
        gated=False,
        num_kv_heads=grouped if new else 1 if found.flag("multi_query") else heads,
        ffn_hidden_size=found.count("ffn_hidden_size", min(4 * hidden, LARGEST_COUNT)),
        norm="layernorm",
        norm_place="shared" if parallel and norms == 1 else "before",
        bias=has,
        biased_parts="" if has else "norm",
    )


def _of(read: Callable[..., ModelSpec], **fields: Any) -> Callable[[Keys, str], ModelSpec]:
    return lambda found, name: read(found, name, **fields)


_READERS: Final[dict[str, Callable[[Keys, str], ModelSpec]]] = {
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "falcon": _falcon,
    "gemma": _of(_decoder),
    "gemma2": _of(_decoder, norm_place="both"),
    "gemma3_text": _of(_decoder, norm_place="both", qk_norm="head"),
    "glm4": _of(_decoder, attention="qkv", norm_place="both"),
    "glm4_moe": _glm4_moe,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "granite": _of(_decoder),
    "granitemoe": _of(_mixture, experts="num_local_experts", width="intermediate_size"),
    "llama": _of(_decoder),
    "mistral": _of(_decoder),
    "mixtral": _of(_mixture, experts="num_local_experts", width="intermediate_size"),
    "nemotron_h": _nemotron_h,
    "olmo2": _of(_decoder, norm_place="after", qk_norm="width"),
    "olmo3": _of(_decoder, norm_place="after", qk_norm="width"),
    "phi": _phi,
    "phi3": _of(_decoder),
    "qwen2": _of(_decoder, biased_parts="qkv"),
    "qwen2_moe": _qwen2_moe,
    "qwen3": _of(_decoder, qk_norm="head"),
    "qwen3_moe": _of(_qwen_moe, qk_norm="head"),
    "seed_oss": _of(_decoder, attention="qkv"),
    "smollm3": _of(_decoder),
    "starcoder2": _starcoder2,
}
"""Readers by `model_type`."""

MODEL_TYPES: Final[Sequence[str]] = tuple(sorted([*_READERS, "gemma3"]))
"""Model types whose `config.json` can be read."""

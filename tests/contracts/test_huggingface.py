"""The torch engine trains models as Hugging Face transformers does, from the same weights and its own `config.json`.

Loss and gradient norm of three optimizer steps in fp32, each engine with its own code: decoder, loss, clipping and
update here; transformers' model and loss there, with torch's clipping and AdamW. All other engines are held to the
torch engine's losses, so this holds them too. The model here is the one that `read_config` makes of the file, so a key
that is read wrong is seen too.

Weights are drawn ten times as wide as in a trial. Attention then tells tokens apart, so that positions, heads and the
router matter; at the usual width the scores are near 0 and a wrong rotation changes the loss by less than rounding.
The controls change one thing in transformers' model and must be seen.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from specs import trial_spec
from torch import Tensor, nn

from wattune.catalog.huggingface import read_config
from wattune.catalog.models import ModelSpec
from wattune.engines.model import weights
from wattune.engines.model.hyperparameters import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY
from wattune.engines.model.tokens import Batches
from wattune.engines.model.weights import draw
from wattune.engines.torch.engine import TorchEngine
from wattune.plans.engines import CAPABILITIES, untrained
from wattune.workers.engine import Ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

SEED, NUM_STEPS, SEQ_LEN = 5, 3, 24
TOLERANCE = 1e-5
SEEN = 1e-3
"""Least relative change by which a control must differ: a hundred times the tolerance."""
Steps = list[tuple[float, float]]
"""Loss and gradient norm before clipping, step by step."""

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {**SMALL, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    **MOE,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
PLAIN: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
MIXTRAL: dict[str, Any] = {**PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": PLAIN,
    "llama-tied": {**PLAIN, "tie_word_embeddings": True},
    "llama-multi-head": {**PLAIN, "num_key_value_heads": 6},
    "mixtral": MIXTRAL,
    "mixtral-of-3": {**MIXTRAL, "num_local_experts": 8, "num_experts_per_tok": 3},
    "gpt2": {
        "vocab_size": 96,
        "n_positions": 32,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 6,
        "n_inner": 80,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    "qwen3": {**SMALL, "head_dim": 20},
    "qwen2": {**SMALL, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "mistral": {**SMALL, "sliding_window": 5, "head_dim": 16},
    "olmo2": {**SMALL, "pad_token_id": None},  # a padding token's embedding has no gradient there
    "glm4_moe": {
        **MOE,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "partial_rotary_factor": 1.0,
    },
    "qwen2_moe": {**MOE, "num_experts": 6, "shared_expert_intermediate_size": 40, "norm_topk_prob": False},
    "deepseek_v3": {**LATENT, "q_lora_rank": 20, "norm_topk_prob": True},
    "deepseek_v3-whole-queries": {**LATENT, "q_lora_rank": None, "norm_topk_prob": True},
}


@pytest.fixture(autouse=True)
def wide_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "INIT_STD", 0.2)


def theirs(name: str, attention: str = "eager", **changes: Any) -> nn.Module:
    """The model of transformers; `changes` are keys of its configuration."""
    import transformers

    config = transformers.AutoConfig.for_model(name.partition("-")[0], **(CONFIGS[name] | changes))
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    return made


def read(name: str, folder: Path) -> ModelSpec:
    """The model of the file that this version of transformers writes."""
    made: Any = theirs(name)
    made.config.save_pretrained(folder)
    return read_config(folder / "config.json", name)


NAMES = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.q_b_proj": "attention.q",
    "self_attn.q_a_proj": "attention.q_a",
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attention.kv_a",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_b_proj": "attention.kv",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.o",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "ffn.gate",
    "mlp.up_proj": "ffn.up",
    "mlp.down_proj": "ffn.down",
    "mlp.gate": "ffn.router",
    "mlp.shared_expert_gate": "ffn.shared_gate",
    "mlp.shared_expert.gate_proj": "ffn.shared.gate",
    "mlp.shared_expert.up_proj": "ffn.shared.up",
    "mlp.shared_expert.down_proj": "ffn.shared.down",
    "mlp.shared_experts.gate_proj": "ffn.shared.gate",
    "mlp.shared_experts.up_proj": "ffn.shared.up",
    "mlp.shared_experts.down_proj": "ffn.shared.down",
}
"""Parts of a layer by their names in transformers, and in the torch engine."""
GPT2_NAMES = {
    "ln_1": "attention_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attention.q attention.k attention.v",
    "attn.c_proj": "attention.o",
    "mlp.c_fc": "ffn.up",
    "mlp.c_proj": "ffn.down",
}
AFTER = {"post_attention_layernorm": "attention_out_norm", "post_feedforward_layernorm": "ffn_out_norm"}
ENDS = {
    "model.embed_tokens": "embedding.tokens",
    "model.norm": "head.norm",
    "lm_head": "head.output",
    "transformer.wte": "embedding.tokens",
    "transformer.wpe": "embedding.positions",
    "transformer.ln_f": "head.norm",
}


def drawn(name: str, shape: Sequence[int]) -> Tensor:
    return draw(name, torch.Size(shape), SEED, torch.device("cpu"))


def weight(name: str, shape: torch.Size, model: ModelSpec) -> Tensor:
    """The torch engine's first value of a weight of transformers' model, by its name there."""
    module, kind = name.rsplit(".", 1)
    if module in ENDS:
        return drawn(f"{ENDS[module]}.{kind}", shape)
    _, _, layer, part = name.split(".", 3)
    if part == "mlp.experts.gate_up_proj":
        halves = [expert(layer, one, shape[1] // 2, shape) for one in ("gate", "up")]
        return torch.cat(halves, 1)
    if part == "mlp.experts.down_proj":
        return expert(layer, "down", shape[1], shape)
    module, kind = part.rsplit(".", 1)
    if module in GPT2_NAMES:
        parts = [f"layers.{layer}.{one}.{kind}" for one in GPT2_NAMES[module].split()]
        *columns, rows = shape  # its Conv1D holds [in, out], and queries, keys and values beside each other
        return torch.cat([drawn(one, [rows // len(parts), *columns]) for one in parts]).movedim(0, -1)
    known = NAMES | AFTER if model.norm_place == "after" else NAMES
    own = drawn(f"layers.{layer}.{known[module]}.{kind}", shape)
    return interleaved(own, known[module], model) if model.is_latent else own


def expert(layer: str, part: str, rows: int, shape: torch.Size) -> Tensor:
    names = (f"layers.{layer}.ffn.experts.{part}.{number}" for number in range(shape[0]))
    return torch.stack([drawn(name, [rows, shape[2]]) for name in names])


def interleaved(own: Tensor, part: str, model: ModelSpec) -> Tensor:
    """Rows of positions in the order of DeepSeek, whose pairs are neighbours: those here are two halves of a head."""
    turned = model.rope_head_dim
    if part == "attention.q":
        heads = own.view(model.num_heads, model.head_size, -1).clone()
    elif part == "attention.kv_a":
        heads = own[None].clone()
    else:
        return own
    heads[:, -turned:] = heads[:, -turned:].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return heads.view_as(own)


def started(made: nn.Module, model: ModelSpec) -> nn.Module:
    """Gives transformers' model the weights that the torch engine starts with."""
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(weight(name, parameter.shape, model))
    return made


def trained(made: nn.Module, model: ModelSpec, num_steps: int = NUM_STEPS) -> Steps:
    """Trains a model with its own loss function, torch's clipping and AdamW."""
    device = torch.device("cpu")
    batches = Batches(
        seed=SEED, vocab_size=model.vocab_size, seq_len=SEQ_LEN, replica_batch_size=4, replica=0, device=device
    )
    optimizer = torch.optim.AdamW(made.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
    steps = []
    for step in range(num_steps):
        tokens, targets = batches.at(step)
        loss = made(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(made.parameters(), CLIP_NORM)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return steps


def ours(model: ModelSpec, **axes: Any) -> Steps:
    chosen = {"dtype": "fp32", "micro_batch_size": 2} | axes
    engine = TorchEngine()
    spec = trial_spec(model, on="1x1 cpu", seq_len=SEQ_LEN, batch=4, **chosen)
    engine.build(spec, Ranks(rank=0, world_size=1, local_rank=0, device="cpu"), seed=SEED)
    steps = [engine.step() for _ in range(NUM_STEPS)]
    engine.close()
    return [(step.loss, step.grad_norm) for step in steps]


def deviation(one: Steps, other: Steps) -> float:
    """The largest relative difference of a loss or a norm."""
    pairs = zip(torch.tensor(one).flatten().tolist(), torch.tensor(other).flatten().tolist(), strict=True)
    return max(abs(a / b - 1) for a, b in pairs)


QUICK = ("llama", "mixtral", "gpt2", "qwen3", "qwen2", "mistral", "olmo2", "qwen2_moe", "deepseek_v3")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CONFIGS]
)
def test_trains_as_transformers_does(process_group: None, tmp_path: Path, name: str) -> None:
    model = read(name, tmp_path)
    assert not untrained("torch", model)
    assert deviation(ours(model), trained(started(theirs(name), model), model)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2", "deepseek_v3"])
def test_recomputing_and_either_attention_of_transformers_change_nothing(
    process_group: None, tmp_path: Path, name: str
) -> None:
    model = read(name, tmp_path)
    same = trained(started(theirs(name, attention="sdpa"), model), model)
    for recompute in ("selective", "full"):
        assert deviation(ours(model, recompute=recompute), same) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"rms_norm_eps": 1e-3}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
        ("llama", {"hidden_act": "gelu"}),
        ("mixtral", {"num_experts_per_tok": 3}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"layer_norm_epsilon": 1e-3}),
        ("qwen2", {"sliding_window": 8}),
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("deepseek_v3", {"routed_scaling_factor": 1.0}),
        ("deepseek_v3", {"rope_interleave": False}),
    ],
)
def test_another_model_is_told_apart(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    model = read(name, tmp_path)
    same, other = (trained(started(theirs(name, **each), model), model, 1) for each in ({}, changes))
    assert deviation(same, other) > SEEN


def test_pairs_of_a_rotation_and_heads_of_a_group_are_told_apart(tmp_path: Path) -> None:
    """Meta's files pair neighbours; grouped heads may be counted in either order. Both change rows of weights."""
    model = read("llama", tmp_path)
    same = trained(started(theirs("llama"), model), model, 1)
    for change in ("pairs", "groups"):
        made: Any = started(theirs("llama"), model)
        with torch.no_grad():
            for layer in made.model.layers:
                rows = layer.self_attn.q_proj.weight
                heads = rows.view(model.num_heads, model.head_size, -1)
                moved = heads.roll(1, 0) if change == "groups" else heads.unflatten(1, (-1, 2)).transpose(1, 2)
                rows.copy_(moved.reshape_as(rows))
        assert deviation(same, trained(made, model, 1)) > SEEN


OF_TORCH_ALONE: dict[str, dict[str, Any]] = {
    "other norms of queries and keys": {"qk_norm": "width"},
    "biases of single parts": {"biased_parts": "qkv o"},
    "norms in other places": {"norm_place": "after"},
    "sliding windows": {"sliding_window": 8},
    "latent attention": {"qk_norm": "none", "kv_lora_rank": 16},
}
"""Kinds that Megatron does not train here, each on its own beyond Qwen 3."""


def test_an_engine_that_lacks_a_kind_says_which_one_has_it(tmp_path: Path) -> None:
    model = replace(read("qwen3", tmp_path), name="mine")
    assert untrained("deepspeed", model) == (
        "engine deepspeed cannot train mine, which has head widths of its own, norms of queries and keys; it is "
        "estimated alone: use engine torch or megatron"
    )
    assert not untrained("megatron", replace(model, biased_parts="qkv"))
    for word, fields in OF_TORCH_ALONE.items():
        text = untrained("megatron", replace(model, **fields))
        assert text == f"engine megatron cannot train mine, which has {word}; it is estimated alone: use engine torch"
    shared = replace(model, num_experts=8, num_experts_per_token=2, shared_ffn_hidden_size=32, num_dense_layers=1)
    assert not untrained("megatron", replace(shared, router_scores="sigmoid", router_scale=2.5))
    assert "which has biases of shared experts; " in untrained("megatron", replace(shared, bias=True))
    values = replace(model, value_head_dim=8)
    assert all("values of another width" in untrained(engine, values) for engine in ("torch", "megatron"))
    latent = replace(model, **OF_TORCH_ALONE["latent attention"])
    assert not untrained("torch", latent)
    for fields in ({"qk_norm": "head"}, {"biased_parts": "qkv"}, {"bias": True}):
        assert "which has other norms or biases of latent attention; " in untrained("torch", replace(latent, **fields))
    sinks = replace(model, attention_sinks=True)
    assert "no engine here can, a command of your own may" in untrained("torch", sinks)
    assert CAPABILITIES["command"].runs_program and not untrained("command", sinks)

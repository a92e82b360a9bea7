"""Models of Hugging Face transformers with the torch engine's initial weights: nobody here wrote their mathematics.

The map goes through plain state dicts, loaded strictly: a weight that has no place, or another shape, is an error.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from wattune.catalog.models import ModelSpec
from wattune.engines.model.decoder import NORM_EPSILON
from wattune.engines.model.hyperparameters import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY
from wattune.engines.model.tokens import Batches
from wattune.engines.model.weights import draw

WeightOf = Callable[..., Tensor]
"""A weight of the whole model by its name in the torch engine, and its shape."""


def config_of(model: ModelSpec, **changes: Any) -> Any:
    """The configuration of the same model. `changes` are keys of it, to see that a comparison notices them."""
    if model.norm == "layernorm":
        return transformers.GPT2Config(
            **{
                "vocab_size": model.vocab_size,
                "n_positions": model.max_positions,
                "n_embd": model.hidden_size,
                "n_layer": model.num_layers,
                "n_head": model.num_heads,
                "n_inner": model.ffn_hidden_size,
                "activation_function": "gelu",
                "layer_norm_epsilon": NORM_EPSILON,
                **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
                **changes,
            }
        )
    own: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "rms_norm_eps": NORM_EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "tie_word_embeddings": model.tied_embeddings,
    }
    if not model.is_moe:
        return transformers.LlamaConfig(**(own | changes))
    own |= {"num_local_experts": model.num_experts, "num_experts_per_tok": model.num_experts_per_token}
    return transformers.MixtralConfig(**(own | changes))


def state_of(model: ModelSpec, weight: WeightOf) -> dict[str, Tensor]:
    """The state dict of the same model, its weights taken from the torch engine's by name."""
    state = _gpt2_state(model, weight) if model.norm == "layernorm" else _llama_state(model, weight)
    if not model.tied_embeddings:
        state["lm_head.weight"] = weight("head.output.weight", model.vocab_size, model.hidden_size)
    return state


def _llama_state(model: ModelSpec, weight: WeightOf) -> dict[str, Tensor]:
    hidden, inner, kv = model.hidden_size, model.ffn_hidden_size, model.num_kv_heads * model.head_size
    state = {
        "model.embed_tokens.weight": weight("embedding.tokens.weight", model.vocab_size, hidden),
        "model.norm.weight": weight("head.norm.weight", hidden),
    }
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        state[f"{theirs}.input_layernorm.weight"] = weight(f"{ours}.attention_norm.weight", hidden)
        state[f"{theirs}.post_attention_layernorm.weight"] = weight(f"{ours}.ffn_norm.weight", hidden)
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            state[f"{theirs}.self_attn.{name}_proj.weight"] = weight(f"{ours}.attention.{name}.weight", rows, hidden)
        if not model.is_moe:
            for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                state[f"{theirs}.mlp.{name}_proj.weight"] = weight(f"{ours}.ffn.{name}.weight", *shape)
            continue
        state[f"{theirs}.mlp.gate.weight"] = weight(f"{ours}.ffn.router.weight", model.num_experts, hidden)
        both, down = [], []
        for expert in range(model.num_experts):
            halves = [weight(f"{ours}.ffn.experts.{name}.{expert}", inner, hidden) for name in ("gate", "up")]
            both.append(torch.cat(halves))
            down.append(weight(f"{ours}.ffn.experts.down.{expert}", hidden, inner))
        state[f"{theirs}.mlp.experts.gate_up_proj"] = torch.stack(both)
        state[f"{theirs}.mlp.experts.down_proj"] = torch.stack(down)
    return state


def _gpt2_state(model: ModelSpec, weight: WeightOf) -> dict[str, Tensor]:
    hidden, inner = model.hidden_size, model.ffn_hidden_size
    state = {
        "transformer.wte.weight": weight("embedding.tokens.weight", model.vocab_size, hidden),
        "transformer.wpe.weight": weight("embedding.positions.weight", model.max_positions, hidden),
    }

    def norm(theirs: str, ours: str) -> None:
        state.update({f"{theirs}.{kind}": weight(f"{ours}.{kind}", hidden) for kind in ("weight", "bias")})

    def linear(theirs: str, ours: Iterable[str], rows: int, columns: int) -> None:
        # Its Conv1D holds [in, out], and queries, keys and values beside each other.
        state[f"{theirs}.weight"] = torch.cat([weight(f"{name}.weight", rows, columns) for name in ours]).T.contiguous()
        state[f"{theirs}.bias"] = torch.cat([weight(f"{name}.bias", rows) for name in ours])

    norm("transformer.ln_f", "head.norm")
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
        norm(f"{theirs}.ln_1", f"{ours}.attention_norm")
        norm(f"{theirs}.ln_2", f"{ours}.ffn_norm")
        linear(f"{theirs}.attn.c_attn", [f"{ours}.attention.{name}" for name in "qkv"], hidden, hidden)
        linear(f"{theirs}.attn.c_proj", [f"{ours}.attention.o"], hidden, hidden)
        linear(f"{theirs}.mlp.c_fc", [f"{ours}.ffn.up"], inner, hidden)
        linear(f"{theirs}.mlp.c_proj", [f"{ours}.ffn.down"], hidden, inner)
    return state


def model_of(
    model: ModelSpec, seed: int, *, attention: str = "eager", device: str = "cpu", **changes: Any
) -> nn.Module:
    """The model of transformers that starts where the torch engine starts on that device, in fp32.

    Args:
        model: The model.
        seed: Seed of the trial.
        attention: transformers' `attn_implementation`.
        device: Where weights are drawn and stay: processors and GPUs draw different values.
        changes: Keys of its configuration that differ.
    """
    config = config_of(model, **changes)
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    where = torch.device(device)

    def weight(name: str, *shape: int) -> Tensor:
        return draw(name, torch.Size(shape), seed, where)

    load(made.to(where), state_of(model, weight), is_tied=model.tied_embeddings)
    return made


def load(made: nn.Module, state: Mapping[str, Tensor], *, is_tied: bool) -> None:
    """Loads all weights, and makes sure that none is left as transformers drew it."""
    missing, unexpected = made.load_state_dict(state, strict=False)
    assert (set(missing), unexpected) == ({"lm_head.weight"} if is_tied else set(), []), (missing, unexpected)


def written_config(model: ModelSpec, folder: Path) -> Path:
    """The `config.json` that transformers writes for the same model."""
    config_of(model).save_pretrained(folder)
    return folder / "config.json"


def trained(made: nn.Module, batches: Batches, num_steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm before clipping, step by step: its loss function, torch's clipping and AdamW."""
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

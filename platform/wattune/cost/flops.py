"""Model FLOPs of a step: those the mathematics needs. What a machine computes again, drops or masks changes nothing."""

from typing import Final

from wattune.catalog.models import ModelSpec
from wattune.workload import Lora, Workload

TRAINING_PASSES: Final = 3
"""Matrix products of a training step, in forward passes: a backward pass counts two, one for gradients of activations
and one for those of weights (Kaplan et al. 2020, arXiv 2001.08361, section 2.1)."""

FROZEN_PASSES: Final = 2
"""The same for weights that are not trained: only gradients of activations pass through them. Attention's scores and
values have no weights. Both their factors are activations, so they keep their `TRAINING_PASSES` (Dao 2023, arXiv
2307.08691, section 4.1: two products forward, five backward of which one computes the scores again)."""


def forward_flop_per_token(model: ModelSpec, seq_len: int) -> float:
    """Counts floating-point operations of one token's forward pass, a multiply and an add as two.

    Matrix products only: 2 per weight that the token meets (chosen experts and router in a mixture, output projection
    included, embedding look-up not), and 4 h s per layer for scores and values in attention, halved for the causal
    mask. Formula of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B: 6 N + 12 L H Q T per trained token) and
    of Narayanan et al. 2021 (arXiv 2104.04473, equation 3, there 96 B s l h^2 (1 + s/6h + V/16lh) with recomputation),
    with grouped-query attention, gated feed-forward blocks and experts counted as they are, and half their attention.
    llama3_8b at 8,192 tokens: 17.16e9.
    """
    return _layers_flop(model) + _attention_flop(model, seq_len) + _head_flop(model)


def _layers_flop(model: ModelSpec) -> float:
    """Counts those of all layers' weights, for one token forward."""
    h = model.hidden_size
    kv = model.num_kv_heads * model.head_size
    projections = 2 * h * h + 2 * h * kv
    matrices = 3 if model.activation == "swiglu" else 2
    ffn = matrices * h * model.ffn_hidden_size
    if model.is_moe:
        ffn = model.num_experts_per_token * ffn + model.num_experts * h
    return model.num_layers * 2 * (projections + ffn)


def _attention_flop(model: ModelSpec, seq_len: int) -> float:
    """Counts those of all layers' scores and values under a causal mask, for one token forward."""
    return model.num_layers * 4 * model.hidden_size * seq_len / 2


def _head_flop(model: ModelSpec) -> float:
    """Counts those of the output projection, for one position."""
    return 2 * model.hidden_size * model.vocab_size


def _adapters_flop(model: ModelSpec, lora: Lora) -> float:
    """Counts those of low-rank adapters, for one token forward: 2 r (inputs + outputs) beside each target."""
    h, kv, inner = model.hidden_size, model.num_kv_heads * model.head_size, model.ffn_hidden_size
    widths = {"q": 2 * h, "k": h + kv, "v": h + kv, "o": 2 * h, "gate": h + inner, "up": h + inner, "down": h + inner}
    return model.num_layers * 2 * lora.rank * sum(widths[name] for name in lora.targets)


def model_flop_per_token(model: ModelSpec, seq_len: int) -> float:
    """Counts model FLOPs per token when all weights are trained, without recomputation.

    llama3_8b trained at 8,192 tokens: 51.5e9, of which attention is 6.4e9.
    """
    return TRAINING_PASSES * forward_flop_per_token(model, seq_len)


def workload_flop_per_token(model: ModelSpec, workload: Workload) -> float:
    """Counts model FLOPs per token of a workload, averaged over a sequence, without recomputation.

    - `pretrain`: `model_flop_per_token`.
    - `lora`: `FROZEN_PASSES` of the model's weights and `TRAINING_PASSES` of attention and of the adapters (Hu et al.
      2021, arXiv 2106.09685, section 4.1: h = W x + B A x). Below the first adapter no gradient is needed. What an
      implementation saves there (the first layer's inputs) is not subtracted.
    - `prefill`: one forward pass of the layers over every token, and the output projection at the last position of
      each sequence only, where the next token is wanted.
    """
    if workload.mode == "prefill":
        head = _head_flop(model) / workload.seq_len
        return _layers_flop(model) + _attention_flop(model, workload.seq_len) + head
    if workload.mode == "lora":
        assert workload.lora is not None, "mode lora has adapters"
        trained = _attention_flop(model, workload.seq_len) + _adapters_flop(model, workload.lora)
        return FROZEN_PASSES * (_layers_flop(model) + _head_flop(model)) + TRAINING_PASSES * trained
    return model_flop_per_token(model, workload.seq_len)

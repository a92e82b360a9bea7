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
    mask, or what a window leaves of it; each kind of layer counts as it is. Formula of PaLM (Chowdhery et al. 2022,
    arXiv 2204.02311, appendix B: 6 N + 12 L H Q T per trained token) and of Narayanan et al. 2021 (arXiv 2104.04473,
    equation 3, there 96 B s l h^2 (1 + s/6h + V/16lh) with recomputation), with grouped-query attention, gated
    feed-forward blocks and experts counted as they are, and half their attention.
    llama3_8b at 8,192 tokens: 17.16e9.
    """
    return _layers_flop(model) + _attention_flop(model, seq_len) + _head_flop(model)


def _layers_flop(model: ModelSpec) -> float:
    """Counts those of all layers' weights, for one token forward."""
    return float(sum(count * 2 * _layer_weights(kind) for kind, count in model.kinds)) + _heads_to_come_flop(model)


def _layer_weights(kind: ModelSpec) -> int:
    """Counts weights that a token is multiplied with in a layer of one kind."""
    mixer = sum(each.inputs * each.outputs for each in kind.mixer)
    if not kind.has_ffn:
        return mixer
    h = kind.hidden_size
    ffn = kind.ffn_matrices * h * kind.ffn_hidden_size
    if kind.is_moe:
        shared = kind.ffn_matrices * h * kind.shared_ffn_hidden_size + kind.shared_expert_gate * h
        ffn = kind.num_experts_per_token * ffn + kind.num_experts * h + shared
    return mixer + ffn


def _heads_to_come_flop(model: ModelSpec) -> float:
    """Counts those of multi-token heads without attention and output: a projection of two inputs, and a layer each."""
    if not model.num_mtp_layers:
        return 0.0
    return model.num_mtp_layers * 2.0 * (2 * model.hidden_size**2 + _layer_weights(model.kinds[-1][0]))


def held_weights(kind: ModelSpec) -> tuple[int, int]:
    """Counts weights of matrices in a layer of one kind, experts apart: those that tensor parallel cuts, and others."""
    sizes = [(each.inputs * each.outputs, bool(each.cut)) for each in kind.mixer]
    ffn = kind.ffn_matrices * kind.hidden_size * kind.every_ffn_width
    return sum(size for size, cut in sizes if cut) + ffn, sum(size for size, cut in sizes if not cut)


def attended(kind: ModelSpec, seq_len: int) -> float:
    """Returns the mean number of tokens that a token attends to in a layer of one kind: half, or within its window."""
    window = min(kind.sliding_window or seq_len, seq_len)
    return window - window * window / (2 * max(seq_len, 1))


def mixing_flop(kind: ModelSpec, seq_len: int) -> float:
    """Counts those of one layer's scores and values under its mask, for one token forward.

    Of Mamba2 the update of each state and what is read of it, 4 a number of state (Dao and Gu 2024, arXiv 2405.21060,
    section 6, without the products that its chunks add), and the convolution.
    """
    if kind.has_ssm:
        convolved = kind.query_width + 2 * kind.ssm_num_groups * kind.ssm_state_size
        return 4.0 * kind.query_width * kind.ssm_state_size + 2.0 * kind.ssm_conv_size * convolved
    return 2 * (kind.query_width + kind.output_width) * attended(kind, seq_len)


def _attention_flop(model: ModelSpec, seq_len: int) -> float:
    """Counts those of all layers' scores and values under their masks, for one token forward."""
    heads = model.num_mtp_layers * mixing_flop(model.kinds[-1][0], seq_len)
    return sum(count * mixing_flop(kind, seq_len) for kind, count in model.kinds) + heads


def _head_flop(model: ModelSpec) -> float:
    """Counts those of the output projection, for one position."""
    return 2 * model.hidden_size * model.vocab_size * (1 + model.num_mtp_layers)


def _adapters_flop(model: ModelSpec, lora: Lora) -> float:
    """Counts those of low-rank adapters, for one token forward: 2 r (inputs + outputs) beside each target."""
    sides = [(adapted(kind), count) for kind, count in model.kinds]
    return sum(count * 2 * lora.rank * sum(sum(own.get(name, (0, 0))) for name in lora.targets) for own, count in sides)


def adapted(kind: ModelSpec) -> dict[str, tuple[int, int]]:
    """Returns inputs and outputs of the linear layers of one kind that adapters can stand beside."""
    h, inner = kind.hidden_size, kind.ffn_hidden_size
    found = {each.name.removesuffix("_b"): (each.inputs, each.outputs) for each in kind.mixer}
    return {**found, "gate": (h, inner), "up": (h, inner), "down": (inner, h)} if kind.has_ffn else found


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

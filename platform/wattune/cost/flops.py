"""Model FLOPs of a step: what the mathematics needs, whatever the machine computes again, drops or masks out."""

from typing import Final

from wattune.catalog.models import ModelSpec

PASSES: Final = {"pretrain": 3, "lora": 2, "prefill": 1}
"""Forward passes' worth of matrix products by workload mode.

A backward pass is two: gradients of activations and of weights (Kaplan et al. 2020, arXiv 2001.08361, section 2.1).
LoRA trains no weight of the model, so the second is left out; its adapters' own products are too few to count.
"""


def forward_flop_per_token(model: ModelSpec, seq_len: int) -> float:
    """Floating-point operations of one token's forward pass, a multiply and an add counted as two.

    Matrix products only: 2 per weight the token meets (chosen experts and router in a mixture, output projection
    included, embedding look-up not), and 4 h s per layer for scores and values in attention, halved for the causal
    mask. Formula of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B: 6 N + 12 L H Q T per trained token) and
    of Narayanan et al. 2021 (arXiv 2104.04473, equation 3, there 96 B s l h^2 (1 + s/6h + V/16lh) with recomputation),
    with grouped-query attention, gated feed-forward blocks and experts counted as they are, and half their attention.

    Args:
        model: The model.
        seq_len: Tokens a sequence.

    Returns:
        The count. llama3_8b at 8,192 tokens: 17.16e9.
    """
    h = model.hidden_size
    kv = model.num_kv_heads * model.head_size
    projections = 2 * h * h + 2 * h * kv
    matrices = 3 if model.activation == "swiglu" else 2
    ffn = matrices * h * model.ffn_hidden_size
    if model.is_moe:
        ffn = model.num_experts_per_token * ffn + model.num_experts * h
    causal_attention = 4 * h * seq_len / 2
    return model.num_layers * (2 * (projections + ffn) + causal_attention) + 2 * h * model.vocab_size


def model_flop_per_token(model: ModelSpec, seq_len: int, mode: str = "pretrain") -> float:
    """Model FLOPs per token of a workload, without recomputation.

    Args:
        model: The model.
        seq_len: Tokens a sequence.
        mode: A key of `PASSES`.

    Returns:
        The count. llama3_8b trained at 8,192 tokens: 51.5e9, of which attention is 6.4e9.
    """
    return PASSES[mode] * forward_flop_per_token(model, seq_len)


def model_flop_per_step(model: ModelSpec, *, seq_len: int, global_batch_size: int, mode: str = "pretrain") -> float:
    """Model FLOPs of one optimizer step over the whole global batch, all ranks together.

    Returns:
        The count. gpt3_175b, 1,536 sequences of 2,048 tokens: 3.34e18.
    """
    return seq_len * global_batch_size * model_flop_per_token(model, seq_len, mode)

"""Activations that a layer keeps for its backward pass, and what it needs beside them while it runs.

Sizes are bytes of one micro-batch in one layer of one rank. The formulas count the tensors that the engines' own graphs
keep, not those of Korthikanti et al. 2022 (arXiv 2205.05198, table 2: s b h (18 + 4 f/h) / t with selective
recomputation for f = 4 h and dropout), since no engine here drops anything and attention is a fused kernel.

Legend: t tokens of a micro-batch, h hidden size, q and kv widths of queries and of keys or values, f inner width, R
rows that the experts of a rank receive, T tensor parallel degree.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from wattune.arrays import Bools, Floats
from wattune.catalog.models import ONE_BLOCK, ModelSpec
from wattune.cost.memory.shapes import Shapes

EAGER_LOGIT_BYTES: Final = 12
"""Bytes of a logit without a compiled head: in bf16 twice, log-probabilities and their gradient in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one micro-batch in one layer, [candidates, 1]."""

    saved: Floats
    """Kept from the forward to the backward pass under the plan's recomputation, the layer's input included."""
    whole: Floats
    """Kept without recomputation: under full recomputation a layer's own backward pass has them too."""
    input: Floats
    """Of these the input of the layer, which is the output of the one before."""
    working: Floats
    """Gradients of activations beside them at the worst moment of the backward pass."""
    experts: Floats
    """Of `whole` what the experts' own backward pass frees; 0 in a dense layer."""
    forward: Floats
    """Held at most in a forward pass that keeps nothing."""
    late: Floats
    """Activations less those kept, with gradients of them, once all weights' gradients of the block are there."""

    def where(self, chosen: Bools, other: "LayerBytes") -> "LayerBytes":
        """Takes another layer's bytes where a candidate is not chosen."""
        return LayerBytes(
            **{
                field.name: np.where(chosen, getattr(self, field.name), getattr(other, field.name))
                for field in fields(self)
            }
        )


def compiled_layer(shapes: Shapes) -> LayerBytes:
    """Counts a dense layer that runs as one compiled graph, as the torch engine's.

    The partitioner of `torch.compile` keeps the inputs of matrix products and of attention and the sums behind them:
    input, both norms' outputs, queries, keys, values, attention's output twice (as attention and as the projection
    take it), the projection's output, and three tensors of the gated block (two of GELU's). Read from its graphs
    (`aot_eager_decomp_partition`, torch 2.13). Selective recomputation leaves out attention's own.

    Graphs of linear layers in FP8 compute and round the norms' outputs and the block's product again, and keep
    attention's output once: peaks on one H200 are less by just that, to 0.1 % of it
    (`benchmarks/data/dense_llama_1b_h200.parquet`). Outputs of norms that tensor parallel gathered are counted as kept;
    no such plan was measured in FP8.
    """
    model, item, t, tp = shapes.model, shapes.item_bytes, shapes.tokens, shapes.tp
    h, f = model.hidden_size, model.ffn_hidden_size * model.has_ffn
    row, blocks = item * t * h, _blocks(model)
    inner = model.ffn_matrices * item * t * f / tp
    # Tensor parallel cuts input and sums by the sequence. Norms' outputs are gathered before their products.
    outside = blocks * row / tp + blocks * row
    projections = _projections(shapes)
    mixed = item * t * model.output_width
    attention = 2 * mixed / tp + _statistics(shapes)
    one = item * t * f / tp
    if shapes.casts_products:
        attention = attention - mixed / tp
        outside, inner = outside - np.where(tp > 1, 0, blocks * row), inner - one
    whole = outside + projections + attention + inner
    if item == 4 and model.num_key_heads != model.num_heads and model.has_attention:
        # No fused kernel of torch 2.11 takes fp32 with grouped queries, so scores are stored.
        scores = 4 * model.num_heads / tp * t * t / shapes.micro_batch_size
        whole, attention = whole + scores, attention + scores
    else:
        scores = np.zeros_like(row)
    if shapes.mode == "lora":
        # Frozen products keep no inputs: the second norm's output, the inner one, attention's copy, the addend.
        whole = whole - row - one - 2 * row / tp
    # In FP8 the product of the block is there again beside gradients of both its factors, in bf16 and in FP8: 16 rows
    # where two runs of the inner width of four show 16.2 and 16.5.
    working = 4 * one if shapes.casts_products else 2 * row + one + scores
    return _recomputed(shapes, whole=whole, selective=whole - attention, working=working, late=2 * row - one)


def eager_layer(shapes: Shapes) -> LayerBytes:
    """Counts a dense layer that runs operator by operator, as DeepSpeed's where it puts hooks or collectives inside.

    Autograd keeps each operator's inputs (`wattune/engines/model/decoder.py`): input, norm's output, rotated queries
    and keys, values, attention's output, the sum, the second norm's output, and of the gated block both projections,
    the activation and the product. Recomputing attention keeps queries and keys before their rotation instead.
    """
    model, item, t, tp = shapes.model, shapes.item_bytes, shapes.tokens, shapes.tp
    h, f = model.hidden_size, model.ffn_hidden_size * model.has_ffn
    row = item * t * h
    inner = (4 if model.is_gated else 2) * item * t * f / tp
    statistics = _statistics(shapes)
    whole = 2 * _blocks(model) * row + _projections(shapes) + item * t * model.output_width / tp + inner + statistics
    return _recomputed(
        shapes,
        whole=whole,
        selective=whole - statistics,
        working=2 * row + 2 * item * t * f / tp,
        late=2 * row,
    )


def layer(shapes: Shapes, *, compiled: bool, gathers: bool) -> LayerBytes:
    """Counts a layer of this platform's decoder."""
    if shapes.model.is_moe:
        return mixture_layer(shapes, compiled=compiled, gathers=gathers)
    return compiled_layer(shapes) if compiled else eager_layer(shapes)


def mixture_layer(shapes: Shapes, *, compiled: bool, gathers: bool) -> LayerBytes:
    """Counts a layer with experts: attention, then routing, exchange and experts operator by operator.

    `wattune/engines/model/experts.py`: each of R rows keeps the token (h), both projections, the activation and the
    product (4 f / T), and the result (h). Expert parallel ranks receive as many rows as they send where routing is
    balanced.
    """
    model, item, t, tp = shapes.model, shapes.item_bytes, shapes.tokens, shapes.tp
    h, blocks = model.hidden_size, _blocks(model)
    row = item * t * h
    rows = received_rows(shapes)
    # DeepSpeed's own expert layer keeps one of the four less (measured on H200).
    matrices = (4 if gathers else 3) if model.is_gated else 2
    inner = matrices * item * rows * model.ffn_hidden_size / shapes.etp
    # `index_add` keeps what it adds, and with expert parallel `index_copy` what it copies.
    wide, copied = item * rows * h, 1 + (shapes.ep > 1)
    experts = (2 + copied * gathers) * wide + inner + 8 * 4 * rows
    experts = experts + matrices * item * t * model.shared_ffn_hidden_size / tp
    outside = blocks * row / tp + blocks * row
    projections = _projections(shapes)
    attention = (2 if compiled else 1) * item * t * model.output_width / tp + _statistics(shapes)
    whole = outside + projections + attention + experts
    one = item * rows * model.ffn_hidden_size / shapes.etp
    return _recomputed(
        shapes,
        whole=whole,
        selective=whole - attention,
        # Two gradients of results and their product with them, or the block's three inputs with gradients of as many.
        working=np.where(gathers, np.maximum(2 * one - (1 + copied) * wide, 2 * wide), 2 * (one + wide)),
        late=np.where(gathers, (1 - copied) * wide - 3 * one, 2 * (wide - one)),
        experts=experts - wide * gathers,  # the gradient of their input is there
    )


def megatron_layer(shapes: Shapes) -> LayerBytes:
    """Counts a layer of Megatron-Core's local specification with this engine's norms, attention and experts.

    Sequence parallelism keeps inputs of products cut and gathers them again. Kept are the input, both norms' outputs,
    the fused queries, keys and values, a copy of the queries, rotated queries and keys, attention's output, the sum,
    and of the feed-forward block the fused first product and the activation (`wattune/engines/megatron/layers.py`).
    Three rows a token more in a layer with experts were measured on H200.

    TransformerEngine's layers keep no copies of queries, keys and values, and selective recomputation keeps as much. In
    FP8 the inputs of three products are kept in one byte: both norms' outputs and the activation's. Peaks of 24 plans
    of a GPT on one H200 rise by 16.0 rows of h a token and layer in bf16, and by 13.0 in FP8
    (`benchmarks/data/dense_gpt_1b_h200.parquet`).
    """
    model, item, t, tp = shapes.model, shapes.item_bytes, shapes.tokens, shapes.tp
    h, blocks = model.hidden_size, _blocks(model)
    row, queries, mixed = (item * t * width / tp for width in (h, model.query_width, model.output_width))
    narrow = item * t * model.kv_width / 2 / tp
    turned = queries + narrow if model.positions == "rope" and model.has_attention else np.zeros_like(row)
    attention = 2 * blocks * row + queries + mixed + 2 * narrow + turned + _statistics(shapes)
    less = row if shapes.casts_products else 0
    attention = attention - less if shapes.transformer_engine else attention + 2 * queries
    gated = model.is_gated
    if model.is_moe:
        rows = received_rows(shapes) / tp * shapes.etp
        wide = item * rows * h
        inner = item * rows * model.ffn_hidden_size / shapes.etp
        shared = item * t * model.every_ffn_width / tp
        experts = 2 * wide + (3 if gated else 2) * (inner + shared) + 3 * row
    else:
        inner = item * t * model.every_ffn_width / tp
        experts = (3 if gated else 2) * inner - (inner / 2 if shapes.casts_products else 0)
    whole = attention + experts - (inner if shapes.mode == "lora" else 0)
    d_first = (2 if gated else 1) * inner
    return _recomputed(
        shapes,
        whole=whole,
        selective=whole if shapes.transformer_engine else whole - turned,
        working=2 * row + d_first,
        late=2 * row - inner,
        experts=experts if model.is_moe else None,
    )


def mean_layer(shapes: Shapes, layer_of: Callable[[Shapes], LayerBytes]) -> LayerBytes:
    """Counts the mean layer of a model: what is kept by the shares of its kinds, what one holds at a time at most."""
    found = [(layer_of(shapes.kind(kind)), share) for kind, share in shapes.model.shares]
    if len(found) == 1:
        return found[0][0]
    columns = {each.name: [getattr(one, each.name) for one, _ in found] for each in fields(LayerBytes)}
    mean = {
        name: np.add.reduce([one * share for one, (_, share) in zip(columns[name], found, strict=True)])
        for name in columns
    }
    most = {name: np.maximum.reduce(columns[name]) for name in ("whole", "working", "experts", "forward", "late")}
    return LayerBytes(**(mean | most))


def _blocks(model: ModelSpec) -> int:
    """Returns blocks of a layer, each with a norm before it, or two halves: a norm's output and a sum are kept of each.

    Norms behind a block keep one row more, their input.
    """
    return 1 if model.layer_kinds in ONE_BLOCK else 3 if model.norm_place == "both" else 2


def _projections(shapes: Shapes) -> Floats:
    """Counts bytes of queries, keys and values, and of what latent attention passes them through."""
    model, size = shapes.model, shapes.item_bytes * shapes.tokens
    latent = model.q_lora_rank + model.kv_lora_rank + model.rope_head_dim if model.has_attention else 0
    normed = (model.query_width + model.kv_width // 2) * (model.qk_norm != "none") * model.has_attention
    return size * (model.query_width + model.kv_width + normed) / shapes.tp + 2 * size * latent


def _statistics(shapes: Shapes) -> Floats:
    """Counts bytes of attention's logarithms of sums, in fp32."""
    return 4 * shapes.tokens * shapes.model.num_heads * shapes.model.has_attention / shapes.tp


def received_rows(shapes: Shapes) -> Floats:
    """Counts rows that the experts of the fullest rank receive of a micro-batch: t k where routing is balanced."""
    return shapes.tokens * shapes.model.num_experts_per_token * shapes.imbalance


def _recomputed(
    shapes: Shapes, *, whole: Floats, selective: Floats, working: Floats, late: Floats, experts: Floats | None = None
) -> LayerBytes:
    row = shapes.item_bytes * shapes.tokens * shapes.model.hidden_size / shapes.tp
    return LayerBytes(
        saved=np.choose(shapes.recompute, [whole, selective, row]),
        whole=whole,
        input=row,
        working=working,
        late=late,
        forward=whole + 4 * row,
        experts=np.zeros_like(whole) if experts is None else experts,
    )

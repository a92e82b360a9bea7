"""Activations that a layer keeps for its backward pass, and what it needs beside them while it runs.

Sizes are bytes of one micro-batch in one layer of one rank. The formulas count the tensors that the engines' own graphs
keep, not those of Korthikanti et al. 2022 (arXiv 2205.05198, table 2: s b h (18 + 4 f/h) / t with selective
recomputation for f = 4 h and dropout), since no engine here drops anything and attention is a fused kernel.

Legend: t tokens of a micro-batch, h hidden size, q and kv widths of queries and of keys or values, f inner width, R
rows that the experts of a rank receive, T tensor parallel degree.
"""

from dataclasses import dataclass

import numpy as np

from wattune.cost.batch import Floats
from wattune.cost.memory.shapes import Shapes


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
    late: Floats
    """Activations less those kept, with gradients of them, once all weights' gradients of the block are there."""


def compiled_layer(shapes: Shapes) -> LayerBytes:
    """Counts a dense layer that runs as one compiled graph, as the torch engine's.

    The partitioner of `torch.compile` keeps the inputs of matrix products and of attention and the sums behind them:
    input, both norms' outputs, queries, keys, values, attention's output twice (as attention and as the projection
    take it), the projection's output, and three tensors of the gated block (two of GELU's). Read from its graphs
    (`aot_eager_decomp_partition`, torch 2.13). Selective recomputation leaves out attention's own.
    """
    model, item, t, tp = shapes.model, shapes.item_bytes, shapes.tokens, shapes.tp
    h, kv = model.hidden_size, model.num_kv_heads * model.head_size
    row = item * t * h
    inner = (3 if model.activation == "swiglu" else 2) * item * t * model.ffn_hidden_size / tp
    # Tensor parallel cuts input and sums by the sequence. Norms' outputs are gathered before their products.
    outside = 2 * row / tp + 2 * row
    projections = (row + 2 * item * t * kv) / tp
    attention = 2 * row / tp + 4 * t * model.num_heads / tp
    whole = outside + projections + attention + inner
    if item == 4 and model.num_kv_heads != model.num_heads:
        # No fused kernel of torch 2.11 takes fp32 with grouped queries, so scores are stored.
        scores = 4 * model.num_heads / tp * t * t / shapes.micro_batch_size
        whole, attention = whole + scores, attention + scores
    else:
        scores = np.zeros_like(row)
    one = item * t * model.ffn_hidden_size / tp
    return _recomputed(shapes, whole=whole, selective=whole - attention, working=2 * row + one + scores, late=2 * row - one)


def eager_layer(shapes: Shapes) -> LayerBytes:
    """Counts a dense layer that runs operator by operator, as DeepSpeed's where it puts hooks or collectives inside.

    Autograd keeps each operator's inputs (`wattune/engines/model/decoder.py`): input, norm's output, rotated queries
    and keys, values, attention's output, the sum, the second norm's output, and of the gated block both projections, the
    activation and the product. Recomputing attention keeps queries and keys before their rotation instead.
    """
    model, item, t, tp = shapes.model, shapes.item_bytes, shapes.tokens, shapes.tp
    h, kv = model.hidden_size, model.num_kv_heads * model.head_size
    row = item * t * h
    inner = (4 if model.activation == "swiglu" else 2) * item * t * model.ffn_hidden_size / tp
    statistics = 4 * t * model.num_heads / tp
    whole = 4 * row + (2 * row + 2 * item * t * kv) / tp + inner + statistics
    return _recomputed(
        shapes,
        whole=whole,
        selective=whole - statistics,
        working=2 * row + 2 * item * t * model.ffn_hidden_size / tp,
        late=2 * row,
    )


def mixture_layer(shapes: Shapes, *, compiled: bool) -> LayerBytes:
    """Counts a layer with experts: attention, then routing, exchange and experts operator by operator.

    `wattune/engines/model/experts.py`: each of R rows keeps the token (h), both projections, the activation and the
    product (4 f / T), and the result (h). Expert parallel ranks receive as many rows as they send where routing is
    balanced.
    """
    model, item, t, tp = shapes.model, shapes.item_bytes, shapes.tokens, shapes.tp
    h, kv = model.hidden_size, model.num_kv_heads * model.head_size
    row = item * t * h
    rows = received_rows(shapes)
    matrices = 4 if model.activation == "swiglu" else 2
    inner = matrices * item * rows * model.ffn_hidden_size / shapes.etp
    # Measured on H200: with expert parallel one more row of each assignment, with tensor parallel two of each token.
    experts = (2 + (shapes.ep > 1)) * item * rows * h + inner + 8 * 4 * rows
    outside = 2 * row / tp + 2 * row + 2 * row * (tp > 1)
    projections = (row + 2 * item * t * kv) / tp
    attention = (2 if compiled else 1) * row / tp + 4 * t * model.num_heads / tp
    whole = outside + projections + attention + experts
    one = item * rows * model.ffn_hidden_size / shapes.etp
    return _recomputed(
        shapes,
        whole=whole,
        selective=whole - attention,
        working=2 * item * rows * h + 2 * one,
        late=2 * item * rows * h - 2 * one,
        experts=experts,
    )


def received_rows(shapes: Shapes) -> Floats:
    """Counts rows that the experts of a rank receive of a micro-batch: t k where routing is balanced."""
    return shapes.tokens * shapes.model.num_experts_per_token


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
        experts=np.zeros_like(whole) if experts is None else experts,
    )

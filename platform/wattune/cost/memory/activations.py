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
    forward: Floats
    """Held at most in a forward pass that keeps nothing."""


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
    return _recomputed(shapes, whole=whole, selective=whole - attention, working=2 * row + item * t * model.ffn_hidden_size / tp)


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
        shapes, whole=whole, selective=whole - statistics,
        working=2 * row + 2 * item * t * model.ffn_hidden_size / tp,
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
    experts = 2 * item * rows * h + inner + 8 * 4 * rows
    outside = 2 * row / tp + 2 * row
    projections = (row + 2 * item * t * kv) / tp
    attention = (2 if compiled else 1) * row / tp + 4 * t * model.num_heads / tp
    whole = outside + projections + attention + experts
    working = 2 * item * rows * h + 2 * item * rows * model.ffn_hidden_size / shapes.etp
    return _recomputed(shapes, whole=whole, selective=whole - attention, working=working)


def received_rows(shapes: Shapes) -> Floats:
    """Counts rows that the experts of a rank receive of a micro-batch: t k where routing is balanced."""
    return shapes.tokens * shapes.model.num_experts_per_token


def _recomputed(shapes: Shapes, *, whole: Floats, selective: Floats, working: Floats) -> LayerBytes:
    row = shapes.item_bytes * shapes.tokens * shapes.model.hidden_size / shapes.tp
    saved = np.choose(shapes.recompute, [whole, selective, row])
    return LayerBytes(saved=saved, whole=whole, input=row, working=working, forward=whole)

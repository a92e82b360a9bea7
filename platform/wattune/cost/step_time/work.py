"""Work of a device in one pass of one micro-batch: a decoder layer, the embedding, and the head with its loss.

Legend: T tokens of a micro-batch on one context parallel rank, h hidden size, f inner width, W bytes of a number.
Bytes of memory-bound kernels count every read and write of a fused kernel's inputs and outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Final, Self

import numpy as np

from wattune.arrays import Floats
from wattune.catalog.hardware import DeviceSpec
from wattune.catalog.models import ONE_BLOCK, ModelSpec
from wattune.cost.coefficients import StepTimeCoefficients
from wattune.cost.flops import adapted, mixing_flop
from wattune.cost.step_time.facts import EngineFacts
from wattune.cost.step_time.matmul import matmul_s
from wattune.errors import PlanError
from wattune.plans.axes import HELD_IN, ITEM_BYTES
from wattune.workload import Workload

EAGER_BYTES: Final = 1.6
"""Bytes of element-wise kernels over those of fused ones, where a layer is not compiled."""

NARROW_ENERGY_EXPONENT: Final = 0.5
"""An operation s times as fast in a narrower type draws s^-0.5 of the energy: its operands have 1/s of the bits, its
sum stays fp32. Of steps of 1/8 between 0 and 1 it fits the published fp8 steps on H100 best, and also when any one of
their six sources but MaxText is left out (0.375 without MaxText); fp8 and fp4 on Blackwell were not fitted to."""


FP8_CAST_BYTES: Final = 5
"""Bytes to cast one bf16 number to fp8: read for the largest value, read again, and written. torchao 0.18.0 casts
weights and inputs of linear layers in the forward pass of every micro-batch, and both with the gradients of outputs in
the backward pass (`float8_linear.py`, dynamic scaling)."""


class Summable:
    """A record whose fields are added each to each, and multiplied by one factor."""

    __slots__: tuple[str, ...] = ()

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __mul__(self, factor: Floats | float) -> Self:
        return type(self)(*(getattr(self, name) * factor for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class PassTimes(Summable):
    """Seconds of one pass at the highest clock, each an array of one shape."""

    matrix_s: Floats
    """In matrix products and attention."""
    memory_s: Floats
    """In kernels that memory bounds, and gaps between kernels."""
    host_s: Floats
    """Of the host to issue them; it runs beside the device."""
    stall_s: Floats
    """Of the host to issue kernels that follow a wait for the device; the device idles."""
    flop: Floats
    """Floating-point operations of the products, those of a narrower type counted by their energy."""
    experts_s: Floats | float = 0.0
    """Of both kinds of seconds on the device, those in experts."""


@dataclass(frozen=True, slots=True)
class ModelPart(Summable):
    """A part of the model in both directions."""

    forward: PassTimes
    backward: PassTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShapes:
    """Degrees that decide shapes, one row for each distinct combination."""

    tp: Floats
    cp: Floats
    ep: Floats
    etp: Floats
    tokens: Floats
    """T."""
    recompute: Floats
    gathers: Floats
    """1 where weights are gathered for each pass."""
    loss_again: Floats
    """1 where logits and loss are computed again in the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates of one device."""

    flop_per_s: float
    bytes_per_s: float
    coefficients: StepTimeCoefficients
    item_bytes: int
    cast_bytes: int = 0
    """Bytes that the cast of a number to the type of the products moves, where its scale is found anew for each."""

    @classmethod
    def of(cls, device: DeviceSpec, dtype: str, coefficients: StepTimeCoefficients) -> "Machine":
        """Reads the catalog.

        In fp8 the layers' linear products run at the peak of that type and all else, the head's product too, at that of
        bf16, as `wattune/engines/torch/float8.py` has it. The share of its peak that a product reaches is taken from
        bf16: steps that the device bounds come out 4 to 13 % too short so
        (`benchmarks/data/dense_llama_1b_h200.parquet`), those in bf16 on the same device 1 to 10 %. Raises `PlanError`
        where it does not have the device's rates.
        """
        held = HELD_IN[dtype]
        flop_per_s, link = device.peak_flop_per_s(held), device.link_bandwidth_bytes_per_s
        narrow_flop_per_s, memory = device.peak_flop_per_s(dtype), device.memory_bandwidth_bytes_per_s
        if flop_per_s is None or narrow_flop_per_s is None or memory is None or link is None:
            raise PlanError(
                f'the peaks of "{device.name}" are not in the catalog, so no step time can be predicted for it; '
                "name a device with known peaks in `cluster`"
            )
        if dtype != held:
            kernel = replace(coefficients.kernel, linear_speedup=narrow_flop_per_s / flop_per_s)
            coefficients = replace(coefficients, kernel=kernel)
        return cls(
            flop_per_s=flop_per_s,
            bytes_per_s=memory,
            coefficients=coefficients,
            item_bytes=ITEM_BYTES[dtype],
            cast_bytes=FP8_CAST_BYTES if dtype == "fp8" else 0,
        )

    def products(self, shapes: Sequence[tuple[Floats, Floats, Floats]], frac: Floats | float) -> tuple[Floats, Floats]:
        """Predicts seconds and floating-point operations of matrix products that run one after another."""
        m, n, k = (np.stack(np.broadcast_arrays(*column)) for column in zip(*shapes, strict=True))
        rate = self.flop_per_s * frac
        wide = self.item_bytes / 2
        seconds = matmul_s(m, n, k, flop_per_s=rate, bytes_per_s=self.bytes_per_s / wide).sum(axis=0)
        return seconds, (2 * m * n * k).sum(axis=0)

    def moving_s(self, size_bytes: Floats, kernels: float) -> Floats:
        """Predicts kernels that memory bounds, and the gaps between them."""
        c = self.coefficients
        return size_bytes / (self.bytes_per_s * c.kernel.memory_frac) + kernels * c.overhead.launch_s


Linear = tuple[Floats, Floats]
"""Output and input width on one rank."""


def _linears(model: ModelSpec, shapes: KernelShapes, facts: EngineFacts) -> tuple[list[Linear], list[Linear]]:
    """Lists the linear layers of attention and of the dense feed-forward block."""
    h, f, tp = model.hidden_size, model.every_ffn_width, shapes.tp
    one = np.ones_like(tp)
    cuts = {"outputs": (tp, one), "inputs": (one, tp), "": (one, one)}
    attention = [(each.outputs / cuts[each.cut][0], each.inputs / cuts[each.cut][1]) for each in model.mixer]
    if facts.fuses_linears and len(model.mixer) == 4 and not model.is_latent:
        attention = [((model.query_width + model.kv_width) / tp, h * one), attention[-1]]
    if not f:
        return attention, []
    ins = model.ffn_matrices - 1
    ffn = [(ins * f / tp, h * one)] if facts.fuses_linears else [(f / tp, h * one)] * ins
    return attention, [*ffn, (h * one, f / tp)]


def attention_fill(seq_len: int, head_size: int) -> float:
    """Returns the rate of fused attention over that at long sequences and heads of 128: others leave units idle."""
    return seq_len / (seq_len + 600) * min(1.0, float(np.sqrt(head_size / 128)))


class _Layer:
    """Builds the work of one layer from its pieces."""

    def __init__(
        self, machine: Machine, model: ModelSpec, workload: Workload, shapes: KernelShapes, facts: EngineFacts
    ) -> None:
        self.machine, self.model, self.workload, self.shapes, self.facts = machine, model, workload, shapes, facts
        self.kernel = machine.coefficients.kernel
        self.trained = workload.mode == "pretrain"
        compiled = np.where(shapes.tp > 1, facts.compiles_split, facts.compiles)
        self.passes = np.where(compiled, 1.0, EAGER_BYTES)
        self.cast_bytes = machine.cast_bytes if facts.casts_apart else 0

    def linears(
        self, layers: list[Linear], rows: Floats, frac: Floats | float
    ) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Predicts linear layers, forward and backward: gradients of inputs, and of weights where they are trained."""
        frac = frac * self.kernel.linear_speedup
        forward = [(rows, n, k) for n, k in layers]
        backward = [(rows, k, n) for n, k in layers]
        if self.trained:
            backward += [(n, k, rows) for n, k in layers]
        return self._drawn(self.machine.products(forward, frac)), self._drawn(self.machine.products(backward, frac))

    def _drawn(self, products: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
        """Counts operations of a narrower type as so many of the batch's type as draw their energy."""
        seconds, flop = products
        return seconds, flop * self.kernel.linear_speedup**-NARROW_ENERGY_EXPONENT

    def narrowing_bytes(self, numbers: Floats) -> Floats:
        """Counts bytes to write inputs of products in a narrower type.

        Each is read and written once for the product, and once more transposed for the gradient of weights
        (TransformerEngine, `cast_transpose`).
        """
        copies = 0 if self.kernel.linear_speedup == 1 else 2 if self.trained else 1
        return numbers * (self.machine.item_bytes * min(copies, 1) + copies)

    def attention(self) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Predicts fused causal attention: 2 products forward, 5 backward (Dao 2023, arXiv 2307.08691, section 4.1)."""
        seq_len, model = self.workload.seq_len, self.model
        flop = self.shapes.tokens * mixing_flop(model, seq_len) / self.shapes.tp
        rate = self.machine.flop_per_s * attention_fill(seq_len, model.head_size) * self.facts.attention_rate
        forward_s = flop / (rate * self.kernel.attention_forward_frac)
        backward_s = 2.5 * flop / (rate * self.kernel.attention_backward_frac)
        return (forward_s, flop), (backward_s, 2.5 * flop)

    def element_wise(self) -> tuple[Floats, Floats]:
        """Counts bytes of norms, residuals, rotary positions and the activation, forward and backward."""
        model, shapes = self.model, self.shapes
        h, q, kv, o = model.hidden_size, model.query_width, model.kv_width, model.output_width
        f, tokens = model.every_ffn_width, shapes.tokens
        cut = tokens / shapes.tp if self.facts.splits_sequence else tokens
        turned = model.positions == "rope" and model.has_attention
        # Rotary positions read and write queries and keys; Mamba2's convolution all that its states take.
        moved = (self.facts.rotary_moves if turned else 2 * model.has_ssm) * (q + kv / 2)
        moved += 2 * (q + kv / 2) * (model.qk_norm != "none") * model.has_attention
        rotated = moved * tokens / shapes.tp
        if self.facts.copies_heads and model.has_attention and kv < 2 * q:
            rotated = rotated + 2 * q * tokens / shapes.tp
        blocks = (model.num_norms + (model.norm_place == "shared")) if model.has_ffn else 1
        forward = blocks * 4 * h * cut + rotated
        backward = blocks * 6 * h * cut + rotated
        if f:
            reads = model.ffn_matrices
            forward = forward + reads * f * tokens / shapes.tp
            backward = backward + (2 * reads) * f * tokens / shapes.tp
        if self.workload.lora is not None:
            inner, outer = self.adapters()
            forward, backward = forward + inner + 3 * outer, backward + 2 * inner + 4 * outer
        first, last = model.mixer_biases
        if first or last or model.has_bias("ffn"):  # their gradients sum those of the layer's output over tokens
            within, behind = (f, h * model.has_ffn) if model.has_bias("ffn") else (0, 0)
            backward = backward + tokens * ((first + within) / shapes.tp + last + behind)
        # Four collectives of the sequence a pass.
        placed = 4 * self.facts.copies_split * h * tokens * (shapes.tp > 1)
        width = self.machine.item_bytes
        dense, gates = f, model.ffn_matrices - 1
        if self.cast_bytes:
            # Unless the engine `gathers_cast`, inputs of the first products are gathered before they are cast, and so
            # are gradients of the last ones' outputs: tensor parallel cuts neither.
            whole = 2 * h / (shapes.tp if self.facts.gathers_cast else 1)
            cut_inputs, cut_gradients = o + dense, q + kv + gates * dense
            inputs = self.cast_bytes * tokens * (whole + cut_inputs / shapes.tp)
            gradients = inputs + self.cast_bytes * tokens * (whole + cut_gradients / shapes.tp)
        else:
            # Norms write their result in the narrower type at no further cost; the other inputs, and all gradients, do
            # not.
            inputs = self.narrowing_bytes((o + dense) * tokens / shapes.tp)
            gradients = self.narrowing_bytes((2 * h + q + kv + gates * dense) * tokens / shapes.tp)
        return (
            (forward * self.passes + placed) * width + inputs,
            (backward * self.passes + placed) * width + gradients,
        )

    def adapters(self) -> tuple[Floats, Floats]:
        """Counts inputs and outputs of low-rank adapters, whose products memory bounds."""
        model, shapes, lora = self.model, self.shapes, self.workload.lora
        assert lora is not None, "the caller asks where there are some"
        sizes = [adapted(model).get(name, (0, 0)) for name in lora.targets]
        inner, outer = sum(one for one, _ in sizes), sum(other for _, other in sizes)
        return inner * shapes.tokens / shapes.tp, outer * shapes.tokens / shapes.tp

    def experts(self) -> tuple[PassTimes, PassTimes]:
        """Predicts routing, permutation and grouped products of the experts held here, evenly loaded."""
        model, shapes, machine = self.model, self.shapes, self.machine
        h, width = model.hidden_size, machine.item_bytes
        rows = shapes.tokens * model.num_experts_per_token * shapes.etp / shapes.tp
        held = model.num_experts / shapes.ep
        each, f = rows / held, model.ffn_hidden_size / shapes.etp
        wide = np.full_like(each, h)
        gates = model.ffn_matrices - 1
        ins = [(gates * f, wide)] if self.facts.fuses_linears else [(f, wide)] * gates
        # One expert is a plain product.
        frac = np.where(held > 1, self.kernel.grouped_frac, self.kernel.matmul_frac)
        (forward_s, forward_flop), (backward_s, backward_flop) = self.linears([*ins, (wide, f)], each, frac)
        # Tokens to rows by expert and back, weighted and summed; silu and product in between.
        # What other ranks sent is put in order of experts, and its results in order of ranks again.
        moved = width * rows * (9 * h + 5 * f + 4 * h * (shapes.ep > 1))
        moved_back = 2 * moved + self.narrowing_bytes(rows * (h + sum(n for n, _ in ins)))
        moved = moved + self.narrowing_bytes(rows * (h + f))
        nothing = np.zeros_like(rows)
        moved_s, moved_back_s = machine.moving_s(moved, 25), machine.moving_s(moved_back, 40)
        forward_s, backward_s = forward_s * held, backward_s * held
        return (
            PassTimes(forward_s, moved_s, nothing, nothing, forward_flop * held, forward_s + moved_s),
            PassTimes(backward_s, moved_back_s, nothing, nothing, backward_flop * held, backward_s + moved_back_s),
        )

    def host_s(self) -> tuple[Floats, Floats]:
        """Predicts the time of the host to issue one pass of a layer, and the part of it that follows a wait."""
        facts, shapes, machine = self.facts, self.shapes, self.machine
        one_s = machine.coefficients.overhead.host_op_s
        one = facts.host_ops_expert if self.model.is_moe else facts.host_ops
        if self.model.layer_kinds in ONE_BLOCK:
            one = one / 2
        if self.cast_bytes:
            one = one * facts.host_cast
        operations = np.where(shapes.tp > 1, one + facts.host_ops * (facts.host_split - 1), one)
        waits = np.full(shapes.ep.shape, facts.exchanges_always) | (shapes.ep > 1)
        after: Floats = np.where(waits & self.model.is_moe, facts.host_ops_exchange, 0.0)
        units = 2 if facts.shards_experts_apart and self.model.is_moe else 1
        return (operations + units * facts.host_ops_gather * shapes.gathers + after) * one_s, after * one_s

    def build(self) -> ModelPart:
        """Adds the pieces; what is computed again counts in the backward pass."""
        machine, shapes = self.machine, self.shapes
        attention, ffn = _linears(self.model, shapes, self.facts)
        linears = attention + ffn
        products = self.linears(linears, shapes.tokens, self.kernel.matmul_frac)
        (linear_s, linear_flop), (linear_back_s, linear_back_flop) = products
        (mixed_s, mixed_flop), (mixed_back_s, mixed_back_flop) = self.attention()
        forward_bytes, backward_bytes = self.element_wise()
        casts = self.cast_bytes * sum((n * k for n, k in linears), np.zeros_like(shapes.tokens))
        forward_bytes, backward_bytes = forward_bytes + casts, backward_bytes + casts
        host_s, stall_s = self.host_s()
        forward = PassTimes(
            linear_s + mixed_s, machine.moving_s(forward_bytes, 12), host_s, stall_s, linear_flop + mixed_flop
        )
        backward = PassTimes(
            linear_back_s + mixed_back_s,
            machine.moving_s(backward_bytes, 24),
            host_s,
            stall_s,
            linear_back_flop + mixed_back_flop,
        )
        if self.model.is_moe:
            expert_forward, expert_backward = self.experts()
            forward, backward = forward + expert_forward, backward + expert_backward
        nothing = np.zeros_like(mixed_s)
        selective = PassTimes(mixed_s, nothing, nothing, nothing, mixed_flop)
        if self.facts.keeps_operations:
            # The last product's output is what the next layer keeps.
            (again_s, again_flop), _ = self.linears(linears[:-1][1::2], shapes.tokens, self.kernel.matmul_frac)
            selective = PassTimes(again_s, forward.memory_s, host_s, stall_s, again_flop)
        whole = forward * (self.facts.recomputed_frac * (shapes.recompute == 2))
        return ModelPart(forward, backward + selective * (shapes.recompute == 1).astype(float) + whole)


def layer_work(
    machine: Machine, model: ModelSpec, workload: Workload, shapes: KernelShapes, facts: EngineFacts
) -> ModelPart:
    """Predicts the work of the mean decoder layer: kinds of layers count by their shares."""
    layers = (_Layer(machine, kind, workload, shapes, facts).build() * share for kind, share in model.shares)
    return reduce(ModelPart.__add__, layers)


def ends_work(
    machine: Machine, vocab_size: Floats, h: int, workload: Workload, shapes: KernelShapes, facts: EngineFacts
) -> tuple[ModelPart, ModelPart]:
    """Predicts the work of the embedding, and of the head with its loss.

    The loss reads and writes every logit: fused about 10 bytes forward and backward together, else three times that.
    """
    width = machine.item_bytes
    split = shapes.tp if facts.splits_ends else np.ones_like(shapes.tp)
    vocabulary = vocab_size / split
    nothing = np.zeros_like(split)
    rows = shapes.tokens if workload.mode != "prefill" else shapes.tokens / workload.seq_len
    embedded = width * h * shapes.tokens
    host_s = np.full_like(split, 20 * machine.coefficients.overhead.host_op_s)
    first = ModelPart(
        PassTimes(nothing, machine.moving_s(2 * embedded, 3), host_s, nothing, nothing),
        PassTimes(nothing, machine.moving_s(3 * embedded + width * h * vocabulary, 4), host_s, nothing, nothing),
    )
    frac = machine.coefficients.kernel.matmul_frac  # heads stay in the wider type where layers have a narrower one
    ones = np.ones_like(split)
    forward_s, forward_flop = machine.products([(rows, vocabulary, h * ones)], frac)
    backward = [(rows, h * ones, vocabulary)]
    if workload.mode == "pretrain":
        backward.append((vocabulary, h * ones, rows))
    backward_s, backward_flop = machine.products(backward, frac)
    compiled = np.where(shapes.tp > 1, facts.compiles_split, facts.compiles) & facts.compiles_loss
    passes, again = np.where(compiled, 1.0, 3.0), shapes.loss_again
    logit_bytes = rows * vocabulary * 5 * passes
    last = ModelPart(
        PassTimes(forward_s, machine.moving_s(logit_bytes, 8), host_s, nothing, forward_flop),
        PassTimes(
            backward_s + again * forward_s,
            machine.moving_s(logit_bytes * (1 + again), 8),
            host_s,
            nothing,
            backward_flop + again * forward_flop,
        ),
    )
    return first, last

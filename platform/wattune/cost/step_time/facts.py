"""Behaviour of each engine that decides its time, as data: read from `wattune.engines`, by version in docs."""

from dataclasses import dataclass, replace
from typing import Final

from wattune.cost.tables import FULL_MEMORY_FRAC


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Fusing, splitting, gathering and reducing of one engine."""

    fuses_linears: bool
    """True where queries, keys and values are one product, and so are gate and up."""
    splits_sequence: bool
    """True where tensor parallel cuts norms and residuals along the sequence (reduce-scatter and all-gather instead of
    all-reduce)."""
    splits_ends: bool
    """True where tensor parallel cuts embedding and head."""
    gathers_again: bool = False
    """True where inputs cut along the sequence are gathered again for gradients of weights."""
    compiles: bool = True
    """True where layers are compiled."""
    compiles_split: bool
    """True where they stay so under tensor parallel."""
    attention_rate: float = 1.0
    """Rate of its attention over torch's fused kernels."""
    copies_split: float = 0.0
    """Passes over the whole activations that each collective along the sequence adds: where the gathered dimension is
    not the first in memory, pieces are put in order."""
    host_ops: float
    """Operations that the host issues a dense layer and pass, where it is compiled."""
    host_ops_expert: float = 150
    """The same of a layer with experts."""
    host_split: float
    """Factor on `host_ops` under tensor parallel. A layer with experts gets as many more: its experts are split by no
    further operations. The torch engine's is Megatron-Core's times 0.64, the ratio of their layers where both wait for
    one host (`benchmarks/results/tensor_parallel_host.md`)."""
    casts_apart: bool = True
    """True where numbers are cast to fp8 apart from what makes them, and their scales are found anew, as
    Megatron's are by the recipe `wattune.engines.megatron.config.FP8_RECIPE`."""
    host_cast: float = 1.0
    """Factor on both where linear layers run in fp8 and scales are found anew for each product. The torch engine's is
    from plans on one H200 that wait for their host, whose runs scatter by 40 %: 1.6 times the time of a layer and pass
    in bf16 (`benchmarks/data/dense_llama_1b_h200.parquet`)."""
    host_ops_exchange: float = 50
    """More of them where experts exchange tokens. They follow a wait for the device, so nothing runs beside them."""
    exchanges_always: bool = True
    """True where experts wait so without expert parallelism too."""
    gathers_rows: bool = False
    """True where ranks that split an expert gather the rows that tokens chose; else they gather tokens."""
    recomputed_frac: float = 1.0
    """Share of a layer's forward pass that full recomputation repeats."""
    keeps_operations: bool = False
    """True where selective recomputation keeps attention, what tensor parallel reduced and every second product of a
    layer, and repeats all else;
    False where it repeats attention's own part, as Korthikanti et al. 2022 say."""
    copies_heads: bool = False
    """True where keys and values are copied for every head of queries that reads them."""
    rotary_moves: float = 2
    """Numbers of bf16 that a pass moves to turn one of a query or key: one read and one written by a fused kernel."""
    gathers_cast: bool = False
    """True where inputs of products in fp8 are cast before tensor parallel gathers them."""
    compiles_loss: bool = True
    """False where the loss is not compiled though layers are."""
    joins_ends: bool = False
    """True where embedding and head are one unit that is gathered first and reduced last."""
    host_ops_gather: float
    """More of them for each unit of a layer whose weights are gathered for each pass."""
    grad_bytes: float
    """Bytes a parameter and micro-batch to accumulate gradients, where they stay whole."""
    reduced_bytes: float
    """The same where they are reduced after every micro-batch."""
    hides_reduction_from: int = 0
    """Lowest stage of ZeRO that reduces gradients beside compute if asked to."""
    hides_replicas_beside_tp: bool = False
    """True where a plan whose tensor parallel collectives run beside products also hides those between replicas."""
    sent_grad_bytes: float = 4
    """Bytes a parameter of the gradients that replicas reduce."""
    shards_experts_apart: bool = False
    """True where a layer's experts are gathered and reduced apart from its other weights, one after the other."""
    gathers_in_update: bool = False
    """True where weights that are gathered once a step are gathered in the update, beside nothing."""
    full_memory_frac: float = FULL_MEMORY_FRAC
    """Share of a device's memory, told of tensors, from which its steps may wait for memory. The torch engine's
    allocator keeps up to 1.15 times what tensors hold at once, and an H100 of 80 GB leaves 82.8 of them
    (`benchmarks/results/memory_kept.md`)."""
    update_bytes: float
    """Bytes a parameter that one update moves, gradient norm and clipping included."""
    update_frac: float | None = None
    """Share of the memory's bandwidth that it reaches; None where that is the one of other kernels. The torch engine's
    fused AdamW: 0.79 and 0.81 on H200 (0.6 to 3.8 billion parameters a rank), 0.87 on H100, from spans of updates."""


FACTS: Final[dict[str, EngineFacts]] = {
    # FSDP2 with fp32 shards: fused AdamW reads and writes 28 bytes a parameter, norm and clipping 12.
    "torch": EngineFacts(
        fuses_linears=False,
        splits_sequence=True,
        splits_ends=True,
        compiles_split=True,
        copies_split=2.0,
        host_ops=25,
        host_ops_expert=110,
        host_split=2.0,
        host_cast=1.6,
        host_ops_exchange=40,
        exchanges_always=False,
        shards_experts_apart=True,
        host_ops_gather=75,
        grad_bytes=10,
        reduced_bytes=8,
        full_memory_frac=0.9,
        update_bytes=40,
        update_frac=0.8,
    ),
    # bf16 weights beside fp32 ones: the update also copies gradients and writes bf16 weights.
    "megatron": EngineFacts(
        fuses_linears=True,
        splits_sequence=True,
        splits_ends=True,
        gathers_again=True,
        compiles_split=True,
        host_ops=60,
        host_split=1.3,
        gathers_rows=True,
        host_ops_gather=0,
        grad_bytes=10,
        reduced_bytes=10,
        update_bytes=48,
    ),
    # Automatic tensor parallel runs eagerly; its collectives are all-reduces, embedding and head stay whole.
    "deepspeed": EngineFacts(
        fuses_linears=False,
        splits_sequence=False,
        splits_ends=False,
        compiles_split=False,
        host_ops=40,
        host_split=1.5,
        host_ops_gather=150,
        grad_bytes=12,
        reduced_bytes=32,
        hides_reduction_from=3,
        gathers_in_update=True,
        update_bytes=52,
    ),
}
"""Every engine by name, and below the software of `SOFTWARE`."""

SOFTWARE: Final = {"nemo": "megatron"} | dict.fromkeys(
    ("maxtext", "automodel", "llm_foundry", "torchtitan", "torchtitan_2024"), "torch"
)
"""Software that estimates know and wattune does not run, with the engine whose rules and memory stand for its own."""

# Megatron with TransformerEngine: attention by cuDNN, faster on H100 than FlashAttention 2 (Shah et al. 2024, arXiv
# 2407.08608, figures 5 and 6); products for gradients of weights add to fp32 sums themselves. NeMo and Megatron-Bridge
# hide gathers and reductions between replicas, beside tensor parallel overlap too (`megatron_comm_overlap.py`,
# `_get_optimizer_overlap_cfgs`). Their performance recipes reduce gradients in bf16 (`grad_reduce_in_fp32=False`,
# `grad_sync_dtype: bf16`) and pad experts' inputs to a capacity (`MegatronTokenDropCallback`,
# `moe_pad_expert_input_to_capacity`), so the host reads no counts of tokens.
FACTS["nemo"] = replace(
    FACTS["megatron"],
    attention_rate=1.4,
    grad_bytes=4,
    hides_replicas_beside_tp=True,
    sent_grad_bytes=2,
    host_ops_exchange=0,
    casts_apart=False,
)
# FSDP2's own reductions keep gradients in memory of their stream, which no other can have.
_FSDP2: Final = replace(FACTS["torch"], full_memory_frac=FULL_MEMORY_FRAC)
# XLA compiles all of it; attention is cuDNN's. `remat_policy=save_qkv_proj` (dgxc-benchmarking, maxtext/configure.sh)
# keeps queries, keys and values: attention, its output, gate and up are computed again, of Llama 2 70B's layer
# 2 x 537 M + 134 M of 2 x 856 M + 134 M operations a token. The product after them is not.
FACTS["maxtext"] = replace(_FSDP2, attention_rate=1.4, recomputed_frac=0.65, casts_apart=False)
# FSDP2 with layers of TransformerEngine and Triton: nothing is compiled.
FACTS["automodel"] = replace(_FSDP2, compiles=False, casts_apart=False)
# Selective recomputation by operation (`activation_checkpoint.py`), `repeat_kv`, and FSDP2 units of layers and of the
# whole. FlashAttention 2 has 335 TFLOP/s forward (causal, heads of 128, 16k tokens: Shah et al. 2024, figure 5), where
# 1 stands for 429. Tensor parallel gathers of products in fp8 are in fp8 both ways (`docs/float8.md`: "for TP (by
# default for `Float8Linear`)"). Queries and keys are turned as complex numbers, which inductor does not compile (issue
# 15): a cast to fp32, the product and a cast back are 20 bytes a number. In 2024 the loss was not compiled (e8977b0 to
# bbb1b61), and the eight kernels of AdamW not fused.
FACTS["torchtitan"] = replace(
    _FSDP2,
    attention_rate=0.8,
    keeps_operations=True,
    copies_heads=True,
    joins_ends=True,
    gathers_cast=True,
    rotary_moves=10,
)
FACTS["torchtitan_2024"] = replace(FACTS["torchtitan"], compiles_loss=False, update_bytes=92)
# In 2023: FSDP1, not compiled, FlashAttention 1 in Triton, half as fast as FlashAttention 2 (Dao 2023, arXiv
# 2307.08691, abstract).
FACTS["llm_foundry"] = replace(FACTS["automodel"], attention_rate=0.5)

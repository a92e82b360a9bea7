"""Contract of every engine: one seed gives one training run, whatever the plan; spans nest; close gives all back.

Each plan is compared with the same model on one device, one micro-batch, fp32: loss and gradient norm before clipping
of three optimizer steps. Agreement after the first step also needs the same clipped gradients and the same update.

Tolerances are relative. In fp32 plans differ by the order of sums alone: a few units of 6e-8, which AdamW's division
by small second moments magnifies; 1e-5 is some ten times what is seen and far below what a wrong gradient changes. In
bf16 each activation is rounded to 2^-9 = 2e-3, averaged over many: 4e-5 on the loss and 1.2e-3 on the norm is the most
that is seen, twice as much is allowed.
"""

import contextlib
import itertools
import json
import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from specs import trial_spec
from warm_ranks import start_script

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.engines.registry import ENGINES
from wattune.plans.axes import Plan
from wattune.plans.parallel import num_micro_batches
from wattune.plans.rules import violations
from wattune.trial import TrialSpec
from wattune.workload import Lora, Routing, Workload

WORKER = Path(__file__).with_name("engine_worker.py")
GROUP_TIMEOUT_S = 600
NUM_STEPS = 3
"""As in the worker."""
WORKLOAD = Workload(seq_len=16, global_batch_size=8)

LLAMA = ModelSpec(
    name="llama", num_layers=4, hidden_size=32, ffn_hidden_size=64, num_heads=8, num_kv_heads=4, vocab_size=128
)
GPT = ModelSpec(
    name="gpt",
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    vocab_size=128,
    norm="layernorm",
    activation="gelu",
    positions="learned",
    max_positions=20,
    bias=True,
    tied_embeddings=True,
)
SHORT, SHORT_GPT = replace(LLAMA, name="short", num_layers=2), replace(GPT, name="short-gpt", num_layers=2)
"""Of most cases of tensor parallel ranks, where each operation takes a processor long and layers are alike: of two, one
is behind the embedding and one behind a layer. What several layers decide keeps four: stages, gathering, offloading."""
MIXTRAL = ModelSpec(
    name="mixtral",
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=128,
    num_experts=4,
    num_experts_per_token=2,
)
ODD = replace(SHORT, name="odd", vocab_size=125)
"""A vocabulary that tensor parallel degrees do not divide: one rank has the tokens, the others padding alone."""
ODD_TIED = replace(SHORT_GPT, name="odd-tied", vocab_size=131)
"""Alike, with padding behind tokens on the second rank."""
ROOMY = replace(MIXTRAL, name="mixtral", expert_capacity_factor=2.0)
"""Capacity for every token to choose every expert: nothing is dropped, so it trains as without capacity."""
TIGHT = replace(MIXTRAL, name="mixtral", expert_capacity_factor=1.0)
"""Capacity for an even share and no more: nothing is dropped where routing is balanced."""
BIASED = replace(MIXTRAL, name="biased", bias=True, activation="gelu")
GATED = replace(BIASED, name="gated", activation="swiglu")
LATENT = replace(
    MIXTRAL,
    name="latent",
    num_kv_heads=4,
    head_dim=12,
    value_head_dim=8,
    rope_head_dim=4,
    kv_lora_rank=8,
    q_lora_rank=12,
    num_dense_layers=1,
    dense_ffn_hidden_size=64,
    shared_ffn_hidden_size=32,
    shared_expert_gate=True,
    router_scores="sigmoid",
    router_scale=2.5,
)
"""DeepSeek's kinds of layers, and Qwen's gate."""
WINDOWED = replace(
    SHORT,
    name="windowed",
    head_dim=6,
    qk_norm="head",
    biased_parts="qkv head",
    norm_place="both",
    layer_kinds="SF",
    sliding_window=5,
)


@dataclass(frozen=True)
class Case:
    model: ModelSpec
    world_size: int = 1
    axes: Mapping[str, Any] = field(default_factory=dict)
    compiler: str | None = None
    """The compiler of the layers. `aot_eager` makes the graphs of training and runs them as they are."""
    workload: Workload = WORKLOAD

    @property
    def reference(self) -> str:
        """The case on one device it must agree with."""
        mode, routing = self.workload.mode, self.workload.routing
        parts = ["reference", self.model.name, mode if mode != WORKLOAD.mode else "", str(routing or "")]
        return "-".join(part for part in parts if part).replace(" ", "")

    def spec(self, engine: str) -> TrialSpec:
        neutral = {"dtype": "fp32", "etp": self.axes.get("tp", 1)}
        cluster = ClusterSpec(device="cpu", devices_per_node=self.world_size)
        plan = Plan(**(neutral | dict(self.axes)))
        return trial_spec(self.model, on=cluster, engine=engine, workload=self.workload, plan=plan)


def case(model: ModelSpec, world_size: int, **axes: Any) -> Case:
    return Case(model, world_size, axes)


def lora(each: Case, *targets: str) -> Case:
    return replace(each, workload=replace(WORKLOAD, mode="lora", lora=Lora(rank=4, targets=targets or DENSE_TARGETS)))


def prefill(each: Case) -> Case:
    return replace(each, workload=replace(WORKLOAD, mode="prefill"))


def routed(each: Case, by: str, skew: float = 0.0) -> Case:
    return replace(each, workload=replace(each.workload, routing=Routing(by=by, skew=skew)))


DENSE_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
ATTENTION = ("q", "v", "o")

KINDS = (LLAMA, GPT, MIXTRAL, BIASED, GATED, ODD, ODD_TIED, LATENT, WINDOWED)
REFERENCES = [case(model, 1, micro_batch_size=8) for model in KINDS]
REFERENCES += [lora(REFERENCES[0]), lora(REFERENCES[1], "q", "up"), lora(REFERENCES[2], *ATTENTION)]
REFERENCES += [prefill(each) for each in REFERENCES[:3]]
REFERENCES += (SHORTS := [case(model, 1, micro_batch_size=8) for model in (SHORT, SHORT_GPT)])
REFERENCES += [lora(SHORTS[0]), *map(prefill, SHORTS)]
BALANCED, SKEWED, LEARNED = (("balanced",), ("skew", 1.2), ("learned",))
REFERENCES += [routed(case(MIXTRAL, 1, micro_batch_size=8), *how) for how in (BALANCED, SKEWED, LEARNED)]
REFERENCES += [routed(lora(case(MIXTRAL, 1, micro_batch_size=8), *ATTENTION), *LEARNED)]
REFERENCES += [routed(prefill(case(MIXTRAL, 1, micro_batch_size=8)), *SKEWED)]
SHARDINGS = ("none", "zero1", "zero2", "zero3")
HYBRID = (("zero1", "grad"), ("zero2", "none"), ("zero3", "grad_param"))

PARITY = {
    "accumulation": case(LLAMA, 1, micro_batch_size=1),
    "selective": case(LLAMA, 1, micro_batch_size=4, recompute="selective"),
    "full": case(LLAMA, 1, micro_batch_size=4, recompute="full"),
    "mixtral-full": case(MIXTRAL, 1, micro_batch_size=4, recompute="full"),
    "mixtral-capacity": case(ROOMY, 1, micro_batch_size=4),
    "bf16": case(LLAMA, 1, micro_batch_size=4, dtype="bf16"),
    "mixtral-bf16": case(MIXTRAL, 1, micro_batch_size=4, dtype="bf16"),
    **{
        f"dp2-{sharding}-overlap-{overlap}": case(LLAMA, 2, micro_batch_size=2, sharding=sharding, overlap=overlap)
        for sharding in SHARDINGS
        for overlap in ("none", "grad", "grad_param")
    },
    "gpt-dp2-zero3": case(GPT, 2, micro_batch_size=2, sharding="zero3"),
    "tp2": case(LLAMA, 2, tp=2, micro_batch_size=4),
    "gpt-tp2-full": case(SHORT_GPT, 2, tp=2, micro_batch_size=4, recompute="full"),
    "gpt-tp2-bf16": case(SHORT_GPT, 2, tp=2, micro_batch_size=2, dtype="bf16"),
    "biased-tp2": case(BIASED, 2, tp=2, micro_batch_size=4),
    "gated-tp2": case(GATED, 2, tp=2, micro_batch_size=4),
    "odd-tp2": case(ODD, 2, tp=2, micro_batch_size=4),
    "odd-tied-tp2-bf16": case(ODD_TIED, 2, tp=2, micro_batch_size=2, dtype="bf16"),
    "latent-tp2": case(LATENT, 2, tp=2, micro_batch_size=4),
    "latent-ep2": case(LATENT, 2, ep=2, micro_batch_size=2, sharding="zero3"),
    "latent-pp2-full": case(LATENT, 2, pp=2, micro_batch_size=2, recompute="full"),
    "windowed-tp2": case(WINDOWED, 2, tp=2, micro_batch_size=4, recompute="selective"),
    "odd-tied-tp2-pp2": case(ODD_TIED, 4, tp=2, pp=2, micro_batch_size=4),
    "odd-tp2-dp2-zero3": case(ODD, 4, tp=2, micro_batch_size=2, sharding="zero3"),
    "pp2": case(LLAMA, 2, pp=2),
    "gpt-pp2": case(GPT, 2, pp=2, micro_batch_size=2),
    "pp2-uneven": case(LLAMA, 2, pp=2, micro_batch_size=2, layout=(3, 1)),
    "pp2-vpp2": case(LLAMA, 2, pp=2, vpp=2, micro_batch_size=2),
    "pp2-vpp2-one-micro-batch": case(LLAMA, 2, pp=2, vpp=2, micro_batch_size=8),
    "gpt-pp2-vpp2-uneven": case(GPT, 2, pp=2, vpp=2, micro_batch_size=2, layout=(1, 1, 1, 1)),
    "pp2-full-bf16": case(LLAMA, 2, pp=2, micro_batch_size=2, recompute="full", dtype="bf16"),
    "mixtral-pp2": case(MIXTRAL, 2, pp=2, micro_batch_size=2),
    "ep2": case(MIXTRAL, 2, ep=2, micro_batch_size=2),
    "ep2-capacity": case(ROOMY, 2, ep=2, micro_batch_size=2),
    "ep2-bf16": case(MIXTRAL, 2, ep=2, micro_batch_size=2, dtype="bf16"),
    **{f"dp4-{sharding}": case(LLAMA, 4, sharding=sharding) for sharding in SHARDINGS},
    "dp4-zero2-bf16": case(LLAMA, 4, sharding="zero2", dtype="bf16"),
    **{f"hsdp2-dp4-{s}-{o}": case(LLAMA, 4, sharding=s, dp_replicate=2, overlap=o) for s, o in HYBRID},
    "hsdp2-dp4-zero3-bf16": case(LLAMA, 4, sharding="zero3", dp_replicate=2, dtype="bf16"),
    "hsdp2-gpt-dp4-zero3": case(GPT, 4, sharding="zero3", dp_replicate=2, recompute="full", overlap="grad"),
    "hsdp2-ep2-dp4-zero3": case(MIXTRAL, 4, ep=2, sharding="zero3", dp_replicate=2),
    "hsdp2-tp2-dp4-zero3": case(LLAMA, 8, tp=2, sharding="zero3", dp_replicate=2, overlap="grad_param"),
    "hsdp2-pp2-vpp2-dp4-zero2": case(LLAMA, 8, pp=2, vpp=2, sharding="zero2", dp_replicate=2, overlap="grad"),
    "offload": case(LLAMA, 1, micro_batch_size=4, offload="activations"),
    "offload-gpt-full-bf16": case(GPT, 1, micro_batch_size=2, offload="activations", recompute="full", dtype="bf16"),
    "offload-mixtral-selective": case(MIXTRAL, 1, micro_batch_size=4, offload="activations", recompute="selective"),
    "offload-dp2-zero3": case(LLAMA, 2, micro_batch_size=2, offload="activations", sharding="zero3", overlap="grad"),
    "offload-tp2": case(LLAMA, 2, tp=2, micro_batch_size=4, offload="activations"),
    "offload-pp2-vpp2": case(LLAMA, 2, pp=2, vpp=2, micro_batch_size=2, offload="activations"),
    "offload-ep2-zero3": case(MIXTRAL, 2, ep=2, micro_batch_size=2, offload="activations", sharding="zero3"),
    "offload-lora-tp2": lora(case(LLAMA, 2, tp=2, micro_batch_size=4, offload="activations")),
    "offload-lora-full": lora(case(LLAMA, 1, micro_batch_size=2, offload="activations", recompute="full")),
    "chunks": case(LLAMA, 1, micro_batch_size=4, loss_chunks=4),
    "chunks-dp2-zero3-bf16": case(GPT, 2, micro_batch_size=2, sharding="zero3", dtype="bf16", loss_chunks=2),
    "chunks-odd-tp2": case(ODD, 2, tp=2, micro_batch_size=4, loss_chunks=8),
    "chunks-odd-tied-tp2-pp2": case(ODD_TIED, 4, tp=2, pp=2, micro_batch_size=4, loss_chunks=2),
    "chunks-mixtral-ep2": case(MIXTRAL, 2, ep=2, micro_batch_size=2, loss_chunks=2),
    "chunks-lora-tp2": lora(case(LLAMA, 2, tp=2, micro_batch_size=4, loss_chunks=4)),
    "hsdp2-lora-dp4-zero3": lora(case(LLAMA, 4, sharding="zero3", dp_replicate=2)),
    "hsdp2-prefill-dp4-zero3": prefill(case(LLAMA, 4, sharding="zero3", dp_replicate=2)),
    "tp4": case(SHORT, 4, tp=4, micro_batch_size=8),
    "pp4": case(LLAMA, 4, pp=4, micro_batch_size=2),
    **{f"tp2-dp2-{s}": case(SHORT, 4, tp=2, micro_batch_size=4, sharding=s) for s in SHARDINGS[:-1]},
    "tp2-dp2-zero3": case(LLAMA, 4, tp=2, micro_batch_size=4, sharding="zero3"),
    **{f"pp2-dp2-{s}": case(LLAMA, 4, pp=2, sharding=s) for s in SHARDINGS},
    "pp2-vpp2-dp2-zero1-grad": case(LLAMA, 4, pp=2, vpp=2, sharding="zero1", overlap="grad"),
    "pp2-vpp2-dp2-zero3-grad_param": case(LLAMA, 4, pp=2, vpp=2, sharding="zero3", overlap="grad_param"),
    "gpt-pp2-dp2-zero1": case(GPT, 4, pp=2, micro_batch_size=2, sharding="zero1"),
    "gpt-tp2-pp2-selective": case(SHORT_GPT, 4, tp=2, pp=2, micro_batch_size=4, recompute="selective"),
    "ep4": case(MIXTRAL, 4, ep=4, micro_batch_size=2),
    "ep2-dp4-zero3-full": case(MIXTRAL, 4, ep=2, micro_batch_size=2, sharding="zero3", recompute="full"),
    "ep2-pp2": case(MIXTRAL, 4, ep=2, pp=2, micro_batch_size=2),
    "biased-ep2-tp2": case(BIASED, 4, ep=2, tp=2, micro_batch_size=4),
    "tp2-pp2-dp2-zero1": case(LLAMA, 8, tp=2, pp=2, micro_batch_size=2, sharding="zero1"),
    "gpt-tp2-pp2-dp2-zero3": case(GPT, 8, tp=2, pp=2, micro_batch_size=2, sharding="zero3", overlap="grad_param"),
    "tp2-pp2-ep2": case(MIXTRAL, 8, tp=2, pp=2, ep=2, micro_batch_size=2),
    "lora-full": lora(case(LLAMA, 1, micro_batch_size=2, recompute="full")),
    "lora-bf16": lora(case(LLAMA, 1, micro_batch_size=4, dtype="bf16")),
    "lora-dp2-zero3": lora(case(LLAMA, 2, sharding="zero3", overlap="grad_param")),
    "lora-tp2": lora(case(SHORT, 2, tp=2, micro_batch_size=4)),
    "lora-tp2-full": lora(case(SHORT, 2, tp=2, micro_batch_size=4, recompute="full")),
    "lora-pp2": lora(case(LLAMA, 2, pp=2, micro_batch_size=2)),
    "lora-ep2": lora(case(MIXTRAL, 2, ep=2, micro_batch_size=2), *ATTENTION),
    "lora-tp2-dp2-zero1": lora(case(SHORT, 4, tp=2, micro_batch_size=2, sharding="zero1", overlap="grad")),
    "lora-tp2-pp2": lora(case(SHORT, 4, tp=2, pp=2, micro_batch_size=4)),
    "prefill-accumulation": prefill(case(LLAMA, 1, micro_batch_size=2)),
    "prefill-bf16": prefill(case(LLAMA, 1, micro_batch_size=2, dtype="bf16")),
    "prefill-dp2-zero3": prefill(case(LLAMA, 2, micro_batch_size=2, sharding="zero3", overlap="grad_param")),
    "prefill-gpt-tp2": prefill(case(SHORT_GPT, 2, tp=2, micro_batch_size=4)),
    "prefill-pp2": prefill(case(LLAMA, 2, pp=2, micro_batch_size=2)),
    "prefill-ep2": prefill(case(MIXTRAL, 2, ep=2, micro_batch_size=2)),
    "prefill-tp2-pp2": prefill(case(SHORT, 4, tp=2, pp=2, micro_batch_size=2)),
    "prefill-pp4-one-micro-batch": prefill(case(LLAMA, 4, pp=4, micro_batch_size=8)),
    "balanced-full": routed(case(MIXTRAL, 1, micro_batch_size=2, recompute="full"), *BALANCED),
    "balanced-capacity": routed(case(TIGHT, 1, micro_batch_size=2), *BALANCED),
    "balanced-bf16": routed(case(MIXTRAL, 1, micro_batch_size=4, dtype="bf16"), *BALANCED),
    "balanced-ep2": routed(case(MIXTRAL, 2, ep=2, micro_batch_size=2), *BALANCED),
    "skewed-tp2": routed(case(MIXTRAL, 2, tp=2, micro_batch_size=4), *SKEWED),
    "learned-tp2": routed(case(MIXTRAL, 2, tp=2, micro_batch_size=4), *LEARNED),
    "skewed-ep2": routed(case(MIXTRAL, 2, ep=2, micro_batch_size=2), *SKEWED),
    "learned-ep2-full": routed(case(MIXTRAL, 2, ep=2, micro_batch_size=2, recompute="full"), *LEARNED),
    "learned-pp2": routed(case(MIXTRAL, 2, pp=2, micro_batch_size=2), *LEARNED),
    "learned-lora-ep2": routed(lora(case(MIXTRAL, 2, ep=2, micro_batch_size=2), *ATTENTION), *LEARNED),
    "skewed-prefill-ep2": routed(prefill(case(MIXTRAL, 2, ep=2, micro_batch_size=2)), *SKEWED),
    "balanced-ep2-pp2": routed(case(MIXTRAL, 4, ep=2, pp=2, micro_batch_size=2), *BALANCED),
    "skewed-ep2-tp2": routed(case(MIXTRAL, 4, ep=2, tp=2, micro_batch_size=4), *SKEWED),
    "learned-ep2-dp4-zero3": routed(case(MIXTRAL, 4, ep=2, micro_batch_size=2, sharding="zero3"), *LEARNED),
}
COMPILED = {
    f"compiled-{name}": replace(PARITY[name], compiler="aot_eager")
    for name in (
        "selective",
        "full",
        "mixtral-full",
        "bf16",
        "dp2-zero3-overlap-grad",
        "tp2",
        "gpt-pp2-vpp2-uneven",
        "ep2",
        "lora-full",
        "lora-tp2-full",
        "prefill-accumulation",
        "prefill-gpt-tp2",
        "gpt-tp2-full",
        "odd-tp2",
        "offload",
    )
}
PARITY |= COMPILED
REFUSED = {"cp2": case(LLAMA, 2, cp=2), "overlap-tp": case(LLAMA, 2, tp=2, overlap="tp")}

DEEPSPEED = {
    name: PARITY[name]
    for name in (
        "accumulation",
        "selective",
        "mixtral-full",
        "bf16",
        "dp2-none-overlap-none",
        "dp2-zero1-overlap-grad",
        "dp2-zero2-overlap-none",
        "dp2-zero2-overlap-grad",
        "dp2-zero3-overlap-none",
        "dp2-zero3-overlap-grad_param",
        "gpt-dp2-zero3",
        "tp2",
        "gpt-tp2-full",
        "gpt-tp2-bf16",
        "odd-tp2",
        "pp2",
        "gpt-pp2",
        "pp2-uneven",
        "pp2-full-bf16",
        "ep2",
        "ep2-bf16",
        "dp4-zero2-bf16",
        "tp2-dp2-zero1",
        "tp2-dp2-zero3",
        "pp2-dp2-none",
        "gpt-pp2-dp2-zero1",
        "ep2-dp4-zero3-full",
        "ep2-pp2",
        "compiled-selective",
        "compiled-mixtral-full",
        "compiled-dp2-zero3-overlap-grad",
        "lora-full",
        "lora-bf16",
        "lora-tp2",
        "lora-pp2",
        "lora-ep2",
        "lora-tp2-dp2-zero1",
        "prefill-accumulation",
        "prefill-bf16",
        "prefill-dp2-zero3",
        "prefill-gpt-tp2",
        "prefill-pp2",
        "prefill-ep2",
        "compiled-lora-full",
        "compiled-prefill-accumulation",
        "balanced-full",
        "balanced-bf16",
        "balanced-ep2",
        "skewed-ep2",
        "learned-ep2-full",
        "learned-pp2",
        "learned-lora-ep2",
        "skewed-prefill-ep2",
        "balanced-ep2-pp2",
        "learned-ep2-dp4-zero3",
    )
} | {
    "dp2-zero3-full": case(LLAMA, 2, micro_batch_size=2, sharding="zero3", recompute="full", overlap="grad_param"),
    "dp2-zero3-bf16": case(LLAMA, 2, micro_batch_size=2, sharding="zero3", dtype="bf16"),
    "ep2-zero2": case(MIXTRAL, 2, ep=2, micro_batch_size=2, sharding="zero2"),
    "ep2-zero3": case(MIXTRAL, 2, ep=2, micro_batch_size=2, sharding="zero3"),
    "ep2-tp2-etp1": case(MIXTRAL, 2, ep=2, tp=2, etp=1, micro_batch_size=4),
    "ep2-dp4": case(MIXTRAL, 4, ep=2, micro_batch_size=2),
    "ep2-dp4-zero1-bf16": case(MIXTRAL, 4, ep=2, micro_batch_size=2, sharding="zero1", dtype="bf16"),
    "ep4-tp2": case(MIXTRAL, 4, ep=4, tp=2, etp=1, micro_batch_size=2),
    "ep2-tp2-dp2-zero3": case(MIXTRAL, 4, ep=2, tp=2, etp=1, micro_batch_size=2, sharding="zero3"),
    "pp2-dp2-zero1-bf16": case(LLAMA, 4, pp=2, micro_batch_size=2, sharding="zero1", dtype="bf16"),
    "compiled-gpt-pp2": replace(PARITY["gpt-pp2"], compiler="aot_eager"),
    "pp4-one-micro-batch": case(LLAMA, 4, pp=4, micro_batch_size=8),
    **{f"lora-dp2-{s}": lora(case(LLAMA, 2, micro_batch_size=2, sharding=s)) for s in SHARDINGS},
    "lora-pp2-bf16": lora(case(LLAMA, 2, pp=2, micro_batch_size=2, dtype="bf16", recompute="full")),
    "lora-gpt-pp2-bf16": lora(case(GPT, 2, pp=2, micro_batch_size=2, dtype="bf16"), "q", "up"),
    "lora-ep2-zero3": lora(case(MIXTRAL, 2, ep=2, micro_batch_size=2, sharding="zero3"), *ATTENTION),
    "lora-ep2-tp2": lora(case(MIXTRAL, 2, ep=2, tp=2, etp=1, micro_batch_size=2), *ATTENTION),
    "lora-gpt-pp2-dp2-zero1": lora(case(GPT, 4, pp=2, micro_batch_size=2, sharding="zero1"), "q", "up"),
    "lora-ep2-pp2": lora(case(MIXTRAL, 4, ep=2, pp=2, micro_batch_size=2), *ATTENTION),
    "compiled-lora-dp2-zero3": replace(lora(case(LLAMA, 2, sharding="zero3")), compiler="aot_eager"),
    "skewed-ep2-tp2-etp1": routed(case(MIXTRAL, 2, ep=2, tp=2, etp=1, micro_batch_size=4), *SKEWED),
    "learned-ep2-tp2-etp1": routed(case(MIXTRAL, 2, ep=2, tp=2, etp=1, micro_batch_size=4), *LEARNED),
    "learned-ep2-zero1-bf16": routed(
        case(MIXTRAL, 2, ep=2, micro_batch_size=2, sharding="zero1", dtype="bf16"), *LEARNED
    ),
    "prefill-gpt-pp2": prefill(case(GPT, 2, pp=2, micro_batch_size=2)),
    "prefill-ep2-bf16": prefill(case(MIXTRAL, 2, ep=2, micro_batch_size=2, dtype="bf16")),
    "prefill-ep2-zero3": prefill(case(MIXTRAL, 2, ep=2, micro_batch_size=2, sharding="zero3")),
    "prefill-ep2-tp2": prefill(case(MIXTRAL, 2, ep=2, tp=2, etp=1, micro_batch_size=2)),
}
"""Cases that DeepSpeed does in its own way: each way at degree 2, and the combinations a user would try first."""

PARITY_OF = {"torch": PARITY, "deepspeed": DEEPSPEED}
REFUSED_OF = {
    "torch": REFUSED,
    "deepspeed": REFUSED
    | {
        "pp2-zero2": case(LLAMA, 2, pp=2, sharding="zero2"),
        "biased-ep2": case(BIASED, 2, ep=2),
        "ep2-capacity": case(ROOMY, 2, ep=2),
        "mixtral-tp2": case(MIXTRAL, 2, tp=2, etp=1),
        "ep2-tp2-zero1": case(MIXTRAL, 4, ep=2, tp=2, etp=1, sharding="zero1"),
        "lora-ep2-zero1": lora(case(MIXTRAL, 2, ep=2, sharding="zero1"), *ATTENTION),
        "lora-ep2-pp2-bf16": lora(case(MIXTRAL, 4, ep=2, pp=2, dtype="bf16"), *ATTENTION),
    },
}
CASES = {
    engine: PARITY_OF[engine]
    | REFUSED_OF[engine]
    | ({each.reference: each for each in REFERENCES} if engine == "torch" else {})
    for engine in ENGINES
    if engine in PARITY_OF
}

QUICK = {
    "torch": "accumulation mixtral-full mixtral-capacity bf16 offload lora-full prefill-accumulation balanced-capacity "
    "compiled-selective dp2-none-overlap-none dp2-zero1-overlap-grad dp2-zero2-overlap-none "
    "dp2-zero3-overlap-grad_param gpt-tp2-full biased-tp2 odd-tied-tp2-bf16 pp2-uneven gpt-pp2-vpp2-uneven "
    "mixtral-pp2 ep2-capacity offload-dp2-zero3 offload-pp2-vpp2 lora-tp2 lora-ep2 lora-dp2-zero3 prefill-pp2 "
    "prefill-gpt-tp2 skewed-tp2 learned-ep2-full compiled-gpt-tp2-full "
    "full skewed-ep2 prefill-dp2-zero3 prefill-ep2 learned-tp2 compiled-dp2-zero3-overlap-grad gated-tp2 odd-tp2 "
    "hsdp2-dp4-zero3-grad_param tp2-dp2-zero1",
    "deepspeed": "accumulation mixtral-full compiled-lora-full dp2-none-overlap-none dp2-zero1-overlap-grad "
    "dp2-zero2-overlap-grad dp2-zero3-overlap-grad_param dp2-zero3-bf16 gpt-tp2-full gpt-pp2 pp2-full-bf16 "
    "pp2-uneven ep2-zero3 ep2-tp2-etp1 lora-dp2-zero1 lora-pp2-bf16 lora-ep2 learned-ep2-zero1-bf16 "
    "skewed-prefill-ep2 prefill-gpt-pp2 prefill-gpt-tp2 compiled-gpt-pp2 "
    "selective lora-dp2-zero3 ep2 balanced-ep2 skewed-ep2-tp2-etp1",
}
"""Every mechanism once, on two ranks where one shows it and on four where two do not; the rest runs at night."""


def is_quick(engine: str, name: str) -> bool:
    if name in PARITY_OF[engine]:
        return name in QUICK[engine].split()
    each = CASES[engine][name]
    if name in REFUSED_OF[engine]:
        return each.world_size <= 2
    return any(each.reference == PARITY_OF[other][asked].reference for other in QUICK for asked in QUICK[other].split())


@cache
def outcomes_of(engine: str, world_size: int) -> dict[str, list[dict[str, Any]]]:
    """Runs the quick cases of all world sizes where that is 0, else the rest of one; outcomes by case and rank."""
    chosen = {name: each for name, each in CASES[engine].items() if is_quick(engine, name) == (world_size == 0)}
    return run({name: (engine, each) for name, each in chosen.items() if world_size in (0, each.world_size)})


def run(chosen: Mapping[str, tuple[str, Case]], together: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Runs cases one after another, each by its engine; outcomes by case, then by rank."""
    specs = {name: (each.spec(engine), each.compiler) for name, (engine, each) in chosen.items()}
    return run_specs(specs, together=together)


def run_specs(
    specs: Mapping[str, tuple[TrialSpec, str | None]], worker: Path = WORKER, together: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """Runs specifications, each with what compiles its layers, one after another: a set of processes for each size.

    `together` is a number of processes that run all of them, those of fewer ranks in each.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = {name: {"spec": spec.to_json(), "compiler": compiler} for name, (spec, compiler) in specs.items()}
        (folder / "cases.json").write_text(json.dumps(cases))
        group = start_script(worker, folder, "all", together, errors=folder / "all.err")
        try:
            group.join(GROUP_TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group.pid, signal.SIGKILL)  # a rank may wait for one that failed
            group.kill()  # where it has no session yet
            group.join()
        said = {path.stem: path.read_text()[-3000:] for path in sorted(folder.rglob("*.err"))}
        assert group.exitcode == 0, "\n".join(f"rank {rank}:\n{text}" for rank, text in said.items() if text)
        by_name: dict[str, list[dict[str, Any]]] = {case_name: [] for case_name in specs}
        for path in sorted(folder.glob("*/*.json")):  # rank after rank: none has ten
            for case_name, outcome in json.loads(path.read_text()).items():
                by_name[case_name].append(outcome)
    return by_name


def outcomes(engine: str, name: str) -> list[dict[str, Any]]:
    return outcomes_of(engine, 0 if is_quick(engine, name) else CASES[engine][name].world_size)[name]


def each_of(cases: Mapping[str, Mapping[str, Case]]) -> pytest.MarkDecorator:
    chosen = [
        pytest.param(engine, name, marks=[] if is_quick(engine, name) else [pytest.mark.slow])
        for engine, named in cases.items()
        for name in named
    ]
    return pytest.mark.parametrize(("engine", "name"), chosen)


# Of its cases and of their reference: the first test that asks waits for both groups.
pytestmark = pytest.mark.timeout(2 * GROUP_TIMEOUT_S + 20)
PIPELINES = {
    engine: {name: each for name, each in cases.items() if each.axes.get("pp", 1) > 1}
    for engine, cases in PARITY_OF.items()
}


@each_of(PARITY_OF)
def test_every_plan_trains_as_one_device(engine: str, name: str) -> None:
    chosen = CASES[engine][name]
    check_training(chosen, outcomes("torch", chosen.reference)[0], outcomes(engine, name))


def check_training(chosen: Case, reference: dict[str, Any], by_rank: list[dict[str, Any]]) -> None:
    """A case trains as the reference on every rank, and on all ranks alike to the last digit."""
    loss_tolerance, norm_tolerance = (8e-5, 2.5e-3) if chosen.axes.get("dtype") == "bf16" else (1e-5, 1e-5)
    for outcome in by_rank:
        assert outcome.get("error") is None
        assert outcome["losses"] == pytest.approx(reference["losses"], rel=loss_tolerance)
        assert outcome["grad_norms"] == pytest.approx(reference["grad_norms"], rel=norm_tolerance)
        assert (outcome["losses"], outcome["grad_norms"]) == (by_rank[0]["losses"], by_rank[0]["grad_norms"])


ROUTED = {
    engine: {name: each for name, each in cases.items() if each.workload.routing is not None}
    for engine, cases in PARITY_OF.items()
}


@each_of(ROUTED)
def test_every_plan_sends_experts_the_same_tokens(engine: str, name: str) -> None:
    chosen = CASES[engine][name]
    check_expert_tokens(chosen, outcomes("torch", chosen.reference)[0], outcomes(engine, name))


def check_expert_tokens(chosen: Case, reference: dict[str, Any], by_rank: list[dict[str, Any]]) -> None:
    """Every expert of every layer is sent as many tokens as on one device, and as its routing says."""
    model, workload = chosen.model, chosen.workload
    assert workload.routing is not None
    assigned = NUM_STEPS * workload.tokens_per_step * model.num_experts_per_token
    by_layer = [
        [sum(counts) for counts in zip(*layer, strict=True)]
        for layer in zip(*(outcome["expert_tokens"] for outcome in by_rank), strict=True)
    ]
    expected = reference["expert_tokens"]
    assert all(sum(counts) == assigned for counts in expected)
    for counts, wanted in zip(by_layer, expected, strict=True):
        times, rest = divmod(sum(counts), assigned)  # ranks of tensor parallel may each route all tokens
        assert times in (1, chosen.axes.get("tp", 1)) and rest == 0
        if chosen.axes.get("dtype") == "bf16" and workload.routing.by == "learned":
            assert counts == pytest.approx([times * count for count in wanted], rel=0.05)
        else:
            assert counts == [times * count for count in wanted]
    for counts in expected:
        if workload.routing.by == "balanced":
            assert len(set(counts)) == 1
        if workload.routing.by == "skew":
            shares = [rank**-workload.routing.skew for rank in range(1, model.num_experts + 1)]
            wanted = [assigned * share / sum(shares) for share in shares]
            # Sequences of 16 places with a token's rounding in each, in every sequence of every step.
            assert sorted(counts, reverse=True) == pytest.approx(wanted, abs=NUM_STEPS * workload.global_batch_size)
    if workload.routing.by == "skew":
        assert len({tuple(counts) for counts in expected}) > 1, "every layer has a most popular expert of its own"


def test_routing_and_its_loss_change_what_is_trained() -> None:
    """Parity would hold without them too, if they did nothing: each way of routing is another training run."""
    by_routing = [outcomes("torch", routed(case(MIXTRAL, 1), *how).reference)[0] for how in (BALANCED, SKEWED, LEARNED)]
    free = outcomes("torch", "reference-mixtral")[0]
    norms = [outcome["grad_norms"] for outcome in (*by_routing, free)]
    assert all(abs(a[1] / b[1] - 1) > 1e-4 for a, b in itertools.combinations(norms, 2))
    assert by_routing[2]["expert_tokens"] != free["expert_tokens"] or by_routing[2]["losses"] != free["losses"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each.reference, marks=[] if is_quick("torch", each.reference) else [pytest.mark.slow])
        for each in REFERENCES
    ],
)
def test_the_reference_moves(name: str) -> None:
    """Parity would mean nothing if all steps were alike: they differ by far more than the tolerance."""
    reference = outcomes("torch", name)[0]
    trains = CASES["torch"][name].workload.mode != "prefill"
    for values in (reference["losses"], reference["grad_norms"]) if trains else (reference["losses"],):
        assert min(abs(a / b - 1) for a, b in pairwise(values)) > 1e-4
    assert trains or reference["grad_norms"] == [0.0, 0.0, 0.0]


@each_of(PARITY_OF)
def test_spans_nest_and_count_micro_batches(engine: str, name: str) -> None:
    check_spans(CASES[engine][name].spec(engine), outcomes(engine, name))


def check_spans(spec: TrialSpec, by_rank: list[dict[str, Any]]) -> None:
    """A step's phases follow each other inside it, and every micro-batch of every chunk is there once."""
    plan = spec.plan
    micro_batches = num_micro_batches(plan, spec.cluster.world_size, spec.workload.global_batch_size)
    chunks = list(range(plan.vpp)) if plan.vpp > 1 else [None]
    for outcome in by_rank:
        spans: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        for phase, *rest in outcome["spans"]:
            spans[phase].append(tuple(rest))
        ((step_start_ns, step_end_ns, micro_batch, chunk),) = spans.pop("step")
        assert (micro_batch, chunk) == (None, None)
        everything = {(index, part) for index in range(micro_batches) for part in chunks}
        trains = spec.workload.mode != "prefill"
        for phase, expected in (("forward", everything), ("backward", everything if trains else set())):
            assert len(spans[phase]) == len(expected)
            assert {tuple(span[2:]) for span in spans[phase]} == expected
        assert bool(spans["optimizer"]) == trains
        assert bool(spans["wait"]) == (spec.cluster.world_size > 1)
        spans = sorted(span[:2] for group in spans.values() for span in group)
        assert spans[0][0] >= step_start_ns and spans[-1][1] <= step_end_ns
        assert all(start <= end for start, end in spans)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


@each_of(PIPELINES)
def test_a_stage_that_does_nothing_waits(engine: str, name: str) -> None:
    check_waiting(outcomes(engine, name))


def check_waiting(by_rank: list[dict[str, Any]]) -> None:
    """Up to the optimizer every nanosecond of a stage's step is in exactly one phase, however busy the machine is."""
    for outcome in by_rank:
        step, *phases = sorted(outcome["spans"], key=lambda span: (span[1], -span[2]))
        assert step[0] == "step"
        before = [span for span in phases if span[0] != "optimizer"]
        assert before[0][1] == step[1]
        assert all(span[2] == following[1] for span, following in pairwise(before))
        assert before[-1][2] <= max([span[1] for span in phases if span[0] == "optimizer"], default=step[2])


@each_of(PARITY_OF)
def test_memory_is_measured_and_given_back(engine: str, name: str) -> None:
    for outcome in outcomes(engine, name):
        assert outcome["memory_peak_bytes"] > 0
        assert outcome["tensors_left"] == 0
        assert outcome["groups_left"] == 0
        assert outcome["functions_replaced"] == []


@each_of(REFUSED_OF)
def test_a_plan_it_cannot_run_is_refused_and_closes(engine: str, name: str) -> None:
    spec = CASES[engine][name].spec(engine)
    (violation, *_) = violations(spec)
    for outcome in outcomes(engine, name):
        assert violation.reason in outcome["error"]
        assert (outcome["tensors_left"], outcome["groups_left"]) == (0, 0)


def test_engines_and_world_sizes_follow_each_other_in_one_process() -> None:
    """As in a worker that runs one trial after another, each with a default group of its own."""
    order = (
        ("deepspeed", "ep2-zero3"),
        ("torch", "tp2"),
        ("deepspeed", "accumulation"),
        ("torch", "dp2-zero3-overlap-grad"),
        ("deepspeed", "tp2"),
        ("torch", "accumulation"),
        ("deepspeed", "pp2"),
    )
    chosen = {f"{engine}-{name}": (engine, PARITY_OF[engine][name]) for engine, name in order}
    for name, by_rank in run(chosen, 2).items():
        reference = outcomes("torch", chosen[name][1].reference)[0]
        for outcome in by_rank:
            assert outcome["losses"] == pytest.approx(reference["losses"], rel=1e-5)
            assert (outcome["tensors_left"], outcome["groups_left"]) == (0, 0)

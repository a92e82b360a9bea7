"""The named cases of engine_cases.py: every engine with every axis it has, on two GPUs and on four."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One training run."""

    name: str
    engine: str
    model: str
    axes: dict[str, Any] = field(default_factory=dict)
    mode: str = "pretrain"
    batch: int = 16
    """Sequences of one optimizer step."""
    routing: str = ""
    """Routing of tokens to experts: a key of `ROUTINGS`; empty for models without experts, and where the router is
    left alone."""
    reference: str | None = None
    """The case whose first losses this one repeats; where something else is trained there is none."""


REFERENCES = {
    2: {"llama": "torch/llama/dp2", "mixtral": "torch/mixtral/ep2-zero1", "gpt": "torch/gpt/dp2"},
    4: {"llama": "torch/llama/dp4", "mixtral": "torch/mixtral/ep4-zero1", "gpt": "torch/gpt/dp4"},
}
"""Of every model the case others are compared with; it runs before them."""

GATHERED = {"sharding": "zero1", "overlap": "grad_param"}
ZERO_3 = {"sharding": "zero3", "overlap": "grad_param"}

ONCE = {
    "torch": {
        "none": ("none", "grad"),
        "zero1": ("none", "grad", "grad_param"),
        "zero2": ("none", "grad", "grad_param"),
        "zero3": ("none", "grad", "grad_param"),
    },
    "megatron": {"none": ("none", "grad"), "zero1": ("none", "grad", "grad_param")},
    "deepspeed": {
        "none": ("none",),
        "zero1": ("none", "grad"),
        "zero2": ("none", "grad"),
        "zero3": ("none", "grad_param"),
    },
}
"""Overlap settings by engine and sharding."""

ROUTINGS = {"balanced": ("balanced", 0.0), "skewed": ("skew", 1.0), "learned": ("learned", 0.0)}
"""Ways to send tokens to experts: `Routing.by` and its skew, by the name that begins a case's."""

Tier = Mapping[str, Mapping[str, Mapping[str, Any]]]


def speed(ranks: int) -> Tier:
    """Large micro-batches and four of them on every GPU: what the engines can do."""
    dp, ep, large = f"speed-dp{ranks}", f"speed-ep{ranks}", {"micro_batch_size": 4, "batch": 16 * ranks}
    experts = {"ep": ranks, **large}
    split = {"speed-tp2": {"tp": 2, **large}, "speed-pp2": {"pp": 2, "vpp": 2, **large, "micro_batch_size": 2}}
    if ranks == 4:
        both = {"tp": 2, "pp": 2, **large}
        split = {"speed-tp2-pp2": both, "speed-tp2-pp2-vpp2": {**both, "vpp": 2}}
    return {
        "torch/llama": {
            dp: {"overlap": "grad", **large},
            f"{dp}-zero1": {"sharding": "zero1", **large},
            f"{dp}-zero3": {**ZERO_3, **large},
        },
        "megatron/llama": {dp: {**GATHERED, **large}, **split},
        "deepspeed/llama": {f"{dp}-zero1": {"sharding": "zero1", **large}, f"{dp}-zero3": {**ZERO_3, **large}},
        "torch/mixtral": {ep: {**GATHERED, **experts}},
        "megatron/mixtral": {ep: {**GATHERED, **experts}},
        "deepspeed/mixtral": {ep: {"sharding": "zero1", **experts}},
    }


def once(ranks: int) -> Tier:
    """One micro-batch a step, so that every step reduces its gradients: what overlap does."""
    return {
        f"{engine}/llama": {
            f"once-{'-'.join(part for part in (sharding, overlap) if part != 'none') or 'none'}": {
                "sharding": sharding,
                "overlap": overlap,
                "batch": ranks,
            }
            for sharding, overlaps in by_sharding.items()
            for overlap in overlaps
        }
        for engine, by_sharding in ONCE.items()
    }


def routing(ranks: int) -> Tier:
    """Every way of routing in every engine: the same tokens to the same experts, and the same losses."""
    plans: dict[str, dict[str, Mapping[str, Any]]] = {
        "torch/mixtral": {f"ep{ranks}-zero1": {"ep": ranks, "sharding": "zero1"}},
        "megatron/mixtral": {f"ep{ranks}-zero1": {"ep": ranks, **GATHERED}},
        "deepspeed/mixtral": {f"ep{ranks}-zero1": {"ep": ranks, "sharding": "zero1"}},
    }
    if ranks == 4:
        plans["torch/mixtral"] |= {"ep2-tp2": {"ep": 2, "tp": 2}, "ep2-pp2": {"ep": 2, "pp": 2}}
        plans["megatron/mixtral"] |= {
            "ep2-tp2-etp1": {"ep": 2, "tp": 2, "etp": 1},
            "ep2-pp2": {"ep": 2, "pp": 2},
            "ep4-full": {"ep": 4, "recompute": "full", **GATHERED},
        }
        plans["deepspeed/mixtral"] |= {
            "ep2-tp2-etp1": {"ep": 2, "tp": 2, "etp": 1},
            "ep2-pp2-zero1": {"ep": 2, "pp": 2, "sharding": "zero1"},
        }
    return {
        of: {f"{how}-{name}": {**axes, "routing": how} for how in ROUTINGS for name, axes in named.items()}
        for of, named in plans.items()
    }


TIERS: dict[int, tuple[Tier, ...]] = {
    2: (
        {
            "torch/llama": {
                "dp2": {},
                "dp2-zero1": {"sharding": "zero1"},
                "dp2-zero1-grad_param": GATHERED,
                "dp2-zero3-grad_param": {"sharding": "zero3", "overlap": "grad_param"},
                "tp2": {"tp": 2},
                "pp2": {"pp": 2},
                "pp2-vpp2": {"pp": 2, "vpp": 2},
            },
            "megatron/llama": {
                "dp2-zero1-grad_param": GATHERED,
                "dp2-zero1-grad_param-mbs4": {**GATHERED, "micro_batch_size": 4},
                "tp2": {"tp": 2},
                "pp2": {"pp": 2},
                "pp2-vpp2": {"pp": 2, "vpp": 2},
            },
            "deepspeed/llama": {
                "dp2-zero1": {"sharding": "zero1"},
                "dp2-zero3-grad_param": {"sharding": "zero3", "overlap": "grad_param"},
                "pp2": {"pp": 2},
            },
            "torch/mixtral": {"ep2-zero1": {"ep": 2, "sharding": "zero1"}},
            "megatron/mixtral": {"ep2-zero1-grad_param": {"ep": 2, **GATHERED}},
            "deepspeed/mixtral": {"ep2-zero1": {"ep": 2, "sharding": "zero1"}},
        },
        {
            "torch/llama": {
                "dp2-mbs4": {"micro_batch_size": 4},
                "dp2-overlap-grad": {"overlap": "grad"},
                "dp2-zero2-grad": {"sharding": "zero2", "overlap": "grad"},
                "dp2-zero3": {"sharding": "zero3"},
                "dp2-full": {"recompute": "full"},
                "dp2-selective": {"recompute": "selective"},
                "pp2-layout": {"pp": 2, "layout": (3, 1)},
            },
            "megatron/llama": {
                "dp2": {},
                "dp2-overlap-grad": {"overlap": "grad"},
                "dp2-zero1": {"sharding": "zero1"},
                "dp2-full": {"recompute": "full"},
                "dp2-selective": {"recompute": "selective"},
                "tp2-mbs4": {"tp": 2, "micro_batch_size": 4},
                "pp2-layout": {"pp": 2, "layout": (3, 1)},
            },
            "deepspeed/llama": {
                "dp2": {},
                "dp2-zero1-grad": {"sharding": "zero1", "overlap": "grad"},
                "dp2-zero2-grad": {"sharding": "zero2", "overlap": "grad"},
                "dp2-zero3": {"sharding": "zero3"},
                "dp2-zero1-mbs4": {"sharding": "zero1", "micro_batch_size": 4},
                "dp2-zero1-full": {"sharding": "zero1", "recompute": "full"},
                "tp2": {"tp": 2},
                "pp2-layout": {"pp": 2, "layout": (3, 1)},
            },
            "torch/mixtral": {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "ep2-full": {"ep": 2, "recompute": "full"}},
            "megatron/mixtral": {
                "tp2": {"tp": 2},
                "tp2-ep2-etp1": {"tp": 2, "ep": 2, "etp": 1},
                "pp2": {"pp": 2},
                "ep2-full": {"ep": 2, "recompute": "full", **GATHERED},
            },
            "deepspeed/mixtral": {"ep2-zero2": {"ep": 2, "sharding": "zero2"}},
        },
        {
            "torch/gpt": {"dp2": {}, "tp2": {"tp": 2}},
            "megatron/gpt": {"tp2": {"tp": 2}, "pp2-vpp2": {"pp": 2, "vpp": 2}},
            "deepspeed/gpt": {"dp2-zero2": {"sharding": "zero2"}},
            "torch/llama": {
                "dp2-fp32": {"sharding": "zero3", "dtype": "fp32"},
                "lora-dp2": {"overlap": "grad", "mode": "lora"},
                "prefill-dp2": {"mode": "prefill"},
            },
            "megatron/llama": {
                "lora-dp2": {"overlap": "grad", "mode": "lora"},
                "lora-tp2": {"tp": 2, "mode": "lora"},
                "prefill-dp2": {"mode": "prefill"},
            },
            "deepspeed/llama": {
                "lora-dp2": {"mode": "lora"},
                "lora-zero3": {**ZERO_3, "mode": "lora"},
                "prefill-dp2": {"mode": "prefill"},
            },
        },
    ),
    4: (
        {
            "torch/llama": {
                "dp4": {},
                "dp4-zero1-grad_param": GATHERED,
                "dp4-zero3-grad_param": {"sharding": "zero3", "overlap": "grad_param"},
                "tp2-pp2": {"tp": 2, "pp": 2},
                "pp2-vpp2-dp2": {"pp": 2, "vpp": 2},
            },
            "megatron/llama": {
                "dp4-zero1-grad_param": GATHERED,
                "dp4-zero1-grad_param-mbs4": {**GATHERED, "micro_batch_size": 4},
                "tp2-pp2": {"tp": 2, "pp": 2},
                "tp4": {"tp": 4},
                "pp4": {"pp": 4},
                "pp2-vpp2-dp2": {"pp": 2, "vpp": 2, **GATHERED},
            },
            "deepspeed/llama": {
                "dp4-zero1": {"sharding": "zero1"},
                "dp4-zero3-grad_param": {"sharding": "zero3", "overlap": "grad_param"},
                "pp2-dp2-zero1": {"pp": 2, "sharding": "zero1"},
            },
            "torch/mixtral": {"ep4-zero1": {"ep": 4, "sharding": "zero1"}, "ep2-tp2": {"ep": 2, "tp": 2}},
            "megatron/mixtral": {"ep4-zero1": {"ep": 4, **GATHERED}, "ep2-tp2-etp1": {"ep": 2, "tp": 2, "etp": 1}},
            "deepspeed/mixtral": {"ep4-zero1": {"ep": 4, "sharding": "zero1"}},
        },
        {
            "torch/llama": {
                "dp4-mbs4": {"micro_batch_size": 4},
                "dp4-overlap-grad": {"overlap": "grad"},
                "dp4-zero2-grad": {"sharding": "zero2", "overlap": "grad"},
                "dp4-zero3": {"sharding": "zero3"},
                "dp4-full": {"recompute": "full"},
                "dp4-selective": {"recompute": "selective"},
                "tp4": {"tp": 4},
                "tp2-dp2": {"tp": 2},
                "pp4": {"pp": 4},
                "pp2-dp2": {"pp": 2},
                "pp2-dp2-layout": {"pp": 2, "layout": (5, 3)},
            },
            "megatron/llama": {
                "dp4": {},
                "dp4-overlap-grad": {"overlap": "grad"},
                "dp4-zero1": {"sharding": "zero1"},
                "dp4-full": {"recompute": "full"},
                "dp4-selective": {"recompute": "selective"},
                "tp2-dp2-zero1": {"tp": 2, "sharding": "zero1"},
                "pp4-vpp2": {"pp": 4, "vpp": 2},
                "pp2-dp2-layout": {"pp": 2, "layout": (5, 3)},
            },
            "deepspeed/llama": {
                "dp4": {},
                "dp4-zero1-grad": {"sharding": "zero1", "overlap": "grad"},
                "dp4-zero2-grad": {"sharding": "zero2", "overlap": "grad"},
                "dp4-zero3": {"sharding": "zero3"},
                "dp4-zero1-mbs4": {"sharding": "zero1", "micro_batch_size": 4},
                "dp4-zero1-full": {"sharding": "zero1", "recompute": "full"},
                "tp2-dp2-zero1": {"tp": 2, "sharding": "zero1"},
                "pp4": {"pp": 4},
                "pp2-dp2-layout": {"pp": 2, "sharding": "zero1", "layout": (5, 3)},
            },
            "torch/mixtral": {"ep2-pp2": {"ep": 2, "pp": 2}, "ep4-full": {"ep": 4, "recompute": "full"}},
            "megatron/mixtral": {
                "ep2-pp2": {"ep": 2, "pp": 2},
                "ep2-tp2": {"ep": 2, "tp": 2, "sharding": "zero1"},
                "ep4-full": {"ep": 4, "recompute": "full", **GATHERED},
            },
            "deepspeed/mixtral": {"ep2-zero2": {"ep": 2, "sharding": "zero2"}},
        },
        {
            "torch/gpt": {"dp4": {}, "tp2-pp2": {"tp": 2, "pp": 2}},
            "megatron/gpt": {"tp2-pp2-vpp2": {"tp": 2, "pp": 2, "vpp": 2}},
            "deepspeed/gpt": {"dp4-zero2": {"sharding": "zero2"}},
            "torch/llama": {
                "dp4-fp32": {"sharding": "zero3", "dtype": "fp32"},
                "lora-dp4": {"overlap": "grad", "mode": "lora"},
                "prefill-dp4": {"mode": "prefill"},
            },
            "megatron/llama": {
                "lora-dp4": {"overlap": "grad", "mode": "lora"},
                "lora-tp2": {"tp": 2, "mode": "lora"},
                "prefill-dp4": {"mode": "prefill"},
            },
            "deepspeed/llama": {
                "lora-dp4": {"mode": "lora"},
                "lora-zero3": {**ZERO_3, "mode": "lora"},
                "prefill-dp4": {"mode": "prefill"},
            },
        },
    ),
}
"""By number of GPUs, importance, engine and model, and name: what differs from the neutral plan, and the mode.

`speed`, `once` and `routing` follow.
"""


def cases(ranks: int) -> list[Case]:
    """The cases of a number of GPUs, in order of importance."""
    found = []
    for tier in (*TIERS[ranks], speed(ranks), once(ranks), routing(ranks)):
        for of, named in tier.items():
            engine, model = of.split("/")
            for name, chosen in named.items():
                axes = dict(chosen)
                mode, batch, how = axes.pop("mode", "pretrain"), axes.pop("batch", 16), axes.pop("routing", "")
                reference = REFERENCES[ranks][model] if (mode, batch) == ("pretrain", 16) else None
                if how:
                    reference = f"torch/mixtral/{how}-ep{ranks}-zero1"
                found.append(Case(f"{of}/{name}", engine, model, axes, mode, batch, how, reference))
    return found

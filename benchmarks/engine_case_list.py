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
            **{name: plan for name, plan in split.items() if name == "speed-tp2"},
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
    plans = dict.fromkeys(("torch", "megatron", "deepspeed"), f"ep{ranks}-zero1")
    plans["megatron"] += "+grad_param"
    if ranks == 4:
        plans["torch"] += " ep2-tp2 ep2-pp2"
        plans["megatron"] += " ep2-tp2-etp1 ep2-pp2 ep4-full+zero1+grad_param"
        plans["deepspeed"] += " ep2-tp2-etp1 ep2-pp2-zero1"
    return {
        f"{engine}/mixtral": {
            f"{how}-{name}": {**axes, "routing": how} for how in ROUTINGS for name, axes in named(names, ranks).items()
        }
        for engine, names in plans.items()
    }


TIERS: dict[int, tuple[dict[str, str], ...]] = {
    2: (
        {
            "torch/llama": "dp2 dp2-zero1 dp2-zero1-grad_param dp2-zero3-grad_param tp2 pp2 pp2-vpp2",
            "megatron/llama": "dp2-zero1-grad_param dp2-zero1-grad_param-mbs4 tp2 pp2 pp2-vpp2",
            "deepspeed/llama": "dp2-zero1 dp2-zero3-grad_param pp2",
            "torch/mixtral": "ep2-zero1",
            "megatron/mixtral": "ep2-zero1-grad_param",
            "deepspeed/mixtral": "ep2-zero1",
        },
        {
            "torch/llama": "dp2-mbs4 dp2-overlap-grad dp2-zero2-grad dp2-zero3 dp2-full dp2-selective pp2-layout",
            "megatron/llama": "dp2 dp2-overlap-grad dp2-zero1 dp2-full dp2-selective tp2-mbs4 pp2-layout",
            "deepspeed/llama": "dp2 dp2-zero1-grad dp2-zero2-grad dp2-zero3 "
            "dp2-zero1-mbs4 dp2-zero1-full tp2 pp2-layout",
            "torch/mixtral": "tp2 pp2 ep2-full",
            "megatron/mixtral": "tp2 tp2-ep2-etp1 pp2 ep2-full+zero1+grad_param",
            "deepspeed/mixtral": "ep2-zero2",
        },
        {
            "torch/gpt": "dp2 tp2",
            "megatron/gpt": "tp2 pp2-vpp2",
            "deepspeed/gpt": "dp2-zero2",
            "torch/llama": "dp2-fp32+zero3 lora-dp2+grad prefill-dp2",
            "megatron/llama": "lora-dp2+grad lora-tp2 prefill-dp2",
            "deepspeed/llama": "lora-dp2 lora-zero3+grad_param prefill-dp2",
        },
    ),
    4: (
        {
            "torch/llama": "dp4 dp4-zero1-grad_param dp4-zero3-grad_param tp2-pp2 pp2-vpp2-dp2",
            "megatron/llama": "dp4-zero1-grad_param dp4-zero1-grad_param-mbs4 "
            "tp2-pp2 tp4 pp4 pp2-vpp2-dp2+zero1+grad_param",
            "deepspeed/llama": "dp4-zero1 dp4-zero3-grad_param pp2-dp2-zero1",
            "torch/mixtral": "ep4-zero1 ep2-tp2",
            "megatron/mixtral": "ep4-zero1+grad_param ep2-tp2-etp1",
            "deepspeed/mixtral": "ep4-zero1",
        },
        {
            "torch/llama": "dp4-mbs4 dp4-overlap-grad dp4-zero2-grad dp4-zero3 dp4-full "
            "dp4-selective tp4 tp2-dp2 pp4 pp2-dp2 pp2-dp2-layout",
            "megatron/llama": "dp4 dp4-overlap-grad dp4-zero1 dp4-full dp4-selective "
            "tp2-dp2-zero1 pp4-vpp2 pp2-dp2-layout",
            "deepspeed/llama": "dp4 dp4-zero1-grad dp4-zero2-grad dp4-zero3 dp4-zero1-mbs4 "
            "dp4-zero1-full tp2-dp2-zero1 pp4 pp2-dp2-layout+zero1",
            "torch/mixtral": "ep2-pp2 ep4-full",
            "megatron/mixtral": "ep2-pp2 ep2-tp2+zero1 ep4-full+zero1+grad_param",
            "deepspeed/mixtral": "ep2-zero2",
        },
        {
            "torch/gpt": "dp4 tp2-pp2",
            "megatron/gpt": "tp2-pp2-vpp2",
            "deepspeed/gpt": "dp4-zero2",
            "torch/llama": "dp4-fp32+zero3 lora-dp4+grad prefill-dp4",
            "megatron/llama": "lora-dp4+grad lora-tp2 prefill-dp4",
            "deepspeed/llama": "lora-dp4 lora-zero3+grad_param prefill-dp4",
        },
    ),
}
"""Cases by number of GPUs, importance, engine and model: what differs from the neutral plan, with a plus where the
name of the case leaves it out. `speed`, `once` and `routing` follow."""

AXES = {"mbs": "micro_batch_size", "zero": "sharding", "grad": "overlap", "fp": "dtype"}
"""Axes by the letters that their word in a name begins with, where those are not the axis's own."""


def axes_of(name: str, ranks: int) -> dict[str, Any]:
    """Reads the axes of a plan, and the mode, out of a case's name."""
    axes: dict[str, Any] = {}
    for word in name.replace("+", "-").split("-"):
        letters = word.rstrip("0123456789")
        if letters in ("tp", "pp", "vpp", "ep", "etp", "mbs"):
            axes[AXES.get(letters, letters)] = int(word.removeprefix(letters))
        elif letters in ("zero", "grad", "grad_param", "fp"):
            axes[AXES[letters.removesuffix("_param")]] = word
        elif word in ("full", "selective"):
            axes["recompute"] = word
        elif word in ("lora", "prefill"):
            axes["mode"] = word
        elif word == "layout":
            axes["layout"] = (3, 1) if ranks == 2 else (5, 3)
        elif letters not in ("dp", "overlap"):
            raise ValueError(f"{name}: {word} names no axis")
    return axes


def named(names: str, ranks: int) -> dict[str, dict[str, Any]]:
    """Reads the axes of several cases by their names, without what a plus adds to these."""
    return {name.partition("+")[0]: axes_of(name, ranks) for name in names.split()}


def cases(ranks: int) -> list[Case]:
    """The cases of a number of GPUs, in order of importance."""
    found = []
    listed = ({of: named(names, ranks) for of, names in tier.items()} for tier in TIERS[ranks])
    for tier in (*listed, speed(ranks), once(ranks), routing(ranks)):
        for of, plans in tier.items():
            engine, model = of.split("/")
            for name, chosen in plans.items():
                axes = dict(chosen)
                mode, batch, how = axes.pop("mode", "pretrain"), axes.pop("batch", 16), axes.pop("routing", "")
                reference = REFERENCES[ranks][model] if (mode, batch) == ("pretrain", 16) else None
                if how:
                    reference = f"torch/mixtral/{how}-ep{ranks}-zero1"
                found.append(Case(f"{of}/{name}", engine, model, axes, mode, batch, how, reference))
    return found

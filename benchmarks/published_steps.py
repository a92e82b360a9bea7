"""Published training steps as questions to `wattune.estimate`, and baselines beside which an error means something."""

import csv
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import wattune
from wattune.catalog.models import MODELS, ModelSpec
from wattune.cost.flops import workload_flop_per_token
from wattune.cost.step_time.pipeline import bubble_ratio
from wattune.plans.axes import Plan
from wattune.plans.parallel import num_micro_batches
from wattune.search.forecast import Estimate
from wattune.trial import TrialSpec

TABLE = Path(__file__).parent / "data" / "published_steps.parquet"

_DEVICES: Mapping[str, Any] = {
    # NVIDIA Blackwell datasheets, dense.
    "b300_sxm": {
        "name": "b300_published", "like": "b200_sxm", "memory_bytes": 270 * 10**9, "power_limit_w": 1100.0,
    },
    "gb300": {"name": "gb300_published", "like": "gb200", "memory_bytes": 279 * 10**9, "power_limit_w": 1400.0},
}  # fmt: skip
"""Devices that rows name and the catalog lacks, as a space describes them."""

_GPUS = {
    **dict.fromkeys(("H100-SXM-80GB", "H100", "H100-80GB-700W", "h100_80gb"), "h100_sxm"),
    **dict.fromkeys(("A100-80GB", "a100_80gb"), "a100_sxm_80gb"),
    "a100_40gb": "a100_sxm_40gb",
    **{name: f"{name.lower()}_sxm" for name in ("B200", "B300")},
    **{name: name.lower() for name in ("GB200", "GB300", "MI325X")},
}
_NVL72 = ("gb200", "gb300")

PRECISIONS = {
    "BF16": "bf16", "bf16": "bf16", "amp_bf16": "bf16", "mixed": "bf16",
    "FP8": "fp8", "amp_fp8": "fp8", "FP8-CS": "fp8", "FP8-MX": "fp8", "MXFP8": "fp8",
}  # fmt: skip


_RELU2: dict[str, Any] = {"norm": "layernorm", "activation": "gelu"}
_MPT: dict[str, Any] = _RELU2 | {"positions": "learned", "tied_embeddings": True}
_KINDS = {"": {}, "relu2": _RELU2, "mpt": _MPT, "gpt": _MPT | {"bias": True}}


def _model(row: Mapping[str, str]) -> ModelSpec:
    """Reads a shape: of the catalog, or by its numbers, with 2 experts a token where it has any."""
    numbers = {name: int(row[name]) for name in [*row][2:8] if row[name]}
    if row["like"]:
        return replace(MODELS[row["like"]], **numbers)
    experts = {"num_experts": int(row["num_experts"]), "num_experts_per_token": 2} if row["num_experts"] else {}
    return ModelSpec(name="published", **numbers, **_KINDS[row["kind"]], **experts)


def _models() -> dict[str, ModelSpec]:
    with (TABLE.parent / "published_models.csv").open(newline="") as file:
        return {row["model"]: _model(row) for row in csv.DictReader(file)}


MODELS_PUBLISHED = _models()
"""Shapes by the name in the table, in lower case (`data/published_models.csv`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A published row and what the product says of it."""

    row: Mapping[str, Any]
    asked: Mapping[str, Any]
    """Arguments of `wattune.estimate`."""
    found: Estimate
    precision: str
    source: str
    """Short name of the source."""
    measured_s: float

    @property
    def configuration(self) -> str:
        """Equal for rows that repeat a configuration."""
        return repr((self.source, self.asked))

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Names the source, precision, device and kind of a row."""
        spec = self.found.spec
        kind = "lora" if spec.workload.mode == "lora" else "experts" if spec.model.is_moe else "dense"
        return self.source, self.precision, _GPUS[self.row["gpu"]], kind


def read() -> tuple[list[Step], dict[str, int]]:
    """Asks the product for every row of the table that can be asked for.

    Returns:
        Rows with their estimates, and how many have none by reason.
    """
    steps: list[Step] = []
    reasons: dict[str, int] = defaultdict(int)
    for row in pq.read_table(TABLE).to_pylist():
        found = _step(row)
        if isinstance(found, str):
            reasons[found] += 1
        else:
            steps.append(found)
    return steps, dict(reasons)


def errors(steps: list[Step]) -> dict[tuple[str, ...], list[tuple[float, float]]]:
    """Returns errors of each configuration by group: ours, and of a constant rate fitted to rows of other models."""
    rates = [model_flop(one.found.spec) / (one.measured_s * one.found.spec.cluster.world_size) for one in steps]
    groups: dict[tuple[str, ...], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for one in steps:
        others = [
            rate
            for rate, two in zip(rates, steps, strict=True)
            if two.group[1:3] == one.group[1:3] and two.found.spec.model.hidden_size != one.found.spec.model.hidden_size
        ]
        constant_s = at_rate(one.found.spec, float(np.median(others))) if others else np.nan
        guesses_s = one.found.figures["step_time_s"]["value"], constant_s
        both = tuple(guess_s / one.measured_s - 1 for guess_s in guesses_s)
        groups[one.group][one.configuration].append((both[0], both[1]))
    return {
        group: [(float(np.mean([a for a, _ in one])), float(np.mean([b for _, b in one]))) for one in each.values()]
        for group, each in sorted(groups.items())
    }


def _name(row: Mapping[str, Any]) -> str:
    name = row["model"].lower().replace("_", "-").replace(" ", "-")
    for ending in ("-sft", "-lora"):
        name = name.removesuffix(ending)
    return name.split("-proxy")[0].split("-l2")[0] if "proxy" in name else name


def _shape(row: Mapping[str, Any]) -> ModelSpec | None:
    name = _name(row)
    if name not in MODELS_PUBLISHED and name.rsplit("-l", 1)[0] in MODELS_PUBLISHED:
        name = name.rsplit("-l", 1)[0]
    found = MODELS_PUBLISHED.get(name)
    layers = row["num_layers"]
    return replace(found, num_layers=int(layers)) if found and layers else found


def _problem(row: Mapping[str, Any]) -> str | None:
    """Says why a row cannot be represented; None where it can, as far as one column tells."""
    if _shape(row) is None:
        return "layers the catalog cannot say: latent attention, wide heads, windows, state spaces, unprinted shapes"
    if row["gpu"] not in _GPUS:
        return f"no datasheet entry for {row['gpu']}"
    if row["precision"] not in PRECISIONS:
        return "the precision is not printed, or is fp4, which no plan can name"
    if not all(row[name] for name in ("gpus", "global_batch", "seq_len", "tp", "pp")):
        return "GPUs, batch, sequence length or degrees are not printed"
    if not (row["step_time_s"] or row["tokens_per_s_per_gpu"]):
        return "neither step time nor tokens/s are printed, only a FLOP rate of unknown convention"
    if row["pp"] > 1 and not row["vpp"] and "DGXC" in row["source"]:
        return "chunks a stage are not printed"
    return None


def _step(row: Mapping[str, Any]) -> Step | str:
    problem, model = _problem(row), _shape(row)
    if problem is not None or model is None:
        return problem or ""
    source, device, precision = row["source"], _GPUS[row["gpu"]], PRECISIONS[row["precision"]]
    world, batch, seq_len = (int(row[name]) for name in ("gpus", "global_batch", "seq_len"))
    tp, pp, cp, ep, vpp, mbs = (int(row[name] or 1) for name in ("tp", "pp", "cp", "ep", "vpp", "mbs"))
    replicas = world // (tp * pp * cp)
    layout = _layout(model.num_layers, pp * vpp)
    if world % (tp * pp * cp) or batch % (replicas * mbs) or (vpp > 1 and batch // (replicas * mbs) % pp):
        return "micro-batches do not divide the batch, or do not fill rounds of the pipeline, as printed"
    if layout is None:
        return "fewer layers than virtual stages"
    degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": _etp(row, tp), "vpp": vpp}
    per_node = min(world, 64 if device in _NVL72 else 8)
    cluster = {
        "device": _DEVICES.get(device, device),
        "num_nodes": max(1, world // per_node),
        "devices_per_node": per_node,
    }
    if device.startswith("a100") and world > per_node:
        cluster["network"] = "hdr"  # one 200 Gb/s port a device, as DGX A100
    asked: dict[str, Any] = {
        "model": _entry(model, seq_len),
        "cluster": cluster,
        "engine": _engine(source, device),
        "seq_len": seq_len,
        "global_batch_size": batch,
        **degrees,
        "micro_batch_size": mbs,
        "dtype": precision,
        "layout": list(layout) or "even",
        **_choices(row, tp),
    }
    if "LoRA" in row["model"]:
        asked |= {"mode": "lora", "lora": {"rank": 16}}
    if model.is_moe:
        asked["routing"] = "balanced"  # a capacity of 1.0: every expert gets as many rows
    found = wattune.estimate(**asked, storage=_NOWHERE)
    room = found.spec.cluster.sensed_device.memory_bytes or np.inf
    overflows = bool(found.figures) and found.figures["memory_peak_bytes"]["value"] > room
    if asked["engine"] == "automodel" and not row["recompute"] and overflows:  # it ran with recomputation
        asked["recompute"] = "full"
        found = wattune.estimate(**asked, storage=_NOWHERE)
    if not found.figures:
        return f"rule {found.rule}"
    return Step(
        row=row,
        asked=asked,
        found=found,
        precision=precision,
        source=_short(source),
        measured_s=row["step_time_s"] or batch * seq_len / (row["tokens_per_s_per_gpu"] * world),
    )


_NOWHERE = str(TABLE.parent / "no_studies")
"""A storage without fits: nothing that this machine measured takes part."""


def _entry(model: ModelSpec, seq_len: int) -> dict[str, Any]:
    """Returns a model as a space describes it."""
    given = {key: value for key, value in asdict(model).items() if value is not None and key != "source"}
    return given | {"name": "published_model", "max_positions": seq_len if model.positions == "learned" else 0}


def _etp(row: Mapping[str, Any], tp: int) -> int:
    """Reads the degree that splits an expert; Megatron's own choice is that of all tensors (`parallel_state.py`)."""
    printed = re.search(r"etp=(\d+)", row["notes"] or "")
    return int(printed[1]) if printed else tp


def _layout(num_layers: int, num_virtual: int) -> tuple[int, ...] | None:
    """Divides layers that are no multiple of the virtual stages: fewest on the ends, where embedding and head are."""
    if num_layers % num_virtual == 0:
        return ()
    small, more = divmod(num_layers, num_virtual)
    inner = [small + (index < more) for index in range(num_virtual - 1)]
    layout = (small, *inner[: num_virtual - 2], num_layers - small - sum(inner[: num_virtual - 2]))
    return layout if min(layout) >= 1 else None


def _engine(source: str, device: str) -> str:
    """Names the software of a source; its habits are in `wattune.cost.step_time.facts`."""
    if "llm-foundry" in source:
        return "llm_foundry"
    if "AutoModel" in source:
        return "automodel"
    if "MaxT" in source:
        return "maxtext"
    return "megatron" if device.startswith("a100") else "nemo"


def _choices(row: Mapping[str, Any], tp: int) -> dict[str, str]:
    """Reads sharding, overlap and recomputation; what is not printed is the recipe's usual choice."""
    printed = (row["recompute"] or "").lower()
    recompute = "none"
    if "full" in printed or "checkpointing" in printed:
        recompute = "full"
    elif "selective" in printed:
        recompute = "selective"
    source = row["source"]
    if "llm-foundry" in source:
        sharding = "zero2" if "SHARD_GRAD_OP" in row["notes"] else "zero3"
        return {"sharding": sharding, "overlap": "grad_param", "recompute": recompute}
    if "MaxT" in source:  # see its facts
        return {"sharding": "zero3", "overlap": "grad_param", "recompute": "full"}
    if "AutoModel" in source:
        return {"sharding": "zero3", "overlap": "grad_param", "recompute": recompute}
    if "Korthikanti" in source or "MT-NLG" in source:
        return {"sharding": "none", "overlap": "none", "recompute": recompute}
    return {"sharding": "zero1", "overlap": "tp" if tp > 1 else "grad_param", "recompute": recompute}


def _short(source: str) -> str:
    for part, name in (
        ("DGXC", "DGXC"), ("llm-foundry", "llm-foundry"), ("Bridge", "Megatron-Bridge"), ("MLPerf", "MLPerf logs"),
        ("Korthikanti", "Korthikanti"), ("AutoModel", "AutoModel"), ("NeMo 24.07", "NeMo 24.07"), ("MT-NLG", "MT-NLG"),
        ("Primus", "Primus"),
    ):  # fmt: skip
        if part in source:
            return "DGXC MaxText" if "MaxT" in source else name
    return source[:16]


PASSES = {"none": 3.0, "selective": 3.0, "full": 4.0}
"""Forward passes' worth of products in a step, by recomputation."""


def model_flop(spec: TrialSpec) -> float:
    """Counts model FLOPs of a step."""
    return spec.workload.tokens_per_step * workload_flop_per_token(spec.model, spec.workload)


def at_rate(spec: TrialSpec, flop_per_s: float) -> float:
    """Returns the step time at a constant achieved rate of every device: constant MFU."""
    return model_flop(spec) / (flop_per_s * spec.cluster.world_size)


def calculon_s(spec: TrialSpec) -> float:
    """Restates Calculon's equations with the efficiencies of its A100 system file.

    Isaev et al. 2023 (Calculon, SC23), repository calculon-ai/calculon at 4f81f02 (Apache-2.0), systems/a100_80g.json:
    compute and memory add up; matrix efficiency 0.95 above 128 GFLOP, 0.9 above 16, 0.6 above 1; memory 0.9; links 0.6,
    network 0.9 of the datasheet. Nothing overlaps. Attention is fused, unlike there.
    """
    model, plan, workload, cluster = spec.model, spec.plan, spec.workload, spec.cluster
    device = cluster.sensed_device
    peak, bandwidth, link = device.peak_flop_per_s(plan.dtype), device.memory_bandwidth_bytes_per_s, None
    link = device.link_bandwidth_bytes_per_s
    assert peak and bandwidth and link
    h, kv, f = model.hidden_size, model.num_kv_heads * model.head_size, model.ffn_hidden_size
    tokens = plan.micro_batch_size * workload.seq_len / plan.cp

    def product_s(m: float, n: float, k: float) -> float:
        flop = 2 * m * n * k
        efficiency = next(rate for least, rate in ((128e9, 0.95), (16e9, 0.9), (1e9, 0.6), (0, 0.1)) if flop >= least)
        return flop / (peak * efficiency) + 2 * (m * k + k * n + m * n) / (bandwidth * 0.9)

    experts = model.num_experts_per_token if model.is_moe else 1
    gated = 2 if model.activation == "swiglu" else 1
    forward_s = product_s(tokens, (h + 2 * kv) / plan.tp, h) + product_s(tokens, h, h / plan.tp)
    forward_s += experts * (product_s(tokens, gated * f / plan.tp, h) + product_s(tokens, h, f / plan.tp))
    forward_s += 2 * tokens * workload.seq_len * h / plan.tp / (peak * 0.9)
    moved = tokens * (16 * h + 3 * gated * f) / plan.tp
    layer_s = PASSES[plan.recompute] * (forward_s + 2 * moved / (bandwidth * 0.9))
    if plan.tp > 1:
        layer_s += PASSES[plan.recompute] * 4 * 2 * tokens * h * (plan.tp - 1) / plan.tp / (link * 0.6)
    head_s = 3 * product_s(tokens, model.vocab_size / plan.tp, h)
    count = num_micro_batches(plan, cluster.world_size, workload.global_batch_size)
    passes_s = count * (layer_s * model.num_layers + head_s) / plan.pp
    return passes_s * (1 + _bubble(plan, count)) + _replicas_s(spec, model, count, link)


def _replicas_s(spec: TrialSpec, model: ModelSpec, count: int, link: float) -> float:
    """Predicts gradients in fp32 and weights in bf16 of one rank over the slower of link and network."""
    plan, cluster = spec.plan, spec.cluster
    dp = plan.dp(cluster.world_size)
    if dp == 1:
        return 0.0
    held = model.num_parameters / (plan.tp * plan.pp * (plan.ep if model.is_moe else 1))
    each = count if plan.sharding in ("zero2", "zero3") else 1
    gathers = 2 * count if plan.sharding == "zero3" else 1
    rate = link * 0.6 if cluster.num_nodes == 1 else min(link * 0.6, 50e9 * 0.9 * max(1, 8 // plan.tp))
    return held * (4 * each + 2 * gathers) * (dp - 1) / dp / rate


def _bubble(plan: Plan, count: int) -> float:
    """Returns idle over busy time of its pipeline."""
    return float(bubble_ratio(plan.pp, plan.vpp, np.array(count)))

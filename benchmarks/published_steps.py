"""Published training steps as questions to `wattune.estimate`: what a row means, and which rows cannot be asked."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from step_time_baselines import at_rate, model_flop

import wattune
from wattune.catalog.models import MODELS, ModelSpec
from wattune.search.forecast import Estimate

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


def _model(h: int, layers: int, ffn: int, heads: int, kv: int, vocab: int, **more: Any) -> ModelSpec:
    return ModelSpec(
        name="published", num_layers=layers, hidden_size=h, ffn_hidden_size=ffn, num_heads=heads, num_kv_heads=kv,
        vocab_size=vocab, **more,
    )  # fmt: skip


_RELU2: dict[str, Any] = {"norm": "layernorm", "activation": "gelu"}
_MPT: dict[str, Any] = _RELU2 | {"positions": "learned", "tied_embeddings": True}
_GPT: dict[str, Any] = _MPT | {"bias": True}

MODELS_PUBLISHED: Mapping[str, ModelSpec] = {
    "llama3.1-8b": MODELS["llama3_8b"],
    "llama3-8b": MODELS["llama3_8b"],
    "llama3.1-70b": MODELS["llama3_70b"],
    "llama3-70b": MODELS["llama3_70b"],
    "llama3.1-405b": _model(16384, 126, 53248, 128, 8, 128256),
    "llama2-7b": _model(4096, 32, 11008, 32, 32, 32000),
    "llama2-13b": _model(5120, 40, 13824, 40, 40, 32000),
    "llama2-70b": _model(8192, 80, 28672, 64, 8, 32000),
    "llama-70b": _model(8192, 80, 28672, 64, 8, 32000),
    "nemotron4-15b": _model(6144, 32, 24576, 48, 8, 256000, **_RELU2),
    "nemotron4-340b": _model(18432, 96, 73728, 96, 8, 256000, **_RELU2),
    "nemotron-8b": _model(4096, 32, 16384, 32, 32, 256000, **_RELU2),
    "nemotron-22b": _model(6144, 40, 24576, 48, 48, 256000, **_RELU2),
    "nemotron-340b": _model(18432, 96, 73728, 96, 8, 256000, **_RELU2),
    "gpt3-5b": _model(4096, 24, 16384, 32, 32, 51200, **_GPT),
    "gpt3-20b": _model(6144, 44, 24576, 48, 48, 51200, **_GPT),
    "gpt3-175b": replace(MODELS["gpt3_175b"], vocab_size=51200),
    "gpt-22b": _model(6144, 48, 24576, 64, 64, 51200, **_GPT),
    "gpt-175b": _model(12288, 96, 49152, 96, 96, 51200, **_GPT),
    "gpt-530b": _model(20480, 105, 81920, 128, 128, 51200, **_GPT),
    "gpt-1t": _model(25600, 128, 102400, 160, 160, 51200, **_GPT),
    "mt-nlg-530b": _model(20480, 105, 81920, 128, 128, 51200, **_GPT),
    "grok1-314b": _model(6144, 64, 32768, 48, 8, 131072, num_experts=8, num_experts_per_token=2),
    "mixtral-8x7b": MODELS["mixtral_8x7b"],
    "mixtral-8x22b": MODELS["mixtral_8x22b"],
    "qwen2.5-7b": _model(3584, 28, 18944, 28, 4, 152064),
    "qwen2.5-32b": _model(5120, 64, 27648, 40, 8, 152064),
    **{
        f"mpt-{size}": _model(h, layers, 4 * h, h // width, h // width, 50368, **_MPT)
        for size, h, layers, width in (
            ("125m", 768, 12, 64), ("350m", 1024, 24, 64), ("760m", 1536, 24, 128), ("1b", 2048, 24, 128),
            ("3b", 2560, 32, 128), ("7b", 4096, 32, 128), ("13b", 5120, 40, 128), ("30b", 7168, 48, 128),
            ("70b", 8192, 80, 128),
        )
    },
}  # fmt: skip
"""Shapes by the name in the table, in lower case: of the catalog, papers, and the models' published configurations."""


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

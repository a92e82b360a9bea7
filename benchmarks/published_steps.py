"""Published training steps as specifications: what a row means, and which rows cannot be represented."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq

from wattune.catalog.hardware import DEVICES, ClusterSpec, DeviceSpec
from wattune.catalog.models import MODELS, ModelSpec
from wattune.cost.batch import batches
from wattune.cost.coefficients import StepTimeCoefficients
from wattune.cost.memory.defaults import default_coefficients as memory_coefficients
from wattune.cost.memory.predict import predict as predict_memory
from wattune.cost.step_time.facts import FACTS
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec
from wattune.workload import Lora, Routing, Workload

TABLE = Path(__file__).parent / "data" / "published_steps.parquet"

_B200 = "NVIDIA Blackwell datasheets (B200, GB200, B300, GB300), dense"
DATASHEET_DEVICES = {
    name: DeviceSpec(
        name=name,
        vendor=vendor,
        peak_bf16_flop_per_s=flop,
        peak_fp32_flop_per_s=None,
        memory_bytes=memory * 10**9,
        memory_bandwidth_bytes_per_s=bandwidth,
        link_bandwidth_bytes_per_s=link,
        power_limit_w=limit,
        sm_clock_max_mhz=None,
        temp_slowdown_c=None,
        source=source,
    )
    for name, vendor, flop, memory, bandwidth, link, limit, source in (
        ("a100_sxm_80gb", "nvidia", 312e12, 80, 2.039e12, 300e9, 400.0, "NVIDIA A100 datasheet"),
        ("a100_sxm_40gb", "nvidia", 312e12, 40, 1.555e12, 300e9, 400.0, "NVIDIA A100 datasheet"),
        ("b200_sxm", "nvidia", 2250e12, 180, 7.7e12, 900e9, 1000.0, _B200),
        ("gb200", "nvidia", 2500e12, 186, 8.0e12, 900e9, 1200.0, _B200),
        ("b300_sxm", "nvidia", 2250e12, 270, 7.7e12, 900e9, 1100.0, _B200),
        ("gb300", "nvidia", 2500e12, 279, 8.0e12, 900e9, 1400.0, _B200),
        ("mi325x", "amd", 1307.4e12, 256, 6.0e12, 448e9, 1000.0, "AMD Instinct MI325X datasheet"),
    )
}
"""Devices that published rows name and the catalog lacks, for this benchmark only."""

_GPUS = {
    **dict.fromkeys(("H100-SXM-80GB", "H100", "H100-80GB-700W", "h100_80gb"), "h100_sxm"),
    **dict.fromkeys(("A100-80GB", "a100_80gb"), "a100_sxm_80gb"),
    "a100_40gb": "a100_sxm_40gb",
    **{name: f"{name.lower()}_sxm" for name in ("B200", "B300")},
    **{name: name.lower() for name in ("GB200", "GB300", "MI325X")},
}
_NVL72 = ("gb200", "gb300")

_FACTS = {
    # Megatron with TransformerEngine: attention by cuDNN, faster on H100 than FlashAttention 2 (Shah et al. 2024, arXiv
    # 2407.08608, figures 5 and 6); products for gradients of weights add to fp32 sums themselves. NeMo and Megatron-
    # Bridge hide gathers and reductions between replicas, beside tensor parallel overlap too
    # (`megatron_comm_overlap.py`, `_get_optimizer_overlap_cfgs`). Their performance recipes reduce gradients in bf16
    # (`grad_reduce_in_fp32=False`, `grad_sync_dtype: bf16`) and pad experts' inputs to a capacity
    # (`MegatronTokenDropCallback`, `moe_pad_expert_input_to_capacity`), so the host reads no counts of tokens.
    "nemo": replace(
        FACTS["megatron"],
        attention_rate=1.4,
        grad_bytes=4,
        hides_replicas_beside_tp=True,
        sent_grad_bytes=2,
        host_ops_exchange=0,
        gathers_rows=True,
    ),
    # llm-foundry in 2023: FSDP1, not compiled, FlashAttention 1 in Triton, half as fast as FlashAttention 2 (Dao 2023,
    # arXiv 2307.08691, abstract).
    "composer": replace(FACTS["torch"], compiles=False, attention_rate=0.5),
    # FSDP2 with layers of TransformerEngine and Triton, as the rows' notes say: nothing is compiled.
    "automodel": replace(FACTS["torch"], compiles=False),
    # XLA compiles all of it; attention is cuDNN's. `remat_policy=save_qkv_proj` (dgxc-benchmarking, maxtext/
    # configure.sh) keeps queries, keys and values: attention, its output, gate and up are computed again, of Llama 2
    # 70B's layer 2 x 537 M + 134 M of 2 x 856 M + 134 M operations a token. The product after them is not.
    "maxtext": replace(FACTS["torch"], attention_rate=1.4, recomputed_frac=0.65),
}
"""Habits of software that published rows were run with and wattune does not run."""


@contextmanager
def published_world() -> Iterator[None]:
    """Knows the devices and the software of published rows while the body runs, and forgets them after."""
    devices = {name: one for name, one in DATASHEET_DEVICES.items() if name not in DEVICES}
    with patch.dict(DEVICES, devices), patch.dict(FACTS, _FACTS):
        yield


def adjusted(coefficients: StepTimeCoefficients, step_device: str, precision: str) -> StepTimeCoefficients:
    """Gives published coefficients the facts of a device and a precision."""
    kernel = replace(coefficients.kernel, linear_speedup=SPEEDUP[precision])
    link = coefficients.link
    if step_device.startswith("a100"):
        # FlashAttention 2 reaches 50 to 73 % of the peak of an A100 (the same abstract), on H100 some 35 to 45 %.
        kernel = replace(kernel, attention_forward_frac=0.62, attention_backward_frac=0.52)
        link = replace(link, network_bytes_per_s=25e9)  # one 200 Gb/s port a device, as DGX A100
    return replace(coefficients, kernel=kernel, link=link)


PRECISIONS = {
    "BF16": "bf16", "bf16": "bf16", "amp_bf16": "bf16", "mixed": "bf16",
    "FP8": "fp8", "amp_fp8": "fp8", "FP8-CS": "fp8", "FP8-MX": "fp8", "MXFP8": "fp8", "NVFP4": "fp4",
}  # fmt: skip
SPEEDUP = {"bf16": 1.0, "fp8": 2.0, "fp4": 4.0}
"""Dense peak of a precision over that of bf16 (datasheets). Quantisation is not modelled."""


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
    """A published row as a specification."""

    row: Mapping[str, Any]
    spec: TrialSpec
    precision: str
    source: str
    """Short name of the source."""
    measured_s: float

    @property
    def configuration(self) -> str:
        """Equal for rows that repeat a configuration, whatever the number of replicas in a weak-scaling series."""
        plan, model = self.spec.plan, self.spec.model
        return repr(
            (self.source, self.precision, self.spec.cluster.device, model, self.spec.workload, plan, self.spec.cluster)
        )


def read() -> tuple[list[Step], dict[str, int]]:
    """Reads the table; to be called, like what uses its result, inside `published_world`.

    Returns:
        Rows that can be represented, and how many cannot be by reason.
    """
    steps: list[Step] = []
    reasons: dict[str, int] = {}
    for row in pq.read_table(TABLE).to_pylist():
        found = _step(row)
        if isinstance(found, str):
            reasons[found] = reasons.get(found, 0) + 1
        else:
            steps.append(found)
    return steps, reasons


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
        return "the precision is not printed"
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
    source, device = row["source"], _GPUS[row["gpu"]]
    world, batch, seq_len = (int(row[name]) for name in ("gpus", "global_batch", "seq_len"))
    tp, pp, cp, ep, vpp, mbs = (int(row[name] or 1) for name in ("tp", "pp", "cp", "ep", "vpp", "mbs"))
    replicas = world // (tp * pp * cp)
    layout = _layout(model.num_layers, pp * vpp)
    if world % (tp * pp * cp) or batch % (replicas * mbs) or (vpp > 1 and batch // (replicas * mbs) % pp):
        return "micro-batches do not divide the batch, or do not fill rounds of the pipeline, as printed"
    if layout is None:
        return "fewer layers than virtual stages"
    plan = Plan(
        tp=tp, pp=pp, cp=cp, ep=ep, etp=_etp(row, tp), vpp=vpp, micro_batch_size=mbs, layout=layout,
        **_choices(row, tp),
    )  # fmt: skip
    per_node = min(world, 64 if device in _NVL72 else 8)
    cluster = ClusterSpec(device=device, num_nodes=max(1, world // per_node), devices_per_node=per_node)
    lora = Lora(rank=16) if "LoRA" in row["model"] else None
    workload = Workload(
        mode="lora" if lora else "pretrain",
        seq_len=seq_len,
        global_batch_size=batch,
        lora=lora,
        routing=Routing(by="balanced") if model.is_moe else None,  # a capacity of 1.0: every expert gets as many rows
    )
    tokens = batch * seq_len
    spec = TrialSpec(model=model, cluster=cluster, engine=_engine(source, device), workload=workload, plan=plan)
    if spec.engine == "automodel" and not row["recompute"] and _overflows(spec):
        spec = replace(spec, plan=replace(plan, recompute="full"))
    return Step(
        row=row,
        spec=spec,
        precision=PRECISIONS[row["precision"]],
        source=_short(source),
        measured_s=row["step_time_s"] or tokens / (row["tokens_per_s_per_gpu"] * world),
    )


def _etp(row: Mapping[str, Any], tp: int) -> int:
    """Reads the degree that splits an expert; Megatron's own choice is that of all tensors (`parallel_state.py`)."""
    printed = re.search(r"etp=(\d+)", row["notes"] or "")
    return int(printed[1]) if printed else tp


def _overflows(spec: TrialSpec) -> bool:
    """Tells whether all activations of FSDP2 would not fit the device: its row then ran with recomputation."""
    ((_, batch),) = batches([replace(spec, engine="torch")])
    peak_bytes = predict_memory(batch, memory_coefficients(spec.cluster.device)).peak_bytes
    return bool(peak_bytes[0] > (batch.device.memory_bytes or np.inf))


def _layout(num_layers: int, num_virtual: int) -> tuple[int, ...] | None:
    """Divides layers that are no multiple of the virtual stages: fewest on the ends, where embedding and head are."""
    if num_layers % num_virtual == 0:
        return ()
    small, more = divmod(num_layers, num_virtual)
    inner = [small + (index < more) for index in range(num_virtual - 1)]
    layout = (small, *inner[: num_virtual - 2], num_layers - small - sum(inner[: num_virtual - 2]))
    return layout if min(layout) >= 1 else None


def _engine(source: str, device: str) -> str:
    """Names the software of a source; see the facts above."""
    if "llm-foundry" in source:
        return "composer"
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
    if "MaxT" in source:  # see the facts above
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

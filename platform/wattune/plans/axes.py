"""The axes of a configuration in one table, and `Plan`, which has one value on each of them."""

from dataclasses import dataclass, fields
from typing import Final, Literal

AxisKind = Literal["count", "choice", "layout", "order", "setting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One dimension that a search may vary."""

    name: str
    kind: AxisKind
    """`count`: a positive integer; `choice`: a name; `layout`: layers a stage, or a name; `order`: slots, or a name;
    `setting` of a device: a name of `choices`, or a positive integer where it has none, or `FOUND`."""
    choices: tuple[str, ...] = ()
    """Names that are values of the axis."""
    neutral: str
    """The value of an axis that the space leaves out, in words."""
    meaning: str
    """A line of text for users."""


FOUND: Final = "found"
"""The value of a setting that leaves a device as it was found; a plan holds None."""

NVIDIA_PROFILES: Final = ("max_p", "max_q", "network", "balanced", "llm_training", "llm_inference", "hpc")
"""NVIDIA's workload power profiles, `NVML_POWER_PROFILE_*` in nvml.h 13, as far as they are of whole workloads."""

AMD_PROFILES: Final = ("compute", "power_saving", "bootup_default")
"""AMD's power profiles, `AMDSMI_PWR_PROF_PRST_*_MASK` in amdsmi.h, as far as they are of accelerators."""

AXES: Final[dict[str, Axis]] = {
    axis.name: axis
    for axis in (
        Axis(name="tp", kind="count", neutral="1", meaning="tensor parallel degree, with sequence parallel"),
        Axis(name="pp", kind="count", neutral="1", meaning="pipeline stages"),
        Axis(name="cp", kind="count", neutral="1", meaning="context parallel degree"),
        Axis(name="ep", kind="count", neutral="1", meaning="expert parallel degree; divides dp*cp*tp/etp"),
        Axis(name="etp", kind="count", neutral="tp", meaning="tensor parallel degree inside experts"),
        Axis(name="vpp", kind="count", neutral="1", meaning="model chunks per pipeline stage (interleaving)"),
        Axis(name="micro_batch_size", kind="count", neutral="1", meaning="sequences per micro-batch and replica"),
        Axis(
            name="sharding",
            kind="choice",
            choices=("none", "zero1", "zero2", "zero3"),
            neutral="none",
            meaning="what data-parallel ranks share: optimizer state, gradients, parameters",
        ),
        Axis(
            name="dp_replicate",
            kind="count",
            neutral="1",
            meaning="copies of what sharding shares: each is shared by dp/dp_replicate ranks (hybrid sharding, HSDP)",
        ),
        Axis(
            name="recompute",
            kind="choice",
            choices=("none", "selective", "full"),
            neutral="none",
            meaning="activations computed again in the backward pass: none, attention, every layer",
        ),
        Axis(
            name="offload",
            kind="choice",
            choices=("none", "activations"),
            neutral="none",
            meaning="what waits in host memory, copied beside compute: what layers keep for the backward pass",
        ),
        Axis(
            name="loss_chunks",
            kind="count",
            neutral="1",
            meaning="parts of a micro-batch's tokens whose logits are held one after another: head and loss are "
            "computed again in the backward pass",
        ),
        Axis(
            name="overlap",
            kind="choice",
            choices=("none", "grad", "grad_param", "tp"),
            neutral="none",
            meaning="communication run beside compute: gradient reduction, parameter gathering, tensor parallel",
        ),
        Axis(
            name="dtype",
            kind="choice",
            choices=("bf16", "fp8", "fp32"),
            neutral="bf16, on cpu fp32",
            meaning="data type of weights and activations in the forward and backward pass; "
            "fp8: of the layers' products, the rest stays bf16",
        ),
        Axis(
            name="layout",
            kind="layout",
            choices=("even",),
            neutral="even",
            meaning="layers per pipeline stage, such as [21, 19]",
        ),
        Axis(
            name="rank_order",
            kind="order",
            choices=("topology",),
            neutral="topology",
            meaning="which device slot each rank drives",
        ),
        Axis(name="power_limit_w", kind="setting", neutral=FOUND, meaning="watts that each device may draw"),
        Axis(name="clock_mhz", kind="setting", neutral=FOUND, meaning="compute clock that each device is locked to"),
        Axis(
            name="power_profile",
            kind="setting",
            choices=(*NVIDIA_PROFILES, *AMD_PROFILES),
            neutral=FOUND,
            meaning="power profile of each device's driver",
        ),
    )
}
"""Every axis by name, in the order tables list them."""

HELD_IN: Final = {"bf16": "bf16", "fp8": "bf16", "fp32": "fp32"}
"""Type of weights and activations between products, by `dtype`: FP8 is cast to at a product and kept nowhere."""

ITEM_BYTES: Final = {name: {"bf16": 2, "fp32": 4}[held] for name, held in HELD_IN.items()}
"""Bytes of one number that is held, by `dtype`."""

SETTINGS: Final = tuple(name for name, axis in AXES.items() if axis.kind == "setting")
"""Axes that are set on devices, whatever trains on them."""

_UNITS: Final = {"power_limit_w": "W", "clock_mhz": "MHz"}

DEGREES: Final = ("tp", "pp", "cp", "ep", "etp", "vpp")
"""Axes that are parallel degrees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One value on every axis: the layout of a model over ranks, and how a step runs. `dp` follows from the ranks."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    micro_batch_size: int = 1
    sharding: str = "none"
    dp_replicate: int = 1
    """Groups of data-parallel ranks that hold the same shards: torchtitan's `data_parallel_replicate_degree`."""
    recompute: str = "none"
    offload: str = "none"
    loss_chunks: int = 1
    overlap: str = "none"
    dtype: str = "bf16"
    layout: tuple[int, ...] = ()
    """Layers per pipeline stage in stage order (chunk-major with interleaving). Empty means even."""
    rank_order: str | tuple[int, ...] = "topology"
    """`topology`, or the device slot of every rank, counted over all nodes."""
    power_limit_w: int | None = None
    """Watts that each device may draw; None leaves the limit as it was found, as do the next two."""
    clock_mhz: int | None = None
    power_profile: str | None = None

    def dp(self, world_size: int) -> int:
        """Returns the data parallel degree on that many ranks: world = tp * pp * cp * dp."""
        return world_size // (self.tp * self.pp * self.cp)

    @property
    def held_dtype(self) -> str:
        """Data type of weights in use and of activations: `dtype`, or where that is of products alone, the wider."""
        return HELD_IN[self.dtype]

    @property
    def label(self) -> str:
        """Short text of what is not neutral, such as `tp2 pp2 mbs4 zero1`."""
        parts = [
            f"{name}{own}" for name in DEGREES if (own := getattr(self, name)) != (self.tp if name == "etp" else 1)
        ]
        parts.append(f"mbs{self.micro_batch_size}")
        parts += [self.sharding] if self.sharding != "none" else []
        parts += [f"dp_replicate={self.dp_replicate}"] if self.dp_replicate != 1 else []
        parts += [f"recompute={self.recompute}"] if self.recompute != "none" else []
        parts += [f"offload={self.offload}"] if self.offload != "none" else []
        parts += [f"loss_chunks={self.loss_chunks}"] if self.loss_chunks != 1 else []
        parts += [f"overlap={self.overlap}"] if self.overlap != "none" else []
        parts += ["fp8"] if self.dtype == "fp8" else []
        parts += [f"layout={'-'.join(map(str, self.layout))}"] if self.layout else []
        parts += [f"order={self.rank_order}"] if self.rank_order != "topology" else []
        parts += [f"{value}{_UNITS.get(name, '')}" for name, value in self.settings.items()]
        return " ".join(parts)

    @property
    def settings(self) -> dict[str, int | str]:
        """Settings of its devices, by axis; empty where they stay as they were found."""
        return {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}


assert {field.name for field in fields(Plan)} == set(AXES), "Plan and AXES name the same axes"

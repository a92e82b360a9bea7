"""The axes of a configuration, a line each in `axes.csv`, and `Plan`, which has one value on each of them."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any, Final, Literal

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

_FILE: Final = resources.files(__package__).joinpath("axes.csv").read_text(encoding="utf-8")
_ROWS: Final[Iterable[dict[str, Any]]] = csv.DictReader(_FILE.splitlines())
AXES: Final = {row["name"]: Axis(**row | {"choices": tuple(row["choices"].split())}) for row in _ROWS}
"""Every axis by name, of `axes.csv`, in the order tables list them."""

AMD_PROFILES: Final = ("compute", "power_saving", "bootup_default")
"""AMD's power profiles, `AMDSMI_PWR_PROF_PRST_*_MASK` in amdsmi.h, as far as they are of accelerators."""

NVIDIA_PROFILES: Final = tuple(name for name in AXES["power_profile"].choices if name not in AMD_PROFILES)
"""NVIDIA's workload power profiles, `NVML_POWER_PROFILE_*` in nvml.h 13, as far as they are of whole workloads."""

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

"""Networks between nodes, fabrics inside them, and processors of hosts: what a cluster is made of beside devices."""

import tomllib
from dataclasses import dataclass, field
from importlib import resources
from typing import Annotated, Final

from wattune.errors import PlanError, closest
from wattune.field_types import LARGEST_WORLD, Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """One kind of network between nodes."""

    name: str
    """Catalog name, as search spaces write it."""
    bandwidth_bytes_per_s: Annotated[float, Bounds(gt=0, le=1e13)]
    """Of one port, one direction: 400 Gb/s are 50e9."""
    ports_per_device: Annotated[float, Bounds(gt=0, le=64)] = 1.0
    """Ports of a node over its devices: 0.5 where two devices share one."""
    achieved_frac: Annotated[float, Bounds(gt=0, le=1)] = 0.8
    """Achieved by large messages over that bandwidth."""
    latency_s: Annotated[float, Bounds(gt=0, le=1)] = 4e-6
    """Added by each further node of a ring."""
    rail_devices: Annotated[int, Bounds(ge=1, le=LARGEST_WORLD)] | None = None
    """Devices whose nodes meet at the same leaf switches, one for each rail. Others are reached over the spine. None is
    all of them."""
    oversubscription: Annotated[float, Bounds(ge=1, le=1000)] = 1.0
    """Bandwidth of the leaf switches to their devices over that to the spine: 1 where the spine takes all of it."""
    source: str = field(default="", compare=False)
    """Origin of the numbers. Networks with equal numbers are equal."""


NETWORK_FIGURES: Final = (
    "bandwidth_bytes_per_s", "ports_per_device", "achieved_frac", "latency_s", "rail_devices", "oversubscription",
)  # fmt: skip
"""Figures of a network."""

_FILE: Final = resources.files(__package__).joinpath("networks.toml").read_text(encoding="utf-8")

NETWORKS: Final[dict[str, NetworkSpec]] = {
    name: NetworkSpec(name=name, **figures) for name, figures in tomllib.loads(_FILE).items()
}
"""Every network by name, of `networks.toml`."""

DEFAULT_NETWORK: Final = NETWORKS["ndr"]
"""The network of a cluster that names none."""

FABRICS: Final[dict[str, tuple[int, str, str]]] = {
    "nvlink_8": (8, "nvidia", "NVSwitch of an HGX or DGX board: A100, H100, H200 or B200 (datasheets)"),
    "nvlink_32": (32, "nvidia", "NVLink switches over nodes, GH200 NVL32 (NVIDIA and AWS, November 2023)"),
    "nvlink_72": (72, "nvidia", "NVLink switches of a rack, GB200 NVL72 datasheet: 18 trays of four GPUs"),
    "xgmi_8": (8, "amd", "Infinity Fabric of a node: eight MI300X, or the eight GCDs of four MI250 (datasheets)"),
}
"""Devices that each fabric joins, their vendor, and the source. The bandwidth of a link is the device's."""

HOST_CLOCKS_GHZ: Final[dict[str, float]] = {
    "xeon_8480c": 3.8,
    "xeon_8462y": 4.1,
    "xeon_8570": 4.0,
    "xeon_8358": 3.4,
    "epyc_7742": 3.4,
    "epyc_7763": 3.5,
    "epyc_7a53": 3.5,
    "epyc_9654": 3.7,
    "epyc_9575f": 5.0,
    "grace": 3.4,
}
"""Highest clock of one core, by processor (datasheets of Intel, AMD and NVIDIA)."""

REFERENCE_HOST: Final = "xeon_8480c"
"""Host that the coefficients' time of an operation stands for: that of a DGX H100."""


def network(name: str) -> NetworkSpec:
    """Returns the network of that name. Raises `PlanError` where the catalog has no such network."""
    try:
        return NETWORKS[name]
    except KeyError:
        raise PlanError(f'unknown network "{name}"; {closest(name, NETWORKS)}') from None


def host_speed(cpu: str) -> float:
    """Returns how fast a host issues operations, 1 for `REFERENCE_HOST`.

    One thread issues them, so its highest clock counts; that a clock does equal work on all is an assumption. A speed
    that `wattune doctor` measured is better. Raises `PlanError` where the catalog has no such processor.
    """
    try:
        return HOST_CLOCKS_GHZ[cpu] / HOST_CLOCKS_GHZ[REFERENCE_HOST]
    except KeyError:
        raise PlanError(f'unknown processor "{cpu}"; {closest(cpu, HOST_CLOCKS_GHZ)}') from None

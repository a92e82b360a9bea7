"""Hardware: devices and clusters. A device is what one rank drives. Peaks are dense, never the sparse marketing figure.

A new device is one table of `devices.toml`: plans, nodes, sensors and their simulation look it up here.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib import resources
from typing import Annotated, Any, Final

from wattune.catalog.networks import NetworkSpec, network
from wattune.errors import PlanError, closest
from wattune.field_types import Bounds, OneOf, Positive

_LINKED_BY_PCIE: Final = frozenset({"h100_pcie", "h100_nvl", "a100_pcie_80gb"})
"""Devices whose link to the others is PCIe. A bridge of NVLink joins pairs of some boards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One kind of device. A field that is None is unknown; figures that need it are absent, never guessed."""

    name: str
    """Catalog name, as search spaces write it."""
    vendor: str
    """`nvidia`, `amd` or `cpu`."""
    peak_bf16_flop_per_s: Positive | None
    """Dense bf16 matrix peak of one device."""
    peak_fp32_flop_per_s: Positive | None
    """Dense fp32 peak of one device, without reduced-precision tricks."""
    peak_fp8_flop_per_s: Positive | None = None
    """Dense fp8 matrix peak of one device. `dtype: fp8` needs it."""
    memory_bytes: Annotated[int, Bounds(ge=10**9, le=10**14)] | None
    """Memory that one rank can address on its device."""
    memory_bandwidth_bytes_per_s: Positive | None
    """Peak bandwidth of that memory."""
    link_bandwidth_bytes_per_s: Positive | None
    """Peak bandwidth to the node's other devices: one direction, all links together."""
    power_limit_w: Annotated[float, Bounds(ge=10, le=10_000)] | None
    """Default enforced power limit of one device (a package's limit divided by its devices)."""
    power_limit_least_w: Annotated[float, Bounds(ge=1, le=10_000)] | None = None
    """Lowest limit of power that its driver takes."""
    sm_clock_max_mhz: Annotated[float, Bounds(ge=100, le=10_000)] | None
    """Highest compute clock."""
    temp_slowdown_c: Annotated[float, Bounds(ge=40, le=150)] | None
    """Core temperature from which the device slows down to protect itself."""
    devices_per_package: Annotated[int, Bounds(ge=1, le=64)] = 1
    """Devices that share one package and its power sensor (MI250: 2)."""
    product_names: tuple[str, ...] = ()
    """Whole names that its driver and its vendor's tools give it. Nodes that have them get its trials."""
    ray_accelerator_types: tuple[str, ...] = ()
    """Values of Ray's label `ray.io/accelerator-type` on its nodes. Boards of other form factors may share them."""
    matrix_energy: Annotated[float, Bounds(ge=0.1, le=10)] = 1.0
    """Energy of one operation of its matrix units over that on an H200, by its process. It counts in estimates of
    power."""
    dtypes: tuple[Annotated[str, OneOf(("bf16", "fp32"))], ...] = ("bf16", "fp32")
    """Data types that training can hold its numbers in; the first is the default."""
    source: str = field(default="", compare=False)
    """Origin of the numbers. Devices with equal numbers are equal: a study's file keeps the numbers alone."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "DeviceSpec":
        """Makes a device of plain data, its lists tuples again. Raises `TypeError`, `ValueError`: it is none."""
        given: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in data.items()}
        made = cls(**given)
        for name in (each.name for each in fields(cls)):
            value = getattr(made, name)
            if name in _TEXTS:
                fits = isinstance(value, str)
            elif name in _LISTS:
                fits = isinstance(value, tuple) and all(isinstance(one, str) for one in value)
            else:
                unknown = value is None and name != "devices_per_package"
                number = isinstance(value, int | float) and not isinstance(value, bool)
                fits = unknown or (number and 0 < value < math.inf)
            if not fits:
                raise ValueError(f"own_device.{name}: got {str(value)[:60]}, which a device cannot have")
        return made

    @property
    def is_linked_by_pcie(self) -> bool:
        """True where `link_bandwidth_bytes_per_s` is that of PCIe: an NVLink bridge then has another, unknown peak."""
        return self.name in _LINKED_BY_PCIE or self.source.removeprefix("like ") in _LINKED_BY_PCIE

    @property
    def counted(self) -> "DeviceSpec":
        """The device by what counts in an id (`UNCOUNTED`); results of equal ones are of one kind of device."""
        return replace(self, peak_fp8_flop_per_s=None, power_limit_least_w=None)

    def peak_flop_per_s(self, dtype: str) -> float | None:
        """Returns the dense peak for a data type; None where it is unknown."""
        return {
            "bf16": self.peak_bf16_flop_per_s,
            "fp8": self.peak_fp8_flop_per_s,
            "fp32": self.peak_fp32_flop_per_s,
        }[dtype]

    @property
    def trains_in(self) -> tuple[str, ...]:
        """Data types that training can run in: `dtypes`, and fp8 beside bf16 where its peak is known.

        A processor has no products in fp8. It emulates them, so that they can be tried without a GPU.
        """
        has_fp8 = "bf16" in self.dtypes and (self.peak_fp8_flop_per_s is not None or self.vendor == "cpu")
        return (*self.dtypes, "fp8") if has_fp8 else self.dtypes

    def is_product(self, name: str) -> bool:
        """Tells whether a product name is one of this device's, written in any case and with any separators."""
        return _words(name) in map(_words, self.product_names)


UNCOUNTED: Final = frozenset({"source", "peak_fp8_flop_per_s", "power_limit_least_w"})
"""Fields of a device that count in no trial's id, and that make no other cluster of it. A peak in fp8 came later: the
devices of earlier studies have none, and what they measured is theirs."""

_TEXTS: Final = ("name", "vendor", "source")
_LISTS: Final = ("product_names", "ray_accelerator_types", "dtypes")


def _words(product: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9]+", product.lower()))


_FILE: Final = resources.files(__package__).joinpath("devices.toml").read_text(encoding="utf-8")
_UNKNOWN: Final = {each.name: None for each in fields(DeviceSpec) if each.default is MISSING}

DEVICES: Final[dict[str, DeviceSpec]] = {
    name: DeviceSpec.from_json({**_UNKNOWN, "name": name, **figures}) for name, figures in tomllib.loads(_FILE).items()
}
"""Every device by name, of `devices.toml`."""


def device(name: str) -> DeviceSpec:
    """Returns the device of that name. Raises `PlanError` where the catalog has no such device."""
    try:
        return DEVICES[name]
    except KeyError:
        raise PlanError(f'unknown device "{name}"; {closest(name, DEVICES)}') from None


def chip_of(device: DeviceSpec) -> DeviceSpec:
    """Returns the catalog device with the chip and links of this one, whatever its memory and limit; else itself."""
    same = ("vendor", "peak_bf16_flop_per_s", "sm_clock_max_mhz", "link_bandwidth_bytes_per_s")
    alike = [one for one in DEVICES.values() if all(getattr(one, name) == getattr(device, name) for name in same)]
    wanted = device.memory_bandwidth_bytes_per_s or 0.0
    nearest = min(alike, key=lambda one: abs((one.memory_bandwidth_bytes_per_s or 0.0) - wanted), default=device)
    return DEVICES.get(device.name, nearest)


def device_of_product(name: str) -> DeviceSpec | None:
    """Finds the device that a driver gives this name, such as `NVIDIA H200`; None where the catalog has none."""
    return next((one for one in DEVICES.values() if one.is_product(name)), None)


def device_of_accelerator(accelerator_type: str) -> DeviceSpec | None:
    """Finds the one device whose nodes Ray labels so, such as `H200`; None where there is none, or several."""
    found = [one for one in DEVICES.values() if accelerator_type in one.ray_accelerator_types]
    return found[0] if len(found) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The machines a trial runs on, as far as planning needs to know them."""

    device: str
    """Catalog name of the device that every rank drives."""
    num_nodes: int = 1
    """Number of nodes that are used."""
    devices_per_node: int
    """Devices that are used on each node, one by each rank."""
    simulate_sensors_of: str | None = None
    """On `cpu`: the device whose sensors are simulated. None leaves the host's own sensors only."""
    transformer_engine: bool = False
    """True where the nodes have TransformerEngine."""
    nvlink_domain_size: int | None = None
    """Devices that the fast fabric joins; None means the devices of one node."""
    own_device: DeviceSpec | None = None
    """A device of the space's own, which no catalog has: `device` or `simulate_sensors_of` is its name."""
    network: NetworkSpec | None = None
    """Network between nodes; None is that of the coefficients."""
    host_speed: float = 1.0
    """Speed of the hosts' threads over that of the coefficients' hosts."""
    inlet_c: float | None = None
    """Temperature of the coolant that reaches the devices, in degrees Celsius; None is that of the coefficients."""

    @property
    def domain(self) -> int:
        """Number of devices that the fast fabric joins; ranks of different domains meet over the network."""
        return self.nvlink_domain_size or self.devices_per_node

    @property
    def num_domains(self) -> int:
        """Number of fast fabrics that its ranks are spread over, 1 where no rank needs the network."""
        return -(-self.world_size // self.domain)

    @property
    def world_size(self) -> int:
        """Number of ranks of a trial on this cluster."""
        return self.num_nodes * self.devices_per_node

    @property
    def rank_device(self) -> DeviceSpec:
        """The device that every rank drives."""
        return self._named(self.device)

    @property
    def sensed_device(self) -> DeviceSpec:
        """The device that telemetry describes: the simulated one where sensors are simulated, else the real one."""
        return self._named(self.simulate_sensors_of or self.device)

    def _named(self, name: str) -> DeviceSpec:
        own = self.own_device
        return own if own is not None and own.name == name else device(name)

    @property
    def label(self) -> str:
        """Short text such as `1x4 h200_sxm`, `1x2 cpu simulating h200_sxm` or `2x8 h100_sxm over roce_400`."""
        simulating = f" simulating {self.simulate_sensors_of}" if self.simulate_sensors_of else ""
        over = f" over {self.network.name}" if self.network else ""
        return f"{self.num_nodes}x{self.devices_per_node} {self.device}{simulating}{over}"

    @property
    def needs(self) -> str:
        """Its label and what it takes, in words."""
        wanted = f"{self.num_nodes} node(s) with {self.devices_per_node} device(s) {self.device} each"
        names = " or ".join(self.rank_device.product_names)
        return f"{self.label} needs {wanted}{f' ({names})' if names else ''}"


_CLUSTER_LABEL: Final = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})\s+(\S+)(?:\s+over\s+(\S+))?", re.ASCII)


def parse_cluster_label(text: str) -> ClusterSpec:
    """Reads a cluster from a text `"NODESxDEVICES device"`, such as `"1x4 h200_sxm"` or `"4x8 h100_sxm over roce_400"`.

    Raises `PlanError` where the text has another form, or names an unknown device or network.
    """
    match = _CLUSTER_LABEL.fullmatch(text.strip())
    if match is None:
        raise PlanError(f'"{text}" does not name a cluster; write NODESxDEVICES and a device, such as "1x4 h200_sxm"')
    return ClusterSpec(
        device=device(match[3]).name,
        num_nodes=int(match[1]),
        devices_per_node=int(match[2]),
        network=network(match[4]) if match[4] else None,
    )

"""Hardware: devices and clusters. A device is what one rank drives. Peaks are dense, never the sparse marketing figure.

A new device is one `DeviceSpec` in `DEVICES`: plans, nodes, sensors and their simulation look it up here.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
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
        """Makes a device of plain data. Lists become tuples again.

        Raises:
            TypeError, ValueError: A field is missing, unknown, or holds what it cannot.
        """
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


N7_ENERGY: Final = 1 / 0.7
"""Energy of an operation on TSMC's N7 and N6 over that on N5 and its derivatives, such as an H200's 4N: at the same
speed N5 draws 30 % less (TSMC)."""

DEVICES: Final[dict[str, DeviceSpec]] = {
    device.name: device
    for device in (
        DeviceSpec(
            name="h100_sxm",
            vendor="nvidia",
            peak_bf16_flop_per_s=989.4e12,  # half of the 1,979 TFLOP/s the datasheet gives with sparsity
            peak_fp32_flop_per_s=66.9e12,
            peak_fp8_flop_per_s=1978.9e12,  # half of the 3,958 TFLOP/s with sparsity
            memory_bytes=80 * 10**9,
            memory_bandwidth_bytes_per_s=3.35e12,
            link_bandwidth_bytes_per_s=450e9,  # 18 NVLink 4 links, 900 GB/s both directions together
            power_limit_w=700.0,
            power_limit_least_w=200.0,  # nvidia-smi -q: Min Power Limit, as of the next ones but H200
            sm_clock_max_mhz=1980.0,
            temp_slowdown_c=89.0,
            product_names=("NVIDIA H100 80GB HBM3",),  # NVML
            ray_accelerator_types=("H100",),  # ray 2.60 writes the same for PCIe and NVL boards
            source="NVIDIA H100 Tensor Core GPU datasheet (SXM5) and Hopper architecture white paper, table 2",
        ),
        DeviceSpec(
            name="h200_sxm",
            vendor="nvidia",
            peak_bf16_flop_per_s=989.4e12,  # half of the sparse figure, as for H100
            peak_fp32_flop_per_s=66.9e12,
            peak_fp8_flop_per_s=1978.9e12,  # half of the sparse figure, as for H100
            memory_bytes=141 * 10**9,
            memory_bandwidth_bytes_per_s=4.8e12,
            link_bandwidth_bytes_per_s=450e9,
            power_limit_w=700.0,
            power_limit_least_w=200.0,  # measured: NVML, driver 580.159.04
            sm_clock_max_mhz=1980.0,
            temp_slowdown_c=89.0,  # measured: NVML slowdown threshold, driver 580.159.04
            product_names=("NVIDIA H200",),  # measured: NVML, driver 580.159.04; the NVL board is "NVIDIA H200 NVL"
            ray_accelerator_types=("H200",),
            source="NVIDIA H200 Tensor Core GPU datasheet (SXM); limits and thresholds read by NVML on one H200",
        ),
        DeviceSpec(
            name="h100_pcie",
            vendor="nvidia",
            peak_bf16_flop_per_s=756.5e12,  # half of the 1,513 TFLOP/s with sparsity
            peak_fp32_flop_per_s=51.2e12,
            peak_fp8_flop_per_s=1513e12,  # half of the 3,026 TFLOP/s with sparsity
            memory_bytes=80 * 10**9,
            memory_bandwidth_bytes_per_s=2.04e12,
            link_bandwidth_bytes_per_s=64e9,  # PCIe 5.0 x16; only pairs have an NVLink bridge
            power_limit_w=350.0,
            sm_clock_max_mhz=1755.0,
            temp_slowdown_c=None,
            product_names=("NVIDIA H100 PCIe",),  # NVML; Ray labels it H100 like the SXM board, so the name decides
            source="NVIDIA H100 PCIe GPU product brief PB-11133-001 and H100 datasheet (PCIe); not measured",
        ),
        DeviceSpec(
            name="h100_nvl",
            vendor="nvidia",
            peak_bf16_flop_per_s=835.5e12,  # half of the 1,671 TFLOP/s with sparsity
            peak_fp32_flop_per_s=60.0e12,
            peak_fp8_flop_per_s=1671e12,  # half of the 3,341 TFLOP/s with sparsity
            memory_bytes=94 * 10**9,
            memory_bandwidth_bytes_per_s=3.9e12,
            link_bandwidth_bytes_per_s=64e9,  # PCIe 5.0 x16; only pairs have an NVLink bridge
            power_limit_w=400.0,
            sm_clock_max_mhz=1785.0,
            temp_slowdown_c=None,
            product_names=("NVIDIA H100 NVL",),  # NVML; Ray labels it H100 like the SXM board, so the name decides
            source="NVIDIA H100 Tensor Core GPU datasheet (NVL) and H100 NVL product brief; not measured",
        ),
        DeviceSpec(
            name="b200_sxm",
            vendor="nvidia",
            peak_bf16_flop_per_s=2250e12,  # half of the sparse figure
            peak_fp32_flop_per_s=75e12,
            peak_fp8_flop_per_s=4500e12,  # half of the sparse figure
            memory_bytes=180 * 10**9,
            memory_bandwidth_bytes_per_s=7.7e12,
            link_bandwidth_bytes_per_s=900e9,  # NVLink 5, 1.8 TB/s both directions together
            power_limit_w=1000.0,
            sm_clock_max_mhz=1965.0,
            temp_slowdown_c=None,
            product_names=("NVIDIA B200",),
            ray_accelerator_types=("B200",),
            source="NVIDIA HGX B200 datasheet, figures of eight GPUs divided; not measured",
        ),
        DeviceSpec(
            name="gb200",
            vendor="nvidia",
            peak_bf16_flop_per_s=2500e12,  # half of the 5 PFLOP/s with sparsity, one of a superchip's two GPUs
            peak_fp32_flop_per_s=80e12,
            peak_fp8_flop_per_s=5000e12,  # half of the 10 PFLOP/s with sparsity
            memory_bytes=186 * 10**9,
            memory_bandwidth_bytes_per_s=8e12,
            link_bandwidth_bytes_per_s=900e9,  # NVLink 5, 1.8 TB/s both directions together
            power_limit_w=1200.0,
            sm_clock_max_mhz=None,
            temp_slowdown_c=None,
            product_names=("NVIDIA GB200",),
            ray_accelerator_types=("GB200",),
            source="NVIDIA GB200 NVL72 datasheet, figures of 72 GPUs divided; 1,200 W of the Blackwell architecture "
            "brief; its clock is not published; not measured",
        ),
        DeviceSpec(
            name="a100_sxm_80gb",
            vendor="nvidia",
            peak_bf16_flop_per_s=312e12,
            peak_fp32_flop_per_s=19.5e12,
            memory_bytes=80 * 10**9,
            memory_bandwidth_bytes_per_s=2.039e12,
            link_bandwidth_bytes_per_s=300e9,  # 12 NVLink 3 links, 600 GB/s both directions together
            power_limit_w=400.0,
            power_limit_least_w=100.0,
            sm_clock_max_mhz=1410.0,
            temp_slowdown_c=None,
            matrix_energy=N7_ENERGY,
            product_names=("NVIDIA A100-SXM4-80GB",),  # NVML; Ray labels every board A100, so the name decides
            source="NVIDIA A100 Tensor Core GPU datasheet (80 GB SXM); Ampere architecture white paper; not measured",
        ),
        DeviceSpec(
            name="a100_sxm_40gb",
            vendor="nvidia",
            peak_bf16_flop_per_s=312e12,
            peak_fp32_flop_per_s=19.5e12,
            memory_bytes=40 * 10**9,
            memory_bandwidth_bytes_per_s=1.555e12,
            link_bandwidth_bytes_per_s=300e9,  # 12 NVLink 3 links, 600 GB/s both directions together
            power_limit_w=400.0,
            power_limit_least_w=100.0,
            sm_clock_max_mhz=1410.0,
            temp_slowdown_c=None,
            matrix_energy=N7_ENERGY,
            product_names=("NVIDIA A100-SXM4-40GB",),
            source="NVIDIA A100 Tensor Core GPU datasheet (40 GB SXM); Ampere architecture white paper; not measured",
        ),
        DeviceSpec(
            name="a100_pcie_80gb",
            vendor="nvidia",
            peak_bf16_flop_per_s=312e12,
            peak_fp32_flop_per_s=19.5e12,
            memory_bytes=80 * 10**9,
            memory_bandwidth_bytes_per_s=1.935e12,
            link_bandwidth_bytes_per_s=32e9,  # PCIe 4.0 x16; only pairs have an NVLink bridge
            power_limit_w=300.0,
            power_limit_least_w=150.0,
            sm_clock_max_mhz=1410.0,
            temp_slowdown_c=None,
            matrix_energy=N7_ENERGY,
            product_names=("NVIDIA A100 80GB PCIe",),
            source="NVIDIA A100 80GB PCIe product brief PB-10577-001 and A100 datasheet (PCIe); not measured",
        ),
        DeviceSpec(
            name="mi250_gcd",
            vendor="amd",
            peak_bf16_flop_per_s=181.05e12,  # 362.1 TFLOP/s a package, two GCDs
            peak_fp32_flop_per_s=45.25e12,  # matrix fp32, 90.5 TFLOP/s a package
            memory_bytes=64 * 10**9,
            memory_bandwidth_bytes_per_s=1.6384e12,
            link_bandwidth_bytes_per_s=300e9,  # 6 Infinity Fabric links of 50 GB/s a direction
            power_limit_w=250.0,  # 500 W board power a package
            sm_clock_max_mhz=1700.0,
            temp_slowdown_c=None,
            devices_per_package=2,
            matrix_energy=N7_ENERGY,
            product_names=(
                "AMD Instinct MI250",
                "AMD Instinct MI250X / MI250",  # libdrm, amdgpu.ids: PCI device 740C, revision 01
                "AMD INSTINCT MI250 (MCM) OAM AC MBA",  # rocm-smi --showproductname
            ),
            ray_accelerator_types=("AMD-Instinct-MI250X-MI250",),  # ray 2.60, by PCI device 740C
            source="AMD Instinct MI250 accelerator datasheet, per-package figures halved for one GCD; not measured",
        ),
        DeviceSpec(
            name="mi300x",
            vendor="amd",
            peak_bf16_flop_per_s=1307.4e12,
            peak_fp32_flop_per_s=163.4e12,
            peak_fp8_flop_per_s=2614.9e12,
            memory_bytes=192 * 10**9,
            memory_bandwidth_bytes_per_s=5.3e12,
            link_bandwidth_bytes_per_s=448e9,  # 7 Infinity Fabric links of 64 GB/s a direction
            power_limit_w=750.0,
            sm_clock_max_mhz=2100.0,
            temp_slowdown_c=None,
            product_names=("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
            ray_accelerator_types=("AMD-Instinct-MI300X-OAM",),  # ray 2.60
            source="AMD Instinct MI300X accelerator datasheet; not measured",
        ),
        DeviceSpec(
            name="mi325x",
            vendor="amd",
            peak_bf16_flop_per_s=1307.4e12,
            peak_fp32_flop_per_s=163.4e12,
            peak_fp8_flop_per_s=2614.9e12,
            memory_bytes=256 * 10**9,
            memory_bandwidth_bytes_per_s=6e12,
            link_bandwidth_bytes_per_s=448e9,  # 7 Infinity Fabric links of 64 GB/s a direction
            power_limit_w=1000.0,
            sm_clock_max_mhz=2100.0,
            temp_slowdown_c=None,
            product_names=("AMD Instinct MI325X", "AMD Instinct MI325X OAM"),
            ray_accelerator_types=("AMD-Instinct-MI325X-OAM",),
            source="AMD Instinct MI325X accelerator datasheet; not measured",
        ),
        DeviceSpec(
            name="cpu",
            vendor="cpu",
            peak_bf16_flop_per_s=None,
            peak_fp32_flop_per_s=None,
            memory_bytes=None,
            memory_bandwidth_bytes_per_s=None,
            link_bandwidth_bytes_per_s=None,
            power_limit_w=None,
            sm_clock_max_mhz=None,
            temp_slowdown_c=None,
            dtypes=("fp32", "bf16"),
            source="any host: one process a rank; its peaks differ by machine and are therefore not given",
        ),
    )
}
"""Every device by name."""

for _like, _of, _name, _size_bytes, _limit_w in (
    ("b200_sxm", "B300", "b300_sxm", 270 * 10**9, 1100.0),
    ("gb200", "GB300", "gb300", 279 * 10**9, 1400.0),
):
    _names: dict[str, Any] = {"name": _name, "product_names": (f"NVIDIA {_of}",), "ray_accelerator_types": (_of,)}
    _names |= {"source": "NVIDIA HGX B300 and GB300 NVL72 datasheets; not measured", "sm_clock_max_mhz": None}
    DEVICES[_name] = replace(DEVICES[_like], memory_bytes=_size_bytes, power_limit_w=_limit_w, **_names)


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

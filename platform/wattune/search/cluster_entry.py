"""`cluster` of a search space: the machines, with a device of the catalog or one of the space's own."""

from dataclasses import asdict, fields, replace
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, PrivateAttr, Tag

from wattune.catalog.hardware import DEVICES, ClusterSpec, DeviceSpec, device, parse_cluster_label
from wattune.errors import WattuneError
from wattune.field_types import LARGEST_WORLD, Count, Size
from wattune.search.declared import keys_of
from wattune.search.fields import Entry, named_by, one_of
from wattune.search.model_entry import OWN_NAME, check_own_name
from wattune.search.problems import Path, refuse

VENDORS: Final = ("nvidia", "amd")
"""Vendors whose devices a space may describe: their sensors and engines are known."""

_FIGURES: Final = (
    "peak_bf16_flop_per_s",
    "peak_fp32_flop_per_s",
    "peak_fp8_flop_per_s",
    "memory_bytes",
    "memory_bandwidth_bytes_per_s",
    "link_bandwidth_bytes_per_s",
    "power_limit_w",
    "sm_clock_max_mhz",
    "temp_slowdown_c",
)
"""Figures of a device; one that nobody gives is unknown."""

_REAL: Final = tuple(name for name in DEVICES if name != "cpu")


@keys_of(DeviceSpec, optional=_FIGURES)
class DeviceEntry(Entry):
    """A device of your own: another board, a lower limit, a prototype."""

    name: Annotated[str, named_by(check_own_name, pattern=f"^{OWN_NAME}$", examples=["h200_500w"])]
    """Its name in results; none of the catalog's."""
    like: Annotated[str, named_by(device, names=_REAL)] | None = None
    """Catalog device that it takes every figure from that is not given."""
    vendor: Annotated[str, one_of(VENDORS)] | None = None
    """Vendor: its driver's sensors are read, and engines that run on its devices are allowed."""

    def problems_as_a_whole(self, context: Any) -> list[tuple[Path, str]]:
        """Finds problems of keys that are valid one by one."""
        del context
        found: list[tuple[Path, str]] = []
        if self.name in DEVICES:
            found.append((("name",), f"{self.name} is a catalog device; give yours a name of its own"))
        if self.like == "cpu":
            found.append((("like",), f"got cpu, which has no figures; use one of: {', '.join(_REAL)}"))
        if self.like is None and self.vendor is None:
            text = f"missing for {self.name}, which is in no catalog; add it, or like: a catalog device"
            found.append((("vendor",), text))
        return found

    def resolve(self) -> DeviceSpec:
        """The device it describes. A figure that nobody gives is unknown."""
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in self.model_dump(exclude_unset=True, exclude={"like", "name"}).items()
        }
        if self.like is not None:
            return replace(device(self.like), name=self.name, source=f"{_LIKE}{self.like}", **given)
        unknown: dict[str, Any] = {each.name: None for each in fields(DeviceSpec) if each.name in _FIGURES}
        return DeviceSpec(name=self.name, source="the space", **(unknown | given))


_LIKE: Final = "like "
"""Begin of the origin of a device that takes figures of a catalog's."""


def _kind(value: Any) -> Literal["[name]", "[own]"]:
    return "[own]" if isinstance(value, dict | DeviceEntry) else "[name]"


Device = Annotated[
    Annotated[str, named_by(device, names=tuple(DEVICES)), Tag("[name]")] | Annotated[DeviceEntry, Tag("[own]")],
    Discriminator(_kind),
]
"""A catalog's device by name, or a mapping that describes another."""


class ClusterEntry(Entry):
    """The machines, as far as planning needs to know them. A text such as `1x4 h200_sxm` says the same in short."""

    device: Device
    """Device that every rank drives: a catalog name (`wattune catalog`), or a mapping that describes your own."""
    num_nodes: Size = 1
    """Nodes that are used."""
    devices_per_node: Size
    """Devices that are used on each node, one by each rank."""
    simulate_sensors_of: Device | None = None
    """With `device: cpu`: the device whose sensors are simulated, by name or as a mapping."""
    transformer_engine: bool = False
    """True where the nodes have TransformerEngine."""
    nvlink_domain_size: Count | None = None
    """Devices that the fast fabric joins. None is the devices of one node."""

    _spec: ClusterSpec = PrivateAttr()

    def problems_as_a_whole(self, context: Any) -> list[tuple[Path, str]]:
        """Finds problems of keys that are valid one by one."""
        del context
        found: list[tuple[Path, str]] = []
        if self.num_nodes * self.devices_per_node > LARGEST_WORLD:
            text = f"{self.num_nodes:,} x {self.devices_per_node:,} ranks, allowed: {LARGEST_WORLD:,}; use fewer nodes"
            found.append((("num_nodes",), text))
        named: dict[str, Any] = {}
        own: DeviceSpec | None = None
        for key in ("device", "simulate_sensors_of"):
            value = getattr(self, key)
            own = value.resolve() if isinstance(value, DeviceEntry) else own
            named[key] = value.name if isinstance(value, DeviceEntry) else value
        simulated = named["simulate_sensors_of"]
        if simulated and (named["device"] != "cpu" or simulated == "cpu"):
            text = (
                f"got {simulated} on device {named['device']}; only device cpu has its sensors simulated; leave it out"
                if named["device"] != "cpu"
                else f"got cpu, which has no sensors of its own; use one of: {', '.join(_REAL)}, or leave it out"
            )
            found.append((("simulate_sensors_of",), text))
        rest: dict[str, Any] = self.model_dump(exclude={"device", "simulate_sensors_of"})
        self._spec = ClusterSpec(**named, **rest, own_device=own)
        return found

    def resolve(self) -> ClusterSpec:
        """The cluster it describes."""
        return self._spec


def plain_cluster(cluster: ClusterSpec) -> dict[str, Any]:
    """Returns the mapping of a file that describes a cluster, with every default."""
    written = asdict(cluster)
    own = written.pop("own_device")
    if own is not None:
        origin = own.pop("source")
        lists = {key: list(value) if isinstance(value, tuple) else value for key, value in own.items()}
        if origin.startswith(_LIKE):  # it changes no figure, and says what no figure does (`is_linked_by_pcie`)
            lists["like"] = origin.removeprefix(_LIKE)
        key = "device" if cluster.device == own["name"] else "simulate_sensors_of"
        written[key] = lists
    return written


def cluster_in_short(text: str) -> Any:
    """Returns the mapping that a text such as `1x4 h200_sxm` stands for.

    Raises:
        pydantic_core.PydanticCustomError: The text is no such one; its message says so.
    """
    try:
        cluster = parse_cluster_label(text)
    except WattuneError as error:
        raise refuse([((), str(error))]) from None
    return {"device": cluster.device, "num_nodes": cluster.num_nodes, "devices_per_node": cluster.devices_per_node}

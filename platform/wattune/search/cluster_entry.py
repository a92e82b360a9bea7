"""`cluster` of a search space: the machines, with device and network of the catalog or of the space's own."""

from dataclasses import asdict, fields, replace
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Field, PrivateAttr, Tag

from wattune.catalog.hardware import DEVICES, ClusterSpec, DeviceSpec, device, parse_cluster_label
from wattune.catalog.networks import (
    FABRICS,
    HOST_CLOCKS_GHZ,
    NETWORK_FIGURES,
    NETWORKS,
    NetworkSpec,
    host_speed,
    network,
)
from wattune.errors import WattuneError
from wattune.field_types import LARGEST_WORLD, Bounds, Count, Size
from wattune.search.declared import keys_of
from wattune.search.fields import ALONE, Entry, Text, named_by, one_of
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
    "power_limit_least_w",
    "sm_clock_max_mhz",
    "temp_slowdown_c",
)
"""Figures of a device; one that nobody gives is unknown."""

_REAL: Final = tuple(name for name in DEVICES if name != "cpu")


@keys_of(DeviceSpec, optional=_FIGURES)
class DeviceEntry(Entry):
    """A device of your own: another board, a lower limit, a prototype."""

    decisive: ClassVar = frozenset({"like"})

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


@keys_of(NetworkSpec, optional=NETWORK_FIGURES, examples={"rail_devices": 256})
class NetworkEntry(Entry):
    """A network of your own: other adapters, another share of them, what your own test measured."""

    decisive: ClassVar = frozenset({"like"})

    name: Annotated[str, named_by(check_own_name, pattern=f"^{OWN_NAME}$", examples=["lab_fabric"])] | None = None
    """Its name in results, needed where a figure is given; one of the catalog's alone is that network."""
    like: Annotated[str, named_by(network, names=tuple(NETWORKS))] | None = None
    """Catalog network that it takes every figure from that is not given."""

    def problems_as_a_whole(self, context: Any) -> list[tuple[Path, str]]:
        """Finds problems of keys that are valid one by one."""
        del context
        given = self.given()
        if self.name in NETWORKS and (given or self.like not in (None, self.name)):
            text = f"{self.name} is a catalog network; give yours a name of its own, and like: {self.name}"
            return [(("name",), text)]
        if self._like is None and "bandwidth_bytes_per_s" not in given:
            return [(("bandwidth_bytes_per_s",), "missing; add it, or like: a catalog network")]
        if given and self.name is None:
            return [(("name",), f"missing for a network with a {next(iter(given))} of its own; add it")]
        if (found := self.resolve()).oversubscription > 1 and found.rail_devices is None:
            text = (
                f"missing beside oversubscription {found.oversubscription:g}; add the devices that meet below the spine"
            )
            return [(("rail_devices",), text)]
        return []

    def given(self) -> dict[str, Any]:
        """Returns the figures that are its own."""
        return {name: value for name in NETWORK_FIGURES if (value := getattr(self, name)) is not None}

    def resolve(self) -> NetworkSpec:
        """The network it describes."""
        if self._like is None:
            return NetworkSpec(name=self.name or "", source="the space", **self.given())
        found, own = network(self._like), self.name or self._like
        return found if own == found.name else replace(found, name=own, source=f"{_LIKE}{self._like}", **self.given())

    @property
    def _like(self) -> str | None:
        return self.like or (self.name if self.name in NETWORKS else None)


class HostEntry(Entry):
    """The nodes around the devices: processors that issue their work, and the air or water that cools them."""

    cpu: Annotated[str, one_of(HOST_CLOCKS_GHZ)] | None = None
    """Processor of the catalog; its speed follows its highest clock."""
    speed: Annotated[float, Bounds(ge=0.05, le=20)] | None = None
    """Operations that a thread issues in a time, over those of a DGX H100's: `wattune doctor` measures it."""
    inlet_c: Annotated[float, Bounds(ge=0, le=70), Field(examples=[38])] | None = None
    """Coolant that reaches the devices, in degrees Celsius: `wattune doctor` measures it at rest. None is 31."""

    def problems_as_a_whole(self, context: Any) -> list[tuple[Path, str]]:
        """Finds problems of keys that are valid one by one."""
        del context
        if self.cpu is None and self.speed is None and self.inlet_c is None:
            return [(("cpu",), "missing; add it, or speed, or inlet_c")]
        return [(("speed",), "a cpu has a speed of its own; drop one of the two")] if self.cpu and self.speed else []

    def resolve(self) -> float:
        """The speed."""
        return host_speed(self.cpu) if self.cpu is not None else self.speed or 1.0


class ClusterEntry(Entry):
    """The machines, as far as planning needs to know them. A text such as `1x4 h200_sxm` says the same in short."""

    device: Device
    """Device that every rank drives: a catalog name (`wattune catalog`), or a mapping that describes your own."""
    num_nodes: Size | None = None
    """Nodes that are used. None is 1, or as many as `slots` lists."""
    devices_per_node: Size | None = None
    """Devices that are used on each node, one by each rank. None is all `slots`."""
    slots: Annotated[list[Size], Field(min_length=1, examples=[[8, 8]]), *ALONE] | None = None
    """Devices that each node has: one number, or one for each node as in a host file. None is those that are used."""
    simulate_sensors_of: Device | None = None
    """With `device: cpu`: the device whose sensors are simulated, by name or as a mapping."""
    transformer_engine: bool = False
    """True where the nodes have TransformerEngine."""
    fabric: Annotated[str, one_of(FABRICS)] | None = None
    """Fast fabric by its catalog name, in the place of `nvlink_domain_size`."""
    nvlink_domain_size: Count | None = None
    """Devices that the fast fabric joins. None is the devices of one node."""
    network: (
        Annotated[NetworkEntry, Text(lambda text: {"like": text}, {"enum": list(NETWORKS)}, is_short=True)] | None
    ) = None
    """Network between nodes: a catalog name, or a mapping. None is `ndr`, or what a sweep here measured."""
    rails: Size | None = None
    """Ports of that network on each node, shared by its `slots`. None is as the network has it."""
    host: HostEntry | None = None
    """Processors and coolant of the nodes. None is as those that were measured."""

    _spec: ClusterSpec = PrivateAttr()

    def problems_as_a_whole(self, context: Any) -> list[tuple[Path, str]]:
        """Finds problems of keys that are valid one by one."""
        del context
        slots = self.slots or []
        num_nodes = self.num_nodes or max(len(slots), 1)
        on_node = self.devices_per_node or (slots[0] if slots else 1)
        found = [*self._uneven(slots, num_nodes, on_node), *self._fabric_problems(on_node)]
        if num_nodes * on_node > LARGEST_WORLD:
            text = f"{num_nodes:,} x {on_node:,} ranks, allowed: {LARGEST_WORLD:,}; use fewer nodes"
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
        between, problems = self._network(slots[0] if slots else on_node)
        self._spec = ClusterSpec(
            **named,
            num_nodes=num_nodes,
            devices_per_node=on_node,
            transformer_engine=self.transformer_engine,
            nvlink_domain_size=self.nvlink_domain_size or (FABRICS[self.fabric][0] if self.fabric else None),
            own_device=own,
            network=between,
            host_speed=self.host.resolve() if self.host else 1.0,
            inlet_c=self.host.inlet_c if self.host else None,
        )
        return found + problems

    def _uneven(self, slots: list[int], num_nodes: int, on_node: int) -> list[tuple[Path, str]]:
        """Finds nodes that differ, and counts that contradict each other."""
        if not slots:
            return [] if self.devices_per_node else [(("devices_per_node",), "missing; add it, or slots")]
        found: list[tuple[Path, str]] = []
        if len(set(slots)) > 1:
            text = (
                f"nodes of {' and '.join(str(one) for one in sorted(set(slots), reverse=True))} devices: groups of "
                "ranks span all nodes alike, and each step waits for the smallest; list nodes of one size, or write a "
                "cluster for each size"
            )
            found.append((("slots",), text))
        if len(slots) > 1 and len(slots) != num_nodes:
            found.append((("slots",), f"lists {len(slots)} nodes, and num_nodes is {num_nodes}; drop one of the two"))
        if on_node > min(slots):
            text = f"got {on_node}, and a node has {min(slots)} slots; use at most {min(slots)}"
            found.append((("devices_per_node",), text))
        return found

    def _fabric_problems(self, on_node: int) -> list[tuple[Path, str]]:
        """Finds a fast fabric that the devices do not have, or that their nodes do not fill."""
        found: list[tuple[Path, str]] = []
        domain = self.nvlink_domain_size
        if self.fabric is not None:
            joined, vendor, _ = FABRICS[self.fabric]
            if domain not in (None, joined):
                found.append(
                    (("nvlink_domain_size",), f"got {domain}, and fabric {self.fabric} joins {joined}; drop one")
                )
            real = self.simulate_sensors_of or self.device
            of = real.resolve() if isinstance(real, DeviceEntry) else device(real)
            if of.vendor != vendor or of.is_linked_by_pcie:
                links = "PCIe" if of.is_linked_by_pcie else f"a vendor of {of.vendor}"
                allowed = [name for name, one in FABRICS.items() if one[1] == of.vendor and not of.is_linked_by_pcie]
                text = f"{self.fabric} is of {vendor}, and {of.name} has {links}; "
                found.append((("fabric",), text + (f"use one of: {', '.join(allowed)}" if allowed else "leave it out")))
            domain = joined
        if domain is not None and domain % on_node and on_node % domain:
            text = f"{domain} devices of one fabric are no whole nodes of {on_node}; use a multiple or a divisor of it"
            found.append((("fabric" if self.fabric else "nvlink_domain_size",), text))
        return found

    def _network(self, slots: int) -> tuple[NetworkSpec | None, list[tuple[Path, str]]]:
        """Returns the network with the ports of a node, and what contradicts it."""
        if self.network is None:
            missing = f"{self.rails} ports, and network=null; add network: a catalog name, or leave it out"
            return None, [(("rails",), missing)] if self.rails else []
        found = self.network.resolve()
        if found.rail_devices is not None and found.rail_devices % slots:
            text = f"{found.rail_devices} are no whole nodes of {slots}; use a multiple of it"
            return found, [(("network", "rail_devices"), text)]
        if self.rails is None:
            return found, []
        share = self.rails / slots
        if share == found.ports_per_device:
            return found, []
        if "ports_per_device" in self.network.given():
            text = f"got {self.rails} for {slots} slots, and network.ports_per_device is {found.ports_per_device}"
            return found, [(("rails",), f"{text}; drop one of the two")]
        return replace(found, name=f"{found.name}_{self.rails}_rails", ports_per_device=share), []

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
    speed, inlet_c, between = written.pop("host_speed"), written.pop("inlet_c"), cluster.network
    host = ({"speed": speed} if speed != 1 else {}) | ({} if inlet_c is None else {"inlet_c": inlet_c})
    if host:
        written["host"] = host
    if between is not None and between == NETWORKS.get(between.name):
        written["network"] = between.name
    elif between is not None:
        del written["network"]["source"]
    return written


def cluster_in_short(text: str) -> Any:
    """Returns the mapping that a text such as `1x4 h200_sxm` stands for.

    Raises `pydantic_core.PydanticCustomError` where the text is no such one; its message says so.
    """
    try:
        cluster = parse_cluster_label(text)
    except WattuneError as error:
        raise refuse([((), str(error))]) from None
    over = {"network": cluster.network.name} if cluster.network else {}
    return {
        "device": cluster.device,
        "num_nodes": cluster.num_nodes,
        "devices_per_node": cluster.devices_per_node,
        **over,
    }

"""Numbers that predictions need beside the catalog, with their origin. A fit from measurements replaces defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import hypot, log2, sqrt
from typing import Final, Literal, get_args

from wattune.catalog.networks import DEFAULT_NETWORK, NetworkSpec
from wattune.field_types import LARGEST_WORLD

Origin = Literal["measured here", "same chip", "published kernels", "datasheet"]
"""Origin of a coefficient, best first. Each is trusted less than the one before, and its interval is wider."""

ORIGINS: Final[tuple[Origin, ...]] = get_args(Origin)


INLET_ERROR_K: Final = 6.9
"""Part that an unknown inlet has in `ThermalCoefficients.error_k`: inlets of two H200 hosts are 8.2 K apart, and of the
8 K of a fit's 4 K remain where it is known (`tests/golden/test_inlet.py`), in squares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThermalCoefficients:
    """Temperature of one device as a ladder of first-order stages, T = inlet + sum R_i L_i(P) + preheat * L(P_up).

    Each stage obeys C dT/dt = P - T / R with time constant R * C; L_i is its lag of power. P_up is the mean power of
    the other devices of the node, whose warm air or water reaches this one, with a lag of its own.
    """

    inlet_c: float
    """Of the coolant. A host's own is its temperature at rest less what `rest_w` warms it."""
    resistances_k_per_w: tuple[float, ...]
    time_constants_s: tuple[float, ...]
    """One for each resistance, rising."""
    preheat_k_per_w: float
    """On the slot that is heated most."""
    preheat_time_constant_s: float
    leakage_w_per_k: float
    """Power added by each kelvin at the same work, where the power limit leaves room."""
    reference_c: float
    """Temperature at which power coefficients were measured."""
    rest_w: float
    """Power of a device that no process holds; load starts from there."""
    origin: Origin
    error_k: float
    """Half width of the 95 % interval of a steady temperature where the inlet is not known."""

    def with_inlet(self, inlet_c: float | None) -> "ThermalCoefficients":
        """Returns them for a known inlet, in degrees Celsius: its error leaves the interval. None is not known."""
        if inlet_c is None:
            return self
        return replace(self, inlet_c=inlet_c, error_k=sqrt(self.error_k**2 - INLET_ERROR_K**2))


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerCoefficients:
    """Power of one device: P = idle + f^exponent * (active + matrix * u_matrix + memory * u_memory + link * u_link).

    f is the clock over the highest clock, each u is a utilization between 0 and 1 at the highest clock.
    """

    idle_w: float
    """While a process holds the device and nothing runs."""
    active_w: float
    """While any kernel runs."""
    matrix_w: float
    """At the peak matrix rate."""
    memory_w: float
    """At the peak memory bandwidth."""
    link_w: float
    """While links carry a collective."""
    exponent: float
    """Dynamic power against clock, of loads under one limit: voltage falls with frequency, so it is between 1 and 3."""
    limit_w: float = 0.0
    """That limit, of the devices that were measured. A lower one follows `wattune.cost.clock.LIMIT_EXPONENT`; 0 where
    the exponent holds under any."""
    wait_w: float = 0.0
    """Above idle while a rank waits for others: its kernels spin."""
    matrix_memory_frac: float = 0.0
    """Achieved over peak bandwidth in matrix products and attention."""
    memory_frac: float = 1.0
    """The same in kernels that bandwidth bounds."""
    regulated_frac: float = 1.0
    """Share of the power limit that the device holds when the limit binds."""
    peak_error_frac: float = 0.15
    """Half width of the 95 % interval of a 1 s node peak, relative; where the next is known, of one at
    `wattune.cost.power.ROOM_FRAC` below the limit."""
    full_peak_error_frac: float | None = None
    """The same where the peak fills the power limit, below it; others are as much wider as they leave room. None where
    that is not known apart."""
    origin: Origin
    error_frac: float
    """Half width of the 95 % interval of a mean power on held-out configurations, relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Corrections to one engine's counted memory, of the version that was measured."""

    version: str
    """Libraries and versions of the trials; empty where they named none."""
    offset_bytes: float
    """Bytes that libraries hold beside the counted tensors: workspaces of matrix products, small tensors, rounding."""
    activations_frac: float
    """Activations and logits over the counted ones."""
    error_frac: float
    """Half width of the 95 % interval of a peak on held-out configurations, relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCoefficients:
    """Corrections to counted memory by engine."""

    engines: Mapping[str, EngineMemory]
    origin: Origin
    excess_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes that measured trials held beyond the prediction, by `excess_key`; for engines and models without an entry
    0."""

    @staticmethod
    def excess_key(engine: str, model: str) -> str:
        """Returns the key of an engine and a model in `excess_bytes`."""
        return f"{engine} {model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCoefficients:
    """Rates of kernels inside a training step, relative to a table of products or to the device's peaks."""

    matmul_frac: float
    """Rate of matrix products over that of the same shapes alone."""
    grouped_frac: float
    """The same of grouped products of experts."""
    attention_forward_frac: float
    """Rate of fused attention over the matrix peak, at long sequences and heads of 128."""
    attention_backward_frac: float
    memory_frac: float
    """Achieved over peak bandwidth in kernels that memory bounds."""
    linear_speedup: float
    """Rate of linear layers over that in the data type of the batch: 1, or more for a narrower type of the products."""
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """Times of one collective in one kind of group over the formula's, by size of the message."""

    kind: str
    """A key of `wattune.cost.step_time.links.BUS_FRAC`, or `send_recv`."""
    group_size: int
    num_nodes: int
    sizes_bytes: tuple[float, ...]
    """Rising."""
    time_ratio: tuple[float, ...]
    """Measured over predicted time of a collective alone, one for each size."""
    latency_s: float
    """Measured time of the smallest message."""
    network: str = ""
    """Name of the network between the nodes; empty in one node, and where nobody named it."""

    @property
    def place(self) -> tuple[str, int, int, str]:
        """Collective, group and fabric that were measured: a later sweep of the same takes its place."""
        return self.kind, self.group_size, self.num_nodes, self.network


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCoefficients:
    """Collectives: t = latency + bytes * c(n) / bandwidth, times what a sweep measured over it."""

    in_step_frac: float
    """Bandwidth of collectives inside a step over that of a benchmark of collectives alone."""
    network_bytes_per_s: float
    """Of one device to other nodes, one direction."""
    network_frac: float
    """Achieved over that bandwidth."""
    latency_s: float
    """Of a collective of two devices in a node; each doubling adds half of it."""
    network_latency_s: float
    """Added by each further node of a ring."""
    slowdown_frac: float
    """Slowdown of compute while communication runs beside it."""
    origin: Origin
    measured: tuple[MeasuredCollective, ...] = ()
    """From sweeps of this kind of device; empty where there was none."""
    rail_devices: int = LARGEST_WORLD
    """Devices that meet without the spine."""
    oversubscription: float = 1.0
    """Bandwidth of a leaf switch to its devices over that to the spine."""

    def over(self, network: NetworkSpec | None) -> "LinkCoefficients":
        """Returns them for a network that a space names; what a sweep measured over another one says nothing of it."""
        if network is None:
            return self
        found = replace(
            self,
            network_bytes_per_s=network.bandwidth_bytes_per_s * network.ports_per_device,
            network_frac=network.achieved_frac,
            network_latency_s=network.latency_s,
            rail_devices=network.rail_devices or LARGEST_WORLD,
            oversubscription=network.oversubscription,
        )
        names = (network.name, "") if found == self else (network.name,)
        return replace(
            found, measured=tuple(one for one in self.measured if one.num_nodes == 1 or one.network in names)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadCoefficients:
    """Time between kernels, on the device and on the host."""

    launch_s: float
    """Gap between two kernels on the device."""
    host_op_s: float
    """Time of a host of speed 1 to issue one operation outside a compiled graph."""
    straggler_frac: float
    """Wait for the slowest rank over compute time, where all ranks have equal work."""
    origin: Origin


NODES_ERROR_FRAC: Final = 0.06
"""Error of a step time, relative, that each doubling of nodes adds, in squares: 95 % of 96 pairs of published rows that
differ in their number of nodes alone, of 39 models and plans, drift by less than 0.058 times the root of doublings
(`benchmarks/data/published_steps.parquet`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeCoefficients:
    """All that a predicted step time needs beside the catalog."""

    kernel: KernelCoefficients
    link: LinkCoefficients
    overhead: OverheadCoefficients
    error_frac: float
    """Half width of the 95 % interval of a step time on held-out configurations, relative."""
    seen: tuple[str, ...] = ()
    """Models, engines and numbers of devices that were fitted to, as of `family`; empty where that is not known."""
    software: str = ""
    """Software whose habits the steps have, of `wattune.cost.step_time.facts.SOFTWARE`; empty for the engine's own."""
    elsewhere_error_frac: float = 0.0
    """The same on a model and engine that the fit did not see, for candidates outside of `seen`; never below
    `error_frac`."""
    seen_domains: tuple[int, ...] = (1,)
    """Numbers of nodes, or of larger fast fabrics, that were fitted to."""
    seen_networks: tuple[str, ...] = ()
    """Names of the networks between them, empty for one that no space named."""

    @staticmethod
    def family(engine: str, model: str, num_layers: int, world_size: int) -> str:
        """Returns the text of a model, engine and number of devices in `seen`."""
        return f"{engine} {model} {num_layers} layers, {world_size} devices"

    def error_frac_of(self, family: str) -> float:
        """Returns the half width for candidates of a family."""
        known = not self.seen or family in self.seen
        return self.error_frac if known else max(self.error_frac, self.elsewhere_error_frac)

    def unmeasured(self, num_domains: int, network: NetworkSpec | None) -> str:
        """Names the links of a cluster that neither a sweep nor a fitted trial used; empty where all were.

        A network that was measured over two nodes is no other one over more of them: `across` widens what is unsure.
        """
        swept = self.link.over(network).measured
        inside = self.link.origin in ("measured here", "same chip") or any(one.num_nodes == 1 for one in swept)
        name = network.name if network else ""
        across = num_domains == 1 or name in self.seen_networks or any(one.num_nodes > 1 for one in swept)
        nodes = f"over {num_domains} nodes" + (f" of {name}" if name else "")
        return " and ".join([*([] if inside else ["in a node"]), *([] if across else [nodes])])

    def across(self, num_domains: int, network: NetworkSpec | None) -> "StepTimeCoefficients":
        """Returns them for so many nodes: never surer than for fewer, and unsure of a network that nobody measured."""
        if num_domains == 1:
            return self
        known = (network.name if network else "") in self.seen_networks
        origin, least = self.link.origin, 0.0
        if not known:
            swept = network is None and any(one.num_nodes > 1 for one in self.link.measured)
            origin = origin if swept else max(origin, PUBLISHED_STEP_TIME.link.origin, key=ORIGINS.index)
            least = PUBLISHED_STEP_TIME.error_frac
        beyond = log2(max(num_domains / max(self.seen_domains) if known else num_domains, 1.0))
        drift_frac = NODES_ERROR_FRAC * sqrt(beyond)
        return replace(
            self,
            link=replace(self.link, origin=origin),
            error_frac=hypot(max(self.error_frac, least), drift_frac),
            elsewhere_error_frac=hypot(max(self.elsewhere_error_frac, least), drift_frac),
        )

    def with_host(self, speed: float) -> "StepTimeCoefficients":
        """Returns them for hosts of another speed: each operation takes as much less time to issue."""
        return replace(self, overhead=replace(self.overhead, host_op_s=self.overhead.host_op_s / speed))

    def of(self, origin: Origin) -> "StepTimeCoefficients":
        """Returns them with that origin of all parts."""
        parts = {name: replace(getattr(self, name), origin=origin) for name in ("kernel", "link", "overhead")}
        return replace(self, **parts)

    @property
    def origin(self) -> Origin:
        """The least trusted origin of its parts."""
        return max((self.kernel.origin, self.link.origin, self.overhead.origin), key=ORIGINS.index)


PUBLISHED_STEP_TIME: Final = StepTimeCoefficients(
    kernel=KernelCoefficients(
        matmul_frac=0.92,  # 8192^3 without pause at 1,491 of 1,980 MHz: 890 of the table's 968 TFLOP/s at the highest
        grouped_frac=0.8,
        attention_forward_frac=0.45,  # Dao 2023 (arXiv 2307.08691, figure 5) and Shah et al. 2024 (arXiv 2407.08608)
        attention_backward_frac=0.38,
        memory_frac=0.75,
        linear_speedup=1.0,
        origin="published kernels",
    ),
    link=LinkCoefficients(
        in_step_frac=0.9,
        network_bytes_per_s=DEFAULT_NETWORK.bandwidth_bytes_per_s,
        network_frac=DEFAULT_NETWORK.achieved_frac,
        latency_s=6e-6,  # NCCL tables of AIConfigurator 095f58a: 5.3 us at 2 devices, 10 us at 8
        network_latency_s=DEFAULT_NETWORK.latency_s,
        slowdown_frac=0.2,
        origin="published kernels",
    ),
    overhead=OverheadCoefficients(launch_s=2e-6, host_op_s=10e-6, straggler_frac=0.02, origin="published kernels"),
    error_frac=0.3,
)
"""Coefficients where nothing was measured here, from kernel tables and papers alone."""

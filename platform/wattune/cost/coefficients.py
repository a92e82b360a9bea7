"""Numbers that predictions need beside the catalog, with their origin. A fit from measurements replaces defaults."""

from dataclasses import dataclass
from typing import Final, Literal

Origin = Literal["measured here", "published kernels", "datasheet"]
"""Origin of a coefficient, best first. Each is trusted less than the one before, and its interval is wider."""

ORIGINS: Final[tuple[Origin, ...]] = ("measured here", "published kernels", "datasheet")
"""Every origin, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerCoefficients:
    """Power of one device: P = idle + f^exponent * (active + matrix * u_matrix + memory * u_memory + link * u_link).

    f is the clock over the highest clock, each u is a utilization between 0 and 1 at the highest clock.
    """

    idle_w: float
    active_w: float
    """While any kernel runs."""
    matrix_w: float
    """At the peak matrix rate."""
    memory_w: float
    """At the peak memory bandwidth."""
    link_w: float
    """While links carry a collective."""
    exponent: float
    """Dynamic power against clock: voltage falls with frequency, so it lies between 1 and 3."""
    origin: Origin
    error_frac: float
    """Half width of the 95 % interval of a mean power on held-out configurations, relative."""


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
class LinkCoefficients:
    """Collectives: t = latency + bytes * c(n) / bandwidth."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadCoefficients:
    """Time between kernels, on the device and on the host."""

    launch_s: float
    """Gap between two kernels on the device."""
    host_op_s: float
    """Time of the host to issue one operation outside a compiled graph."""
    straggler_frac: float
    """Wait for the slowest rank over compute time, where all ranks have equal work."""
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeCoefficients:
    """All that a predicted step time needs beside the catalog."""

    kernel: KernelCoefficients
    link: LinkCoefficients
    overhead: OverheadCoefficients
    error_frac: float
    """Half width of the 95 % interval of a step time on held-out configurations, relative."""

    @property
    def origin(self) -> Origin:
        """The least trusted origin of its parts."""
        return max((self.kernel.origin, self.link.origin, self.overhead.origin), key=ORIGINS.index)


PUBLISHED_STEP_TIME: Final = StepTimeCoefficients(
    kernel=KernelCoefficients(
        matmul_frac=1.0,
        grouped_frac=0.8,
        attention_forward_frac=0.45,  # Dao 2023 (arXiv 2307.08691, figure 5) and Shah et al. 2024 (arXiv 2407.08608)
        attention_backward_frac=0.38,
        memory_frac=0.75,
        linear_speedup=1.0,
        origin="published kernels",
    ),
    link=LinkCoefficients(
        in_step_frac=0.9,
        network_bytes_per_s=50e9,  # one 400 Gb/s port a device, as DGX H100
        network_frac=0.8,
        latency_s=6e-6,  # NCCL tables of AIConfigurator 095f58a: 5.3 us at 2 devices, 10 us at 8
        network_latency_s=4e-6,
        slowdown_frac=0.2,
        origin="published kernels",
    ),
    overhead=OverheadCoefficients(launch_s=2e-6, host_op_s=10e-6, straggler_frac=0.02, origin="published kernels"),
    error_frac=0.3,
)
"""Coefficients where nothing was measured here, from kernel tables and papers alone."""

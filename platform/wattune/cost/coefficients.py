"""Numbers that predictions need beside the catalog, with their origin. A fit from measurements replaces defaults."""

from collections.abc import Mapping
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
class EngineMemory:
    """Corrections to one engine's counted memory, of the version that was measured."""

    version: str
    """Library and version of the trials."""
    offset_bytes: float
    """What libraries hold beside the counted tensors: workspaces of matrix products, small tensors, rounding."""
    activations_frac: float
    """Activations and logits over the counted ones."""
    error_frac: float
    """Half width of the 95 % interval of a peak on held-out configurations, relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCoefficients:
    """Corrections to counted memory by engine, and what the allocator reserves beyond it."""

    engines: Mapping[str, EngineMemory]
    reserved_frac: float
    """Reserved over allocated bytes at the peak, median of trials; fragments are not predicted."""
    origin: Origin

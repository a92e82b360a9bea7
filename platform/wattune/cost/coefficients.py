"""Numbers that predictions need beside the catalog, with their origin. A fit from measurements replaces defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Origin = Literal["measured here", "published kernels", "datasheet"]
"""Origin of a coefficient, best first. Each is trusted less than the one before, and its interval is wider."""

ORIGINS: Final[tuple[Origin, ...]] = ("measured here", "published kernels", "datasheet")
"""Every origin, best first."""


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
    """Dynamic power against clock: voltage falls with frequency, so it lies between 1 and 3."""
    wait_w: float = 0.0
    """Above idle while a rank waits for others: its kernels spin."""
    matrix_memory_frac: float = 0.0
    """Achieved over peak bandwidth in matrix products and attention."""
    memory_frac: float = 1.0
    """The same in kernels that bandwidth bounds."""
    regulated_frac: float = 1.0
    """Share of the power limit that the device holds when the limit binds."""
    peak_error_frac: float = 0.15
    """Half width of the 95 % interval of a 1 s node peak, relative."""
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

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

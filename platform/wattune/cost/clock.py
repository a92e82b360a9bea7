"""The clock under a power limit: power and time are one solve, since a kernel at the limit slows down."""

import numpy as np

from wattune.cost.batch import Floats
from wattune.cost.coefficients import PowerCoefficients


def dynamic_w(coefficients: PowerCoefficients, matrix: Floats, memory: Floats, link: Floats) -> Floats:
    """Computes a device's power above idle at its highest clock.

    Args:
        coefficients: Of the device.
        matrix: Achieved over peak matrix rate, at the highest clock.
        memory: Achieved over peak memory bandwidth.
        link: Share of time in which links carry a collective.

    Returns:
        Watts, of the arguments' shape.
    """
    c = coefficients
    return c.active_w + c.matrix_w * matrix + c.memory_w * memory + c.link_w * link


def clock_frac(coefficients: PowerCoefficients, at_full_clock_w: Floats, limit_w: float) -> Floats:
    """Computes the largest clock whose power keeps a limit: idle + dynamic * f^exponent <= limit.

    Args:
        coefficients: Of the device.
        at_full_clock_w: Power above idle at the highest clock (`dynamic_w`).
        limit_w: Enforced power limit of the device; infinity for none.

    Returns:
        The clock over the highest clock, in (0, 1]; 1 where the limit does not bind.
    """
    room_w = max(limit_w - coefficients.idle_w, 1.0)
    return np.minimum(1.0, (room_w / np.maximum(at_full_clock_w, 1.0)) ** (1.0 / coefficients.exponent))

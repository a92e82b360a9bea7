"""The clock under a power limit: power and time are one solve, since a kernel at the limit slows down."""

import numpy as np

from wattune.arrays import Floats
from wattune.cost.coefficients import PowerCoefficients


def dynamic_w(coefficients: PowerCoefficients, matrix: Floats, memory: Floats, link: Floats) -> Floats:
    """Computes a device's power above idle at its highest clock.

    In watts; `matrix` and `memory` are achieved over peak rate at that clock, `link` is the share of time with a
    collective.
    """
    c = coefficients
    return c.active_w + c.matrix_w * matrix + c.memory_w * memory + c.link_w * link


def compute_w(
    coefficients: PowerCoefficients, *, matrix_s: Floats, memory_s: Floats, matrix_frac: Floats, overlapped_s: Floats
) -> Floats:
    """Computes a device's power above idle while it computes, at its highest clock.

    Products and memory-bound kernels alternate within milliseconds, faster than the limit acts, so it acts on their
    mean. In watts; `active_w` where nothing is computed. `matrix_frac` is achieved over peak rate in `matrix_s`,
    `overlapped_s` the seconds of both beside communication.
    """
    c = coefficients
    of_compute = 1.0 / np.maximum(matrix_s + memory_s, 1e-12)
    matrix = matrix_s * of_compute
    memory = c.matrix_memory_frac * matrix + c.memory_frac * memory_s * of_compute
    return dynamic_w(c, matrix_frac * matrix, memory, np.minimum(overlapped_s * of_compute, 1.0))


def clock_frac(coefficients: PowerCoefficients, at_full_clock_w: Floats, limit_w: float) -> Floats:
    """Computes the largest clock whose power keeps a limit: idle + dynamic * f^exponent <= regulated_frac * limit.

    It is over the highest clock, in (0, 1]; 1 where the limit does not bind.
    """
    room_w = max(coefficients.regulated_frac * limit_w - coefficients.idle_w, 1.0)
    return np.minimum(1.0, (room_w / np.maximum(at_full_clock_w, 1.0)) ** (1.0 / coefficients.exponent))


def working_clock_frac(
    coefficients: PowerCoefficients,
    at_full_clock_w: Floats,
    compute_s: Floats,
    collective_s: Floats,
    limit_w: Floats | float,
) -> Floats:
    """Computes the clock of a device that alternates between compute and exposed communication.

    The limit acts on means over a tenth of a second and more (`tests/golden/h200x4/square_inphase`), which hold both:
    what communication leaves of it, compute may draw. `at_full_clock_w` is that of `compute_w`, `collective_s` the
    communication that nothing hides, and a limit of infinity is none. Returns the clock while computing over the
    highest clock, in (0, 1].
    """
    c = coefficients
    spare_w = np.maximum(c.regulated_frac * limit_w - c.idle_w - c.active_w - c.link_w, 0.0)
    lent_w = np.where(collective_s > 0, spare_w, 0.0) * collective_s / np.maximum(compute_s, 1e-12)
    room_w = np.maximum(c.regulated_frac * limit_w - c.idle_w, 1.0) + lent_w
    return np.asarray(np.minimum(1.0, (room_w / np.maximum(at_full_clock_w, 1.0)) ** (1.0 / c.exponent)))

"""The clock under a power limit: power and time are one solve, since a kernel at the limit slows down."""

from typing import Final

import numpy as np

from wattune.arrays import Floats
from wattune.cost.coefficients import PowerCoefficients

LIMIT_EXPONENT: Final = 2.82
"""Power above idle against clock of one load under two limits. `PowerCoefficients.exponent` is fitted to many loads
under one limit, and loads whose share of the peak is not quite known make it small. Least squares of four pairs of runs
on eight H100, 350 to 450 W against 700 W (logs of NVIDIA's MLPerf Inference v4.0; `benchmarks/power_limits.py`). Each
pair alone gives 2.7 to 3.0."""

LIMIT_ERROR: Final = 0.15
"""Half width of the 95 % interval of what a limit or a lock does to the log of a clock, relative, of those pairs."""


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


def clock_frac(coefficients: PowerCoefficients, at_full_clock_w: Floats, limit_w: Floats | float) -> Floats:
    """Computes the largest clock whose power keeps a limit: idle + dynamic * f^exponent <= regulated_frac * limit.

    Below the limit that the coefficients were fitted under, further watts follow `LIMIT_EXPONENT`. It is over the
    highest clock, in (0, 1]; 1 where the limit does not bind.
    """
    own_w = np.maximum(limit_w, coefficients.limit_w)
    rooms_w = _room_w(coefficients, own_w), _room_w(coefficients, limit_w)
    return limited_frac(coefficients.exponent, at_full_clock_w, *rooms_w)


def _room_w(c: PowerCoefficients, limit_w: Floats | float) -> Floats:
    """Returns the watts above idle that a limit leaves."""
    return np.asarray(np.maximum(c.regulated_frac * limit_w - c.idle_w, 1.0))


def limited_frac(
    exponent: float, at_full_clock_w: Floats, own_room_w: Floats | float, room_w: Floats | float
) -> Floats:
    """Solves the clock under the limit that `exponent` was fitted under, and from there under a lower one.

    It is over the highest clock; the rooms are the watts above idle that either limit leaves, above 0.
    """
    full_w = np.maximum(at_full_clock_w, 1.0)
    own = np.minimum(1.0, (own_room_w / full_w) ** (1.0 / exponent))
    lower = np.minimum(1.0, (room_w / np.minimum(full_w, own_room_w)) ** (1.0 / LIMIT_EXPONENT))
    return np.asarray(own * lower)


def slowed_frac(exponent: float, clock: Floats, own_clock: Floats) -> Floats:
    """Computes power above idle at a clock over that at the highest clock.

    `own_clock` is the clock under the limit of the fit: what lies below it follows `LIMIT_EXPONENT`.
    """
    held = np.minimum(clock / np.maximum(own_clock, 1e-12), 1.0)
    return np.asarray(np.maximum(clock, own_clock) ** exponent * held**LIMIT_EXPONENT)


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

    def room_w(limit_w: Floats | float) -> Floats:
        spare_w = np.maximum(c.regulated_frac * limit_w - c.idle_w - c.active_w - c.link_w, 0.0)
        lent_w = np.where(collective_s > 0, spare_w, 0.0) * collective_s / np.maximum(compute_s, 1e-12)
        return _room_w(c, limit_w) + lent_w

    return limited_frac(c.exponent, at_full_clock_w, room_w(np.maximum(limit_w, c.limit_w)), room_w(limit_w))

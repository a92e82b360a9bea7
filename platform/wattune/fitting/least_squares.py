"""Least squares within bounds, for a handful of coefficients."""

from collections.abc import Callable
from typing import Final

import numpy as np

from wattune.arrays import Floats

STEPS: Final = 200
RELATIVE_STEP: Final = 1e-5


def least_squares(residuals: Callable[[Floats], Floats], start: Floats, low: Floats, high: Floats) -> Floats:
    """Minimises a sum of squares, of order one each, within bounds by damped Gauss-Newton steps, cut at the bounds.

    Levenberg 1944 with Marquardt's scaling by the diagonal (1963). A coefficient at a bound that the step would cross
    is held for that step.
    """
    found = np.clip(np.asarray(start, np.float64), low, high)
    now = residuals(found)
    damping = 1e-2
    for _ in range(STEPS):
        jacobian = _jacobian(residuals, found, now, high)
        gradient = jacobian.T @ now
        free = ~((found <= low) & (gradient > 0) | (found >= high) & (gradient < 0))
        if not free.any():
            break
        normal = jacobian[:, free].T @ jacobian[:, free]
        move = np.zeros_like(found)
        scale = np.diag(np.maximum(np.diag(normal), 1e-12))
        move[free] = -np.linalg.solve(normal + damping * scale, gradient[free])
        candidate = np.clip(found + move, low, high)
        then = residuals(candidate)
        gain = float(now @ now - then @ then)
        if gain > 0:
            found, now, damping = candidate, then, max(damping / 3, 1e-9)
            if gain < 1e-10 * float(now @ now):
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    return found


def _jacobian(residuals: Callable[[Floats], Floats], at: Floats, now: Floats, high: Floats) -> Floats:
    """Computes derivatives by differences, backward where forward would pass the upper bound."""
    columns = []
    for place in range(len(at)):
        step = RELATIVE_STEP * max(abs(at[place]), 1e-3)
        step = -step if at[place] + step > high[place] else step
        moved = at.copy()
        moved[place] += step
        columns.append((residuals(moved) - now) / step)
    return np.stack(columns, axis=1)

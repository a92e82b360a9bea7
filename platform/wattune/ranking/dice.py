"""Dice for what trials may truly be: orders of quantiles, kept by name.

Draws of a quantity are its quantiles in a shuffled order, each once (Latin hypercube sampling: McKay, Beckman and
Conover 1979, "A comparison of three methods for selecting values of input variables", Technometrics 21). The order
follows from names alone. So a result that changes the scatter or the degrees of freedom of every trial changes the
quantiles, of which those of a study have few kinds, and no order: a race keeps these, at 8 kB each.
"""

import math
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from wattune.arrays import Floats

NUM_DRAWS: Final = 4000
_SEED: Final = 20260302
_MIDDLES: Final = (np.arange(NUM_DRAWS) + 0.5) / NUM_DRAWS
_GRID: Final = np.linspace(-1.0, 1.0, 2001)

Shuffled = npt.NDArray[np.uint16]
"""Places of `NUM_DRAWS` quantiles."""


@lru_cache(maxsize=2048)
def order(*names: str) -> Shuffled:
    """Returns the order in which the draws of a quantity take its quantiles: independent of that of other names."""
    dice = np.random.default_rng([_SEED, int.from_bytes("\n".join(names).encode())])
    return dice.permutation(NUM_DRAWS).astype(np.uint16)


def happens(probability: float, *names: str) -> npt.NDArray[np.bool_]:
    """Draws whether what is so likely is so."""
    return np.asarray(order(*names) < probability * NUM_DRAWS)


@lru_cache(maxsize=1)
def normal_quantiles() -> Floats:
    """Returns the quantiles of the normal distribution."""
    return _quantiles(6.0 * _GRID, -0.5 * (6.0 * _GRID) ** 2)


@lru_cache(maxsize=64)
def t_quantiles(degrees_of_freedom: float) -> Floats:
    """Returns the quantiles of Student's t: with t = sqrt(n) sinh(y), y has the density cosh(y) ** -n."""
    reach = 6.0 / math.sqrt(degrees_of_freedom) + 12.0 / degrees_of_freedom
    y = _quantiles(reach * _GRID, -degrees_of_freedom * np.log(np.cosh(reach * _GRID)))
    return math.sqrt(degrees_of_freedom) * np.sinh(y)


@lru_cache(maxsize=64)
def scatter_quantiles(degrees_of_freedom: float) -> Floats:
    """Returns the quantiles of a true standard deviation over the one that was found, with n degrees of freedom.

    It is the root of n over chi-square: with chi-square = n exp(y), y has the density exp(n (y - exp(y)) / 2).
    """
    width = math.sqrt(2.0 / degrees_of_freedom)
    grid = np.linspace(-7.0 * width - 20.0 / degrees_of_freedom, 7.0 * width, len(_GRID))
    y = _quantiles(grid, degrees_of_freedom / 2.0 * (grid - np.expm1(grid)))
    return np.exp(-0.5 * y[::-1])


def _quantiles(grid: Floats, log_density: Floats) -> Floats:
    """Computes quantiles by the trapezoidal rule, which is exact to rounding where a density falls off at both ends."""
    density = np.exp(log_density - log_density.max())
    share = np.cumsum(density[1:] + density[:-1])
    return np.interp(_MIDDLES, np.concatenate([[0.0], share / share[-1]]), grid)

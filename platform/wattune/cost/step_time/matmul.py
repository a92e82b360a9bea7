"""Matrix products by shape: a roofline in whole tiles, times a ratio learned from a table of measured products."""

from functools import cache
from importlib import resources
from typing import Final

import numpy as np
import numpy.typing as npt

from wattune.arrays import Floats

_TILES: Final = ((128, 256), (128, 128), (64, 128), (64, 64))
"""Output tiles that cuBLAS has on Hopper, largest first; a smaller one is slower a number."""
_TILE_SLOWNESS: Final = (1.0, 1.08, 1.35, 1.8)
_UNITS: Final = 132
"""Multiprocessors of H100 and H200 SXM: tiles run in waves of that many."""
_WAVE_SHARE: Final = 0.7
"""Part of the loss of an unfilled last wave that is paid: kernels also split along k."""


@cache
def _ratios() -> tuple[tuple[Floats, Floats, Floats], npt.NDArray[np.float32]]:
    """Returns knots in log2 of m, n and k, and the log of measured over roofline time at them, [m, n, k].

    The table's products of 4,096 rows and more ran under the power limit, up to 1.3 times the time of shorter ones a
    row. In steps on H200s that time is the same at the highest clock, within 2 %. So more rows are never slower here.
    """
    with resources.files(__package__).joinpath("matmul_h100.npz").open("rb") as file, np.load(file) as arrays:
        return (arrays["m"], arrays["n"], arrays["k"]), np.minimum.accumulate(arrays["log_ratio"], axis=0)


def weights(knots: Floats, x: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    """Returns the knot below each x and the weight of the one above, in [0, 1]: nothing is extrapolated."""
    below = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(knots) - 2)
    return below, np.clip((x - knots[below]) / (knots[below + 1] - knots[below]), 0.0, 1.0)


def roofline_s(m: Floats, n: Floats, k: Floats, *, flop_per_s: Floats | float, bytes_per_s: float) -> Floats:
    """Computes the least time of bf16 products [m, k] x [k, n] in whole tiles.

    Williams et al. 2009 (Roofline), with the waves of tiles of NeuSight (Lee et al. 2025, arXiv 2407.13853, section 4).
    """
    waves = np.full(np.broadcast(m, n, k).shape, np.inf)
    for (rows, columns), slowness in zip(_TILES, _TILE_SLOWNESS, strict=True):
        tiles = np.ceil(m / rows) * np.ceil(n / columns)
        filled = tiles / _UNITS
        paid = filled + _WAVE_SHARE * (np.ceil(filled) - filled)
        waves = np.minimum(waves, paid * rows * columns * slowness)
    compute_s = 2 * waves * _UNITS * k / flop_per_s
    memory_s = 2 * (m * k + k * n + m * n) / bytes_per_s
    return np.maximum(compute_s, memory_s)


def ratio(m: Floats, n: Floats, k: Floats) -> Floats:
    """Returns measured over roofline time of a shape, interpolated between those measured; at least 1."""
    grid, values = _ratios()
    total = np.zeros(np.broadcast(m, n, k).shape)
    placed = [weights(knots, np.log2(x)) for knots, x in zip(grid, (m, n, k), strict=True)]
    (i, a), (j, b), (h, c) = placed
    for di, wi in ((0, 1 - a), (1, a)):
        for dj, wj in ((0, 1 - b), (1, b)):
            for dh, wh in ((0, 1 - c), (1, c)):
                total += wi * wj * wh * values[i + di, j + dj, h + dh]
    return np.exp(np.maximum(total, 0.0))


def matmul_s(m: Floats, n: Floats, k: Floats, *, flop_per_s: Floats | float, bytes_per_s: float) -> Floats:
    """Predicts the time of bf16 products [m, k] x [k, n] at the highest clock, without the launch."""
    return ratio(m, n, k) * roofline_s(m, n, k, flop_per_s=flop_per_s, bytes_per_s=bytes_per_s)

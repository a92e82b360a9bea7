"""Scores of candidates: logarithms of the expected improvement and of the probability of feasibility."""

import numpy as np

from wattune.search.strategies.gaussian_process import Vector

_FAR = -6.0
"""Standard deviations below the best at which the asymptotic form takes over."""


def log_probability(z: Vector) -> Vector:
    """Computes the logarithm of the normal distribution function."""
    from scipy.special import log_ndtr  # grid and random do not wait for it

    return np.asarray(log_ndtr(z))


def log_expected_improvement(mean: Vector, std: Vector, best: float) -> Vector:
    """Computes log E[max(0, f - best)] of normal f (Jones et al. 1998), finite however unlikely it is.

    Far below the best, the asymptotic series phi(z) / z**2 * (1 - 3 / z**2 + ...) stands for it (Ament et al. 2023,
    arXiv 2310.20708).
    """
    from scipy.special import ndtr

    z = (mean - best) / std
    log_density = -0.5 * z * z - 0.5 * np.log(2 * np.pi)
    near = np.maximum(z, _FAR)
    inner = np.exp(-0.5 * near * near) / np.sqrt(2 * np.pi) + near * ndtr(near)
    inverse = 1.0 / np.maximum(z * z, _FAR * _FAR)
    far = log_density + np.log(inverse) + np.log1p(inverse * (-3 + inverse * (15 - 105 * inverse)))
    return np.asarray(np.log(std) + np.where(z > _FAR, np.log(np.maximum(inner, 1e-300)), far))

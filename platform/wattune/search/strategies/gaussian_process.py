"""An exact Gaussian process over the rows of `Features`, fitted by Cholesky factors.

The covariance has four parts. A constant. An additive part: each column by itself (Duvenaud et al. 2011, arXiv
1112.4394). A Matérn 5/2 of the distance over all columns. A deviation of each row of its own, which no column explains.
The last is part of the truth, unlike noise: it is a reason to measure neighbours of a good plan. Five
hyperparameters, each with a log-normal prior, are fitted to their posterior mode. So few do not overfit ten trials.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from wattune.search.strategies.features import Features

Vector = NDArray[np.float64]
Rows = NDArray[np.intp]

_ROOT5: Final = math.sqrt(5.0)
_LEAST_NOISE: Final = 1e-3
"""Least standard deviation of an observation, as a share of the prior's. It keeps the factor well conditioned."""

ADDITIVE, JOINT, LENGTH, OWN, NOISE = range(5)


@dataclass(frozen=True, slots=True)
class Hyperprior:
    """Log-normal priors of the hyperparameters: additive and joint amplitude, length, own deviation, noise."""

    log_mean: Vector
    log_std: Vector

    @classmethod
    def of(cls, num_columns: int, own: float, noise: float, noise_log_std: float) -> "Hyperprior":
        """Makes priors for outputs of unit scale.

        Args:
            num_columns: Columns that vary. Distances grow with their root, and so does the expected length
                (Hvarfner et al. 2024, arXiv 2402.02229).
            own: Expected standard deviation of what no column explains, in units of the scale.
            noise: Expected standard deviation of one observation, in units of the scale.
            noise_log_std: Uncertainty of its logarithm.
        """
        length = math.sqrt(max(num_columns, 1))
        expected = [0.7, 0.5, 1.5 * length, max(own, _LEAST_NOISE), max(noise, _LEAST_NOISE)]
        return cls(np.log(expected), np.array([0.4, 0.4, 0.5, 0.5, noise_log_std]))


def _matern(distances2: NDArray[Any], length: float) -> NDArray[Any]:
    """Matérn 5/2 of squared distances, in their precision."""
    r = np.sqrt(distances2) * distances2.dtype.type(_ROOT5 / length)
    return np.asarray((1 + r + r * r / 3) * np.exp(-r))


@dataclass(slots=True)
class GaussianProcess:
    """A posterior over all rows of the features, given some of them."""

    features: Features
    rows: Rows
    """Observed rows, each once."""
    outputs: Vector
    """Mean of the observations of each row, in units of `scale`."""
    counts: Vector
    """Number of observations of each row."""
    scale: Vector
    """Prior standard deviation of every row of the features, in the units of the output."""
    constant: float
    """Prior standard deviation of the common level, in units of the scale."""
    log_hyper: Vector
    inverse: Vector
    """Inverse of the lower Cholesky factor of the observations' covariance."""
    weights: Vector

    def predict(self, rows: Rows | slice) -> tuple[Vector, Vector]:
        """Predicts rows, noise left out.

        Returns:
            Means and standard deviations in the units of the output.
        """
        cross = self._cross(rows)
        mean = self.weights.astype(np.float32) @ cross
        explained = self.inverse.astype(np.float32) @ cross
        variance = np.maximum(self._prior_variance - (explained**2).sum(0), 1e-10)
        scale = self.scale[rows]
        return mean.astype(np.float64) * scale, np.sqrt(variance.astype(np.float64)) * scale

    def covariance(self, rows: Rows) -> Vector:
        """Computes the posterior covariance of rows, in the squared units of the output."""
        additive, joint, length, own, _ = np.exp(self.log_hyper)
        prior = (
            self.constant**2
            + own**2 * np.eye(len(rows))
            + additive**2 * self.features.similar(rows, rows).astype(np.float64)
        )
        prior += joint**2 * _matern(self.features.distances2(rows, rows).astype(np.float64), length)
        explained = self.inverse @ self._cross(rows).astype(np.float64)
        scale = self.scale[rows]
        return np.asarray((prior - explained.T @ explained) * scale[:, None] * scale[None, :], dtype=np.float64)

    def with_beliefs(self, rows: Rows) -> "GaussianProcess":
        """Returns the process after rows were observed at their own predicted means: variances shrink, means stay.

        Trials that run count so (the "kriging believer" of Ginsbourger et al. 2010).
        """
        if not len(rows):
            return self
        mean, _ = self.predict(rows)
        return condition(
            self.features,
            np.concatenate([self.rows, rows]),
            np.concatenate([self.outputs, mean / self.scale[rows]]),
            np.concatenate([self.counts, np.ones(len(rows))]),
            self.scale,
            self.constant,
            self.log_hyper,
        )

    @property
    def _prior_variance(self) -> float:
        additive, joint, _, own, _ = np.exp(self.log_hyper)
        return float(self.constant**2 + additive**2 + joint**2 + own**2)

    def _cross(self, rows: Rows | slice) -> NDArray[np.float32]:
        additive, joint, length, own, _ = np.exp(self.log_hyper)
        cross = _matern(self.features.distances2(self.rows, rows), length) * np.float32(joint**2)
        cross += self.features.similar(self.rows, rows) * np.float32(additive**2)
        cross += np.float32(self.constant**2)
        places = np.full(len(self.scale), -1, dtype=np.intp)
        places[self.rows] = np.arange(len(self.rows))
        here = places[rows]
        cross[here[here >= 0], np.flatnonzero(here >= 0)] += np.float32(own**2)
        return cross


def condition(
    features: Features,
    rows: Rows,
    outputs: Vector,
    counts: Vector,
    scale: Vector,
    constant: float,
    log_hyper: Vector,
) -> GaussianProcess:
    """Conditions a process with given hyperparameters on observations (Rasmussen and Williams 2006, algorithm 2.1)."""
    additive, joint, length, own, noise = np.exp(log_hyper)
    similar = features.similar(rows, rows).astype(np.float64)
    covariance = constant**2 + additive**2 * similar
    covariance += joint**2 * _matern(features.distances2(rows, rows).astype(np.float64), length)
    covariance[np.diag_indices_from(covariance)] += own**2 + noise**2 / counts + _LEAST_NOISE**2
    inverse = np.linalg.inv(np.linalg.cholesky(covariance)) if len(rows) else np.zeros((0, 0))
    weights = inverse.T @ (inverse @ outputs)
    return GaussianProcess(features, rows, outputs, counts, scale, constant, log_hyper, inverse, weights)


def fit(
    features: Features,
    rows: Rows,
    outputs: Vector,
    counts: Vector,
    scale: Vector,
    constant: float,
    prior: Hyperprior,
    start: Vector | None = None,
) -> GaussianProcess:
    """Fits the hyperparameters to the mode of their posterior, and conditions on the observations.

    Args:
        features: Rows of all candidates and earlier observations.
        rows: Observed rows, each once.
        outputs: Mean of the observations of each observed row, in units of `scale`.
        counts: Number of observations of each observed row.
        scale: Prior standard deviation of every row of the features, in the units of the output.
        constant: Prior standard deviation of the common level, in units of the scale.
        prior: Priors of the hyperparameters.
        start: Hyperparameters to begin with, such as those of the last fit; None begins at the prior's mode.
    """
    log_hyper = prior.log_mean if start is None else start
    if len(rows) > 1:
        from scipy.optimize import minimize  # grid and random do not wait for it

        similar = features.similar(rows, rows).astype(np.float64)
        distances = np.sqrt(features.distances2(rows, rows).astype(np.float64))

        def cost(theta: Vector) -> tuple[float, Vector]:
            return _negative_log_posterior(theta, similar, distances, outputs, counts, constant, prior)

        bounds = [(mean - 4 * std, mean + 4 * std) for mean, std in zip(prior.log_mean, prior.log_std, strict=True)]
        found = minimize(cost, log_hyper, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 20})
        log_hyper = found.x
    return condition(features, rows, outputs, counts, scale, constant, log_hyper)


def _negative_log_posterior(
    theta: Vector,
    similar: Vector,
    distances: Vector,
    outputs: Vector,
    counts: Vector,
    constant: float,
    prior: Hyperprior,
) -> tuple[float, Vector]:
    """Computes the negative log posterior density of the hyperparameters, and its gradient."""
    additive, joint, length, own, noise = np.exp(theta)
    r = distances * (_ROOT5 / length)
    decay = np.exp(-r)
    matern = (1 + r + r * r / 3) * decay
    diagonal = noise**2 / counts
    covariance = constant**2 + additive**2 * similar + joint**2 * matern
    covariance[np.diag_indices_from(covariance)] += own**2 + diagonal + _LEAST_NOISE**2
    factor = np.linalg.cholesky(covariance)
    inverse_factor = np.linalg.inv(factor)
    inverse = inverse_factor.T @ inverse_factor
    weights = inverse @ outputs
    deviation = (theta - prior.log_mean) / prior.log_std
    value = 0.5 * outputs @ weights + np.log(np.diag(factor)).sum() + 0.5 * deviation @ deviation
    # d/dtheta = -1/2 tr((w w' - K^-1) dK); the last is diagonal.
    inner = np.outer(weights, weights) - inverse
    by_length = joint**2 * (r * r * (1 + r) / 3) * decay
    gradient = -0.5 * np.array(
        [
            (inner * (2 * additive**2 * similar)).sum(),
            (inner * (2 * joint**2 * matern)).sum(),
            (inner * by_length).sum(),
            (np.diag(inner) * 2 * own**2).sum(),
            (np.diag(inner) * 2 * diagonal).sum(),
        ]
    )
    return float(value), gradient + deviation / prior.log_std

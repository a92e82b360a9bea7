"""An exact Gaussian process over the rows of `Features`, fitted by Cholesky factors.

The covariance has four parts. A constant. An additive part: each column by itself (Duvenaud et al. 2011, arXiv
1112.4394). A Matérn 5/2 of the distance over all columns. A deviation of each row of its own, which no column explains.
The last is part of the truth, unlike noise: it is a reason to measure neighbours of a good plan. Five
hyperparameters and a weight for each column ("automatic relevance determination", Neal 1996) are fitted to the mode of
their posterior. Log-normal priors hold all of them, so that ten trials are not overfitted.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from wattune.arrays import Indices
from wattune.search.strategies.features import Features

Vector = NDArray[np.float64]

_ROOT5: Final = math.sqrt(5.0)
_LEAST_NOISE: Final = 1e-3
"""Least standard deviation of an observation, as a share of the prior's. It keeps the factor well conditioned."""

ADDITIVE, JOINT, LENGTH, OWN, NOISE = range(5)
_NUM_COMMON: Final = 5
"""Hyperparameters that are not of a column. The weights of the columns follow them."""

RELEVANCE_LOG_STD: Final = 1.0
"""Expected standard deviation of the logarithm of a column's weight, for `RELEVANCE_AT` results."""

RELEVANCE_AT: Final = 200
"""With fewer results the weights are held closer to 1, by the root of their number.

A choice of caution: the mode of many weights can take chance for a pattern. From forty results free weights predicted
other plans better, not worse (`benchmarks/results/search_regret.md`), but no search found its answer sooner by them.
"""

_BLOCK: Final = 4096
"""Rows that are predicted at once: few enough that what is computed of them stays in the processor's cache."""

_MOST_ITERATIONS: Final = 30

_MOST_FITTED: Final = 200
"""Most observed rows that hyperparameters are fitted to, spread over the order in which they came: a fit costs the cube
of their number, and all of them are conditioned on."""


@dataclass(frozen=True, slots=True)
class Hyperprior:
    """Log-normal priors: additive and joint amplitude, length, own deviation, noise, and a weight for each column."""

    log_mean: Vector
    log_std: Vector

    @classmethod
    def of(cls, num_columns: int, num_rows: int, own: float, noise: float, noise_log_std: float) -> "Hyperprior":
        """Makes priors for outputs of unit scale.

        In units of the scale, `own` is the expected standard deviation of what no column explains, and `noise` that of
        one observation. Distances grow with the root of the number of columns that vary, and so does the expected
        length (Hvarfner et al. 2024, arXiv 2402.02229).
        """
        length = math.sqrt(max(num_columns, 1))
        expected = [0.7, 0.5, 1.5 * length, max(own, _LEAST_NOISE), max(noise, _LEAST_NOISE)]
        columns = max(num_columns, 1)
        relevance = RELEVANCE_LOG_STD * math.sqrt(min(max(num_rows, 1) / RELEVANCE_AT, 1.0))
        return cls(
            np.concatenate([np.log(expected), np.zeros(columns)]),
            np.concatenate([[0.4, 0.4, 0.5, 0.5, noise_log_std], np.full(columns, relevance)]),
        )


def _matern(distances2: NDArray[Any], length: float) -> NDArray[Any]:
    """Matérn 5/2 of squared distances, in their precision. Their array is used up."""
    r = np.sqrt(distances2, out=distances2)
    r *= distances2.dtype.type(_ROOT5 / length)
    decay = np.exp(-r)
    matern = r / 3
    matern += 1
    matern *= r
    matern += 1
    matern *= decay
    return np.asarray(matern)


@dataclass(slots=True)
class GaussianProcess:
    """A posterior over all rows of the features, given some of them."""

    features: Features
    rows: Indices
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

    def predict(self, rows: Indices | slice) -> tuple[Vector, Vector]:
        """Predicts means and standard deviations of rows in the units of the output, noise left out."""
        chosen = np.arange(len(self.scale))[rows]
        weights, inverse = self.weights.astype(np.float32), self.inverse.astype(np.float32)
        mean, explained = np.zeros(len(chosen)), np.zeros(len(chosen))
        for start in range(0, len(chosen), _BLOCK):
            block = slice(start, start + _BLOCK)
            cross = self._cross(chosen[block])
            mean[block] = weights @ cross
            explained[block] = ((inverse @ cross) ** 2).sum(0)
        scale = self.scale[chosen]
        return mean * scale, np.sqrt(np.maximum(self._prior_variance - explained, 1e-10)) * scale

    def covariance(self, rows: Indices) -> Vector:
        """Computes the posterior covariance of rows, in the squared units of the output."""
        additive, joint, length, own, _ = np.exp(self.log_hyper[:_NUM_COMMON])
        prior = (
            self.constant**2
            + own**2 * np.eye(len(rows))
            + additive**2 * self.features.similar(rows, rows, self._relevance).astype(np.float64)
        )
        prior += joint**2 * _matern(self.features.distances2(rows, rows, self._relevance).astype(np.float64), length)
        explained = self.inverse @ self._cross(rows).astype(np.float64)
        scale = self.scale[rows]
        return np.asarray((prior - explained.T @ explained) * scale[:, None] * scale[None, :], dtype=np.float64)

    def with_beliefs(self, rows: Indices) -> "GaussianProcess":
        """Returns the process after rows were observed at their own predicted means: variances shrink, means stay.

        Trials that run count so (the "kriging believer" of Ginsbourger et al. 2010).
        """
        if not len(rows):
            return self
        mean, _ = self.predict(rows)
        believed = mean / self.scale[rows]
        at = {row: place for place, row in enumerate(self.rows.tolist())}
        place = np.array([at.get(row, -1) for row in rows.tolist()], dtype=np.intp)
        is_new, again = place < 0, place[place >= 0]  # a row that was observed before is observed once more
        outputs, counts = self.outputs.copy(), self.counts.copy()
        outputs[again] = (outputs[again] * counts[again] + believed[~is_new]) / (counts[again] + 1.0)
        counts[again] += 1.0
        return condition(
            self.features,
            np.concatenate([self.rows, rows[is_new]]),
            np.concatenate([outputs, believed[is_new]]),
            np.concatenate([counts, np.ones(int(is_new.sum()))]),
            self.scale,
            self.constant,
            self.log_hyper,
        )

    @property
    def _prior_variance(self) -> float:
        additive, joint, _, own, _ = np.exp(self.log_hyper[:_NUM_COMMON])
        return float(self.constant**2 + additive**2 * self._relevance.mean() + joint**2 + own**2)

    @property
    def _relevance(self) -> Vector:
        return np.asarray(np.exp(self.log_hyper[_NUM_COMMON:]))

    def _cross(self, rows: Indices) -> NDArray[np.float32]:
        additive, joint, length, own, _ = np.exp(self.log_hyper[:_NUM_COMMON])
        cross = _matern(self.features.distances2(self.rows, rows, self._relevance), length) * np.float32(joint**2)
        cross += self.features.similar(self.rows, rows, self._relevance) * np.float32(additive**2)
        cross += np.float32(self.constant**2)
        places = np.full(len(self.scale), -1, dtype=np.intp)
        places[self.rows] = np.arange(len(self.rows))
        here = places[rows]
        cross[here[here >= 0], np.flatnonzero(here >= 0)] += np.float32(own**2)
        return cross


def condition(
    features: Features,
    rows: Indices,
    outputs: Vector,
    counts: Vector,
    scale: Vector,
    constant: float,
    log_hyper: Vector,
) -> GaussianProcess:
    """Conditions a process with given hyperparameters on observations (Rasmussen and Williams 2006, algorithm 2.1)."""
    additive, joint, length, own, noise = np.exp(log_hyper[:_NUM_COMMON])
    relevance = np.exp(log_hyper[_NUM_COMMON:])
    covariance = constant**2 + additive**2 * features.similar(rows, rows, relevance).astype(np.float64)
    covariance += joint**2 * _matern(features.distances2(rows, rows, relevance).astype(np.float64), length)
    covariance[np.diag_indices_from(covariance)] += own**2 + noise**2 / counts + _LEAST_NOISE**2
    factor = _factor(covariance) if len(rows) else np.zeros((0, 0))
    inverse = np.asarray(np.linalg.inv(factor), dtype=np.float64)
    weights = inverse.T @ (inverse @ outputs)
    return GaussianProcess(features, rows, outputs, counts, scale, constant, log_hyper, inverse, weights)


def _factor(covariance: Vector) -> Vector:
    """Returns the Cholesky factor, of a little more on the diagonal where kernels of 32 bits leave none."""
    for share in (0.0, 1e-6, 1e-5, 1e-4):
        with suppress(np.linalg.LinAlgError):
            added = share * float(np.diag(covariance).mean()) * np.eye(len(covariance))
            return np.asarray(np.linalg.cholesky(covariance + added))
    return np.asarray(np.linalg.cholesky(covariance + 1e-3 * np.diag(np.diag(covariance))))


def fit(
    features: Features,
    rows: Indices,
    outputs: Vector,
    counts: Vector,
    scale: Vector,
    constant: float,
    prior: Hyperprior,
    start: Vector | None = None,
) -> GaussianProcess:
    """Fits the hyperparameters to the mode of their posterior, and conditions on the observations.

    `outputs` are means of the observations of each observed row, once each, in units of `scale`, the prior standard
    deviation of every row; `constant` is that of the common level, in units of the scale. It begins at `start`, such as
    the last fit's, else at the prior's mode.
    """
    log_hyper = prior.log_mean if start is None else start
    if len(rows) > 1:
        from scipy.optimize import minimize  # grid and random do not wait for it
        from threadpoolctl import threadpool_limits

        some = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _MOST_FITTED)).round().astype(np.intp))
        similar, distances2 = features.by_column(rows[some])

        def cost(theta: Vector) -> tuple[float, Vector]:
            return _negative_log_posterior(theta, similar, distances2, outputs[some], counts[some], constant, prior)

        bounds = [(mean - 4 * std, mean + 4 * std) for mean, std in zip(prior.log_mean, prior.log_std, strict=True)]
        with threadpool_limits(1):  # threads wait for one another longer than such small matrices take
            found = minimize(
                cost, log_hyper, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": _MOST_ITERATIONS}
            )
        log_hyper = found.x
    return condition(features, rows, outputs, counts, scale, constant, log_hyper)


def _negative_log_posterior(
    theta: Vector,
    similar: Vector,
    distances2: Vector,
    outputs: Vector,
    counts: Vector,
    constant: float,
    prior: Hyperprior,
) -> tuple[float, Vector]:
    """Computes the negative log posterior density of the hyperparameters, and its gradient.

    `similar` and `distances2` are those of `Features.by_column`.
    """
    additive, joint, length, own, noise = np.exp(theta[:_NUM_COMMON])
    relevance = np.exp(theta[_NUM_COMMON:])
    alike = np.tensordot(relevance, similar, 1)
    r = np.sqrt(np.tensordot(relevance, distances2, 1)) * (_ROOT5 / length)
    decay = np.exp(-r)
    matern = (1 + r + r * r / 3) * decay
    diagonal = noise**2 / counts
    covariance = constant**2 + additive**2 * alike + joint**2 * matern
    covariance[np.diag_indices_from(covariance)] += own**2 + diagonal + _LEAST_NOISE**2
    factor = np.linalg.cholesky(covariance)
    inverse_factor = np.linalg.inv(factor)
    inverse = inverse_factor.T @ inverse_factor
    weights = inverse @ outputs
    deviation = (theta - prior.log_mean) / prior.log_std
    value = 0.5 * outputs @ weights + np.log(np.diag(factor)).sum() + 0.5 * deviation @ deviation
    # d/dtheta = -1/2 tr((w w' - K^-1) dK); those of own deviation and noise are diagonal.
    inner = np.outer(weights, weights) - inverse
    slope = (1 + r) * decay / 3  # of the Matern by r: -r * slope
    common = [
        (inner * (2 * additive**2 * alike)).sum(),
        (inner * (2 * joint**2 * matern)).sum(),
        (inner * (joint**2 * r * r * slope)).sum(),
        (np.diag(inner) * 2 * own**2).sum(),
        (np.diag(inner) * 2 * diagonal).sum(),
    ]
    by_distance2 = inner * (joint**2 * slope * (-0.5 * (_ROOT5 / length) ** 2))
    by_weight = additive**2 * np.tensordot(similar, inner, 2) + np.tensordot(distances2, by_distance2, 2)
    gradient = -0.5 * np.concatenate([common, relevance * by_weight])
    return float(value), gradient + deviation / prior.log_std

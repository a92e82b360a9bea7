"""An exact Gaussian process over the rows of `Features`, fitted by Cholesky factors.

The covariance has four parts. A constant. An additive part: each column by itself (Duvenaud et al. 2011, arXiv
1112.4394). A Matérn 5/2 of the distance over all columns. A deviation of each row of its own, which no column explains.
The last is part of the truth, unlike noise: it is a reason to measure neighbours of a good plan. Five
hyperparameters and a weight for each column ("automatic relevance determination", Neal 1996) are fitted to the mode of
their posterior. Log-normal priors hold all of them, so that ten trials are not overfitted.
"""

import hashlib
import math
from contextlib import suppress
from dataclasses import dataclass, field
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

_MOST_KEPT: Final = 2**24
"""Most numbers, each of an observation and a row, that are kept for the next prediction: 64 MB."""

_OPTIONS: Final = {"maxiter": 30}

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


def _kernel(
    features: Features, rows: Indices, others: Indices, constant: float, log_hyper: Vector, kind: type[Any] = np.float64
) -> NDArray[Any]:
    """Computes the prior covariance of rows and others, in units of their scales and numbers of a kind."""
    additive, joint, length, own, _ = np.exp(log_hyper[:_NUM_COMMON])
    relevance = np.exp(log_hyper[_NUM_COMMON:])
    kernel = _matern(features.distances2(rows, others, relevance).astype(kind, copy=False), length) * kind(joint**2)
    kernel += features.similar(rows, others, relevance).astype(kind, copy=False) * kind(additive**2)
    kernel += kind(constant**2)
    kernel[rows[:, None] == others] += kind(own**2)
    return np.asarray(kernel)


@dataclass(slots=True)
class GaussianProcess:
    """A posterior over all rows of the features, given some (Rasmussen and Williams 2006, algorithm 2.1)."""

    features: Features
    rows: Indices
    """Observed rows, each once."""
    outputs: Vector
    """Mean of the observations of each, in units of `scale`."""
    counts: Vector
    """Numbers of these."""
    scale: Vector
    """Prior standard deviation of every row of the features, in the units of the output."""
    constant: float
    """Prior standard deviation of the common level, in units of the scale."""
    log_hyper: Vector
    believed: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    """Rows that count as observed once more, at their own predicted means, as of trials that run (the "kriging
    believer" of Ginsbourger et al. 2010): variances shrink, means stay."""
    _kept: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Results that beliefs leave as they are, for processes of other beliefs too: the inverse, once it is asked for,
    and parts of the last large prediction."""

    @property
    def inverse(self) -> Vector:
        """Inverse of the lower Cholesky factor of the observations' covariance."""
        if "inverse" not in self._kept:
            covariance = self._kernel(self.rows, self.rows)
            covariance[np.diag_indices_from(covariance)] += (
                np.exp(2 * self.log_hyper[NOISE]) / self.counts + _LEAST_NOISE**2
            )
            self._kept["inverse"] = _inverse(_factor(covariance)) if len(self.rows) else covariance
        return self._kept["inverse"]

    def predict(self, rows: Indices | slice) -> tuple[Vector, Vector]:
        """Predicts means and standard deviations of rows in the units of the output, noise left out."""
        chosen = np.arange(len(self.scale))[rows]
        blocks = [chosen[start : start + _BLOCK] for start in range(0, max(len(chosen), 1), _BLOCK)]
        parts, keeps = [], len(self._kept.get("mean", ())) < len(chosen) <= _MOST_KEPT / max(len(self.rows), 1)
        believed = np.zeros(0)
        for block in blocks:
            mean, explained, projected = self._observed(block)
            more = self._beliefs(block, projected)
            believed = np.concatenate([believed, np.einsum("ij,ij->j", more, more)])
            parts.append((mean, explained, projected if keeps else projected[:0]))
        mean, explained, projected = map(np.concatenate, zip(*parts, strict=True))
        if keeps:
            place = np.full(len(self.scale), -1, dtype=np.intp)
            place[chosen] = np.arange(len(chosen))
            self._kept.update(place=place, mean=mean, explained=explained, projected=projected)
        additive, joint, _, own, _ = np.exp(self.log_hyper[:_NUM_COMMON])
        relevance = np.exp(self.log_hyper[_NUM_COMMON:])
        left = self.constant**2 + additive**2 * relevance.mean() + joint**2 + own**2 - explained - believed
        return mean * self.scale[chosen], np.sqrt(np.maximum(left, 1e-10)) * self.scale[chosen]

    def covariance(self, rows: Indices) -> Vector:
        """Computes the posterior covariance of rows, in the squared units of the output."""
        explained = self.inverse @ self._kernel(self.rows, rows, np.float32).astype(np.float64)
        believed = self._beliefs(rows, explained.T)
        left = self._kernel(rows, rows) - explained.T @ explained - believed.T @ believed
        scale = self.scale[rows]
        return np.asarray(left * scale[:, None] * scale[None, :], dtype=np.float64)

    def _observed(self, rows: Indices) -> tuple[Vector, Vector, NDArray[np.float32]]:
        """Returns means of rows, the variance that observations explain, and its root (rows, observations)."""
        if "place" in self._kept and ((at := self._kept["place"][rows]) >= 0).all():
            return self._kept["mean"][at], self._kept["explained"][at], self._kept["projected"][at]
        cross = self._kernel(self.rows, rows, np.float32)
        projected = cross.T @ self.inverse.T.astype(np.float32)
        weights = self.inverse.T @ (self.inverse @ self.outputs)
        mean = (weights.astype(np.float32) @ cross).astype(np.float64)
        return mean, np.einsum("ij,ij->i", projected, projected).astype(np.float64), projected

    def _beliefs(self, rows: Indices, projected: NDArray[Any]) -> NDArray[Any]:
        """Returns what beliefs explain of rows beside observations, one line a belief: the root of a variance."""
        if not len(self.believed):
            return np.zeros((0, len(rows)))
        own = self.inverse @ self._kernel(self.rows, self.believed)
        covariance = self._kernel(self.believed, self.believed) - own.T @ own
        covariance[np.diag_indices_from(covariance)] += np.exp(2 * self.log_hyper[NOISE]) + _LEAST_NOISE**2
        left = self._kernel(self.believed, rows, projected.dtype.type) - (projected @ own.astype(projected.dtype)).T
        return np.asarray(np.linalg.inv(_factor(covariance)) @ left)

    def _kernel(self, rows: Indices, others: Indices, kind: type[Any] = np.float64) -> NDArray[Any]:
        return _kernel(self.features, rows, others, self.constant, self.log_hyper, kind)


def _factor(covariance: Vector) -> Vector:
    """Returns the Cholesky factor, of a little more on the diagonal where kernels of 32 bits leave none."""
    for share in (0.0, 1e-6, 1e-5, 1e-4):
        with suppress(np.linalg.LinAlgError):
            added = share * float(np.diag(covariance).mean()) * np.eye(len(covariance))
            return np.asarray(np.linalg.cholesky(covariance + added))
    return np.asarray(np.linalg.cholesky(covariance + 1e-3 * np.diag(np.diag(covariance))))


def _inverse(factor: Vector) -> Vector:
    """Inverts a lower triangle by halves, in a third of the time of a general inverse."""
    if (half := len(factor) // 2) < 32:
        return np.asarray(np.linalg.inv(factor))
    found = np.zeros_like(factor)
    found[:half, :half], found[half:, half:] = _inverse(factor[:half, :half]), _inverse(factor[half:, half:])
    found[half:, :half] = -found[half:, half:] @ (factor[half:, :half] @ found[:half, :half])
    return found


def fit(
    features: Features,
    rows: Indices,
    outputs: Vector,
    counts: Vector,
    scale: Vector,
    constant: float,
    prior: Hyperprior,
    start: Vector | None = None,
    fits: dict[str, Vector] | None = None,
) -> GaussianProcess:
    """Fits the hyperparameters to the mode of their posterior, and conditions on the observations.

    `outputs` are means of the observations of each observed row, once each, in units of `scale`, the prior standard
    deviation of every row; `constant` is that of the common level, in units of the scale. It begins at `start`, such as
    the last fit's, else at the prior's mode. What is among `fits`, by the digest of data, is not fitted again.
    """
    log_hyper, fits = prior.log_mean if start is None else start, {} if fits is None else fits
    if len(rows) > 1:
        some = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _MOST_FITTED)).round().astype(np.intp))
        of_rows = (features.additive[rows[some]], features.place[rows[some]], outputs[some], counts[some])
        of_columns = (features.additive_column, features.place_column, prior.log_mean, prior.log_std, log_hyper)
        each = (one.tobytes() for one in (*of_rows, *of_columns, np.array(constant)))
        key = hashlib.sha256(b"".join(each)).hexdigest()
        if key not in fits:
            from scipy.optimize import minimize  # takes 0.5 s

            similar, distances2 = features.by_column(rows[some])
            bounds = [(mean - 4 * std, mean + 4 * std) for mean, std in zip(prior.log_mean, prior.log_std, strict=True)]
            told = (similar, distances2, outputs[some], counts[some], constant, prior)
            found = minimize(
                _negative_log_posterior, log_hyper, told, "L-BFGS-B", jac=True, bounds=bounds, options=_OPTIONS
            )
            fits[key] = np.array(found.x)
        log_hyper = fits[key]
    return GaussianProcess(features, rows, outputs, counts, scale, constant, log_hyper)


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
    pairs = np.tril_indices(len(outputs))
    alike = relevance @ similar
    r = np.sqrt(relevance @ distances2) * (_ROOT5 / length)
    decay = np.exp(-r)
    matern = (1 + r + r * r / 3) * decay
    diagonal = noise**2 / counts
    covariance = np.zeros((len(outputs), len(outputs)))  # of which the lower triangle is read
    covariance[pairs] = constant**2 + additive**2 * alike + joint**2 * matern
    covariance[np.diag_indices_from(covariance)] += own**2 + diagonal + _LEAST_NOISE**2
    factor = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
    inverse_factor = _inverse(factor)
    inverse = inverse_factor.T @ inverse_factor
    weights = inverse @ outputs
    deviation = (theta - prior.log_mean) / prior.log_std
    value = 0.5 * outputs @ weights + np.log(np.diag(factor)).sum() + 0.5 * deviation @ deviation
    # d/dtheta = -1/2 tr((w w' - K^-1) dK); those of own deviation and noise are diagonal.
    inner = (weights[pairs[0]] * weights[pairs[1]] - inverse[pairs]) * (2.0 - (pairs[0] == pairs[1]))
    slope = (1 + r) * decay / 3  # of the Matern by r: -r * slope
    common = [
        2 * additive**2 * inner @ alike,
        2 * joint**2 * inner @ matern,
        joint**2 * inner @ (r * r * slope),
        2 * own**2 * (own_inner := weights**2 - np.diag(inverse)).sum(),
        2 * own_inner @ diagonal,
    ]
    by_distance2 = joint**2 * slope * (-0.5 * (_ROOT5 / length) ** 2)
    by_weight = additive**2 * (similar @ inner) + distances2 @ (inner * by_distance2)
    gradient = -0.5 * np.concatenate([common, relevance * by_weight])
    return float(value), gradient + deviation / prior.log_std

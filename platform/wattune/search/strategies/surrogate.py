"""A model of one measured quantity over all candidates, with its estimate as prior mean."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from wattune.arrays import Indices
from wattune.intervals import NORMAL_95
from wattune.search.strategies.acquisition import log_probability
from wattune.search.strategies.features import Features
from wattune.search.strategies.gaussian_process import GaussianProcess, Hyperprior, Vector, condition, fit

_ESTIMATE_LOG_STD: Final = 0.15
"""Standard deviation of log(measured / estimated) where the estimate states none."""
_NO_ESTIMATE_LOG_STD: Final = 0.5
"""The same for a candidate that has no estimate among others that have one."""
_UNKNOWN_SPREAD: Final = 0.3
"""Spread of the logarithm over candidates, before two are measured and where nothing is estimated."""
_EXPECTED_NOISE: Final = 0.01
"""Noise of a trial, as a fraction, until repeats are measured."""
_OWN_DEVIATION: Final = 0.025
"""Expected deviation of one plan from all that its settings explain, as a fraction."""
_OVER: Final = 0.02
"""Least excess over the bound, as a fraction, of a trial that is only known to be above it."""
_BURST_NOISE: Final = 2.0
"""Expected noise of a burst over that of a full measurement, until trials have both."""
_BURST_LEVEL: Final = 2.0
"""Standard deviation of the level of bursts against full measurements, over the expected noise of one, likewise."""
_REFIT_AT: Final = 1.1
"""Growth of the number of observations after which hyperparameters are fitted again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """Normal belief in one quantity of candidates, one row each: in its logarithm where `is_log`."""

    mean: Vector
    std: Vector
    """Of the quantity itself."""
    noise: float
    """Standard deviation that one measurement adds."""
    is_log: bool

    @property
    def value(self) -> Vector:
        """The median."""
        return self._unit(self.mean)

    @property
    def low(self) -> Vector:
        """Low end of the 95 % interval of the next measurement."""
        return self._unit(self.mean - NORMAL_95 * self._spread)

    @property
    def high(self) -> Vector:
        """High end of it."""
        return self._unit(self.mean + NORMAL_95 * self._spread)

    @property
    def _spread(self) -> Vector:
        return np.asarray(np.hypot(self.std, self.noise))

    def _unit(self, numbers: Vector) -> Vector:
        return np.exp(numbers) if self.is_log else numbers

    def log_within(self, operator: str, bound: float) -> Vector:
        """Computes the log of the probability that the next measurement is within a bound."""
        if self.is_log and bound <= 0:
            return np.full(len(self.mean), -math.inf if operator.startswith("<") else 0.0)
        z = ((math.log(bound) if self.is_log else bound) - self.mean) / self._spread
        return log_probability(z if operator.startswith("<") else -z)


@dataclass(frozen=True, slots=True)
class _Bursts:
    """Bursts as observations of the same truth as full measurements, with a noise and a common level of their own.

    Level and noise come from trials that have both, shrunk towards no level and `_BURST_NOISE`. What is unknown of the
    level adds to the noise, as if it were drawn anew for each burst.
    """

    values: Mapping[int, float]
    """By row, in the units that the surrogate works in."""
    level: float
    """Expected burst minus full measurement."""
    variance: float
    """Of a burst about a full measurement's truth, once the level is taken out."""

    @classmethod
    def of(cls, values: Mapping[int, float], full: Mapping[int, float], noise: float) -> "_Bursts":
        """Learns level and noise from bursts and from means of full measurements, by row."""
        apart = np.array([value - full[row] for row, value in values.items() if row in full])
        expected = (1.0 + _BURST_NOISE**2) * noise**2  # of a difference of the two
        centre = float(apart.mean()) if len(apart) else 0.0
        spread = (float(((apart - centre) ** 2).sum()) + 2 * expected) / (max(len(apart) - 1, 0) + 2)
        prior = (_BURST_LEVEL * noise) ** 2
        unknown = 1.0 / (1.0 / prior + len(apart) / spread)
        return cls(values, centre * unknown * len(apart) / spread, max(spread - noise**2, noise**2) + unknown)

    def joined(
        self, rows: Indices, full: Mapping[int, float], counts: Mapping[int, float], noise: float
    ) -> tuple[Vector, Vector]:
        """Computes the mean of each row's observations, and the number of full measurements that they are worth."""
        worth = noise**2 / self.variance
        means, sums = [], []
        for row in rows.tolist():
            count, burst = counts.get(row, 0.0), self.values.get(row)
            weight = 0.0 if burst is None else worth
            total = count * full.get(row, 0.0) + weight * ((burst or 0.0) - self.level)
            means.append(total / (count + weight))
            sums.append(count + weight)
        return np.array(means), np.array(sums)


@dataclass(slots=True)
class Surrogate:
    """Learns log(measured / estimated), or the plain value where some are not positive."""

    features: Features
    estimate: Vector | None = None
    """Estimates of all rows of the features; NaN where there is none. None where nothing is estimated."""
    log_std: Vector | None = None
    """Standard deviations of log(measured / estimated) of all rows."""
    signed: bool = False
    """True for a quantity that may be negative, as the label of success: its logarithm is never taken."""
    _values: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _above: dict[int, float] = field(default_factory=dict)
    _bursts: dict[int, float] = field(default_factory=dict)
    _process: GaussianProcess | None = None
    _num_fitted: int = 0
    _is_log: bool = True
    _offset: Vector | None = None
    _noise: float = _EXPECTED_NOISE

    @property
    def knows(self) -> bool:
        """True where it can tell candidates apart: by an estimate or by observations."""
        return self.estimate is not None or bool(self._values) or bool(self._bursts)

    @property
    def is_log(self) -> bool:
        """True where it works on logarithms."""
        return self._is_log

    @property
    def noise(self) -> float:
        """Standard deviation of one measurement: a fraction where it works on logarithms, else in the unit."""
        return self._noise

    def has(self, row: int) -> bool:
        """Returns whether a full measurement of a row was told."""
        return row in self._values

    def tell(self, row: int, value: float) -> None:
        """Adds a measured value of a row. Several values of a row are repeats."""
        self._values[row].append(value)

    def tell_burst(self, row: int, value: float) -> None:
        """Adds what a burst of a row measured: with a noise and a common level of its own (`_Bursts`)."""
        self._bursts[row] = value

    def tell_above(self, row: int, bound: float) -> None:
        """Adds a row that is only known to be above a bound, as memory is of a trial that ran out of it."""
        self._above[row] = bound

    def process(self, beliefs: Indices) -> GaussianProcess:
        """Returns the posterior, after `update`, with rows whose trials still run taken at their predicted means."""
        assert self._process is not None, "update() comes first"
        return self._process.with_beliefs(beliefs)

    def believe(self, process: GaussianProcess, rows: Indices | slice) -> Belief:
        """Predicts rows by a posterior of this surrogate."""
        mean, std = process.predict(rows)
        assert self._offset is not None
        return Belief(mean=mean + self._offset[rows], std=std, noise=self._noise, is_log=self._is_log)

    def offset(self, rows: Indices) -> Vector:
        """The prior mean of rows, which the posterior's means are added to."""
        assert self._offset is not None
        return self._offset[rows]

    def transformed(self, value: float) -> float:
        """Returns a value, such as a bound, in the units that the surrogate works in."""
        if not self._is_log:
            return value
        return math.log(value) if value > 0 else -math.inf

    def update(self) -> None:
        """Takes in what was told since the last call."""
        num_rows = len(self.features.place)
        every = [*(value for values in self._values.values() for value in values), *self._bursts.values()]
        was_log = self._is_log
        self._is_log = not self.signed and all(value > 0 for value in every)
        transform = np.log if self._is_log else np.asarray
        raw = [transform(np.asarray(values, dtype=np.float64)) for values in self._values.values()]
        full = {row: float(values.mean()) for row, values in zip(self._values, raw, strict=True)}
        bursts = {row: float(transform(value)) for row, value in self._bursts.items()}
        offset, scale, constant = self._prior(num_rows, np.array([*full.values(), *bursts.values()]))
        self._offset = offset
        typical = float(np.median(scale))
        pooled = sum(float(((values - values.mean()) ** 2).sum()) for values in raw)
        num_free = sum(len(values) - 1 for values in raw)
        expected = _EXPECTED_NOISE if self._is_log else 0.05 * typical
        if num_free:  # two pseudo-repeats of the expected noise keep a lucky pair from claiming none
            expected = math.sqrt((pooled + 2 * expected**2) / (num_free + 2))
        self._noise = expected
        known = _Bursts.of(bursts, full, expected)
        rows = np.array([*full, *(row for row in bursts if row not in full)], dtype=np.intp)
        means, counts = known.joined(rows, full, {row: float(len(self._values[row])) for row in full}, expected)
        own = _OWN_DEVIATION / typical if self._is_log else 0.1
        prior = Hyperprior.of(
            self.features.num_columns, len(rows), own, expected / typical, 0.3 / math.sqrt(1 + num_free)
        )
        outputs = (means - offset[rows]) / scale[rows] if len(rows) else np.zeros(0)
        last = self._process
        if last is None or was_log != self._is_log or len(rows) > _REFIT_AT * self._num_fitted:
            start = last.log_hyper if last is not None and was_log == self._is_log else None
            self._process = fit(self.features, rows, outputs, counts, scale, constant, prior, start)
            self._num_fitted = len(rows)
        else:
            self._process = condition(self.features, rows, outputs, counts, scale, constant, last.log_hyper)
        self._take_in_bounds(rows, outputs, counts, scale, constant)

    def _prior(self, num_rows: int, means: Vector) -> tuple[Vector, Vector, float]:
        """Prior mean and standard deviation of every row, and of the common level in units of the latter."""
        if self.estimate is not None and self._is_log:
            known = np.isfinite(self.estimate) & (self.estimate > 0)
            logs = np.log(np.where(known, self.estimate, 1.0))
            logs[~known] = np.median(logs[known]) if known.any() else 0.0
            stated = np.full(num_rows, _ESTIMATE_LOG_STD) if self.log_std is None else self.log_std
            stated = np.where(np.isfinite(stated) & (stated > 0), stated, _ESTIMATE_LOG_STD)
            return logs, np.where(known, stated, _NO_ESTIMATE_LOG_STD), 1.0
        level = float(means.mean()) if len(means) else 0.0
        expected = _UNKNOWN_SPREAD if self._is_log or self.signed else 0.1 * max(abs(level), 1e-6)
        spread = math.sqrt((float(((means - level) ** 2).sum()) + 2 * expected**2) / (len(means) + 2))
        return np.full(num_rows, level), np.full(num_rows, max(spread, 1e-9)), 0.5

    def _take_in_bounds(self, rows: Indices, outputs: Vector, counts: Vector, scale: Vector, constant: float) -> None:
        """Adds rows that are only known to be above a bound: at their prediction, or just above the bound."""
        above = [row for row in self._above if row not in self._values and row not in self._bursts]
        if not above or self._process is None or self._offset is None:
            return
        extra = np.array(above, dtype=np.intp)
        belief = self.believe(self._process, extra)
        least = np.array([self.transformed(self._above[row] * (1 + _OVER)) for row in above])
        added = (np.maximum(belief.mean, least) - self._offset[extra]) / scale[extra]
        self._process = condition(
            self.features,
            np.concatenate([rows, extra]),
            np.concatenate([outputs, added]),
            np.concatenate([counts, np.ones(len(extra))]),
            scale,
            constant,
            self._process.log_hyper,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A metric, or its ratio to another one such as a limit."""

    metric: str
    limit_metric: str | None = None

    def of(self, metrics: Mapping[str, float]) -> float | None:
        """Computes it from measured or estimated metrics; None where one is absent or not finite, or the limit is 0."""
        value = metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return None
        if self.limit_metric is None:
            return value
        limit = metrics.get(self.limit_metric)
        return value / limit if limit and math.isfinite(limit) else None

"""A model of one measured quantity over all candidates, with its estimate as prior mean."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from wattune.search.strategies.features import Features
from wattune.search.strategies.gaussian_process import GaussianProcess, Hyperprior, Rows, Vector, condition, fit

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
_REFIT_AT: Final = 1.1
"""Growth of the number of observations after which hyperparameters are fitted again."""


@dataclass(frozen=True, slots=True)
class Belief:
    """Means and standard deviations of rows, in the units that the surrogate works in."""

    mean: Vector
    std: Vector


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
    _process: GaussianProcess | None = None
    _num_fitted: int = 0
    _is_log: bool = True
    _offset: Vector | None = None
    _noise: float = _EXPECTED_NOISE

    @property
    def knows(self) -> bool:
        """True where it can tell candidates apart: by an estimate or by observations."""
        return self.estimate is not None or bool(self._values)

    @property
    def is_log(self) -> bool:
        """True where it works on logarithms."""
        return self._is_log

    @property
    def noise(self) -> float:
        """Standard deviation of one measurement: a fraction where it works on logarithms, else in the unit."""
        return self._noise

    def tell(self, row: int, value: float) -> None:
        """Adds a measured value of a row. Several values of a row are repeats."""
        self._values[row].append(value)

    def tell_above(self, row: int, bound: float) -> None:
        """Adds a row that is only known to be above a bound, as memory is of a trial that ran out of it."""
        self._above[row] = bound

    def process(self, beliefs: Rows) -> GaussianProcess:
        """Returns the posterior, after `update`, with rows whose trials still run taken at their predicted means."""
        assert self._process is not None, "update() comes first"
        return self._process.with_beliefs(beliefs)

    def believe(self, process: GaussianProcess, rows: Rows | slice) -> Belief:
        """Predicts rows by a posterior of this surrogate."""
        mean, std = process.predict(rows)
        assert self._offset is not None
        return Belief(mean + self._offset[rows], std)

    def offset(self, rows: Rows) -> Vector:
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
        rows = np.fromiter(self._values, dtype=np.intp, count=len(self._values))
        every = [value for values in self._values.values() for value in values]
        was_log = self._is_log
        self._is_log = not self.signed and all(value > 0 for value in every)
        transform = np.log if self._is_log else np.asarray
        raw = [transform(np.asarray(values, dtype=np.float64)) for values in self._values.values()]
        means = np.array([values.mean() for values in raw])
        counts = np.array([float(len(values)) for values in raw])
        offset, scale, constant = self._prior(num_rows, means)
        self._offset = offset
        typical = float(np.median(scale))
        pooled = sum(float(((values - values.mean()) ** 2).sum()) for values in raw)
        num_free = sum(len(values) - 1 for values in raw)
        expected = _EXPECTED_NOISE if self._is_log else 0.05 * typical
        if num_free:  # two pseudo-repeats of the expected noise keep a lucky pair from claiming none
            expected = math.sqrt((pooled + 2 * expected**2) / (num_free + 2))
        self._noise = expected
        own = _OWN_DEVIATION / typical if self._is_log else 0.1
        prior = Hyperprior.of(self.features.num_columns, own, expected / typical, 0.3 / math.sqrt(1 + num_free))
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

    def _take_in_bounds(self, rows: Rows, outputs: Vector, counts: Vector, scale: Vector, constant: float) -> None:
        """Adds rows that are only known to be above a bound: at their prediction, or just above the bound."""
        above = [row for row in self._above if row not in self._values]
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
        """Computes it from measured or estimated metrics; None where one is absent or the limit is zero."""
        value = metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return None
        if self.limit_metric is None:
            return value
        limit = metrics.get(self.limit_metric)
        return value / limit if limit else None

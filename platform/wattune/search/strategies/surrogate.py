"""A model of one measured quantity over all candidates, with its estimate as prior mean; and scores of its beliefs."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from wattune.arrays import Indices
from wattune.intervals import NORMAL_95
from wattune.search.strategies.features import Features
from wattune.search.strategies.gaussian_process import GaussianProcess, Hyperprior, Vector, fit

_ESTIMATE_LOG_STD: Final = 0.15
"""Standard deviation of log(measured / estimated) where the estimate states none."""
_NO_ESTIMATE_LOG_STD: Final = 0.5
"""The same for a candidate that has no estimate among others that have one."""
_UNKNOWN_SPREAD: Final = 0.3
"""Spread of the logarithm over candidates, before two are measured and where nothing is estimated."""
_EXPECTED_NOISE: Final = 0.01
"""Noise of a trial, as a fraction, until repeats are measured."""
_EXACT_NOISE: Final = 0.001
"""The same of memory: repeats of 30 configurations hold equal bytes."""
_OWN_DEVIATION: Final = 0.025
"""Expected deviation of one plan from all that its settings explain, as a fraction."""
_OVER: Final = 0.02
"""Least excess over the bound, as a fraction, of a trial that is only known to be above it."""
_PARTS: Final = 0.7, 0.4
"""Most that a plan's own deviation and noise are of the standard deviation that an estimate states: it holds both."""
_BURST_NOISE: Final = 2.0
"""Expected noise of a burst over that of a full measurement, until trials have both."""
_BURST_LEVEL: Final = 2.0
"""Standard deviation of the level of bursts against full measurements, over the expected noise of one, likewise."""
_SLOPE_SCALE: Final = 0.12
"""Scale of the Cauchy prior of the slope of log measured on log estimated about 1: half of the slopes are nearer to 1.

Of 22 steps and power peaks of families that no fit has seen half are (on one, two, four and eight devices). A share of
estimates order plans the wrong way round: their slope is negative, a few results show that, and the prior's tail lets
them.
"""
_SLOPE_PSEUDO: Final = 4
"""Observations that the stated standard deviation of the estimate counts as, beside those that were made."""
_LATEST: Final = 8
"""Latest predictions that calibration is judged by."""
_CALIBRATION_PSEUDO: Final = 2
"""Predictions as far off as was stated that count beside them."""
_FARTHEST: Final = 5.0
"""Standard deviations by which one prediction may count as missed: a single outlier says little of the others."""
_REFIT_AT: Final = 1.1
"""Growth of the number of observations after which hyperparameters are fitted again."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Log measured as a line of log estimated: a slope that is learned, about a level that the process learns."""

    slope: float
    std: float
    """Posterior standard deviation of the slope."""
    centre: float
    """Log estimate at which the slope says nothing: the mean of those that were measured."""
    widened: float
    """Standard deviation of what is left over the stated one."""

    @classmethod
    def of(cls, logs: Vector, stated: Vector, measured: Mapping[int, float]) -> "_Line":
        """Fits log(measured / estimated) to log(estimated), with a free level.

        All are logarithms: estimates and their `stated` standard deviations of all rows, what was measured by row.

        The slope is Cauchy(1, `_SLOPE_SCALE`) before, as a normal one whose precision is what its tail expects
        (expectation and maximization; Lange et al. 1989), from the slope of the results alone. The stated deviation of
        the estimate counts as `_SLOPE_PSEUDO` observations beside the measured ones (scaled inverse chi-squared, Gelman
        et al. 2013, section 3.2).
        """
        if len(measured) < 2:  # one result tells a level, and no slope
            centre = float(logs[[*measured]].mean()) if measured else float(np.median(logs))
            return cls(slope=1.0, std=0.0, centre=centre, widened=1.0)
        rows = np.array([*measured], dtype=np.intp)
        weight = 1.0 / stated[rows] ** 2
        centre = float(np.average(logs[rows], weights=weight))
        x = logs[rows] - centre
        off = np.array([*measured.values()]) - logs[rows]
        y = off - np.average(off, weights=weight)
        widened, slope = 1.0, float((weight * x * y).sum() / max((weight * x * x).sum(), 1e-12))
        for _ in range(8):  # slope and deviation depend on one another; this many rounds settle both
            precision = float((weight * x * x).sum()) / widened**2 + 2.0 / (_SLOPE_SCALE**2 + slope**2)
            slope = float((weight * x * y).sum()) / widened**2 / precision
            left = float((weight * (y - slope * x) ** 2).sum())
            widened = math.sqrt((left + _SLOPE_PSEUDO) / (len(rows) - 1 + _SLOPE_PSEUDO))
        return cls(slope=1.0 + slope, std=1.0 / math.sqrt(precision), centre=centre, widened=widened)

    def value(self, logs: Vector) -> Vector:
        """Computes the expected log measurement of log estimates, up to a level."""
        return np.asarray(logs + (self.slope - 1.0) * (logs - self.centre))


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
    is_exact: bool = False
    """True for what repeats alike, which is memory."""
    _values: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _above: dict[int, float] = field(default_factory=dict)
    _bursts: dict[int, float] = field(default_factory=dict)
    _process: GaussianProcess | None = None
    _num_fitted: int = 0
    is_log: bool = True
    """True where it works on logarithms."""
    _offset: Vector | None = None
    noise: float = _EXPECTED_NOISE
    """Standard deviation of one measurement: a fraction where it works on logarithms, else in the unit."""
    _lever: Vector | None = None
    """By how much each row's belief moves when the slope does by one standard deviation; None without estimates."""
    slope: float = 1.0
    """Learned slope of log measured on log estimated; 1 without estimates."""
    _expected: dict[int, tuple[float, float]] = field(default_factory=dict)
    _misses: list[float] = field(default_factory=list)
    """Of each prediction that came back: by how many of its standard deviations it was off."""

    @property
    def num_returned(self) -> int:
        """Number of predictions made at ask time whose measurement came back."""
        return len(self._misses)

    @property
    def calibration(self) -> float:
        """Root mean square of how many standard deviations the latest predictions were off; at least 1 is reported.

        Predictions as far off as they say give 1. `_CALIBRATION_PSEUDO` such count beside those that were made.
        """
        latest = np.minimum(np.abs(self._misses[-_LATEST:]), _FARTHEST) ** 2
        mean = (float(latest.sum()) + _CALIBRATION_PSEUDO) / (len(latest) + _CALIBRATION_PSEUDO)
        return math.sqrt(max(mean, 1.0))

    def expect(self, row: int) -> None:
        """Keeps what is predicted of a row that is about to be measured, so that the measurement judges it."""
        if not self.is_log or self._process is None:
            return
        belief = self._believe(self._process, np.array([row], dtype=np.intp), 1.0)
        self._expected[row] = float(belief.mean[0]), float(np.hypot(belief.std[0], belief.noise))

    @property
    def knows(self) -> bool:
        """True where it can tell candidates apart: by an estimate or by observations."""
        return self.estimate is not None or bool(self._values) or bool(self._bursts)

    def has(self, row: int) -> bool:
        """Returns whether a full measurement of a row was told."""
        return row in self._values

    def tell(self, row: int, value: float) -> None:
        """Adds a measured value of a row. Several values of a row are repeats."""
        expected = self._expected.pop(row, None)
        if expected is not None and value > 0:
            self._misses.append((math.log(value) - expected[0]) / expected[1])
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
        return replace(self._process, believed=beliefs)

    def believe(self, process: GaussianProcess, rows: Indices | slice) -> Belief:
        """Predicts rows by a posterior of this surrogate, as surely as its latest predictions were right."""
        return self._believe(process, rows, self.calibration)

    def draws(self, process: GaussianProcess, rows: Indices, normals: Vector, slope: Vector) -> Vector:
        """Makes joint values of rows [R], by a posterior of this surrogate, from standard normals [R, D], D draws.

        `slope` [D] are those of the slope of the estimate, which all rows share.
        """
        belief = self.believe(process, rows)
        covariance = process.covariance(rows)
        covariance[np.diag_indices_from(covariance)] += 1e-6 * float(np.diag(covariance).mean()) + 1e-12
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        away = root @ normals
        if self._lever is not None:
            away += self._lever[rows][:, None] * slope
        return np.asarray(belief.mean[:, None] + self.calibration * away)

    def _believe(self, process: GaussianProcess, rows: Indices | slice, widened: float) -> Belief:
        mean, std = process.predict(rows)
        assert self._offset is not None
        if self._lever is not None:
            std = np.hypot(std, self._lever[rows])
        return Belief(mean=mean + self._offset[rows], std=std * widened, noise=self.noise, is_log=self.is_log)

    def transformed(self, value: float) -> float:
        """Returns a value, such as a bound, in the units that the surrogate works in."""
        if not self.is_log:
            return value
        return math.log(value) if value > 0 else -math.inf

    def update(self, some: Collection[int] = (), fits: dict[str, Vector] | None = None) -> None:
        """Takes in what was told since the last call, of `some` rows alone unless there are none; see `fit`."""
        num_rows = len(self.features.place)
        known = {row: values for row, values in self._values.items() if not some or row in some}
        bursts = {row: value for row, value in self._bursts.items() if not some or row in some}
        every = [*(value for values in known.values() for value in values), *bursts.values()]
        was_log = self.is_log
        self.is_log = not self.signed and all(value > 0 for value in every)
        transform = np.log if self.is_log else np.asarray
        raw = [transform(np.asarray(values, dtype=np.float64)) for values in known.values()]
        full = {row: float(values.mean()) for row, values in zip(known, raw, strict=True)}
        bursts = {row: float(transform(value)) for row, value in bursts.items()}
        offset, scale, constant = self._prior(num_rows, {**bursts, **full})
        self._offset = offset
        typical = float(np.median(scale))
        pooled = sum(float(((values - values.mean()) ** 2).sum()) for values in raw)
        num_free = sum(len(values) - 1 for values in raw)
        expected = (
            min(_EXACT_NOISE if self.is_exact else _EXPECTED_NOISE, _PARTS[1] * typical)
            if self.is_log
            else 0.05 * typical
        )
        if num_free:  # two pseudo-repeats of the expected noise keep a lucky pair from claiming none
            expected = math.sqrt((pooled + 2 * expected**2) / (num_free + 2))
        self.noise = expected
        short = _Bursts.of(bursts, full, expected)
        rows = np.array([*full, *(row for row in bursts if row not in full)], dtype=np.intp)
        means, counts = short.joined(rows, full, {row: float(len(known[row])) for row in full}, expected)
        own = min(_OWN_DEVIATION / typical, _PARTS[0]) if self.is_log else 0.1
        prior = Hyperprior.of(
            self.features.num_columns, len(rows), own, expected / typical, 0.3 / math.sqrt(1 + num_free)
        )
        outputs = (means - offset[rows]) / scale[rows] if len(rows) else np.zeros(0)
        last = self._process
        num_known = len(self._values.keys() | self._bursts.keys())
        if last is None or was_log != self.is_log or num_known > _REFIT_AT * self._num_fitted:
            start = last.log_hyper if last is not None and was_log == self.is_log else None
            self._process = fit(self.features, rows, outputs, counts, scale, constant, prior, start, fits)
            self._num_fitted = num_known
        else:
            self._process = GaussianProcess(self.features, rows, outputs, counts, scale, constant, last.log_hyper)
        # Rows that are only known to be above a bound count at their prediction, or just above the bound.
        others = self._above.keys() - self._values.keys() - self._bursts.keys()
        over = {row: bound for row, bound in self._above.items() if row in others and (not some or row in some)}
        if over:
            extra = np.array([*over], dtype=np.intp)
            least = np.array([self.transformed(bound * (1 + _OVER)) for bound in over.values()])
            added = (np.maximum(self.believe(self._process, extra).mean, least) - offset[extra]) / scale[extra]
            rows, outputs = np.concatenate([rows, extra]), np.concatenate([outputs, added])
            counts, hyper = np.concatenate([counts, np.ones(len(extra))]), self._process.log_hyper
            self._process = GaussianProcess(self.features, rows, outputs, counts, scale, constant, hyper)

    def _prior(self, num_rows: int, measured: Mapping[int, float]) -> tuple[Vector, Vector, float]:
        """Prior mean and standard deviation of every row, and of the common level in units of the latter."""
        if self.estimate is not None and self.is_log:
            known = np.isfinite(self.estimate) & (self.estimate > 0)
            logs = np.log(np.where(known, self.estimate, 1.0))
            logs[~known] = np.median(logs[known]) if known.any() else 0.0
            stated = np.full(num_rows, _ESTIMATE_LOG_STD) if self.log_std is None else self.log_std
            stated = np.where(np.isfinite(stated) & (stated > 0), stated, _ESTIMATE_LOG_STD)
            stated = np.where(known, stated, _NO_ESTIMATE_LOG_STD)
            line = _Line.of(logs, stated, measured)
            self.slope = line.slope
            self._lever = line.std * (logs - line.centre)
            return line.value(logs), stated * line.widened, 1.0
        self._lever = None
        means = np.array([*measured.values()])
        level = float(means.mean()) if len(means) else 0.0
        expected = _UNKNOWN_SPREAD if self.is_log or self.signed else 0.1 * max(abs(level), 1e-6)
        spread = math.sqrt((float(((means - level) ** 2).sum()) + 2 * expected**2) / (len(means) + 2))
        return np.full(num_rows, level), np.full(num_rows, max(spread, 1e-9)), 0.5


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

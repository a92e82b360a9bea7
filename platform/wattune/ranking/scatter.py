"""Run-to-run scatter of a study: one model for all runs of one metric.

The value of run k of trial i on node set s at time t is modelled on the logarithmic scale (on its own scale for
temperatures, and for metrics that can be 0 or less):

    y_k = m_i + a_s + b * t_k + e_k,    e_k ~ N(0, v_i)

m_i is the trial, a_s the node set, b the drift of the machine. The reference trial runs again and again and on every
node set, so it ties a and b down. v_i is the trial's own variance from run to run. Most trials run once, so variances
are shared in two steps:

- The pooled variance starts from a prior, a scaled inverse chi-square (`Prior`), and all repeated trials add to it
  (Gelman et al., Bayesian Data Analysis, 3rd edition, section 2.6). A trial's within-run error is a floor of its own
  variance.
- Runs that something widens (`Runs.wider`: devices that wait for their host) are pooled by themselves, from a wider
  prior. They say nothing of runs that nothing widens, nor these of them.
- What makes a trial's runs, or a study's, scatter more than was expected does so in all its metrics (`Runs.beside`):
  residuals of another metric, each over the variance that was expected of it, count beside a trial's own.
- A trial's own variance is the pooled one moderated by the trial's own residuals (Smyth 2004, "Linear models and
  empirical Bayes methods for assessing differential expression in microarray experiments", section 3). The weight of
  the pooled variance, in degrees of freedom, is estimated from how differently trials scatter (section 6.2).

Given the variances, a and b have Gaussian priors and the rest is a linear regression (Bayesian Data Analysis, section
14.8). A node set without a run that ties it to the others keeps its prior: its trials are compared with that width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from wattune.arrays import Floats, Indices

_Numbers = TypeVar("_Numbers", float, Floats)

NODE_SET_SPREAD: Final = 0.05
"""Prior standard deviation of one node set against another, on the logarithmic scale. Our choice, beside the 8 %
that GPUs of one kind differ by on average (Sinha et al., SC 2022)."""

MOST_LOG: Final = 700.0
"""Largest exponent that a float holds, rounded down."""

_ROUNDS: Final = 4
"""Rounds between variances and effects; the third changes the variance by less than 0.1 %."""

_LEAST_ALIKE: Final = 3.0
"""Fewest degrees of freedom that the pooled variance is worth for one trial, however differently trials scatter. One
trial without any residual, of a rounded sensor, would else leave single runs without an interval. Our choice."""

_LEAST_SHARE: Final = 1e-3
"""A trial's own variance below this share of the pooled one counts as that share: its logarithm would outweigh all."""

_LEAST_TYPICAL: Final = 3
"""Fewest repeated trials of which one can be told from the others. Our choice."""

_SIMILAR_TRIALS: Final = 4.0
"""Trials that a prior's `similar_degrees` count as. Our choice."""


def factor(log_change: float) -> float:
    """Returns the factor of a change on the logarithmic scale: at most e to 700, where floats end.

    An interval that reaches further says that nothing is known, and is no reason to stop.
    """
    return math.exp(min(log_change, MOST_LOG))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Run-to-run scatter as it is expected before a study: a scaled inverse chi-square on the variance."""

    spread: float = 0.01
    """Standard deviation of one run, as a fraction of the value. Our choice."""
    degrees_of_freedom: float = 6.0
    """Number of observations the prior is worth."""
    similar_degrees: float = 24.0
    """Trials of a study scatter alike: their variances differ as a chi-square of so many degrees of freedom does. Our
    choice; `benchmarks/results/coverage.md` shows the coverage that follows."""
    drift: float = 0.03
    """Standard deviation of the machine's drift from the first to the last run of a study, as a fraction. Our choice.
    It counts inside a study: for verdicts, ranks and the race."""
    elsewhere: float = 0.02
    """Standard deviation of a plan on one day and device against others of the kind, as a fraction. Our choice. It
    counts between studies, and for a run outside of the study; no run of the study shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """All runs of one metric in one study, as columns of equal length."""

    value: Floats
    trial: Indices
    """Number of each run's trial, from 0 without gaps."""
    node_set: Indices
    """Number of each run's node set, from 0 without gaps."""
    time_s: Floats
    within: Floats
    """Standard error of each run's own mean as a fraction of it (in the metric's unit on its own scale); 0 where it
    is unknown."""
    wider: Floats | None = None
    """Standard deviation that each run is expected to have beyond the prior's, on the model's scale, alike in all runs
    of a trial; 0 or None where nothing widens it."""
    typical: float | None = None
    """Size that a prior's fractions are of, in the metric's unit, for a metric on its own scale. None means the
    logarithmic scale, where every fraction is of the value itself."""
    resolution: float = 0.0
    """Step of a sensor that rounds, in the metric's unit: a whole-degree reading has 1."""
    beside: Floats | None = None
    """[2, trials]: squared residuals of another metric of the same runs, over the variance that was expected of one,
    and their degrees of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Scatter of the runs of alike trials, by the prior and all their repeats."""

    ratio: float
    """Variance of one run over the one that was expected before the study."""
    degrees_of_freedom: float
    alike_degrees: float
    """Degrees of freedom that the pooled variance is worth for one trial; see `_alike`."""
    num_repeats: int
    """Runs beyond each trial's first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scatter:
    """The fitted model. Effects are on the model's scale; columns are indexed by trial number."""

    mean: Floats
    """m_i: each trial as it would be on the base node set at the middle of the study."""
    raw_mean: Floats
    """Mean of each trial's runs as they were measured."""
    variance: Floats
    """v_i: variance of one run of each trial."""
    degrees_of_freedom: Floats
    """Degrees of freedom of each v_i."""
    num_runs: Indices
    shared: Floats
    """[trials, effects]: each trial's weight on the shared effects."""
    shared_covariance: Floats
    """[effects, effects]: covariance of node set and drift effects."""
    weight: Floats
    """Sum of precision over each trial's runs."""
    steady: Pool
    """Of trials that nothing widens."""
    widened: Pool
    """Of trials that something widens."""
    is_widened: npt.NDArray[np.bool_]
    pooled_variance: Floats
    """Variance of one run of each trial by its pool alone."""
    squares: Floats
    """Squared residuals of each trial's runs."""
    expected: Floats
    """Variance of one run of each trial that was expected before the study."""
    free: Floats
    """Degrees of freedom of each trial's `squares`."""
    effects: Floats
    """[effects]: drift over the study, then node sets against the base, as `shared` weighs them."""
    drift: float
    """b: change from the first to the last run."""
    drift_error: float
    places: Floats
    """[places, effects]: weights of the effects on runs like those of the study: at its times, on its node sets."""
    place_share: Floats
    """[places]: share of runs there; they sum to 1."""
    node_offset: Floats
    """a_s by node set; 0 for the base."""
    node_offset_error: Floats
    tied: npt.NDArray[np.bool_]
    """By node set: true if a trial that ran on it also ran on a set that is tied to the base."""
    typical: float | None
    """See `Runs.typical`."""
    elsewhere: float
    """`Prior.elsewhere` on the model's scale."""

    spread_frac: float
    """Pooled standard deviation of one run that nothing widens, as a fraction of the value or of `typical`."""

    @cached_property
    def away(self) -> Floats:
        """[trials, places]: change from a trial's runs, as they were measured, to a run there."""
        return np.asarray((self.places @ self.effects)[None, :] - (self.shared @ self.effects)[:, None])

    @cached_property
    def away_variance(self) -> Floats:
        """[trials, places]: its variance by what is unknown of the effects."""
        shared, places, covariance = self.shared, self.places, self.shared_covariance
        at_trials, at_places = ((rows @ covariance * rows).sum(axis=1) for rows in (shared, places))
        return np.asarray(np.maximum(at_trials[:, None] + at_places - 2.0 * shared @ covariance @ places.T, 0.0))

    def pool(self, number: int) -> Pool:
        """Returns the pool of a trial."""
        return self.widened if self.is_widened[number] else self.steady

    @cached_property
    def standard_error(self) -> Floats:
        """Standard error of each `mean`."""
        spread = np.einsum("ij,jk,ik->i", self.shared, self.shared_covariance, self.shared)
        return np.asarray(np.sqrt(1.0 / self.weight + np.maximum(spread, 0.0)))


def fit(runs: Runs, prior: Prior) -> Scatter:
    """Fits the model to all runs of one metric, at least one, and to what is known of scatter beforehand."""
    num_trials, num_sets = int(runs.trial.max()) + 1, int(runs.node_set.max()) + 1
    scale = runs.typical or 1.0
    y = np.log(runs.value) if runs.typical is None else runs.value
    counts = np.bincount(runs.trial, minlength=num_trials)
    base = int(np.bincount(runs.node_set, minlength=num_sets).argmax())
    design, precision = _shared_effects(runs, base, num_sets, np.array([prior.drift, NODE_SET_SPREAD]) * scale)
    floor = runs.within**2 + runs.resolution**2 / 12.0  # a rounded reading has the variance of its step
    wider = np.zeros(num_trials)
    if runs.wider is not None:
        np.maximum.at(wider, runs.trial, runs.wider)
    is_widened = wider > 0
    start = (prior.spread * scale) ** 2 + wider**2
    variance, beside = start.copy(), np.zeros((2, num_trials)) if runs.beside is None else runs.beside
    effects, covariance = np.zeros(design.shape[1]), np.zeros((design.shape[1],) * 2)
    again = np.flatnonzero(counts[runs.trial] > 1)  # a trial's only run tells nothing of what trials share
    trial, low = runs.trial[again], floor[again]
    for _ in range(_ROUNDS):
        weights = 1.0 / np.maximum(variance[trial], low)
        effects, covariance, used = _shared_posterior(y[again], design[again], precision, trial, weights, num_trials)
        left = (y - design @ effects)[again]
        residual = left - _means(left, trial, weights, num_trials)
        squares = _sums(residual**2, trial, num_trials)
        own = np.maximum(counts - 1, 0).astype(np.float64)
        lost = used * own / own.sum() if own.sum() else own  # degrees of freedom that the shared effects took
        free = np.maximum(own - lost, 0.0)
        ratios, known = squares / start + beside[0], free + beside[1]
        steady, widened = (
            _pool(ratios, known, counts, these, prior, logarithmic=runs.typical is None)
            for these in (~is_widened, is_widened)
        )
        pooled = start * np.where(is_widened, widened.ratio, steady.ratio)
        # The pooled variance is not better known than from its own data.
        worth = [min(pool.alike_degrees, pool.degrees_of_freedom) for pool in (steady, widened)]
        shared_degrees = np.where(is_widened, worth[1], worth[0])
        degrees = shared_degrees + known
        variance = (shared_degrees * pooled + ratios * start) / degrees
    weights = 1.0 / np.maximum(variance[runs.trial], floor)
    total = _sums(weights, runs.trial, num_trials)
    shared = np.stack([_sums(weights * column, runs.trial, num_trials) / total for column in design.T], axis=1)
    raw = _sums(weights * y, runs.trial, num_trials) / total
    floors = np.zeros(num_trials)
    np.maximum.at(floors, runs.trial, floor)
    offsets, errors = np.zeros(num_sets), np.zeros(num_sets)
    others = [index for index in range(num_sets) if index != base]
    places, place_share = _places(design, np.bincount(runs.node_set, minlength=num_sets)[[base, *others]])
    offsets[others], errors[others] = effects[1:], np.sqrt(np.diag(covariance)[1:])
    return Scatter(
        mean=raw - shared @ effects,
        raw_mean=raw,
        variance=np.maximum(variance, floors),
        degrees_of_freedom=degrees,
        num_runs=counts,
        shared=shared,
        shared_covariance=covariance,
        weight=total,
        steady=steady,
        widened=widened,
        is_widened=is_widened,
        pooled_variance=pooled,
        squares=squares,
        expected=start,
        free=free,
        spread_frac=prior.spread * math.sqrt(steady.ratio),
        effects=effects,
        drift=float(effects[0]),
        drift_error=math.sqrt(covariance[0, 0]),
        places=places,
        place_share=place_share,
        node_offset=offsets,
        node_offset_error=errors,
        tied=_tied(runs, base, num_sets),
        typical=runs.typical,
        elsewhere=prior.elsewhere * scale,
    )


def learned(prior: Prior, earlier: Sequence[Scatter]) -> Prior:
    """Returns what a prior and the steady trials of earlier studies lead to expect of the next study.

    Scale and likeness are estimated from all trials at once, on the logarithmic scale (Smyth 2004, section 6.2).
    """
    squares = np.concatenate([one.squares[~one.is_widened] for one in earlier]) / prior.spread**2
    free = np.concatenate([one.free[~one.is_widened] for one in earlier])
    found = _pool(squares, free, np.ones(len(free), np.intp), free >= 0.0, prior, logarithmic=True)
    return replace(prior, spread=prior.spread * math.sqrt(found.ratio), similar_degrees=found.alike_degrees)


def _sums(values: Floats, group: Indices, num_groups: int) -> Floats:
    return np.asarray(np.bincount(group, weights=values, minlength=num_groups), np.float64)


def _shared_effects(runs: Runs, base: int, num_sets: int, spreads: Floats) -> tuple[Floats, Floats]:
    """Returns the columns of the effects that trials share, and their prior precision: drift, then node sets.

    `spreads` are the prior standard deviations of the drift and of a node set, on the model's scale.
    """
    span_s = float(np.ptp(runs.time_s))
    middle_s = float(runs.time_s.mean())
    drift = (runs.time_s - middle_s) / span_s if span_s > 0 else np.zeros(len(runs.value))
    others = [(runs.node_set == index).astype(np.float64) for index in range(num_sets) if index != base]
    return np.stack([drift, *others], axis=1), spreads[[0, *[1] * len(others)]] ** -2


def _places(design: Floats, counts: Indices) -> tuple[Floats, Floats]:
    """Returns times and node sets of runs like those of the study, as weights of the effects, and their shares.

    Three times stand for a uniform distribution with the variance of the runs' times (Gauss and Legendre's rule:
    Abramowitz and Stegun 25.4.29). The node sets are those of `counts`, the base first.
    """
    reach = math.sqrt(1.8 * float(design[:, 0].var()))
    times, weights = ([-reach, 0.0, reach], [5 / 18, 8 / 18, 5 / 18]) if reach else ([0.0], [1.0])
    sets = np.eye(len(counts))[:, 1:]
    rows = [[time, *one] for time in times for one in sets]
    return np.array(rows), np.outer(weights, counts / counts.sum()).ravel()


def _means(values: Floats, trial: Indices, weights: Floats, num_trials: int) -> Floats:
    """Returns the weighted mean of its trial's runs for each run."""
    total = np.maximum(_sums(weights, trial, num_trials), 1e-300)
    return np.asarray((_sums(values * weights, trial, num_trials) / total)[trial])


def _shared_posterior(
    y: Floats, design: Floats, precision: Floats, trial: Indices, weights: Floats, num_trials: int
) -> tuple[Floats, Floats, float]:
    """Computes the shared effects with the trials' means integrated out.

    Returns means, covariance, and the degrees of freedom that the data spent on them.
    """

    def inside(column: Floats) -> Floats:
        return column - _means(column, trial, weights, num_trials)

    centred = np.stack([inside(column) for column in design.T], axis=1)
    information = centred.T @ (weights[:, None] * centred)
    covariance: Floats = np.linalg.inv(information + np.diag(precision)).astype(np.float64)
    return covariance @ (centred.T @ (weights * inside(y))), covariance, float(np.trace(covariance @ information))


def _pool(
    squares: Floats, free: Floats, counts: Indices, these: npt.NDArray[np.bool_], prior: Prior, *, logarithmic: bool
) -> Pool:
    """Pools some trials' squared residuals, each over the variance that was expected of its trial.

    Where trials scatter alike, the pooled variance is their mean with the prior's. Where they do not, a mean is that of
    the one that scatters most: the typical variance is taken, whose logarithm is the mean of theirs (Smyth 2004,
    section 6.2), each weighted by how well it is known.
    """
    squares, free = squares[these], free[these]
    degrees = prior.degrees_of_freedom + float(free.sum())
    ratio = (prior.degrees_of_freedom + float(squares.sum())) / degrees
    logs, half = _own_logs(squares, free, ratio)
    alike = _alike(logs, half, prior.similar_degrees)
    return Pool(
        ratio=min(ratio, _typical(logs, half, ratio, alike, prior)) if logarithmic else ratio,
        degrees_of_freedom=degrees,
        alike_degrees=alike,
        num_repeats=int((counts[these] - 1).sum()),
    )


def _own_logs(squares: Floats, free: Floats, pooled: float) -> tuple[Floats, Floats]:
    """Returns the logarithms of repeated trials' own variances, without their bias, and half their degrees of freedom.

    They scatter by trigamma(d/2) where trials scatter alike (Smyth 2004, section 6.2).
    """
    known = free >= 0.5
    half = free[known] / 2.0
    own = np.maximum(squares[known] / free[known], _LEAST_SHARE * pooled)
    return np.log(own) - _digamma(half) + np.log(half), half


def _typical(logs: Floats, half: Floats, pooled: float, alike: float, prior: Prior) -> float:
    """Computes the variance that is typical of trials which scatter by different ones, over the expected variance."""
    if len(logs) < _LEAST_TYPICAL:
        return pooled
    own = alike / 2.0
    logs = logs + (float(_digamma(np.array([own]))[0]) - math.log(own))
    weights = 1.0 / (_trigamma(half) + _trigamma(own))
    total = float(weights.sum()) + 1.0 / _trigamma(prior.degrees_of_freedom / 2.0)
    return math.exp(float((weights * logs).sum()) / total)


def _alike(logs: Floats, half: Floats, similar_degrees: float) -> float:
    """Estimates how alike trials scatter: the degrees of freedom that the pooled variance is worth for one trial.

    What the logarithms of their variances scatter beyond trigamma(d/2) is trigamma(d0/2) (Smyth 2004, section 6.2). The
    prior counts as `_SIMILAR_TRIALS` trials.
    """
    others = max(len(logs) - 1, 0)
    excess = max(float(logs.var(ddof=1) - _trigamma(half).mean()), 0.0) if others else 0.0
    wanted = (_SIMILAR_TRIALS * _trigamma(similar_degrees / 2.0) + others * excess) / (_SIMILAR_TRIALS + others)
    return max(2.0 * _inverse_trigamma(wanted), _LEAST_ALIKE)


@lru_cache(maxsize=1024)
def _inverse_trigamma(wanted: float) -> float:
    """Finds where trigamma has a value. It falls everywhere; studies with few repeats ask for the same ones."""
    low, high = 1e-3, 1e6
    while low < (middle := math.sqrt(low * high)) < high:
        low, high = (middle, high) if _trigamma(middle) > wanted else (low, middle)
    return low


def _digamma(x: Floats) -> Floats:
    """Digamma of positive numbers: recurrence and asymptotic series (Abramowitz and Stegun 6.3.5, 6.3.18)."""
    shift = sum(1.0 / (x + step) for step in range(6))
    far = x + 6.0
    series = 1 / (12 * far**2) - 1 / (120 * far**4) + 1 / (252 * far**6)
    return np.log(far) - 1 / (2 * far) - series - shift


def _trigamma(x: _Numbers) -> _Numbers:
    """Trigamma of positive numbers: recurrence and asymptotic series (Abramowitz and Stegun 6.4.6, 6.4.12)."""
    shift = sum(1.0 / (x + step) ** 2 for step in range(6))
    far = x + 6.0
    series = 1 / far + 1 / (2 * far**2) + 1 / (6 * far**3) - 1 / (30 * far**5) + 1 / (42 * far**7)
    return series + shift


def _tied(runs: Runs, base: int, num_sets: int) -> npt.NDArray[np.bool_]:
    """Finds the node sets that a chain of trials connects to the base."""
    tied = np.zeros(num_sets, bool)
    tied[base] = True
    reached, before = np.zeros(int(runs.trial.max()) + 1, bool), 0
    while before < int(tied.sum()):
        before = int(tied.sum())
        reached[runs.trial[tied[runs.node_set]]] = True
        tied[runs.node_set[reached[runs.trial]]] = True
    return tied

"""Order of trials by the differences between them: the probability to be the best, and which ones are told apart.

Figures of one study share their drift and node offsets, so a difference of two trials is surer than their intervals
suggest. What trials may truly be is drawn together, with a fixed seed. `P(best)` is the share of draws in which a trial
leads.

A trial is told to be better than another by multiple comparisons with the best (Hsu 1981, "Simultaneous confidence
intervals for all distances from the best", Annals of Statistics 9; Hsu 1996, Multiple Comparisons, chapter 4). Each
trial is the control of one-sided comparisons with all others at once. So the truly best one is told to be worse than
another with a probability of at most 5 %, however many trials there are. A rank is 1 plus the trials told to be better.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from wattune.arrays import Floats, Indices
from wattune.intervals import CONFIDENCE_FRAC
from wattune.ranking.scatter import Scatter

NUM_DRAWS: Final = 4000
_SEED: Final = 20260301
_MOST_CANDIDATES: Final = 400
"""Most trials that are drawn: those nearest to the leader in standard errors. Others win in no draw."""
_FAR: Final = 8.0
"""Standard errors behind the leader from which a trial is not drawn."""
_ROWS_AT_ONCE: Final = 512
_ALIKENESS: Final = 20
"""Steps between correlations 0 and 1 for which critical values are kept."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Trials of one metric, more is better, on one scale: the logarithmic one if every model has that."""

    mean: Floats
    own: Floats
    """Variance of each mean by the trial's own runs."""
    freedom: Floats
    """Degrees of freedom of that variance."""
    common: Floats
    """[trials, effects]: drift and node offsets, scaled so that each effect has variance 1."""
    shared_freedom: float
    """Degrees of freedom of what is known of scatter by all trials together."""


@dataclass(frozen=True, slots=True)
class Order:
    """The outcome, by trial."""

    rank: Indices
    best_probability: Floats
    regression: float
    """Expected fall of the leader when it runs again, as a fraction of its figure (in the metric's unit on its own
    scale)."""


def standing(parts: Sequence[tuple[Scatter, Indices, Floats]], *, maximize: bool) -> Standing:
    """Puts trials of one or several models on one scale.

    Args:
        parts: The models, with the numbers of their trials that are compared, and those trials' figures.
        maximize: False turns the sign.
    """
    logarithmic = all(found.typical is None for found, _, _ in parts)
    sign = 1.0 if maximize else -1.0
    effects, at = sum(found.shared.shape[1] for found, _, _ in parts), 0
    means, owns, freedoms, commons = [], [], [], []
    for found, numbers, values in parts:
        # A model on the logarithmic scale beside one that is not is taken to its metric's unit.
        size = np.abs(values) if found.typical is None and not logarithmic else np.ones(len(values))
        root = np.linalg.cholesky(found.shared_covariance)
        common = np.zeros((len(numbers), effects))
        common[:, at : at + len(root)] = (found.shared[numbers] @ root) * size[:, None]
        at += len(root)
        means.append(sign * (np.log(values) if logarithmic else values))
        owns.append(size**2 / found.weight[numbers])
        freedoms.append(found.degrees_of_freedom[numbers])
        commons.append(common)
    return Standing(
        mean=np.concatenate(means),
        own=np.concatenate(owns),
        freedom=np.concatenate(freedoms),
        common=np.concatenate(commons),
        shared_freedom=min(found.steady.degrees_of_freedom for found, _, _ in parts),
    )


def order(one: Standing) -> Order:
    """Computes ranks, P(best), and the leader's regression toward the mean.

    The last is the expected error of whichever trial leads, if trials were as measured and all were measured anew: a
    parametric bootstrap (Efron and Tibshirani 1993, An Introduction to the Bootstrap, sections 6.5 and 10.2).
    """
    if len(one.mean) == 1:  # as in the live view, at every event
        return Order(_ranks(one), np.ones(1), 0.0)
    leader = int(one.mean.argmax())
    apart = (one.mean[leader] - one.mean) / np.sqrt(_variance(one, np.array([leader]))[0] + 1e-300)
    near = np.argsort(apart, kind="stable")[:_MOST_CANDIDATES]
    near = near[apart[near] < _FAR]
    rng = np.random.default_rng(_SEED)
    own, shared = drawn_errors(one, near, rng)
    errors = own + shared
    first = (one.mean[near] + errors).argmax(axis=1)
    likely = np.zeros(len(one.mean))
    likely[near] = np.bincount(first, minlength=len(near)) / NUM_DRAWS
    regression = float(errors[np.arange(NUM_DRAWS), first].mean())
    return Order(_ranks(one), likely, max(regression, 0.0))


def drawn_errors(one: Standing, near: Indices, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draws errors of some trials' means together, [draws, trials] each: by their own runs, and by what they share."""
    # What is known of scatter by all trials together is wrong for all of them at once. Where trials scatter
    # differently, each one's own variance is what is uncertain.
    factor = np.sqrt(one.shared_freedom / rng.chisquare(one.shared_freedom, (NUM_DRAWS, 1)))
    by_itself = one.freedom[near] < one.shared_freedom
    factors = np.repeat(factor, len(near), axis=1)
    freedom = one.freedom[near][by_itself]
    factors[:, by_itself] = np.sqrt(freedom / rng.chisquare(freedom, (NUM_DRAWS, len(freedom))))
    own: Floats = rng.standard_normal((NUM_DRAWS, len(near))) * factors * np.sqrt(one.own[near])
    shared: Floats = factor * rng.standard_normal((NUM_DRAWS, one.common.shape[1])) @ one.common[near].T
    return own, shared


def _variance(one: Standing, rows: Indices) -> Floats:
    """Computes the variance of the difference between some trials and all, [rows, trials]. With itself it is 0."""
    found = one.own[rows, None] + one.own[None, :]
    for effect in one.common.T:
        if effect.any():
            found += (effect[rows, None] - effect[None, :]) ** 2
    found[np.arange(len(rows)), rows] = 0.0
    return found


def _ranks(one: Standing) -> Indices:
    """Counts for each trial those that are told to be better than it."""
    by_mean = np.argsort(-one.mean, kind="stable")
    ordered = Standing(
        one.mean[by_mean], one.own[by_mean], one.freedom[by_mean], one.common[by_mean], one.shared_freedom
    )
    typical = float(np.median(one.own))
    ranks = np.ones(len(one.mean), np.intp)
    if len(ranks) == 1:
        return ranks
    for start in range(0, len(by_mean), _ROWS_AT_ONCE):
        rows = np.arange(start, min(start + _ROWS_AT_ONCE, len(by_mean)))
        alike = ordered.own[rows] / (ordered.own[rows] + typical)
        critical = np.array(
            [
                critical_value(len(by_mean) - 1, int(_ALIKENESS * share), max(3, min(int(freedom), 60)))
                for share, freedom in zip(alike, ordered.freedom[rows], strict=True)
            ]
        )
        better = slice(0, int(rows[-1]) + 1)  # only those before it have a larger mean
        ahead = Standing(
            ordered.mean[better], ordered.own[better], ordered.freedom[better], ordered.common[better], 1.0
        )
        gaps = ahead.mean[None, :] - ordered.mean[rows, None]
        told = (gaps > 0) & (gaps**2 > critical[:, None] ** 2 * _variance(ahead, rows))
        ranks[by_mean[rows]] += told.sum(axis=1)
    return ranks


@lru_cache(maxsize=4096)
def critical_value(num_others: int, alikeness: int, degrees_of_freedom: int) -> float:
    """Returns the critical value of Dunnett's one-sided comparisons of one trial with others (Dunnett 1955).

    Comparisons with one trial share its error, so they correlate by its share in their variance. The largest of n
    independent normal draws is drawn in one step, as the normal quantile of U to the power 1/n.

    Args:
        num_others: Number of comparisons.
        alikeness: Correlation of two comparisons in twentieths, rounded down: the value then is on the safe side.
        degrees_of_freedom: Of the variance.
    """
    correlation = alikeness / _ALIKENESS
    largest, own, factor = _dice(num_others, degrees_of_freedom)
    statistics = factor * (math.sqrt(1.0 - correlation) * largest + math.sqrt(correlation) * own)
    return float(np.quantile(statistics, CONFIDENCE_FRAC))


@lru_cache(maxsize=64)
def _dice(num_others: int, degrees_of_freedom: int) -> tuple[Floats, Floats, Floats]:
    """Draws the largest of so many normal numbers, one of its own, and the error of a standard deviation."""
    rng, num = np.random.default_rng(_SEED), 20_000
    largest = _normal_quantile(rng.random(num), num_others)
    factor = np.sqrt(degrees_of_freedom / rng.chisquare(degrees_of_freedom, num))
    return largest, rng.standard_normal(num), factor


def _normal_quantile(uniform: Floats, power: int) -> Floats:
    """Computes the normal quantile of `uniform` to the power 1/`power`, from a table of the tail."""
    above = -np.expm1(np.log(uniform) / power)  # 1 - U**(1/n), exact where that is close to 0
    grid = np.linspace(-8.0, 9.0, 3401)
    tail = np.array([0.5 * math.erfc(x / math.sqrt(2.0)) for x in grid])
    found: Floats = np.interp(np.log(above), np.log(tail[::-1]), grid[::-1])
    return found

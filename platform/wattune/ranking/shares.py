"""Shares of time that are often 0: what the next run of a plan measures, by a model that knows that 0 is censored.

A share is y = max(0, z), with z normal about the plan's own level m (Tobin 1958, "Estimation of relationships for
limited dependent variables", Econometrica 26). A run that measured 0 tells that z was at most 0. The levels of plans
tell nothing of one another, and neither does their scatter: it is the prior's, for each plan. So P(share <= bound)
falls in every figure that was measured: the likelihood of each run has a monotone ratio in m, whatever the scatter.

A plan that scatters more than the prior says is judged without it: of n runs that are alike, of which k are clearly
within a bound and l clearly past it, the next one keeps it with at least k / (n + 1) and at most 1 - l / (n + 1)
(exchangeability: Vovk, Gammerman and Shafer 2005, Algorithmic Learning in a Random World, section 2.2).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, fmean
from typing import Final

import numpy as np

from wattune.analysis.metrics.step_breakdown import HOST_BOUND_FRAC
from wattune.arrays import Floats
from wattune.metrics import METRICS
from wattune.run import Run

_SCATTER: Final = 0.02, 4.0
"""Scale and degrees of freedom of the scatter from run to run: `throttle_power_frac` between repeats of 43 plans on
H100 and H200 that do not wait for their host has a root mean square of 0.028 and a median of 0.019."""

_AT_ZERO: Final = 0.016, 8.0
"""The same of a plan whose runs all were 0. Its device is away from its limit, and by how much is not known: repeats of
four such plans were 0. Our choice."""

_HOST_SPREAD: Final = 0.11
"""Standard deviation that is added where devices wait for their host, as repeats of seven such plans have it. It is
reached where a plan counts as waiting, and in proportion below: on one H200 `throttle_power_frac` of another day
differs by 0.06 a study where plans wait for 0.03 to 0.05 of a step, and by 0.10 beyond (16 pairs)."""

_OF_LOSSES: Final = 0.21
"""Scatter of what throttling loses over that of its time, of the same plans: a root mean square of 0.006."""

_BELOW: Final = 0.1
"""Standard deviation of levels below 0, as what they say of 0: every level above is as likely as the others. Plans of
one study throttle for 0 to 0.9 of the time, so levels are tenths apart. Our choice."""

_CLEARLY: Final = 1.645
"""Standard deviations of a run from a bound from which its scatter does not explain the side it is on, at 95 %."""

_GROUPS: Final = ("throttle", "step_breakdown")
_OTHERS: Final = ("excursion_time_frac", "over_limit_20ms_time_frac")

_NORMAL: Final = NormalDist()
_REACH: Final = 8.0
_TAIL: Final = 6.0
_TABLE_X: Final = np.linspace(-_REACH, _REACH, 4001)
_TABLE: Final = np.array([_NORMAL.cdf(x) for x in _TABLE_X])
_LEVEL: Final = np.arange(-0.5, 1.5, 0.002)
_PRIOR_LOG: Final = -0.5 * (np.minimum(_LEVEL, 0.0) / _BELOW) ** 2
_NUM_SCATTERS: Final = 12


def is_share(metric: str) -> bool:
    """Tells whether a metric is a share of time that is often 0."""
    described = METRICS[metric]
    return metric in _OTHERS or (described.group in _GROUPS and metric.endswith("_frac"))


def size_of(metric: str) -> float:
    """Returns by how much a share scatters, over the time that plans throttle for."""
    return _OF_LOSSES if metric.endswith("_loss_frac") else 1.0


def waiting_share(counted: Sequence[Run]) -> float:
    """Returns by how much waits for the host scatter a trial's shares of time: 0 not at all, 1 in full.

    Any wait lets a device rest from throttling, long before the host sets the pace of the step.
    """
    fracs = [run.metrics.get("host_bound_frac", math.nan) for run in counted]
    known = [frac for frac in fracs if math.isfinite(frac)]
    return min(math.fsum(known) / max(len(known), 1) / HOST_BOUND_FRAC, 1.0)


def keeps_probability(
    values: Sequence[float], bound: float, *, below: bool, waiting: float, size: float = 1.0
) -> float:
    """Computes the probability that the next run of a plan keeps a bound on a share, by what its runs measured.

    `below` is true for an upper bound. `waiting` says how much waits for its host scatter it: 0 not at all, 1 in full.
    `size` is that of the metric (`size_of`).
    """
    return _keeps(tuple(sorted(values)), bound, below, waiting, size)


@lru_cache(maxsize=4096)
def _keeps(values: tuple[float, ...], bound: float, below: bool, waiting: float, size: float) -> float:
    """Computes it once for equal runs: most plans measured nothing but 0."""
    if bound < 0.0 or bound >= 1.0:
        at_most = float(bound >= 1.0)
    else:
        scatter, weight, _ = _posterior(values, waiting, size)
        inside = normal_cumulative((bound - _LEVEL[None, :]) / scatter[:, None])
        at_most = float((weight * inside).sum(axis=1).mean())
        num_kept, num_past = _clear(values, bound, waiting, size)
        most = len(values) + 1
        at_most = min(max(at_most, num_kept / most), 1.0 - num_past / most)
    return at_most if below else float(bound <= 0.0) or 1.0 - at_most


def settles_probability(
    values: Sequence[float], *, bound: float, below: bool, waiting: float, risk: float, size: float = 1.0
) -> float:
    """Computes the probability that repeats without end would show that the next run keeps a bound at the risk.

    The rest is as in `keeps_probability`. `risk` is the accepted probability that the next run breaks the bound.
    """
    return _settles(tuple(sorted(values)), bound, below, waiting, risk, size)


@lru_cache(maxsize=4096)
def _settles(values: tuple[float, ...], bound: float, below: bool, waiting: float, risk: float, size: float) -> float:
    """Computes it once for equal runs."""
    if bound < 0.0 or bound >= 1.0 or (not below and bound <= 0.0):
        return float((bound >= 1.0) is below or (not below and bound <= 0.0))
    scatter, _, cumulatives = _posterior(values, waiting, size)
    room = _NORMAL.inv_cdf(1.0 - risk) * scatter
    ends = bound - room if below else bound + room
    at_most = fmean([float(np.interp(end, _LEVEL, each)) for end, each in zip(ends, cumulatives, strict=True)])
    num_kept, num_past = _clear(values, bound, waiting, size)
    against = (num_past if below else num_kept) / (len(values) + 1)
    return (at_most if below else 1.0 - at_most) * (1.0 - against)


def _clear(values: Sequence[float], bound: float, waiting: float, size: float) -> tuple[int, int]:
    """Counts the runs that are clearly within an upper bound, and clearly past it."""
    reach = _CLEARLY * size * math.hypot(_SCATTER[0], _HOST_SPREAD * waiting)
    return sum(value < bound - reach for value in values), sum(value > bound + reach for value in values)


@lru_cache(maxsize=4096)
def _posterior(values: tuple[float, ...], waiting: float, size: float) -> tuple[Floats, Floats, Floats]:
    """Returns equally likely scatters, and the weights of levels `_LEVEL` for each with their sums: [scatters, levels].

    The scatters are middle quantiles of their prior, and the runs do not weigh them: that would let one figure that
    falls widen the scatter, and P fall with it. Quantiles of chi-square are Wilson and Hilferty's (1931).
    """
    normal = np.array([_NORMAL.inv_cdf((number + 0.5) / _NUM_SCATTERS) for number in range(_NUM_SCATTERS)])
    spread, degrees = _SCATTER if any(values) else _AT_ZERO
    part = 2.0 / (9.0 * degrees)
    scatter = size * math.hypot(spread, _HOST_SPREAD * waiting) * (1.0 - part + normal * math.sqrt(part)) ** -1.5
    logs = np.tile(_PRIOR_LOG, (len(scatter), 1))
    at_zero = _log_cumulative(-_LEVEL[None, :] / scatter[:, None]) if min(values, default=1.0) <= 0.0 else logs
    for value in values:
        logs += -0.5 * ((min(value, 1.0) - _LEVEL[None, :]) / scatter[:, None]) ** 2 if value > 0.0 else at_zero
    weight: Floats = np.exp(logs - logs.max(axis=1, keepdims=True))
    weight /= weight.sum(axis=1, keepdims=True)
    return scatter, weight, np.cumsum(weight, axis=1)


def _log_cumulative(x: Floats) -> Floats:
    """Computes the logarithm of the normal distribution, from its asymptotic series where it is small.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.12.
    """
    far = np.minimum(x, -_TAIL)
    tail = -0.5 * far**2 - np.log(-far * math.sqrt(2.0 * math.pi)) + np.log1p(-(far**-2) + 3.0 * far**-4)
    return np.where(x < -_TAIL, tail, np.log(normal_cumulative(np.maximum(x, -_TAIL))))


def normal_cumulative(x: Floats) -> Floats:
    """Computes the normal distribution from a table; it ends at 8 standard deviations."""
    found: Floats = np.interp(x, _TABLE_X, _TABLE)
    return found

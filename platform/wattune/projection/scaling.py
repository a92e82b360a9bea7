"""A step at another number of devices: a Bayesian fit of few terms, whose priors come from estimates and publications.

step = r (work (1 + s x) + k fixed) exp(g log2(N / N_0))

`work` (passes, their communication, the bubble) and `fixed` (what happens once a step) are estimates; x is how far the
slowest group of experts is behind. Residual r, share k, spread s and growth g are learned as far as measured steps tell
them. The error is that of the normal distribution about the most likely fit (MacKay 2003, chapter 27).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, log2, nan, sqrt
from statistics import NormalDist
from typing import Final

import numpy as np

from wattune.arrays import Floats
from wattune.intervals import Interval

CONFIDENCE_FRAC: Final = 0.9
"""Share of projections whose interval is to hold what is measured later."""

REACH: Final = 3.5
"""Deviations to the end of such an interval. Like growth and noise it was chosen on 54 families of published runs at 8
to 4,096 devices. This one alone was checked with each family left out (`benchmarks/results/projection.md`)."""

NOISE_LOG_STD: Final = 0.0065
"""Deviation of log(step) of a published run from its own curve, where nothing says more."""

FIXED_LOG_STD: Final = 0.7
"""Of log k, about 0: estimates of what happens once a step are off by a factor of two."""

GROWTH: Final = (0.006, 0.008)
"""Middle and deviation of g, log(step) by doubling of the devices: waiting for the slowest, and longer rings."""

SPREAD: Final = (0.1, 0.1)
"""The same of s, the deviation of a micro-batch's time over its mean where a router chooses experts; assumed."""


@dataclass(frozen=True, slots=True)
class SizedStep:
    """Estimate of a step at one number of devices, and its measurement if there is one."""

    num_devices: int
    work_s: float
    """The part that grows with the micro-batches, pipeline bubble included; in any unit that all sizes share."""
    fixed_s: float
    """The part that happens once a step, in that unit."""
    behind: float = 0.0
    step_time_s: float = nan
    log_std: float = NOISE_LOG_STD
    """Deviation of log(measured step)."""


def slowest_of(number: float) -> float:
    """Returns the expected largest of so many normal draws, in deviations above their mean (Blom 1958)."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25)) if number > 1 else 0.0


def behind(num_groups: float, num_micro_batches: float) -> float:
    """Returns how far the slowest sum of independent micro-batches is behind, by the deviation of one over its mean."""
    return slowest_of(num_groups) / sqrt(max(num_micro_batches, 1.0))


def waiting(straggler_frac: float, measured: int, target: int) -> float:
    """Returns log(step) by doubling of devices of which the slowest is waited for.

    A step waits for the slowest one's effect, drawn once, and noise, drawn each step, against the mean of those
    measured. Common causes, such as a cap, are in that mean and grow with nothing.
    """
    if target <= measured or measured < 2:
        return 0.0
    return log(1 + straggler_frac * (slowest_of(target) / slowest_of(measured) - 1)) / log2(target / measured)


def at_size(measured: Sequence[SizedStep], target: SizedStep, *, straggler_frac: float = 0.0) -> Interval:
    """Projects measured steps, at least one, to another size; seconds, with an interval of `CONFIDENCE_FRAC`.

    `straggler_frac` is the share of the largest measured step that waits for its slowest rank. It stands for the
    scatter of devices where they scatter more than those of publications.
    """
    steps = [*measured, target]
    work, fixed, late = (np.array([getattr(one, name) for one in steps]) for name in ("work_s", "fixed_s", "behind"))
    nearest = max(one.num_devices for one in measured)
    doublings = np.log2([one.num_devices / nearest for one in steps])
    seen, error = np.log([one.step_time_s for one in measured]), np.array([one.log_std for one in measured])
    spread = SPREAD if (late > 0).any() else (0.0, 1e-6)
    growth = max(GROWTH[0], waiting(straggler_frac, nearest, target.num_devices))
    means = np.array([np.median(seen - np.log(work + fixed)[:-1]), 0.0, growth, spread[0]])
    deviations = np.array([1.0, FIXED_LOG_STD, GROWTH[1], spread[1]])

    def log_steps(term: Floats) -> Floats:
        parts = work * (1 + abs(term[3]) * late) + np.exp(term[1]) * fixed
        return np.asarray(term[0] + np.log(parts) + term[2] * doublings)

    def misses(term: Floats) -> Floats:
        return np.concatenate([(seen - log_steps(term)[:-1]) / error, (term - means) / deviations])

    from scipy.optimize import least_squares  # takes 0.3 s

    fit = least_squares(misses, means)
    slope = np.array([log_steps(fit.x + one)[-1] - log_steps(fit.x - one)[-1] for one in 5e-6 * np.eye(4)]) / 1e-5
    reach = REACH * sqrt(slope @ np.linalg.inv(fit.jac.T @ fit.jac) @ slope + NOISE_LOG_STD**2)
    return of_log(float(log_steps(fit.x)[-1]), reach, len(measured))


def of_log(value: float, reach: float, num_runs: int = 1) -> Interval:
    """Returns the interval of a figure by its logarithm and half of that one's interval."""
    ends = {name: exp(value + sign * reach) for name, sign in (("low", -1), ("value", 0), ("high", 1))}
    return Interval(**ends, method="projected", num_runs=num_runs, confidence_frac=CONFIDENCE_FRAC)

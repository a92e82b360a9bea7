"""Predictions as columns: one entry a candidate, in the order of its batch. Units are in every name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import erf, sqrt
from typing import Final

import numpy as np

from wattune.arrays import AnyFloats, Bools, Floats, Ints
from wattune.intervals import NORMAL_95

FULL_MEMORY_FRAC: Final = 0.8
FULL_MEMORY_LONGER_FRAC: Final = 1.4
"""Share of a device's memory from which a step may wait for it, and how much longer it may be: torch's allocator gives
blocks back and asks anew. Of 34 runs on H100 and H200 with such peaks 13 took 1.1 to 1.46 times the predicted step, of
168 others 3. With expandable segments, as workers have them, six of ten took 1.35 to 2.4 times, giving it back twice
a step, and four the predicted step (`benchmarks/results/allocator.md`). Engines may have a share of their own
(`EngineFacts.full_memory_frac`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedMetric:
    """A predicted metric of every candidate with its 95 % interval; NaN where a candidate has no prediction."""

    value: Floats
    low: AnyFloats
    high: AnyFloats

    @classmethod
    def within(cls, value: Floats, error_frac: Floats) -> "EstimatedMetric":
        """Makes that of values whose 95 % interval has this half width, relative; none is below 0."""
        return cls(value=value, low=value * np.maximum(1.0 - error_frac, 0.0), high=value * (1.0 + error_frac))

    @classmethod
    def of(cls, value: Floats, log_std: Floats | float) -> "EstimatedMetric":
        """Makes the belief of values whose log(measured / predicted) has a standard deviation."""
        return cls(value=value, low=value * np.exp(-NORMAL_95 * log_std), high=value * np.exp(NORMAL_95 * log_std))

    @property
    def log_std(self) -> Floats:
        """Standard deviation of log(measured / predicted)."""
        low = np.maximum(self.low, 1e-3 * np.abs(self.value) + 1e-300)
        return np.log(np.maximum(self.high, low) / low) / (2 * NORMAL_95)

    def below(self, most: Floats) -> "EstimatedMetric":
        """Returns it with no high end above a bound, unless its value is."""
        return replace(self, high=np.minimum(self.high, np.maximum(self.value, most)))

    def at(self, positions: Ints) -> "EstimatedMetric":
        """Returns the candidates at these positions, in that order."""
        return EstimatedMetric(value=self.value[positions], low=self.low[positions], high=self.high[positions])

    def under(self, total: float) -> "EstimatedMetric":
        """Returns a total over it, such as tokens over seconds; the low end is no less than a thousandth."""
        return EstimatedMetric(
            value=total / self.value, low=total / self.high, high=total / np.maximum(self.low, 1e-3 * self.value)
        )

    def probability_above(self, bound: Floats | float) -> Floats:
        """Computes the probability that a measurement is above a bound, with normally distributed errors."""
        spread = np.maximum((self.high - self.low) / (2 * NORMAL_95), 1e-9 * np.abs(self.value) + 1e-300)
        probability: Floats = 0.5 * (1.0 + _erf((self.value - bound) / (sqrt(2.0) * spread)))
        return probability


_erf = np.vectorize(erf, otypes=[np.float64])


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peak memory of the fullest rank."""

    parts_bytes: Mapping[str, Floats]
    """Bytes of each part on that rank, such as `weights gradients optimizer activations logits gathered buffers
    allocator`. They add up to the peak."""
    stage: Floats
    """Pipeline stage of that rank."""
    error_frac: Floats
    """Half width of the 95 % interval of the peak, relative."""

    @property
    def peak_bytes(self) -> Floats:
        """Peak of allocated bytes, what `memory_peak_bytes` measures."""
        return _sum(self.parts_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Seconds of a step that a rank of each stage spends so, [candidates, most stages]; they add up to the step."""

    matrix_s: Floats
    """In matrix products and attention, at the clock that the power limit leaves."""
    memory_s: Floats
    """In kernels that memory bandwidth bounds."""
    collective_s: Floats
    """In communication that nothing hides."""
    idle_s: Floats
    """Waiting: pipeline bubble, launch gaps, the slowest rank."""
    overlapped_s: Floats
    """Of the seconds in `matrix_s` and `memory_s`, those beside communication."""
    matrix_frac: Floats
    """Achieved over peak matrix rate while in `matrix_s`, at the highest clock."""
    clock_frac: Floats
    """Clock over the highest clock, mean over the seconds of compute, the optimizer's included: 1 where the power limit
    does not bind."""
    held_frac: Floats
    """Of that clock, what a limit below the device's own and a lock leave: 1 where there is neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Time of a step, and where it goes."""

    parts_s: Mapping[str, Floats]
    """Seconds of each part on the average rank. Names are those of the measured decomposition with `_s` for `_frac`:
    `compute_s bubble_s exposed_comm_tp_s exposed_comm_pp_s exposed_comm_cp_s exposed_comm_dp_s exposed_comm_ep_s
    straggler_s other_s`. They add up to the step."""
    activity: Activity
    error_frac: Floats
    """Step time less the low end of its 95 % interval, relative."""
    longer_frac: Floats
    """High end less the step time, relative: further away where a slower host would make the step longer."""
    fills_memory: Bools | bool = False
    """True where the device may wait for memory: its waits are not predicted, its interval holds them."""

    @property
    def half_width_frac(self) -> Floats:
        """Half width of the 95 % interval of the step time, relative."""
        return (self.error_frac + self.longer_frac) / 2

    @property
    def step_time_s(self) -> Floats:
        """Time of a step."""
        return _sum(self.parts_s)


def _sum(parts: Mapping[str, Floats]) -> Floats:
    total: Floats = np.sum(list(parts.values()), axis=0)
    return total

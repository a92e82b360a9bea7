"""Probability that a trial runs out of memory: its estimate against what its device leaves to a program.

Once one did, what its study's trials held corrects that of the others (`MemoryRisk`).
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Final

import numpy as np

from wattune.arrays import Floats
from wattune.catalog.hardware import DeviceSpec
from wattune.cost.estimate import Estimates
from wattune.run import Run, RunStatus
from wattune.trial import TrialSpec
from wattune.units import BYTES_PER_GIB

CERTAIN: Final = 0.95
"""Probability of running out of memory above which a trial is not started."""

LIKELY: Final = 0.5
"""Probability of running out of memory from which a trial runs after the others."""

UNLIKELY: Final = 0.05
"""Most probability of running out of memory of a trial that others are compared with."""

_BOARD_BYTES_PER_BYTE: Final = BYTES_PER_GIB / 1e9
"""Memory that a driver finds over that of the catalog, at most: a datasheet's GB may be 2^30 bytes. NVML finds 143,771
MiB on an H200 of 141 GB."""

_TAKEN_BYTES: Final = 2.4 * BYTES_PER_GIB
"""Memory that driver, context and NCCL take beside PyTorch's allocator. By messages of trials that ran out of memory on
two H100 of 80 GB, 82.3 to 83.3 GB are within a program's reach (`benchmarks/data/moe_ep_h100x2.parquet`)."""

_SCALE: Final = 0.5
"""Scale of the error, as a share of the standard deviation that the printed interval has. The interval of ±6 % holds
97 % of 102 trials that no fit saw. Half of these err by less than 0.5 %, and 95 % by less than 4.3 %: a t distribution
of four degrees of freedom and a scale of 1.5 % has its 95 % there (2.78 scales)."""

_LOST_STD: Final = 0.05
"""Standard deviation, before any trial ran, of the share of a device's memory that a family of trials cannot use beyond
what is known, mostly to fragmentation. Of six trials that ran out of memory on two H100, three failed at 2 to 9 % less
than the device leaves."""

_PLAN_SCALE: Final = 0.01
"""Scale of the differences between plans of a family in that share: with it, plans that ran at 76.4 GB and one that
did not get 75.0 GB agree."""

_LOST: Final = np.linspace(-0.1, 0.3, 161)
"""Shares of memory lost that are weighed against each other, as logarithms."""


def usable_bytes(device: DeviceSpec) -> float:
    """Returns the bytes of a device that a program's tensors can have; infinite where its memory is not known."""
    known = device.memory_bytes
    return math.inf if known is None else max(0.0, known * _BOARD_BYTES_PER_BYTE - _TAKEN_BYTES)


def out_of_memory_probability(specs: Sequence[TrialSpec], found: Estimates) -> Floats:
    """Computes the probability that each trial needs more memory than its device leaves it.

    Fragmentation of the allocator comes on top: of six trials that ran out of memory on two H100, three are below 0.5
    here, and one of these would have fitted but for what was reserved and free. Weights that are more than the device's
    datasheet has are certain not to fit, though a driver may find a little more.
    """
    peak = found.columns["memory_peak_bytes"]
    usable = np.array([usable_bytes(spec.cluster.sensed_device) for spec in specs], np.float64)
    behind = (np.log(peak.value) - np.log(usable)) / (_SCALE * peak.log_std)
    stated = np.array([spec.cluster.sensed_device.memory_bytes or math.inf for spec in specs], np.float64)
    return np.where(found.memory_parts_bytes.get("weights", 0.0) > stated, 1.0, _t4_cumulative(behind))


def _t4_cumulative(value: Floats) -> Floats:
    """Computes P(T <= value) of Student's t of four degrees of freedom: Abramowitz and Stegun, 26.7.4."""
    sine = np.sin(np.arctan(value / 2.0))
    return np.asarray(0.5 + sine * (3.0 - sine**2) / 4.0)


class MemoryRisk:
    """Probability that each trial of a study runs out of memory, by its estimate and by what the study's trials held.

    Before the first trial of a family runs out of memory it is the estimate's alone. From then on the share of memory
    that the family cannot use is learned: each trial of it that failed needed more than was left, and each that ran did
    not. A family is an engine, a model and a device.
    """

    def __init__(self, specs: Sequence[TrialSpec], found: Estimates | None) -> None:
        """Takes all candidates with their estimates; without estimates every probability is 0."""
        self._specs = () if found is None else specs
        self.estimated: Floats = np.zeros(0)
        """By the estimates alone, in the order of the candidates; empty without any."""
        if found is not None:
            self.estimated = out_of_memory_probability(specs, found)
            peak = found.columns["memory_peak_bytes"]
            self._need, self._scale = np.log(peak.value), np.hypot(_SCALE * peak.log_std, _PLAN_SCALE)
        prior = np.exp(-0.5 * (_LOST / _LOST_STD) ** 2)
        self._weights: dict[Hashable, Floats] = defaultdict(lambda: prior)
        self._failed: set[Hashable] = set()
        self._ran: set[TrialSpec] = set()

    @cached_property
    def _places(self) -> dict[TrialSpec, int]:
        return {spec: place for place, spec in enumerate(self._specs)}

    def __call__(self, spec: TrialSpec) -> float:
        """Returns the probability of a trial; 0 for one without an estimate, and for one that ran already."""
        place, family = self._places.get(spec), _family(spec)
        if place is None or spec in self._ran:
            return 0.0
        if family not in self._failed:
            return float(self.estimated[place])
        behind = self._need[place] - _log_usable(spec)
        return float(np.sum(self._weights[family] * _t4_cumulative((behind + _LOST) / self._scale[place])))

    def learned(self, spec: TrialSpec) -> bool:
        """Returns whether trials of this one's family that ran out of memory count in its probability."""
        return _family(spec) in self._failed

    def note(self, spec: TrialSpec, result: Run) -> bool:
        """Takes a result; returns whether it changed the probability of other trials.

        A trial that ran tells its peak, and one that ran out of memory what it had and asked for
        (`Numbers.memory_asked_bytes`). Where it does not, what it needed is its estimate.
        """
        failed, place, family = result.status is RunStatus.OUT_OF_MEMORY, self._places.get(spec), _family(spec)
        held_bytes = result.numbers.memory_asked_bytes if failed else result.metrics.get("memory_peak_bytes")
        if result.status is RunStatus.COMPLETED:
            self._ran.add(spec)
        elif not failed:
            return False
        if place is None or math.isinf(_log_usable(spec)) or not (held_bytes or failed):
            return False
        need = math.log(held_bytes) if held_bytes else float(self._need[place])
        scale = _PLAN_SCALE if held_bytes else float(self._scale[place])
        exceeds = _t4_cumulative((need - _log_usable(spec) + _LOST) / scale)
        weights = self._weights[family] * (exceeds if failed else 1.0 - exceeds)
        self._weights[family] = weights / np.sum(weights)  # else many results that disagree make each of them 0
        if failed:
            self._failed.add(family)
        return family in self._failed


def _family(spec: TrialSpec) -> Hashable:
    return spec.engine, spec.model, spec.cluster.sensed_device.name


def _log_usable(spec: TrialSpec) -> float:
    return math.log(usable_bytes(spec.cluster.sensed_device))

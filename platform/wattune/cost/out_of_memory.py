"""Probability that a trial runs out of memory: its estimate against what its device leaves to a program."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from wattune.arrays import Floats
from wattune.catalog.hardware import DeviceSpec
from wattune.cost.estimate import Estimates
from wattune.intervals import t_cumulative
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

_DEGREES: Final = 4.0
"""Degrees of freedom of that distribution."""


def usable_bytes(device: DeviceSpec) -> float:
    """Returns the bytes of a device that a program's tensors can have; infinite where its memory is not known."""
    known = device.memory_bytes
    return math.inf if known is None else max(0.0, known * _BOARD_BYTES_PER_BYTE - _TAKEN_BYTES)


def out_of_memory_probability(specs: Sequence[TrialSpec], found: Estimates) -> Floats:
    """Computes the probability that each trial needs more memory than its device leaves it.

    Fragmentation of the allocator comes on top: of six trials that ran out of memory on two H100, three are below 0.5
    here, and one of these would have fitted but for what was reserved and free.
    """
    peak = found.columns["memory_peak_bytes"]
    usable = np.array([usable_bytes(spec.cluster.sensed_device) for spec in specs], np.float64)
    behind = (np.log(peak.value) - np.log(usable)) / (_SCALE * peak.log_std)
    probability: Floats = _probability(behind, _DEGREES)
    return probability


_probability = np.vectorize(t_cumulative, otypes=[np.float64])

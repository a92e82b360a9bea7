"""Goodput, time lost and the interval of checkpoints of a job that any of its devices can end.

In go a time between failures, the work between two checkpoints, and the seconds that a checkpoint and a start again
cost. Out comes the share of time that is useful work.
"""

import math
from typing import Final

DEVICE_HOURS: Final = {
    "RSC-1": 8 * 24 * 1000 / 6.50,
    "Llama 3": 16_384 * 54 * 24 / 419,
    "RSC-2": 8 * 24 * 1000 / 2.34,
}
"""Device-hours between failures, published: 6.50 and 2.34 in 1,000 days of nodes of eight A100 (arXiv 2410.21680), and
419 unexpected interruptions in 54 days of 16,384 H100 (arXiv 2407.21783). Jobs of few nodes fail more often than that,
by their software: 1,024 A100 of RSC-1 every 7.9 h, not 28.8."""

RESTART_S: Final = 600.0
"""Assumed time from a failure to the first step again."""


def failures_apart_s(num_devices: int, device_hours: float) -> float:
    """Computes the mean time between failures of a job of `num_devices` whose device fails every `device_hours`."""
    return 3600.0 * device_hours / num_devices


def down_frac(apart_s: float, restart_s: float) -> float:
    """Computes the share of time in which a job starts again, 1 - exp(-restart / apart); a start can fail too."""
    return -math.expm1(-restart_s / apart_s)


def goodput_frac(apart_s: float, work_s: float, checkpoint_s: float, restart_s: float) -> float:
    """Computes the useful share of time with a checkpoint after every `work_s` of work.

    Daly's expected time with exponential failures, also during checkpoints and starts (equation 13 of
    doi 10.1016/j.future.2004.11.016). To first order in time over `apart_s` it is
    1 / (1 + restart / apart + checkpoint / work + work / (2 apart)).
    """
    part = (work_s + checkpoint_s) / apart_s
    if part > 700.0:  # no part is ever finished; e^700 is near the largest number
        return 0.0
    return math.exp(-restart_s / apart_s) * work_s / (apart_s * math.expm1(part))


def best_work_s(apart_s: float, checkpoint_s: float) -> float:
    """Computes the work between checkpoints that loses least time, by Daly's equation 37.

    Its first term is Young's sqrt(2 checkpoint apart) (doi 10.1145/361147.361115).
    """
    if checkpoint_s >= 2 * apart_s:
        return apart_s
    part = checkpoint_s / (2 * apart_s)
    return math.sqrt(2 * checkpoint_s * apart_s) * (1 + math.sqrt(part) / 3 + part / 9) - checkpoint_s

"""Checks of one sensor's series: whether it sticks, and whether its values are means of longer than it says."""

from typing import Final

import numpy as np

from wattune.analysis.signals.series import Series
from wattune.arrays import Floats

_ROWS: Final = 2**14
_FEWEST_CHANGES: Final = 8
AVERAGE_S: Final = 1.0
"""Window of the averages that are sold as instants: nvmlDeviceGetPowerUsage on Ampere and later (nvml.h). Others
name none."""
_TREND: Final = 9
_EVEN_FRAC: Final = 0.25
"""Spread of the times between changes up to which a sensor, and not the rounding of its values, sets them."""


def longest_hold(series: Series) -> tuple[int, int]:
    """Returns the first and the last sample of the longest run of exactly one value."""
    edges = np.flatnonzero(np.diff(series.value) != 0) + 1
    starts, ends = np.append(0, edges), np.append(edges - 1, len(series.value) - 1)
    longest = int(np.argmax(series.time_s[ends] - series.time_s[starts]))
    return int(starts[longest]), int(ends[longest])


def averaged_over_s(series: Series) -> float:
    """Returns the seconds over which values are means, where they were read more finely than that; else 0.

    A mean that is told once a period changes at even intervals much longer than those of reading. A moving mean changes
    by a small part of its range from reading to reading, also at edges. Its noise is that of a sum: neighbouring
    differences, less their trend, do not correlate (a random walk); of readings that are independent by -1/2. One sine
    does neither, and is no load.
    """
    time_s, value = series.time_s[:_ROWS], series.value[:_ROWS]
    changed = np.append(0, np.flatnonzero(np.diff(value) != 0) + 1)
    if len(changed) < _FEWEST_CHANGES:
        return 0.0
    apart_s, read_s = np.diff(time_s[changed])[1:], float(np.median(np.diff(time_s)))
    held_s = float(np.median(apart_s))
    if held_s >= AVERAGE_S / 2:
        even = float(np.median(np.abs(apart_s - held_s))) < _EVEN_FRAC * held_s
        levels = len(np.unique(value[changed]))  # a wave of a load has two or three
        return held_s if even and held_s > 4 * read_s and levels > 3 else 0.0
    if held_s > AVERAGE_S / 4 or not np.ptp(value):
        return 0.0
    jump = float(np.abs(np.diff(value)).max()) / float(np.ptp(np.quantile(value, (0.001, 0.999))) or np.ptp(value))
    return AVERAGE_S if jump < 0.5 and _moves_slowly(time_s[changed], value[changed], held_s, jump) else 0.0


def _moves_slowly(time_s: Floats, value: Floats, held_s: float, jump: float) -> bool:
    width = round(AVERAGE_S / held_s)
    step, next_to = np.diff(value), np.abs(np.diff(time_s) - held_s) < held_s / 2
    step = step[next_to]
    if len(step) < 10 * width:
        return False
    # What enters a moving mean leaves it a second later, and no other lag knows of it.
    lags = np.arange(1, 3 * width)
    alike_at = np.array([np.mean(step[lag:] * step[:-lag]) for lag in lags]) / np.mean(step**2)
    near = np.abs(lags - width) <= 1
    if alike_at[near].min() < -0.35 and np.abs(alike_at[~near & (lags > width / 4)]).max() < 0.25:
        return True
    noise = step[_TREND // 2 : -(_TREND // 2)] - np.convolve(step, np.full(_TREND, 1 / _TREND), "valid")
    alike = float(np.mean(noise[1:] * noise[:-1]) / (np.mean(noise**2) or 1.0))
    # A formula has no kinks. Straight lines between few of them are means of a load that steps.
    bend, most = np.abs(np.diff(step)), float(np.abs(step).max())
    kinks = bend.max() > (0.35 if width >= 10 else 0.7) * most
    lines = (
        np.mean(next_to) > 0.9
        and np.mean(bend > 1e-6 * most) < 0.2
        and jump < 0.06
        and most > 0.03 * abs(float(np.mean(value)))
    )
    slow = alike > -0.3 and jump < min(4.2 / width, 0.5)
    rounding = float(np.abs(step[step != 0]).min())
    fine = rounding < 0.2 * most and not _is_one_wave(time_s, value, rounding)
    return bool(slow and kinks and (lines or fine))


def _is_one_wave(time_s: Floats, value: Floats, rounding: float) -> bool:
    """Tells whether one sine explains values but for 1 % and their rounding; a triangle leaves 1.5 %."""
    even = np.interp(np.linspace(time_s[0], time_s[-1], len(time_s)), time_s, value)
    peak = max(2, int(np.argmax(np.abs(np.fft.rfft(even - even.mean())))))
    left = []
    for cycles in peak + np.linspace(-1, 1, 81):
        phase = 2 * np.pi * cycles * (time_s - time_s[0]) / (time_s[-1] - time_s[0])
        waves = np.stack([np.sin(phase), np.cos(phase), np.ones(len(phase))], axis=1)
        left.append(float(np.var(value - waves @ np.linalg.solve(waves.T @ waves, waves.T @ value))))
    return min(left) < 0.01 * float(np.var(value)) + rounding**2 / 6


_REGISTERS_J: Final = (2**32 / 1e3, 2**32 * 15.2587890625e-6, 2**32 / 1e6, 262_143.328850)
"""Energy after which registers of 32 bits begin anew: NVML's mJ, AMD's 15.26 uJ, uJ, and RAPL's usual range."""


def unwrapped_j(time_s: Floats, energy_j: Floats) -> tuple[Floats, float]:
    """Puts the rise of a counter together that begins anew, where a register explains every fall.

    The register holds more than any reading, and the power across each fall is that of the readings around it.
    """
    rise_j, took_s = np.diff(energy_j), np.diff(time_s)
    falls, later = rise_j < 0, took_s > 0  # rows may be doubled
    if not falls.any() or not later[falls].all() or not (rise_j > 0)[later].any():
        return energy_j, 0.0
    usual_w = rise_j[~falls & later] / took_s[~falls & later]
    for per in sorted(_REGISTERS_J):
        across_w = (rise_j[falls] + per) / took_s[falls]
        if energy_j.max() <= per and np.all((across_w > 0.7 * usual_w.min()) & (across_w < 1.3 * usual_w.max())):
            return energy_j + per * np.append(0, np.cumsum(falls)), per
    return energy_j, 0.0

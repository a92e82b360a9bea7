"""Readings that cannot be what their names say, though each of them could: what sensors tell together.

`wattune.schema.BOUNDS` has what single values can be, `wattune.analysis.signals.clock_check` what stamps can. A doubt
has a code and a sentence, lowers the quality (`wattune.analysis.quality`), and takes away figures that it falsifies.
"""

from collections.abc import Iterator
from itertools import combinations, groupby
from typing import Final

import numpy as np

from wattune.analysis.metrics.energy import Powers, PowerTrace, enforced_limit_w
from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.readings import HOST, Readings
from wattune.analysis.signals.sensor_check import longest_hold, unwrapped_j
from wattune.analysis.signals.series import Series
from wattune.schema import DeviceKey

ZERO_POWER: Final = "zero_power"
POWER_UNIT: Final = "power_unit"
OVER_LIMIT: Final = "power_over_limit"
SAME_POWER: Final = "same_power"
POWER_STUCK: Final = "power_stuck"
AVERAGED: Final = "power_averaged"
SWAPPED: Final = "devices_swapped"
COUNTER_WRAPPED: Final = "counter_wrapped"
COUNTER_RESET: Final = "counter_reset"
COUNTER_STUCK: Final = "counter_stuck"
TEMPERATURE_UNIT: Final = "temperature_unit"
TEMPERATURE_STUCK: Final = "temperature_stuck"
TIME_ZONE: Final = "time_zone"
DOUBLED: Final = "doubled_rows"

OF_POWER: Final = (ZERO_POWER, POWER_UNIT, OVER_LIMIT, SAME_POWER, POWER_STUCK)
"""Doubts that leave no figure of power, energy or excursions."""

OF_TEMPERATURE: Final = (TEMPERATURE_UNIT, TEMPERATURE_STUCK)
"""Doubts that leave no figure of temperature."""

MILDER: Final = (
    SWAPPED,
    COUNTER_WRAPPED,
    COUNTER_RESET,
    COUNTER_STUCK,
    *OF_TEMPERATURE,
    DOUBLED,
)
"""Doubts that leave a result indicative: what they falsify is put right, or absent."""

_ALIVE_W: Final = 2.5
"""No device of the catalog draws less, not even asleep."""
_ALIVE_FRAC: Final = 0.01
"""Nor less than this of its limit: idle devices draw 2 % (desktop) to 20 % of it."""
_OVER_FRAC: Final = 1.1
"""Mean power over the limit that a device cannot hold: caps act within 100 ms, and the peaks of a second stay below."""
_STUCK_S: Final = 10.0
_STUCK_ROWS: Final = 20
_HOTTEST_C: Final = 110.0
"""No core runs hotter over minutes: slowdown begins at 83 to 105 °C."""
_ZONE_S: Final = 900.0
"""Time zones differ by whole quarters of an hour."""
_ZONE_SLACK_S: Final = 60.0
_SAME_FRAC: Final = 0.95
_NOTHING: Final = Readings(np.empty(0), {})


def doubts(aligned: Aligned, powers: Powers) -> dict[str, str]:
    """Returns what cannot be, a sentence a code, in the order of devices."""
    found: dict[str, list[str]] = {}
    for code, text in (
        *(one for trace in powers.traces for one in _of_trace(aligned, trace, powers)),
        *_between(aligned, powers.traces),
        *_of_readings(aligned, powers),
        *_of_nodes(aligned),
    ):
        found.setdefault(code, []).append(text)
    return {
        code: "; ".join(texts[:4]) + (f"; {len(texts) - 4} more" if texts[4:] else "") for code, texts in found.items()
    }


def _name(trace: PowerTrace) -> str:
    return "/".join(trace.devices[0])


def _read(aligned: Aligned, tier: str, device: DeviceKey) -> Readings:
    return aligned.tiers.get(tier, {}).get(device, _NOTHING)


def _of_trace(aligned: Aligned, trace: PowerTrace, powers: Powers) -> Iterator[tuple[str, str]]:
    """Yields what one power sensor tells against its own device."""
    name, limit_w = _name(trace), enforced_limit_w(aligned, trace)
    if trace.num_zeros:
        yield ZERO_POWER, f"{name}: {trace.num_zeros} readings of 0 W, which no device that is on draws; write null"
    elif trace.max_w < max(_ALIVE_W, _ALIVE_FRAC * (limit_w or 0.0)):
        yield POWER_UNIT, f"{name}: draws {trace.max_w:.3g} W at most, less than asleep; write watts"
    if limit_w and trace.mean_w > _OVER_FRAC * limit_w:
        beyond = f"{name}: draws {trace.mean_w:.4g} W on average at a limit of {limit_w:.4g} W"
        yield OVER_LIMIT, f"{beyond}; it tells more than one device (power_domain), or the limit is another's"
    if trace.averaged_s:
        yield AVERAGED, f"{name}: power is a mean of {trace.averaged_s:.2g} s, so shorter peaks are not in it"
    stuck = _stuck(aligned, trace, powers)
    if stuck:
        yield POWER_STUCK, f"{name}: {stuck}"


def _stuck(aligned: Aligned, trace: PowerTrace, powers: Powers) -> str:
    """Says how a power sensor sticks at one value; empty if it does not, or if the device may have been as steady."""
    start_s, end_s, value_w, rows = trace.hold
    if end_s - start_s < _STUCK_S or rows < _STUCK_ROWS or not value_w:
        return ""
    said = f"power stays at {value_w:.6g} W for {end_s - start_s:.3g} s"
    if trace.hold_is_odd:
        return f"{said}, and moves all the time otherwise"
    _, clock_mhz = _read(aligned, "fast", trace.devices[0]).inside("sm_clock_mhz", start_s, end_s)
    if len(clock_mhz) and np.ptp(clock_mhz) > 0.2 * clock_mhz.max() and np.count_nonzero(np.diff(clock_mhz)) > 4:
        return f"{said} while the clock moves"
    time_s, energy_j = _read(aligned, "slow", trace.devices[0]).inside("energy_j", start_s, end_s)
    rise_j = float(energy_j[-1] - energy_j[0]) if len(energy_j) > 1 else 0.0
    whole = end_s - start_s > 0.9 * (trace.end_s - trace.start_s)
    if rise_j > 0 and time_s[-1] - time_s[0] > _STUCK_S / 2 and not whole:
        drawn_w = rise_j / float(time_s[-1] - time_s[0])
        return f"{said} while its counter tells {drawn_w:.4g} W" if abs(drawn_w / value_w - 1) > 0.05 else ""
    limit_w = enforced_limit_w(aligned, trace) or 0.0
    others = [one for one in powers.traces if one is not trace and np.ptp(one.first.value) > 0.1 * limit_w]
    return f"{said} while others vary" if whole and others and value_w > 0.25 * limit_w > 0 else ""


def _between(aligned: Aligned, traces: tuple[PowerTrace, ...]) -> Iterator[tuple[str, str]]:
    """Yields pairs of sensors of a node that are one, or that stand under each other's name."""
    for a, b in (pair for _, own in groupby(traces, lambda one: one.node) for pair in combinations(own, 2)):
        if _one_sensor(aligned, a, b):
            both = f"{_name(a)} and {_name(b)} tell the same power, digit by digit"
            yield SAME_POWER, f"{both}: one sensor, counted twice; name it power_domain in the manifest"
        (ia, ca), (ib, cb) = a.against_counter_j or (0.0, 0.0), b.against_counter_j or (0.0, 0.0)
        known = min(ia, ca, ib, cb) > 0
        own = known and min(abs(ia / ca - 1), abs(ib / cb - 1)) < 0.05
        if known and not own and max(abs(ia / cb - 1), abs(ib / ca - 1)) < 0.02:
            yield SWAPPED, f"power of {_name(a)} and {_name(b)} agrees with each other's counter only"
        elif exchanged := _exchanged(aligned, a, b):
            yield SWAPPED, f"{_name(a)} and {_name(b)}: {exchanged}"


def _exchanged(aligned: Aligned, a: PowerTrace, b: PowerTrace) -> str:
    """Says how two devices stand under each other's name: the one that draws more idles, or temperatures exchange."""
    ones = [_read(aligned, "fast", one.devices[0]) for one in (a, b)]
    clock = [_mean(one, "sm_clock_mhz") for one in ones]
    a_more, b_more = (x.mean_w > 2 * y.mean_w for x, y in ((a, b), (b, a)))
    if (a_more and clock[0] < 0.5 * clock[1]) or (b_more and clock[1] < 0.5 * clock[0]):
        return "the one that draws more has the idle clock"
    warm = [one.inside("gpu_temp_c", 0.0, aligned.duration_s) for one in ones]
    if all(len(degrees) > 1 for _, degrees in warm):
        time_s, degrees = warm[0]
        at_s = time_s[np.argmax(np.abs(np.diff(degrees)))]
        (a1, a2), (b1, b2) = (
            [float(np.mean(degrees[part])) if part.any() else np.nan for part in (time_s <= at_s, time_s > at_s + 0.5)]
            for time_s, degrees in warm
        )
        if abs(a1 - b1) >= 10 and max(abs(a1 - b2), abs(b1 - a2)) < 3:
            return f"temperatures exchange at {at_s:.3g} s"
    return ""


def _mean(readings: Readings, column: str) -> float:
    values = readings.columns.get(column, np.empty(0))
    return float(np.nanmean(values)) if np.isfinite(values).any() else np.nan


def _one_sensor(aligned: Aligned, a: PowerTrace, b: PowerTrace) -> bool:
    """Tells whether two series are the same to the last digit, and noisy, or of devices that otherwise differ."""
    first, second = a.first, b.first
    size = min(len(first.value), len(second.value))
    if size < _STUCK_ROWS or len(np.unique(first.value)) < 10:
        return False
    at = np.clip(np.searchsorted(second.time_s, first.time_s + a.spacing_s / 2) - 1, 0, len(second.value) - 1)
    if np.mean(second.value[at] == first.value) < _SAME_FRAC:
        return False
    moves = np.diff(first.value)
    moves = moves[moves != 0]
    noisy = len(moves) > 150 and np.mean(moves[1:] * moves[:-1] < 0) > 0.55
    return bool(noisy or _differ(aligned, a, b))


def _differ(aligned: Aligned, a: PowerTrace, b: PowerTrace) -> bool:
    """Tells whether two devices differ in their other readings, so that they would in power too."""
    ones = [_read(aligned, "fast", one.devices[0]) for one in (a, b)]
    apart = [abs(_mean(ones[0], name) - _mean(ones[1], name)) for name in ("gpu_temp_c", "sm_clock_mhz")]
    return apart[0] > 2.0 or apart[1] > 30.0  # a comparison with NaN is false


def _of_readings(aligned: Aligned, powers: Powers) -> Iterator[tuple[str, str]]:
    """Yields what counters, temperatures and rows of every device tell against it."""
    traces = {trace.devices[0]: trace for trace in powers.traces}
    warm = {device: one.columns.get("gpu_temp_c", np.empty(0)) for device, one in aligned.tiers.get("fast", {}).items()}
    moving = {device for device, degrees in warm.items() if len(np.unique(degrees[np.isfinite(degrees)])) > 2}
    for device in aligned.devices:
        fast, slow = (_read(aligned, tier, device) for tier in ("fast", "slow"))
        for code, text in (
            *_of_rows(fast),
            *_of_rows(slow),
            *_of_counter(slow, aligned, traces.get(device)),
            *_of_temperature(fast, aligned, traces.get(device), bool(moving - {device})),
        ):
            yield code, f"{'/'.join(device)}: {text}"


def _of_rows(readings: Readings) -> Iterator[tuple[str, str]]:
    again = len(readings.time_s) - len(np.unique(readings.time_s))
    if again:
        yield DOUBLED, f"{again} of {len(readings.time_s)} rows have a time that another has; one counts"


def _of_counter(slow: Readings, aligned: Aligned, trace: PowerTrace | None) -> Iterator[tuple[str, str]]:
    time_s, energy_j = slow.inside("energy_j", 0.0, aligned.duration_s)
    if len(energy_j) < 3:
        return
    unwrapped, per = unwrapped_j(time_s, energy_j)
    if per:
        yield COUNTER_WRAPPED, f"the energy counter begins anew every {per:,.6g} J; its rise was put together"
    if np.any(np.diff(unwrapped) < 0):
        yield COUNTER_RESET, "the energy counter fell: a driver was loaded again; its longest rise counts"
    start, end = longest_hold(Series(time_s, unwrapped))
    if end - start >= 5 and time_s[end] - time_s[start] >= _STUCK_S and (trace is None or trace.mean_w > _ALIVE_W):
        yield COUNTER_STUCK, f"the energy counter stands still for {time_s[end] - time_s[start]:.3g} s"


def _of_temperature(
    fast: Readings, aligned: Aligned, trace: PowerTrace | None, others_move: bool
) -> Iterator[tuple[str, str]]:
    time_s, degrees = fast.inside("gpu_temp_c", 0.0, aligned.duration_s)
    if len(degrees) < _STUCK_ROWS:
        return
    told = np.unique(degrees)
    if not told.any():
        yield TEMPERATURE_STUCK, "0 °C all the time, colder than any room of a data centre; write null"
    whole = np.unique(np.round(np.arange(0, 111) * 1.8 + 32))
    if np.median(degrees) > _HOTTEST_C or (len(told) >= 10 and np.isin(told, whole).all() and told.max() > 90):
        yield (
            TEMPERATURE_UNIT,
            f"{np.median(degrees):.4g} °C in the median, hotter than any core; Fahrenheit? write degC",
        )
    if len(told) == 1 and others_move and trace is not None and time_s[-1] - time_s[0] > 4 * _STUCK_S:
        means_w = [
            trace.series.between(at, at + _STUCK_S) / _STUCK_S
            for at in np.arange(trace.start_s, trace.end_s, _STUCK_S)[:-1]
        ]
        if len(means_w) > 2 and np.ptp(means_w) > 0.5 * max(means_w):
            yield TEMPERATURE_STUCK, f"stays at {told[0]:.4g} °C while power doubles and others change"


def _of_nodes(aligned: Aligned) -> Iterator[tuple[str, str]]:
    """Yields nodes whose readings miss the window by whole quarters of an hour."""
    seen: dict[str, tuple[float, float]] = {}
    for tier in ("fast", "ring", "slow"):
        for (node, device), readings in aligned.tiers.get(tier, {}).items():
            if device != HOST and node not in seen and len(readings.time_s):
                seen[node] = float(readings.time_s.min()), float(readings.time_s.max())
    for node, (first_s, last_s) in seen.items():
        off_s = _ZONE_S * round(first_s / _ZONE_S)
        inside_s = min(last_s, aligned.duration_s) - max(first_s, 0.0)
        after_s = min(last_s - off_s, aligned.duration_s) - max(first_s - off_s, 0.0)
        if off_s and inside_s < 0.9 * aligned.duration_s <= after_s and abs(first_s - off_s) < _ZONE_SLACK_S:
            yield (
                TIME_ZONE,
                f"the clock of {node} is {off_s / 3600:+.4g} h off the window: a time zone? see clock_offset_ns",
            )

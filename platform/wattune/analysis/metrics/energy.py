"""Power series of devices, the energy under them, and its agreement with the devices' own energy counters."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from wattune.analysis.metrics.excursion import Excursions
from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.readings import Readings
from wattune.analysis.signals.sensor_check import AVERAGE_S, averaged_over_s, longest_hold, unwrapped_j
from wattune.analysis.signals.series import Series
from wattune.arrays import Floats
from wattune.schema import COVERED_PERIODS, LEAST_COUNTER_SPAN_S, POWER_COLUMNS, DeviceKey

_AVERAGE: Final = ("slow", "power_average_w")
"""The driver's own mean of power: it has the energy and no peaks. It counts where nothing finer was read."""

LEAST_COVERAGE_FRAC: Final = 0.9
"""Share of the window that a power series must cover; below it there are no metrics of power or energy."""

_FIRST: Final = 2**11
_LEAST_REST: Final = 50

MOST_INTERVALS: Final = 2**13
"""Most intervals used to find the usual interval of a series."""

RING_PERIOD_MAX_S: Final = 0.025
"""Longest sensor period whose samples count as 20 ms means: the H200's ring has 20 ms, other rings are slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerTrace:
    """The power of one sensor over the window: of a device, or of a package several devices share."""

    devices: tuple[DeviceKey, ...]
    """All devices behind the sensor, by the manifest; the first is the one whose readings these are."""
    load: Callable[[], Series] = field(repr=False, compare=False)
    """Reads the series. A trace does not hold it, so that a day of many devices needs the memory of one."""
    start_s: float
    """The series' first time."""
    end_s: float
    """Its last."""
    mean_w: float
    """Time-weighted, over its span."""
    max_w: float
    """The largest sample."""
    from_ring: bool
    """True if the driver's own history was read, false for instant power."""
    averaged_s: float
    """Seconds over which it is a mean: `AVERAGE_S` of the driver's own, else what instants turn out as; else 0."""
    spacing_s: float
    """Median interval between samples."""
    sensor_period_s: float
    """Half the finest window the sensor resolves: by its calibration, else the median interval between new values."""
    smoothed_s: tuple[float, ...]
    """Lengths of the known moving means between the power and its series: each scales a frequency f by sinc(f length).
    Averaging inside the sensor is not among them."""
    coverage_frac: float
    """Share of the window in intervals of at most `COVERED_PERIODS` times the spacing."""
    against_counter_j: tuple[float, float] | None
    """Its integral, and the rise of the device's own energy counter, over the counter's span. None without a counter
    over at least `LEAST_COUNTER_SPAN_S`, and where the power was derived from the counter."""
    largest_gap_s: float
    """Longest time of the window without a sample, its ends included."""
    first: Series = field(repr=False, compare=False)
    """Its first samples, enough to tell whether another sensor tells the same."""
    num_zeros: int = 0
    """Samples of exactly 0 W."""
    hold: tuple[float, float, float, int] = (0.0, 0.0, 0.0, 0)
    """Its longest run of one value: start and end [s], value [W], samples."""
    hold_is_odd: bool = False
    """True if it is far longer than the others, at a value like theirs."""
    stands_in: bool = False
    """True if a finer series was read too but covers too little of the window."""
    peak_100ms_w: float | None = None
    """Largest mean over 100 ms. It and the next ones are found by `wattune.analysis.metrics.power.powers_together`,
    where the sensor resolves them."""
    peak_1s_w: float | None = None
    excursions: Excursions | None = None
    above_limit_frac: float | None = None
    """Share of time in which the raw samples are above the limit."""

    @property
    def series(self) -> Series:
        """Watts, clipped to the window."""
        return self.load()

    @property
    def node(self) -> str:
        """The node it is on."""
        return self.devices[0][0]

    @property
    def resolves_20ms(self) -> bool:
        """True if its samples are 20 ms means."""
        return self.from_ring and self.sensor_period_s <= RING_PERIOD_MAX_S

    @property
    def share(self) -> int:
        """Devices the sensor's power is divided by, evenly, where a metric is of one device."""
        return len(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Powers:
    """The power traces of a trial."""

    traces: tuple[PowerTrace, ...]
    """One per sensor, whatever it covers."""
    num_sensors: int
    """Sensors there should be."""
    doubted: bool = False
    """True if a sensor tells what cannot be (`wattune.analysis.metrics.doubts`)."""
    num_outside: int = 0
    """Sensors with readings, none of them inside the window: clocks or spans are wrong."""
    by_node: tuple[Mapping[str, float | None], ...] = ()
    """The metrics of the sum of each node's devices on one grid, over the time that all of them cover, by name; None
    for one that the sensors do not resolve. Empty where traces are not usable, or nobody looked at their samples."""
    cluster_peak_1s_w: float | None = None
    """The same of all nodes together."""

    @property
    def usable(self) -> bool:
        """True if no sensor is doubted, and every one covers enough of the window; else sums would be wrong."""
        return (
            0 < self.num_sensors == len(self.traces)
            and not self.doubted
            and min(t.coverage_frac for t in self.traces) >= LEAST_COVERAGE_FRAC
        )

    @property
    def nodes(self) -> list[str]:
        """The nodes they are on."""
        return sorted({trace.node for trace in self.traces})


def powers(aligned: Aligned, look: Callable[[PowerTrace, Series], PowerTrace] | None = None) -> Powers:
    """Finds the power traces of every device that counts.

    The series of a device is the ring if that covers `LEAST_COVERAGE_FRAC` of the window, else fast instant power if
    that does. If neither does, it is the finest one, and there are no metrics of power. Where neither was read at all,
    it is the driver's mean. Devices whose manifest names one `power_domain` share a sensor: their power is counted
    once, from the first of them that has any (MI250: the package's power is read at one of its two GCDs).

    `look` is called with every trace and its series, in order of nodes, while the series is in memory anyway; it
    returns the trace with what it found.
    """
    domains: dict[tuple[str, str], list[DeviceKey]] = {}
    for device in sorted({*aligned.devices, *aligned.known}):
        domains.setdefault((device[0], _domain(aligned, device)), []).append(device)
    counted = set(aligned.devices)
    sensors = [devices for devices in domains.values() if counted.intersection(devices)]
    each = [_best_trace(aligned, devices, look) for devices in sensors]
    found = [trace for trace in each if trace is not None]
    without = [devices for devices, trace in zip(sensors, each, strict=True) if trace is None]
    outside = sum(_read_at_all(aligned, devices) for devices in without)
    return Powers(traces=tuple(found), num_sensors=len(sensors), num_outside=outside)


def _domain(aligned: Aligned, device: DeviceKey) -> str:
    facts: dict[str, Any] = dict(aligned.known.get(device, {}))
    return str(facts.get("power_domain") or device[1])


def _read_at_all(aligned: Aligned, devices: list[DeviceKey]) -> bool:
    """Returns true if any power of a sensor was read, at any time."""
    return any(
        device in aligned.tiers.get(tier, {}) and aligned.tiers[tier][device].series(column) is not None
        for tier, column in (*POWER_COLUMNS, _AVERAGE)
        for device in devices
    )


def _best_trace(
    aligned: Aligned, devices: list[DeviceKey], look: Callable[[PowerTrace, Series], PowerTrace] | None
) -> PowerTrace | None:
    # If the ring was lost for a while, or its last drain is missing, the readings of another tier still count.
    best: tuple[PowerTrace, Series] | None = None
    falls_short = False
    for found in _traces(aligned, devices):
        covers = found is not None and found[0].coverage_frac >= LEAST_COVERAGE_FRAC
        if found is not None and (covers or best is None):
            best = replace(found[0], stands_in=falls_short), found[1]
        if covers:
            break
        falls_short = True
    if best is None:
        return None
    return best[0] if look is None else look(*best)


def _traces(aligned: Aligned, devices: list[DeviceKey]) -> Iterator[tuple[PowerTrace, Series] | None]:
    """Yields every trace of a sensor's power with its series, the finest first; None for one outside the window."""
    finer = False
    for tier, column in (*POWER_COLUMNS, _AVERAGE):
        for device in devices if not (finer and tier == "slow") else ():
            readings = aligned.tiers.get(tier, {}).get(device)
            raw = readings.series(column) if readings is not None else None
            clipped = raw.clip(0.0, aligned.duration_s) if raw is not None else None
            finer = finer or raw is not None
            if raw is not None and clipped is not None:
                yield _trace(aligned, tier, column, device, devices, raw, clipped), clipped
            elif raw is not None:
                yield None


def _trace(
    aligned: Aligned, tier: str, column: str, device: DeviceKey, devices: list[DeviceKey], raw: Series, clipped: Series
) -> PowerTrace:
    # The median of some evenly chosen intervals of a long recording is that of all.
    every = max(len(raw.time_s) // MOST_INTERVALS, 1)
    spacing_s = held_s = float(np.median(raw.time_s[1::every] - raw.time_s[:-1:every]))
    known = aligned.known.get(device, {})
    if tier != "ring":
        # A polled value may be older than its reading: only a change proves that the sensor measured again. A flat
        # signal therefore looks like a slow sensor, which makes peaks absent but never wrong.
        changed = np.flatnonzero(np.diff(raw.value)) + 1
        held_s = max(spacing_s, float(np.median(np.diff(raw.time_s[changed]))) if len(changed) > 2 else raw.span_s)
    finest_s = None if tier == "slow" else known.get("sensor_limits", {}).get(tier, {}).get("finest_window_s")
    averaged_s = AVERAGE_S if tier == "slow" else averaged_over_s(raw) if finest_s is None else 0.0
    held_s = max(held_s, averaged_s)
    # A calibration used known waves, so it can show more of the sensor than this load does.
    period_s = held_s if finest_s is None else max(spacing_s, finest_s / 2)
    # Linear interpolation between held readings is two moving means: sinc squared if every reading is new. Power from
    # the rise of a counter is also the mean since the previous reading.
    smoothed_s: tuple[float, ...] = (spacing_s, min(held_s, period_s))
    if known.get("power_from_energy_counter"):
        smoothed_s = *smoothed_s, spacing_s
    longest_s, missed_s = clipped.gaps_s(COVERED_PERIODS * spacing_s)
    start_s, end_s = float(clipped.time_s[0]), float(clipped.time_s[-1])

    def clip_again() -> Series:
        inside = aligned.tiers[tier][device].within(column, aligned.duration_s)
        assert inside is not None, device  # it was there a moment ago
        return inside

    def load() -> Series:
        return aligned.cache.get(("power", tier, device), Series, clip_again)

    aligned.cache.get(("power", tier, device), Series, lambda: clipped)
    return PowerTrace(
        devices=(device, *(other for other in devices if other != device)),
        load=load,
        start_s=start_s,
        end_s=end_s,
        mean_w=clipped.mean(),
        max_w=float(clipped.value.max()),
        from_ring=tier == "ring",
        averaged_s=averaged_s,
        first=Series(clipped.time_s[:_FIRST], clipped.value[:_FIRST]),
        num_zeros=int(np.count_nonzero(clipped.value == 0)),
        **_hold(clipped),
        spacing_s=spacing_s,
        sensor_period_s=period_s,
        smoothed_s=smoothed_s,
        coverage_frac=(end_s - start_s - missed_s) / aligned.duration_s,
        against_counter_j=_against_counter_j(aligned, device, clipped),
        largest_gap_s=max(longest_s, start_s, aligned.duration_s - end_s),
    )


def _hold(power: Series) -> dict[str, Any]:
    """Finds the longest run of one value, and tells whether it is odd."""
    time_s, value = power.time_s, power.value
    start, end = longest_hold(power)
    rest = np.concatenate([value[:start], value[end + 1 :]])
    found = {"hold": (float(time_s[start]), float(time_s[end]), float(value[start]), end - start + 1)}
    if len(rest) < _LEAST_REST:
        return found
    low, high = np.quantile(rest, (0.01, 0.99))
    usual_s = (power.span_s - time_s[end] + time_s[start]) / max(np.count_nonzero(np.diff(rest)), 1)
    return found | {"hold_is_odd": bool(low < value[start] < high and time_s[end] - time_s[start] > 30 * usual_s)}


def _against_counter_j(aligned: Aligned, device: DeviceKey, power: Series) -> tuple[float, float] | None:
    # A counter always agrees with power that was derived from it (AMD).
    if aligned.known.get(device, {}).get("power_from_energy_counter"):
        return None
    readings = aligned.tiers.get("slow", {}).get(device)
    # Compares over the span of the series only: parts that it misses at the window's ends are not a disagreement.
    ends_s = float(power.time_s[0]), float(power.time_s[-1])
    span = counter_span(readings, "energy_j", *ends_s) if readings is not None else None
    if span is None or span[1] - span[0] < LEAST_COUNTER_SPAN_S:
        return None
    start_s, end_s, rise_j = span
    return power.between(start_s, end_s), rise_j


def enforced_limit_w(aligned: Aligned, trace: PowerTrace) -> float | None:
    """Returns the lowest limit enforced on a trace's sensor in the window: from readings, else from the manifest."""
    limit_w = limit_readings_w(aligned, trace)
    if len(limit_w):
        return float(limit_w.min())
    known = aligned.known.get(trace.devices[0], {}).get("power_limit_w")
    return None if known is None else float(known)


def limit_readings_w(aligned: Aligned, trace: PowerTrace) -> Floats:
    """Returns all readings in the window of the limit enforced on a trace's sensor; empty if it was not read."""
    readings = aligned.tiers.get("slow", {}).get(trace.devices[0])
    return np.empty(0) if readings is None else readings.inside("power_limit_w", 0.0, aligned.duration_s)[1]


def counter_span(readings: Readings, name: str, start_s: float, end_s: float) -> tuple[float, float, float] | None:
    """Computes the rise of a cumulative column between its first and last reading in an interval.

    Returns the times of both in seconds, and the rise between them.

    A counter of energy that wraps is put together (`unwrapped_j`). Of others that fall, reset or wrapped, the longest
    stretch without a fall is used. The rise before and after it is left out, because its size is unknown.

    None with fewer than two readings in one stretch.
    """
    time_s, value = readings.inside(name, start_s, end_s)
    if len(value) < 2:
        return None
    if name == "energy_j":
        value, _ = unwrapped_j(time_s, value)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(value) < 0) + 1])
    ends = np.concatenate([starts[1:] - 1, [len(value) - 1]])
    longest = int(np.argmax(time_s[ends] - time_s[starts]))
    first, last = starts[longest], ends[longest]
    if time_s[last] <= time_s[first]:
        return None
    return float(time_s[first]), float(time_s[last]), float(value[last] - value[first])


def total_energy_j(powers: Powers, window_s: float) -> float:
    """Computes the energy of all devices over the window: the integral of each series, extended at its own mean."""
    return float(sum(trace.mean_w for trace in powers.traces) * window_s)


def integral_error_frac(powers: Powers) -> float | None:
    """Computes the error of the integrated power: absolute difference to the energy counters over the counters' rise.

    Each counter is compared over its own span. The devices' energies are summed before they are compared, because
    energy metrics report the sum. A single device can disagree by more: a counter steps every 100 ms, which is 1.4 % of
    14 s at twice the mean power.

    None unless every sensor has a counter over at least `LEAST_COUNTER_SPAN_S` from which its power is not derived.
    """
    each = [trace.against_counter_j for trace in powers.traces]
    known = [one for one in each if one is not None]
    if len(known) < len(each):
        return None
    integral_j, counter_j = (sum(one[index] for one in known) for index in (0, 1))
    return abs(integral_j / counter_j - 1.0) if counter_j > 0 else None

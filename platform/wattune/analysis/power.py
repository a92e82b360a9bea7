"""What a power budget is held against: means, peaks over a window, coincidence, ramps and swing.

Every window's mean is exact: energies are integrated first, then sampled on one grid common to all sensors, added, and
only then divided by the window. A window the sensor does not resolve (shorter than two of its periods) gives no metric.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from wattune.analysis.align import Aligned, Floats
from wattune.analysis.energy import Powers, PowerTrace

GRID_S: Final = 0.005
"""Step by which windows slide.

Against steps of 1 ms, peaks of the recorded H200 loads differ by less than 0.02 % at 100 ms and 1 s.
"""

RING_PERIOD_MAX_S: Final = 0.025
"""Longest sensor period whose samples are taken for 20 ms means: the H200's ring has 20 ms, other rings are slower."""

SWING_BAND_HZ: Final = (0.1, 20.0)
"""Band in which grids and turbines mind a swinging load (arXiv 2508.14318)."""

SWING_SEGMENT_S: Final = 20.0
"""Welch segment: two periods of the band's lower end."""


@dataclass(frozen=True, slots=True)
class GridEnergy:
    """Energy from the common grid's first point to every other, of one sensor or the sum of several."""

    energy_j: Floats
    """Cumulative, at points `GRID_S` apart."""
    sensor_period_s: float
    """Of the coarsest sensor in it."""

    def means_w(self, window_s: float) -> Floats | None:
        """The moving mean over a window at every grid point it fits, None where it fits none or is not resolved."""
        width = round(window_s / GRID_S)
        if window_s < 2 * self.sensor_period_s or len(self.energy_j) <= width:
            return None
        result: Floats = (self.energy_j[width:] - self.energy_j[:-width]) / (width * GRID_S)
        return result

    def peak_w(self, window_s: float) -> float | None:
        """The largest moving mean over a window."""
        means_w = self.means_w(window_s)
        return None if means_w is None else float(means_w.max())

    def ramp_w_per_s(self, window_s: float) -> float | None:
        """The largest change from one window's mean to that of the next one, per second of window."""
        means_w, width = self.means_w(window_s), round(window_s / GRID_S)
        if means_w is None or len(means_w) <= width:
            return None
        return float(np.abs(means_w[width:] - means_w[:-width]).max() / window_s)

    def swing_rms_w(self) -> float | None:
        """RMS of power in `SWING_BAND_HZ`, or up to the sensor's Nyquist frequency where that is lower.

        Welch's method (1967): Hann-windowed segments of `SWING_SEGMENT_S` that overlap by half, each less its mean; the
        averaged power spectral density is summed over the band. What linear interpolation between samples and the means
        of grid cells take away (sinc squared and sinc) is put back. None where the grid is shorter than a period of the
        band's lower end, or the sensor slower than that.
        """
        low_hz, high_hz = SWING_BAND_HZ[0], min(SWING_BAND_HZ[1], 0.5 / self.sensor_period_s)
        power_w = np.diff(self.energy_j) / GRID_S
        if len(power_w) * GRID_S < 1 / low_hz or high_hz <= low_hz:
            return None
        size = min(round(SWING_SEGMENT_S / GRID_S), len(power_w))
        segments = np.lib.stride_tricks.sliding_window_view(power_w, size)[:: max(size // 2, 1)]
        taper = np.hanning(size)
        spectrum = np.fft.rfft((segments - segments.mean(axis=1, keepdims=True)) * taper)
        power = 2 * (np.abs(spectrum) ** 2).mean(axis=0) / (size * (taper**2).sum())
        frequency_hz = np.fft.rfftfreq(size, GRID_S)
        band = (frequency_hz >= low_hz) & (frequency_hz <= high_hz)
        response = np.sinc(frequency_hz[band] * self.sensor_period_s) ** 2 * np.sinc(frequency_hz[band] * GRID_S)
        return float(np.sqrt((power[band] / response**2).sum()))


def common_grid(traces: Sequence[PowerTrace]) -> list[GridEnergy]:
    """Every trace's energy on one grid over the time that all of them cover."""
    start_s = max(float(trace.series.time_s[0]) for trace in traces)
    end_s = min(float(trace.series.time_s[-1]) for trace in traces)
    # The small addend keeps a time of a whole number of steps whole in spite of rounding.
    num_steps = max(int((end_s - start_s) / GRID_S + 1e-6), 0)
    grid_s = np.minimum(start_s + GRID_S * np.arange(num_steps + 1), end_s)
    return [GridEnergy(trace.series.cumulative(grid_s), trace.sensor_period_s) for trace in traces]


def total(grids: Sequence[GridEnergy]) -> GridEnergy:
    """The sum of several sensors on one grid."""
    return GridEnergy(sum((grid.energy_j for grid in grids), np.zeros(1)), max(grid.sensor_period_s for grid in grids))


def power_metrics(aligned: Aligned, powers: Powers, grids: Sequence[GridEnergy]) -> dict[str, float]:
    """Power of devices, nodes and cluster.

    `device_power_mean_w`: mean over devices of mean power. `device_power_peak_{20ms,100ms,1s}_w`: the worst device's
    largest moving mean over that window; 20 ms are the samples themselves, only from a ring of 20 ms. `node_device_*`:
    the same of the sum of a node's devices, the worst node. `cluster_device_power_peak_1s_w`: of the sum of all
    devices, nodes put on one clock. `device_power_limit_w`: the lowest enforced limit of a device.
    `power_coincidence_frac`: the cluster's 1 s peak over the sum of the devices' 1 s peaks. `power_ramp_max_w_per_s`:
    the largest change between neighbouring 100 ms means of a node, per second. `power_swing_rms_w`: RMS of a node's
    power in 0.1 Hz to min(20 Hz, Nyquist); for both the worst node. Devices that share a package's sensor are given
    equal parts of it; sums take the package once.

    Args:
        aligned: The trial.
        powers: Its power traces.
        grids: `common_grid` of the traces; may be empty where they are not usable.

    Returns:
        What could be measured; nothing but limits unless every sensor covers the window.
    """
    metrics: dict[str, float | None] = {"device_power_limit_w": _lowest_limit_w(aligned, powers)}
    if powers.usable:
        traces, shares = powers.traces, [trace.share for trace in powers.traces]
        means_w = np.array([trace.series.mean() for trace in traces])
        of_node = [[i for i, trace in enumerate(traces) if trace.node == node] for node in powers.nodes]
        nodes = [total([grids[i] for i in members]) for members in of_node]
        cluster = nodes[0] if len(nodes) == 1 else total(nodes)
        metrics |= {
            "device_power_mean_w": float(means_w.sum() / sum(shares)),
            "device_power_peak_20ms_w": _sample_peak_w(traces),
            "device_power_peak_100ms_w": _device_peak_w(grids, shares, 0.1),
            "device_power_peak_1s_w": _device_peak_w(grids, shares, 1.0),
            "node_device_power_mean_w": max(float(means_w[members].sum()) for members in of_node),
            "node_device_power_peak_100ms_w": _worst([node.peak_w(0.1) for node in nodes]),
            "node_device_power_peak_1s_w": _worst([node.peak_w(1.0) for node in nodes]),
            "cluster_device_power_peak_1s_w": cluster.peak_w(1.0),
            "power_coincidence_frac": _coincidence_frac(cluster, grids),
            "power_ramp_max_w_per_s": _worst([node.ramp_w_per_s(0.1) for node in nodes]),
            "power_swing_rms_w": _worst([node.swing_rms_w() for node in nodes]),
        }
    return {name: value for name, value in metrics.items() if value is not None}


def enforced_limit_w(aligned: Aligned, trace: PowerTrace) -> float | None:
    """The lowest limit enforced on a trace's sensor in the window: as read, else as the manifest has it."""
    device = trace.devices[0]
    readings = aligned.tiers.get("slow", {}).get(device)
    if readings is not None:
        _, limit_w = readings.inside("power_limit_w", 0.0, aligned.duration_s)
        if len(limit_w):
            return float(limit_w.min())
    known = aligned.known.get(device, {}).get("power_limit_w")
    return None if known is None else float(known)


def _lowest_limit_w(aligned: Aligned, powers: Powers) -> float | None:
    limits = [_over(enforced_limit_w(aligned, trace), trace.share) for trace in powers.traces]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known and len(known) == powers.num_sensors else None


def _sample_peak_w(traces: Sequence[PowerTrace]) -> float | None:
    if any(not resolves_20ms(trace) for trace in traces):
        return None
    return max(float(trace.series.value.max()) / trace.share for trace in traces)


def resolves_20ms(trace: PowerTrace) -> bool:
    """Whether a trace's samples are 20 ms means."""
    return trace.from_ring and trace.sensor_period_s <= RING_PERIOD_MAX_S


def _device_peak_w(grids: Sequence[GridEnergy], shares: Sequence[int], window_s: float) -> float | None:
    return _worst([_over(grid.peak_w(window_s), share) for grid, share in zip(grids, shares, strict=True)])


def _coincidence_frac(cluster: GridEnergy, grids: Sequence[GridEnergy]) -> float | None:
    together, alone = cluster.peak_w(1.0), [grid.peak_w(1.0) for grid in grids]
    total = sum(peak for peak in alone if peak is not None)
    return together / total if together is not None and None not in alone and total > 0 else None


def _over(value: float | None, divisor: int) -> float | None:
    return None if value is None else value / divisor


def _worst(values: Sequence[float | None]) -> float | None:
    """The largest, None unless all are known: the unknown one could be larger."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None

"""Power metrics for a power budget: means, peaks over a window, coincidence, ramps and swing.

Every window's mean is exact: of one device over 100 ms at all times, otherwise at the points of a grid
(`wattune.analysis.signals.energy_grid`). A window shorter than two periods of the sensor
is not resolved and gives no metric.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wattune.analysis.metrics.energy import Powers, PowerTrace, enforced_limit_w, powers
from wattune.analysis.metrics.excursion import WINDOW_S, ExcursionFinder, Excursions, moving_means, time_above_frac
from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.energy_grid import LONGEST_S, EnergySum, pieces, resolves, steps_of
from wattune.analysis.signals.series import Series


@dataclass(frozen=True, slots=True, kw_only=True)
class SensorPower:
    """Power of one trace; None for a figure that the sensor does not resolve."""

    peak_100ms_w: float | None
    peak_1s_w: float | None
    excursions: Excursions | None
    above_limit_frac: float | None
    """Share of time in which the raw samples are above the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronous:
    """All traces on one grid: each over its own time in the window, sums over the time that all of them cover."""

    sensors: tuple[SensorPower, ...] = ()
    """In the order of the traces; empty if they are not usable."""
    nodes: tuple[Mapping[str, float | None], ...] = ()
    """The metrics of the sum of each node's devices, by name; None for one that the sensors do not resolve."""
    cluster_peak_1s_w: float | None = None


def powers_together(aligned: Aligned) -> tuple[Powers, Synchronous]:
    """Finds a trial's power traces, and in one pass every figure of their samples: empty unless they are usable."""
    look = _Look(aligned)
    found = powers(aligned, look.add)
    return found, look.found() if found.usable else Synchronous()


class _Look:
    """Takes traces in order of nodes; holds the sum of the current node, and of all nodes before if there are any."""

    def __init__(self, aligned: Aligned) -> None:
        self._aligned = aligned
        self._sensors: list[SensorPower] = []
        self._nodes: list[Mapping[str, float | None]] = []
        self._of_node: list[PowerTrace] = []
        self._node: EnergySum | None = None
        self._whole: EnergySum | None = None

    def add(self, trace: PowerTrace, series: Series) -> None:
        if self._of_node and self._of_node[-1].node != trace.node:
            self._end_node()
        self._of_node.append(trace)
        self._node = self._node or EnergySum(self._aligned.duration_s)
        limit_w = enforced_limit_w(self._aligned, trace)
        short, long = (resolves(window_s, trace.sensor_period_s) for window_s in (WINDOW_S, LONGEST_S))
        finder = ExcursionFinder(limit_w) if short and limit_w else None
        most_short_w = most_long_j = -np.inf
        for means in moving_means(series) if short else ():
            most_short_w = max(most_short_w, float(means.mean_w.max()))
            if finder is not None:
                finder.add(means)
        for piece in self._node.add(pieces(series), trace.sensor_period_s, trace.smoothed_s):
            if long:
                most_long_j = max(most_long_j, piece.most_j(steps_of(LONGEST_S)))
        self._sensors.append(
            SensorPower(
                peak_100ms_w=most_short_w if most_short_w > -np.inf else None,
                peak_1s_w=most_long_j / LONGEST_S if most_long_j > -np.inf else None,
                excursions=finder.found if finder is not None and most_short_w > -np.inf else None,
                above_limit_frac=time_above_frac(series, limit_w) if limit_w and trace.resolves_20ms else None,
            )
        )

    def _end_node(self) -> None:
        assert self._node is not None
        grid = self._node.energy
        self._nodes.append(
            {
                "node_device_power_mean_w": sum(trace.mean_w for trace in self._of_node),
                "node_device_power_peak_100ms_w": grid.peak_w(0.1),
                "node_device_power_peak_1s_w": grid.peak_w(1.0),
                "power_ramp_max_w_per_s": grid.ramp_w_per_s(0.1),
                "power_swing_rms_w": grid.swing_rms_w(),
            }
        )
        self._whole = self._node if self._whole is None else self._whole.merge(self._node)
        self._node, self._of_node = None, []

    def found(self) -> Synchronous:
        self._end_node()
        assert self._whole is not None
        return Synchronous(
            sensors=tuple(self._sensors),
            nodes=tuple(self._nodes),
            cluster_peak_1s_w=self._whole.energy.peak_w(LONGEST_S),
        )


def power_metrics(aligned: Aligned, powers: Powers, together: Synchronous) -> dict[str, float]:
    """Computes power of devices, nodes and cluster.

    `device_power_mean_w`: mean over devices of mean power. `device_power_peak_{20ms,100ms,1s}_w`: the worst device's
    largest moving mean over that window; 20 ms is the largest sample, only from a ring of 20 ms. `node_device_*`:
    the same of the sum of a node's devices, the worst node. `cluster_device_power_peak_1s_w`: of the sum of all
    devices, nodes put on one clock. `device_power_limit_w`: the lowest enforced limit of a device.
    `power_coincidence_frac`: the cluster's 1 s peak over the sum of the devices' 1 s peaks. `power_ramp_max_w_per_s`:
    the largest change between neighbouring 100 ms means of a node, per second. `power_swing_rms_w`: RMS of a node's
    power in 0.1 Hz to min(20 Hz, Nyquist); for both the worst node. Devices that share a package's sensor have equal
    parts of it; sums count the package once.

    There are only limits unless every sensor covers the window.
    """
    metrics: dict[str, float | None] = {"device_power_limit_w": _lowest_limit_w(aligned, powers)}
    if powers.usable:
        traces, sensors, nodes = powers.traces, together.sensors, together.nodes
        shares = [trace.share for trace in traces]
        metrics |= {
            "device_power_mean_w": sum(trace.mean_w for trace in traces) / sum(shares),
            "device_power_peak_20ms_w": _sample_peak_w(traces),
            "device_power_peak_100ms_w": _shared_peak_w([one.peak_100ms_w for one in sensors], shares),
            "device_power_peak_1s_w": _shared_peak_w([one.peak_1s_w for one in sensors], shares),
            **{name: _worst([node[name] for node in nodes]) for name in nodes[0]},
            "cluster_device_power_peak_1s_w": together.cluster_peak_1s_w,
            "power_coincidence_frac": _coincidence_frac(together),
        }
    return {name: value for name, value in metrics.items() if value is not None}


def _lowest_limit_w(aligned: Aligned, powers: Powers) -> float | None:
    limits = [_over(enforced_limit_w(aligned, trace), trace.share) for trace in powers.traces]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known and len(known) == powers.num_sensors else None


def _sample_peak_w(traces: Sequence[PowerTrace]) -> float | None:
    if any(not trace.resolves_20ms for trace in traces):
        return None
    return max(trace.max_w / trace.share for trace in traces)


def _shared_peak_w(peaks_w: Sequence[float | None], shares: Sequence[int]) -> float | None:
    return _worst([_over(peak_w, share) for peak_w, share in zip(peaks_w, shares, strict=True)])


def _coincidence_frac(together: Synchronous) -> float | None:
    alone = [sensor.peak_1s_w for sensor in together.sensors]
    total = sum(peak for peak in alone if peak is not None)
    peak_w = together.cluster_peak_1s_w
    return peak_w / total if peak_w is not None and None not in alone and total > 0 else None


def _over(value: float | None, divisor: int) -> float | None:
    return None if value is None else value / divisor


def _worst(values: Sequence[float | None]) -> float | None:
    """Returns the largest value, None unless all are known: an unknown one could be larger."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None

"""Power metrics for a power budget: means, peaks over a window, coincidence, ramps and swing.

Every window's mean is exact: of one device over 100 ms at all times, otherwise at the points of a grid
(`wattune.analysis.signals.energy_grid`). A window shorter than two periods of the sensor
is not resolved and gives no metric.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from wattune.analysis.metrics.energy import Powers, PowerTrace, enforced_limit_w, powers
from wattune.analysis.metrics.excursion import WINDOW_S, ExcursionFinder, moving_means, time_above_frac
from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.energy_grid import LONGEST_S, EnergySum, peak_w, pieces, resolves, steps_of
from wattune.analysis.signals.readings import HOST, all_known
from wattune.analysis.signals.series import Series
from wattune.metrics import over


def powers_together(aligned: Aligned) -> Powers:
    """Finds a trial's power traces, and in one pass every figure of their samples."""
    look = _Look(aligned)
    found = powers(aligned, look.add)
    return look.joined(found) if found.usable else found


class _Look:
    """Takes traces in order of nodes; holds the sum of the current node, and of all nodes before if there are any."""

    def __init__(self, aligned: Aligned) -> None:
        self._aligned = aligned
        self._nodes: list[Mapping[str, float | None]] = []
        self._of_node: list[PowerTrace] = []
        self._node: EnergySum | None = None
        self._whole: EnergySum | None = None

    def add(self, trace: PowerTrace, series: Series) -> PowerTrace:
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
        return replace(
            trace,
            peak_100ms_w=most_short_w if most_short_w > -np.inf else None,
            peak_1s_w=most_long_j / LONGEST_S if most_long_j > -np.inf else None,
            excursions=finder.found if finder is not None and most_short_w > -np.inf else None,
            above_limit_frac=time_above_frac(series, limit_w) if limit_w and trace.resolves_20ms else None,
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

    def joined(self, powers: Powers) -> Powers:
        self._end_node()
        assert self._whole is not None
        return replace(powers, by_node=tuple(self._nodes), cluster_peak_1s_w=self._whole.energy.peak_w(LONGEST_S))


def power_metrics(aligned: Aligned, powers: Powers) -> dict[str, float]:
    """Computes power of devices, nodes and cluster.

    `device_power_mean_w`: mean over devices of mean power. `device_power_peak_{20ms,100ms,1s}_w`: the worst device's
    largest moving mean over that window; 20 ms is the largest sample, only from a ring of 20 ms. `node_device_*`:
    the same of the sum of a node's devices, the worst node. `cluster_device_power_peak_1s_w`: of the sum of all
    devices, nodes put on one clock. `device_power_limit_w`: the lowest enforced limit of a device.
    `power_coincidence_frac`: the cluster's 1 s peak over the sum of the devices' 1 s peaks. `power_ramp_max_w_per_s`:
    the largest change between neighbouring 100 ms means of a node, per second. `power_swing_rms_w`: RMS of a node's
    power in 0.1 Hz to min(20 Hz, Nyquist); for both the worst node. Devices that share a package's sensor have equal
    parts of it; sums count the package once. `node_power_*`: of the meter of a node's chassis, the worst node.

    There are only limits unless every sensor covers the window.
    """
    metrics: dict[str, float | None] = {"device_power_limit_w": _lowest_limit_w(aligned, powers), **_of_meters(aligned)}
    if powers.usable:
        traces, nodes = powers.traces, powers.by_node
        shares = [trace.share for trace in traces]
        metrics |= {
            "device_power_mean_w": sum(trace.mean_w for trace in traces) / sum(shares),
            "device_power_peak_20ms_w": _sample_peak_w(traces),
            "device_power_peak_100ms_w": _shared_peak_w([trace.peak_100ms_w for trace in traces], shares),
            "device_power_peak_1s_w": _shared_peak_w([trace.peak_1s_w for trace in traces], shares),
            **{name: _worst([node[name] for node in nodes]) for name in nodes[0]},
            "cluster_device_power_peak_1s_w": powers.cluster_peak_1s_w,
            "power_coincidence_frac": _coincidence_frac(powers),
        }
    return {name: value for name, value in metrics.items() if value is not None}


def excursion_metrics(powers: Powers) -> dict[str, float]:
    """Excursions of all devices above the enforced limit, or above a stated one.

    `excursion_count`: of all devices. `excursion_time_frac`: device-time inside excursions over device-time.
    `excursion_energy_j`: integral of power minus limit inside them, all devices. `excursion_peak_over_limit_frac`: the
    worst device's largest 100 ms mean over its limit, minus 1, 0 where none is above.
    `over_limit_20ms_time_frac`: share of device-time in which the raw series is above the limit, from a 20 ms ring.

    Each group of them is there only if every sensor has it.
    """
    metrics: dict[str, float] = {}
    if not powers.usable:
        return metrics
    shares = [trace.share for trace in powers.traces]
    found = [trace.excursions for trace in powers.traces if trace.excursions is not None]
    if len(found) == len(shares):
        metrics |= {
            "excursion_count": float(sum(one.count for one in found)),
            "excursion_time_frac": float(np.average([one.time_frac for one in found], weights=shares)),
            "excursion_energy_j": float(sum(one.energy_j.sum() for one in found)),
            "excursion_peak_over_limit_frac": max(one.peak_over_limit_frac for one in found),
        }
    if above := all_known([trace.above_limit_frac for trace in powers.traces]):
        metrics["over_limit_20ms_time_frac"] = float(np.average(above, weights=shares))
    return metrics


def _of_meters(aligned: Aligned) -> dict[str, float | None]:
    """Returns mean and 1 s peak of the meters of chassis; their peak only where they are read twice a second."""
    read = [host.within("node_power_w", aligned.duration_s) for host in aligned.tiers.get(HOST, {}).values()]
    whole = [one for one in read if one is not None]
    fine = [one for one in whole if resolves(LONGEST_S, float(np.median(np.diff(one.time_s))))]
    return {
        "node_power_mean_w": max((one.mean() for one in whole), default=None),
        "node_power_peak_1s_w": _worst([peak_w(one, LONGEST_S) for one in fine]) if len(fine) == len(whole) else None,
    }


def _lowest_limit_w(aligned: Aligned, powers: Powers) -> float | None:
    limits = [over(enforced_limit_w(aligned, trace), trace.share) for trace in powers.traces]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known and len(known) == powers.num_sensors else None


def _sample_peak_w(traces: Sequence[PowerTrace]) -> float | None:
    if any(not trace.resolves_20ms for trace in traces):
        return None
    return max(trace.max_w / trace.share for trace in traces)


def _shared_peak_w(peaks_w: Sequence[float | None], shares: Sequence[int]) -> float | None:
    return _worst([over(peak_w, share) for peak_w, share in zip(peaks_w, shares, strict=True)])


def _coincidence_frac(powers: Powers) -> float | None:
    alone = [trace.peak_1s_w for trace in powers.traces]
    total = sum(peak for peak in alone if peak is not None)
    peak_w = powers.cluster_peak_1s_w
    return peak_w / total if peak_w is not None and None not in alone and total > 0 else None


def _worst(values: Sequence[float | None]) -> float | None:
    """Returns the largest value, None unless all are known: an unknown one could be larger."""
    return max(all_known(values), default=None)

"""What a power budget is held against: means, peaks over a window, coincidence, ramps and swing.

Every window's mean is exact (`wattune.analysis.grid`). A window the sensor does not resolve (shorter than two of its
periods) gives no metric.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from wattune.analysis.align import Aligned
from wattune.analysis.energy import Powers, PowerTrace, enforced_limit_w
from wattune.analysis.excursion import Excursions, excursions, time_above_frac
from wattune.analysis.grid import CommonGrid, GridEnergy


@dataclass(frozen=True, slots=True, kw_only=True)
class SensorPower:
    """What one trace shows on the common grid; None where it cannot be told."""

    peak_100ms_w: float | None
    peak_1s_w: float | None
    excursions: Excursions | None
    above_limit_frac: float | None
    """Share of time in which the samples themselves are above the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePower:
    """The same of the sum of a node's devices."""

    mean_w: float
    peak_100ms_w: float | None
    peak_1s_w: float | None
    ramp_w_per_s: float | None
    swing_rms_w: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronous:
    """All traces looked at on one grid."""

    sensors: tuple[SensorPower, ...] = ()
    """In the order of the traces; empty where they are not usable."""
    nodes: tuple[NodePower, ...] = ()
    cluster_peak_1s_w: float | None = None


def synchronous(aligned: Aligned, powers: Powers, *, power_limit_w: float | None = None) -> Synchronous:
    """Every figure that needs the traces together, in one pass over them.

    Args:
        aligned: The trial.
        powers: Its power traces; nothing is said where they are not usable.
        power_limit_w: A limit for one device to hold excursions against, instead of the enforced one.
    """
    if not powers.usable:
        return Synchronous()
    sensors: list[SensorPower] = []
    nodes: list[NodePower] = []
    whole = node = grid = None
    common = CommonGrid.of(powers.traces)
    # Traces stand in order of nodes: the sum of one node is held at a time, and that of all where there are several.
    for index, trace in enumerate(powers.traces):
        del grid  # its memory goes before the next one's is taken
        grid = common.energy(trace)
        limit_w = enforced_limit_w(aligned, trace) if power_limit_w is None else power_limit_w * trace.share
        sensors.append(_sensor(trace, grid, limit_w))
        node = grid if node is None else _add(node, grid)
        if index + 1 == len(powers.traces) or powers.traces[index + 1].node != trace.node:
            mean_w = sum(one.mean_w for one in powers.traces if one.node == trace.node)
            nodes.append(_node(node, mean_w))
            whole, node = node if whole is None else _add(whole, node), None
    return Synchronous(
        sensors=tuple(sensors), nodes=tuple(nodes), cluster_peak_1s_w=None if whole is None else whole.peak_w(1.0)
    )


def _add(total: GridEnergy, more: GridEnergy) -> GridEnergy:
    """The sum; the first one's memory is used for it."""
    energy_j = total.energy_j
    energy_j += more.energy_j
    return GridEnergy(energy_j, max(total.sensor_period_s, more.sensor_period_s), total.start_s)


def _sensor(trace: PowerTrace, grid: GridEnergy, limit_w: float | None) -> SensorPower:
    return SensorPower(
        peak_100ms_w=grid.peak_w(0.1),
        peak_1s_w=grid.peak_w(1.0),
        excursions=excursions(grid, limit_w) if limit_w else None,
        above_limit_frac=time_above_frac(trace.series, limit_w) if limit_w and trace.resolves_20ms else None,
    )


def _node(grid: GridEnergy, mean_w: float) -> NodePower:
    return NodePower(
        mean_w=mean_w,
        peak_100ms_w=grid.peak_w(0.1),
        peak_1s_w=grid.peak_w(1.0),
        ramp_w_per_s=grid.ramp_w_per_s(0.1),
        swing_rms_w=grid.swing_rms_w(),
    )


def power_metrics(aligned: Aligned, powers: Powers, together: Synchronous) -> dict[str, float]:
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
        together: What `synchronous` made of them.

    Returns:
        What could be measured; nothing but limits unless every sensor covers the window.
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
            "node_device_power_mean_w": max(node.mean_w for node in nodes),
            "node_device_power_peak_100ms_w": _worst([node.peak_100ms_w for node in nodes]),
            "node_device_power_peak_1s_w": _worst([node.peak_1s_w for node in nodes]),
            "cluster_device_power_peak_1s_w": together.cluster_peak_1s_w,
            "power_coincidence_frac": _coincidence_frac(together),
            "power_ramp_max_w_per_s": _worst([node.ramp_w_per_s for node in nodes]),
            "power_swing_rms_w": _worst([node.swing_rms_w for node in nodes]),
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
    """The largest, None unless all are known: the unknown one could be larger."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None

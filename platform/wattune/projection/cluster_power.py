"""Power of a cluster of N nodes from one node's: mean, peaks, ramps, range, swing and lines, checkpoints included.

In goes a `NodeLoad`, what a node draws while it trains, with the number of nodes, the jitter of their clocks and
`Checkpoints`. Out come figures by name (`cluster_power`).

What all devices do together adds up N times, what each does by itself sqrt(N) times. Let Q parts have the spectrum S1
each, the share c of it coherent, and start with a jitter of standard deviation sigma. Their sum has
Q S1 + Q (Q - 1) S1 c exp(-4 pi^2 f^2 sigma^2): the variance of a sum of phasors. The share c comes from the cross
spectra of parts read together, an upper bound where they share a node. A single part gives c = 1.

A sensor that reads means shows no more of a cluster than of a node: where `NodeLoad.averaged_s` is not 0, edges of
checkpoints are averaged alike, and ramps and swing above half its inverse are lower bounds.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from wattune.analysis.metrics.energy import Powers
from wattune.analysis.signals.energy_grid import GRID_S, SWING_BAND_HZ, GridEnergy, steps_of
from wattune.arrays import Floats

JITTER_S: Final = 0.005
"""Assumed scatter of the nodes' starts of a step; it takes 0.4 % of the amplitude at 3 Hz."""

WINDOWS_S: Final = {"100ms": 0.1, "1s": 1.0, "10s": 10.0}
"""Windows of peaks and ramps, by the end of their names."""

CLUSTER_FIGURES: Final = (
    *(f"cluster_power_{name}_w" for name in ("mean", "p5", "p95", "range_1s")),
    *(f"cluster_power_{name}" for window in WINDOWS_S for name in (f"peak_{window}_w", f"ramp_{window}_w_per_s")),
    "cluster_swing_rms_w",
    *(f"cluster_line_{number}_{of}" for number in (1, 2, 3) for of in ("hz", "rms_w")),
)
"""Names of the figures of a cluster's power."""

LINE_HZ: Final = 0.05
"""Width of a bin; a line is the strongest one with its neighbours."""

MOST_READ_S, MOST_TRAINED_S, COHERENCE_S = 300.0, 7200.0, 4.0
"""Readings that are used, the last and most settled ones; training rendered between two checkpoints, of which more
changes the mean alone; and segments whose cross spectra are averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """Power while training of parts that were read together: the devices of a node, or nodes."""

    parts_w: Floats
    """[parts, points], `GRID_S` apart, over whole steps."""
    step_s: float
    num_nodes: int = 1
    """Nodes that the parts are together."""
    period_s: float = GRID_S / 2
    """Time between readings."""
    averaged_s: float = 0.0
    """Time over which a reading is a mean; 1 s of `power.draw` on H100."""
    smoothed_s: tuple[float, ...] = ()
    """Known moving means between power and readings, as of `wattune.analysis.metrics.energy.PowerTrace`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """All nodes stop for `duration_s` every so many steps, and draw `node_w`; power falls and rises in `edge_s`."""

    every_steps: float
    duration_s: float
    node_w: float
    edge_s: float = 0.0


def measured_load(powers: Powers, step_s: float) -> NodeLoad | None:
    """Makes the load of usable traces: of their nodes if they are several, else of devices; None below one step."""
    traces = powers.traces
    start_s, end_s = max(one.start_s for one in traces), min(one.end_s for one in traces)
    num_steps = int(min(end_s - start_s, max(MOST_READ_S, step_s)) / step_s)
    if num_steps < 1:
        return None
    edges_s = np.maximum(end_s - GRID_S * np.arange(round(num_steps * step_s / GRID_S), -1.0, -1.0), start_s)
    parts_w: dict[object, Floats] = {}
    for one in traces:
        part = one.node if len(powers.nodes) > 1 else one.devices
        parts_w[part] = parts_w.get(part, 0.0) + np.diff(one.series.cumulative(edges_s)) / GRID_S
    coarsest = max(traces, key=lambda one: one.spacing_s)
    averaged_s = max(one.averaged_s for one in traces)
    return NodeLoad(
        parts_w=np.array(list(parts_w.values())),
        step_s=step_s,
        num_nodes=len(powers.nodes),
        period_s=coarsest.spacing_s if averaged_s else max(one.sensor_period_s for one in traces),
        averaged_s=averaged_s,
        smoothed_s=coarsest.smoothed_s,
    )


def training_w(load: NodeLoad, num_nodes: int, jitter_s: float) -> Floats:
    """Computes the power of `num_nodes` nodes over the steps of the load, [points]."""
    parts, points = load.parts_w.shape
    frequency_hz = np.fft.rfftfreq(points, GRID_S)
    total, share = parts / load.num_nodes * num_nodes, np.ones(len(frequency_hz))
    if parts > 1:
        from scipy.signal import welch  # takes 1 s; rankings, which may show a projection, do not wait for it

        size = min(round(COHERENCE_S / GRID_S), points)
        of_all = np.vstack([load.parts_w, load.parts_w.sum(axis=0)])
        _, swing = welch(of_all, nperseg=size, noverlap=size - max(size // 4, 1))
        each = swing[:-1].sum(axis=0)
        common = np.clip((swing[-1] - each) / np.maximum((parts - 1) * each, 1e-12), 0.0, 1.0)
        share = np.interp(frequency_hz, np.fft.rfftfreq(size, GRID_S)[1:], common[1:])
    kept = share * np.exp(-((2 * np.pi * frequency_hz * jitter_s) ** 2))
    gain = np.sqrt((total + total * (total - 1) * kept) / (parts + parts * (parts - 1) * share))
    gain[0] = total / parts
    return np.asarray(np.fft.irfft(np.fft.rfft(load.parts_w.sum(axis=0)) * gain, points))


def cluster_power(
    load: NodeLoad,
    num_nodes: int,
    *,
    checkpoints: Checkpoints | None = None,
    jitter_s: float = JITTER_S,
    down_w: float | None = None,
    down_frac: float = 0.0,
) -> dict[str, float]:
    """Computes the figures of power of a cluster.

    `down_w` is the power of a node while the job starts again after a failure, and `down_frac` the share of time in
    which it does.
    Returns `cluster_power_mean_w`, `_p5_w` and `_p95_w` over time. `_peak_1s_w` and `_ramp_1s_w_per_s`, from mean to
    next mean, by `WINDOWS_S` that the sensor resolves; `_range_1s_w`, from the lowest. Of 0.1 to 20 Hz, or up to the
    readings' Nyquist frequency, `cluster_swing_rms_w` and the strongest `cluster_line_1_hz`, `_1_rms_w` and 2, 3.
    """
    watts = training = training_w(load, num_nodes, jitter_s)
    mean_w = float(training.mean())
    if checkpoints is not None:
        watts, saving_frac = _cycle(load, num_nodes, training, checkpoints)
        mean_w += saving_frac * (num_nodes * checkpoints.node_w - mean_w)
    if down_w is not None:
        mean_w += down_frac * (num_nodes * down_w - mean_w)
    low_w, high_w = np.quantile(watts, (0.05, 0.95))
    found = {"cluster_power_mean_w": mean_w, "cluster_power_p5_w": float(low_w), "cluster_power_p95_w": float(high_w)}
    resolved_s = max(load.period_s, load.averaged_s / 2)
    # Windows that begin before the end go on at the front.
    around_w = np.resize(watts, len(watts) + min(len(watts), 2 * steps_of(max(WINDOWS_S.values()))))
    grid = GridEnergy(np.concatenate([[0.0], np.cumsum(around_w) * GRID_S]), resolved_s, ())
    for name, length_s in WINDOWS_S.items():
        peak_w, ramp_w_per_s = grid.peak_w(length_s), grid.ramp_w_per_s(length_s)
        if peak_w is None or ramp_w_per_s is None:
            continue
        lost_w = 0.0 if down_w is None else peak_w - num_nodes * down_w  # a failure stops all nodes at once
        found[f"cluster_power_peak_{name}_w"] = peak_w
        found[f"cluster_power_ramp_{name}_w_per_s"] = max(ramp_w_per_s, lost_w / length_s)
        if length_s == 1.0:
            lowest_w = -(GridEnergy(-grid.energy_j, resolved_s, ()).peak_w(length_s) or 0.0)
            found["cluster_power_range_1s_w"] = max(peak_w - lowest_w, lost_w)
    return found | _swing(load, watts)


def _cycle(load: NodeLoad, num_nodes: int, training: Floats, saves: Checkpoints) -> tuple[Floats, float]:
    """Renders the power from a checkpoint's end to the next one's; returns it with the checkpoint's share of time."""
    whole_s = saves.every_steps * load.step_s
    trained_s = min(whole_s, max(MOST_TRAINED_S, load.step_s))
    points = round((trained_s + saves.duration_s) / GRID_S)
    if trained_s < whole_s:  # shorter by less than 1 %: lengths with large factors take a transform ten times as long
        points, rounded = smooth_up_to(points), points
        trained_s -= (rounded - points) * GRID_S
    time_s = (np.arange(points) + 0.5) * GRID_S
    half_s = min(max(saves.edge_s, GRID_S), trained_s, saves.duration_s) / 2
    ends_s = [-half_s, half_s, trained_s - half_s, trained_s + half_s]
    trains = np.interp(time_s, ends_s, [0.0, 1.0, 1.0, 0.0], period=trained_s + saves.duration_s)
    around = round(load.averaged_s / GRID_S / 2)
    if around:
        from scipy.ndimage import uniform_filter1d  # takes 0.3 s

        trains = uniform_filter1d(trains, 2 * around, mode="wrap", origin=-1)
    saves_w = num_nodes * saves.node_w
    watts = saves_w + trains * (np.resize(training, len(trains)) - saves_w)
    return watts, saves.duration_s / (whole_s + saves.duration_s)


def smooth_up_to(most: int) -> int:
    """Returns the largest number up to `most` without factors above 7."""
    found = np.ones(1, dtype=np.int64)
    for factor in (2, 3, 5, 7):
        found = np.multiply.outer(found, factor ** np.arange(int(np.log(most) / np.log(factor)) + 1)).ravel()
        found = found[found <= most]
    return int(found.max())


def _swing(load: NodeLoad, watts: Floats) -> dict[str, float]:
    """Computes RMS and lines in the band, of power that repeats."""
    hz = np.fft.rfftfreq(len(watts), GRID_S)
    high_hz = min(SWING_BAND_HZ[1], 0.5 / load.period_s)
    band = (hz >= SWING_BAND_HZ[0]) & (hz <= high_hz)
    hz = hz[band]
    seen = np.prod([np.sinc(hz * each_s) for each_s in (*load.smoothed_s, GRID_S)], axis=0)
    power = 2 * np.abs(np.fft.rfft(watts)[band] / len(watts) / seen) ** 2
    # Multiples of LINE_HZ are in the middle of a bin.
    bins = np.floor(hz / LINE_HZ + 0.5).astype(np.int64)
    lines = np.array([np.bincount(bins, each, int(high_hz / LINE_HZ) + 2) for each in (power, power * hz)])
    found = {"cluster_swing_rms_w": float(np.sqrt(power.sum()))}
    for number in (1, 2, 3):
        middle = int(lines[0].argmax())
        of_line, of_line_hz = lines[:, middle - 1 : middle + 2].sum(axis=1)
        if of_line > 0.0:
            found[f"cluster_line_{number}_hz"] = float(of_line_hz / of_line)
            found[f"cluster_line_{number}_rms_w"] = float(np.sqrt(of_line))
            lines[:, middle - 1 : middle + 2] = 0.0
    return found

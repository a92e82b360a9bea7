"""Time and energy by phase of every rank, and energy by step: together they are those of the window."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from wattune.analysis.metrics.energy import Powers, PowerTrace
from wattune.analysis.metrics.speed import step_times_s
from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.readings import integers
from wattune.arrays import Floats, Ints
from wattune.schema import DeviceKey
from wattune.storage.parquet import codes
from wattune.units import NS_PER_S

BETWEEN: Final = "between"
"""Time of the window outside all of a rank's measured steps."""

OTHER: Final = "other"
"""Time in a step outside all of its phases."""

PARTS: Final = (BETWEEN, OTHER, "forward", "backward", "optimizer", "wait")
"""Parts of a rank's time. Of phases that nest or overlap the later one in this order counts: wait inside backward is
wait."""

COMPUTING: Final = ("forward", "backward", "optimizer")
"""Parts in which a rank computes."""

IN_STEPS: Final = PARTS[1:]
"""Parts of a rank's steps."""

RESOLVED_PERIODS: Final = 2.0
"""Sensor periods that a stretch of one phase must last, so that its power does not include its neighbours'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Timeline of one rank over the window: every moment is in exactly one of `PARTS`."""

    rank: int
    edge_s: Floats
    """Bounds of the stretches, from the window's start to its end; shape (stretches + 1,)."""
    part: Ints
    """Index into `PARTS` of every stretch."""

    @property
    def width_s(self) -> Floats:
        """Length of each stretch."""
        return np.diff(self.edge_s)

    def inside(self, *names: str) -> npt.NDArray[np.bool_]:
        """Tells which stretches belong to the named parts."""
        return np.isin(self.part, [PARTS.index(name) for name in names])

    def time_until_s(self, at_s: Floats, *names: str) -> Floats:
        """Returns the seconds spent in the named parts from the window's start up to each time."""
        spent = np.concatenate([[0.0], np.cumsum(self.width_s * self.inside(*names))])
        result: Floats = np.interp(at_s, self.edge_s, spent)
        return result


def segments(aligned: Aligned, spans: pa.Table) -> dict[DeviceKey, Segments]:
    """Builds every rank's timeline, by the device it drives; empty without measured steps."""
    steps = aligned.steps
    if steps is None:
        return {}
    phase, names = codes(spans, "phase")
    part_of = np.array([PARTS.index(name) if name in PARTS else PARTS.index(OTHER) for name in names], np.int64)
    rank, number = integers(spans, "rank"), integers(spans, "step")
    start_ns, end_ns = integers(spans, "start_mono_ns"), integers(spans, "end_mono_ns")
    # Sorted by rank once: each rank would look at the spans of all.
    measured = np.flatnonzero(np.isin(number, steps.number))
    measured = measured[np.argsort(rank[measured], kind="stable")]
    begin, end = (np.searchsorted(rank[measured], steps.rank, side=side) for side in ("left", "right"))
    found = {}
    for column, (of_rank, device) in enumerate(zip(steps.rank, steps.device, strict=True)):
        rows = measured[begin[column] : end[column]]
        step = np.searchsorted(steps.number, number[rows])
        bounds_ns = steps.start_ns[step, column], steps.end_ns[step, column]
        begin_ns, until_ns = (
            np.clip(each[rows] + steps.anchor_ns[column], *bounds_ns) - aligned.start_ns for each in (start_ns, end_ns)
        )
        found[device] = _swept(int(of_rank), begin_ns, until_ns, part_of[phase[rows]], aligned.duration_s)
    return found


def _swept(rank: int, start_ns: Ints, end_ns: Ints, part: Ints, window_s: float) -> Segments:
    """Turns intervals that may nest and overlap into stretches; each belongs to the last of `PARTS` open in it."""
    at_ns = np.concatenate([start_ns, end_ns])
    order = np.argsort(at_ns, kind="stable")
    change = np.zeros((len(at_ns), len(PARTS)), np.int32)
    change[np.arange(len(at_ns)), np.concatenate([part, part])] = np.repeat([1, -1], len(part))
    is_open = np.cumsum(change[order], axis=0) > 0
    last = len(PARTS) - 1 - np.argmax(is_open[:, ::-1], axis=1)
    label = np.where(is_open.any(axis=1), last, 0)
    edge_s = np.concatenate([[0.0], at_ns[order] / NS_PER_S, [window_s]])
    label = np.concatenate([[0], label])
    lasting = np.diff(edge_s) > 0
    # Drops stretches without length and joins neighbours of the same part.
    starts, label = edge_s[:-1][lasting], label[lasting]
    new = np.concatenate([[True], label[1:] != label[:-1]])
    return Segments(rank=rank, edge_s=np.append(starts[new], window_s), part=label[new])


def traces_by_device(aligned: Aligned, powers: Powers) -> dict[DeviceKey, tuple[PowerTrace, int]]:
    """Returns each device's trace, and the number of the trial's devices that share it."""
    found: dict[DeviceKey, tuple[PowerTrace, int]] = {}
    counted = set(aligned.devices)
    for trace in powers.traces if powers.usable else ():
        mine = [device for device in trace.devices if device in counted]
        found |= {device: (trace, len(mine)) for device in mine}
    return found


def phase_table(aligned: Aligned, powers: Powers, ways: Mapping[DeviceKey, Segments]) -> pa.Table:
    """Computes time and energy of every rank in every part of the window.

    Energy is the integral of the device's power over the stretches. All parts of a rank add up to its energy over the
    window, and all ranks to `energy_per_step_j` times the steps. A sensor cannot separate a phase shorter than two of
    its periods from its neighbours. `resolved_frac` is the share of a part's time in longer stretches; if it is small,
    the energy includes that of neighbouring phases.

    Columns are `node`, `device`, `rank`, `phase` (a name of `PARTS`), `time_s`, `energy_j` (null if traces are not
    usable) and `resolved_frac`.
    """
    traces = traces_by_device(aligned, powers)
    rows = []
    for (node, name), way in ways.items():
        width_s = way.width_s
        time_s = np.bincount(way.part, width_s, minlength=len(PARTS))
        energy_j: list[float | None] = [None] * len(PARTS)
        resolved: list[float | None] = [None] * len(PARTS)
        if (node, name) in traces:
            trace, sharers = traces[node, name]
            each_j = np.diff(_energy_until_j(trace, way.edge_s)) / sharers
            energy_j = np.bincount(way.part, each_j, minlength=len(PARTS)).tolist()
            long_s = np.where(width_s >= RESOLVED_PERIODS * trace.sensor_period_s, width_s, 0.0)
            shares = np.bincount(way.part, long_s, minlength=len(PARTS)) / np.where(time_s > 0, time_s, 1.0)
            resolved = shares.tolist()
        rows += [
            {
                "node": node,
                "device": name,
                "rank": way.rank,
                "phase": PARTS[part],
                "time_s": float(time_s[part]),
                "energy_j": energy_j[part],
                "resolved_frac": resolved[part],
            }
            for part in range(len(PARTS))
            if time_s[part] > 0
        ]
    return pa.Table.from_pylist(rows, schema=PHASE_COLUMNS)


PHASE_COLUMNS: Final = pa.schema(
    [("node", pa.string()), ("device", pa.string()), ("rank", pa.int64()), ("phase", pa.string())]
    + [(name, pa.float64()) for name in ("time_s", "energy_j", "resolved_frac")]
)
STEP_COLUMNS: Final = pa.schema(
    [("step", pa.int64()), *((name, pa.float64()) for name in ("start_s", "time_s", "energy_j"))]
)


def step_energies_j(aligned: Aligned, powers: Powers) -> Floats | None:
    """Computes energy of all devices from each measured step's start to the next one's, or to the window's end.

    Together they are the window's energy: energy between steps belongs to the step before.

    Shape (steps,); None without steps or usable power, or where power is a mean, which mixes neighbouring steps.
    """
    steps = aligned.steps
    if steps is None or not powers.usable or any(trace.averaged_s for trace in powers.traces):
        return None
    start_s = (np.sort(steps.start_ns.min(axis=1)) - aligned.start_ns) / NS_PER_S
    edge_s = np.append(start_s, aligned.duration_s)
    each: Floats = np.zeros(len(start_s))
    for trace in powers.traces:
        each += np.diff(_energy_until_j(trace, edge_s))
    return each


def step_table(aligned: Aligned, powers: Powers) -> pa.Table:
    """Lists every measured step: `step`, `start_s` from the window's start, `time_s` (slowest rank), `energy_j`."""
    steps = aligned.steps
    if steps is None:
        return STEP_COLUMNS.empty_table()
    energy_j = step_energies_j(aligned, powers)
    return pa.table(
        {
            "step": steps.number,
            "start_s": (steps.start_ns.min(axis=1) - aligned.start_ns) / NS_PER_S,
            "time_s": step_times_s(steps),
            "energy_j": pa.nulls(len(steps.number), pa.float64()) if energy_j is None else pa.array(energy_j),
        }
    )


def _energy_until_j(trace: PowerTrace, at_s: Floats) -> Floats:
    """Computes energy from the window's start up to each time.

    If the series does not reach the window's ends, its own mean extends it, as in
    `wattune.analysis.metrics.energy.total_energy_j`.
    """
    series = trace.series
    inside_j = series.cumulative(np.clip(at_s, trace.start_s, trace.end_s))
    outside_s = np.minimum(at_s, trace.start_s) + np.maximum(at_s - trace.end_s, 0.0)
    return inside_j + trace.mean_w * outside_s

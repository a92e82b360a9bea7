"""Thermal coefficients of a host's devices, fitted to recorded power and temperature."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from scipy.optimize import least_squares

from wattune.arrays import Floats
from wattune.cost.coefficients import ThermalCoefficients
from wattune.cost.temperature import lagged
from wattune.units import NS_PER_S

ROOT: Final = Path(__file__).parents[2]

CELL_S: Final = 1.0
"""Grid of a trace: core temperatures are whole degrees and move within seconds."""

LOW: Final = np.array([0.0, 0.01, 0.0, 0.1, 30.0, 1.0])
HIGH: Final = np.array([60.0, 0.1, 0.05, 1.5, 150.0, 20.0])
"""Bounds of inlet, two resistances with their time constants, and the time constant of preheating. Ranges of time
constants do not meet, so that each keeps its meaning."""

PREHEAT_HIGH: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Power and core temperature of the devices of one node, [devices, cells], each the mean over a cell."""

    power_w: Floats
    temp_c: Floats
    """NaN where it was not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFit:
    """A host's coefficients, and how much each of its slots is heated by the others."""

    coefficients: ThermalCoefficients
    """With the preheating of the slot that is heated most."""
    preheat_k_per_w: tuple[float, ...]
    """By slot."""


def run(fit: HostFit, power_w: Floats) -> Floats:
    """Computes temperatures from power alone, in balance with the first cell at the start.

    Args:
        fit: Of the host.
        power_w: Of each device, [devices, cells].
    """
    c = fit.coefficients
    ladder = zip(c.resistances_k_per_w, c.time_constants_s, strict=True)
    own = np.sum([each * lagged(power_w, tau_s, CELL_S) for each, tau_s in ladder], axis=0)
    preheat = np.array(fit.preheat_k_per_w)[:, None] * lagged(_others(power_w), c.preheat_time_constant_s, CELL_S)
    return np.asarray(c.inlet_c + own + preheat)


def _others(power_w: Floats) -> Floats:
    """Returns the mean power of each device's neighbours; 0 for a device alone."""
    return np.asarray((power_w.sum(0) - power_w) / max(len(power_w) - 1, 1))


def fit_temperature(traces: Sequence[Trace], start: ThermalCoefficients) -> HostFit:
    """Fits a host's inlet, resistances, time constants and the preheating of each slot.

    Slots share all but the preheating. In fits by slot on two hosts of four H200 each, what follows power within a
    second was the same within 7 %, and what takes seconds was two to three times as strong on two of the slots.

    Args:
        traces: Of the same devices, in the same order.
        start: First guess, with two stages. Leakage, rest and intervals are kept.
    """
    slots = len(traces[0].power_w)

    def candidate(values: Floats) -> HostFit:
        inlet_c, *rest = values[: len(LOW)].tolist()
        preheat = tuple(values[len(LOW) :].tolist())
        c = replace(
            start,
            inlet_c=inlet_c,
            resistances_k_per_w=tuple(rest[:2]),
            time_constants_s=tuple(rest[2:4]),
            preheat_time_constant_s=rest[4],
            preheat_k_per_w=max(preheat),
        )
        return HostFit(coefficients=c, preheat_k_per_w=preheat)

    def residuals(values: Floats) -> Floats:
        fit = candidate(values)
        errors = np.concatenate([(run(fit, one.power_w) - one.temp_c).ravel() for one in traces])
        return np.asarray(errors[np.isfinite(errors)])

    first = [start.inlet_c, *start.resistances_k_per_w, *start.time_constants_s, start.preheat_time_constant_s]
    most = np.full(slots, PREHEAT_HIGH if slots > 1 else 1e-9)
    low, high = np.concatenate([LOW, np.zeros(slots)]), np.concatenate([HIGH, most])
    begin = np.clip(np.concatenate([first, np.minimum(start.preheat_k_per_w / 2, most)]), low, high)
    return candidate(least_squares(residuals, begin, bounds=(low, high), x_scale="jac").x)


def recording(name: str) -> Trace:
    """Reads a recording of four H200s as means over each second."""
    folder = ROOT / "tests" / "golden" / "h200x4" / name / "telemetry" / "node0"
    ring, fast = (pq.read_table(folder / f"{tier}.parquet") for tier in ("ring", "fast"))
    offset_ns = fast["wall_ns"][0].as_py() - fast["mono_ns"][0].as_py()
    names = sorted(pc.unique(fast["device"].cast("string")).to_pylist())
    first_s = fast["mono_ns"].to_numpy().min() / NS_PER_S + 0.5
    seconds = int(fast["mono_ns"].to_numpy().max() / NS_PER_S - first_s) - 1
    powers, temps = [], []
    for device in names:
        rows = ring.filter(pc.equal(ring["device"].cast("string"), device))
        at_s, once = np.unique((rows["sensor_ns"].to_numpy() - offset_ns) / NS_PER_S, return_index=True)
        watts = rows["power_w"].to_numpy()[once].astype(np.float64)
        joules = np.append(0.0, np.cumsum(np.diff(at_s) * (watts[1:] + watts[:-1]) / 2))
        powers.append(np.diff(np.interp(first_s + np.arange(seconds + 1), at_s, joules)))
        rows = fast.filter(pc.equal(fast["device"].cast("string"), device))
        cell = np.floor(rows["mono_ns"].to_numpy() / NS_PER_S - first_s).astype(int)
        value = rows["gpu_temp_c"].to_numpy().astype(np.float64)
        temps.append([value[cell == second].mean() for second in range(seconds)])
    return Trace(power_w=np.stack(powers), temp_c=np.array(temps))


def study_trace(name: str = "moe_ep_h200x4") -> Trace:
    """Reads a series of `benchmarks/data/temperature`: by default eight minutes of 21 trials on another host."""
    table = pq.read_table(ROOT / "benchmarks" / "data" / "temperature" / f"{name}.parquet")
    names = sorted(pc.unique(table["device"].cast("string")).to_pylist())
    rows = [table.filter(pc.equal(table["device"].cast("string"), name)).sort_by("second") for name in names]
    power_w, temp_c = (
        np.stack([each[name].to_numpy(zero_copy_only=False).astype(np.float64) for each in rows])
        for name in ("power_w", "gpu_temp_c")
    )
    return Trace(power_w=power_w, temp_c=temp_c)

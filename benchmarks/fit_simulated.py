"""Fits the simulated H200 to two recordings and shows all three beside what was recorded.

    python benchmarks/fit_simulated.py          # prints the rows of benchmarks/results/fit_simulated.md
    python benchmarks/fit_simulated.py --fit    # fits anew and prints parameters to copy into the code

Fitted on dp4 (plan, clock under a cap, thermal) and square_inphase (peak power, how fast the cap acts, thermal); the
fit never looks at tp2pp2. Order: powers at rest and at full load are read off; thermal parameters are a linear least
squares on recorded power for each pair of time constants; clock exponent, noise and activation passes are a
Nelder-Mead search over the whole simulation for each window of the cap.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from wattune.catalog.hardware import ClusterSpec, device
from wattune.catalog.models import ModelSpec
from wattune.plans.axes import Plan
from wattune.simulation.activity import ROOFLINE, DeviceActivity, Part, Roofline, node_activities
from wattune.simulation.device_model import CELL_S, KINDS, DeviceModel, ThermalModel, device_model, lag, upstream_of
from wattune.simulation.sensors import LEAD_S, REFRESH_S, TAIL_S, SimulatedNode, simulate_node
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S, s_to_ns
from wattune.workload import Workload

Array = npt.NDArray[np.float64]

FOLDER: Final = Path(__file__).parent.parent / "tests" / "golden" / "h200x4"
FITTED: Final = ("dp4", "square_inphase")
HELD_OUT: Final = "tp2pp2"
SEED: Final = 0

DENSE: Final = ModelSpec(
    name="dense",
    num_layers=8,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=32000,
    source="manifests of the recordings",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recorded folder."""

    spans: pa.Table
    tables: Mapping[str, pa.Table]
    plan: Mapping[str, object]
    """As its manifest has it; empty for plain matrix products."""

    @property
    def start_ns(self) -> int:
        """First span, monotonic."""
        return int(pc.min(self.spans["start_mono_ns"]).as_py())

    @property
    def end_ns(self) -> int:
        """Last span, monotonic."""
        return int(pc.max(self.spans["end_mono_ns"]).as_py())

    @property
    def devices(self) -> list[str]:
        """Names in order."""
        return sorted(pc.unique(self.spans["device"].cast(pa.string())).to_pylist())

    @property
    def node(self) -> SimulatedNode:
        """The node to simulate."""
        offset_ns = pc.subtract(self.spans["start_wall_ns"], self.spans["start_mono_ns"])[0].as_py()
        return SimulatedNode(name="node0", wall_minus_mono_ns=offset_ns, temp_slowdown_c=89.0, tensor_cores=True)

    @property
    def spec(self) -> TrialSpec:
        """The trial this was. Overlapped parameter gathering means Megatron's distributed optimizer, which is zero1."""
        names = {"tp", "pp", "ep", "micro_batch_size", "overlap"}
        sharding = "zero1" if self.plan["overlap"] == "grad_param" else "none"
        return TrialSpec(
            model=DENSE,
            cluster=ClusterSpec(device="h200_sxm", devices_per_node=4),
            engine="megatron",
            workload=Workload(seq_len=4096, global_batch_size=16),
            plan=Plan(**{key: value for key, value in self.plan.items() if key in names}, sharding=sharding),
        )

    def activities(self, roofline: Roofline = ROOFLINE) -> list[DeviceActivity]:
        """Returns what the devices did: by the plan, or matrix products in every span where there is no plan."""
        if self.plan:
            return node_activities(self.spec, self.spans, roofline)["node0"]
        products = np.array([float(kind == "tensor") for kind in KINDS])
        result = []
        for name in self.devices:
            rows = self.spans.filter(pc.equal(self.spans["device"].cast(pa.string()), name))
            times = [rows[column].to_numpy() for column in ("start_mono_ns", "end_mono_ns")]
            part = Part(start_ns=times[0], end_ns=times[1], shares=products)
            result.append(DeviceActivity(device=name, steps=None, phases=(part,)))
        return result

    def column(self, tables: Mapping[str, pa.Table], tier: str, name: str, device_name: str) -> tuple[Array, Array]:
        """Seconds since the first span and values of a device's column, each ring sample at its own time."""
        table = tables[tier]
        rows = table.filter(pc.equal(table["device"].cast(pa.string()), device_name))
        at_ns = rows["mono_ns"].to_numpy()
        if tier == "ring":
            at_ns = rows["sensor_ns"].to_numpy() - self.node.wall_minus_mono_ns
        at_ns, first = np.unique(at_ns, return_index=True)
        values = rows[name].to_numpy()[first].astype(np.float64)
        return (at_ns - self.start_ns) / NS_PER_S, values


@functools.cache
def load(name: str) -> Recording:
    """A recording by the name of its folder."""
    folder = FOLDER / name
    tiers = ("ring", "fast", "counter", "slow")
    return Recording(
        spans=pq.read_table(folder / "spans.parquet"),
        tables={tier: pq.read_table(folder / "telemetry" / "node0" / f"{tier}.parquet") for tier in tiers},
        plan=json.loads((folder / "manifest.json").read_text())["plan"],
    )


def simulated_tables(
    recording: Recording, model: DeviceModel | None = None, roofline: Roofline = ROOFLINE
) -> dict[str, pa.Table]:
    """The tables the simulation gives for a recording's load."""
    tables, _ = simulate_node(
        model or device_model(device("h200_sxm")),
        recording.node,
        recording.activities(roofline),
        first_ns=recording.start_ns - s_to_ns(LEAD_S),
        last_ns=recording.end_ns + s_to_ns(TAIL_S),
        seed=SEED,
    )
    return tables


def figures(recording: Recording, tables: Mapping[str, pa.Table]) -> dict[str, float]:
    """Returns the compared figures by name and device. Power is between first and last span, on a grid of 10 ms.

    A temperature's rise is from before any load to the last second of it: the recordings begin idle, and warm-up steps
    that have no spans have heated the die before the first span.
    """
    load_s = (recording.end_ns - recording.start_ns) / NS_PER_S
    grid_s = np.arange(0.0, load_s, 0.01)
    node_w = np.zeros_like(grid_s)
    result = {}
    for name in recording.devices:
        power_w = np.interp(grid_s, *recording.column(tables, "ring", "power_w", name))
        node_w += power_w
        result[f"mean_w {name}"] = power_w.mean()
        result[f"p5_w {name}"], result[f"p95_w {name}"] = np.percentile(power_w, [5, 95])
        result[f"max_w {name}"] = power_w.max()
        for key, tier, column in (
            ("clock_mhz", "fast", "sm_clock_mhz"),
            ("tensor_frac", "counter", "tensor_active_frac"),
            ("dram_frac", "counter", "dram_active_frac"),
            ("sm_frac", "counter", "sm_active_frac"),
        ):
            at_s, values = recording.column(tables, tier, column, name)
            result[f"{key} {name}"] = np.nanmean(values[(at_s >= 0) & (at_s <= load_s)])
        for key, tier, column, last_s in (
            ("rise_c", "fast", "gpu_temp_c", 1),
            ("memory_rise_c", "slow", "memory_temp_c", 2),
        ):
            at_s, values = recording.column(tables, tier, column, name)
            result[f"{key} {name}"] = values[(at_s > load_s - last_s) & (at_s <= load_s)].mean() - values[0]
    for key, window in (("peak_100ms_w node", 10), ("peak_1s_w node", 100)):
        result[key] = np.convolve(node_w, np.full(window, 1 / window), "valid").max()
    return result


def fit_rest(model: DeviceModel) -> DeviceModel:
    """Powers that can be read off: idle, ready (highest clock, nothing running), and products before the cap acts."""
    idle_w, ready_w, peak_w = [], [], []
    for recording in map(load, FITTED):
        for name in recording.devices:
            at_s, power_w = recording.column(recording.tables, "ring", "power_w", name)
            fast_s, clock_mhz = recording.column(recording.tables, "fast", "sm_clock_mhz", name)
            clock = np.interp(at_s, fast_s, clock_mhz)
            before = at_s < -4
            idle_w.append(np.median(power_w[before & (clock < model.power.clock_idle_mhz + 1)]))
            ready_w.append(np.median(power_w[before & (clock > model.power.clock_max_mhz - 1)]))
            if not recording.plan:
                peak_w.append(np.percentile(power_w, 99.5))
    ready = float(np.mean(ready_w))
    power = replace(
        model.power,
        idle_power_w=round(float(np.mean(idle_w)), 1),
        ready_power_w=round(ready, 1),
        dynamic_power_w=round(float(np.mean(peak_w)) - ready, 1),
    )
    return replace(model, power=power)


def thermal_rows(
    thermal: ThermalModel, taus_s: tuple[float, float], tier: str, column: str
) -> tuple[Array, Array, Array]:
    """Regressors of temperature from recorded power: die lag by device, sink lag, air; and the temperature."""
    die_rows, shared_rows, values = [], [], []
    for recording in map(load, FITTED):
        start_s = recording.column(recording.tables, "fast", "gpu_temp_c", "gpu0")[0][0]
        grid_s = np.arange(start_s, (recording.end_ns - recording.start_ns) / NS_PER_S + 5, CELL_S)
        power_w = np.stack(
            [
                np.interp(grid_s, *recording.column(recording.tables, "ring", "power_w", name))
                for name in recording.devices
            ]
        )
        die, sink = lag(power_w, taus_s)
        air = upstream_of(thermal, sink, list(range(len(die))))
        for row, name in enumerate(recording.devices):
            at_s, temp_c = recording.column(recording.tables, tier, column, name)
            # A shown temperature is half a refresh old in the mean.
            cell = np.searchsorted(grid_s, at_s - REFRESH_S / 2) - 1
            inside = (cell >= 0) & (cell < len(grid_s) - 1)
            cell = cell[inside]
            die_rows.append(np.eye(len(die))[row][None, :] * die[row, cell][:, None])
            shared_rows.append(np.stack([np.ones(len(cell)), sink[row, cell], air[row, cell]], axis=1))
            values.append(temp_c[inside])
    return np.concatenate(die_rows), np.concatenate(shared_rows), np.concatenate(values)


def fit_thermal(model: DeviceModel) -> DeviceModel:
    """Resistances by least squares for each pair of time constants, the best pair kept; core first, then memory."""
    thermal, best = model.thermal, np.inf
    for die_tau_s, sink_tau_s in itertools.product((0.1, 0.15, 0.2, 0.25, 0.3, 0.4), (4.0, 5.0, 6.0, 8.0, 10.0, 15.0)):
        die, shared, temp_c = thermal_rows(model.thermal, (die_tau_s, sink_tau_s), "fast", "gpu_temp_c")
        rows = np.concatenate([die, shared], axis=1)
        found = np.linalg.lstsq(rows, temp_c, rcond=None)[0]
        error_c = float(np.sqrt(np.mean((rows @ found - temp_c) ** 2)))
        if error_c < best and found.min() > 0:
            best = error_c
            thermal = replace(
                thermal,
                die_c_per_w=tuple(np.round(found[:-3], 4).tolist()),
                die_tau_s=die_tau_s,
                inlet_c=round(float(found[-3]), 1),
                sink_c_per_w=round(float(found[-2]), 5),
                sink_tau_s=sink_tau_s,
                air_c_per_w=round(float(found[-1]), 5),
            )
    print(f"core temperature: RMS error {best:.2f} C")
    best = np.inf
    for memory_tau_s in (0.3, 0.4, 0.5, 0.6, 0.8, 1.0):
        die, shared, temp_c = thermal_rows(thermal, (memory_tau_s, thermal.sink_tau_s), "slow", "memory_temp_c")
        rows = np.concatenate([die.sum(axis=1, keepdims=True), shared[:, :2]], axis=1)
        warm_c = temp_c - thermal.air_c_per_w * shared[:, 2]
        found = np.linalg.lstsq(rows, warm_c, rcond=None)[0]
        error_c = float(np.sqrt(np.mean((rows @ found - warm_c) ** 2)))
        if error_c < best:
            best = error_c
            thermal = replace(
                thermal,
                memory_c_per_w=round(float(found[0]), 5),
                memory_tau_s=memory_tau_s,
                memory_inlet_c=round(float(found[1]), 1),
                memory_sink_c_per_w=round(float(found[2]), 5),
            )
    print(f"memory temperature: RMS error {best:.2f} C")
    return replace(model, thermal=thermal)


def fit_load(model: DeviceModel) -> tuple[DeviceModel, Roofline]:
    """Clock exponent, noise, activation passes and the cap's window, by simulating the fitted recordings."""
    from scipy.optimize import minimize  # only the fit needs it

    # Of dp4 the mean power says little (it is the cap's); its clock says how much power was asked for.
    keys = {
        "dp4": ("mean_w", "clock_mhz", "p5_w", "p95_w", "tensor_frac"),
        "square_inphase": ("mean_w", "clock_mhz", "p95_w", "peak_100ms_w", "peak_1s_w"),
    }
    recorded = {name: figures(load(name), load(name).tables) for name in FITTED}

    def candidate(values: Array, window_s: float) -> tuple[DeviceModel, Roofline]:
        exponent, noise, passes = (round(float(value), digits) for value, digits in zip(values, (3, 3, 2), strict=True))
        power = replace(model.power, clock_exponent=exponent, noise_frac=noise, cap_window_s=window_s)
        return replace(model, power=power), replace(ROOFLINE, activation_passes=passes)

    def cost(values: Array, window_s: float) -> float:
        if min(values) <= 0:
            return 1e6
        total = 0.0
        for name, wanted in keys.items():
            simulated = figures(load(name), simulated_tables(load(name), *candidate(values, window_s)))
            errors = [simulated[key] / value - 1 for key, value in recorded[name].items() if key.split()[0] in wanted]
            total += float(np.mean(np.square(errors)))
        return total

    best_cost, best = np.inf, candidate(np.array([1.2, 0.1, 12.0]), 0.06)
    for window_s in (0.04, 0.05, 0.06, 0.07, 0.08):
        simplex = np.array([[1.2, 0.1, 12.0], [1.5, 0.1, 12.0], [1.2, 0.2, 12.0], [1.2, 0.1, 20.0]])
        options = {"initial_simplex": simplex, "xatol": 1e-3, "fatol": 1e-6, "maxiter": 60}
        found = minimize(cost, simplex[0], args=(window_s,), method="Nelder-Mead", options=options)
        print(f"cap window {window_s:.2f} s: cost {found.fun:.5f} at {np.round(found.x, 3)}")
        if found.fun < best_cost:
            best_cost, best = found.fun, candidate(found.x, window_s)
    return best


def print_comparison(name: str, model: DeviceModel | None, roofline: Roofline) -> None:
    """Simulated beside recorded, one line a figure, devices averaged; worst error over the devices."""
    recording = load(name)
    recorded, simulated = (
        figures(recording, recording.tables),
        figures(recording, simulated_tables(recording, model, roofline)),
    )
    print(f"\n{name} ({'held out' if name == HELD_OUT else 'fitted'})")
    print(f"{'figure':>22}  {'recorded':>9} {'simulated':>9} {'error':>7}")
    for key, value in recorded.items():
        if not key.startswith(("p5", "p95", "max", "clock", "tensor", "dram", "sm", "memory")) or key.endswith(
            ("0", "3")
        ):
            print(f"{key:>22}  {value:9.3f} {simulated[key]:9.3f} {simulated[key] / value - 1:+7.1%}")


def main() -> None:
    """Prints the table, after a new fit where asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit anew instead of taking the parameters in the code")
    model, roofline = None, ROOFLINE
    if parser.parse_args().fit:
        model, roofline = fit_load(fit_thermal(fit_rest(device_model(device("h200_sxm")))))
        print(model.power, model.thermal, roofline, sep="\n")
    for name in (*FITTED, HELD_OUT):
        print_comparison(name, model, roofline)


if __name__ == "__main__":
    main()

"""Shows the simulated H200 beside three recordings.

    python benchmarks/simulated_sensors.py      # prints the rows of benchmarks/results/fit_simulated.md

Its parameters were fitted to dp4 (plan, clock under a cap, thermal) and square_inphase (peak power, how fast the cap
acts, thermal); the fit (`git show b47a596:benchmarks/fit_simulated.py`) never looked at tp2pp2.
"""

import functools
import json
import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from harness import Found, Rows, benchmark

from wattune.catalog.hardware import ClusterSpec, device
from wattune.catalog.models import model
from wattune.plans.axes import Plan
from wattune.simulation.activity import DeviceActivity, Part, node_activities
from wattune.simulation.device_model import KINDS, device_model
from wattune.simulation.sensors import LEAD_S, TAIL_S, simulate_node
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S, s_to_ns
from wattune.workload import Workload

Array = npt.NDArray[np.float64]

FOLDER: Final = Path(__file__).parent.parent / "tests" / "golden" / "h200x4"
FITTED: Final = ("dp4", "square_inphase")
HELD_OUT: Final = "tp2pp2"
SEED: Final = 0
MOST_OFF: Final = {"mean_w": 0.05, "peak_1s_w": 0.05, "rise_c": 0.10}

DENSE: Final = replace(model("llama3_8b"), name="dense", num_layers=8, vocab_size=32000)
"""By the manifests of the recordings."""


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
    def wall_minus_mono_ns(self) -> int:
        """Lead of the node's wall clock over its monotonic one."""
        return int(pc.subtract(self.spans["start_wall_ns"], self.spans["start_mono_ns"])[0].as_py())

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

    def activities(self) -> list[DeviceActivity]:
        """Returns what the devices did: by the plan, or matrix products in every span where there is no plan."""
        if self.plan:
            return node_activities(self.spec, self.spans)["node0"]
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
            at_ns = rows["sensor_ns"].to_numpy() - self.wall_minus_mono_ns
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


def simulated_tables(recording: Recording) -> dict[str, pa.Table]:
    """The tables the simulation gives for a recording's load."""
    tables, _ = simulate_node(
        device_model(device("h200_sxm")),
        "node0",
        recording.activities(),
        wall_minus_mono_ns=recording.wall_minus_mono_ns,
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


def compared(name: str) -> list[tuple[str, float, float]]:
    """Returns recorded and simulated figures of a recording; of those by device, the ends alone."""
    recording = load(name)
    recorded, simulated = (figures(recording, tables) for tables in (recording.tables, simulated_tables(recording)))
    fine = ("p5", "p95", "max", "clock", "tensor", "dram", "sm", "memory")
    return [(key, one, simulated[key]) for key, one in recorded.items() if not key.startswith(fine) or key[-1] in "03"]


@benchmark(
    claim="Simulated mean power, peak of the node and rise of temperature are near the recorded ones.",
    bar=f"the recording that was held out: mean power and 1 s peak within {MOST_OFF['mean_w']:.0%}, rise within 10 %",
)
def main(_: Namespace) -> Found:
    """Simulates what was recorded."""
    rows, missed = Rows("recording", "figure", "recorded", "simulated", "error_ratio"), []
    for name in (*FITTED, HELD_OUT):
        for key, recorded, simulated in compared(name):
            error = simulated / recorded - 1
            rows.add(name, key, recorded, simulated, error)
            if name == HELD_OUT and abs(error) > MOST_OFF.get(key.split()[0], math.inf):
                missed.append(f"{key} {error:+.1%}")
    return Found(rows, missed=missed)


if __name__ == "__main__":
    main()

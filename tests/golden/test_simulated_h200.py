"""The simulated H200 against three recordings.

Bounds are the worst error seen, rounded up. The promise to users is 15 % on what is asserted here; tp2pp2 was never
looked at by the fit (`git show b47a596:benchmarks/fit_simulated.py`).
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from wattune.catalog.hardware import ClusterSpec, device
from wattune.catalog.models import model
from wattune.plans.axes import Plan
from wattune.simulation.activity import DeviceActivity, Part, node_activities
from wattune.simulation.device_model import KINDS, device_model
from wattune.simulation.sensors import LEAD_S, TAIL_S, simulate_node
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S, s_to_ns
from wattune.workload import Workload

FOLDER = Path(__file__).parent / "h200x4"
DENSE = replace(model("llama3_8b"), name="dense", num_layers=8, vocab_size=32000)
"""By the manifests of the recordings."""

# Largest relative error of: mean power of a device, 1 s peak of the node, rise of a slot's core temperature. A rise is
# compared as shown, in whole degrees averaged over a second: 0.5 of 15 degrees, 3 %, is the sensor's own.
BOUNDS = {"dp4": (0.02, 0.02, 0.10), "square_inphase": (0.08, 0.08, 0.15), "tp2pp2": (0.05, 0.05, 0.10)}


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

    def column(
        self, tables: Mapping[str, pa.Table], tier: str, name: str, device_name: str
    ) -> tuple[np.ndarray, np.ndarray]:
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
        seed=0,
    )
    return tables


def figures_of(recording: Recording, tables: Mapping[str, pa.Table]) -> dict[str, float]:
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
        result[f"max_w {name}"] = power_w.max()
        at_s, values = recording.column(tables, "fast", "sm_clock_mhz", name)
        result[f"clock_mhz {name}"] = np.nanmean(values[(at_s >= 0) & (at_s <= load_s)])
        at_s, values = recording.column(tables, "fast", "gpu_temp_c", name)
        result[f"rise_c {name}"] = values[(at_s > load_s - 1) & (at_s <= load_s)].mean() - values[0]
    for key, window in (("peak_100ms_w node", 10), ("peak_1s_w node", 100)):
        result[key] = np.convolve(node_w, np.full(window, 1 / window), "valid").max()
    return result


@pytest.fixture(scope="module", params=sorted(BOUNDS))
def compared(request):
    recording = load(request.param)
    simulated = simulated_tables(recording)
    return request.param, figures_of(recording, recording.tables), figures_of(recording, simulated), simulated


def relative_errors(recorded, simulated, figure):
    keys = [key for key in recorded if key.split()[0] == figure]
    assert keys
    return {key: simulated[key] / recorded[key] - 1 for key in keys}


@pytest.mark.parametrize(("index", "figure"), [(0, "mean_w"), (1, "peak_1s_w"), (2, "rise_c")])
def test_simulated_figure_is_within_its_bound_of_the_recorded_one(compared, index, figure):
    name, recorded, simulated, _ = compared
    errors = relative_errors(recorded, simulated, figure)
    assert max(map(abs, errors.values())) <= BOUNDS[name][index] <= 0.15, errors


def test_clock_lost_to_the_cap_is_the_recorded_one_within_5_percent_of_the_clock(compared):
    _, recorded, simulated, _ = compared
    errors = relative_errors(recorded, simulated, "clock_mhz")
    assert max(map(abs, errors.values())) <= 0.05, errors


def test_last_stage_works_harder_than_the_first_as_recorded():
    recording = load("tp2pp2")
    simulated = figures_of(recording, simulated_tables(recording))
    first, last = (np.mean([simulated[f"mean_w gpu{slot}"] for slot in slots]) for slots in ((0, 1), (2, 3)))
    first_mhz, last_mhz = (np.mean([simulated[f"clock_mhz gpu{slot}"] for slot in slots]) for slots in ((0, 1), (2, 3)))
    assert last - first > 10  # 39 W recorded
    assert first_mhz - last_mhz > 50  # 113 MHz recorded


def test_outer_slots_are_hotter_than_inner_ones_as_recorded(compared):
    _, recorded, simulated, _ = compared
    for figures in (recorded, simulated):
        rises = [figures[f"rise_c gpu{slot}"] for slot in range(4)]
        assert min(rises[0], rises[3]) > max(rises[1], rises[2])


def test_products_in_phase_pass_the_limit_in_a_node_100_ms_mean_as_recorded():
    recording = load("square_inphase")
    for tables in (recording.tables, simulated_tables(recording)):
        figures = figures_of(recording, tables)
        assert figures["peak_100ms_w node"] > 1.05 * 4 * 700
        assert max(figures[f"max_w {name}"] for name in recording.devices) > 900


def test_power_cap_is_reported_through_any_busy_load_as_recorded(compared):
    _, _, _, simulated = compared
    recording = load(compared[0])
    load_s = (recording.end_ns - recording.start_ns) / 1e9
    for tables in (recording.tables, simulated):
        for name in recording.devices:
            at_s, reasons = recording.column(tables, "fast", "event_reasons", name)
            inside = (at_s > 0.3) & (at_s < load_s)
            assert np.mean(reasons[inside] == 0x4) > 0.9
            at_s, counter_ns = recording.column(tables, "slow", "throttle_power_ns", name)
            inside = (at_s > 0.3) & (at_s < load_s)
            ran = np.ptp(counter_ns[inside]) / 1e9 / np.ptp(at_s[inside])
            assert 0.9 < ran < 1.05


def test_ring_spacing_is_the_recorded_one(compared):
    name, _, _, simulated = compared
    recording = load(name)
    for tables in (recording.tables, simulated):
        at_s, _ = recording.column(tables, "ring", "power_w", "gpu0")
        inside = (at_s > 0) & (at_s < (recording.end_ns - recording.start_ns) / 1e9)
        steps_s = np.diff(at_s[inside])
        assert np.median(steps_s) == pytest.approx(0.02, abs=2e-4)
        assert steps_s.min() > 0.004
        assert 0.03 < steps_s.max() < 0.06


def test_rest_is_what_the_recordings_show_before_and_after_their_loads():
    power = device_model(device("h200_sxm"))
    recording = load("dp4")
    at_s, power_w = recording.column(recording.tables, "ring", "power_w", "gpu1")
    assert power.idle_power_w == pytest.approx(np.median(power_w[at_s < -10]), abs=2)
    assert power.ready_power_w == pytest.approx(np.median(power_w[(at_s > -7) & (at_s < -4)]), abs=4)

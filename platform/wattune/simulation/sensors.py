"""Simulated sensors: the tables a node's GPUs would have given, computed after a trial from its spans and its plan.

It stands in where there is no GPU to read. `activity` gives the activity of each device, `device_model` turns that into
power, clock and temperature, and this module reads them as an H200's sensors do (periods, jitter, whole degrees, held
values). Everything made here is labelled: backend `simulated`, `wattune.simulated = true` in every table, `simulated`
in manifests.

Values the model does not compute are null, never 0: NVLink and PCIe bytes (their rates would divide a plan's bytes by
another machine's time) and memory in use.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wattune.arrays import Ints
from wattune.schema import THROTTLE_REASON_BITS, table_schema
from wattune.simulation.activity import DeviceActivity, node_activities
from wattune.simulation.device_model import CELL_S, Array, DeviceModel, DeviceTrace, device_model, run
from wattune.telemetry.backend import DeviceInfo
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S, ns_to_s, s_to_ns

BACKEND: Final = "simulated"

LEAD_S: Final = 2.0
"""Time from the start of the tables to the first span."""

TAIL_S: Final = 1.0
"""Time from the last span to the end of the tables."""

RATE_HZ: Final[dict[str, float]] = {"fast": 20.0, "counter": 5.0, "slow": 1.0}
"""Reads a second of every device, the sampler's defaults; the ring is drained with `slow`."""

RING_PERIOD_S: Final = 0.02
LATE_SLOT_FRAC: Final = 0.3
LATE_SLOT_S: Final = 0.015
"""Ring slots while something runs: 3 in 10 come up to 15 ms late (dp4: steps of 7 to 46 ms, 20 ms in the median)."""

REFRESH_S: Final = 0.1
"""Instant power, clock, reasons, temperatures and the energy counter change this often (all recordings)."""

AVERAGE_S: Final = 1.0
"""Window of average power (NVML: field 185 is a boxcar of one second)."""

READ_S: Final = 0.006
"""Time one device's fast row takes before the next device is read (all recordings)."""

SENSOR_NOISE_W: Final = 0.3
"""Standard deviation of a power reading at idle."""

ACTIVE_FRAC: Final[dict[str, tuple[float, ...]]] = {
    "tensor_active_frac": (0.936, 0.0, 0.0, 0.0, 0.0),
    "dram_active_frac": (0.18, 0.5, 0.1, 0.0, 0.05),
    "sm_active_frac": (0.966, 0.9, 0.5, 0.1, 0.2),
}
"""Activity counters while a device is in each of `KINDS`: `tensor` as measured on endless bf16 products, the others
chosen so that dp4 comes out as recorded. On tp2pp2 they are 3 to 25 % too high, and no test bounds them. Cores that do
fp32 are not the tensor cores: null there."""

_IDLE_BIT: Final = 0x1
_MARGIN_BELOW_SLOWDOWN_C: Final = 2.0
"""The margin counts to the highest operating temperature, 87 of 89 °C on H200: 30 + 57 in dp4."""


def simulate(spec: TrialSpec, spans: pa.Table, *, seed: int) -> dict[str, tuple[dict[str, pa.Table], dict[str, Any]]]:
    """Telemetry of every node and device that has spans, a pure function of its arguments.

    `cluster.sensed_device` is simulated, with the plan's limit and clock. Spans are those of all ranks, warm-up
    included, in any order. Returns by node the tables by tier (`ring`, `fast`, `counter`, `slow`) and the manifest,
    from `LEAD_S` before the node's first span to `TAIL_S` after its last. Raises `TelemetryError` where the sensed
    device has no power limit or peaks in the catalog, or two ranks share a device.
    """
    device = spec.cluster.sensed_device
    model, plan = device_model(device), spec.plan
    limit_w, lock_mhz = plan.power_limit_w or model.limit_w, plan.clock_mhz or np.inf
    model = replace(model, limit_w=limit_w, clock_lock_mhz=lock_mhz, tensor_cores=plan.dtype != "fp32")
    result = {}
    for name, activities in node_activities(spec, spans).items():
        rows = spans.filter(pc.equal(spans["node"].cast(pa.string()), name))
        offsets_ns = np.sort(pc.subtract(rows["start_wall_ns"], rows["start_mono_ns"]).to_numpy())
        ahead_ns = int(offsets_ns[len(offsets_ns) // 2])
        first_ns = pc.min(rows["start_mono_ns"]).as_py() - s_to_ns(LEAD_S)
        last_ns = pc.max(rows["end_mono_ns"]).as_py() + s_to_ns(TAIL_S)
        result[name] = simulate_node(
            model, name, activities, wall_minus_mono_ns=ahead_ns, first_ns=first_ns, last_ns=last_ns, seed=seed
        )
    return result


def simulate_node(
    model: DeviceModel,
    node: str,
    activities: Sequence[DeviceActivity],
    *,
    wall_minus_mono_ns: int,
    first_ns: int,
    last_ns: int,
    seed: int,
) -> tuple[dict[str, pa.Table], dict[str, Any]]:
    """Telemetry of one node from what its devices did, wherever that comes from.

    The tables run from `first_ns` to `last_ns` on the node's monotonic clock. Every device has a random stream of its
    own, so no device's depends on another's.
    """
    cell_ns = s_to_ns(CELL_S)
    edges_ns = first_ns + cell_ns * np.arange((last_ns - first_ns) // cell_ns + 1, dtype=np.int64)
    slots = device_slots([activity.device for activity in activities])
    streams = [
        np.random.default_rng([seed, zlib.crc32(f"{node}/{activity.device}".encode())]) for activity in activities
    ]
    shares = np.stack([activity.shares(edges_ns) for activity in activities])
    per_slot = round(RING_PERIOD_S / CELL_S)
    cells = len(edges_ns) - 1
    noise = np.stack([stream.standard_normal(cells // per_slot + 1).repeat(per_slot)[:cells] for stream in streams])
    trace = run(model, shares, slots, noise)
    sensors = [
        _Sensors(model, wall_minus_mono_ns, activity.device, slot, edges_ns, shares[row], trace, row, streams[row])
        for row, (activity, slot) in enumerate(zip(activities, slots, strict=True))
    ]
    tables = {
        tier: _table(tier, node, wall_minus_mono_ns, [(each.device, each.read(tier)) for each in sensors])
        for tier in _TIERS
    }
    return tables, _manifest(model, node, sensors, tables)


def device_slots(devices: Sequence[str]) -> list[int]:
    """Slots by the number each name ends with (`gpu3` is slot 3); by order where a name has none or two share one."""
    numbers = [int(match[0]) for name in devices if (match := re.search(r"\d+$", name))]
    return numbers if len(set(numbers)) == len(devices) else list(range(len(devices)))


class _Sensors:
    """The sensors of one device: what they say at a moment, from the trace."""

    def __init__(
        self,
        model: DeviceModel,
        wall_minus_mono_ns: int,
        device: str,
        slot: int,
        edges_ns: Ints,
        shares: Array,
        trace: DeviceTrace,
        row: int,
        stream: np.random.Generator,
    ) -> None:
        self.device, self.slot = device, slot
        self._model, self._ahead_ns, self._stream = model, wall_minus_mono_ns, stream
        self._edges_ns, self._shares, self._trace, self._row = edges_ns, shares, trace, row
        self._energy_j = np.concatenate([[0.0], np.cumsum(trace.power_w[row]) * CELL_S])
        self._busy = shares.sum(axis=0) > 0
        phase_ns = stream.integers(s_to_ns(REFRESH_S))
        jitter_ns = stream.normal(0, s_to_ns(0.002), len(edges_ns)).astype(np.int64)
        refreshes = np.arange(edges_ns[0] + phase_ns, edges_ns[-1], s_to_ns(REFRESH_S), dtype=np.int64)
        self._refreshed_ns = np.concatenate([edges_ns[:1], refreshes + jitter_ns[: len(refreshes)]])

    def read(self, tier: str) -> dict[str, npt.NDArray[Any]]:
        """All of one tier's rows, by column; a column left out is null."""
        return {"ring": self._ring, "fast": self._fast, "counter": self._counter, "slow": self._slow}[tier]()

    def _ring(self) -> dict[str, npt.NDArray[Any]]:
        """The driver's history: means of 20 ms, drained once a second."""
        period_ns = s_to_ns(RING_PERIOD_S)
        sample_ns = np.arange(self._edges_ns[0] + period_ns, self._edges_ns[-1], period_ns, dtype=np.int64)
        late = (self._stream.random(len(sample_ns)) < LATE_SLOT_FRAC) & self._busy[self._cell(sample_ns)]
        delay_ns = (self._stream.random(len(sample_ns)) * s_to_ns(LATE_SLOT_S)).astype(np.int64)
        sample_ns = sample_ns + np.where(late, delay_ns, 0)
        sample_ns = sample_ns[sample_ns <= self._edges_ns[-1]]
        drains_ns = np.append(self._ticks("slow"), self._edges_ns[-1])
        return {
            "mono_ns": drains_ns[np.searchsorted(drains_ns[:-1], sample_ns)],
            "sensor_ns": sample_ns + self._ahead_ns,
            "power_w": self._noisy(self._mean_w(sample_ns, RING_PERIOD_S)),
        }

    def _fast(self) -> dict[str, npt.NDArray[Any]]:
        at_ns = self._ticks("fast")
        held_ns, row, trace = self._held(at_ns), self._row, self._trace
        cell = self._cell(held_ns)
        # Noise belongs to the sensor's value, not to the reading of it: one draw a refresh.
        noise_w = self._stream.normal(0, SENSOR_NOISE_W, len(self._refreshed_ns))
        capped = trace.capped[row, cell] * THROTTLE_REASON_BITS["power"]
        return {
            "mono_ns": at_ns,
            "power_instant_w": self._mean_w(held_ns, RING_PERIOD_S) + noise_w[self._refresh(at_ns)],
            "sm_clock_mhz": trace.clock_mhz[row, cell].astype(np.int64),
            "event_reasons": (capped + trace.idle[row, cell] * _IDLE_BIT).astype(np.uint64),
            "gpu_temp_c": np.round(trace.gpu_temp_c[row, cell]),
        }

    def _counter(self) -> dict[str, npt.NDArray[Any]]:
        """Activity, each the mean since the read before."""
        at_ns = self._ticks("counter")
        window_ns = s_to_ns(1 / RATE_HZ["counter"])
        columns: dict[str, npt.NDArray[Any]] = {"mono_ns": at_ns}
        for name, active_frac in ACTIVE_FRAC.items():
            if name == "tensor_active_frac" and not self._model.tensor_cores:
                continue
            elapsed_s = np.concatenate([[0.0], np.cumsum(np.asarray(active_frac) @ self._shares) * CELL_S])
            columns[name] = (self._at(elapsed_s, at_ns) - self._at(elapsed_s, at_ns - window_ns)) / ns_to_s(window_ns)
        return columns

    def _slow(self) -> dict[str, npt.NDArray[Any]]:
        at_ns = self._ticks("slow")
        held_ns, row, trace = self._held(at_ns), self._row, self._trace
        cell = self._cell(held_ns)
        capped_ns = np.cumsum(trace.capped[row]) * s_to_ns(CELL_S)
        core_c = np.round(trace.gpu_temp_c[row, cell])
        columns = {
            "mono_ns": at_ns,
            "energy_j": self._at(self._energy_j, held_ns),
            "power_average_w": self._noisy(self._mean_w(held_ns, AVERAGE_S)),
            "power_limit_w": np.full(len(at_ns), self._model.limit_w),
            "memory_temp_c": np.round(trace.memory_temp_c[row, cell]),
            "throttle_power_ns": capped_ns[cell],
            # The model never gets there: at the limit its slots settle far below slowdown, and nothing brakes it.
            "throttle_thermal_ns": np.zeros(len(at_ns), np.int64),
            "throttle_hw_ns": np.zeros(len(at_ns), np.int64),
        }
        if self._model.temp_slowdown_c is not None:
            columns["thermal_margin_c"] = self._model.temp_slowdown_c - _MARGIN_BELOW_SLOWDOWN_C - core_c
        return columns

    def _ticks(self, tier: str) -> Ints:
        """Computes the times this device was read: absolute deadlines, one device after another, some 50 us late."""
        period_ns = s_to_ns(1 / RATE_HZ[tier])
        first_ns = self._edges_ns[0] + period_ns + s_to_ns(READ_S) * self.slot % period_ns
        deadlines_ns = np.arange(first_ns, self._edges_ns[-1], period_ns, dtype=np.int64)
        lateness_ns = np.abs(self._stream.normal(0, 50_000, len(deadlines_ns))).astype(np.int64)
        return np.asarray(np.minimum(deadlines_ns + lateness_ns, self._edges_ns[-1]))

    def _refresh(self, at_ns: Ints) -> npt.NDArray[np.intp]:
        """Index of the latest refresh not after each moment."""
        return np.searchsorted(self._refreshed_ns, at_ns, side="right") - 1

    def _held(self, at_ns: Ints) -> Ints:
        return np.asarray(self._refreshed_ns[self._refresh(at_ns)])

    def _cell(self, at_ns: Ints) -> npt.NDArray[np.intp]:
        return np.clip(np.searchsorted(self._edges_ns, at_ns, side="right") - 1, 0, len(self._edges_ns) - 2)

    def _at(self, cumulative: Array, at_ns: Ints) -> Array:
        """A quantity cumulative over the edges at each moment; before the first edge it is extended backwards."""
        seconds = (at_ns - self._edges_ns[0]) / NS_PER_S
        inside = np.interp(seconds, np.arange(len(cumulative)) * CELL_S, cumulative)
        return np.asarray(inside + np.minimum(seconds, 0.0) * cumulative[1] / CELL_S)

    def _mean_w(self, at_ns: Ints, window_s: float) -> Array:
        earlier_ns = at_ns - s_to_ns(window_s)
        return (self._at(self._energy_j, at_ns) - self._at(self._energy_j, earlier_ns)) / window_s

    def _noisy(self, power_w: Array) -> Array:
        return np.asarray(power_w + self._stream.normal(0, SENSOR_NOISE_W, len(power_w)))


_TIERS: Final = ("ring", "fast", "counter", "slow")


def _table(
    tier: str, node: str, wall_minus_mono_ns: int, devices: Sequence[tuple[str, Mapping[str, npt.NDArray[Any]]]]
) -> pa.Table:
    """The rows of all devices of a node as a table of the tier's schema."""
    schema = table_schema(tier, backend=BACKEND, simulated=True)
    lengths = [len(columns["mono_ns"]) for _, columns in devices]
    rows = sum(lengths)
    mono_ns = np.concatenate([columns["mono_ns"] for _, columns in devices])
    known: dict[str, pa.Array] = {
        "node": pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), [node]),
        "device": pa.DictionaryArray.from_arrays(
            pa.array(np.repeat(np.arange(len(devices), dtype=np.int32), lengths)), [name for name, _ in devices]
        ),
        "mono_ns": pa.array(mono_ns),
        "wall_ns": pa.array(mono_ns + wall_minus_mono_ns),
    }
    for name in devices[0][1]:
        if name not in known:
            values = np.concatenate([columns[name] for _, columns in devices])
            known[name] = pa.array(values).cast(schema.field(name).type)
    arrays = [known[field.name] if field.name in known else pa.nulls(rows, field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema).sort_by("mono_ns")


def _manifest(
    model: DeviceModel, node: str, sensors: Sequence[_Sensors], tables: Mapping[str, pa.Table]
) -> dict[str, Any]:
    """Returns the facts a sampler would know of itself, without lateness, call latencies and cost: nothing was read."""
    devices = {}
    for each in sensors:
        info = DeviceInfo(
            device=each.device,
            name=f"simulated {model.name}",
            uuid=f"simulated-{node}-{each.device}",
            slot=each.slot,
            power_limit_w=model.limit_w,
            sm_clock_max_mhz=model.clock_max_mhz,
            # Two GCDs of an MI250 share a real sensor; simulated ones have one each.
            power_domain=each.device,
        )
        devices[each.device] = {"backend": BACKEND, **info.to_json()}
    tiers = {}
    for tier, table in tables.items():
        hz = 1 / RING_PERIOD_S if tier == "ring" else RATE_HZ[tier]
        tiers[tier] = {"requested_hz": hz, "achieved_hz": hz, "missed_ticks": 0, "rows": table.num_rows}
    return {
        "node": node,
        "simulated": True,
        "model": model.source,
        "devices": devices,
        "tiers": tiers,
        "clock_offset_ns": 0,
        "closed": True,
    }

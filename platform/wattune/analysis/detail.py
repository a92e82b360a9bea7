"""Details of a trial or recording beyond its metrics: steps, phases, slots, excursions, throttling, odd devices."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from wattune.analysis.metrics.outlier import Outlier
from wattune.analysis.metrics.phases import phase_table, step_table
from wattune.analysis.metrics.saturation import Saturation
from wattune.analysis.metrics.throttle import clock_max_mhz, stretches, with_caps
from wattune.analysis.metrics.waterfall import Breakdown, breakdown
from wattune.analysis.run_data import Examined
from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.readings import Readings
from wattune.arrays import Floats
from wattune.schema import DeviceKey

MOST_LISTED: Final = 1000
"""Most rows of one table that go into JSON; `num_rows` beside them has the full count."""

_TEXT, _NUMBER = pa.string(), pa.float64()

SLOT_COLUMNS: Final = pa.schema(
    [
        ("node", _TEXT),
        ("slot", pa.int64()),
        ("device", _TEXT),
        *(
            (name, _NUMBER)
            for name in (
                "temp_mean_c",
                "temp_max_c",
                "memory_temp_max_c",
                "power_mean_w",
                "power_peak_1s_w",
                "sm_clock_mean_mhz",
                "clock_deficit_frac",
                "throttle_frac",
            )
        ),
    ]
)

NUM_TIMES: Final = 60
"""Equal parts of the window, each with a device's mean temperature."""

TEMPERATURE_COLUMNS: Final = pa.schema(
    [("node", _TEXT), ("slot", pa.int64()), ("device", _TEXT), ("start_s", _NUMBER), ("temp_mean_c", _NUMBER)]
)

EXCURSION_COLUMNS: Final = pa.schema(
    [("node", _TEXT), ("device", _TEXT)]
    + [(name, _NUMBER) for name in ("start_s", "end_s", "energy_j", "peak_w", "limit_w")]
)

THROTTLE_COLUMNS: Final = pa.schema(
    [("node", _TEXT), ("device", _TEXT), ("cause", _TEXT)]
    + [(name, _NUMBER) for name in ("start_s", "duration_s", "clock_lost_frac", "onset_temp_c")]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """Everything beyond metrics. Times are seconds from the window's start; unmeasured values are null or absent."""

    steps: pa.Table
    """See `wattune.analysis.metrics.phases.step_table`."""
    phases: pa.Table
    """See `wattune.analysis.metrics.phases.phase_table`; empty without spans."""
    slots: pa.Table
    """One row for each device, ordered by node and slot, of `SLOT_COLUMNS`: the cells of a heat map."""
    temperatures: pa.Table
    """Every device's mean temperature in equal parts of the window, of `TEMPERATURE_COLUMNS`."""
    excursions: pa.Table
    """Every excursion of every power sensor, of `EXCURSION_COLUMNS`."""
    throttles: pa.Table
    """Every stretch in which a cause lowered the clock, of `THROTTLE_COLUMNS`."""
    outliers: tuple[Outlier, ...]
    """Every device compared with its peers, the largest deviation first."""
    saturation: tuple[Saturation, ...]
    breakdown: Breakdown | None
    """None without measured steps."""
    power_w: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)
    """By node: seconds, and the sum of its devices in watts, in means of 100 ms. Only where it is drawn."""

    @property
    def highest_node(self) -> str | None:
        """The node with the highest power, None without recorded power."""
        peaks = {node: float(watts.max()) for node, (_, watts) in self.power_w.items() if watts.size}
        return max(peaks, key=lambda node: peaks[node], default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`, with the first `MOST_LISTED` rows of each table."""
        tables = {
            name: getattr(self, name)
            for name in ("steps", "phases", "slots", "temperatures", "excursions", "throttles")
        }
        return {
            **{name: table.slice(0, MOST_LISTED).to_pylist() for name, table in tables.items()},
            "num_rows": {name: table.num_rows for name, table in tables.items()},
            "outliers": [asdict(outlier) for outlier in self.outliers],
            "saturation": [one.to_json() for one in self.saturation],
            "breakdown": None if self.breakdown is None else self.breakdown.to_json(),
        }


def detail_of(examined: Examined) -> Detail:
    """Returns the detail of an examined trial or recording."""
    aligned = examined.aligned
    phases = phase_table(aligned, examined.powers, examined.ways)
    devices = [_of_device(examined, device) for device in aligned.devices]
    return Detail(
        steps=step_table(aligned, examined.powers),
        phases=phases,
        slots=_slots(examined, [row for row, _, _ in devices]),
        temperatures=_together(TEMPERATURE_COLUMNS, [temperatures for _, temperatures, _ in devices]),
        excursions=_excursions(examined),
        throttles=_together(THROTTLE_COLUMNS, [throttles for _, _, throttles in devices]),
        outliers=examined.outliers,
        saturation=examined.saturation,
        breakdown=breakdown(aligned, examined.division, phases, examined.throttles, profiled=examined.profiled or None),
    )


def _together(columns: pa.Schema, parts: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables(parts) if parts else columns.empty_table()


def _repeated(num_rows: int, **values: Any) -> dict[str, pa.Array]:
    return {name: pa.repeat(value, num_rows) for name, value in values.items()}


def _slots(examined: Examined, rows: list[dict[str, Any]]) -> pa.Table:
    for row in rows:
        device = row["node"], row["device"]
        if device in examined.temperatures:
            core = examined.temperatures[device]
            row |= {"temp_mean_c": core.mean_c, "temp_max_c": core.max_c}
        if device in examined.throttles:
            throttle = examined.throttles[device]
            row |= {"clock_deficit_frac": throttle.deficit_frac, "throttle_frac": throttle.any_frac}
        if device in examined.traces:
            trace, _ = examined.traces[device]
            row |= {
                "power_mean_w": trace.mean_w / trace.share,
                "power_peak_1s_w": None if trace.peak_1s_w is None else trace.peak_1s_w / trace.share,
            }
    rows.sort(key=lambda row: (row["node"], row["slot"] is None, row["slot"] or 0, row["device"]))
    return pa.Table.from_pylist(rows, schema=SLOT_COLUMNS)


def _of_device(examined: Examined, device: DeviceKey) -> tuple[dict[str, Any], pa.Table, pa.Table]:
    """Reads row, temperatures and throttling in one pass: readings of a long recording do not stay in memory."""
    aligned, (node, name) = examined.aligned, device
    row: dict[str, Any] = {"node": node, "device": name, "slot": aligned.known.get(device, {}).get("slot")}
    slow, fast = (aligned.tiers.get(tier, {}).get(device) for tier in ("slow", "fast"))
    if slow is not None:
        _, memory_c = slow.inside("memory_temp_c", 0.0, aligned.duration_s)
        if len(memory_c):
            row["memory_temp_max_c"] = float(memory_c.max())
    if fast is not None and (clock := fast.within("sm_clock_mhz", aligned.duration_s)) is not None:
        row["sm_clock_mean_mhz"] = clock.mean()
    return row, _temperatures(aligned, device, row["slot"], fast), _throttles(examined, device, fast)


def _temperatures(aligned: Aligned, device: DeviceKey, slot: int | None, fast: Readings | None) -> pa.Table:
    series = fast.series("gpu_temp_c") if fast is not None else None
    if series is None:
        return TEMPERATURE_COLUMNS.empty_table()
    edge_s = np.linspace(0.0, aligned.duration_s, NUM_TIMES + 1)
    known = (edge_s[:-1] >= series.time_s[0]) & (edge_s[1:] <= series.time_s[-1])
    means_c = np.diff(series.cumulative(np.clip(edge_s, series.time_s[0], series.time_s[-1]))) / np.diff(edge_s)
    columns = {
        **_repeated(NUM_TIMES, node=device[0], slot=pa.scalar(slot, pa.int64()), device=device[1]),
        "start_s": edge_s[:-1],
        "temp_mean_c": pa.array(means_c, mask=~known),
    }
    return pa.table(columns, schema=TEMPERATURE_COLUMNS)


def _throttles(examined: Examined, device: DeviceKey, fast: Readings | None) -> pa.Table:
    aligned = examined.aligned
    otherwise_mhz = None if examined.sensed is None else examined.sensed.sm_clock_max_mhz
    maximum_mhz = clock_max_mhz(aligned, device, otherwise_mhz)
    if fast is None or maximum_mhz is None:
        return THROTTLE_COLUMNS.empty_table()
    caused = with_caps(aligned, examined.traces.get(device, (None, 0))[0], fast)
    parts = [
        pa.table(
            {
                **_repeated(len(found["start_s"]), node=device[0], device=device[1], cause=cause),
                **{name: pa.array(values, from_pandas=True) for name, values in found.items()},
            },
            schema=THROTTLE_COLUMNS,
        )
        for cause, found in stretches(caused, maximum_mhz, aligned.duration_s).items()
    ]
    return _together(THROTTLE_COLUMNS, parts)


def _excursions(examined: Examined) -> pa.Table:
    parts = []
    for trace in examined.powers.traces if examined.powers.usable else ():
        found = trace.excursions
        if found is not None and found.count:
            node, device = trace.devices[0]
            columns = {
                **_repeated(found.count, node=node, device=device, limit_w=found.limit_w),
                **{name: getattr(found, name) for name in ("start_s", "end_s", "energy_j", "peak_w")},
            }
            parts.append(pa.table(columns, schema=EXCURSION_COLUMNS))
    return _together(EXCURSION_COLUMNS, parts)

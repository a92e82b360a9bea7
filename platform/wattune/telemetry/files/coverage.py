"""Facts that only the rows show: how often a sensor really moved, what is missing, and whether its energies agree.

Like everything in a manifest they are stated and not judged. They cover the whole recording; `analysis` judges the
measured window.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wattune.arrays import Floats, Ints
from wattune.schema import COVERED_PERIODS, LEAST_COUNTER_SPAN_S, POWER_COLUMNS, TELEMETRY
from wattune.telemetry.backend import taken_ns
from wattune.units import NS_PER_S, ns_to_s

LEAST_CHANGES: Final = 3
"""Changes of a value from which on the time between them says something."""


def measured_facts(tables: Mapping[str, pa.Table]) -> dict[str, dict[str, Any]]:
    """Computes facts about one node's sensors from its tables by tier (`wattune.schema.TELEMETRY`).

    Returns by device:

    - by tier: `rows`, `interval_s` (median time between readings), `longest_gap_s`, `coverage_frac` (share of the
      recording in intervals of at most `COVERED_PERIODS` usual ones), `gaps` (how many are longer), `gap_s` (what those
      are longer than a usual one, together), and `sensor_period_s` by column, the median time between changes of the
      value: of a steady signal an upper bound, and left out where it hardly moved;
    - `energy`, where a counter and a power series span `LEAST_COUNTER_SPAN_S` together: `source` (the series' tier),
      `span_s`, `integral_j` (trapezoid), `counter_j` (the counter's rise), and `error_frac`, the first over the second
      less 1.
    """
    facts: dict[str, dict[str, Any]] = {}
    rows: dict[tuple[str, str], pa.Table] = {}
    for tier, table in tables.items():
        for device, part in _by_device(table):
            rows[device, tier] = part
            facts.setdefault(device, {})[tier] = _tier_facts(tier, part)
    for device, found in facts.items():
        energy = _energy_facts({tier: part for (name, tier), part in rows.items() if name == device})
        if energy is not None:
            found["energy"] = energy
    return facts


def _by_device(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    for device in pc.unique(table["device"].cast(pa.string())).to_pylist():
        yield device, table.filter(pc.equal(table["device"].cast(pa.string()), device))


def _tier_facts(tier: str, rows: pa.Table) -> dict[str, Any]:
    facts: dict[str, Any] = {"rows": rows.num_rows}
    times_ns = np.unique(taken_ns(tier, rows)[_any_read(tier, rows)])
    if len(times_ns) < LEAST_CHANGES:
        return facts
    intervals_ns = np.diff(times_ns)
    usual_ns = float(np.median(intervals_ns))
    whole = intervals_ns <= COVERED_PERIODS * usual_ns
    covered_ns, gaps_ns = intervals_ns[whole].sum(), intervals_ns[~whole]
    facts |= {
        "interval_s": ns_to_s(usual_ns),
        "longest_gap_s": ns_to_s(int(intervals_ns.max())),
        "coverage_frac": float(covered_ns / (times_ns[-1] - times_ns[0])),
        "gaps": len(gaps_ns),
        "gap_s": ns_to_s(float((gaps_ns - usual_ns).sum())),
    }
    # Every sample of a ring is a measurement of its own, also where it equals the last one.
    periods_s = {"power_w": ns_to_s(usual_ns)} if tier == "ring" else _sensor_periods_s(tier, rows)
    return facts | {"sensor_period_s": periods_s}


def _any_read(tier: str, rows: pa.Table) -> npt.NDArray[np.bool_]:
    """Marks the rows that hold a value: where every read failed, there was no reading."""
    read = np.zeros(rows.num_rows, bool)
    for name in _value_columns(tier, rows):
        read |= rows[name].is_valid().to_numpy()
    return read


def _value_columns(tier: str, rows: pa.Table) -> list[str]:
    there = set(rows.column_names)
    return [f.name for f in TELEMETRY[tier] if f.metadata[b"kind"] not in (b"key", b"time") and f.name in there]


def _sensor_periods_s(tier: str, rows: pa.Table) -> dict[str, float]:
    periods_s = {}
    for name in _value_columns(tier, rows):
        if TELEMETRY[tier].field(name).metadata[b"kind"] == b"bits":
            continue
        times_ns, values = _readings(tier, rows, name)
        changed = np.flatnonzero(np.diff(values)) + 1
        if len(changed) >= LEAST_CHANGES:
            periods_s[name] = ns_to_s(float(np.median(np.diff(times_ns[changed]))))
    return periods_s


def _readings(tier: str, rows: pa.Table, column: str) -> tuple[Ints, Floats]:
    """Times and values of a column where it was read, ordered by time, each time once."""
    values = rows[column].cast(pa.float64(), safe=False).to_numpy()
    times_ns, first = np.unique(taken_ns(tier, rows), return_index=True)
    read = np.isfinite(values[first])
    return times_ns[read], values[first][read]


def _energy_facts(tiers: Mapping[str, pa.Table]) -> dict[str, Any] | None:
    source = next((one for one in POWER_COLUMNS if one[0] in tiers and one[1] in tiers[one[0]].column_names), None)
    if source is None or "slow" not in tiers or "energy_j" not in tiers["slow"].column_names:
        return None
    power_ns, power_w = _readings(source[0], tiers[source[0]], source[1])
    counter_ns, counter_j = _readings("slow", tiers["slow"], "energy_j")
    if len(power_ns) < 2:
        return None
    inside = (counter_ns >= power_ns[0]) & (counter_ns <= power_ns[-1])
    counter_ns, counter_j = counter_ns[inside], counter_j[inside]
    # A counter that falls was reset, and its value before that is unknown.
    if len(counter_ns) < 2 or np.any(np.diff(counter_j) < 0) or counter_j[-1] <= counter_j[0]:
        return None
    # From the first reading on, so that floats hold the times.
    power_s = (power_ns - counter_ns[0]) / NS_PER_S
    ends_s = np.array([0.0, ns_to_s(int(counter_ns[-1] - counter_ns[0]))])
    if ends_s[1] < LEAST_COUNTER_SPAN_S:
        return None
    between = (power_s > 0) & (power_s < ends_s[1])
    at_ends_w = np.interp(ends_s, power_s, power_w)
    integral_j = np.trapezoid(
        np.concatenate([at_ends_w[:1], power_w[between], at_ends_w[1:]]),
        np.concatenate([ends_s[:1], power_s[between], ends_s[1:]]),
    )
    rise_j = float(counter_j[-1] - counter_j[0])
    return {
        "source": source[0],
        "span_s": float(ends_s[1]),
        "integral_j": float(integral_j),
        "counter_j": rise_j,
        "error_frac": float(integral_j / rise_j - 1),
    }

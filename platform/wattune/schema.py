"""Tables that wattune writes: one line for each column in `columns.toml`, with its unit and what it can be.

Workers and telemetry meet here only: both write tables of these schemas on one clock of the node, and analysis joins
them. A failed read is null, never 0.
"""

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Final, TypeAlias

import pyarrow as pa

from wattune.units import NS_PER_S, unit_of

DeviceKey: TypeAlias = tuple[str, str]
"""Node and device, by the names tables use."""

_TEXT: Final = pa.dictionary(pa.int32(), pa.string())
_FILE: Final = tomllib.loads(resources.files(__package__).joinpath("columns.toml").read_text(encoding="utf-8"))


def _table(name: str) -> pa.Schema:
    """Makes a table's schema; the metadata of a column hold its unit, and whether it is a gauge or a counter."""
    columns = []
    for column in _FILE["tables"][name]:
        own, unit = _FILE["columns"][column], unit_of(column)
        type_ = _TEXT if own["type"] == "text" else pa.type_for_alias(own["type"])
        metadata = {"kind": own.get("kind", "gauge")} | ({"unit": unit} if unit else {})
        columns.append(pa.field(column, type_, metadata=metadata))
    return pa.schema(columns)


TELEMETRY: Final[dict[str, pa.Schema]] = {tier: _table(tier) for tier in ("ring", "fast", "counter", "slow", "host")}
"""Telemetry tables by tier. `ring` is the driver's own power history. The sampler read the others."""

SPANS: Final = _table("spans")
"""Phases of every rank's steps, with start and end. `micro_batch` and `chunk` are null where they do not apply."""

KERNELS: Final = _table("kernels")
"""Kernels on each rank's device in the profiled steps. Times count from the start of the step, and the row named `step`
is the step itself. `collective`, its process group, the group's ranks and `fabric` are empty where they do not apply.
`fabric` is `node` where the group's links stay inside a node, else `network`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Values that a column can have. A value beyond them is a fault of sensor, file or unit, never a measurement."""

    least: float
    most: float = 2**62
    """Of times and counters; a sum of two is still an integer of 64 bits."""
    fact: str = ""
    """The device's fact that bounds it more closely, where it is known; empty where none does."""
    times: float = 1.0
    """The most the column can be over that fact."""
    rise_per_s: float | None = None
    """Most rise of a counter in a second; `most` then bounds the counter itself."""
    slack: float = 0.0
    """Rise of a counter that is allowed besides: counters move in steps, and 32-bit registers wrap."""


BOUNDS: Final[dict[str, Bound]] = {
    name: Bound(**{key: value for key, value in own.items() if key not in ("type", "kind")})
    for name, own in _FILE["columns"].items()
    if "least" in own
}
"""Values that columns can have; `wattune.storage.values` refuses others."""

MOST_SPAN_NS: Final = 400 * 24 * 3600 * NS_PER_S
"""Longest time from the first to the last row of a table."""

MOST_WINDOW_NS: Final = 31 * 24 * 3600 * NS_PER_S
"""Longest window. Analysis takes memory in proportion to it: 4 GB a node for this one."""

POWER_COLUMNS: Final = (("ring", "power_w"), ("fast", "power_instant_w"))
"""Tiers and columns that may hold a device's power, the finest first."""

COVERED_PERIODS: Final = 3.0
"""An interval between readings counts as covered up to this many usual ones. The H200's 20 ms ring has single intervals
to 46 ms (measured on four of them, driver 580.159.04)."""

LEAST_COUNTER_SPAN_S: Final = 5.0
"""Shortest span over which an energy counter is held against an integral: it steps every 100 ms, 2 % of 5 s."""

PHASES: Final = ("step", "forward", "backward", "optimizer", "wait")
"""Phases that workers record as spans."""

THROTTLE_REASON_BITS: Final[dict[str, int]] = {
    "power": 0x4,  # software power cap
    "thermal": 0x20 | 0x40,  # software and hardware thermal slowdown
    "hw": 0x8 | 0x80,  # hardware slowdown, external power brake
}
"""Bits of `event_reasons` by cause, as NVML numbers them (nvml.h, nvmlClocksEventReasons). 0x4 was seen on H200."""


def table_schema(tier: str, *, backend: str, simulated: bool) -> pa.Schema:
    """Returns the schema, with the metadata of stored tables, of a tier: a key of `TELEMETRY`, or `spans`."""
    base = SPANS if tier == "spans" else TELEMETRY[tier]
    return base.with_metadata(
        {
            "wattune.table": tier,
            "wattune.backend": backend,
            "wattune.simulated": str(simulated).lower(),
        }
    )

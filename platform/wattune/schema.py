"""Tables that wattune writes: one line for each column, with its unit.

Workers and telemetry meet here only: both write tables of these schemas on one clock of the node, and analysis joins
them. A failed read is null, never 0.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

import pyarrow as pa

from wattune.units import NS_PER_S, unit_of

DeviceKey: TypeAlias = tuple[str, str]
"""Node and device, by the names tables use."""

_TEXT = pa.dictionary(pa.int32(), pa.string())


def _column(name: str, type_: pa.DataType, kind: str = "gauge") -> pa.Field:
    """Makes a column whose metadata holds its unit, and whether it is a gauge or a cumulative counter."""
    unit = unit_of(name)
    metadata = {"kind": kind} | ({"unit": unit} if unit else {})
    return pa.field(name, type_, metadata=metadata)


_KEYS = [
    _column("node", _TEXT, "key"),
    _column("device", _TEXT, "key"),
    _column("mono_ns", pa.int64(), "time"),
    _column("wall_ns", pa.int64(), "time"),
]

TELEMETRY: Final[dict[str, pa.Schema]] = {
    "ring": pa.schema([*_KEYS, _column("sensor_ns", pa.int64(), "time"), _column("power_w", pa.float32())]),
    "fast": pa.schema(
        [
            *_KEYS,
            _column("power_instant_w", pa.float32()),
            _column("sm_clock_mhz", pa.int64()),
            _column("event_reasons", pa.uint64(), "bits"),
            _column("gpu_temp_c", pa.float32()),
        ]
    ),
    "counter": pa.schema(
        [
            *_KEYS,
            _column("nvlink_tx_bytes", pa.int64(), "cumulative"),
            _column("nvlink_rx_bytes", pa.int64(), "cumulative"),
            _column("pcie_tx_bytes", pa.int64(), "cumulative"),
            _column("pcie_rx_bytes", pa.int64(), "cumulative"),
            _column("tensor_active_frac", pa.float32()),
            _column("dram_active_frac", pa.float32()),
            _column("sm_active_frac", pa.float32()),
        ]
    ),
    "slow": pa.schema(
        [
            *_KEYS,
            _column("energy_j", pa.float64(), "cumulative"),
            _column("power_average_w", pa.float32()),
            _column("power_limit_w", pa.float32()),
            _column("memory_temp_c", pa.float32()),
            _column("thermal_margin_c", pa.float32()),
            _column("throttle_power_ns", pa.int64(), "cumulative"),
            _column("throttle_thermal_ns", pa.int64(), "cumulative"),
            _column("throttle_hw_ns", pa.int64(), "cumulative"),
            _column("memory_used_bytes", pa.int64()),
        ]
    ),
    "host": pa.schema(
        [
            *_KEYS,
            _column("cpu_busy_frac", pa.float32()),
            _column("package_power_w", pa.float32()),
            _column("dram_power_w", pa.float32()),
            _column("node_power_w", pa.float32()),
            _column("memory_used_bytes", pa.int64()),
            _column("nic_tx_bytes", pa.int64(), "cumulative"),
            _column("nic_rx_bytes", pa.int64(), "cumulative"),
            _column("cpu_temp_max_c", pa.float32()),
            _column("psi_cpu_some_frac", pa.float32()),
            _column("psi_memory_some_frac", pa.float32()),
            _column("psi_io_some_frac", pa.float32()),
        ]
    ),
}
"""Telemetry tables by tier. `ring` is the driver's own power history. The sampler read the others."""

SPANS: Final = pa.schema(
    [
        _column("node", _TEXT, "key"),
        _column("device", _TEXT, "key"),
        _column("rank", pa.int32(), "key"),
        _column("step", pa.int32(), "key"),
        _column("micro_batch", pa.int32(), "key"),
        _column("chunk", pa.int32(), "key"),
        _column("phase", _TEXT, "key"),
        _column("start_mono_ns", pa.int64(), "time"),
        _column("end_mono_ns", pa.int64(), "time"),
        _column("start_wall_ns", pa.int64(), "time"),
        _column("end_wall_ns", pa.int64(), "time"),
    ]
)
"""Phases of every rank's steps, with start and end. `micro_batch` and `chunk` are null where they do not apply."""

KERNELS: Final = pa.schema(
    [
        _column("rank", pa.int32(), "key"),
        _column("step", pa.int32(), "key"),
        _column("stream", pa.int64(), "key"),
        _column("name", _TEXT, "key"),
        _column("collective", _TEXT, "key"),
        _column("group", _TEXT, "key"),
        _column("group_ranks", _TEXT, "key"),
        _column("fabric", _TEXT, "key"),
        _column("start_ns", pa.int64(), "time"),
        _column("end_ns", pa.int64(), "time"),
    ]
)
"""Kernels on each rank's device in the profiled steps. Times count from the start of the step, and the row named `step`
is the step itself. `collective`, its process group, the group's ranks and `fabric` are empty where they do not apply.
`fabric` is `node` where the group's links stay inside a node, else `network`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Values that a column can have. A value beyond them is a fault of sensor, file or unit, never a measurement."""

    least: float
    most: float
    fact: str = ""
    """The device's fact that bounds it more closely, where it is known; empty where none does."""
    times: float = 1.0
    """The most the column can be over that fact."""
    rise_per_s: float | None = None
    """Most rise of a counter in a second; `most` then bounds the counter itself."""
    slack: float = 0.0
    """Rise of a counter that is allowed besides: counters move in steps, and 32-bit registers wrap."""


_TIME: Final = Bound(least=0, most=2**62)
_TRAFFIC: Final = {"least": 0, "most": 2**62, "slack": 2**35}

BOUNDS: Final[dict[str, Bound]] = {
    **dict.fromkeys(("mono_ns", "wall_ns", "sensor_ns"), _TIME),
    **dict.fromkeys(("start_mono_ns", "end_mono_ns", "start_wall_ns", "end_wall_ns", "start_ns", "end_ns"), _TIME),
    **dict.fromkeys(("rank", "micro_batch", "chunk"), Bound(least=0, most=2**24)),
    "step": Bound(least=-(2**31), most=2**31),
    "event_reasons": Bound(least=0, most=2**64),
    # The highest sample ever seen on a limit of 700 W is 969 W (benchmarks/results/nvml_check.md).
    **dict.fromkeys(
        ("power_w", "power_instant_w", "power_average_w"), Bound(least=0, most=10_000, fact="power_limit_w", times=3)
    ),
    "power_limit_w": Bound(least=0, most=10_000),
    "package_power_w": Bound(least=0, most=10_000),
    "dram_power_w": Bound(least=0, most=10_000),
    "node_power_w": Bound(least=0, most=1_000_000),
    "sm_clock_mhz": Bound(least=0, most=10_000, fact="sm_clock_max_mhz", times=1.25),
    # Silicon fails above 150 degrees; a liquid or a room below freezing cools no data centre.
    **dict.fromkeys(("gpu_temp_c", "memory_temp_c", "cpu_temp_max_c"), Bound(least=0, most=150)),
    "thermal_margin_c": Bound(least=-150, most=150),
    **dict.fromkeys(("tensor_active_frac", "dram_active_frac", "sm_active_frac"), Bound(least=0.0, most=1.1)),
    # The host's are made of two readings of a counter and of a clock, which do not fall together exactly.
    **dict.fromkeys(
        ("cpu_busy_frac", "psi_cpu_some_frac", "psi_memory_some_frac", "psi_io_some_frac"), Bound(least=0.0, most=1.5)
    ),
    # A counter of energy rises with power; of time, with time, in steps of up to 22 s (benchmarks/results).
    "energy_j": Bound(least=0, most=1e15, fact="power_limit_w", times=3, rise_per_s=10_000, slack=1e4),
    **dict.fromkeys(
        ("throttle_power_ns", "throttle_thermal_ns", "throttle_hw_ns"),
        Bound(least=0, most=2**62, rise_per_s=2e9, slack=120e9),
    ),
    "memory_used_bytes": Bound(least=0, most=2**50),
    # The fastest links there are: 1.8 TB/s of NVLink 5 in both directions, 256 GB/s of PCIe 7, 8 ports of 1.6 Tbit/s.
    **dict.fromkeys(
        ("nvlink_tx_bytes", "nvlink_rx_bytes"), Bound(**_TRAFFIC, fact="link_peaks.nvlink", times=2, rise_per_s=4e12)
    ),
    **dict.fromkeys(
        ("pcie_tx_bytes", "pcie_rx_bytes"), Bound(**_TRAFFIC, fact="link_peaks.pcie", times=4, rise_per_s=0.5e12)
    ),
    **dict.fromkeys(
        ("nic_tx_bytes", "nic_rx_bytes"), Bound(**_TRAFFIC, fact="nic_link_bytes_per_s", times=2, rise_per_s=4e12)
    ),
}
"""Values that columns can have, in the one place where that is said; `wattune.storage.values` refuses others."""

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

"""Rows of a telemetry table, in batches."""

from typing import Any

from wattune.schema import table_schema

BATCHES, BATCH_ROWS = 6, 10
SCHEMA = table_schema("fast", backend="nvml", simulated=False)


def rows(start: int, count: int = BATCH_ROWS, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "node": "n0",
            "device": f"gpu{index % 2}",
            "mono_ns": index * 50_000_000,
            "wall_ns": 10**18 + index * 50_000_000,
            "power_instant_w": 100.0 + index,
            "sm_clock_mhz": 1980 - index,
            "event_reasons": 4,
            "gpu_temp_c": None if index % 7 == 3 else 40.0,
            **more,
        }
        for index in range(start, start + count)
    ]

"""Tables as a sampler and workers would have written them, from functions of time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest

from wattune.schema import SPANS, TELEMETRY

NS = 1_000_000_000
Wave = Callable[[np.ndarray], np.ndarray]


@dataclass
class Bench:
    """Builds a trial's tables. Time 0 is the same moment on every node, whatever its clocks say of it."""

    mono_0_s: Mapping[str, int] = field(default_factory=dict)
    """Reading of a node's monotonic clock at time 0."""
    wall_ahead_s: Mapping[str, float] = field(default_factory=dict)
    """By how much a node's wall clock is ahead of the reference."""

    def mono_ns(self, node: str, time_s: np.ndarray) -> np.ndarray:
        return self.mono_0_s.get(node, 5_000) * NS + np.round(np.asarray(time_s) * NS).astype(np.int64)

    def wall_ns(self, node: str, time_s: np.ndarray) -> np.ndarray:
        ahead_ns = round(self.wall_ahead_s.get(node, 0.0) * NS)
        return 1_795_000_000 * NS + ahead_ns + np.round(np.asarray(time_s) * NS).astype(np.int64)

    def tier(self, tier: str, rows: Mapping[tuple[str, str], Mapping[str, np.ndarray]]) -> pa.Table:
        """A tier's table from columns by device, `time_s` among them; ring samples are drained 0.7 s late."""
        parts = []
        for (node, device), columns in rows.items():
            time_s = np.asarray(columns["time_s"], float)
            late_s = 0.7 if tier == "ring" else 0.0
            whole = {
                "node": [node] * len(time_s),
                "device": [device] * len(time_s),
                "mono_ns": self.mono_ns(node, time_s + late_s),
                "wall_ns": self.wall_ns(node, time_s + late_s),
                "sensor_ns": self.wall_ns(node, time_s),
                **columns,
            }
            schema = TELEMETRY[tier]
            arrays = [
                pa.array(whole[f.name]).cast(f.type, safe=False) if f.name in whole else pa.nulls(len(time_s), f.type)
                for f in schema
            ]
            parts.append(pa.Table.from_arrays(arrays, schema=schema))
        return pa.concat_tables(parts).unify_dictionaries() if parts else TELEMETRY[tier].empty_table()

    def ring(
        self,
        waves: Mapping[tuple[str, str], Wave],
        *,
        start_s: float = -1.0,
        end_s: float = 21.0,
        period_s: float = 0.02,
        keep: Wave | None = None,
    ) -> pa.Table:
        time_s = np.arange(start_s, end_s + period_s / 2, period_s)
        if keep is not None:
            time_s = time_s[keep(time_s)]
        return self.tier(
            "ring", {device: {"time_s": time_s, "power_w": wave(time_s)} for device, wave in waves.items()}
        )

    def spans(self, rows: Sequence[tuple[tuple[str, str], int, int, str, float, float]]) -> pa.Table:
        """Spans from device, rank, step, phase, start and end in seconds."""
        return pa.Table.from_pylist(
            [
                {
                    "node": node,
                    "device": device,
                    "rank": rank,
                    "step": step,
                    "phase": phase,
                    "start_mono_ns": int(self.mono_ns(node, start_s)),
                    "end_mono_ns": int(self.mono_ns(node, end_s)),
                    "start_wall_ns": int(self.wall_ns(node, start_s)),
                    "end_wall_ns": int(self.wall_ns(node, end_s)),
                }
                for (node, device), rank, step, phase, start_s, end_s in rows
            ],
            schema=SPANS,
        )

    def steps(self, devices: Sequence[tuple[str, str]], *, num_steps: int = 20, step_s: float = 1.0) -> pa.Table:
        """Equal steps back to back from time 0, one rank a device."""
        return self.spans(
            [
                (device, rank, step, "step", step * step_s, (step + 1) * step_s)
                for rank, device in enumerate(devices)
                for step in range(num_steps)
            ]
        )


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(scope="session")
def make_bench() -> type[Bench]:
    return Bench

"""Simulated sensors from the host's activity: what half-busy processors give, and what cannot be simulated."""

import numpy as np
import pyarrow as pa
import pytest

from wattune.errors import PlanError, TelemetryError
from wattune.recording.sensors import default_backends, simulate_from_host, split_simulated
from wattune.schema import table_schema

S = 1_000_000_000
WALL_MINUS_MONO_NS = 1_795_000_000_000_000_000


def host(busy_fracs: list[float | None]) -> pa.Table:
    """Readings a second apart, each the mean of the second before."""
    rows = [
        {"node": "n0", "device": "host", "mono_ns": second * S, "wall_ns": second * S + WALL_MINUS_MONO_NS}
        | {"cpu_busy_frac": busy}
        for second, busy in enumerate(busy_fracs, start=100)
    ]
    return pa.Table.from_pylist(rows, schema=table_schema("host", backend="host", simulated=False))


def powers_w(tables: dict[str, pa.Table], first_s: float, last_s: float) -> np.ndarray:
    at_s = (tables["ring"]["sensor_ns"].to_numpy() - WALL_MINUS_MONO_NS) / S
    return tables["ring"]["power_w"].to_numpy()[(at_s > first_s) & (at_s < last_s)]


def test_power_follows_the_processors_without_a_square_wave() -> None:
    tables, manifest = simulate_from_host("h200_sxm", "n0", host([0.0] * 6 + [0.5] * 6 + [1.0] * 6))
    idle, half, full = (powers_w(tables, first, first + 4) for first in (101, 106.5, 112.5))
    assert idle.mean() == pytest.approx(77, abs=2)  # the idle power of the fit
    assert idle.mean() < half.mean() < full.mean() <= 705
    # Every moment does half the work: were it on and off, samples would lie at both ends and none between.
    assert half.std() < 0.2 * half.mean()
    assert half.mean() == pytest.approx(118 + 805 / 2, rel=0.05)
    assert manifest["simulated"] is True and manifest["devices"]["gpu0"]["backend"] == "simulated"
    for tier in ("ring", "fast", "counter", "slow"):
        assert tables[tier].schema.metadata[b"wattune.simulated"] == b"true"
        assert tables[tier]["mono_ns"].to_numpy().min() >= 100 * S


def test_the_same_activity_gives_the_same_tables() -> None:
    busy = host([0.2, 0.4, 0.9, 0.1])
    first, second = (simulate_from_host("h100_sxm", "n0", busy)[0] for _ in range(2))
    assert all(first[tier].equals(second[tier]) for tier in first)


@pytest.mark.parametrize("busy", [[], [0.5], [None, 0.5, None]])
def test_activity_read_less_than_twice_gives_nothing(busy: list[float | None]) -> None:
    assert simulate_from_host("h200_sxm", "n0", host(busy)) == ({}, {})


def test_simulated_is_taken_apart() -> None:
    assert split_simulated(["simulated"]) == (["host"], "h200_sxm")
    assert split_simulated(["host", "simulated:h100_sxm"]) == (["host"], "h100_sxm")
    assert split_simulated(["host"]) == (["host"], None)
    assert split_simulated(["replay:x?loop", "host"]) == (["replay:x?loop", "host"], None)
    with pytest.raises(PlanError, match="unknown device"):
        split_simulated(["simulated:h9000"])
    with pytest.raises(TelemetryError, match="cannot be simulated"):
        split_simulated(["simulated:cpu"])
    with pytest.raises(TelemetryError, match='did you mean "host"'):
        split_simulated(["hosts"])


def test_the_host_is_always_there() -> None:
    assert default_backends()[0] == "host"
    assert set(default_backends()) <= {"host", "nvml", "amd_smi"}

"""Coverage of sensors by rows: on recordings of four H200s, and on series made by hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import run_data

from wattune.analysis.summary import summarize
from wattune.schema import TELEMETRY
from wattune.storage.measured import MeasuredFolder
from wattune.telemetry.backend import DeviceInfo
from wattune.telemetry.files.coverage import measured_facts

GOLDEN = Path(__file__).parents[3] / "golden/h200x4"
WALL_NS = 1_795_233_000_000_000_000
S = 1_000_000_000


def table(tier: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    keys = {"node": "n0", "device": "gpu0"}
    return pa.Table.from_pylist(
        [keys | {"wall_ns": WALL_NS + row["mono_ns"]} | dict(row) for row in rows], TELEMETRY[tier]
    )


def ring(
    power_w: Sequence[float], drain: int = 50, step_ns: int = 0, step_at: int | None = None
) -> list[dict[str, Any]]:
    """Samples every 20 ms from 0 on, drained in groups; from drain `step_at` on, the wall clock is ahead."""
    rows = []
    for index, power in enumerate(power_w):
        number = index // drain
        ahead_ns = step_ns if step_at is not None and number >= step_at else 0
        read_ns = (number + 1) * drain * S // 50
        rows.append(
            {
                "mono_ns": read_ns,
                "wall_ns": WALL_NS + read_ns + ahead_ns,
                "sensor_ns": WALL_NS + index * S // 50 + ahead_ns,
                "power_w": power,
            }
        )
    return rows


def slow(energy_j: Sequence[float | None]) -> list[dict[str, Any]]:
    return [{"mono_ns": second * S, "energy_j": energy} for second, energy in enumerate(energy_j)]


def of(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    return measured_facts({tier: table(tier, rows) for tier, rows in tables.items()})["gpu0"]


@pytest.mark.parametrize(("recording", "error_frac"), [("dp4", 0.002), ("tp2pp2", 0.005), ("square_inphase", 0.01)])
def test_what_is_known_of_h200_sensors_is_found_in_recordings(recording: str, error_frac: float) -> None:
    folder = GOLDEN / recording / "telemetry/node0"
    found = measured_facts({tier: pq.read_table(folder / f"{tier}.parquet") for tier in ("ring", "fast", "slow")})
    assert sorted(found) == ["gpu0", "gpu1", "gpu2", "gpu3"]
    for device in found.values():
        assert device["ring"]["sensor_period_s"]["power_w"] == pytest.approx(0.020, rel=0.02)
        assert device["ring"]["longest_gap_s"] < 0.05 and device["ring"]["coverage_frac"] == 1.0
        # Polled at 20 Hz, but measured ten times a second.
        assert device["fast"]["interval_s"] == pytest.approx(0.05, rel=0.01)
        assert device["fast"]["sensor_period_s"]["power_instant_w"] == pytest.approx(0.1, rel=0.02)
        assert device["energy"]["source"] == "ring" and abs(device["energy"]["error_frac"]) < error_frac


@settings(max_examples=50, deadline=None)
@given(gap_at=st.integers(10, 400), gap=st.integers(4, 60), again=st.integers(0, 100), step_ms=st.integers(-5000, 5000))
def test_gaps_count_and_repeated_drains_and_clock_steps_do_not(gap_at: int, gap: int, again: int, step_ms: int) -> None:
    rows = ring([500.0] * 500, step_ns=step_ms * 10**6, step_at=5)
    whole = of({"ring": rows})["ring"]
    assert whole["longest_gap_s"] == pytest.approx(0.02) and whole["coverage_frac"] == 1.0
    assert (whole["gaps"], whole["gap_s"]) == (0, 0.0)
    kept = rows[:gap_at] + rows[gap_at + gap :]
    twice = sorted(kept + kept[gap_at // 2 : gap_at // 2 + again], key=lambda row: row["mono_ns"])
    found = of({"ring": twice})["ring"]
    assert found["longest_gap_s"] == pytest.approx(0.02 * (gap + 1))
    assert found["gaps"] == 1 and found["gap_s"] == pytest.approx(0.02 * gap)
    assert found["coverage_frac"] == pytest.approx(1 - (gap + 1) / 499)
    assert found["interval_s"] == pytest.approx(0.02)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), start_j=st.floats(0, 1e9), nulls=st.sets(st.integers(1, 9)))
def test_the_integral_is_held_against_the_counter(seed: int, start_j: float, nulls: set[int]) -> None:
    power_w = np.random.default_rng(seed).uniform(80, 900, 601).astype(np.float32).tolist()
    rows = ring(power_w)
    energy_j = np.concatenate([[0.0], np.cumsum((np.array(power_w[1:]) + power_w[:-1]) / 2 * 0.02)])[::50] + start_j
    counter = [None if second in nulls else float(value) for second, value in enumerate(energy_j)]
    found = of({"ring": rows, "slow": slow(counter)})["energy"]
    assert found["span_s"] == 12.0
    # The counter's own resolution: a float beside 1e9 J.
    assert found["error_frac"] == pytest.approx(0.0, abs=1e-6)
    assert found["integral_j"] == pytest.approx(found["counter_j"], rel=1e-6)


def test_a_counter_that_was_set_back_is_held_against_nothing() -> None:
    rows, counter = ring([500.0] * 601), [1000.0 + 500 * second for second in range(13)]
    assert of({"ring": rows, "slow": slow(counter)})["energy"]["error_frac"] == pytest.approx(0.0)
    counter[7:] = [value - 2000 for value in counter[7:]]
    assert "energy" not in of({"ring": rows, "slow": slow(counter)})
    assert "energy" not in of({"ring": rows, "slow": slow([0.0, 500.0, 1000.0])})  # too short
    assert "energy" not in of({"ring": rows, "slow": slow([700.0] * 13)})  # stands still


def test_failed_reads_are_no_readings() -> None:
    fast = [
        {"mono_ns": index * S // 20, "power_instant_w": None if 40 <= index < 80 else 1.0 * index}
        for index in range(120)
    ]
    found = of({"fast": fast})["fast"]
    assert found["rows"] == 120 and found["longest_gap_s"] == pytest.approx(41 / 20)
    assert found["coverage_frac"] == pytest.approx(1 - 41 / 119)


@given(seconds=st.integers(0, 2))
def test_a_few_rows_give_only_their_number(seconds: int) -> None:
    assert measured_facts({"slow": table("slow", slow([1.0] * seconds))}) == (
        {"gpu0": {"slow": {"rows": seconds}}} if seconds else {}
    )


@pytest.mark.parametrize("one_source", [False, True])
def test_power_that_is_the_counters_own_rise_checks_nothing(one_source: bool) -> None:
    recorded = MeasuredFolder(GOLDEN / "dp4")
    info = DeviceInfo(device="gpu0", name="x", power_from_energy_counter=one_source or None).to_json()
    assert ("power_from_energy_counter" in info) is one_source
    manifests = {"node0": {"devices": {f"gpu{index}": {**info, "device": f"gpu{index}"} for index in range(4)}}}
    found = summarize(run_data(None, recorded.spans(), recorded.telemetry(), manifests))
    assert ("energy_unchecked" in found.quality_reasons) is one_source
    assert ("energy_integral_error_frac" in found.metrics) is not one_source

"""Steps before the steady state left out, throttling and its onset, heat over slots, lists against their metrics."""

import json

import numpy as np
import pyarrow as pa
import pytest
from runs import constant, run_data

from wattune.analysis.detail import MOST_LISTED, NUM_TIMES, Detail, detail_of
from wattune.analysis.metrics.energy import powers
from wattune.analysis.metrics.throttle import stretches, throttle_metrics
from wattune.analysis.run_data import clocks_and_temperatures
from wattune.analysis.signals.align import align
from wattune.analysis.signals.readings import ReadingsCache
from wattune.analysis.summary import summarize

GPU, TWIN = ("n0", "gpu0"), ("n0", "gpu1")
FAST_S = np.arange(-1.0, 31.0, 0.05)
MANIFESTS = {
    "n0": {
        "devices": {
            "gpu0": {"slot": 4, "power_limit_w": 500.0, "sm_clock_max_mhz": 2000.0},
            "gpu1": {"slot": 1, "power_limit_w": 500.0, "sm_clock_max_mhz": 2000.0},
        }
    }
}


def fast(bench, **columns):
    return bench.tier("fast", {device: {"time_s": FAST_S, **columns} for device in (GPU, TWIN)})


def capped(time_s):
    """Power caps the clock from 5 to 10 s and heat from 8 to 12 s; it warms a degree a second."""
    power, heat = (time_s >= 5) & (time_s < 10), (time_s >= 8) & (time_s < 12)
    return {
        "sm_clock_mhz": np.where(power | heat, 1500.0, 2000.0),
        "event_reasons": (power * 0x4 + heat * 0x20).astype(np.uint64),
        "gpu_temp_c": 40.0 + time_s,
    }


def test_throttling_is_told_by_cause_with_the_clock_lost_and_the_temperature_when_it_began(bench):
    tables = {"ring": bench.ring({GPU: constant(495), TWIN: constant(495)}), "fast": fast(bench, **capped(FAST_S))}
    aligned = align(tables, bench.steps([GPU, TWIN]), MANIFESTS)
    found = stretches(aligned.tiers["fast"][GPU], 2000.0, aligned.duration_s)
    power, heat = found["power"], found["thermal"]
    assert [one["onset_temp_c"].round().tolist() for one in (power, heat)] == [[45.0], [48.0]]
    assert [float(one["duration_s"][0]) for one in (power, heat)] == pytest.approx([5.0, 4.0], abs=0.06)
    assert [float(one["clock_lost_frac"][0]) for one in (power, heat)] == pytest.approx([0.25, 0.25])
    assert len(found["hw"]["start_s"]) == 0
    metrics = throttle_metrics(aligned, clocks_and_temperatures(aligned, None, powers(aligned))[1])
    assert metrics["throttle_power_loss_frac"] == pytest.approx(0.25 * 5 / 20, abs=2e-3)
    assert metrics["throttle_thermal_loss_frac"] == pytest.approx(0.25 * 4 / 20, abs=2e-3)
    assert metrics["throttle_hw_loss_frac"] == 0.0
    # They overlap for 2 s, which the whole counts once.
    assert metrics["throttle_loss_frac"] == pytest.approx(0.25 * 7 / 20, abs=2e-3)


def whole(bench):
    waves = {GPU: lambda t: np.where(np.mod(t + 0.01, 4) < 1, 700.0, 300.0)}
    waves[TWIN] = lambda t: 400.0 + 0.01 * np.sin(99 * t)  # a sensor that stays at one value beside others sticks
    tables = {"ring": bench.ring(waves), "fast": fast(bench, **capped(FAST_S))}
    return bench.steps([GPU, TWIN]), tables


def detail(spans, tables, manifests) -> Detail:
    examined = run_data(None, spans, tables, manifests).examined
    assert examined is not None
    return detail_of(examined)


def test_slots_and_their_temperatures_over_time(bench):
    found = detail(*whole(bench), MANIFESTS)
    assert found.slots["slot"].to_pylist() == [1, 4]
    assert found.slots["device"].to_pylist() == ["gpu1", "gpu0"]
    assert found.slots["power_mean_w"].to_pylist() == pytest.approx([400.0, 400.0], rel=2e-3)
    assert found.slots["power_peak_1s_w"].to_pylist() == pytest.approx([400.0, 700.0], rel=5e-3)
    assert found.slots["sm_clock_mean_mhz"].to_pylist() == pytest.approx([2000 - 500 * 7 / 20] * 2, rel=2e-3)
    heat = found.temperatures.filter(
        pa.array([device == "gpu0" for device in found.temperatures["device"].to_pylist()])
    )
    middle_s = heat["start_s"].to_numpy() + 20 / NUM_TIMES / 2
    assert heat["temp_mean_c"].to_numpy() == pytest.approx(40 + middle_s, abs=1e-4)


def test_excursions_that_cross_blocks_are_one(bench, monkeypatch):
    spans, tables = whole(bench)
    one = detail(spans, tables, MANIFESTS).excursions
    monkeypatch.setattr("wattune.analysis.signals.energy_grid._BLOCK", 64)
    monkeypatch.setattr("wattune.analysis.signals.series._BLOCK", 7)
    monkeypatch.setattr("wattune.analysis.metrics.excursion._BLOCK", 7)
    many = detail(spans, tables, MANIFESTS)
    assert many.excursions["start_s"].to_pylist() == pytest.approx(one["start_s"].to_pylist())
    assert many.excursions["peak_w"].to_pylist() == pytest.approx(one["peak_w"].to_pylist())
    assert many.excursions.num_rows == one.num_rows


def test_json_has_the_first_rows_of_long_tables_and_says_how_many_there_are(bench):
    spans = bench.steps([GPU], num_steps=MOST_LISTED + 5, step_s=0.01)
    found = detail(spans, {"ring": bench.ring({GPU: constant(100)})}, {}).to_json()
    assert len(found["steps"]) == MOST_LISTED
    assert found["num_rows"]["steps"] == MOST_LISTED + 5
    json.dumps(found, allow_nan=False)


def test_a_cache_without_room_changes_no_figure(bench, monkeypatch):
    spans, tables = whole(bench)
    before = summarize(run_data(None, spans, tables, MANIFESTS)).metrics
    monkeypatch.setattr("wattune.analysis.signals.align.ReadingsCache", lambda: ReadingsCache(most_bytes=1))
    assert summarize(run_data(None, spans, tables, MANIFESTS)).metrics == before

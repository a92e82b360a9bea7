"""Traces the NVML backend itself recorded on one H200: `h200x1/README.md` says what they are."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from runs import run_data

from wattune.analysis.summary import Summary, summarize
from wattune.schema import TELEMETRY
from wattune.storage.measured import MeasuredFolder

FOLDER = Path(__file__).parent / "h200x1"
RECORDINGS = sorted(path.name for path in FOLDER.glob("*/"))


@cache
def folder(recording: str) -> MeasuredFolder:
    return MeasuredFolder(FOLDER / recording)


@cache
def summary(recording: str) -> Summary:
    own = folder(recording)
    return summarize(run_data(None, own.spans(), own.telemetry(), own.manifests()))


@pytest.mark.parametrize("recording", RECORDINGS)
def test_the_ring_was_joined_without_gap_or_duplicate(recording: str) -> None:
    ring = folder(recording).telemetry()["ring"]
    facts = folder(recording).manifests()["node0"]["devices"]["gpu0"]["at_end"]["ring"]
    assert facts["gaps"] == 0 and facts["samples"] == ring.num_rows and facts["depth"] == 119
    steps_ms = np.diff(ring["sensor_ns"].to_numpy()) / 1e6
    assert steps_ms.min() > 5 and steps_ms.max() < 60
    assert np.median(steps_ms) == pytest.approx(20.0, abs=0.1)
    drains = np.unique(ring["mono_ns"].to_numpy(), return_counts=True)[1]
    assert drains[0] == 119 and drains[1:].min() >= 47 and drains[1:].max() <= 51


@pytest.mark.parametrize("recording", RECORDINGS)
def test_every_column_was_read_whenever_it_was_asked(recording: str) -> None:
    manifest = folder(recording).manifests()["node0"]
    tables = folder(recording).telemetry()
    for tier, columns in manifest["devices"]["gpu0"]["capabilities"].items():
        assert manifest["tiers"][tier]["errors"] == {} and manifest["tiers"][tier]["missed_ticks"] == 0
        for column, state in columns.items():
            # One GPU has no NVLink; GPM has nothing to say of a first tick less than 100 ms after the probe.
            missing = tables[tier][column].null_count
            assert missing <= 1 if state == "available" else "nvlink" in column and missing == tables[tier].num_rows
            kind = (TELEMETRY[tier].field(column).metadata or {})[b"kind"]
            if kind == b"cumulative" and state == "available":
                assert np.diff(tables[tier][column].to_numpy()).min() >= 0
    assert manifest["closed"] and manifest["devices"]["gpu0"]["at_end"]["throttle_abi"] == "verified"


def test_a_square_wave_has_peaks_that_its_mean_hides() -> None:
    found = summary("square").metrics
    assert found["device_power_peak_20ms_w"] > 930 and found["device_power_peak_1s_w"] < 480
    assert found["power_swing_rms_w"] == pytest.approx(310, rel=0.01)
    assert found["device_power_mean_w"] == pytest.approx(455, rel=0.001)
    assert found["energy_integral_error_frac"] < 0.002


def test_products_without_pause_hold_the_limit_and_lose_clock() -> None:
    found = summary("idle_busy").metrics
    assert found["device_power_mean_w"] == pytest.approx(692, rel=0.001)
    assert found["device_power_peak_1s_w"] < found["device_power_limit_w"] == 700.0
    assert found["clock_deficit_frac"] == pytest.approx(0.246, rel=0.01)
    assert found["tensor_active_frac"] == pytest.approx(0.936, rel=0.01)
    assert found["energy_integral_error_frac"] < 0.001


@pytest.mark.parametrize("recording", RECORDINGS)
def test_real_traces_are_publishable_but_for_their_temperatures(recording: str) -> None:
    assert summary(recording).quality == "publishable"
    assert summary(recording).tags["quality_thermal"] == "indicative"

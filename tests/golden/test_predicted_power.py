"""Predicted power and temperature against measurements left out of the fit (`benchmarks/predict_power.py`).

The bars are those the project set itself: half of the trials within 5 % in mean power and node peak and 6 % in energy
a token, temperatures within 2 K.
"""

import json
from pathlib import Path

import measured_tables
import numpy as np
import predict_power as script
import pytest
from host_temperature import Trace, fit_temperature, recording, run, study_trace

from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.cost.power import H200 as POWER
from wattune.cost.power import SHORT_PEAK_ERROR_FRAC, SHORT_WINDOWS
from wattune.cost.temperature import H200 as THERMAL
from wattune.fitting.power import FITTED, H200_PRIOR, fit_power
from wattune.trial import TrialSpec

ROOT = Path(__file__).parents[2]
BARS = {"device_power_mean_w": 0.05, "node_device_power_peak_1s_w": 0.05, "energy_per_token_j": 0.06}


@pytest.fixture(scope="module")
def rows():
    return script.trials()


@pytest.fixture(scope="module")
def held_out(rows):
    return script.held_out(rows, [row["trial_id"] for row in rows], H200_PRIOR)


def errors(held_out, rows, method, metric):
    measured = np.array([row[metric] for row in rows])
    return np.abs(held_out[method][:, script.METRICS.index(metric)] / measured - 1)


@pytest.mark.parametrize("metric", BARS)
def test_configurations_left_out_are_within_the_bars(held_out, rows, metric):
    for method in ("measured clock", "solved clock"):
        assert np.median(errors(held_out, rows, method, metric)) < BARS[metric]
    best_baseline = min(np.median(errors(held_out, rows, name, metric)) for name in script.BASELINES)
    assert np.median(errors(held_out, rows, "solved clock", metric)) < best_baseline


def test_shipped_coefficients_are_the_fit(rows):
    found = fit_power(rows, H200_PRIOR, limit_w=700.0)
    for name in FITTED:
        assert getattr(POWER, name) == pytest.approx(getattr(found, name), rel=0.02, abs=0.5)


@pytest.fixture(scope="module")
def peaks():
    return script.short_peaks()


@pytest.mark.parametrize("metric", script.SHORT)
def test_short_peaks_of_families_left_out_are_within_the_bars(peaks, metric):
    """Peaks of 100 ms and 20 ms pass the limit of 700 W by a quarter and more; cut at it they are 13 and 22 % off."""
    families, found, _ = peaks
    measured, predicted = found[metric]
    off = np.abs(predicted / measured - 1)
    assert len(measured) >= 300 and len(set(families)) >= 9 and measured.max() > 870
    assert np.median(off) < 0.045 and np.quantile(off, 0.9) < 0.14
    assert 0.92 <= np.mean(off <= SHORT_PEAK_ERROR_FRAC) <= 0.97, "95 %, the half width is 19 %"
    assert np.median(np.abs(np.minimum(predicted, 700) / measured - 1)) > 2 * np.median(off), "the limit is no peak"
    assert len(np.unique(np.round(predicted, 1))) > 0.55 * len(np.unique(measured))


def test_shipped_factors_of_short_windows_are_the_fit(peaks):
    _, _, fitted = peaks
    for name, window_s in zip(script.SHORT, SHORT_WINDOWS, strict=True):
        assert fitted[name] == pytest.approx(SHORT_WINDOWS[window_s], abs=0.02)


def test_short_peaks_pass_the_limit_and_those_of_nodes_are_right_in_the_median():
    rows = [row for row in measured_tables.rows("*_h[12]00*.parquet") if all(row[name] for name in script.SHORT)]
    most = [max(row[name] for row in rows) / 700 for name in ("device_power_peak_1s_w", *script.SHORT)]
    assert len(rows) == 315 and most == pytest.approx([1.01, 1.25, 1.40], abs=0.005)
    specs, node = [TrialSpec.from_json(json.loads(row["spec"])) for row in rows], "node_device_power_peak_100ms_w"
    found = estimate(specs, default_coefficients).columns[node].value
    assert abs(np.median(found / np.array([row[node] for row in rows]) - 1)) < 0.005


def test_a_recording_left_out_is_within_two_kelvin():
    seen = [recording(name) for name in ("dp4", "square_inphase")]
    other = recording("tp2pp2")
    error = run(fit_temperature(seen, THERMAL), other.power_w) - other.temp_c
    assert np.nanpercentile(np.abs(error), 95) < 2


def test_four_minutes_left_out_are_within_two_kelvin():
    study = study_trace()
    half = study.power_w.shape[1] // 2
    fit = fit_temperature([Trace(power_w=study.power_w[:, :half], temp_c=study.temp_c[:, :half])], THERMAL)
    error = (run(fit, study.power_w) - study.temp_c)[:, half:]
    assert np.nanpercentile(np.abs(error), 95) < 2
    assert abs(np.nanmean(error)) < 0.6


def test_the_steady_temperature_follows_from_half_a_minute_of_load():
    soak = study_trace("soak_llama_h200x2")
    first = 64  # seconds: half a minute of rest and half a minute of load
    fit = fit_temperature([Trace(power_w=soak.power_w[:, :first], temp_c=soak.temp_c[:, :first])], THERMAL)
    error = (run(fit, soak.power_w) - soak.temp_c)[:, first:]
    assert error.shape[1] > 150, "three minutes of constant load, the last of them steady"
    assert np.nanpercentile(np.abs(error), 95) < 2
    assert abs(np.nanmean(error[:, -30:])) < 2

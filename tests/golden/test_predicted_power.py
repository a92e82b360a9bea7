"""Predicted power and temperature against measurements left out of the fit (estimates: `benchmarks/prediction.py`).

The bars are those the project set itself: half of the trials within 5 % in mean power and node peak and 6 % in energy
a token, temperatures within 2 K.
"""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import measured_tables
import numpy as np
import pytest
from host_temperature import Trace, fit_temperature, recording, run, study_trace

from wattune.cost import power as power_module
from wattune.cost.batch import batches
from wattune.cost.clock import compute_w, working_clock_frac
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.cost.estimate import predict as predict_parts
from wattune.cost.power import H200 as POWER
from wattune.cost.power import SHORT_PEAK_ERROR_FRAC, SHORT_WINDOWS, predict
from wattune.cost.temperature import H200 as THERMAL
from wattune.fitting.power import FITTED, H200_PRIOR, fit_power, has_activity, measured_steps
from wattune.trial import TrialSpec

ROOT = Path(__file__).parents[2]


METRICS = ("device_power_mean_w", "node_device_power_peak_1s_w", "energy_per_token_j")
SHORT = ("device_power_peak_100ms_w", "device_power_peak_20ms_w")


def predicted(c, rows):
    """Predicts `METRICS` from measured activity, at the clock that the limit leaves, [trials, metrics]."""
    result = np.empty((len(rows), len(METRICS)))
    for positions, batch, step in measured_steps(rows):
        a = step.activity
        work = {"matrix_s": a.matrix_s, "memory_s": a.memory_s, "matrix_frac": a.matrix_frac}
        dynamic = compute_w(c, **work, overlapped_s=a.overlapped_s)
        collective_s = a.collective_s + step.parts_s["straggler_s"][:, None]
        own, clock = (
            working_clock_frac(c, dynamic, a.matrix_s + a.memory_s, collective_s, each_w)
            for each_w in (max(700.0, c.limit_w), 700.0)
        )
        power = predict(batch, replace(step, activity=replace(a, clock_frac=clock, held_frac=clock / own)), c)
        result[positions] = np.stack([power[name].value for name in METRICS], axis=1)
    return result


@pytest.fixture(scope="module")
def rows():
    return [row for row in measured_tables.rows() if row["device"] == "h200_sxm" and has_activity(row)]


def test_configurations_left_out_are_within_the_bars(rows):
    """In the median, and nearer than a constant share of the limit: the mean power of the other trials."""
    names, measured = (
        np.array([row["trial_id"] for row in rows]),
        np.array([[row[one] for one in METRICS] for row in rows]),
    )
    found, constant_w = np.empty(measured.shape), np.empty(len(rows))
    for name in np.unique(names):
        rest, places = [row for row in rows if row["trial_id"] != name], np.flatnonzero(names == name)
        found[places] = predicted(fit_power(rest, H200_PRIOR, limit_w=700.0), [rows[place] for place in places])
        constant_w[places] = np.mean([row[METRICS[0]] for row in rest])
    median = np.median(np.abs(found / measured - 1), axis=0)
    assert (median < [0.05, 0.05, 0.06]).all()
    assert median[0] < np.median(np.abs(constant_w / measured[:, 0] - 1))


def test_shipped_coefficients_are_the_fit(rows):
    found = fit_power(rows, H200_PRIOR, limit_w=700.0)
    for name in FITTED:
        assert getattr(POWER, name) == pytest.approx(getattr(found, name), rel=0.02, abs=0.5)


@pytest.fixture(scope="module")
def peaks():
    """Peaks of short windows through the product, by factors fitted without each model and engine.

    Families of trials on H100 and H200; measured and predicted peaks by metric; and factors fitted to all.
    """
    rows = [row for row in measured_tables.rows("*_h[12]00*.parquet") if all(row[name] for name in SHORT)]
    specs = [TrialSpec.from_json(json.loads(row["spec"])) for row in rows]
    families = [f"{spec.model.name} {spec.engine}" for spec in specs]
    bases = {name: np.zeros((len(rows), 2)) for name in SHORT}
    for column, factors in enumerate(((1.0, 0.0), (1.0, 1.0))):
        with patch.dict(power_module.SHORT_WINDOWS, dict.fromkeys(power_module.SHORT_WINDOWS, factors)):
            for positions, batch in batches(specs):
                drawn = predict_parts(batch, default_coefficients(batch.device)).power
                for name, basis in bases.items():
                    basis[positions, column] = drawn[name].value
    found, fitted = {}, {}
    for name, basis in bases.items():
        basis[:, 1] -= basis[:, 0]
        actual, values = np.array([row[name] for row in rows], float), np.empty(len(rows))
        for family in set(families):
            own = np.array([one == family for one in families])
            values[own] = basis[own] @ huber(basis[~own], actual[~own])
        found[name], fitted[name] = (actual, values), huber(basis, actual)
    return families, found, fitted


def huber(basis, actual):
    """Returns the factors with the least relative errors, those beyond 5 % counted by their size."""
    weights = np.ones(len(actual))
    for _ in range(20):
        factors = np.linalg.lstsq(basis / actual[:, None] * weights[:, None], weights, rcond=None)[0]
        weights = np.sqrt(np.minimum(1.0, 0.05 / np.maximum(np.abs(basis @ factors / actual - 1), 1e-9)))
    return factors


@pytest.mark.parametrize("metric", SHORT)
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
    for name, window_s in zip(SHORT, SHORT_WINDOWS, strict=True):
        assert fitted[name] == pytest.approx(SHORT_WINDOWS[window_s], abs=0.02)


def test_short_peaks_pass_the_limit_and_those_of_nodes_are_right_in_the_median():
    rows = [row for row in measured_tables.rows("*_h[12]00*.parquet") if all(row[name] for name in SHORT)]
    most = [max(row[name] for row in rows) / 700 for name in ("device_power_peak_1s_w", *SHORT)]
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

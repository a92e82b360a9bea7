"""Settled temperature of recorded devices and of devices whose settled value is known."""

import numpy as np
import pytest
from host_temperature import study_trace

from wattune.analysis.metrics.settled import coefficients_of, settle
from wattune.analysis.metrics.thermal import thermal_metrics
from wattune.analysis.run_data import RunData
from wattune.analysis.signals.series import series
from wattune.catalog.hardware import device
from wattune.cost.temperature import H200, lagged, scaled

GPU = ("n0", "gpu0")


def cut(trace, start, end, before=20):
    """Curves of a recorded window from second `start` to `end`, with the seconds before it."""
    first = max(start - before, 0)
    at_s = np.arange(first, end) + 0.5 - start
    return {
        ("n0", number): (series(at_s, trace.temp_c[number, first:end]), series(at_s, trace.power_w[number, first:end]))
        for number in range(len(trace.power_w))
    }


def made(window_s, *, before_w=78.0, watts=600.0, inlet_c=30.0, lead_s=10.0, r2=0.0038):
    """One device that runs at `before_w` for long, then at `watts`; and the temperature that it settles at."""
    at_s = np.arange(-200.0, window_s, 0.05)
    power_w = np.where(at_s < -lead_s + 5.0, before_w, watts)
    temp_c = inlet_c + 0.0315 * lagged(power_w, 0.38, 0.05) + r2 * lagged(power_w, 98.0, 0.05)
    seen = at_s >= -lead_s
    curves = {GPU: (series(at_s[seen], np.round(temp_c[seen])), series(at_s[seen], power_w[seen]))}
    return curves, inlet_c + (0.0315 + r2) * watts


@pytest.mark.parametrize("window", [(36, 38), (36, 41), (45, 60), (60, 65), (36, 96)])
def test_a_short_window_of_the_recorded_soak_tells_what_its_end_reads(window):
    trace = study_trace("soak_llama_h200x2")
    truth_c = np.nanmax(trace.temp_c[:, 149:], axis=1)
    found = settle(cut(trace, *window), window[1] - window[0], H200, 700.0)
    for one, end_c in zip(found.values(), truth_c, strict=True):
        assert abs(one.settled_c - end_c) < one.uncertainty_k
        assert abs(one.settled_c - end_c) < 2.5
    if window[1] <= 41:
        assert found["n0", 0].start_c < truth_c[0] - 3.0  # the readings alone are far off


@pytest.mark.parametrize("before_w", [78.0, 300.0, 690.0])
@pytest.mark.parametrize("window_s", [3.0, 10.0, 60.0, 300.0])
def test_stored_heat_is_told_from_the_load(before_w, window_s):
    curves, truth_c = made(window_s, before_w=before_w)
    (one,) = settle(curves, window_s, H200, 700.0).values()
    assert abs(one.settled_c - truth_c) < one.uncertainty_k + 0.5  # readings are rounded


def test_no_window_has_no_settled_value():
    curves, _ = made(5.0)
    assert settle(curves, 0.2, H200, 700.0) == {}


def test_coefficients_are_the_devices_else_those_of_its_limit():
    assert coefficients_of(device("h200_sxm"), None) is H200
    assert coefficients_of(device("h100_sxm"), 700.0) == scaled(700.0)
    assert coefficients_of(None, 350.0).resistances_k_per_w[0] == pytest.approx(0.063)
    assert coefficients_of(None, None) == scaled(700.0)


def test_a_recorded_trial_has_the_settled_metrics(pytestconfig):
    data = RunData.of(pytestconfig.rootpath / "docs/notebooks/data/dense_h200x4/trials/403f4f8f6149-0")
    examined = data.examined
    metrics = thermal_metrics(examined.aligned, examined.temperatures, examined.settled)
    assert metrics["device_temp_start_c"] <= metrics["device_temp_max_c"]
    assert -3.0 < metrics["device_temp_settled_c"] - metrics["device_temp_max_c"] < 10.0
    assert 1.0 < metrics["device_temp_settled_uncertainty_c"] < 10.0


@pytest.mark.parametrize("window", [(23, 25), (23, 28), (23, 38), (23, 83), (120, 125), (120, 240), (180, 185)])
def test_fans_that_speed_up_are_within_the_interval(window):
    """Two H100s without a fit: one warmed to 81 degC in a minute and fell to 73 as fans sped up."""
    trace = study_trace("soak_matmul_h100x2")
    found = settle(cut(trace, *window, before=15), window[1] - window[0], scaled(700.0), 700.0)
    for one, end_c in zip(found.values(), trace.temp_c[:, 240:245].max(axis=1), strict=True):
        assert abs(one.settled_c - end_c) < one.uncertainty_k
        assert one.uncertainty_k < 30.0

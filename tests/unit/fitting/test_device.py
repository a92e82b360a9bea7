"""The fit of a device: fitted to the measured trials in the repository, and refused without any."""

from dataclasses import replace

import pytest
from stored_tables import results_of

from wattune.catalog.hardware import DEVICES
from wattune.cost.defaults import default_coefficients
from wattune.errors import PlanError
from wattune.fitting.device import fit_device
from wattune.run import RunStatus

DEFAULT = default_coefficients(DEVICES["h200_sxm"])


def test_trials_of_a_device_give_measured_coefficients_with_held_out_errors():
    measured = [
        (spec, replace(run, tags={**run.tags, "version.torch": "2.12.0"})) for spec, run in results_of("moe_ep_h200x4")
    ]
    fit = fit_device("h200_sxm", measured, DEFAULT, studies=["moe"], device_uuids=["b", "a", "b"])
    assert fit.num_trials == 21 and fit.num_trials > fit.num_configurations, "one crashed, the reference was repeated"
    assert fit.device_uuids == ("a", "b")
    assert fit.step_time.origin == fit.power.origin == fit.memory.origin == "measured here"
    assert fit.memory.engines["torch"].version == "torch 2.12.0"
    assert 0 < fit.hold_out["step_time_s"].median_frac < 0.5
    assert 0 < fit.hold_out["memory_peak_bytes"].median_frac < 0.2
    assert any("engine" in wish for wish in fit.sharpen), "all trials are of one engine"


def test_nothing_measured_is_refused():
    crashed = [
        (spec, result) for spec, result in results_of("moe_ep_h200x4") if result.status is not RunStatus.COMPLETED
    ]
    with pytest.raises(PlanError, match="none of 1 trials on h200_sxm completed"):
        fit_device("h200_sxm", crashed, DEFAULT, studies=["moe"])

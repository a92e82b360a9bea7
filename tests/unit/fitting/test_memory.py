"""Fitted corrections find what was put into measurements, and say how they do on what was left out."""

from dataclasses import replace

import numpy as np
import pytest
from specs import trial_spec

from wattune.catalog.models import model
from wattune.cost.batch import batches
from wattune.cost.coefficients import EngineMemory
from wattune.cost.defaults import H200
from wattune.cost.memory.predict import predict
from wattune.fitting.memory import LEAST_ERROR_FRAC, fit_memory, measured_excess
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec

PLANS = [
    Plan(micro_batch_size=size, sharding=sharding, recompute=recompute)
    for size in (1, 2, 4)
    for sharding in ("none", "zero1", "zero3")
    for recompute in ("none", "full")
]


def specs(engine: str = "torch") -> list[TrialSpec]:
    return [trial_spec(replace(model("llama3_8b"), num_layers=4), engine=engine, plan=plan) for plan in PLANS]


def peaks(of: list[TrialSpec], engine: EngineMemory) -> list[float]:
    found = np.empty(len(of))
    for positions, batch in batches(of):
        found[positions] = predict(batch, replace(H200, engines={"torch": engine})).peak_bytes
    return [float(peak) for peak in found]


TRUE = EngineMemory(version="", offset_bytes=300e6, activations_frac=1.03, error_frac=0.0)


def test_an_offset_and_a_share_of_activations_are_found_again() -> None:
    measured = list(zip(specs(), peaks(specs(), TRUE), strict=True))
    fit, held_out = fit_memory(measured, H200, {"torch": "torch 2.12.0"})
    engine = fit.engines["torch"]
    assert engine.activations_frac == pytest.approx(1.03)
    assert engine.offset_bytes == pytest.approx(300e6, rel=1e-6)
    assert engine.error_frac == LEAST_ERROR_FRAC
    assert np.abs(held_out).max() < 1e-6
    assert fit.origin == "measured here" and engine.version == "torch 2.12.0"


def test_an_engine_with_few_configurations_keeps_its_default() -> None:
    few = specs()[:4]
    measured = [(spec, peak) for spec, peak in zip(few, peaks(few, TRUE), strict=True) for _ in range(3)]
    fit, held_out = fit_memory(measured, H200, {})
    assert fit.engines == H200.engines
    assert np.isnan(held_out).all()


def test_repeats_of_a_configuration_are_left_out_together() -> None:
    """A configuration that is off by 10 % in every repeat shows its error: no repeat of it was in the fit."""
    measured = list(zip(specs(), peaks(specs(), TRUE), strict=True))
    odd, peak = measured[0]
    _, held_out = fit_memory([*measured[1:], *((odd, 1.1 * peak) for _ in range(9))], H200, {})
    assert held_out[-9:] == pytest.approx(1 / 1.1 - 1, abs=0.005)


def test_errors_below_the_measured_peak_weigh_more() -> None:
    """Of two halves that disagree by 4 % the fit stays near the larger one."""
    measured = [
        (spec, peak * (1.04 if index % 2 else 1.0))
        for index, (spec, peak) in enumerate(zip(specs(), peaks(specs(), TRUE), strict=True))
    ]
    _, held_out = fit_memory(measured, H200, {})
    assert np.median(held_out) > 0


def test_excess_beyond_the_interval_is_found_and_lowers_the_error_of_other_plans() -> None:
    own = specs()
    hidden_bytes = 4e9  # such as the buffers of a version whose counts nobody made
    engine = replace(H200.engines["torch"], offset_bytes=H200.engines["torch"].offset_bytes + hidden_bytes)
    actual = peaks(own, engine)
    excess = measured_excess([(own[0], actual[0])], H200)  # one trial, as Primus
    assert list(excess.values()) == pytest.approx([hidden_bytes])
    after, errors = replace(H200, excess_bytes=excess), {}
    for name, coefficients in (("before", H200), ("after", after)):
        found = np.empty(len(own))
        for positions, batch in batches(own):
            found[positions] = predict(batch, coefficients).peak_bytes
        errors[name] = np.abs(found[1:] / np.array(actual[1:]) - 1)
    assert errors["after"].max() < 0.001 < np.median(errors["before"])


def test_an_excess_inside_the_interval_is_scatter_and_stays_out() -> None:
    own = specs()
    actual = peaks(own, H200.engines["torch"])
    assert measured_excess([(own[0], actual[0] * (1 + 1.5 * H200.engines["torch"].error_frac))], H200) == {}
    assert measured_excess([], H200) == {}

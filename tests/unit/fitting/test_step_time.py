"""A fit finds the coefficients that trials were made with, and says how well it predicts others."""

from dataclasses import replace

import numpy as np
import pytest
from known_fit import POWER
from specs import trial_spec

from wattune.catalog.models import model
from wattune.cost.coefficients import PUBLISHED_STEP_TIME, StepTimeCoefficients
from wattune.errors import PlanError
from wattune.fitting.step_time import fit, predicted_s
from wattune.plans.axes import Plan

PLANS = [
    Plan(tp=tp, etp=tp, micro_batch_size=mbs, sharding=sharding, recompute=recompute)
    for tp in (1, 2)
    for mbs in (1, 2)
    for sharding in ("zero1", "zero3")
    for recompute in ("none", "full")
]
SPECS = [trial_spec(replace(model("llama3_70b"), num_layers=4), batch=8, plan=plan) for plan in PLANS]


def trials(coefficients, scatter=0.0):
    empty = [(spec, {"device_power_limit_w": 700.0}) for spec in SPECS]
    times_s = predicted_s(empty, coefficients, POWER)
    noise = np.random.default_rng(7).normal(0.0, scatter, len(times_s))
    return [
        (spec, {"step_time_s": float(time_s), "device_power_limit_w": 700.0})
        for spec, time_s in zip(SPECS, times_s * np.exp(noise), strict=True)
    ]


def slower(factor):
    kernel = PUBLISHED_STEP_TIME.kernel
    return replace(PUBLISHED_STEP_TIME, kernel=replace(kernel, matmul_frac=kernel.matmul_frac * factor))


def test_nothing_moves_where_the_prior_is_right():
    _, factors, held_out, _ = fit(trials(PUBLISHED_STEP_TIME), PUBLISHED_STEP_TIME, POWER)
    assert all(factor == pytest.approx(1.0, abs=1e-6) for factor in factors.values())
    assert np.abs(held_out).max() < 1e-6


def test_slower_products_are_found_through_noise():
    _, factors, held_out, _ = fit(trials(slower(0.8), scatter=0.02), PUBLISHED_STEP_TIME, POWER)
    assert factors["matrix products"] == pytest.approx(0.8, abs=0.06)
    assert np.median(np.abs(held_out)) < 0.03


def test_the_interval_is_that_of_configurations_held_out():
    coefficients, _, held_out, _ = fit(trials(slower(0.8), scatter=0.02), PUBLISHED_STEP_TIME, POWER)
    assert coefficients.origin == "measured here"
    away = np.abs(1 / (1 + held_out) - 1)
    assert np.quantile(away, 0.95) <= coefficients.error_frac <= away.max()


def test_one_wild_trial_does_not_carry_the_fit():
    measured = trials(PUBLISHED_STEP_TIME)
    spec, metrics = measured[0]
    wild = [(spec, {**metrics, "step_time_s": 5 * metrics["step_time_s"]}), *measured[1:]]
    _, factors, *_ = fit(wild, PUBLISHED_STEP_TIME, POWER)
    assert abs(factors["matrix products"] - 1) < 0.05


def test_without_a_step_time_there_is_nothing_to_fit():
    with pytest.raises(PlanError, match="no trial has a step time"):
        fit([(SPECS[0], {"step_time_s": None})], PUBLISHED_STEP_TIME, POWER)


def test_a_family_that_the_fit_did_not_see_has_a_wider_interval() -> None:
    near = replace(PUBLISHED_STEP_TIME, error_frac=0.1, elsewhere_error_frac=0.2, seen=("torch a 4 layers, 4 devices",))
    assert near.error_frac_of(StepTimeCoefficients.family("torch", "a", 4, 4)) == 0.1
    assert near.error_frac_of(StepTimeCoefficients.family("torch", "a", 4, 2)) == 0.2
    assert PUBLISHED_STEP_TIME.error_frac_of("anything") == PUBLISHED_STEP_TIME.error_frac

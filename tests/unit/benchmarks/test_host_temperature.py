"""Thermal coefficients come back from temperatures that were made of them."""

from dataclasses import replace

import numpy as np
import pytest
from host_temperature import HostFit, Trace, fit_temperature, run, with_inlet_at_rest

from wattune.cost.temperature import H200, lagged

TRUE = HostFit(
    coefficients=replace(
        H200,
        inlet_c=28.0,
        resistances_k_per_w=(0.036, 0.005),
        time_constants_s=(0.5, 60.0),
        preheat_k_per_w=0.012,
        preheat_time_constant_s=6.0,
    ),
    preheat_k_per_w=(0.012, 0.002, 0.008),
)


def load(seconds: int, seed: int = 0) -> np.ndarray:
    """Rest, then a power that changes every few seconds, apart for each of three devices."""
    rng = np.random.default_rng(seed)
    blocks = 100 + 600 * rng.random((3, seconds // 8 + 1))
    power_w = np.repeat(blocks, 8, axis=1)[:, :seconds]
    power_w[:, :8] = 78
    return power_w


def test_a_lag_follows_a_step_exactly() -> None:
    found = lagged(np.array([[0.0, 100.0, 100.0]]), 2.0, 1.0)[0]
    # Mean of 100 (1 - exp(-t / 2)) over each second.
    expected = [100 * (1 - 2 * (np.exp(-s / 2) - np.exp(-(s + 1) / 2))) for s in (0, 1)]
    assert found == pytest.approx([0, *expected])


def test_a_constant_power_is_in_balance_from_the_start() -> None:
    power_w = np.full((3, 20), 500.0)
    expected = 28 + 500 * (0.041 + np.array(TRUE.preheat_k_per_w))
    assert run(TRUE, power_w) == pytest.approx(np.repeat(expected[:, None], 20, axis=1))


def test_a_fit_runs_free_through_a_load_that_it_never_saw() -> None:
    seen = load(200)
    temp_c = np.round(run(TRUE, seen))  # sensors show whole degrees
    temp_c[1, 50:60] = np.nan
    found = fit_temperature([Trace(power_w=seen, temp_c=temp_c)], H200)
    other = load(150, seed=1)
    assert np.abs(run(found, other) - run(TRUE, other)).max() < 0.6
    assert found.coefficients.preheat_k_per_w == max(found.preheat_k_per_w)
    assert found.coefficients.leakage_w_per_k == H200.leakage_w_per_k


def test_a_device_alone_is_heated_by_none() -> None:
    alone = replace(TRUE, preheat_k_per_w=(0.0,))
    power_w = load(100)[:1]
    found = fit_temperature([Trace(power_w=power_w, temp_c=run(alone, power_w))], H200)
    assert found.preheat_k_per_w[0] == pytest.approx(0, abs=1e-6)
    assert found.coefficients.inlet_c == pytest.approx(28, abs=0.1)


def test_rest_tells_the_inlet_of_another_host() -> None:
    warmer = replace(TRUE, coefficients=replace(TRUE.coefficients, inlet_c=37.0))
    power_w = load(30)
    found = with_inlet_at_rest(TRUE, Trace(power_w=power_w, temp_c=run(warmer, power_w)), 8)
    assert found.coefficients.inlet_c == pytest.approx(37)
    assert found.preheat_k_per_w == TRUE.preheat_k_per_w

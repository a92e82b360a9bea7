"""Temperature under a constant power: the steady state."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.hardware import DEVICES
from wattune.cost.batch import Batch
from wattune.cost.coefficients import ThermalCoefficients
from wattune.cost.tables import EstimatedMetric
from wattune.cost.temperature import H200, lagged, predict, thermal_coefficients

from .test_power import batch_of

DRY = ThermalCoefficients(
    inlet_c=30,
    resistances_k_per_w=(0.03, 0.01),
    time_constants_s=(0.5, 60.0),
    preheat_k_per_w=0.01,
    preheat_time_constant_s=5.0,
    leakage_w_per_k=0.0,
    reference_c=50,
    rest_w=100,
    origin="datasheet",
    error_k=5,
)
LEAKING = replace(DRY, leakage_w_per_k=0.5)


def of(
    *watts: float,
    coefficients: ThermalCoefficients = DRY,
    limit_w: float = 700.0,
    node_w: float | None = None,
    batch: Batch | None = None,
) -> EstimatedMetric:
    batch = batch or batch_of(*[1] * len(watts))
    batch = replace(batch, limit_w=np.full(len(batch), limit_w))
    own_w = np.array(watts)
    return predict(batch, own_w, 4 * own_w if node_w is None else np.full(len(watts), node_w), coefficients)


def test_worked_by_hand() -> None:
    assert of(500).value == pytest.approx(30 + 0.04 * 500 + 0.01 * 500)


def test_leakage_heats_what_leaks() -> None:
    # T = 55 + 0.05 * 0.5 * (T - 50), so T = (55 - 1.25) / 0.975; at the limit no more power may be drawn.
    assert of(500, coefficients=LEAKING).value == pytest.approx((55 - 1.25) / 0.975)
    assert of(500, coefficients=LEAKING, limit_w=500).value == pytest.approx(55)


@given(st.floats(110, 690), st.floats(1, 10), st.floats(0, 20))
def test_the_steady_state_rises_with_power_and_inlet(watts: float, more_w: float, warmer_k: float) -> None:
    low, high = of(watts, watts + more_w, coefficients=LEAKING).value
    assert high > low
    warm = of(watts, coefficients=replace(LEAKING, inlet_c=30 + warmer_k)).value
    assert warm >= low + warmer_k * 0.999


def test_a_device_alone_is_heated_by_no_other() -> None:
    alone = of(500, batch=batch_of(1, cluster="1x1 h200_sxm"), node_w=500)
    assert alone.value == pytest.approx(50)


def test_a_known_inlet_takes_the_place_of_the_coefficients_and_its_error_leaves_the_interval() -> None:
    known = batch_of(1)
    known = replace(known, cluster=replace(known.cluster, inlet_c=38.0))
    for coefficients, error_k in ((replace(DRY, error_k=8.0), 4.0), (replace(DRY, error_k=20.0), 18.8)):
        found, usual = (of(500, coefficients=coefficients, batch=batch) for batch in (known, None))
        assert found.value == pytest.approx(usual.value + 8)
        assert found.high - found.value == pytest.approx(error_k, abs=0.1)
        assert [usual.high - usual.value, usual.value - usual.low] == pytest.approx([coefficients.error_k] * 2)


def test_heat_that_feeds_itself_has_no_steady_state() -> None:
    with pytest.raises(ValueError, match="no steady state"):
        of(500, coefficients=replace(DRY, leakage_w_per_k=25))


def test_other_devices_reach_the_same_temperature_at_their_limit() -> None:
    found = thermal_coefficients(DEVICES["mi250_gcd"])
    assert found is not None and found.origin == "datasheet" and found.error_k > H200.error_k
    there = of(250, coefficients=found, limit_w=250).value
    assert there == pytest.approx(of(700, coefficients=H200).value)
    assert thermal_coefficients(DEVICES["h200_sxm"]) == H200
    assert thermal_coefficients(DEVICES["cpu"]) is None


def test_a_lag_follows_a_step_exactly() -> None:
    found = lagged(np.array([[0.0, 100.0, 100.0]]), 2.0, 1.0)[0]
    # Mean of 100 (1 - exp(-t / 2)) over each second.
    expected = [100 * (1 - 2 * (np.exp(-s / 2) - np.exp(-(s + 1) / 2))) for s in (0, 1)]
    assert found == pytest.approx([0, *expected])

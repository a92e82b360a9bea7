"""The clock under a power limit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.cost.clock import clock_frac, dynamic_w
from wattune.cost.coefficients import PowerCoefficients

H200 = PowerCoefficients(
    idle_w=80, active_w=120, matrix_w=600, memory_w=150, link_w=40, exponent=2.4, origin="datasheet", error_frac=0.15
)
SHARES = st.floats(0, 1)


@given(SHARES, SHARES, SHARES, st.floats(150, 1500))
def test_power_at_the_clock_keeps_the_limit(matrix: float, memory: float, link: float, limit_w: float) -> None:
    above_idle_w = dynamic_w(H200, *(np.array([each]) for each in (matrix, memory, link)))
    clock = clock_frac(H200, above_idle_w, limit_w)
    power_w = H200.idle_w + above_idle_w * clock**H200.exponent
    assert 0 < clock[0] <= 1
    assert power_w[0] <= limit_w * (1 + 1e-9)
    if clock[0] < 1:  # nothing is given away
        assert power_w[0] == pytest.approx(limit_w)


def test_no_limit_leaves_the_highest_clock() -> None:
    assert clock_frac(H200, dynamic_w(H200, np.ones(3), np.ones(3), np.ones(3)), np.inf).tolist() == [1, 1, 1]


def test_worked_by_hand() -> None:
    # 80 idle, 120 + 0.8 * 600 + 0.2 * 150 + 0.5 * 40 = 650 W above it: 620 / 650 of that is left under 700 W.
    above_idle_w = dynamic_w(H200, np.array([0.8]), np.array([0.2]), np.array([0.5]))
    assert above_idle_w.tolist() == [650]
    assert clock_frac(H200, above_idle_w, 700.0)[0] == pytest.approx((620 / 650) ** (1 / 2.4))

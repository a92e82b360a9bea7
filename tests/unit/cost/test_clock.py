"""The clock under a power limit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.cost.clock import LIMIT_EXPONENT, clock_frac, compute_w, dynamic_w, slowed_frac, working_clock_frac
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


def test_power_of_compute_is_the_mean_of_its_kernels() -> None:
    c = replace(H200, matrix_memory_frac=0.2, memory_frac=0.6)
    one, three, eight = np.array([1.0]), np.array([3.0]), np.array([0.8])
    # A quarter products: 120 + 600 * 0.8 / 4 + 150 * (0.2 + 3 * 0.6) / 4 + 40 W while two of four seconds overlap.
    found = compute_w(c, matrix_s=one, memory_s=three, matrix_frac=eight, overlapped_s=2 * one)
    assert found == pytest.approx(120 + 120 + 75 + 20)
    assert compute_w(c, matrix_s=0 * one, memory_s=0 * one, matrix_frac=eight, overlapped_s=0 * one) == [120]


def test_compute_may_draw_what_communication_leaves() -> None:
    dynamic_w = np.array([800.0])
    alone = working_clock_frac(H200, dynamic_w, np.ones(1), np.zeros(1), 700.0)
    assert alone == pytest.approx(clock_frac(H200, dynamic_w, 700.0))
    beside = working_clock_frac(H200, dynamic_w, np.ones(1), np.full(1, 0.2), 700.0)
    assert beside > alone
    # Together they are at the limit: 620 W above idle on 1.2 s, of which the collective takes 160 W on 0.2 s.
    assert 800 * beside[0] ** 2.4 + 0.2 * 160 == pytest.approx(1.2 * 620)
    assert working_clock_frac(H200, dynamic_w, np.ones(1), np.ones(1), np.inf) == [1]


def test_the_limit_is_held_a_little_below_itself() -> None:
    held = replace(H200, regulated_frac=0.99)
    assert held.idle_w + 800 * clock_frac(held, np.array([800.0]), 700.0)[0] ** 2.4 == pytest.approx(693)


@given(st.floats(150, 1500), st.floats(120, 700), st.floats(1.01, 2))
def test_below_its_own_limit_a_load_follows_another_law(above_idle_w: float, limit_w: float, factor: float) -> None:
    own = replace(H200, limit_w=700.0)
    load = np.array([above_idle_w])
    low, high = (clock_frac(own, load, each)[0] for each in (limit_w, limit_w * factor))
    assert 0 < low <= high <= clock_frac(H200, load, limit_w * factor)[0] * (1 if limit_w * factor > 700 else np.inf)
    at_own = clock_frac(own, load, 700.0)[0]
    assert at_own == clock_frac(H200, load, 700.0)[0]
    if low < at_own:  # nothing is given away under the lower limit either
        drawn_w = above_idle_w * slowed_frac(own.exponent, np.array([low]), np.array([at_own]))[0]
        assert own.idle_w + drawn_w == pytest.approx(limit_w)
        assert low / at_own == pytest.approx((drawn_w / min(above_idle_w, 620.0)) ** (1 / LIMIT_EXPONENT))

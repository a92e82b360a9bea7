"""Least squares within bounds."""

import numpy as np
import pytest

from wattune.fitting.least_squares import least_squares

X = np.linspace(0, 4, 30)
FREE = (np.full(2, -100.0), np.full(2, 100.0))


def test_a_line_is_found() -> None:
    found = least_squares(lambda c: c[0] + c[1] * X - (2 + 3 * X), np.zeros(2), *FREE)
    assert found == pytest.approx([2, 3])


def test_a_curve_is_found() -> None:
    found = least_squares(lambda c: c[0] * np.exp(-c[1] * X) - 5 * np.exp(-0.7 * X), np.array([1.0, 0.1]), *FREE)
    assert found == pytest.approx([5, 0.7])


def test_a_bound_holds_and_the_rest_is_best_beside_it() -> None:
    low, high = np.array([0.0, -100.0]), np.array([1.0, 100.0])
    found = least_squares(lambda c: c[0] + c[1] * X - (2 + 3 * X), np.array([0.5, 0.0]), low, high)
    best = (X * (1 + 3 * X)).sum() / (X * X).sum()
    assert found == pytest.approx([1, best])


def test_a_start_outside_the_bounds_is_moved_inside() -> None:
    found = least_squares(lambda c: c - 7.0, np.array([50.0]), np.array([0.0]), np.array([10.0]))
    assert found == pytest.approx([7])


def test_nothing_to_gain_leaves_the_start() -> None:
    assert least_squares(lambda c: 0 * c + 1.0, np.array([3.0]), np.zeros(1), np.full(1, 9.0)) == [3]

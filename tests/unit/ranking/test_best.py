"""P(best) and ranks: critical values of the literature, and trials whose order is known."""

import numpy as np
import pytest

from wattune.ranking.best import Standing, critical_value, order

MANY = 100_000
"""Degrees of freedom that are as good as infinitely many."""


def made(means: list[float], error: float) -> Standing:
    """Trials that share nothing, each with the same error."""
    num = len(means)
    return Standing(
        mean=np.array(means),
        own=np.full(num, error**2),
        freedom=np.full(num, float(MANY)),
        common=np.zeros((num, 1)),
        shared_freedom=float(MANY),
    )


# Dunnett 1955, table 1a: one-sided, 95 %, equal sizes (correlation 0.5).
@pytest.mark.parametrize(
    ("num_others", "degrees_of_freedom", "value"),
    [(1, 20, 1.72), (2, 20, 2.03), (5, 20, 2.39), (2, MANY, 1.92), (5, MANY, 2.23), (9, MANY, 2.42)],
)
def test_critical_values_are_dunnetts(num_others: int, degrees_of_freedom: int, value: float) -> None:
    assert critical_value(num_others, 10, degrees_of_freedom) == pytest.approx(value, abs=0.05)


def test_equal_trials_are_equally_likely_the_best_and_share_a_rank() -> None:
    found = order(made([0.0, 0.0, 0.0, 0.0], 1.0))
    assert found.best_probability == pytest.approx([0.25] * 4, abs=0.03)
    assert list(found.rank) == [1, 1, 1, 1]
    # The largest of four normal errors is 1.03 standard deviations above their mean.
    assert found.regression == pytest.approx(1.03, abs=0.05)


def test_two_trials_one_error_of_their_difference_apart() -> None:
    found = order(made([np.sqrt(2.0), 0.0], 1.0))
    assert found.best_probability[0] == pytest.approx(0.841, abs=0.02)  # the normal distribution at 1


def test_trials_far_apart_are_told_apart() -> None:
    found = order(made([0.0, -10.0, -20.0], 1.0))
    assert list(found.rank) == [1, 2, 3]
    assert found.best_probability[0] == 1.0
    assert found.regression == pytest.approx(0.0, abs=0.05)


def test_an_effect_that_trials_share_does_not_blur_their_difference() -> None:
    apart, shared = made([1.0, 0.0], 0.1), np.full((2, 1), 50.0)
    found = order(Standing(**{name: getattr(apart, name) for name in Standing.__slots__} | {"common": shared}))
    assert found.best_probability[0] > 0.999
    assert list(found.rank) == [1, 2]

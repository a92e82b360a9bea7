"""Half widths of intervals: by hand, and their coverage of configurations that they have not seen."""

import numpy as np
import pytest

from wattune.fitting.interval import half_width


def test_the_rank_counts_the_next_configuration() -> None:
    away = np.arange(1, 20) / 100  # 19 errors: 0.95 x 20 is the last of them
    assert half_width(1 / (1 + away) - 1, range(19)) == pytest.approx(0.19)
    assert half_width(1 / (1 + np.arange(1, 100) / 1000) - 1, range(99)) == pytest.approx(0.095)
    assert half_width([0.1], ["one"]) == pytest.approx(1 - 1 / 1.1)
    assert half_width([], []) is half_width([np.nan], ["one"]) is None


def test_a_prediction_below_the_measured_needs_the_wider_interval() -> None:
    low, high = half_width([-0.2], ["one"]), half_width([0.2], ["one"])
    assert low is not None
    assert low == pytest.approx(0.25) and high == pytest.approx(1 / 6)
    measured, predicted = 1.0, 0.8
    assert predicted * (1 + low) == pytest.approx(measured)


def test_repeats_count_once() -> None:
    errors = [0.01] * 18 + [0.3] * 40
    assert half_width(errors, [*range(18), *["repeated"] * 40]) == pytest.approx(1 - 1 / 1.3)


@pytest.mark.parametrize("count", [19, 30, 99])
def test_19_of_20_new_configurations_are_inside(count: int) -> None:
    random = np.random.default_rng(count)
    inside = []
    for _ in range(600):
        measured_over_predicted = np.exp(0.06 * random.standard_t(3, size=count + 1))
        width = half_width(1 / measured_over_predicted[:-1] - 1, range(count))
        inside.append(abs(measured_over_predicted[-1] - 1) <= width)
    assert np.mean(inside) > 0.93

"""Half widths of intervals: by hand, and their coverage of configurations that they have not seen."""

import numpy as np
import pytest

from wattune.fitting.interval import half_width, half_width_elsewhere


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


def test_kinds_that_err_apart_make_the_next_kind_unsure() -> None:
    """The own errors of kinds scatter by 5 %, runs of one kind by 1 %: the next kind is told by the 5 %."""
    random = np.random.default_rng(5)
    inside, narrow = [], []
    for _ in range(400):
        logs = [0.05 * random.standard_normal() + 0.01 * random.standard_normal(20) for _ in range(7)]
        kinds = [number for number in range(6) for _ in range(20)]
        errors = np.expm1(np.concatenate(logs[:6]))
        width, alone = half_width_elsewhere(errors, range(120), kinds), half_width(errors, range(120))
        assert width is not None and alone is not None
        inside.append(np.mean(np.abs(np.exp(-logs[6]) - 1) <= width))
        narrow.append(np.mean(np.abs(np.exp(-logs[6]) - 1) <= alone))
    assert 0.88 < np.mean(inside) < 0.97 and np.mean(narrow) < np.mean(inside)
    two = half_width_elsewhere(errors[:40], range(40), kinds[:40])
    assert two == half_width(errors[:40], range(40))

"""A measurement read as another: residual kept, errors joined."""

import numpy as np
import pytest

from wattune.cost.transfer import read_as
from wattune.errors import PlanError


def test_a_shared_error_of_estimates_cancels() -> None:
    read = read_as(1.3, 1.0, 2.0, measured_log_std=0.01, ratio_log_std=0.02)
    assert read.value == pytest.approx([2.6])
    assert read.log_std == pytest.approx([np.hypot(0.01, 0.02)])


def test_read_as_itself_it_has_the_measurement_alone() -> None:
    read = read_as(1.3, 1.0, 1.0, measured_log_std=0.01, ratio_log_std=0.0)
    assert read.value == pytest.approx([1.3]) and read.log_std == pytest.approx([0.01])


def test_a_distance_widens_and_moves_nothing() -> None:
    near, far = (
        read_as(np.ones(3), np.ones(3), np.ones(3), measured_log_std=0.01, distance_percent=d) for d in (0.0, 5.0)
    )
    assert near.value == pytest.approx(far.value)
    assert far.log_std**2 - near.log_std**2 == pytest.approx(np.full(3, np.log(1.05) ** 2 / 3))


def test_19_of_20_readings_are_inside() -> None:
    random = np.random.default_rng(1)
    seen, ratio, away = (random.normal(0, s, 4000) for s in (0.02, 0.03, 0.0)), 0.03, 0.04
    truth = 2.0 * np.exp(sum(seen) + random.uniform(-np.log1p(away), np.log1p(away), 4000))
    read = read_as(1.0, 1.0, 2.0, measured_log_std=0.02, ratio_log_std=ratio, distance_percent=100 * away)
    inside = np.mean((truth > read.low) & (truth < read.high))
    assert 0.93 < inside < 0.97


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.nan, np.inf])
def test_what_has_no_ratio_is_refused(wrong: float) -> None:
    for place in range(3):
        figures = [1.0, 1.0, 1.0]
        figures[place] = wrong
        with pytest.raises(PlanError, match="positive"):
            read_as(*figures, measured_log_std=0.01)

"""One sensor's series: a counter that begins anew."""

import numpy as np
import pytest

from wattune.analysis.signals.sensor_check import unwrapped_j

MOST_J = 2**32 / 1e6
TIME_S = np.arange(200.0)
DRAWN_J = 700.0 * TIME_S


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.filterwarnings("error")
def test_a_counter_that_begins_anew_is_put_together_also_where_rows_are_doubled(times: int) -> None:
    whole_j, per_j = unwrapped_j(np.repeat(TIME_S, times), np.repeat(DRAWN_J % MOST_J, times))
    assert per_j == MOST_J
    assert whole_j == pytest.approx(np.repeat(DRAWN_J, times))


@pytest.mark.filterwarnings("error")
def test_a_fall_that_no_register_explains_stays() -> None:
    for energy_j in (DRAWN_J % 1000.0, np.where(TIME_S < 100, DRAWN_J, 0.0), DRAWN_J[::-1]):
        kept_j, per_j = unwrapped_j(TIME_S, energy_j)
        assert per_j == 0 and kept_j is energy_j
    at_once_s = np.append(TIME_S, TIME_S[-1])
    assert unwrapped_j(at_once_s, np.append(DRAWN_J, 0.0))[1] == 0

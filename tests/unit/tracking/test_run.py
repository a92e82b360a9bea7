"""A trial as an MLflow run and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tracked_trials import START_NS

from wattune.tracking.run import mean_per_second
from wattune.units import NS_PER_S

samples = st.lists(st.tuples(st.integers(0, 20 * NS_PER_S), st.floats(-1e6, 1e6)), max_size=50)


@given(samples)
def test_means_by_second_keep_order_range_and_total(pairs):
    times = np.array([t for t, _ in pairs], dtype=np.int64)
    values = np.array([v for _, v in pairs], dtype=np.float64)
    points = mean_per_second(times, values)
    seconds = [t // NS_PER_S for t, _ in points]
    assert seconds == sorted(set((times // NS_PER_S).tolist()))
    counts = [np.count_nonzero(times // NS_PER_S == second) for second in seconds]
    total = sum(mean * count for (_, mean), count in zip(points, counts, strict=True))
    assert total == pytest.approx(values.sum(), abs=1e-3)


@given(hnp.arrays(np.float32, st.integers(0, 5), elements=st.sampled_from([np.nan, np.inf, 2.0])))
def test_what_is_no_number_is_left_out_of_a_mean(values):
    points = mean_per_second(np.full(len(values), START_NS), values)
    assert points == ([(START_NS, 2.0)] if (values == 2.0).any() else [])

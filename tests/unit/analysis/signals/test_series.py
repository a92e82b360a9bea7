"""Series: interpolation, integrals, and the fast way onto a grid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.analysis.signals.series import series


def test_series_drops_what_is_not_finite_sorts_and_keeps_each_time_once():
    found = series(np.array([2.0, 0.0, 1.0, 1.0, 3.0]), np.array([20.0, 0.0, 10.0, 11.0, np.nan]))
    assert found is not None
    assert found.time_s.tolist() == [0.0, 1.0, 2.0]
    assert found.value.tolist() == [0.0, 10.0, 20.0]


def test_clip_interpolates_both_ends_and_never_extrapolates():
    whole = series(np.array([0.0, 1.0, 2.0]), np.array([0.0, 10.0, 0.0]))
    inside = whole.clip(0.5, 1.5)
    assert inside.time_s.tolist() == [0.5, 1.0, 1.5]
    assert inside.value.tolist() == [5.0, 10.0, 5.0]
    assert whole.clip(-5.0, 0.5).time_s.tolist() == [0.0, 0.5]
    assert whole.clip(2.0, 3.0) is None


@given(
    st.lists(st.tuples(st.floats(0.001, 0.3), st.floats(0, 900)), min_size=3, max_size=40),
    st.integers(1, 50),
    st.sampled_from([3, 2**14]),
)
def test_the_fast_way_onto_a_grid_is_the_exact_one(steps, num_steps, block):
    time_s, value = np.cumsum([width for width, _ in steps]), np.array([each for _, each in steps])
    whole = series(time_s, value)
    start_s, step_s = float(time_s[0]) + 0.1 * whole.span_s, 0.8 * whole.span_s / num_steps
    grid_s = start_s + step_s * np.arange(num_steps + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wattune.analysis.signals.series._BLOCK", block)
        found = np.concatenate(list(whole.cumulative_on_grid(start_s, step_s, num_steps)))
    assert found == pytest.approx(whole.cumulative(grid_s), rel=1e-9, abs=1e-9)
    assert whole.between(start_s, grid_s[-1]) == pytest.approx(found[-1] - found[0], rel=1e-9, abs=1e-9)


@given(
    st.lists(st.tuples(st.floats(0.01, 2), st.floats(-100, 100)), min_size=2, max_size=30),
    st.integers(1, 7),
    st.floats(0, 2),
)
def test_blocks_change_neither_integral_nor_gaps(steps, block, longer_than_s):
    time_s, value = np.cumsum([width for width, _ in steps]), np.array([each for _, each in steps])
    widths_s = np.diff(time_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wattune.analysis.signals.series._BLOCK", block)
        whole = series(time_s, value)
        assert whole.integral() == pytest.approx(np.trapezoid(value, time_s), abs=1e-9)
        longest_s, total_s = whole.gaps_s(longer_than_s)
    assert longest_s == widths_s.max()
    assert total_s == pytest.approx(widths_s[widths_s > longer_than_s].sum())

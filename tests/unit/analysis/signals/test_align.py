"""Clocks, windows and clipping."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.analysis.signals.align import align
from wattune.analysis.signals.series import series, weights_s

GPU = ("n0", "gpu0")
OTHER = ("n1", "gpu0")


def ramp(time_s):
    return 100.0 + 10.0 * time_s


def test_series_drops_what_is_not_finite_sorts_and_keeps_each_time_once():
    found = series(np.array([2.0, 0.0, 1.0, 1.0, 3.0]), np.array([20.0, 0.0, 10.0, 11.0, np.nan]))
    assert found is not None
    assert found.time_s.tolist() == [0.0, 1.0, 2.0]
    assert found.value.tolist() == [0.0, 10.0, 20.0]


def test_one_reading_is_no_series():
    assert series(np.array([1.0, 2.0]), np.array([5.0, np.inf])) is None


def test_clip_interpolates_both_ends_and_never_extrapolates():
    whole = series(np.array([0.0, 1.0, 2.0]), np.array([0.0, 10.0, 0.0]))
    inside = whole.clip(0.5, 1.5)
    assert inside.time_s.tolist() == [0.5, 1.0, 1.5]
    assert inside.value.tolist() == [5.0, 10.0, 5.0]
    assert whole.clip(-5.0, 0.5).time_s.tolist() == [0.0, 0.5]
    assert whole.clip(2.0, 3.0) is None


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(-100, 100)), min_size=2, max_size=20),
    st.floats(-1, 12),
    st.floats(0, 8),
)
def test_weights_integrate_what_clipping_integrates(steps, start_s, length_s):
    time_s, value = np.cumsum([width for width, _ in steps]), np.array([each for _, each in steps])
    inside = series(time_s, value).clip(start_s, start_s + length_s)
    expected = 0.0 if inside is None else inside.integral()
    assert weights_s(time_s, start_s, start_s + length_s) @ value == pytest.approx(expected, abs=1e-9)


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


def test_cumulative_is_exact_between_samples():
    whole = series(np.array([0.0, 1.0, 3.0]), np.array([0.0, 10.0, 10.0]))
    assert whole.cumulative(np.array([0.0, 0.5, 1.0, 2.0, 3.0])).tolist() == [0.0, 1.25, 5.0, 15.0, 25.0]
    assert whole.integral() == 25.0


def test_the_window_runs_from_earliest_start_to_latest_end_of_measured_steps(bench):
    spans = bench.spans(
        [
            (GPU, 0, -1, "step", -3.0, -1.0),
            (GPU, 0, 0, "step", 0.1, 1.0),
            (OTHER, 1, 0, "step", 0.0, 1.2),
            (GPU, 0, 1, "step", 1.2, 2.0),
            (OTHER, 1, 1, "step", 1.2, 2.5),
        ]
    )
    aligned = align({}, spans, {})
    assert aligned.duration_s == pytest.approx(2.5)
    assert aligned.steps.number.tolist() == [0, 1]
    assert aligned.steps.duration_s().max(axis=1) == pytest.approx([1.2, 1.3])
    assert aligned.devices == (GPU, OTHER)
    assert align({}, spans, {}, measured_steps=[1]).duration_s == pytest.approx(1.3)


def test_a_step_that_one_rank_never_finished_is_not_counted(bench):
    spans = bench.spans([(GPU, 0, 0, "step", 0, 1), (OTHER, 1, 0, "step", 0, 1), (GPU, 0, 1, "step", 1, 2)])
    assert align({}, spans, {}).steps.number.tolist() == [0]


def test_without_spans_or_window_nothing_is_aligned(bench):
    assert align({}, None, {}) is None
    assert align({}, bench.spans([(GPU, 0, -1, "step", 0, 1)]), {}) is None
    assert align({}, None, {}, window=(5, 5)) is None


def test_a_recording_is_aligned_by_the_window_given(bench):
    tables = {"ring": bench.ring({GPU: ramp})}
    start_ns, end_ns = (int(bench.wall_ns("n0", time_s)) for time_s in (2.0, 12.0))
    aligned = align(tables, None, {"n0": {"devices": {"gpu1": {}, "host": {}}}}, window=(start_ns, end_ns))
    assert aligned.duration_s == 10.0
    assert aligned.devices == (GPU, ("n0", "gpu1"))
    assert aligned.missing == [("n0", "gpu1")]
    assert np.interp(0.0, *_power(aligned, GPU)) == pytest.approx(120.0)


def test_ring_samples_stand_at_the_drivers_time_and_repeated_ones_once(bench):
    once = bench.ring({GPU: ramp})
    aligned = align({"ring": pa.concat_tables([once, once])}, bench.steps([GPU]), {})
    time_s, power_w = _power(aligned, GPU)
    assert len(time_s) == once.num_rows
    assert power_w == pytest.approx(ramp(time_s), abs=1e-4)


def test_nodes_are_joined_on_wall_time_less_their_offset(make_bench):
    bench = make_bench(mono_0_s={"n0": 100, "n1": 77_777}, wall_ahead_s={"n1": 12.345})
    tables = {"ring": bench.ring({GPU: ramp, OTHER: ramp})}
    spans = bench.steps([GPU, OTHER])
    right = align(tables, spans, {"n1": {"clock_offset_ns": 12_345_000_000}})
    assert right.duration_s == pytest.approx(20.0)
    for device in (GPU, OTHER):
        time_s, power_w = _power(right, device)
        assert power_w == pytest.approx(ramp(time_s), abs=1e-4)
    assert align(tables, spans, {}).duration_s == pytest.approx(32.345)


def test_rows_without_a_time_are_left_out(bench):
    table = bench.ring({GPU: ramp})
    holes = pa.array([None if row % 2 else value for row, value in enumerate(table["mono_ns"].to_pylist())], pa.int64())
    aligned = align({"ring": table.set_column(2, "mono_ns", holes)}, bench.steps([GPU]), {})
    assert len(_power(aligned, GPU)[0]) == (table.num_rows + 1) // 2


def _power(aligned, device):
    found = aligned.tiers["ring"][device].series("power_w")
    return found.time_s, found.value

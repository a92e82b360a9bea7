"""Node power over time, and traces cut short."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from made_report import figure_of, values, whole

from wattune.arrays import envelope
from wattune.objective import Question
from wattune.report.traces import MAX_TRACE_PARTS, power


def test_power_over_time_shows_bounds_limits_steps_and_excursions_of_the_highest_node():
    ranking, _, evidence = whole()
    rows = [*ranking.feasible, *ranking.infeasible]
    data, layout = figure_of(power(ranking, rows, evidence, {"node_device_power_w": 2900.0}))
    assert len(data) == 2 * 3  # power, steps and excursions of each
    assert max(values(data[0]["y"])) == 2650.0
    lines = [shape["y0"] for shape in layout["shapes"] if shape["y0"] == shape["y1"]]
    assert sorted(lines) == [2750.0, 2750.0, 2900.0, 2900.0]
    shaded = [(shape["x0"], shape["x1"]) for shape in layout["shapes"] if shape["x0"] == 3.0]
    assert shaded == [(3.0, 3.4)] * 2
    assert len(values(data[1]["x"])) == 40
    assert values(data[2]["base"]) == [3.0]
    assert "up to 745 W over a limit of 700 W" in str(data[2]["hovertext"])


@settings(deadline=None)
@given(st.integers(0, 5 * MAX_TRACE_PARTS), st.integers(0, 2**32 - 1))
def test_a_shortened_trace_keeps_its_peaks(length, seed):
    time_s = np.arange(length) * 0.02
    power_w = np.random.default_rng(seed).normal(2000.0, 300.0, length)
    kept_s, kept_w = envelope(time_s, power_w, MAX_TRACE_PARTS)
    assert len(kept_s) == len(kept_w) <= 2 * MAX_TRACE_PARTS
    assert (np.diff(kept_s) > 0).all()
    if length:
        assert (kept_w.min(), kept_w.max()) == (power_w.min(), power_w.max())
        assert np.isin(kept_s, time_s).all()


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=12))
def test_overlapping_excursions_of_several_devices_are_shaded_once(stretches):
    """In units of 0.1 s; every moment that is in an excursion is in exactly one shaded stretch."""
    ranking, _, evidence = whole()
    row = ranking.feasible[0]
    found = evidence[row.trial_id]
    (one,) = found.excursions.to_pylist()
    rows = [one | {"start_s": begin / 10, "end_s": (begin + length) / 10} for begin, length in stretches]
    table = pa.Table.from_pylist(rows, schema=found.excursions.schema)
    chart = power(ranking, [row], {row.trial_id: replace(found, excursions=table)}, {})
    shaded = [(shape.x0, shape.x1) for shape in chart.figure.layout.shapes if shape.type == "rect"]
    for tenth in range(60):
        middle_s = (tenth + 0.5) / 10
        inside = any(begin <= tenth < begin + length for begin, length in stretches)
        assert sum(start_s < middle_s < end_s for start_s, end_s in shaded) == int(inside)


def test_a_bound_that_is_not_on_node_power_is_not_drawn_and_without_power_there_is_no_chart():
    ranking, _, evidence = whole()
    other = replace(ranking, question=Question.of(str(ranking.objective), "device_temp_max_c <= 85"))
    chart = power(other, [ranking.feasible[0]], evidence, {})
    assert [shape for shape in chart.figure.layout.shapes if shape.type == "line"] == []
    low, high = chart.figure.layout.yaxis.range
    assert low < 2650.0 < high
    silent = {trial_id: replace(one, power_w={}) for trial_id, one in evidence.items()}
    assert power(ranking, [*ranking.feasible], silent, {}) is None
    assert power(ranking, [], evidence, {}) is None

"""Energy and time by rank, phase and step: closed forms, and sums that leave no rest."""

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import constant

from wattune.analysis.metrics.energy import powers, total_energy_j
from wattune.analysis.metrics.phases import PARTS, phase_table, segments, step_energies_j, step_table
from wattune.analysis.signals.align import align

GPU, TWIN = ("n0", "gpu0"), ("n0", "gpu1")


def looked_at(bench, rows, waves, manifests=None):
    spans = bench.spans(rows)
    aligned = align({"ring": bench.ring(waves)}, spans, manifests or {})
    return aligned, powers(aligned), segments(aligned, spans)


def step(device=GPU, rank=0, number=0, at_s=0.0):
    """A step of 2 s: forward 0.6, backward 0.8 with a wait of 0.2 inside, optimizer 0.4, and 0.2 of nothing."""
    parts = [("step", 0, 2), ("forward", 0, 0.6), ("backward", 0.6, 1.4), ("wait", 1.0, 1.2), ("optimizer", 1.4, 1.8)]
    return [(device, rank, number, name, at_s + start, at_s + end) for name, start, end in parts]


def by_phase(table, column="energy_j"):
    return dict(zip(table["phase"].to_pylist(), table[column].to_pylist(), strict=True))


def test_every_phase_has_its_time_and_the_energy_under_it(bench):
    # 100 W in the first second of every two, 300 W in the other; edges between samples.
    wave = lambda t: np.where(np.mod(t + 0.01, 2) < 1, 100.0, 300.0)  # noqa: E731
    aligned, traces, ways = looked_at(bench, step() + step(number=1, at_s=2.0), {GPU: wave})
    table = phase_table(aligned, traces, ways)
    assert by_phase(table, "time_s") == pytest.approx(
        {"forward": 1.2, "backward": 1.2, "wait": 0.4, "optimizer": 0.8, "other": 0.4}
    )
    expected_j = {"forward": 120, "backward": 2 * (40 + 60), "wait": 2 * 60, "optimizer": 240, "other": 2 * 60}
    assert by_phase(table) == pytest.approx(expected_j, rel=0.05)
    assert sum(by_phase(table).values()) == pytest.approx(total_energy_j(traces, 4.0))
    assert by_phase(table, "resolved_frac") == pytest.approx(dict.fromkeys(expected_j, 1.0))


def test_steps_divide_the_window_and_what_is_between_belongs_to_the_step_before(bench):
    rows = [(GPU, 0, 0, "step", 0.0, 1.0), (GPU, 0, 1, "step", 1.5, 2.0), (GPU, 0, 2, "step", 2.0, 4.0)]
    aligned, traces, _ = looked_at(bench, rows, {GPU: constant(200)})
    assert step_energies_j(aligned, traces) == pytest.approx([300.0, 100.0, 400.0])
    assert step_table(aligned, traces)["time_s"].to_pylist() == pytest.approx([1.0, 0.5, 2.0])


def test_without_usable_power_energies_are_null_and_times_are_not(bench):
    spans = bench.spans(step())
    aligned = align({}, spans, {})
    table = phase_table(aligned, powers(aligned), segments(aligned, spans))
    assert table["energy_j"].null_count == table.num_rows == 5
    assert step_table(aligned, powers(aligned))["energy_j"].null_count == 1


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from(["forward", "backward", "optimizer", "wait"]),
            st.floats(0, 3),
            st.floats(0, 3),
        ),
        max_size=25,
    )
)
def test_parts_are_whole_whatever_the_spans(make_bench, spans):
    rows = [(device, rank, 0, "step", 0.1 * rank, 3.0) for rank, device in enumerate((GPU, TWIN))]
    rows += [((GPU, TWIN)[rank], rank, 0, name, min(a, b), max(a, b)) for rank, name, a, b in spans]
    waves = {GPU: lambda t: 300 + 100 * np.sin(5 * t), TWIN: lambda t: 200 + 30 * t}
    aligned, traces, ways = looked_at(make_bench(), rows, waves)
    for way in ways.values():
        assert way.width_s.sum() == pytest.approx(aligned.duration_s)
        assert np.all(way.width_s > 0) and np.all(np.diff(way.part) != 0)
        assert way.time_until_s(np.array([aligned.duration_s]), *PARTS)[0] == pytest.approx(aligned.duration_s)
    table = phase_table(aligned, traces, ways)
    assert pc.sum(table["energy_j"]).as_py() == pytest.approx(total_energy_j(traces, aligned.duration_s))
    assert pc.min(table["time_s"]).as_py() > 0

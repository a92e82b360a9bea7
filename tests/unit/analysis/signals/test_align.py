"""Clocks, windows and clipping."""

import numpy as np
import pytest

from wattune.analysis.signals.align import align

GPU = ("n0", "gpu0")
OTHER = ("n1", "gpu0")


def ramp(time_s):
    return 100.0 + 10.0 * time_s


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


def _power(aligned, device):
    found = aligned.tiers["ring"][device].series("power_w")
    return found.time_s, found.value

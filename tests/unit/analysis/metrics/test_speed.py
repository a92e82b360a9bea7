"""Step times and throughput."""

from dataclasses import replace

import pytest
from specs import trial_spec

from wattune.analysis.metrics.speed import speed_metrics, step_times_s, step_to_step_s
from wattune.analysis.signals.align import align
from wattune.catalog.hardware import device
from wattune.cost.flops import workload_flop_per_token
from wattune.plans.axes import Plan

GPU, OTHER = ("n0", "gpu0"), ("n0", "gpu1")


def aligned(bench, *times_s: tuple[float, float]):
    """Steps back to back of two ranks: each begins when the slower one of the step before has ended."""
    rows, at_s = [], 0.0
    for number, both_s in enumerate(times_s):
        rows += [(GPU, 0, number, "step", at_s, at_s + both_s[0]), (OTHER, 1, number, "step", at_s, at_s + both_s[1])]
        at_s += max(both_s) + 0.5
    return align({}, bench.spans(rows), {})


def test_a_step_takes_as_long_as_its_slowest_rank(bench):
    steps = aligned(bench, (1.0, 2.0), (3.0, 1.0), (1.0, 1.0)).steps
    assert step_times_s(steps).tolist() == [2.0, 3.0, 1.0]
    assert step_to_step_s(steps).tolist() == [2.5, 3.5], "pauses belong to the step before, the last has no next"


def test_without_a_specification_there_are_step_times_alone(bench):
    found = speed_metrics(aligned(bench, (1.0, 2.0), (3.0, 1.0), (1.0, 1.0)), None)
    # Of 1, 2 and 3 s: the median, and 95 % of the way from 2 to 3 at 0.9 of it.
    assert found == pytest.approx({"step_time_s": 2.0, "step_time_p95_s": 2.9})
    recording = align({}, None, {"n0": {"devices": {"gpu0": {}}}}, window=(0, 10**9))
    assert speed_metrics(recording, None) == {"window_s": 1.0}


def test_throughput_is_over_the_window_and_mfu_over_the_dense_peak(bench):
    spec = trial_spec(on="1x2 h200_sxm", seq_len=1024, batch=8)
    found = speed_metrics(aligned(bench, (1.0, 1.0), (1.0, 1.0)), spec)
    # Two steps of 8 x 1,024 tokens in 2.5 s: the pause between them is in the window.
    assert found["tokens_per_s"] == pytest.approx(2 * 8192 / 2.5)
    assert found["tokens_per_s_per_device"] == pytest.approx(8192 / 2.5)
    flop_per_s = 2 * 8192 / 2.5 * workload_flop_per_token(spec.model, spec.workload)
    assert found["mfu_frac"] == pytest.approx(flop_per_s / (2 * device("h200_sxm").peak_bf16_flop_per_s))
    fp8 = speed_metrics(aligned(bench, (1.0, 1.0), (1.0, 1.0)), replace(spec, plan=Plan(dtype="fp8")))
    assert fp8["mfu_frac"] == pytest.approx(found["mfu_frac"] / 2, rel=1e-4), "of the type of the layers' products"

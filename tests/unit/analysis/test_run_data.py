"""Examination: the window of the steady state, and shares of a profiled step."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from runs import constant, run_data
from specs import trial_spec

from wattune.analysis.summary import summarize
from wattune.plans.axes import Plan
from wattune.run import NO_NUMBERS
from wattune.schema import KERNELS

GPU, TWIN = ("n0", "gpu0"), ("n0", "gpu1")


def test_steps_before_the_steady_state_are_left_out_of_the_window(bench):
    lengths_s, rows, at_s = [2.0] * 4 + [1.0] * 20, [], 0.0
    for number, length_s in enumerate(lengths_s):
        rows += [(GPU, 0, number, "step", at_s, at_s + length_s)]
        at_s += length_s
    ring = bench.ring({GPU: lambda t: np.where(t < 8, 100.0, 300.0)}, end_s=30.0)
    found = summarize(run_data(None, bench.spans(rows), {"ring": ring}, {}))
    assert found.numbers.steady_from_step == 4
    assert found.numbers.window_s == 20.0
    assert found.metrics["device_power_mean_w"] == pytest.approx(300.0, rel=1e-3)
    assert found.metrics["step_time_s"] == pytest.approx(1.0)
    assert "no_steady_state" not in found.quality_reasons


def test_of_steps_that_were_chosen_none_is_left_out(bench):
    ends_s = np.cumsum([2.0] * 4 + [1.0] * 20)
    rows = [
        (GPU, 0, number, "step", end_s - (2.0 if number < 4 else 1.0), end_s) for number, end_s in enumerate(ends_s)
    ]
    ring = bench.ring({GPU: lambda t: np.where(t < 8, 100.0, 300.0)}, end_s=30.0)
    found = summarize(run_data(None, bench.spans(rows), {"ring": ring}, {}, chosen=True, told_tokens_per_step=7.0))
    assert found.numbers.window_s == 28.0 and found.numbers.steps == (0, 23)
    assert found.numbers.steady_from_step is None and "no_steady_state" not in found.quality_reasons
    assert found.metrics["tokens_per_s"] == pytest.approx(24 * 7 / 28)
    assert found.metrics["device_power_mean_w"] == pytest.approx((8 * 100 + 20 * 300) / 28, rel=1e-3)


def test_a_late_change_is_no_steady_state_and_nothing_is_left_out(bench):
    lengths_s, rows, at_s = [0.5] * 28 + [0.8] * 12, [], 0.0
    for number, length_s in enumerate(lengths_s):
        rows += [(GPU, 0, number, "step", at_s, at_s + length_s)]
        at_s += length_s
    found = summarize(run_data(None, bench.spans(rows), {"ring": bench.ring({GPU: constant(100)}, end_s=30.0)}, {}))
    assert {"no_steady_state"} <= set(found.quality_reasons)
    assert found.numbers.window_s == 23.6 and found.quality != "publishable"


SPEC = trial_spec(on="1x2 h200_sxm", seq_len=1024, batch=8, plan=Plan(tp=2))


def kernels() -> pa.Table:
    """A step of 1,000 ns on two ranks: 600 ns of matrices, 100 of copies, 200 of tensor parallelism, 100 idle."""
    rows = []
    for rank in (0, 1):
        texts = {"rank": rank, "step": 0, "stream": 7, "collective": "", "group": "", "group_ranks": "", "fabric": ""}
        reduce = {"collective": "allreduce", "group": "mesh_tp", "group_ranks": "[0, 1]", "fabric": "node"}
        rows += [
            {**texts, "name": "step", "start_ns": 0, "end_ns": 1000},
            {**texts, "name": "nvjet_tst_128x256", "start_ns": 0, "end_ns": 600},
            {**texts, "name": "Memcpy DtoD", "start_ns": 600, "end_ns": 700},
            {**texts, **reduce, "name": "ncclDevKernel_AllReduce", "start_ns": 700, "end_ns": 900},
        ]
    return pa.Table.from_pylist(rows, schema=KERNELS)


def test_kernels_divide_a_step_where_its_spans_cannot(bench):
    spans = bench.steps([GPU, TWIN])
    found = run_data(SPEC, spans, {}, {}, kernels=kernels()).examined
    assert found.division is None
    assert found.profiled == pytest.approx(
        {"compute": 0.7, "exposed_comm:tp": 0.2, "bubble": 0.0, "straggler": 0.0, "other": 0.1}
    )
    assert [*found.profiled][:2] == ["compute", "exposed_comm:tp"]
    assert found.profiled_metrics["exposed_comm_tp_frac"] == pytest.approx(0.2)
    for spec, kernel_table in ((None, kernels()), (SPEC, None)):
        assert run_data(spec, spans, {}, {}, kernels=kernel_table).examined.profiled == {}


def stage_kernels() -> pa.Table:
    """A step of 1,000 ns on two stages: 500 ns of matrices, then 500 of waiting for the other stage."""
    rows = []
    for rank in (0, 1):
        texts = {"rank": rank, "step": 0, "stream": 7, "collective": "", "group": "", "group_ranks": "", "fabric": ""}
        wait = {"collective": "recv", "group": "mesh_pp_0", "group_ranks": "[0, 1]", "fabric": "node"}
        rows += [
            {**texts, "name": "step", "start_ns": 0, "end_ns": 1000},
            {**texts, "name": "nvjet_tst_128x256", "start_ns": 0, "end_ns": 500},
            {**texts, **wait, "name": "ncclDevKernel_SendRecv", "start_ns": 500, "end_ns": 1000},
        ]
    return pa.Table.from_pylist(rows, schema=KERNELS)


def test_the_measured_stages_divide_the_waiting_of_a_profiled_pipeline(bench):
    """Two micro-batches; passes of stage 0 take 0.05 s and those of stage 1 0.1 s.

    Stage 1 works without pause from 0.05 to 0.45 s and stage 0 ends at 0.5 s, so they idle 0.3 and 0.1 s. Stages of
    0.075 s a pass would end at (2 + 1) x 0.15 s and together idle 2 x 0.45 - 0.6 = 0.3 s: three quarters of that.
    """
    passes = (
        [("forward", 0.0), ("forward", 0.05), ("backward", 0.25), ("backward", 0.45)],
        [("forward", 0.05), ("backward", 0.15), ("forward", 0.25), ("backward", 0.35)],
    )
    rows = []
    for rank, device in enumerate((GPU, TWIN)):
        for step in range(20):
            rows += [(device, rank, step, "step", step, step + 1.0)]
            rows += [
                (device, rank, step, name, step + at_s, step + at_s + 0.05 * (1 + rank)) for name, at_s in passes[rank]
            ]
    spec = replace(SPEC, plan=Plan(pp=2, sharding="zero2", micro_batch_size=4))
    found = run_data(spec, bench.spans(rows), {}, {}, kernels=stage_kernels()).examined
    assert found.division is None
    assert found.profiled_metrics["bubble_frac"] == pytest.approx(0.75 * (0.3 + 0.1) / 2)
    assert found.profiled_metrics["straggler_frac"] == pytest.approx(0.25 * (0.3 + 0.1) / 2)
    assert found.profiled_metrics["exposed_comm_frac"] == pytest.approx(0.5 - 0.2)
    assert sum(found.profiled.values()) == pytest.approx(1.0)
    # Spans of steps alone say nothing of the stages: one undivided wait.
    alone = run_data(spec, bench.steps([GPU, TWIN]), {}, {}, kernels=stage_kernels()).examined
    assert alone.profiled == pytest.approx({"compute": 0.5, "wait": 0.5, "other": 0.0})
    assert alone.profiled_metrics == pytest.approx({"compute_frac": 0.5, "other_frac": 0.0})


def test_the_first_step_is_told_apart_and_what_it_compiled(bench):
    def ranks(number, start_s, *lengths_s):
        devices = zip((GPU, TWIN), lengths_s, strict=True)
        return [(one, rank, number, "step", start_s, start_s + s) for rank, (one, s) in enumerate(devices)]

    measured = [row for number in range(20) for row in ranks(number, 10.0 + number, 1.0, 0.9)]
    found = summarize(
        run_data(None, bench.spans(ranks(-2, 0.0, 7.5, 8.0) + ranks(-1, 8.5, 1.0, 1.0) + measured), {}, {})
    )
    assert found.metrics["first_step_time_s"] == pytest.approx(8.0)
    assert found.metrics["compile_time_s"] == pytest.approx(7.0)
    without = summarize(run_data(None, bench.spans(measured), {}, {}))
    assert not {"first_step_time_s", "compile_time_s"} & without.metrics.keys()


def test_what_only_its_processes_know_of_a_run_is_a_metric(bench):
    data = run_data(None, bench.steps([GPU]), {"ring": bench.ring({GPU: constant(100)})}, {})
    told = {"startup_s": 12.5, "overhead_frac": 0.25, "step_time_s": 9.0, "unheard_of": 1.0}
    found = summarize(data.of_trial({}, NO_NUMBERS, told=told)).metrics
    assert (found["startup_s"], found["overhead_frac"], found["step_time_s"]) == (12.5, 0.25, pytest.approx(1.0))
    assert "unheard_of" not in found and "startup_s" not in summarize(data).metrics

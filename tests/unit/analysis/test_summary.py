"""Whole trials: what they give, what must not change it, and what broken input must not do."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import run_data
from specs import trial_spec

from wattune.analysis.signals.align import align
from wattune.analysis.summary import node_power_series, summarize
from wattune.metrics import METRICS
from wattune.run import INDICATIVE, INVALID, PUBLISHABLE
from wattune.schema import KERNELS

DEVICES = [("n0", "gpu0"), ("n0", "gpu1"), ("n1", "gpu0"), ("n1", "gpu1")]
SPEC = trial_spec(on="2x2 h200_sxm")
MANIFESTS = {
    node: {
        "devices": {name: {"power_limit_w": 700.0, "sm_clock_max_mhz": 1980.0} for name in ("gpu0", "gpu1")},
        "tiers": {"fast": {"requested_hz": 20.0, "achieved_hz": 19.9}},
    }
    for node in ("n0", "n1")
}


def watts(index):
    return lambda time_s: 500.0 + 40 * index + 150 * np.sin(2 * np.pi * time_s * (1 + 0.1 * index))


def joules(index, time_s):
    rate = 2 * np.pi * (1 + 0.1 * index)
    return (500.0 + 40 * index) * time_s - 150 / rate * np.cos(rate * time_s) + 1e6


def trial(bench, devices=DEVICES):
    """Spans and all device tiers of a trial of 20 steps of 1 s."""
    fast_s, slow_s = np.arange(-1.0, 21.0, 0.05), np.arange(-0.6, 21.0, 1.0)
    fast, slow, counter = {}, {}, {}
    for index, device in enumerate(devices):
        clock = np.where(np.mod(fast_s, 2) < 1, 1500.0, 1980.0) - 15 * index
        fast[device] = {
            "time_s": fast_s,
            "sm_clock_mhz": clock,
            "event_reasons": np.full(len(fast_s), 4, np.uint64),
            "gpu_temp_c": np.full(len(fast_s), 50.0 + index),
        }
        slow[device] = {
            "time_s": slow_s,
            "energy_j": joules(index, slow_s),
            "power_limit_w": np.full(len(slow_s), 700.0),
            "throttle_power_ns": np.round((slow_s + 10) * 1e9),
        }
        counter[device] = {
            "time_s": fast_s[::4],
            "nvlink_tx_bytes": 1e9 * (fast_s[::4] + 9),
            "nvlink_rx_bytes": 0 * fast_s[::4],
        }
    tables = {
        "ring": bench.ring({device: watts(index) for index, device in enumerate(devices)}),
        "fast": bench.tier("fast", fast),
        "slow": bench.tier("slow", slow),
        "counter": bench.tier("counter", counter),
    }
    return bench.steps(devices), tables


def throttled_frac():
    """Mean over devices: the clock is low and the 200 ms mean, a sine with a closed form, is above 665 W."""
    time_s = np.linspace(0, 20, 40_001)
    shares = []
    for index in range(4):
        turns_hz = 1 + 0.1 * index
        wave = 150 * np.sinc(0.2 * turns_hz) * np.sin(2 * np.pi * turns_hz * (time_s - 0.1))
        low = (np.mod(time_s, 2) < 1) | (index == 3)  # only gpu3's upper clock is below 0.98 of 1980 MHz
        shares.append(np.mean(low & (500 + 40 * index + wave >= 665)))
    return np.mean(shares)


def test_a_whole_trial(bench):
    summary = summarize(run_data(SPEC, *trial(bench), MANIFESTS, memory_peak_bytes=[10**9] * 4))
    assert summary.quality == PUBLISHABLE
    assert summary.quality_reasons == ("short_for_thermal",)
    assert summary.tags["quality_thermal"] == INDICATIVE
    assert summary.tags["excursion_limit"] == "enforced"
    assert summary.metrics["step_time_s"] == pytest.approx(1.0)
    assert summary.metrics["tokens_per_s"] == pytest.approx(4096 * 16)
    assert summary.metrics["device_power_mean_w"] == pytest.approx(560.0, rel=2e-3)
    assert summary.metrics["energy_per_step_j"] == pytest.approx(4 * 560.0, rel=2e-3)
    assert summary.metrics["energy_integral_error_frac"] < 1e-3
    assert summary.metrics["throttle_frac"] == pytest.approx(throttled_frac(), abs=0.01)
    # 48.249e9 FLOP a token at 4,096 tokens: 3 (2 · 7.504e9 + 32 · 2 · 4096 · 4096).
    assert summary.metrics["mfu_frac"] == pytest.approx(4096 * 16 * 48.249e9 / (4 * 989.4e12), rel=1e-3)
    assert summary.metrics.keys() <= METRICS.keys()
    assert list(summary.metrics) == [name for name in METRICS if name in summary.metrics]


def test_what_a_device_waits_for_its_host_is_taken_out_of_the_step(bench):
    """Its kernels take 0.6 s of each step of 1 s, and nothing else accounts for the rest."""
    whole = {"stream": 0, "collective": "", "group": "", "group_ranks": "", "fabric": "", "step": 3, "start_ns": 0}
    rows = [
        {**whole, "rank": rank, "name": name, "end_ns": int(busy_s * 1e9)}
        for rank in range(4)
        for name, busy_s in (("step", 1.2), ("gemm", 0.6))
    ]
    spans, tables = trial(bench)
    metrics = summarize(
        run_data(SPEC, spans, tables, MANIFESTS, kernels=pa.Table.from_pylist(rows, schema=KERNELS))
    ).metrics
    assert metrics["step_time_s"] == pytest.approx(1.0)
    assert metrics["host_bound_frac"] == pytest.approx(0.4)
    assert metrics["device_bound_step_time_s"] == pytest.approx(0.6)
    assert "device_bound_step_time_s" not in summarize(run_data(SPEC, spans, tables, MANIFESTS)).metrics


def test_whether_the_limit_was_read_or_only_announced_is_said(bench):
    spans, tables = trial(bench)
    tables["slow"] = tables["slow"].drop_columns("power_limit_w")
    assert "excursion_count" not in summarize(run_data(SPEC, spans, tables, {})).metrics
    assert "excursion_limit" not in summarize(run_data(SPEC, spans, tables, {})).tags
    summary = summarize(run_data(SPEC, spans, tables, MANIFESTS))
    assert summary.metrics["device_power_limit_w"] == 700.0
    assert summary.tags["excursion_limit"] == "manifest"


def with_facts(*, steps=(), **processes):
    """The manifests, with clock steps on n0 and other processes on n1's gpu0."""
    known = {when: {"other_processes": [{"pid": pid} for pid in pids]} for when, pids in processes.items()}
    devices = {**MANIFESTS["n1"]["devices"], "gpu0": {**MANIFESTS["n1"]["devices"]["gpu0"], **known}}
    return {
        "n0": {**MANIFESTS["n0"], "clock": {"steps": [{"mono_ns": 1, "step_ns": step_ns} for step_ns in steps]}},
        "n1": {**MANIFESTS["n1"], "devices": devices},
    }


@pytest.mark.parametrize(
    ("facts", "reasons"),
    [
        ({}, ()),
        ({"steps": [9_000_000]}, ()),
        ({"steps": [9_000_000, -20_000_000]}, ("clock_stepped",)),
        ({"at_start": [7], "at_end": [7, 8]}, ("other_gpu_users",)),
        ({"at_start": [7]}, ("other_gpu_users",)),  # the sampler was killed
        ({"at_start": [6], "at_end": [8]}, ()),  # a worker before, a worker after
        ({"at_start": [], "at_end": []}, ()),
    ],
)
def test_what_samplers_saw_is_judged(bench, facts, reasons):
    summary = summarize(run_data(SPEC, *trial(bench), with_facts(**facts)))
    assert summary.quality == (INDICATIVE if reasons else PUBLISHABLE)
    assert summary.quality_reasons == (*reasons, "short_for_thermal")


@pytest.mark.parametrize(("uncertain_s", "reasons"), [(0.001, ()), (0.3, ("clock_uncertain",))])
def test_a_clock_that_is_not_known_well_enough_is_a_reason_where_nodes_are_added_up(bench, uncertain_s, reasons):
    spans, tables = trial(bench)
    known = {**MANIFESTS, "n1": {**MANIFESTS["n1"], "clock_offset_uncertainty_ns": round(uncertain_s * 1e9)}}
    assert summarize(run_data(SPEC, spans, tables, known)).quality_reasons == (*reasons, "short_for_thermal")
    window = int(bench.wall_ns("n1", 5.0)), int(bench.wall_ns("n1", 15.0))
    alone = {tier: table.filter(pc.equal(table["node"].cast(pa.string()), "n1")) for tier, table in tables.items()}
    assert (
        "clock_uncertain"
        not in summarize(run_data(None, None, alone, {"n1": known["n1"]}, window=window)).quality_reasons
    )


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(4)), st.randoms(use_true_random=False))
def test_permuting_devices_and_rows_changes_nothing(make_bench, order, random):
    spans, tables = trial(make_bench())
    names = {("n0", "gpu0"): 0, ("n0", "gpu1"): 1, ("n1", "gpu0"): 2, ("n1", "gpu1"): 3}
    before = summarize(run_data(SPEC, spans, tables, MANIFESTS))
    rows = list(range(spans.num_rows))
    random.shuffle(rows)
    parts = [_of_device(tables["ring"], *device) for device, index in sorted(names.items(), key=lambda x: order[x[1]])]
    mixed = {
        tier: table.take(np.random.default_rng(order[0]).permutation(table.num_rows)) for tier, table in tables.items()
    }
    after = summarize(run_data(SPEC, spans.take(rows), {**mixed, "ring": pa.concat_tables(parts)}, MANIFESTS))
    assert after.metrics == pytest.approx(dict(before.metrics), rel=1e-9)
    assert after.quality_reasons == before.quality_reasons


def test_without_spans_and_window_the_verdict_is_clear(bench):
    _, tables = trial(bench)
    for spans in (None, bench.spans([])):
        summary = summarize(run_data(SPEC, spans, tables, MANIFESTS))
        assert (summary.metrics, summary.quality, summary.quality_reasons) == ({}, INVALID, ("no_window",))


def test_host_telemetry_alone_is_indicative_with_its_reason(bench):
    time_s = np.arange(-1.0, 21.0)
    host = bench.tier("host", {("n0", "host"): {"time_s": time_s, "cpu_busy_frac": np.full(len(time_s), 0.9)}})
    spans = bench.steps([("n0", "cpu0"), ("n0", "cpu1")])
    summary = summarize(run_data(None, spans, {"host": host}, {"n0": {"devices": {"host": {"backend": "host"}}}}))
    assert (summary.quality, summary.quality_reasons) == (INDICATIVE, ("no_device_power",))
    assert summary.metrics.keys() >= {"step_time_s", "step_time_p95_s", "step_time_uncertainty_frac"}
    assert {METRICS[name].tables for name in summary.metrics} == {("spans",)}


def test_a_missing_node_leaves_no_figure_that_needs_it(bench):
    spans, tables = trial(bench)
    kept = {tier: table.filter(pc.equal(table["node"].cast(pa.string()), "n0")) for tier, table in tables.items()}
    summary = summarize(run_data(SPEC, spans, kept, MANIFESTS))
    assert summary.quality == INVALID
    assert {"device_missing", "low_coverage"} <= set(summary.quality_reasons)
    assert summary.metrics["sample_coverage_frac"] == 0.0
    groups = {METRICS[name].group for name in summary.metrics}
    assert groups == {"speed", "measurement_quality"}


@pytest.mark.parametrize("tier", ["ring", "fast", "slow", "counter"])
@pytest.mark.parametrize("damage", ["absent", "empty", "nulls", "nan", "one_row"])
def test_a_damaged_tier_takes_its_metrics_with_it_and_no_more(bench, tier, damage):
    spans, tables = trial(bench)
    whole = summarize(run_data(SPEC, spans, tables, MANIFESTS)).metrics
    keys = {"node", "device", "mono_ns", "wall_ns", "sensor_ns"}
    table = tables.pop(tier)
    if damage in ("empty", "one_row"):
        tables[tier] = table.slice(0, int(damage == "one_row"))
    elif damage != "absent":
        for index, field in enumerate(table.schema):
            if field.name not in keys:
                value = float("nan") if damage == "nan" and pa.types.is_floating(field.type) else None
                table = table.set_column(index, field, pa.array([value] * table.num_rows, field.type))
        tables[tier] = table
    summary = summarize(run_data(SPEC, spans, tables, MANIFESTS))
    assert all(math.isfinite(value) for value in summary.metrics.values())
    lost_with = {
        "ring": {"device_power_mean_w", "energy_per_step_j", "excursion_count"},
        "fast": {"throttle_frac", "device_temp_max_c"},
        "slow": {"energy_integral_error_frac", "power_cap_active_frac"},
        "counter": {"nvlink_bytes_per_s"},
    }
    assert not lost_with[tier] & summary.metrics.keys()
    kept = summary.metrics.keys() - {"sample_coverage_frac", "device_outlier_frac"}
    assert {name: summary.metrics[name] for name in kept} == pytest.approx({name: whole[name] for name in kept})
    if tier in ("ring", "slow"):
        assert summary.quality != PUBLISHABLE


def test_series_for_plots(bench):
    spans, tables = trial(bench)
    aligned = align(tables, spans, MANIFESTS)
    middle_s, node_w = node_power_series(aligned)["n0"]
    assert middle_s[:2] == pytest.approx([0.05, 0.15])
    assert node_w.mean() == pytest.approx(1040.0, rel=2e-3)


def _of_device(table, node, device):
    mine = pc.and_(pc.equal(table["node"].cast(pa.string()), node), pc.equal(table["device"].cast(pa.string()), device))
    return table.filter(mine)

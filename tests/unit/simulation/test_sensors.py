import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import least_cpu_s
from specs import trial_spec

from wattune.catalog.hardware import device
from wattune.catalog.models import MODELS
from wattune.errors import TelemetryError
from wattune.schema import SPANS, table_schema
from wattune.simulation.activity import node_activities
from wattune.simulation.device_model import KINDS, device_model, run
from wattune.simulation.sensors import LEAD_S, TAIL_S, device_slots, simulate

S = 1_000_000_000
START_NS = 50 * S
WALL_NS = 1_700_000_000 * S
TIERS = ("ring", "fast", "counter", "slow")
H200 = device_model(device("h200_sxm"))
MODEL = replace(MODELS["llama3_8b"], num_layers=8)


def make_spec(*, model=MODEL, devices=4, nodes=1, batch=16, ran_on="cpu", sensed="h200_sxm", mode="pretrain", **plan):
    return trial_spec(
        model, on=f"{nodes}x{devices} {ran_on}", simulate_sensors_of=sensed, batch=batch, mode=mode, **plan
    )


def make_spans(phases, *, steps=20, devices=4, nodes=1):
    """Spans of equal steps; `phases` are names and seconds in order, None for time without a span."""
    rows = []
    length_ns = sum(round(seconds * S) for _, seconds in phases)
    for rank in range(devices * nodes):
        node = rank // devices
        clock_ns = START_NS + node * 7 * S  # nodes have clocks of their own

        def row(phase, step, start_ns, end_ns, *, rank=rank, node=node, clock_ns=clock_ns):
            wall_ns = WALL_NS - clock_ns
            return {
                "node": f"node{node}",
                "device": f"cpu{rank % devices}",
                "rank": rank,
                "step": step,
                "phase": phase,
                "start_mono_ns": start_ns,
                "end_mono_ns": end_ns,
                "start_wall_ns": start_ns + wall_ns,
                "end_wall_ns": end_ns + wall_ns,
            }

        for step in range(steps):
            at_ns = clock_ns + step * length_ns
            rows.append(row("step", step, at_ns, at_ns + length_ns))
            for phase, seconds in phases:
                end_ns = at_ns + round(seconds * S)
                if phase:
                    rows.append(row(phase, step, at_ns, end_ns))
                at_ns = end_ns
    return pa.Table.from_pylist(rows, schema=SPANS)


BUSY = [("forward", 0.1), ("backward", 0.2), ("optimizer", 0.01)]


def rows_of(table, name):
    return table.filter(pc.equal(table["device"].cast(pa.string()), name))


def ring_of(tables, name="cpu0"):
    rows = rows_of(tables["ring"], name)
    return (rows["sensor_ns"].to_numpy() - WALL_NS) / S, rows["power_w"].to_numpy().astype(float)


def mean_w(spec, spans, name="cpu0"):
    tables, _ = simulate(spec, spans, seed=0)["node0"]
    at_s, power_w = ring_of(tables, name)
    load_s = (pc.max(spans["end_wall_ns"]).as_py() - WALL_NS) / S
    return np.interp(np.arange(0.5, load_s, 0.01), at_s, power_w).mean()


@pytest.fixture(scope="module")
def busy():
    spans = make_spans(BUSY, steps=40)
    tables, manifest = simulate(make_spec(micro_batch_size=4), spans, seed=3)["node0"]
    return spans, tables, manifest


def test_tables_have_the_schemas_and_say_they_are_simulated(busy):
    _, tables, manifest = busy
    assert set(tables) == set(TIERS)
    for tier, table in tables.items():
        assert table.schema.equals(table_schema(tier, backend="simulated", simulated=True), check_metadata=True)
        assert table.schema.metadata[b"wattune.simulated"] == b"true"
        assert table.num_rows > 0
        assert manifest["tiers"][tier]["rows"] == table.num_rows
        assert set(table["device"].cast(pa.string()).to_pylist()) == {f"cpu{slot}" for slot in range(4)}
        table.validate(full=True)
    assert manifest["simulated"] is manifest["closed"] is True
    assert manifest["clock_offset_ns"] == 0
    for name, facts in manifest["devices"].items():
        assert facts["backend"] == "simulated"
        assert facts["name"] == "simulated h200_sxm"
        assert facts["power_domain"] == name
        assert (facts["power_limit_w"], facts["sm_clock_max_mhz"]) == (700.0, 1980.0)
        assert "driver" not in facts
    assert [facts["slot"] for facts in manifest["devices"].values()] == [0, 1, 2, 3]


def test_what_is_not_modelled_is_null(busy):
    _, tables, _ = busy
    null = {name for table in tables.values() for name in table.column_names if table[name].null_count}
    links = {"nvlink_tx_bytes", "nvlink_rx_bytes", "pcie_tx_bytes", "pcie_rx_bytes"}
    assert null == {*links, "memory_used_bytes"}
    assert all(tables["counter"][name].null_count == tables["counter"].num_rows for name in links)


def test_coverage_runs_from_before_the_first_to_after_the_last_mark(busy):
    spans, tables, _ = busy
    end_s = (pc.max(spans["end_wall_ns"]).as_py() - WALL_NS) / S
    at_s, _ = ring_of(tables)
    assert at_s[0] == pytest.approx(-LEAD_S, abs=0.05)
    assert at_s[-1] == pytest.approx(end_s + TAIL_S, abs=0.05)
    for tier in ("fast", "counter", "slow"):
        mono_s = (rows_of(tables[tier], "cpu3")["mono_ns"].to_numpy() - START_NS) / S
        assert mono_s[0] < -0.9
        assert mono_s[-1] > end_s
        assert np.all(np.diff(mono_s) > 0)
    drained_after_ns = pc.subtract(tables["ring"]["wall_ns"], tables["ring"]["sensor_ns"])
    assert 0 <= pc.min(drained_after_ns).as_py() <= pc.max(drained_after_ns).as_py() <= 1.01 * S


def test_energy_counter_agrees_with_the_ring_within_1_percent(busy):
    _, tables, _ = busy
    for slot in range(4):
        slow = rows_of(tables["slow"], f"cpu{slot}")
        mono_s = (slow["mono_ns"].to_numpy() - START_NS) / S
        at_s, power_w = ring_of(tables, f"cpu{slot}")
        inside = (at_s >= mono_s[0]) & (at_s <= mono_s[-1])
        counted_j = slow["energy_j"][-1].as_py() - slow["energy_j"][0].as_py()
        assert np.trapezoid(power_w[inside], at_s[inside]) == pytest.approx(counted_j, rel=0.01)


def test_cumulative_columns_never_fall(busy):
    _, tables, _ = busy
    for slot in range(4):
        slow = rows_of(tables["slow"], f"cpu{slot}")
        for name in ("energy_j", "throttle_power_ns", "throttle_thermal_ns", "throttle_hw_ns"):
            assert np.all(np.diff(slow[name].to_numpy()) >= 0)
        assert np.all(np.diff(slow["throttle_power_ns"].to_numpy()) <= 1.3 * S)
        assert slow["throttle_power_ns"][-1].as_py() > 0


def test_cap_holds_the_1_s_mean_while_single_samples_pass_it(busy):
    _, tables, _ = busy
    at_s, power_w = ring_of(tables)
    grid_w = np.interp(np.arange(at_s[0], at_s[-1], 0.01), at_s, power_w)
    assert np.convolve(grid_w, np.full(100, 0.01), "valid").max() <= 1.015 * 700
    assert 750 < power_w.max() <= 1.4 * 700
    fast = rows_of(tables["fast"], "cpu0")
    clock_mhz, capped = fast["sm_clock_mhz"].to_numpy(), fast["event_reasons"].to_numpy() == 0x4
    assert np.all(clock_mhz % 15 == 0)
    assert clock_mhz.max() <= 1980
    assert capped.mean() > 0.7
    assert np.all(clock_mhz[capped] <= 1965)


def test_devices_obey_the_limit_and_the_clock_of_their_plan():
    spans = make_spans(BUSY, steps=40)
    found, limited, locked = (
        make_spec(micro_batch_size=4, **plan) for plan in ({}, {"power_limit_w": 400}, {"clock_mhz": 1200})
    )
    assert 380 < mean_w(limited, spans) <= 400 < mean_w(found, spans) <= 700
    assert 300 < mean_w(locked, spans) < 400
    tables = {spec: simulate(spec, spans, seed=0)["node0"][0] for spec in (found, limited, locked)}
    enforced_w = [pc.max(tables[spec]["slow"]["power_limit_w"]).as_py() for spec in tables]
    highest_mhz = [pc.max(tables[spec]["fast"]["sm_clock_mhz"]).as_py() for spec in tables]
    assert enforced_w == [700, 400, 700] and highest_mhz[2] == 1200 < highest_mhz[0]


def test_values_are_held_between_refreshes_of_100_ms(busy):
    _, tables, _ = busy
    instant_w = rows_of(tables["fast"], "cpu1")["power_instant_w"].to_numpy()
    assert 0.4 < np.mean(np.diff(instant_w) == 0) < 0.6  # 20 reads a second of 10 values a second
    temps_c = tables["fast"]["gpu_temp_c"].to_numpy()
    assert np.all(temps_c == np.round(temps_c))


def test_before_the_first_mark_devices_are_idle(busy):
    _, tables, _ = busy
    at_s, power_w = ring_of(tables)
    assert power_w[at_s < 0].mean() == pytest.approx(H200.idle_power_w, abs=0.5)
    fast = rows_of(tables["fast"], "cpu0")
    idle = fast["mono_ns"].to_numpy() < START_NS
    assert set(fast["event_reasons"].to_numpy()[idle]) == {0x1}
    assert set(fast["sm_clock_mhz"].to_numpy()[idle]) == {345}
    assert np.ptp(fast["gpu_temp_c"].to_numpy()[idle]) == 0


def test_a_device_that_never_works_stays_at_idle_power_and_temperature():
    shares = np.zeros((1, len(KINDS), 500))
    trace = run(H200, shares, [0], np.ones((1, 500)))
    assert np.all(trace.power_w == H200.idle_power_w)
    assert np.all(trace.idle)
    assert not trace.capped.any()
    assert np.ptp(trace.gpu_temp_c) < 1e-9


def test_same_arguments_give_the_same_tables_and_another_seed_gives_others():
    spans = make_spans(BUSY, steps=5)
    first, again, other = (simulate(make_spec(), spans, seed=seed)["node0"] for seed in (1, 1, 2))
    assert first[1] == again[1]
    for tier in TIERS:
        assert first[0][tier].equals(again[0][tier])
    assert not first[0]["ring"].equals(other[0]["ring"])


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(16)), ranks=st.permutations(range(4)))
def test_order_of_rows_and_numbering_of_equal_ranks_do_not_matter(order, ranks):
    spans = make_spans([("forward", 0.1), ("wait", 0.05), ("backward", 0.2)], steps=1)
    renumbered = pa.array(np.asarray(ranks, np.int32)[spans["rank"].to_numpy()])
    permuted = spans.set_column(spans.column_names.index("rank"), SPANS.field("rank"), renumbered).take(list(order))
    tables, _ = simulate(make_spec(), spans, seed=0)["node0"]
    for tier, table in simulate(make_spec(), permuted, seed=0)["node0"][0].items():
        assert table.equals(tables[tier])


def test_every_node_gets_tables_on_its_own_clock():
    result = simulate(make_spec(nodes=2), make_spans(BUSY, steps=5, nodes=2), seed=0)
    assert sorted(result) == ["node0", "node1"]
    for index, (tables, manifest) in enumerate(result.values()):
        assert manifest["node"] == f"node{index}"
        for table in tables.values():
            difference = pc.subtract(table["wall_ns"], table["mono_ns"])
            assert pc.unique(difference).to_pylist() == [WALL_NS - START_NS - index * 7 * S]
    ring = [tables["ring"]["power_w"].to_numpy() for tables, _ in result.values()]
    assert not np.array_equal(*ring)  # noise of two nodes is not the same noise


def test_large_micro_batches_of_a_dense_data_parallel_plan_run_at_the_cap():
    assert mean_w(make_spec(micro_batch_size=4, overlap="grad_param", sharding="zero1"), make_spans(BUSY)) > 0.95 * 700


def test_waiting_draws_little_above_ready_and_unmarked_time_a_little_more():
    ready_w = H200.ready_power_w
    waiting_w, unmarked_w, busy_w = (
        mean_w(make_spec(ran_on="h100_sxm"), make_spans([("forward", 1e-3), (phase, 0.299)]))
        for phase in ("wait", None, "backward")
    )
    assert ready_w < waiting_w < unmarked_w < ready_w + 150 < busy_w


SMALL = replace(MODEL, num_layers=2, hidden_size=256, ffn_hidden_size=256, num_heads=4, num_kv_heads=2, vocab_size=512)
"""The dense model of the demo."""


def node_peak_1s_w(spec, spans):
    tables, _ = simulate(spec, spans, seed=0)["node0"]
    watts = sum(ring_of(tables, f"cpu{rank}")[1] for rank in range(2))
    return float(np.convolve(watts, np.full(50, 0.02), mode="valid").max())  # 50 samples of 20 ms


@settings(max_examples=25, deadline=None)
@given(
    stretched=st.floats(-1, 1).map(lambda power: 10**power),
    waits=st.floats(0, 0.9),
    hiccup_s=st.floats(0, 4),
    plan=st.sampled_from([{"pp": 2}, {"tp": 2}, {"micro_batch_size": 8, "sharding": "zero1"}]),
)
def test_power_on_processors_is_the_plans_however_slow_and_busy_the_host_is(stretched, waits, hiccup_s, plan):
    spec = make_spec(model=SMALL, devices=2, **{"micro_batch_size": 4, **plan})
    idle_w = node_peak_1s_w(spec, make_spans([("forward", 0.1), ("backward", 0.2)], devices=2))
    phases = [("forward", 0.1), ("wait", 0.3 * waits / (1 - waits)), ("backward", 0.2), (None, hiccup_s)]
    steps = max(3, math.ceil(3 / (0.3 * stretched)))
    loaded = make_spans([(name, seconds * stretched) for name, seconds in phases], devices=2, steps=steps)
    assert node_peak_1s_w(spec, loaded) == pytest.approx(idle_w, rel=0.05)


def test_a_step_that_still_runs_counts_as_far_as_it_came():
    spec, spans = make_spec(), make_spans([("forward", 1.0), ("backward", 1.0)], steps=2)
    unfinished = spans.filter(
        pc.or_(pc.not_equal(spans["phase"].cast(pa.string()), "step"), pc.equal(spans["step"], 0))
    )
    assert mean_w(spec, unfinished) == pytest.approx(mean_w(spec, spans), rel=0.02)


def test_pipeline_bubbles_and_tensor_parallel_communication_draw_less():
    dense_w = mean_w(make_spec(micro_batch_size=4), make_spans(BUSY))
    assert mean_w(make_spec(pp=4), make_spans([*BUSY, ("wait", 0.1)])) < dense_w - 50
    assert mean_w(make_spec(tp=8, devices=8), make_spans(BUSY, devices=8)) < dense_w - 30


def test_slots_come_from_names_where_they_can():
    assert device_slots(["gpu3", "gpu0"]) == [3, 0]
    assert device_slots(["a", "b"]) == [0, 1]
    assert device_slots(["x1", "y1"]) == [0, 1]


@pytest.mark.parametrize(("dtype", "null_frac"), [("fp32", 1), ("fp8", 0)])
def test_fp32_products_leave_tensor_activity_null_and_fp8_ones_do_not(dtype, null_frac):
    tables, _ = simulate(make_spec(dtype=dtype), make_spans(BUSY, steps=5), seed=0)["node0"]
    assert tables["counter"]["tensor_active_frac"].null_count == null_frac * tables["counter"].num_rows
    assert tables["counter"]["sm_active_frac"].null_count == 0


def test_a_device_without_peaks_cannot_be_simulated():
    with pytest.raises(TelemetryError, match="simulate_sensors_of"):
        simulate(make_spec(sensed=None), make_spans(BUSY, steps=1), seed=0)
    with pytest.raises(TelemetryError, match="h200_sxm"):
        device_model(device("cpu"))


def test_two_ranks_on_one_device_are_refused():
    spans = make_spans(BUSY, steps=1)
    one = pa.array(["cpu0"] * spans.num_rows).dictionary_encode()
    with pytest.raises(TelemetryError, match="one rank a device"):
        node_activities(make_spec(), spans.set_column(1, SPANS.field("device"), one))


def test_a_minute_of_eight_devices_takes_less_than_a_second():
    spans = make_spans(BUSY, steps=round(60 / 0.31), devices=8)
    assert least_cpu_s(lambda: simulate(make_spec(devices=8), spans, seed=0)) < 1.0

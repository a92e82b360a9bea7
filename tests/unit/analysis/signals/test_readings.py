"""Readings of one tier by device, and their cache."""

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from runs import constant

from wattune.analysis.metrics.energy import powers
from wattune.analysis.signals import readings
from wattune.analysis.signals.align import align
from wattune.analysis.signals.readings import Readings, ReadingsCache, cause_column
from wattune.schema import THROTTLE_REASON_BITS
from wattune.storage.parquet import TableSource

GPU = ("n0", "gpu0")


def ramp(time_s):
    return 100.0 + 10.0 * time_s


def test_ring_samples_stand_at_the_drivers_time_and_repeated_ones_once(bench):
    once = bench.ring({GPU: ramp})
    aligned = align({"ring": pa.concat_tables([once, once])}, bench.steps([GPU]), {})
    time_s, power_w = _power(aligned, GPU)
    assert len(time_s) == once.num_rows
    assert power_w == pytest.approx(ramp(time_s), abs=1e-4)


def test_rows_without_a_time_are_left_out(bench):
    table = bench.ring({GPU: ramp})
    holes = pa.array([None if row % 2 else value for row, value in enumerate(table["mono_ns"].to_pylist())], pa.int64())
    aligned = align({"ring": table.set_column(2, "mono_ns", holes)}, bench.steps([GPU]), {})
    assert len(_power(aligned, GPU)[0]) == (table.num_rows + 1) // 2


def _power(aligned, device):
    found = aligned.tiers["ring"][device].series("power_w")
    return found.time_s, found.value


def test_the_cache_drops_the_least_recently_used_and_does_not_hold_what_is_too_large(monkeypatch):
    monkeypatch.setattr(readings, "_LARGE_SHARE", 2)
    cache, made = ReadingsCache(most_bytes=100), []
    for number in (1, 2, 1, 3, 1):

        def make(number=number):
            made.append(number)
            return Readings(np.zeros(5), {})

        cache.get(number, Readings, make)
    assert made == [1, 2, 3]  # 40 bytes each: the one longest not asked for goes
    cache.get(2, Readings, lambda: made.append("again") or Readings(np.zeros(5), {}))
    assert made == [1, 2, 3, "again"]
    large = Readings(np.zeros(7), {})  # more than half of all there is room for
    assert all(cache.get("large", Readings, lambda: made.append("large") or large) is large for _ in range(2))
    assert made[-2:] == ["large", "large"]


def test_samples_stamped_after_they_were_read_do_not_exist(bench):
    ring = bench.ring({GPU: constant(100)})
    ahead = ring["sensor_ns"].to_numpy().copy()
    ahead[::10] += readings.AHEAD_NS + 10**9
    table = ring.set_column(ring.column_names.index("sensor_ns"), "sensor_ns", pa.array(ahead))
    (trace,) = powers(align({"ring": table}, bench.steps([GPU]), {})).traces
    assert len(trace.series.value) == pytest.approx(0.9 * 1001, abs=3)


numbers = st.one_of(st.just(math.nan), st.floats(-1e6, 1e6))


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.0, 3.0, math.nan]), numbers, numbers), max_size=12))
@example([(0.0, 0.0, 0.0), (math.nan, 1.0, 1.0), (0.0, 2.0, 2.0)])
def test_complete_readings_are_the_first_whole_row_of_every_time_in_order(rows):
    time_s, a, b = (np.array([row[column] for row in rows], float) for column in range(3))
    expected: dict[float, tuple[float, float]] = {}
    for row in rows:
        if all(map(math.isfinite, row)):
            expected.setdefault(row[0], row[1:])
    found = Readings(time_s, {"a": a, "b": b, "c": a}).complete("a", "b")
    assert list(zip(found.time_s, found.columns["a"], found.columns["b"], strict=True)) == [
        (time_s, *expected[time_s]) for time_s in sorted(expected)
    ]
    assert Readings(time_s, {"a": a}).complete("a", "b") is None


def test_values_inside_an_interval_are_finite_and_in_order():
    found = Readings(np.array([3.0, 1.0, 2.0, 9.0]), {"x": np.array([30.0, 10.0, math.nan, 90.0])})
    assert [each.tolist() for each in found.inside("x", 1.0, 3.0)] == [[1.0, 3.0], [10.0, 30.0]]
    assert [each.tolist() for each in found.inside("y", 1.0, 3.0)] == [[], []]


@given(st.lists(st.tuples(st.sampled_from(["n0", "n1", None]), st.sampled_from(["a", "b", None])), max_size=20))
def test_a_table_is_read_device_by_device_however_its_rows_are_mixed(owners):
    columns = {"node": [node for node, _ in owners], "device": [name for _, name in owners]}
    table = pa.table(
        {name: pa.array(texts, pa.string()) for name, texts in columns.items()} | {"row": pa.array(range(len(owners)))}
    )
    source = TableSource(table)
    expected = {owner for owner in owners if None not in owner}
    assert set(source.devices) == expected
    for owner in expected:
        rows = [row for part in source.parts(owner, ["row"]) for row in part["row"].to_pylist()]
        assert rows == [row for row, other in enumerate(owners) if other == owner]


def test_reasons_become_a_column_a_cause_and_unknown_ones_are_not_a_number(bench):
    time_s = np.arange(0.0, 3.0)
    bits = [THROTTLE_REASON_BITS["power"], THROTTLE_REASON_BITS["thermal"] | THROTTLE_REASON_BITS["hw"], 0]
    table = bench.tier("fast", {GPU: {"time_s": time_s, "event_reasons": np.array(bits, np.uint64)}})
    index = table.column_names.index("event_reasons")
    table = table.set_column(index, table.schema.field(index), pa.array([*bits[:2], None], pa.uint64()))
    found = align({"fast": table}, bench.steps([GPU], num_steps=3), {}).tiers["fast"][GPU].columns
    causes = {cause: found[cause_column(cause)].tolist() for cause in THROTTLE_REASON_BITS}
    assert {cause: values[:2] for cause, values in causes.items()} == {
        "power": [1.0, 0.0],
        "thermal": [0.0, 1.0],
        "hw": [0.0, 1.0],
    }
    assert all(math.isnan(values[2]) for values in causes.values())


def test_a_device_that_was_not_recorded_is_a_key_error(bench):
    tier = align({"ring": bench.ring({GPU: ramp})}, bench.steps([GPU]), {}).tiers["ring"]
    assert (list(tier), len(tier), GPU in tier) == ([GPU], 1, True)
    with pytest.raises(KeyError):
        tier["n0", "gpu7"]

"""Values that cannot be."""

from typing import Any

import pyarrow as pa
import pytest

from wattune.errors import ImpossibleValueError
from wattune.schema import BOUNDS, KERNELS, SPANS, TELEMETRY, table_schema
from wattune.storage.values import require_possible, require_possible_rows, require_schema, wrong_columns

H200 = {"power_limit_w": 700.0, "sm_clock_max_mhz": 1980, "link_peaks": {"nvlink": 450e9}}
S = 10**9


def table(tier: str, **columns: Any) -> pa.Table:
    count = max(len(values) for values in columns.values())
    keys = {"node": ["n0"] * count, "device": ["gpu0"] * count, "mono_ns": [index * S for index in range(count)]}
    keys["wall_ns"] = [10**18 + index * S for index in range(count)]
    rows = {**keys, **columns}
    schema = pa.schema([field for field in table_schema(tier, backend="nvml", simulated=False) if field.name in rows])
    return pa.table({field.name: pa.array(rows[field.name], field.type) for field in schema}, schema=schema)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (table("fast", gpu_temp_c=[40, -1]), "gpu_temp_c: got -1, allowed: 0 to 150"),
        (table("fast", gpu_temp_c=[64000]), "gpu_temp_c: got 64000"),
        (table("ring", power_w=[300, 5000], sensor_ns=[1, 2]), "power_w: got 5000, allowed: 0 to 2100"),
        (table("slow", power_average_w=[575000]), "power_average_w: got 575000"),
        (table("fast", sm_clock_mhz=[1980, 2970]), "sm_clock_mhz: got 2970, allowed: 0 to 2475"),
        (table("counter", tensor_active_frac=[36.07]), "tensor_active_frac: got 36.07"),
        (table("counter", nvlink_tx_bytes=[0, 2 * 10**12]), "nvlink_tx_bytes: rose by 2e.12 in 1 s, allowed: 9e.11"),
        (table("slow", energy_j=[0, 5e6]), "energy_j: rose by 5e.06"),
        (table("fast", gpu_temp_c=[1, 2, 3], mono_ns=[3, 2, 1]), "mono_ns runs back"),
        (table("fast", gpu_temp_c=[1, 2], mono_ns=[0, 2**61]), "mono_ns: rows of"),
        (pa.table({"node": ["n0"] * 2, "device": ["gpu0"] * 2, "mono_ns": ["x", "y"]}), "mono_ns is string"),
        (
            pa.table({"node": ["n0"] * 2, "device": ["gpu0"] * 2, "mono_ns": [1, 2], "event_reasons": [4, -(2**63)]}),
            "event_reasons: got -9.22",
        ),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_bound(rows: pa.Table, words: str) -> None:
    with pytest.raises(ImpossibleValueError, match=f"here: {words}"):
        require_possible(rows, "here", H200)
    with pytest.raises(ImpossibleValueError, match=f"here: gpu0: {words}"):
        require_possible_rows(rows, "here", {("n0", "gpu0"): H200})


def test_what_was_measured_can_be() -> None:
    highest = table("ring", power_w=[75.4, 969.3], sensor_ns=[1, 2])
    require_possible(highest, "here", H200)
    require_possible(table("counter", nvlink_tx_bytes=[0, 450 * 10**9, 5]), "here", H200)  # counters are reset
    require_possible(table("fast", gpu_temp_c=[None, 50, float("nan")]), "here")
    require_possible_rows(table("fast", gpu_temp_c=[50]).drop_columns(["node"]), "here", {})


def test_without_facts_the_schema_bounds_alone() -> None:
    require_possible(table("ring", power_w=[5000], sensor_ns=[1]), "here")
    with pytest.raises(ImpossibleValueError, match="allowed: 0 to 10000"):
        require_possible(table("ring", power_w=[2.3e6], sensor_ns=[1]), "here")


def test_every_number_of_every_table_has_a_bound() -> None:
    for schema in (*TELEMETRY.values(), SPANS, KERNELS):
        numbers = [f.name for f in schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
        assert {name for name in numbers if name not in BOUNDS} <= {"event_reasons", "stream"}


def test_columns_of_another_kind_are_listed() -> None:
    assert wrong_columns(TELEMETRY["fast"], "fast") == []
    other = pa.schema([("node", pa.string()), ("gpu_temp_c", pa.string())])
    assert wrong_columns(other, "fast")[0] == "fast has no device"
    assert "fast.gpu_temp_c is string" in wrong_columns(other, "fast")
    with pytest.raises(ImpossibleValueError, match="two columns have one name"):
        require_schema(pa.schema([("a", pa.int8()), ("a", pa.int8())]), "here")

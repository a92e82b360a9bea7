"""The check of tables against the schema."""

import pyarrow as pa
import pytest

from wattune.analysis.signals.schema_check import WRONG_COLUMNS, schema_problems
from wattune.schema import SPANS, TELEMETRY


def with_column(schema: pa.Schema, name: str, kind: pa.DataType) -> pa.Table:
    index = schema.get_field_index(name)
    return schema.set(index, pa.field(name, kind)).empty_table()


def without(schema: pa.Schema, name: str) -> pa.Table:
    return schema.remove(schema.get_field_index(name)).empty_table()


@pytest.mark.parametrize("tier", TELEMETRY)
@pytest.mark.parametrize("column", ["node", "device", "mono_ns", "wall_ns"])
def test_rows_cannot_do_without_owner_and_time(tier, column):
    assert schema_problems({tier: without(TELEMETRY[tier], column)}, None) == {WRONG_COLUMNS: f"{tier} has no {column}"}


def test_only_the_ring_needs_the_drivers_time_and_measurements_may_be_absent():
    assert schema_problems({"ring": without(TELEMETRY["ring"], "sensor_ns")}, None) == {
        WRONG_COLUMNS: "ring has no sensor_ns"
    }
    assert schema_problems({"slow": without(TELEMETRY["slow"], "energy_j")}, None) == {}
    assert schema_problems({}, without(SPANS, "phase")) == {WRONG_COLUMNS: "spans has no phase"}


@pytest.mark.parametrize(
    ("tier", "column", "kind", "fits"),
    [
        ("fast", "gpu_temp_c", pa.int16(), True),
        ("fast", "gpu_temp_c", pa.float64(), True),
        ("fast", "gpu_temp_c", pa.string(), False),
        ("fast", "sm_clock_mhz", pa.float64(), True),  # whole numbers with gaps became floats
        ("fast", "event_reasons", pa.float64(), False),  # a float loses the last bits
        ("fast", "mono_ns", pa.float64(), False),  # and the last nanoseconds
        ("fast", "mono_ns", pa.int32(), True),
        ("fast", "node", pa.string(), True),
        ("fast", "node", pa.large_string(), True),
        ("fast", "node", pa.dictionary(pa.int8(), pa.string()), True),
        ("fast", "node", pa.dictionary(pa.int8(), pa.int64()), False),
        ("fast", "node", pa.int64(), False),
        ("slow", "energy_j", pa.null(), True),  # nothing was read
    ],
)
def test_a_column_has_to_be_of_its_kind_and_not_of_its_width(tier, column, kind, fits):
    found = schema_problems({tier: with_column(TELEMETRY[tier], column, kind)}, None)
    assert found == ({} if fits else {WRONG_COLUMNS: f"{tier}.{column} is {kind}"})

"""Tables and metrics: a unit on every one, and stored tables that say what they are."""

import pytest

from wattune.schema import METRICS, SPANS, TELEMETRY, THROTTLE_REASON_BITS, table_schema
from wattune.units import unit_of

TABLES = {**TELEMETRY, "spans": SPANS}


@pytest.mark.parametrize("tier", TABLES)
def test_every_column_says_its_unit_and_kind(tier):
    schema = TABLES[tier]
    assert schema.names[:2] == ["node", "device"]
    for field in schema:
        metadata = {key.decode(): value.decode() for key, value in field.metadata.items()}
        assert metadata["kind"] in {"key", "time", "gauge", "cumulative", "bits"}
        assert metadata.get("unit") == unit_of(field.name)
        if metadata["kind"] in {"time", "gauge", "cumulative"}:
            assert metadata["unit"], field.name


@pytest.mark.parametrize("tier", TABLES)
def test_a_stored_table_says_what_it_is(tier):
    metadata = table_schema(tier, backend="simulated", simulated=True).metadata
    assert metadata[b"wattune.table"] == tier.encode()
    assert metadata[b"wattune.simulated"] == b"true"
    assert metadata[b"wattune.backend"] == b"simulated"
    assert table_schema(tier, backend="nvml", simulated=False).names == TABLES[tier].names


def test_every_metric_has_a_unit_a_group_and_a_direction():
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.unit, name
        assert metric.better in {"lower", "higher", "none"}


def test_where_the_step_goes_sums_to_one_of_the_same_kind():
    where = [metric.name for metric in METRICS.values() if metric.group == "step_breakdown"]
    whole = {"compute_frac", "exposed_comm_frac", "bubble_frac", "straggler_frac", "other_frac"}
    by_axis = {f"exposed_comm_{axis}_frac" for axis in ("tp", "pp", "cp", "dp", "ep")}
    assert set(where) == whole | by_axis | {"host_bound_frac"}


def test_causes_of_throttling_share_no_bit():
    bits = list(THROTTLE_REASON_BITS.values())
    assert sum(bits) == bits[0] | bits[1] | bits[2]

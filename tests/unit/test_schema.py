"""Tables: a unit on every column, and stored tables that say what they are."""

import pytest

from wattune.schema import SPANS, TELEMETRY, THROTTLE_REASON_BITS, table_schema
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


def test_causes_of_throttling_share_no_bit():
    bits = list(THROTTLE_REASON_BITS.values())
    assert sum(bits) == bits[0] | bits[1] | bits[2]

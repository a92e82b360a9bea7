"""One table of all trials of a study as a dataset."""

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from wattune.errors import TelemetryError
from wattune.schema import table_schema
from wattune.storage.study import StudyFolder


@pytest.fixture
def study(tmp_path):
    return StudyFolder.create(tmp_path, "x", {"study": "x"})


def write_ring(study, trial_id, node, powers_w, *, simulated=False, error=None):
    """One trial's ring of one node; a read that failed has its code beside it."""
    schema = table_schema("ring", backend="nvml", simulated=simulated)
    rows = [{"node": node, "device": "gpu0", "mono_ns": n, "wall_ns": n, "power_w": w} for n, w in enumerate(powers_w)]
    if error is not None:
        schema = schema.append(pa.field("power_w_error", pa.dictionary(pa.int32(), pa.string())))
        rows.append({"node": node, "device": "gpu0", "mono_ns": len(rows), "power_w": None, "power_w_error": error})
    table = pa.Table.from_pylist(rows, schema=schema)
    study.trial(trial_id, 0).write_telemetry(node, {"ring": table}, {"node": node})


def test_a_studys_telemetry_is_one_dataset_that_says_what_is_whose(study):
    write_ring(study, "aaaa", "n0", [100.0, 300.0])
    write_ring(study, "aaaa", "n1", [500.0])
    write_ring(study, "bbbb", "n0", [700.0], simulated=True, error="15")
    dataset = study.dataset("ring")
    assert dataset.schema.names[:4] == ["trial", "simulated", "node", "device"]
    assert not dataset.schema.metadata
    rows = dataset.to_table(columns=["trial", "simulated", "node", "power_w", "power_w_error"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("aaaa-0", False, "n0", 100.0, None),
        ("aaaa-0", False, "n0", 300.0, None),
        ("aaaa-0", False, "n1", 500.0, None),
        ("bbbb-0", True, "n0", 700.0, None),
        ("bbbb-0", True, "n0", None, "15"),
    ]
    assert dataset.count_rows(filter=pc.field("trial") == "aaaa-0") == 3
    # A condition on the trial opens that trial's files alone.
    assert len(list(dataset.get_fragments(filter=pc.field("trial") == "bbbb-0"))) == 1


def test_a_studys_telemetry_opens_in_duckdb(study):
    write_ring(study, "aaaa", "n0", [100.0, 300.0])
    write_ring(study, "bbbb", "n0", [700.0])
    ring = study.dataset("ring")  # noqa: F841 - duckdb finds it by its name
    query = "select trial, max(power_w) from ring where not simulated group by trial order by trial"
    assert duckdb.sql(query).fetchall() == [("aaaa-0", 300.0), ("bbbb-0", 700.0)]


def test_a_table_that_no_trial_has_is_said(study):
    with pytest.raises(TelemetryError, match=r'no trial of .* has a table "ring"'):
        study.dataset("ring")
    with pytest.raises(TelemetryError, match='"rings" is no table of a trial; did you mean "ring"'):
        study.dataset("rings")
    spans = pa.Table.from_pylist([{"rank": 0}], schema=table_schema("spans", backend="torch", simulated=False))
    study.trial("aaaa", 0).write_spans(spans)
    assert study.dataset("spans").to_table(columns=["trial", "rank"]).to_pylist() == [{"trial": "aaaa-0", "rank": 0}]

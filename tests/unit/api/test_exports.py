"""A study as one file: the three formats hold the same figures, with units."""

import csv
import io
import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small_study import make_study

import wattune
from wattune import api
from wattune.metrics import METRICS


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> wattune.Study:
    return wattune.load_study(make_study(tmp_path_factory.mktemp("storage")).path)


@pytest.mark.parametrize("rows", ["repeats", "trials"])
def test_every_format_has_the_same_columns_and_figures(study: wattune.Study, rows: str) -> None:
    table = pq.read_table(io.BytesIO(api.export(study, "parquet", rows=rows)))
    lines = list(csv.DictReader(io.StringIO(api.export(study, "csv", rows=rows).decode())))
    data = json.loads(api.export(study, "json", rows=rows))
    assert [one["name"] for one in data["columns"]] == table.column_names == list(lines[0])
    assert data["rows"] == table.to_pylist() and len(lines) == table.num_rows == 3
    for line, row in zip(lines, table.to_pylist(), strict=True):
        for name in METRICS:
            assert (line[name] == "") is (row[name] is None)
            assert row[name] is None or math.isclose(float(line[name]), row[name], rel_tol=1e-15)
    units = {one["name"]: one["unit"] for one in data["columns"]}
    assert (units["device_power_mean_w"], units["tokens_per_s"], units["trial_id"]) == ("W", "1/s", None)
    assert table.schema.field("device_power_mean_w").metadata[b"unit"] == b"W"
    assert data["study"] == "dense_h200x4" and data["kind"] == rows


def test_repeats_are_what_was_measured_and_trials_how_they_rank(study: wattune.Study) -> None:
    repeats = json.loads(api.export(study, "json"))["rows"]
    assert sorted(row["status"] for row in repeats) == ["completed", "completed", "out_of_memory"]
    trials = json.loads(api.export(study, "json", rows="trials"))
    assert [row["verdict"] for row in trials["rows"]] == ["feasible", "infeasible", "failed"]
    assert trials["objective"] == "maximize tokens_per_s"
    assert trials["rows"][0]["node_device_power_peak_1s_w <= 3000: slack"] > 0


def test_what_cannot_be_read_is_named_in_the_file(tmp_path: Path) -> None:
    study = wattune.load_study(make_study(tmp_path).path)
    (study.trials()[0].path / "run.json").write_text("{")
    assert len(json.loads(api.export(study, "json"))["unreadable"].splitlines()) == 1

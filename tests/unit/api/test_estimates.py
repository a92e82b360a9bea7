"""Estimates of a space use the storage's fit unasked and say so."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from known_fit import stored_fit
from specs import made_run, store_run

from wattune import api
from wattune.catalog.hardware import DEVICES
from wattune.cost.defaults import default_coefficients
from wattune.cost.sweep import COLUMNS, TABLE
from wattune.errors import PlanError
from wattune.fitting.store import LINKS, write_fit
from wattune.metrics import METRICS
from wattune.storage.files import write_table
from wattune.storage.study import StudyFolder
from wattune.trial import TrialSpec

SPACES = Path(__file__).parents[3] / "search_spaces"
SPACE = SPACES / "moe_ep_h200x4.yaml"


def stored(tmp_path: Path) -> None:
    default = default_coefficients(DEVICES["h200_sxm"])
    write_fit(tmp_path, stored_fit(step_time=replace(default.step_time, error_frac=0.01)))


def test_a_stored_fit_is_used_unasked_and_said(tmp_path) -> None:
    before = api.forecast(SPACE, storage=str(tmp_path))
    stored(tmp_path)
    after = api.forecast(SPACE, storage=str(tmp_path))
    assert before.sources[0].coefficients.fit == "" and "fit" not in before.sources[0].text
    assert "(fit 2026-11-22, 12 trials)" in after.sources[0].text
    step = after.estimates.columns["step_time_s"]
    assert float(step.high[0] / step.value[0]) - 1 == pytest.approx(0.01, rel=1e-3)


def test_hard_limits_are_bounds_of_the_forecast(tmp_path) -> None:
    planned = api.plan(SPACE)
    limited = replace(planned, spec=replace(planned.spec, limits={"node_device_power_w": 100.0}))
    found = api.forecast(limited, storage=str(tmp_path))
    assert (found.risks["node_device_power_peak_1s_w <= 100"] > 0.99).all()


def h200_study(tmp_path: Path, name: str, more_bytes: float = 0.0) -> TrialSpec:
    """Writes a study with one measured trial of `benchmarks/data`, its memory raised."""
    path = Path(__file__).parents[3] / "benchmarks" / "data" / "moe_ep_h200x4.parquet"
    row = next(one for one in pq.read_table(path).to_pylist() if one["status"] == "completed" and one["step_time_s"])
    spec = TrialSpec.from_json(json.loads(row["spec"]))
    study = StudyFolder.create(tmp_path, name, {"study": name})
    metrics = {metric: row[metric] for metric in METRICS if row.get(metric) is not None}
    metrics["memory_peak_bytes"] += more_bytes
    store_run(study, spec, made_run(spec, quality="indicative", metrics=metrics))
    return spec


def test_memory_that_earlier_trials_held_beyond_their_estimate_is_carried_over_and_said(tmp_path: Path) -> None:
    before = api.forecast(SPACE, storage=str(tmp_path))
    h200_study(tmp_path, "earlier", more_bytes=2e10)
    after = api.forecast(SPACE, storage=str(tmp_path))
    trial = before.kept[0].trial_id
    place = next(index for index, one in enumerate(after.kept) if one.trial_id == trial)
    peaks = before.estimates.columns["memory_peak_bytes"].value[0], after.estimates.columns["memory_peak_bytes"].value
    assert peaks[1][place] - peaks[0] == pytest.approx(2e10, rel=0.1)
    assert "GB, as measured trials held" in after.sources[0].text
    assert "as measured trials held" not in before.sources[0].text


def test_an_estimate_is_laid_beside_a_measured_trial(tmp_path: Path) -> None:
    spec = h200_study(tmp_path, "measured")
    found = api.beside_result(f"measured:{spec.trial_id[:6]}", storage=str(tmp_path))
    assert found.trial == f"measured:{spec.trial_id}-0"
    assert not found.was_fitted
    assert all(one.measured is not None for one in found.metrics if one.name == "step_time_s")
    stored(tmp_path)  # a fit to the study `a`
    other = h200_study(tmp_path, "a")
    assert api.beside_result(f"a:{other.trial_id}", storage=str(tmp_path)).was_fitted


def test_links_without_a_table_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="nothing to fit"):
        api.fit(storage=str(tmp_path))
    (tmp_path / "x.parquet").write_text("no table")
    with pytest.raises(PlanError, match="is not a table of"):
        api.fit(links=str(tmp_path / "x.parquet"), storage=str(tmp_path))


def test_a_swept_table_is_fitted_unasked_and_said(tmp_path: Path) -> None:
    rows = [
        {
            "kind": "all_gather",
            "device": "h200_sxm",
            "device_uuid": "GPU-1",
            "date": "2026-11-22T21:00:00+00:00",
            "in_graph": False,
            "size_bytes": size,
            "group_size": 4,
            "num_nodes": 1,
            "time_s": 20e-6 + size / 50e9,
            "bus_bytes_per_s": 50e9,
        }
        for size in (2**12, 2**20, 2**28)
    ]
    folder = tmp_path / LINKS / "20261122T210000Z"
    folder.mkdir(parents=True)
    write_table(folder / TABLE, pa.Table.from_pylist([{n: r.get(n) for n in COLUMNS.names} for r in rows], COLUMNS))
    stored(tmp_path)
    before = api.forecast(SPACE, storage=str(tmp_path))
    ((path, fit),) = api.fit(storage=str(tmp_path))
    assert path.exists()
    assert fit.num_trials == 12, "the trials of the earlier fit stay in it"
    assert fit.device_uuids == ("GPU-1",)
    after = api.forecast(SPACE, storage=str(tmp_path))
    assert "links of 2026-11-22" in after.sources[0].text
    slowest = [float(one.estimates.columns["step_time_s"].value.max()) for one in (before, after)]
    assert slowest[1] > 1.2 * slowest[0], "gathers at a tenth of the rate"

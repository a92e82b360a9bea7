"""A folder analysed from its files alone: whole folders give what was measured, broken ones a verdict."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from specs import trial_spec

from wattune.catalog.models import MODELS
from wattune.errors import PlanError
from wattune.inspection import inspect
from wattune.storage.study import TrialFolder

GOLDEN = Path(__file__).parents[1] / "golden" / "h200x4" / "dp4"
SPEC = trial_spec(replace(MODELS["llama3_8b"], num_layers=8), engine="megatron", overlap="grad_param")
POWER = {"device_power_mean_w", "node_device_power_peak_1s_w", "energy_per_step_j", "excursion_count"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The recording dp4 as a trial's folder, to be broken."""
    shutil.copytree(GOLDEN, tmp_path / "trial")
    for path in (tmp_path / "trial").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    TrialFolder(tmp_path / "trial").write_spec(SPEC)
    return tmp_path / "trial"


def tier(folder: Path, name: str) -> Path:
    return folder / "telemetry" / "node0" / f"{name}.parquet"


def changed(path: Path, column: str, values) -> None:
    """Replaces a column by what a function makes of its values."""
    table = pq.read_table(path)
    index = table.column_names.index(column)
    made = pa.array(values(table[column].to_numpy(zero_copy_only=False)))
    pq.write_table(table.set_column(index, table.field(column).with_type(made.type), made), path)


def finite(analysis) -> bool:
    return all(math.isfinite(value) for value in analysis.summary.metrics.values())


def test_a_whole_folder(folder):
    found = inspect(folder)
    assert found.summary.quality == "publishable"
    assert found.summary.metrics["node_device_power_peak_1s_w"] == pytest.approx(2788, rel=1e-3)
    assert found.detail.steps.num_rows == 38 and found.detail.slots.num_rows == 4
    plain = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert plain["metrics"] == dict(found.summary.metrics)
    assert plain["detail"]["num_rows"]["excursions"] == found.summary.metrics["excursion_count"] == 80
    assert plain["detail"]["breakdown"]["step_energy_j"] == pytest.approx(found.summary.metrics["energy_per_step_j"])


def test_not_a_number_is_no_reading(folder):
    whole = inspect(folder).summary.metrics
    changed(tier(folder, "ring"), "power_w", lambda v: np.where(np.arange(len(v)) % 200 == 7, np.nan, v))
    found = inspect(folder)
    assert finite(found)
    assert found.summary.metrics["device_power_mean_w"] == pytest.approx(whole["device_power_mean_w"], rel=2e-3)
    changed(tier(folder, "ring"), "power_w", lambda v: v * np.nan)
    found = inspect(folder)
    assert finite(found) and found.summary.tags["power_source"] == "fast"
    changed(tier(folder, "fast"), "power_instant_w", lambda v: v * np.nan)
    found = inspect(folder)
    assert found.summary.tags["power_source"] == "average" and "excursion_count" not in found.summary.metrics
    changed(tier(folder, "slow"), "power_average_w", lambda v: v * np.nan)
    found = inspect(folder)
    assert (found.summary.quality, not POWER & found.summary.metrics.keys()) == ("indicative", True)
    assert "no_device_power" in found.summary.quality_reasons


@pytest.mark.parametrize("name", ["ring", "fast", "slow", "counter"])
def test_readings_from_the_future_are_not_of_the_window(folder, name):
    """The second half of a tier's rows is stamped a year late."""
    whole = inspect(folder).summary.metrics
    year_ns = 365 * 86400 * 10**9
    for column in ("mono_ns", "wall_ns", *(["sensor_ns"] if name == "ring" else [])):
        middle = np.median(pq.read_table(tier(folder, name))[column].to_numpy())
        changed(tier(folder, name), column, lambda v, middle=middle: np.where(v > middle, v + year_ns, v))
    found = inspect(folder)
    assert finite(found)
    for metric in ("device_power_peak_20ms_w", "device_temp_max_c", "step_time_s"):
        if metric in found.summary.metrics:
            assert found.summary.metrics[metric] <= whole[metric] * 1.001
    if name == "ring":  # instant power stands in for it
        assert found.summary.quality == "indicative" and "ring_incomplete" in found.summary.quality_reasons
        assert "device_power_peak_20ms_w" not in found.summary.metrics
        assert found.summary.metrics["device_power_mean_w"] == pytest.approx(whole["device_power_mean_w"], rel=0.01)


def test_spans_from_the_future_leave_telemetry_outside_the_window(folder):
    year_ns = 365 * 86400 * 10**9
    for column in ("start_mono_ns", "end_mono_ns"):
        changed(folder / "spans.parquet", column, lambda v: v + year_ns)
    found = inspect(folder)
    assert found.summary.quality == "invalid" and "outside_window" in found.summary.quality_reasons
    assert not POWER & found.summary.metrics.keys()


def test_a_folder_of_nothing_and_no_folder(tmp_path):
    with pytest.raises(PlanError, match="neither telemetry nor spans"):
        inspect(tmp_path)
    with pytest.raises(PlanError, match="is not a folder"):
        inspect(tmp_path / "nowhere")

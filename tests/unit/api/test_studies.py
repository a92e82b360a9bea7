"""A study read back from Python: one row a repeat, units, nulls, telemetry, and errors that are wattune's own."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from small_study import make_study
from specs import store_run
from study_files import SPEC, result_of

import wattune
from wattune.metrics import METRICS
from wattune.plans.axes import AXES
from wattune.storage.study import StudyFolder
from wattune.storage.trial_files import accept
from wattune.units import unit_of


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("storage")
    make_study(path)
    return path


@pytest.fixture(scope="module")
def study(storage: Path) -> wattune.Study:
    return wattune.load_study("dense_h200x4", storage=str(storage))


def test_a_study_is_found_by_its_name_and_by_its_folder(storage: Path, study: wattune.Study) -> None:
    assert study.name == "dense_h200x4" and study.path == storage / "dense_h200x4"
    assert wattune.load_study(study.path).path == study.path
    assert study.space["objective"] == "maximize tokens_per_s"
    with pytest.raises(wattune.WattuneError, match=r'no study "absent" in .*, it holds: dense_h200x4'):
        wattune.load_study("absent", storage=str(storage))


def test_metrics_have_one_row_a_repeat_and_one_column_a_metric(study: wattune.Study) -> None:
    table = study.metrics()
    assert isinstance(table, pa.Table)
    rows = table.to_pylist()
    assert sorted(row["status"] for row in rows) == ["completed", "completed", "out_of_memory"]
    assert [name for name in table.column_names if name in METRICS] == list(METRICS)
    assert set(AXES) <= set(table.column_names)
    for trial, row in zip(study.trials(), rows, strict=True):
        assert (row["trial_id"], row["repeat"]) == (trial.result.trial_id, trial.result.repeat)
        assert (row["quality"], row["engine"], row["model"]) == (trial.result.quality, "megatron", "llama3_8b")
        assert {name: row[name] for name in METRICS if row[name] is not None} == trial.result.metrics
        assert (row["tp"], row["pp"], row["dp"]) == (
            trial.spec.plan.tp,
            trial.spec.plan.pp,
            4 // (trial.spec.plan.tp * trial.spec.plan.pp),
        )
        assert (trial.path / "run.json").is_file()
        assert row["simulated"] is False
    failed = next(row for row in rows if row["status"] == "out_of_memory")
    assert failed["reason"] == "rank 3 at 140.2 GiB"
    assert all(failed[name] is None for name in METRICS)


def test_a_metric_s_unit_is_with_its_column(study: wattune.Study) -> None:
    schema = study.metrics().schema
    for name in METRICS:
        field = schema.field(name)
        assert field.type == pa.float64() and field.metadata[b"unit"].decode() == (unit_of(name) or "")
    assert schema.field("node_device_power_peak_1s_w").metadata == {b"unit": b"W", b"better": b"lower"}


def test_pandas_gets_it_with_one_call(study: wattune.Study) -> None:
    frame = study.metrics().to_pandas()
    measured = frame[frame.status == "completed"].set_index("label")
    assert sorted(measured.index) == ["dp4 mbs1 overlap=grad_param", "tp2 pp2 mbs1"]
    assert measured.loc["dp4 mbs1 overlap=grad_param", "device_power_mean_w"] > 100
    assert frame[frame.status == "out_of_memory"].tokens_per_s.isna().all()


def test_telemetry_is_read_for_all_trials_for_one_and_for_some_columns(study: wattune.Study) -> None:
    ring = study.telemetry("ring")
    assert ring.column_names[:2] == ["trial", "simulated"] and {"node", "device", "power_w"} <= {*ring.column_names}
    by_trial = dict(zip(*(column.to_pylist() for column in ring["trial"].value_counts().flatten()), strict=True))
    assert len(by_trial) == 2 and not any(ring["simulated"].to_pylist())
    name = min(by_trial)
    own = study.telemetry("ring", trial_id=name[:6], columns=["device", "power_w"])
    assert own.column_names == ["device", "power_w"] and own.num_rows == by_trial[name]
    assert pc.max(own["power_w"]).as_py() > 100
    assert study.dataset("ring").count_rows() == ring.num_rows
    assert own.to_pandas().power_w.mean() > 50


@pytest.mark.parametrize(
    ("tier", "columns", "said"),
    [
        ("rings", None, '"rings" is no table of a trial; did you mean "ring"'),
        ("ring", ["powr_w"], '"powr_w" is not a column of ring; did you mean "power_w"'),
        ("nvlink", None, "nvlink"),
    ],
)
def test_a_table_or_column_that_is_not_there_is_one_message(
    study: wattune.Study, tier: str, columns: list[str] | None, said: str
) -> None:
    with pytest.raises(wattune.WattuneError, match=said):
        study.telemetry(tier, columns=columns)


def test_one_damaged_trial_costs_itself_alone(tmp_path: Path) -> None:
    study = wattune.load_study(make_study(tmp_path).path)
    first, second = sorted(trial.path for trial in study.trials() if (trial.path / "telemetry").is_dir())
    whole = study.telemetry("ring")
    (ring,) = (first / "telemetry").glob("*/ring.parquet")
    content = ring.read_bytes()
    ring.write_bytes(content[:2000] + bytes([content[2000] ^ 0x55]) + content[2001:])
    with pytest.warns(UserWarning, match=rf"ring tables without 1 damaged trial\(s\): {first.name}: .*digest"):
        dataset = study.dataset("ring")
    with pytest.warns(UserWarning, match=first.name) as warned:
        left = study.telemetry("ring")
    assert Path(warned[0].filename).name == Path(__file__).name
    assert pc.unique(left["trial"]).to_pylist() == [second.name] and dataset.count_rows() == left.num_rows
    assert left.equals(whole.filter(pc.field("trial") == second.name)), "the other trial's rows are as they were"
    assert first.name in left.schema.metadata[b"wattune.unreadable"].decode()
    assert study.metrics().num_rows == 3, "its metrics were not damaged"
    with pytest.raises(wattune.WattuneError, match=first.name):
        study.telemetry("ring", trial_id=first.name[:8])
    ring.write_bytes(b"PAR1 and no more")
    (other,) = (second / "telemetry").glob("*/ring.parquet")
    other.unlink()
    other.mkdir()
    with pytest.raises(wattune.WattuneError, match="a ring table cannot be read"):
        study.telemetry("ring")


def test_files_that_are_damaged_are_errors_of_wattune(tmp_path: Path) -> None:
    study = wattune.load_study(make_study(tmp_path).path)
    (first, *_) = [trial for trial in study.trials() if trial.result.metrics]
    (first.path / "run.json").write_text("{")
    table = study.metrics()
    assert table.num_rows == 2
    assert first.path.name in table.schema.metadata[b"wattune.unreadable"].decode()
    (study.path / "study.yaml").write_text("- a")
    with pytest.raises(wattune.WattuneError, match="holds no search space"):
        _ = study.space


def test_a_figure_that_is_no_number_was_not_measured(tmp_path: Path) -> None:
    study = wattune.load_study(make_study(tmp_path).path)
    trial = study.trials()[0]
    path = trial.path / "run.json"
    text = json.dumps(json.loads(path.read_text()) | {"metrics": {"tokens_per_s": float("nan"), "mfu_frac": 0.5}})
    path.write_text(text)  # as somebody may edit it, who takes it as it is
    assert accept(trial.path) == ("run.json",)
    row = study.metrics().to_pylist()[0]
    assert row["tokens_per_s"] is None and row["mfu_frac"] == 0.5


def test_repeats_of_other_sizes_have_other_labels(tmp_path: Path) -> None:
    study = StudyFolder.create(tmp_path, "sizes", {"study": "sizes"})
    long = replace(SPEC, workload=replace(SPEC.workload, seq_len=2 * SPEC.workload.seq_len))
    for spec in (SPEC, long):
        store_run(study, spec, replace(result_of(), trial_id=spec.trial_id))
    labels = wattune.load_study("sizes", storage=str(tmp_path)).metrics()["label"].to_pylist()
    assert sorted(labels) == sorted(f"{one.label} seq{one.workload.seq_len}" for one in (SPEC, long))

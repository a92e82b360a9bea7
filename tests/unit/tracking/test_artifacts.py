"""A storage that was copied: its runs' files are the copy's own, and the original stays as it is."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from study_files import contents
from tracked_trials import DOCUMENT, folder_of, result_of, runs_of, spec_of

from wattune.errors import TrackingError
from wattune.tracking.locations import ARTIFACTS
from wattune.tracking.reader import read_study
from wattune.tracking.store import default_uri, sqlite_file
from wattune.tracking.tracker import Tracker

RANKING = {
    name: [] for name in ("feasible", "undecided", "behind", "infeasible", "unknown", "burst", "interrupted", "failed")
}
RANKING |= {"note": "", "simulated": False}


def client_of(uri: str, store: Path) -> Any:
    """Loads MLflow where a test asks, not where every process of tests collects this file."""
    from wattune.tracking.artifacts import BesideClient

    return BesideClient(uri, store)


def copied(uri: str, tmp_path: Path) -> tuple[Path, str]:
    original = sqlite_file(uri).parent
    shutil.copytree(original, tmp_path / "copy")
    return tmp_path / "copy", default_uri(tmp_path / "copy")


def test_what_a_copy_sends_stays_in_the_copy(tracker, tmp_path):
    spec = spec_of()
    sent = [(spec, result_of(spec))]
    tracker.log_trial(*sent[0], folder_of(tmp_path / "trials", *sent[0]))
    tracker.log_study(DOCUMENT, RANKING, None, sent)
    original = sqlite_file(tracker.uri).parent
    folder, uri = copied(tracker.uri, tmp_path)
    before = contents(original)

    copy = Tracker(uri, tracker.study_name)
    assert read_study(uri, tracker.study_name)[0] == sent
    second = spec, result_of(spec, repeat=1)
    assert copy.log_trial(*second, folder_of(tmp_path / "trials", *second))
    copy.log_study(DOCUMENT, RANKING, None, [*sent, second])
    assert contents(original) == before, "the store and every artifact of the original"

    client = client_of(uri, folder / "mlflow.db")
    runs = runs_of(client, copy)
    assert {run.info.artifact_uri.split("/")[0] for run in runs} == {"mlflow-artifacts:"}
    for run in runs:
        inside = folder / ARTIFACTS / copy.study_name / run.info.run_id / "artifacts"
        assert {entry.path for entry in client.list_artifacts(run.info.run_id)} >= {"spec.json", "spans.parquet"}
        assert (inside / "telemetry" / "node0" / "slow.parquet").is_file()
    shutil.rmtree(original / ARTIFACTS / tracker.study_name)
    assert len(read_study(uri, tracker.study_name)[0]) == 2, "without the original"


def test_a_moved_storage_reads_and_writes_where_it_is_now(tracker, client, tmp_path):
    spec = spec_of()
    tracker.log_trial(spec, result_of(spec), folder_of(tmp_path / "trials", spec, result_of(spec)))
    (run,) = runs_of(client, tracker)
    folder, uri = copied(tracker.uri, tmp_path)
    moved = client_of(uri, folder / "mlflow.db")
    path = Path(moved.download_artifacts(run.info.run_id, "telemetry/node0/manifest.json", str(tmp_path)))
    assert path == tmp_path / "telemetry/node0/manifest.json" and path.is_file()
    assert Path(moved.download_artifacts(run.info.run_id, "telemetry")).is_relative_to(folder)
    assert moved.list_artifacts(run.info.run_id, "none") == []
    with pytest.raises(TrackingError, match=r"copy mlartifacts together with mlflow\.db"):
        moved.download_artifacts(run.info.run_id, "none.json")


@pytest.mark.parametrize("path", ["../../../stolen", "/etc", "a/../../b"])
def test_no_path_leads_out_of_a_run(tracker, client, tmp_path, path):
    spec = spec_of()
    tracker.log_trial(spec, result_of(spec), tmp_path / "none")
    (run,) = runs_of(client, tracker)
    (tmp_path / "file").write_text("x")
    for reach in (
        lambda: client.log_artifact(run.info.run_id, str(tmp_path / "file"), path),
        lambda: client.list_artifacts(run.info.run_id, path),
        lambda: client.download_artifacts(run.info.run_id, path),
    ):
        with pytest.raises(TrackingError, match="leads out of its run"):
            reach()


def test_a_place_that_the_user_named_stays_the_users(uri, tmp_path):
    root = tmp_path / "own"
    tracker = Tracker(uri, f"own-{os.getpid()}")
    client = client_of(uri, sqlite_file(uri))
    client.create_experiment(tracker.study_name, artifact_location=root.as_uri())
    spec = spec_of()
    tracker.log_trial(spec, result_of(spec), folder_of(tmp_path / "trials", spec, result_of(spec)))
    (run,) = runs_of(client, tracker)
    assert {entry.path for entry in client.list_artifacts(run.info.run_id)} >= {"spec.json"}
    read = Path(client.download_artifacts(run.info.run_id, "spec.json", str(tmp_path))).read_bytes()
    assert [path.read_bytes() for path in root.rglob("spec.json")] == [read]

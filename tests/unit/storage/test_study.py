"""The study folder: whole files or none, one runner, and a study that grows."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from specs import made_run, store_run, trial_spec

from wattune.errors import PlanError, SpaceError
from wattune.run import RunStatus
from wattune.storage.digests import with_digest
from wattune.storage.study import StudyFolder, check_study_name

DOCUMENT = {
    "study": "x",
    "space": {"tp": [1, 2]},
    "search": {"num_trials": 4, "seed": 0},
    "measure": {"timeout_s": 60.0},
}
SPEC = trial_spec(on="1x1 cpu", seq_len=128, batch=8, dtype="fp32")
RESULT = made_run(SPEC, metrics={"step_time_s": 0.5}, tags={"engine": "torch"})


@pytest.fixture
def study(tmp_path):
    return StudyFolder.create(tmp_path, "x", DOCUMENT)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/abs", "-x", ".x", "a b", "a\n", "x" * 101, "recordings", "é"]
)
def test_a_name_that_is_no_folder_of_the_storage_is_refused(tmp_path, name):
    with pytest.raises(SpaceError, match="cannot be a folder of the storage"):
        StudyFolder.create(tmp_path, name, DOCUMENT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x", "moe_ep_h200x4", "A-1.b", "9" * 100])
def test_a_plain_name_is_a_folder(name):
    assert check_study_name(name) == name


def test_a_space_that_contradicts_results_is_refused_with_every_contradiction(study, tmp_path):
    other = {**DOCUMENT, "cooling": "air", "engine_room": {"floor": 2}, "space": {"tp": [4]}}
    with pytest.raises(SpaceError) as caught:
        StudyFolder.create(tmp_path, "x", other)
    lines = [line.strip().partition(";")[0] for line in str(caught.value).splitlines()[1:]]
    assert lines == ["cooling: stored nothing, given air", "engine_room: stored nothing, given floor=2"]
    assert study.document() == DOCUMENT and study.space().number == 1


def test_a_study_that_is_not_there_names_those_that_are(study, tmp_path):
    with pytest.raises(PlanError, match=r'no study "y" in .*, it holds: x; give a name'):
        StudyFolder.open("y", tmp_path)
    with pytest.raises(PlanError, match="it holds none"):
        StudyFolder.open("y", tmp_path / "empty")


def test_trials_are_read_back_as_they_were_written(study):
    failed = replace(RESULT, repeat=1, status=RunStatus.OUT_OF_MEMORY, reason="rank 0", metrics={})
    for result in (RESULT, failed):
        folder = study.trial(SPEC.trial_id, result.repeat)
        folder.write_spec(SPEC)
        assert folder.result() is None
        folder.write_result(result)
    study.trial("0" * 12, 0).write_spec(SPEC)
    assert study.results() == [(SPEC, RESULT), (SPEC, failed)]
    assert len(study.trials()) == 3


@pytest.mark.parametrize(
    "damage",
    [
        *('{"metrics"', "[]", {"quality": "great"}, {"tags": []}, {"start_wall_ns": "noon"}, {"new": 1}),
        *({name: ["a"]} for name in ("metrics", "trial_id", "repeat", "status", "numbers", "recorded", "prediction")),
    ],
    ids=str,
)
def test_a_trial_that_cannot_be_read_takes_no_other_with_it(study, damage):
    for repeat in (0, 1):
        folder = store_run(study, SPEC, replace(RESULT, repeat=repeat))
    content = damage.encode() if isinstance(damage, str) else with_digest(RESULT.to_json() | damage)
    (folder.path / "run.json").write_bytes(content)
    results, unreadable = study.finished()
    assert results == [(SPEC, RESULT)]
    ((lost, why),) = unreadable.items()
    assert lost == f"{SPEC.trial_id}-1" and why.startswith(f"{folder.path}: no trial of this version")
    with pytest.raises(PlanError, match="move the folder out"):
        folder.result()
    shutil.rmtree(study.trial(SPEC.trial_id, 0).path)
    with pytest.raises(PlanError, match=folder.path.name):
        study.finished()


def test_a_folder_without_a_readable_specification_is_named(study):
    folder = study.trial(SPEC.trial_id, 0)
    for content in (None, "{", "{}", "[]", '{"plan": 3}'):
        if content is not None:
            folder.path.mkdir(parents=True, exist_ok=True)
            (folder.path / "spec.json").write_text(content)
        with pytest.raises(PlanError, match=SPEC.trial_id):
            folder.spec()


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_result(study, monkeypatch, failing):
    folder = store_run(study, SPEC, RESULT)

    def disk_full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if failing == "fsync" else (Path, "replace")), disk_full)
    with pytest.raises(OSError, match="No space"):
        folder.write_result(replace(RESULT, status=RunStatus.CRASHED, reason="later"))
    assert folder.result() == RESULT
    assert study.results() == [(SPEC, RESULT)]


@pytest.mark.parametrize("error", [None, errno.EPERM, errno.ENOTSUP], ids=["links", "no_links", "not_supported"])
def test_a_result_that_is_there_is_kept_and_no_part_of_another_stays(study, monkeypatch, error):
    def refuse(*_):
        raise OSError(error, os.strerror(error))

    if error is not None:
        monkeypatch.setattr(os, "link", refuse)
    folder = study.trial(SPEC.trial_id, 0)
    stopped = replace(RESULT, status=RunStatus.INTERRUPTED)
    assert folder.keep_result(stopped) == stopped == folder.result()
    assert folder.keep_result(RESULT) == stopped == folder.result()
    assert [path.name for path in folder.path.iterdir()] == ["run.json"]


def test_a_result_that_comes_while_another_is_written_is_kept(study, monkeypatch):
    folder, sync = study.trial(SPEC.trial_id, 0), os.fsync

    def arrives(file):
        monkeypatch.setattr(os, "fsync", sync)
        (folder.path / "other").write_bytes(with_digest(RESULT.to_json()))
        (folder.path / "other").replace(folder.path / "run.json")
        sync(file)

    monkeypatch.setattr(os, "fsync", arrives)
    assert folder.keep_result(replace(RESULT, status=RunStatus.INTERRUPTED)) == RESULT == folder.result()


HOLDER = """
import sys, time
from pathlib import Path
from wattune.storage.digests import with_digest
from wattune.storage.study import StudyFolder
with StudyFolder(Path(sys.argv[1])).running():
    print("held", flush=True)
    time.sleep(60)
"""


def started(script, study):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "platform")}
    return subprocess.Popen(
        [sys.executable, "-c", script, str(study.path)], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_a_study_has_one_runner_and_its_lock_dies_with_it(study):
    with started(HOLDER, study) as holder:
        assert holder.stdout.readline().strip() == "held"
        with pytest.raises(PlanError, match="is being run by another process"), study.running():
            pass
        holder.send_signal(signal.SIGKILL)
    with study.running(), pytest.raises(PlanError, match="another process"), study.running():
        pass
    with study.running():
        pass


def test_a_file_system_without_locks_is_not_called_another_runner(study, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(PlanError, match="has no locks: Function not implemented; mount it with flock"), study.running():
        pass


def test_candidates_ranking_and_report_are_read_back(study):
    assert study.candidates() == []
    rows = [{"status": "kept", "trial_id": "a", "rule": "", "reason": "", "config": json.dumps({"tp": 1})}]
    study.commit(study.document(), rows)
    assert study.candidates() == [{**rows[0], "space": 1}]
    assert study.write_report("<html></html>") == study.report_path
    assert study.report_path.read_text() == "<html></html>"
    study.write_ranking(pa.table({"rank": [1]}))
    assert (study.path / "ranking.parquet").exists()
    assert not [path for path in study.path.rglob(".*") if path.name != ".running"]

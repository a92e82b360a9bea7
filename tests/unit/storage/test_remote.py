"""Studies at a URL: what is sent, what is fetched, and what a store that is gone does."""

import threading
import zipfile
from pathlib import Path

import fsspec
import pytest
import yaml
from study_files import DOCUMENT, SPEC, contents, measured, result_of

from wattune.access import RETRY_AFTER_S, Access
from wattune.errors import PlanError, SpaceError, TrackingError
from wattune.run import RunStatus
from wattune.storage.format import FORMAT
from wattune.storage.remote import RemoteStorage
from wattune.storage.study import StudyFolder


@pytest.fixture
def here(tmp_path: Path) -> StudyFolder:
    return StudyFolder.create(tmp_path / "here", "mine", DOCUMENT)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "file":
        yield (tmp_path / "shared mount" / "studies").as_uri()
    else:
        yield f"memory://{tmp_path.name}/studies/"
        fsspec.filesystem("memory").store.clear()


def test_what_is_sent_comes_back_the_same_elsewhere(url: str, here: StudyFolder, tmp_path: Path) -> None:
    remote = RemoteStorage(url)
    folder = measured(here, result_of())
    here.write_report("<html>")
    assert remote.send_trial("mine", folder) is True
    remote.send_study(here)
    assert remote.studies() == ["mine"]

    there = RemoteStorage(url).fetch_study("mine", tmp_path / "there", whole=True)
    assert contents(there.path) == contents(here.path)
    assert there.results() == here.results()


def test_a_ranking_needs_no_telemetry_and_what_is_missing_comes_later(url, here, tmp_path) -> None:
    remote = RemoteStorage(url)
    remote.send_trial("mine", measured(here, result_of()))
    remote.send_study(here)
    there = remote.fetch_study("mine", tmp_path / "there")
    assert set(contents(there.trial(SPEC.trial_id, 0).path)) == {"spec.json", "run.json"}
    remote.fetch_study("mine", tmp_path / "there", whole=True)
    assert contents(there.path) == contents(here.path)


def test_a_trial_is_sent_once_and_an_unfinished_one_not_at_all(url: str, here: StudyFolder) -> None:
    remote = RemoteStorage(url)
    folder = measured(here, result_of())
    assert [remote.send_trial("mine", folder) for _ in range(3)] == [True, False, False]
    assert remote.send_trial("mine", measured(here, result_of(RunStatus.INTERRUPTED, repeat=1))) is False
    begun = here.trial(SPEC.trial_id, 2)
    begun.write_spec(SPEC)
    assert remote.send_trial("mine", begun) is False


def test_another_measurement_of_a_trial_is_never_written_over(url: str, here: StudyFolder, tmp_path: Path) -> None:
    remote = RemoteStorage(url)
    remote.send_study(here)
    remote.send_trial("mine", measured(here, result_of(tokens_per_s=1.0)))
    elsewhere = StudyFolder.create(tmp_path / "elsewhere", "mine", DOCUMENT)
    with pytest.raises(TrackingError, match="another measurement"):
        remote.send_trial("mine", measured(elsewhere, result_of(tokens_per_s=2.0)))
    # Nor is the local one by what is in the store.
    RemoteStorage(url).fetch_study("mine", tmp_path / "elsewhere", whole=True)
    assert elsewhere.results()[0][1].metrics == {"tokens_per_s": 2.0}


def test_an_upload_that_was_cut_short_is_made_whole(url: str, here: StudyFolder, tmp_path: Path) -> None:
    remote = RemoteStorage(url)
    remote.send_study(here)
    folder = measured(here, result_of())
    fs, root = fsspec.core.url_to_fs(f"{url.rstrip('/')}/mine/trials/{folder.path.name}", auto_mkdir=True)
    fs.pipe_file(f"{root}/telemetry/node9/ring.parquet", b"of a node this attempt does not have")
    fs.pipe_file(f"{root}/run.json", b'{"trial_id": ')
    assert remote.send_trial("mine", folder) is True
    there = remote.fetch_study("mine", tmp_path / "there", whole=True)
    assert contents(there.path) == contents(here.path)


def test_results_of_earlier_attempts_travel_too_and_make_no_trial_finished(url, here, tmp_path) -> None:
    remote = RemoteStorage(url)
    remote.send_study(here)
    folder = measured(here, result_of(RunStatus.CRASHED))
    folder.set_aside()
    remote.send_trial("mine", measured(here, result_of()))
    there = remote.fetch_study("mine", tmp_path / "there", whole=True)
    assert contents(there.path) == contents(here.path)
    assert [one.status for one in there.trial(SPEC.trial_id, 0).attempts()] == [RunStatus.CRASHED]

    fs, root = fsspec.core.url_to_fs(f"{url.rstrip('/')}/mine/trials/{folder.path.name}")
    fs.rm_file(f"{root}/run.json")  # as where the upload was cut short
    other = StudyFolder.create(tmp_path / "other", "mine", DOCUMENT)
    other.trial(SPEC.trial_id, 0).write_spec(SPEC)
    other.trial(SPEC.trial_id, 0).write_error("what it had so far")
    remote.fetch_study("mine", tmp_path / "other", whole=True)
    assert set(contents(other.trial(SPEC.trial_id, 0).path)) == {"spec.json", "error.txt"}


def test_a_trial_that_was_tried_again_elsewhere_gives_way_and_keeps_what_it_measured(url, here, tmp_path) -> None:
    remote, crashed = RemoteStorage(url), result_of(RunStatus.CRASHED)
    remote.send_study(here)
    failed = measured(here, crashed)
    (failed.path / "telemetry" / "node0" / "ring.parquet").write_text("of the first attempt")
    failed.write_result(crashed)
    assert remote.send_trial("mine", failed)
    other = RemoteStorage(url).fetch_study("mine", tmp_path / "other")
    again = other.trial(SPEC.trial_id, 0)
    again.set_aside()
    assert remote.send_trial("mine", measured(other, result_of()))

    RemoteStorage(url).fetch_study("mine", here.path.parent)
    assert failed.result() == again.result() and failed.result().status is RunStatus.COMPLETED
    assert [one.status for one in failed.attempts()] == [RunStatus.CRASHED]
    kept = failed.path / "attempts" / "1" / "telemetry" / "node0" / "ring.parquet"
    assert kept.read_text() == "of the first attempt"
    RemoteStorage(url).fetch_study("mine", here.path.parent)
    assert len(failed.attempts()) == 1, "nothing gives way twice"
    assert not remote.send_trial("mine", failed)


def test_a_result_here_that_cannot_be_read_is_left_and_the_others_are_fetched(url, here, tmp_path) -> None:
    remote = RemoteStorage(url)
    remote.send_study(here)
    for repeat in (0, 1):
        remote.send_trial("mine", measured(here, result_of(repeat=repeat)))
    other = StudyFolder.create(tmp_path / "other", "mine", DOCUMENT)
    broken = measured(other, result_of())
    (broken.path / "run.json").write_text("{")
    before = contents(broken.path)
    remote.fetch_study("mine", tmp_path / "other")
    assert contents(broken.path) == before
    results, unreadable = other.finished()
    assert [result.repeat for _, result in results] == [1]
    assert list(unreadable) == [broken.path.name]


def test_a_study_of_another_space_is_an_error_that_shows_the_difference(url, here, tmp_path) -> None:
    remote = RemoteStorage(url)
    remote.send_study(here)
    other = StudyFolder.create(tmp_path / "other", "mine", DOCUMENT | {"objective": "minimize step_time_s"})
    with pytest.raises(SpaceError, match="objective: minimize step_time_s -> maximize tokens_per_s"):
        remote.fetch_study("mine", tmp_path / "other")
    with pytest.raises(SpaceError, match="both are at space 1"):
        remote.send_study(other)
    fs, root = fsspec.core.url_to_fs(f"{url.rstrip('/')}/mine/study.yaml")
    written = yaml.safe_load(fs.cat_file(root))
    assert written.pop("record")["space"] == 1 and written == {"format": FORMAT, **DOCUMENT}


def test_a_study_that_grew_on_another_machine_is_fetched_with_every_space(url, here, tmp_path) -> None:
    remote, grown = RemoteStorage(url), DOCUMENT | {"objective": "minimize step_time_s"}
    here.commit(here.document(), [{"status": "kept", "trial_id": "a"}])
    remote.send_study(here)
    there = remote.fetch_study("mine", tmp_path / "there")
    there.commit(grown, [{"status": "kept", "trial_id": "a"}, {"status": "kept", "trial_id": "b"}])
    remote.send_study(there)
    with pytest.raises(SpaceError, match=r"has grown in .* meanwhile; run it again"):
        remote.send_study(here)
    assert remote.fetch_study("mine", here.path.parent).space() == there.space()
    assert [one.document for one in here.spaces()] == [DOCUMENT, grown]
    assert {row["trial_id"]: row["space"] for row in here.candidates()} == {"a": 1, "b": 2}
    remote.send_study(here)


def test_a_study_that_is_not_begun_sends_and_fetches_nothing(url, tmp_path) -> None:
    remote, study = RemoteStorage(url), StudyFolder(tmp_path / "new" / "mine")
    remote.send_study(study)
    assert remote.studies() == []
    assert not remote.fetch_study("mine", study.path.parent, may_lack=True).exists


def test_a_study_that_is_nowhere_is_named_with_those_there_are(url: str, here: StudyFolder, tmp_path: Path) -> None:
    remote = RemoteStorage(url)
    remote.send_study(here)
    with pytest.raises(PlanError, match=r'no study "yours" in .*, which holds: mine'):
        remote.fetch_study("yours", tmp_path / "there")
    assert not (tmp_path / "there" / "yours").exists()
    assert remote.fetch_study("mine", here.path.parent).path == here.path


def test_a_recording_and_a_single_trial_travel_too(url: str, here: StudyFolder, tmp_path: Path) -> None:
    remote = RemoteStorage(url)
    folder = measured(here, result_of())
    remote.send_trial("mine", folder)
    RemoteStorage(f"{url.rstrip('/')}/mine/trials/{folder.path.name}").fetch_folder("", tmp_path / "one")
    assert contents(tmp_path / "one") == contents(folder.path)
    remote.send_recording(folder.path)
    remote.fetch_folder(f"recordings/{folder.path.name}", tmp_path / "two")
    assert contents(tmp_path / "two") == contents(folder.path)
    with pytest.raises(PlanError, match="no folder"):
        remote.fetch_folder("recordings/none", tmp_path / "three")


@pytest.mark.parametrize(
    ("url", "said"), [("s4://bucket", "such as s3"), ("gss://a", 'did you mean "gs"'), ("dropbox://x", "install")]
)
def test_a_url_of_no_known_store_is_said_before_anything_runs(url: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        RemoteStorage(url)


def test_a_password_or_token_is_in_no_message() -> None:
    assert RemoteStorage("ftp://me:secret@host/studies").shown == "ftp://me:***@host/studies"
    assert RemoteStorage("ftp://127.0.0.1:1/x").shown == "ftp://127.0.0.1:1/x"
    assert RemoteStorage("s3://key:secret@bucket/x").shown == "s3://key:***@bucket/x"


def test_a_dead_store_costs_one_failure_a_minute(here: StudyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    remote = RemoteStorage("ftp://127.0.0.1:1/studies", clock=lambda: now_s)
    tried = []
    really = remote._open
    monkeypatch.setattr(remote, "_open", lambda: tried.append(1) or really())
    folder = measured(here, result_of())
    for expected in ("sync", "not tried again"):
        with pytest.raises(TrackingError, match=expected):
            remote.send_trial("mine", folder)
    assert len(tried) == 1
    now_s += RETRY_AFTER_S + 1
    with pytest.raises(TrackingError, match="sync"):
        remote.send_trial("mine", folder)
    assert len(tried) == 2


def test_a_store_that_hangs_is_given_up(here: StudyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Access, "answer_s", 0.2)
    remote = RemoteStorage("memory://hangs")
    release, answered = threading.Event(), []
    monkeypatch.setattr(remote, "_open", lambda: answered.append(release.wait(60)))
    with pytest.raises(TrackingError, match="no answer within"):
        remote.send_study(here)
    assert answered == []
    release.set()


def test_a_store_without_permission_says_so(here: StudyFolder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(TrackingError, match=r"cannot be reached .*[Dd]irectory"):
        RemoteStorage((tmp_path / "file").as_uri()).send_study(here)


def test_a_name_from_the_store_stays_inside_the_study(here: StudyFolder, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    remote = RemoteStorage(url)
    remote.send_study(here)
    fs = fsspec.filesystem("memory")
    fs.pipe_file(f"/{tmp_path.name}/mine/../../escaped.txt", b"out")
    there = remote.fetch_study("mine", tmp_path / "deep" / "there", whole=True)
    assert set(contents(there.path)) == {"study.yaml", "space.1.yaml"}
    assert not list(tmp_path.rglob("escaped.txt"))


def test_a_zip_whose_names_lead_out_of_it_writes_nothing_outside(here: StudyFolder, tmp_path: Path) -> None:
    """`zip::` makes any archive that somebody sends a store (`zip slip`)."""
    outside = tmp_path / "target"
    with zipfile.ZipFile(tmp_path / "sent.zip", "w") as archive:
        for path in (path for path in here.path.rglob("*") if path.is_file()):
            archive.write(path, f"mine/{path.relative_to(here.path)}")
        for name in ("mine/../../escaped.txt", "mine/trials/../../../escaped.txt", f"mine/{outside}/escaped.txt"):
            archive.writestr(name, "out")
    deep = tmp_path / "deep"
    remote = RemoteStorage(f"zip::{(tmp_path / 'sent.zip').as_uri()}")
    there = remote.fetch_study("mine", deep / "there", whole=True)
    assert (there.path / "study.yaml").read_bytes() == (here.path / "study.yaml").read_bytes()
    escaped = [path for path in tmp_path.rglob("escaped.txt") if not path.is_relative_to(there.path)]
    assert escaped == [] and not outside.exists()


def test_links_in_a_trial_send_nothing_from_elsewhere(url: str, here: StudyFolder, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    folder = measured(here, result_of())
    (folder.path / "key").symlink_to(tmp_path / "key")
    elsewhere = here.path / "trials" / "000000000000-0"
    elsewhere.symlink_to(folder.path)
    assert [trial.path for trial in here.trials()] == [folder.path]
    assert len(here.results()) == 1
    remote = RemoteStorage(url)
    remote.send_study(here)
    remote.send_trial("mine", folder)
    there = remote.fetch_study("mine", tmp_path / "there", whole=True)
    assert there.trials() and not list(there.path.rglob("key"))

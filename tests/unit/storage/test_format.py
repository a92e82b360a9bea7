"""The format that every file says: this one is read, another one is told in a line, and damage is damage."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from small_study import make_study

from wattune.errors import WattuneError
from wattune.recording.recording import run_of
from wattune.run import Recorded, Run, RunStatus
from wattune.storage.digests import with_digest, with_digest_line
from wattune.storage.format import FORMAT, FORMAT_TAG, FormatError, check_format
from wattune.storage.measured import RecordingFolder
from wattune.storage.study import StudyFolder, TrialFolder

OLD = "written before 0.1.0; measure again, or read it with commit b47a596"
NEW = f"format 5, written by a newer wattune; this one reads format {FORMAT}: install the newer one"


@pytest.fixture
def study(tmp_path: Path) -> StudyFolder:
    return make_study(tmp_path)


def measured(study: StudyFolder) -> TrialFolder:
    return next(folder for folder in study.trials() if folder.spans() is not None)


def test_this_format_is_read() -> None:
    check_format(FORMAT)
    check_format(str(FORMAT))


@pytest.mark.parametrize("found", [None, 0, 1, 2, 3, "3"])
def test_an_earlier_format_is_told_with_what_to_do(found: object) -> None:
    with pytest.raises(FormatError, match="^" + OLD.replace(".", r"\.")):
        check_format(found)


def test_a_later_format_is_told_with_what_to_do() -> None:
    with pytest.raises(FormatError) as caught:
        check_format(5)
    assert str(caught.value) == NEW


@pytest.mark.parametrize("found", [-1, 4.0, True, "four", [4], {}, "\u0664"])
def test_what_is_no_format_is_damage(found: object) -> None:
    with pytest.raises(FormatError, match="allowed: 4"):
        check_format(found)


def test_a_refused_format_is_shown_in_a_line_of_bounded_length() -> None:
    for found in ("9" * 10_000, "x" * 10_000):
        with pytest.raises(FormatError) as caught:
            check_format(found)
        assert len(str(caught.value)) < 200


def every_json(study: StudyFolder) -> list[Path]:
    return [path for path in study.path.rglob("*.json") if path.is_file()]


def test_every_file_of_a_study_says_its_format(study: StudyFolder) -> None:
    assert yaml.safe_load((study.path / "study.yaml").read_text())["format"] == FORMAT
    said = {path.name: json.loads(path.read_text())["format"] for path in every_json(study)}
    assert {"spec.json", "run.json", "manifest.json"} <= set(said) and set(said.values()) == {FORMAT}
    tables = {path.name: pq.read_schema(path).metadata[FORMAT_TAG.encode()] for path in study.path.rglob("*.parquet")}
    assert {"spans.parquet", "ring.parquet"} <= set(tables) and set(tables.values()) == {b"4"}


def as_format(path: Path, number: int | None) -> None:
    """Writes a file as a wattune of another format would: whole, with digests that agree."""
    if path.suffix == ".parquet":
        table = pq.read_table(path, partitioning=None)
        pq.write_table(table.replace_schema_metadata({FORMAT_TAG: str(number)} if number is not None else None), path)
        return
    data = yaml.safe_load(path.read_text())
    data.pop("digest", None)
    data = {name: value for name, value in data.items() if name != "format"}
    data |= {} if number is None else {"format": number}
    if path.suffix == ".yaml":
        path.write_bytes(with_digest_line(yaml.safe_dump(data).encode()))
        return
    text = json.dumps(data)
    if path.name == "run.json":
        text = with_digest(data).decode().replace('"format": 4,', f'"format": {number},' if number is not None else "")
        body = text[text.index('",') :]
        import hashlib

        text = '{\n "digest": "' + hashlib.sha256(body.encode()).hexdigest() + body
    path.write_text(text)


READERS: dict[str, tuple[str, Callable[[StudyFolder, TrialFolder], Any]]] = {
    "study.yaml": ("study.yaml", lambda study, _: study.document()),
    "spec.json": ("TRIAL/spec.json", lambda _, trial: trial.spec()),
    "run.json": ("TRIAL/run.json", lambda _, trial: trial.result()),
    "manifest.json": ("TRIAL/telemetry/node0/manifest.json", lambda _, trial: trial.manifests()),
    "spans.parquet": ("TRIAL/spans.parquet", lambda _, trial: trial.spans()),
    "ring.parquet": ("TRIAL/telemetry/node0/ring.parquet", lambda _, trial: trial.telemetry()),
    "ring.parquet by device": ("TRIAL/telemetry/node0/ring.parquet", lambda _, trial: trial.stored()),
}


@pytest.mark.parametrize(("number", "said"), [(None, OLD), (3, OLD), (5, NEW)])
@pytest.mark.parametrize("kind", READERS)
def test_a_file_of_another_format_is_one_line_that_names_it(
    study: StudyFolder, kind: str, number: int | None, said: str
) -> None:
    name, read = READERS[kind]
    trial = measured(study)
    as_format(study.path / name.replace("TRIAL", f"trials/{trial.path.name}"), number)
    with pytest.raises(WattuneError) as caught:
        read(study, trial)
    text = str(caught.value)
    assert said in text and str(study.path) in text and "\n" not in text


def test_a_result_without_its_digest_is_damage_and_not_age(study: StudyFolder) -> None:
    trial = measured(study)
    data = json.loads((trial.path / "run.json").read_text())
    data["metrics"]["tokens_per_s"] *= 10
    del data["digest"], data["files"]
    (trial.path / "run.json").write_text(json.dumps(data))
    results, unreadable = study.finished()
    assert trial.path.name not in {f"{one.trial_id}-{one.repeat}" for _, one in results}
    ((lost, why),) = unreadable.items()
    assert lost == trial.path.name and "it has no digest: damaged, or edited" in why


def test_a_recording_that_ended_and_has_no_digests_is_damage(tmp_path: Path) -> None:
    folder = RecordingFolder.create(tmp_path, "one")
    folder.write_facts({"node": "n0", "closed": True})
    run = Run(trial_id="one", repeat=0, status=RunStatus.COMPLETED, recorded=Recorded(command=("true",), exit_code=0))
    TrialFolder(folder.path).write_result(run)
    assert folder.check().digested and run_of(folder.path).recorded is not None
    data = json.loads((folder.path / "run.json").read_text())
    del data["digest"], data["files"]
    (folder.path / "run.json").write_text(json.dumps(data))
    for read in (folder.check, lambda: run_of(folder.path)):
        with pytest.raises(WattuneError, match="it has no digest: damaged, or edited"):
            read()

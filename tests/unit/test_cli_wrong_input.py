"""The command line on folders and files that are damaged, or that it may not use: one message, nothing half done."""

import errno
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_study import make_study

from wattune import api, cli
from wattune.calibration import run as calibration
from wattune.cli.verbs import VERBS, lines_of, load
from wattune.run import Run
from wattune.storage.digests import digests_of, with_digest
from wattune.storage.files import write_digested
from wattune.storage.study import StudyFolder, TrialFolder

Verb = Callable[..., tuple[int, str, str]]
STUDY = "dense_h200x4"


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudyFolder:
    monkeypatch.setenv("WATTUNE_STORAGE", str(tmp_path / "storage"))
    monkeypatch.chdir(tmp_path)
    return make_study(tmp_path / "storage")


def measured(study: StudyFolder) -> TrialFolder:
    return next(folder for folder in study.trials() if folder.spans() is not None)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def sealed(trial: Path, **changes: Any) -> None:
    """Changes a result, and writes the digests of all files as they are: they are judged by their content alone."""
    data = json.loads((trial / "run.json").read_text()) | changes
    write_digested(trial / "run.json", data | {"files": digests_of(trial, "run.json")})


DAMAGE: dict[str, tuple[str, str | bytes, str]] = {
    "study_empty": ("study.yaml", "", "holds no search space"),
    "study_not_yaml": ("study.yaml", "study: [", "study.yaml cannot be read"),
    "study_list": ("study.yaml", "- a", "holds no search space"),
    "study_without_objective": ("study.yaml", "format: 4\nstudy: x", "pass --objective"),
    "result_half": ("TRIAL/run.json", '{"metrics": {', "no trial of this version"),
    "spec_half": ("TRIAL/spec.json", '{"model"', "no trial of this version"),
    "candidates_half": ("candidates.parquet", b"PAR1", "candidates.parquet does not agree with its digest"),
    "kernels_no_table": ("TRIAL/kernels.parquet", b"hello", "kernels.parquet cannot be read"),
    "manifest_text": (
        "TRIAL/telemetry/node0/manifest.json",
        '{"clock_offset_ns": "1", "format": 4}',
        'clock_offset_ns: got "1"',
    ),
}
"""By kind: the file, what it holds then, and what is said by every command that reads it."""


READER = {"study": "rank", "result": "compare", "spec": "compare", "candidates": "report"}
"""A verb that reads what is damaged and cannot go on without it, by the first word of the kind; else `analyze`."""


@pytest.mark.parametrize("readers", ["one", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_study_is_one_message_for_whoever_reads_what_is_damaged(
    study: StudyFolder, wattune: Verb, store_in: Callable[[Path], str], kind: str, readers: str
) -> None:
    store_in(study.path.parent)
    name, content, said = DAMAGE[kind]
    ids = [f"{STUDY}:{folder.path.name.partition('-')[0]}" for folder in study.trials() if folder.spans() is not None]
    trial = measured(study).path
    path = trial / name.removeprefix("TRIAL/") if name.startswith("TRIAL/") else study.path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if path.name != "run.json":
        sealed(trial)
    commands = [["rank", STUDY], ["report", STUDY], ["compare", *ids], ["sync", STUDY], ["analyze", trial]]
    if readers == "one":
        commands = [one for one in commands if one[0] == READER.get(kind.partition("_")[0], "analyze")]
    refused = 0
    for command in commands:
        code, _, err = wattune(*command)
        assert code == 0 or said in err, (command, err)
        refused += code != 0
    assert refused > 0


def test_a_trial_that_cannot_be_read_is_named_and_all_others_are_ranked(study: StudyFolder, wattune: Verb) -> None:
    before = json.loads(wattune("rank", STUDY, "--json")[1])
    lost = measured(study)
    rows = [row for row in before["feasible"] + before["infeasible"] if row["trial_id"] not in lost.path.name]
    for content in (b'{"metrics": {', with_digest({}), b"[]", b"\xff\xfe", with_digest({"status": "great"})):
        (lost.path / "run.json").write_bytes(content)
        code, out, _ = wattune("rank", STUDY, "--json")
        found = json.loads(out)
        assert [row["trial_id"] for row in found["feasible"] + found["infeasible"]] == [row["trial_id"] for row in rows]
        assert code == (0 if found["feasible"] else 3)
        (named,) = found["unreadable"]
        assert named["name"] == lost.path.name and f"{lost.path}: no trial of this version" in named["reason"]
        assert "\n" not in named["reason"] and "move the folder out of the study" in named["reason"]
        for arguments in (["rank", STUDY], ["rank", STUDY, "--csv", "-"]):
            shown = " ".join(wattune(*arguments)[1].split())
            assert " ".join(named["reason"].split()) in shown, arguments
        code, out, err = wattune("analyze", lost.path)
        assert code == 0, err
        assert "memory is unknown" in " ".join(out.split()) and "mfu_frac" in out
    code, _, err = wattune("report", STUDY)
    assert code == 0, err
    assert f"{lost.path.name}: no trial of this version" in study.report_path.read_text()


@pytest.mark.parametrize("name", ["kernels.parquet", "spans.parquet", "telemetry/node0/manifest.json", "spec.json"])
def test_a_file_that_does_not_agree_with_its_digest_is_named(
    study: StudyFolder, wattune: Verb, store_in: Callable[[Path], str], name: str
) -> None:
    store_in(study.path.parent)
    trial = measured(study).path
    path = trial / name
    content = path.read_bytes() if path.exists() else (trial / "spans.parquet").read_bytes()
    path.write_bytes(content[:-9] + b"-" + content[-8:])
    code, out, err = wattune("analyze", trial)
    assert (code, out) == (1, "") and f"{name} does not agree with its digest: damaged, or edited" in err
    code, _, err = wattune("report", STUDY)
    assert code == 0, err
    assert ("does not agree" in study.report_path.read_text()) == (name != "spec.json")
    code, _, err = wattune("sync", STUDY)
    assert code != 0 and trial.name in err


@pytest.mark.parametrize("damage", ["edited", "cut", "missing", "folder"])
def test_a_table_of_combinations_that_is_damaged_is_named_and_costs_no_trial(
    study: StudyFolder, wattune: Verb, damage: str
) -> None:
    sound = json.loads(wattune("rank", STUDY, "--json")[1])
    path = study.path / "candidates.parquet"
    table = pq.read_table(path)
    path.unlink()
    if damage == "edited":  # a table like any other: only its digest tells
        pq.write_table(table.set_column(1, "status", pa.array(["x"] * table.num_rows)), path)
    elif damage == "cut":
        path.write_bytes(b"PAR1")
    elif damage == "folder":
        path.mkdir()
    code, out, err = wattune("rank", STUDY, "--json")
    found = json.loads(out)
    assert code == 0, err
    assert [row["trial_id"] for row in found["feasible"]] == [row["trial_id"] for row in sound["feasible"]]
    assert sound["space"] and found["space"] == []
    (named,) = found["unreadable"]
    assert named["name"] == "candidates.parquet" and "`wattune run` of the space writes it anew" in named["reason"]
    assert " ".join(named["reason"].split()) in " ".join(wattune("rank", STUDY)[1].split())


def test_files_edited_on_purpose_are_accepted_and_the_quality_says_so(study: StudyFolder, wattune: Verb) -> None:
    trial = measured(study)
    edit_json(trial.path / "telemetry" / "node0" / "manifest.json", sampled_by="hand")
    assert wattune("analyze", trial.path)[0] == 1
    code, out, err = wattune("analyze", trial.path, "--accept")
    assert code == 0 and "edited" in out, err
    assert "files edited on purpose: telemetry/node0/manifest.json" in " ".join(out.split())
    result = trial.result()
    assert result is not None and result.quality == "indicative" and result.quality_reasons[-1] == "edited"
    again = json.loads(wattune("analyze", trial.path, "--json")[1])
    assert "edited" in again["quality_reasons"] and again["files"]["digested"] is True
    assert wattune("analyze", trial.path, "--accept")[0] == 0
    assert trial.result() == result, "what was accepted once is not edited again"


def test_files_of_somebody_else_are_not_called_another_version(
    study: StudyFolder, wattune: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Run, "from_json", refuse)
    code, out, err = wattune("rank", STUDY)
    assert (code, out) == (2, "") and "cannot be read: Permission denied; give a study you may read" in err


def test_names_that_cannot_be_looked_for_are_exit_2(study: StudyFolder, wattune: Verb) -> None:
    for name, said in (("a" * 5000, "File name too long"), ("~nobody-of-this-machine/x", "in the home of a user")):
        code, out, err = wattune("rank", name)
        assert (code, out) == (2, "") and said in err
    (study.path / "trials").rename(study.path / "elsewhere")
    (study.path / "trials").write_text("")
    code, _, err = wattune("rank", STUDY)
    assert code == 2 and "cannot be listed: Not a directory" in err


@pytest.mark.parametrize("verb", ["run", "record", "calibrate"])
def test_storage_that_is_no_folder_is_said_before_anything_runs(
    tmp_path: Path, wattune: Verb, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    occupied, ran = tmp_path / "occupied", tmp_path / "ran"
    occupied.write_text("")
    monkeypatch.setattr(calibration, "find_devices", lambda *_: ran.touch())
    space = Path(__file__).parents[2] / "search_spaces" / "cpu_smoke.yaml"
    rest = {"run": [space, "--max-hours", 0], "record": ["--", "touch", ran], "calibrate": []}[verb]
    code, out, err = wattune(verb, "--storage", occupied, *rest)
    assert (code, out) == (2, ""), err
    assert f"cannot be written: {occupied} is not a folder" in err and "give --storage" in err
    assert not ran.exists() and occupied.read_text() == ""


def test_a_space_that_sets_devices_is_planned_and_runs_only_where_that_was_asked_for(
    tmp_path: Path, wattune: Verb, store_in: Callable[[Path], str]
) -> None:
    text = (Path(__file__).parents[2] / "search_spaces" / "cpu_smoke.yaml").read_text()
    space = tmp_path / "space.yaml"
    space.write_text(text.replace("\nspace:\n", "\nspace:\n  power_limit_w: [found, 500]\n", 1))
    assert wattune("plan", space)[0] == 0
    rest = ("--storage", tmp_path / "storage", "--max-hours", 0)
    code, out, err = wattune("run", space, *rest)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "power_limit_w: nothing is set on devices unasked; add --set-power-limits to run it" in err
    assert not (tmp_path / "storage").exists()
    store_in(tmp_path / "storage")
    assert wattune("run", space, *rest, "--set-power-limits")[0] != 2
    space.write_text(space.read_text().replace("[found, 500]", "[found, 900]"))
    code, _, err = wattune("run", space, *rest, "--set-power-limits")
    assert code == 2 and "power_limit_w=900 is outside what" in err


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 1), (errno.EROFS, 2)])
def test_a_disk_that_refuses_is_one_message_and_leaves_no_part_of_a_file(
    study: StudyFolder, wattune: Verb, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    def refuse(_file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    ended, out, err = wattune("report", STUDY)
    assert (ended, out) == (code, "")
    assert err.startswith(f"error: {study.path / 'ranking.parquet'}: {os.strerror(number)}; ")
    assert not [path.name for path in study.path.iterdir() if path.name.startswith((".report", ".ranking"))]


def test_a_fault_of_the_program_keeps_its_traceback(study: StudyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "lost")

    monkeypatch.setattr(api, "rank", lose)
    monkeypatch.setattr(sys, "argv", ["wattune", "rank", STUDY])
    with pytest.raises(FileNotFoundError, match="lost"):
        cli.main()


def test_a_store_that_is_not_there_is_not_made_by_reading(study: StudyFolder, wattune: Verb, tmp_path: Path) -> None:
    store = tmp_path / "mistyped" / "mlflow.db"
    code, out, err = wattune("rank", STUDY, "--tracking-uri", f"sqlite:///{store}")
    assert (code, out) == (1, "") and f"there is no MLflow store {store}" in err
    assert not store.parent.exists()


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_every_word_it_was_given(wattune: Verb, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    code, out, _ = wattune(verb, "--help")
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", out).split())
    assert code == 0
    command = load(verb)
    for option in command.params:
        assert " ".join((option.help or "").split()) in shown, option.name
    assert inspect.cleandoc(command.help or "").splitlines()[0] == lines_of(VERBS[verb][0])[verb]
    assert lines_of(VERBS[verb][0])[verb] in shown


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["calibrate", "--backend", "hots"], 2, 'backend "hots"'),
        (["record", "--backend", "hosts", "--", "true"], 2, 'did you mean "host"'),
        (["record", "--backend", "replay:nowhere", "--", "true"], 1, "holds telemetry of no device"),
        (["record", "--backend", "simulated:h300", "--", "true"], 2, "h300"),
        (["record", "--backend", "simulated:cpu", "--", "true"], 2, "cannot be simulated"),
        (["record", "--name", "../out", "--", "true"], 2, "../out"),
        (["record", "--", "no-such-program"], 2, "no-such-program"),
        (["record", "--storage", "s4://bucket", "--", "true"], 2, "s4://bucket"),
        (["record"], 2, "nothing to record"),
        (["record", "--seconds", "1e400", "--", "true"], 2, "--seconds"),
    ],
)
def test_what_cannot_be_recorded_is_one_message_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wattune: Verb, command: list[str], code: int, said: str
) -> None:
    monkeypatch.setenv("WATTUNE_STORAGE", str(tmp_path / "storage"))
    ended, out, err = wattune(*command)
    assert (ended, out) == (code, "") and said in err and "Traceback" not in err
    assert not list(tmp_path.glob("storage/*/*")), "neither a recording nor a calibration is begun"

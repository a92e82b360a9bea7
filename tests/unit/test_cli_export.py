"""The verb `export`: files, standard output, and wrong input."""

import csv
import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small_study import make_study


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The storage has a study, and the current folder nothing."""
    monkeypatch.setenv("WATTUNE_STORAGE", str(tmp_path / "storage"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    make_study(tmp_path / "storage")


def test_a_study_is_taken_along(wattune, tmp_path: Path) -> None:
    assert wattune("export", "dense_h200x4") == (0, "dense_h200x4.csv\n", "")
    rows = list(csv.DictReader((tmp_path / "here" / "dense_h200x4.csv").open()))
    assert len(rows) == 3
    code, out, _ = wattune("export", "dense_h200x4", "--out", "-")
    assert code == 0 and list(csv.DictReader(io.StringIO(out))) == rows
    code, out, _ = wattune(
        "export", "dense_h200x4", "--to", "parquet", "--rows", "trials", "--out", "x.parquet", "--json"
    )
    assert (code, json.loads(out)["path"]) == (0, "x.parquet")
    assert pq.read_table(tmp_path / "here" / "x.parquet")["verdict"].to_pylist() == ["feasible", "infeasible", "failed"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dense_h200x4", "--to", "xlsx"], '--to: got "xlsx"'),
        (["dense_h200x4", "--rows", "steps"], '--rows: got "steps"'),
        (["absent"], 'no study "absent"'),
        (["dense_h200x4", "--out", "no/such/folder.csv"], "cannot be written"),
        (["dense_h200x4", "--out", "-", "--json"], "both want standard output"),
    ],
)
def test_wrong_input_is_one_message_and_exit_2(wattune, tmp_path: Path, arguments: list[str], said: str) -> None:
    code, out, err = wattune("export", *arguments)
    assert code == 2 and "Traceback" not in err
    if "--json" in arguments:  # a failure is an object too
        assert said in json.loads(out)["error"]["what"]
    else:
        assert out == ""
    assert said in " ".join(err.replace("│", " ").split())
    assert list((tmp_path / "here").iterdir()) == []


def test_damage_is_said_and_the_rest_is_written(wattune, tmp_path: Path) -> None:
    next((tmp_path / "storage").glob("*/trials/*/run.json")).write_text("{")
    code, out, err = wattune("export", "dense_h200x4")
    assert (code, out) == (0, "dense_h200x4.csv\n") and "left out: " in err
    assert len((tmp_path / "here" / "dense_h200x4.csv").read_text().splitlines()) == 3

"""Places of artifacts: without a machine's path, also in stores of earlier versions."""

import sqlite3
from pathlib import Path

import pytest

from wattune.tracking.locations import location, make_relative, path_inside


@pytest.mark.parametrize(
    ("uri", "inside"),
    [
        ("mlflow-artifacts:/study/a1/artifacts", "study/a1/artifacts"),
        ("file:///data/a%20b/mlartifacts/study/a1/artifacts", "study/a1/artifacts"),
        ("file:///mlartifacts/x/mlartifacts/study", "study"),
        ("mlflow-artifacts://other.host/study", None),
        ("mlflow-artifacts:/study/../../etc", None),
        ("file:///data/mlartifacts/../../etc/passwd", None),
        ("file:///data/elsewhere/study", None),
        ("file:///data/mlartifacts/", None),
        ("s3://bucket/mlartifacts/study", None),
        ("", None),
    ],
)
def test_a_path_is_inside_the_folder_or_it_is_none_of_ours(uri: str, inside: str | None) -> None:
    assert path_inside(uri) == inside


def test_a_location_names_no_machine() -> None:
    assert location("moe") == "mlflow-artifacts:/moe" and path_inside(location("moe")) == "moe"


def test_a_store_of_an_earlier_version_is_mended_for_its_own_study_alone(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    old = "file:///orig%20inal/mlartifacts"
    with sqlite3.connect(database) as store:
        store.execute("CREATE TABLE experiments (experiment_id INTEGER, artifact_location TEXT)")
        store.execute("CREATE TABLE runs (run_uuid TEXT, experiment_id INTEGER, artifact_uri TEXT)")
        store.executemany("INSERT INTO experiments VALUES (?, ?)", [(1, f"{old}/s"), (2, f"{old}/s2")])
        runs = [("a", 1, f"{old}/s/a/artifacts"), ("b", 2, f"{old}/s2/b/artifacts"), ("c", 1, "s3://bucket/c")]
        store.executemany("INSERT INTO runs VALUES (?, ?, ?)", runs)
    assert make_relative(database, "1", f"{old}/s") == "mlflow-artifacts:/s"
    with sqlite3.connect(database) as store:
        assert store.execute("SELECT artifact_location FROM experiments ORDER BY 1").fetchall() == [
            (f"{old}/s2",),
            ("mlflow-artifacts:/s",),
        ]
        found = dict(store.execute("SELECT run_uuid, artifact_uri FROM runs").fetchall())
    assert found == {"a": "mlflow-artifacts:/s/a/artifacts", "b": f"{old}/s2/b/artifacts", "c": "s3://bucket/c"}
    assert make_relative(database, "2", "s3://bucket/s2") == "s3://bucket/s2"
    assert make_relative(database, "1", "mlflow-artifacts:/s") == "mlflow-artifacts:/s"

"""A study of version 2 grows: by a value, two repeats and a looser bound, and nothing is measured twice.

`version_2/before_growth` was written by the last commit before studies could grow, without its tables. One trial has a
long run under the number after its ordinary repeat, as that version counted.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from wattune import api
from wattune.errors import SpaceError
from wattune.search.space import parse_space
from wattune.storage.study import StudyFolder

HERE = Path(__file__).parent / "version_2"
LONG = "6ab1b16ad5f6-1"


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    shutil.copytree(HERE / "before_growth", tmp_path / "before_growth")
    return tmp_path


def grown(space: dict[str, Any]) -> dict[str, Any]:
    """The space with a value, two repeats and a looser bound more."""
    return {
        **space,
        "space": {**space["space"], "micro_batch_size": [1, 2]},
        "measure": {**space["measure"], "repeats": 3},
        "constraints": ["node_device_power_peak_100ms_w <= 1600"],
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_reads_as_one_space_without_digests(storage: Path) -> None:
    study = StudyFolder.open("before_growth", storage)
    assert [one.number for one in study.spaces()] == [1]
    assert {row["status"] for row in study.candidates()} == {"kept"}
    assert len(study.results()) == 3


def test_a_preview_counts_what_is_measured_and_writes_nothing(storage: Path) -> None:
    study = StudyFolder.open("before_growth", storage)
    before = contents(study.path)
    found = api.preview(grown(study.document()), storage=str(storage))
    assert found.space_number == 2 and found.changes == (
        "constraints: adds node_device_power_peak_100ms_w <= 1600 and drops node_device_power_peak_100ms_w <= 1500",
        "measure.repeats: 1 -> 3",
        "space.micro_batch_size: adds 2",
    )
    assert (found.num_left, found.num_done, found.num_finalists) == (4 * 3 - 2 + 1, 3, 1), "a new leader may soak"
    assert contents(study.path) == before


def test_nothing_is_left_of_it_as_it_was(storage: Path) -> None:
    found = api.preview(StudyFolder.open("before_growth", storage).document(), storage=str(storage))
    assert (found.num_left, found.num_finalists, found.changes) == (0, 0, ())


def test_a_call_that_starts_nothing_keeps_both_spaces_and_every_result(storage: Path) -> None:
    study = StudyFolder.open("before_growth", storage)
    first, before = study.document(), contents(study.path / "trials")
    outcome = api.run_study(grown(first), storage=str(storage), max_hours=0.0)
    assert outcome.num_left == 11
    assert contents(study.path / "trials") == before
    assert [one.document for one in study.spaces()] == [first, parse_space(grown(first)).document]
    came = {row["trial_id"]: row["space"] for row in study.candidates()}
    assert sorted(came.values()) == [1, 1, 2, 2] and came[LONG.split("-")[0]] == 1
    assert [str(bound) for bound in outcome.ranking.constraints] == ["node_device_power_peak_100ms_w <= 1600"]
    assert len(outcome.ranking.trials) == 2


def test_a_start_that_fails_leaves_it_what_it_was(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = StudyFolder.open("before_growth", storage)
    before = contents(study.path)

    def unreachable(_address: str | None) -> None:
        raise api.runs.WattuneError("no cluster")

    monkeypatch.setattr("wattune.orchestrate.cluster.connect", unreachable)
    with pytest.raises(api.runs.WattuneError, match="no cluster"):
        api.run_study(grown(study.document()), storage=str(storage))
    after = contents(study.path)
    assert after.pop(".running", None) is not None and after == before


def test_another_workload_is_refused_with_the_one_difference(storage: Path) -> None:
    space = StudyFolder.open("before_growth", storage).document()
    other = grown(space) | {"workload": {"seq_len": 64, "global_batch_size": 8}}
    with pytest.raises(SpaceError) as caught:
        api.preview(other, storage=str(storage))
    (line,) = str(caught.value).splitlines()[1:]
    assert line.strip() == (
        "workload.seq_len: stored 32, given 64; results of two workloads do not compare: give the study another name"
    )

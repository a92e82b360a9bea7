"""A change of a study's space leaves the old one or the new, whenever its process is killed; damage is named."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from wattune.errors import PlanError
from wattune.storage.format import FORMAT
from wattune.storage.spaces import CANDIDATES, NEXT_CANDIDATES, REMOVED, all_spaces, candidates, commit, read_space
from wattune.storage.study import StudyFolder

FIRST: dict[str, Any] = {"study": "x", "space": {"tp": [1, 2]}, "measure": {"repeats": 1}, "search": {"seed": 0}}
SECOND = {**FIRST, "space": {"tp": [1, 4]}, "measure": {"repeats": 3}}


def rows(*ids: str) -> list[dict[str, Any]]:
    kept = [{"status": "kept", "trial_id": one, "rule": "", "reason": "", "config": "{}"} for one in ids]
    return [*kept, {"status": "rejected", "trial_id": "", "rule": "world_size", "reason": "too many", "config": "{}"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    study = tmp_path / "x"
    study.mkdir()
    commit(study, FIRST, rows("a", "b"))
    return study


def test_every_space_is_kept_with_its_number(folder: Path) -> None:
    assert commit(folder, FIRST, rows("a", "b")).number == 1, "the same space is no new one"
    assert commit(folder, SECOND, rows("a", "c")).number == 2
    assert [(one.number, one.document) for one in all_spaces(folder)] == [(1, FIRST), (2, SECOND)]
    assert sorted(path.name for path in folder.iterdir()) == [CANDIDATES, "space.1.yaml", "space.2.yaml", "study.yaml"]
    assert yaml.safe_load((folder / "study.yaml").read_text())["format"] == FORMAT


def test_the_table_of_combinations_says_with_which_space_a_trial_came(folder: Path) -> None:
    commit(folder, SECOND, rows("a", "c"))
    third = {**SECOND, "space": {"tp": [2, 4]}}
    commit(folder, third, rows("b", "c"))
    found = {row["trial_id"]: (row["status"], row["space"]) for row in candidates(folder)}
    assert found == {"b": ("kept", 1), "c": ("kept", 2), "": ("rejected", 3), "a": (REMOVED, 1)}
    (gone,) = [row for row in candidates(folder) if row["status"] == REMOVED]
    assert gone["reason"] == "not in space 3; what was measured of it counts"
    commit(folder, third, rows("b", "c"))
    assert [row for row in candidates(folder) if row["status"] == REMOVED] == [gone]


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import wattune.storage.spaces as spaces

os.fsync = lambda descriptor: None  # a killed process is no power cut
source, place = Path(sys.argv[1]), Path(sys.argv[2])

def dies_before(step):
    done = 0

    def dying(function):
        def wrapped(*arguments, **options):
            nonlocal done
            if done == step:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return function(*arguments, **options)
        return wrapped

    spaces.write_whole, Path.replace = dying(spaces.write_whole), dying(Path.replace)
    spaces.commit(place / str(step), {second!r}, {rows!r})

for step in range(30):
    shutil.copytree(source, place / str(step))
    child = os.fork()  # no thread was started here
    if not child:
        dies_before(step)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if not status:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
"""


def test_a_process_killed_between_any_two_writes_leaves_the_old_space_or_the_new_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    old, new = (FIRST, {"a", "b", ""}), (SECOND, {"a", "b", "c", ""})
    script = KILLED.format(second=SECOND, rows=rows("a", "c"))
    place = tmp_path / "killed"
    place.mkdir()
    subprocess.run([sys.executable, "-c", script, str(folder), str(place)], timeout=120, check=True)
    seen = []
    for step in range(len(list(place.iterdir()))):
        study = place / str(step)
        state = read_space(study / "study.yaml").document, {row["trial_id"] for row in candidates(study)}
        assert state in (old, new), f"killed before write {step}"
        all_spaces(study)
        seen.append(state == new)
        assert commit(study, SECOND, rows("a", "c")).number == 2, "and the next call goes on from there"
        assert {row["trial_id"] for row in candidates(study)} == new[1] and not (study / NEXT_CANDIDATES).exists()
    assert len(seen) > 5 and seen == sorted(seen) and seen[-1] and not seen[0]


def test_a_change_of_a_space_or_its_table_on_the_disk_is_named_in_one_line(folder: Path) -> None:
    commit(folder, SECOND, rows("a", "c"))
    for name, read in (
        ("study.yaml", lambda: read_space(folder / "study.yaml")),
        ("space.1.yaml", lambda: all_spaces(folder)),
        (CANDIDATES, lambda: candidates(folder)),
    ):
        path = folder / name
        content = path.read_bytes()
        for position in range(80, len(content), len(content) // 7):
            path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
            with pytest.raises(PlanError, match=rf"^\S*{name}:? .*does not agree with its digest") as caught:
                read()
            assert "\n" not in str(caught.value)
        path.write_bytes(content)
        read()


def test_a_file_without_its_digest_is_taken_as_it_is(folder: Path) -> None:
    path = folder / "study.yaml"
    body = path.read_text().partition("\n")[2].replace("repeats: 1", "repeats: 2")
    path.write_text(body)
    assert read_space(path).document["measure"] == {"repeats": 2}
    shutil.copy(folder / "space.1.yaml", path)
    assert read_space(path).document == FIRST and read_space(path).number == 1


def test_a_table_that_is_lost_is_told_and_written_anew(folder: Path) -> None:
    (folder / CANDIDATES).unlink()
    with pytest.raises(PlanError, match=r"candidates\.parquet is missing; `wattune run` of the space writes it anew"):
        candidates(folder)
    StudyFolder(folder).commit(StudyFolder(folder).document(), rows("a", "b"))
    assert [row["trial_id"] for row in candidates(folder)] == ["a", "b", ""]

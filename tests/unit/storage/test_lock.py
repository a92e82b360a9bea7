"""One process runs a study; a start that fails leaves nothing."""

from pathlib import Path

import pytest

from wattune.errors import PlanError
from wattune.storage.lock import LOCK, if_idle, run_lock


def test_a_start_that_fails_leaves_no_folder_that_was_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "storage" / "x"
    with pytest.raises(ZeroDivisionError), run_lock(folder, folder / "study.yaml"):
        assert (folder / LOCK).exists()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with run_lock(folder, folder / "study.yaml"):
        pass
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_second_runner_is_refused_and_takes_nothing_from_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    with run_lock(folder, folder / "study.yaml"):
        with pytest.raises(PlanError, match="being run by another process"), run_lock(folder, folder / "study.yaml"):
            pass
        assert (folder / LOCK).exists()
        with if_idle(folder) as idle:
            assert not idle
    folder.mkdir()
    with if_idle(folder) as idle:
        assert idle

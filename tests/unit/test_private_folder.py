"""Folders that another user may have made first, and ids that another process may have by now."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wattune.private_folder import NotPrivateError, own_folder, start_ticks, temporary_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"wattune-{os.getuid()}"


def test_every_folder_on_the_way_is_this_users_own(temporary: Path) -> None:
    before = os.umask(0)
    try:
        folder = temporary_folder("spool", "one")
    finally:
        os.umask(before)
    assert folder == temporary / "spool" / "one"
    assert [each.stat().st_mode & 0o777 for each in (temporary, temporary / "spool", folder)] == [0o700] * 3
    assert temporary_folder("spool", "one") == folder


@pytest.mark.parametrize("name", ["", "spool"])
def test_a_link_that_somebody_made_first_is_refused(temporary: Path, tmp_path: Path, name: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    if name:
        temporary.mkdir(mode=0o700)
    (temporary / name if name else temporary).symlink_to(theirs)
    with pytest.raises(NotPrivateError, match="is a link of user"):
        temporary_folder("spool", "one")
    assert list(theirs.iterdir()) == []


def test_a_folder_that_others_write_to_is_refused(temporary: Path) -> None:
    temporary.mkdir()
    temporary.chmod(0o777)
    with pytest.raises(NotPrivateError, match="with mode 777; remove it"):
        temporary_folder("spool")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_a_folder_of_another_user_is_refused(temporary: Path) -> None:
    temporary.mkdir(mode=0o700)
    os.chown(temporary, 65534, 65534)
    with pytest.raises(NotPrivateError, match="a folder of user 65534"):
        temporary_folder("spool")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises((NotPrivateError, FileExistsError)):
        own_folder(tmp_path / "file")


def test_an_id_and_a_start_name_one_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = start_ticks(child.pid)
    assert started is not None and started >= (start_ticks(os.getpid()) or 0)
    assert start_ticks(child.pid) == started
    child.communicate(b"\n", timeout=30)
    assert start_ticks(child.pid) is None

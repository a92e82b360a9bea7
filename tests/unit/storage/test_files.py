"""Files of the storage: its place, whole writes, JSON, manifests."""

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.errors import PlanError, TelemetryError
from wattune.storage import files as module
from wattune.storage.files import (
    find_storage,
    is_file_of,
    is_hidden,
    is_inside,
    make_folder,
    named_path,
    nearest_existing,
    read_json_object,
    require_writable,
    storage_path,
    write_asked,
    write_calibration,
    write_whole,
)


def test_storage_is_the_argument_then_the_variable_then_the_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WATTUNE_STORAGE", str(tmp_path / "variable"))
    assert storage_path(str(tmp_path / "argument")) == tmp_path / "argument"
    assert storage_path() == tmp_path / "variable"
    monkeypatch.delenv("WATTUNE_STORAGE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage_path() == tmp_path / "wattune-studies"


def test_with_a_url_work_happens_in_a_local_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WATTUNE_STORAGE", str(tmp_path / "variable"))
    assert find_storage("s3://bucket/x") == (tmp_path / "variable", "s3://bucket/x")
    monkeypatch.setenv("WATTUNE_STORAGE", "s3://bucket/y")
    assert find_storage() == (tmp_path / "wattune-studies", "s3://bucket/y")
    assert find_storage("s3://bucket/x") == (tmp_path / "wattune-studies", "s3://bucket/x")
    assert find_storage(str(tmp_path / "argument")) == (tmp_path / "argument", "")


def test_a_written_file_and_its_name_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    def note(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink(), (tmp_path / "file").exists()))

    monkeypatch.setattr(os, "fsync", note)
    write_whole(tmp_path / "file", b"content")
    (partial, named_early), (folder, named) = synced
    assert partial.parent == tmp_path and not named_early, "first what is in it"
    assert folder == tmp_path and named, "then that it is there"


def test_a_home_of_nobody_is_said() -> None:
    assert named_path("~") == Path.home()
    with pytest.raises(PlanError, match="~nobody-by-that-name/x is in the home of a user this machine does not have"):
        named_path("~nobody-by-that-name/x")


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert nearest_existing(tmp_path / "file" / "a" / "b") == (tmp_path / "file", False)
    for check in (require_writable, make_folder):
        with pytest.raises(PlanError, match="file is not a folder that may be written to; give --storage, or"):
            check(tmp_path / "file" / "a" / "b")
    require_writable(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    assert make_folder(tmp_path / "a" / "b").is_dir() and make_folder(tmp_path / "a" / "b").is_dir()


@given(st.lists(st.text("ab.", min_size=1, max_size=3), min_size=1, max_size=4))
def test_a_path_is_hidden_where_a_part_of_it_is(parts: list[str]) -> None:
    assert is_hidden("/".join(parts)) == any(part[0] == "." for part in parts)


@pytest.mark.parametrize("no_links", [None, errno.EPERM, errno.ENOTSUP])
def test_a_file_that_is_there_is_written_over_only_where_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_links: int | None
) -> None:
    def refuse(*_: object) -> None:
        assert no_links is not None
        raise OSError(no_links, "no hard links")

    if no_links is not None:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "made" / "file"
    assert write_whole(path, b"first", over=False)
    assert not write_whole(path, b"second", over=False) and path.read_bytes() == b"first"
    assert write_whole(path, b"third") and path.read_bytes() == b"third"
    assert [one.name for one in path.parent.iterdir()] == ["file"], "no unfinished file stays"


def test_a_disk_that_is_full_is_told_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(tmp_path / "file", b"new")
    assert caught.value.filename == str(tmp_path / "file")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("file", "old")]


@pytest.mark.parametrize("heard", [False, True])
def test_a_folder_that_cannot_be_synced_is_no_error_and_one_that_fails_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO if heard else errno.EINVAL, "fsync")

    monkeypatch.setattr(os, "fsync", fail)
    if heard:
        with pytest.raises(OSError, match="fsync"):
            module.make_lasting(tmp_path)
    else:
        module.make_lasting(tmp_path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "words"), [("{", "cannot be read"), ("[1]", "is not a JSON object"), ("\xff", "cannot be")]
)
def test_a_file_of_somebody_else_is_named_with_who_writes_such_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TelemetryError, match=f"manifest.json {words}.*; it was not written by a recording"):
        read_json_object(path, "a recording")


def test_a_text_goes_where_it_was_asked_for_or_it_is_said(tmp_path: Path) -> None:
    write_asked(tmp_path / "out.csv", "a")
    write_asked(tmp_path / "out.csv", "b")
    assert (tmp_path / "out.csv").read_text() == "b"
    with pytest.raises(PlanError, match="cannot be written: Is a directory; give a file in a folder that is there"):
        write_asked(tmp_path, "a")


@given(uuid=st.text(min_size=1, max_size=20))
def test_a_calibration_stays_in_its_folder_whatever_the_device_is_called(
    tmp_path_factory: pytest.TempPathFactory, uuid: str
) -> None:
    storage = tmp_path_factory.mktemp("storage")
    path = write_calibration(storage, {"uuid": uuid})
    assert path.parent == storage / "calibration" and json.loads(path.read_text())["uuid"] == uuid


def test_links_are_no_files_of_a_folder(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "key").write_text("secret")
    (inside / "own").write_text("own")
    (inside / "link").symlink_to(outside / "key")
    (inside / "deep").symlink_to(outside)
    assert is_file_of(inside, inside / "own")
    assert not is_file_of(inside, inside / "link")
    assert not is_file_of(inside, inside / "deep" / "key")
    assert not is_file_of(inside, inside / "none")


@pytest.mark.parametrize(("path", "inside"), [("a/b.json", True), ("/etc/passwd", False), ("a/../../b", False)])
def test_names_that_lead_out_of_a_folder_are_known(path: str, inside: bool) -> None:
    assert is_inside(path) is inside

"""A call that must come back does."""

import os
import threading
import time
from pathlib import Path

import pytest

from wattune.deadline import read_bounded, within


def test_it_returns_and_raises_what_the_operation_does() -> None:
    assert within(10, lambda: 7, name="seven") == 7
    with pytest.raises(KeyError, match="gone"):
        within(10, lambda: {}["gone"], name="error")


def test_what_is_late_is_left_behind() -> None:
    release, ended = threading.Event(), threading.Event()

    def wait() -> None:
        release.wait(30)
        ended.set()

    begun_s = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        within(0.05, wait, name="late")
    assert time.monotonic() - begun_s < 10
    release.set()
    assert ended.wait(10)  # it was not ended, only not waited for


def test_what_is_read_has_an_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"whole")
    assert read_bounded(tmp_path / "file", 5) == b"whole"
    for path in (tmp_path / "file", "/dev/zero"):
        with pytest.raises(ValueError, match=r"^larger than 4 bytes$"):
            read_bounded(path, 4)
    with pytest.raises(IsADirectoryError):
        read_bounded(tmp_path, 4)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TimeoutError, match=r"no end within 0\.05 s"):
        read_bounded(tmp_path / "pipe", 4, longest_s=0.05)
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(b"x" * 100_000))
    writer.start()
    assert read_bounded(tmp_path / "pipe", 100_000) == b"x" * 100_000
    writer.join()

"""`wattune record --serve` on addresses that cannot be used: one line, exit code 2, nothing recorded."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from wattune.recording.serving.server import listening_socket

Run = Callable[..., tuple[int, str, str]]


def test_a_wrong_or_taken_address_is_one_line_and_nothing_is_recorded(
    wattune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTUNE_STORAGE", str(tmp_path / "storage"))
    with contextlib.closing(listening_socket("127.0.0.1:0")) as taken:
        wrong = {
            f"127.0.0.1:{taken.getsockname()[1]}": "is taken",
            "9400": "write HOST:PORT",
            "0.0.0.0:9400": "--serve-remote",
        }
        for address, why in wrong.items():
            code, out, said = wattune("record", "--serve", address, "--", "touch", tmp_path / "ran")
            assert (code, out) == (2, "") and why in said and len(said.splitlines()) == 1, said
    code, _, said = wattune("record", "--serve-remote", "--", "touch", tmp_path / "ran")
    assert code == 2 and "--serve HOST:PORT" in said
    assert not (tmp_path / "ran").exists() and not (tmp_path / "storage" / "recordings").exists()

"""A recording beside trackers: it is sent as a trial is, once, and a dead place holds back no other."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from wattune import api
from wattune.errors import PlanError, TrackingError


def test_a_recording_is_sent_to_each_place_once(tmp_path: Path) -> None:
    url, board = f"file://{tmp_path}/there", tmp_path / "board"
    recording = api.record(["true", "--key", "x"], storage=str(tmp_path / "here"), name="one", backends=["simulated"])
    assert api.send_recording(recording, storage=url, tensorboard=str(board))
    assert (tmp_path / "there" / "recordings" / "one" / "run.json").is_file()
    events = list((board / "recordings" / "one-0").iterdir())
    assert b"node0" in events[0].read_bytes() or b"device_power" in events[0].read_bytes()
    api.send_recording(recording, storage=str(tmp_path / "here"), tensorboard=str(board))
    assert list((board / "recordings" / "one-0").iterdir()) == events
    (board / "recordings" / "sent.json").unlink()
    (board / "recordings" / "sent.json").mkdir()
    with pytest.raises(TrackingError, match="results stay in the study folder"):
        api.send_recording(recording, storage=url, tensorboard=str(board))
    with pytest.raises(PlanError, match='--wandb: got "a/b/c"'):
        api.send_recording(recording, wandb="a/b/c")


def test_a_recording_that_waits_is_sent_by_sync(tmp_path: Path, wattune: Callable[..., tuple[int, str, str]]) -> None:
    storage, board = tmp_path / "here", tmp_path / "board"
    api.record(["true"], storage=str(storage), name="one", backends=["simulated"])
    code, _, err = wattune("sync", "one", "--storage", storage)
    assert code == 2 and "a recording is sent to storage at a URL, by --wandb and by --tensorboard; give one" in err
    assert wattune("sync", "one", "--storage", storage, "--tensorboard", board) == (
        0,
        "recording sent: tensorboard\n",
        "",
    )
    assert (board / "recordings" / "one-0").is_dir()
    said = wattune("sync", "one", "--storage", storage, "--tensorboard", board, "--json")
    assert said[0] == 0 and json.loads(said[1]) == {"stored": False, "wandb": False, "tensorboard": True}

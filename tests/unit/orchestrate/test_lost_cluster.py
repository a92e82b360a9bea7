import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from wattune.errors import EngineError, PlanError
from wattune.orchestrate import lost_cluster
from wattune.orchestrate.cluster import connect


@pytest.fixture
def start_head(tmp_path: Path) -> Iterator[Callable[[], "subprocess.Popen[bytes]"]]:
    """Starts a child of this process with the name of Ray's head."""
    program, started = tmp_path / "gcs_server", list[subprocess.Popen[bytes]]()
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)

    def start() -> "subprocess.Popen[bytes]":
        started.append(subprocess.Popen([str(program), "600"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(30)


@pytest.mark.parametrize("starts_inside", [False, True])
@pytest.mark.parametrize("died_by_the_stop", [False, True])
def test_a_head_that_died_ends_the_call_in_seconds_unless_a_stop_did_it(
    start_head, monkeypatch: pytest.MonkeyPatch, died_by_the_stop: bool, starts_inside: bool
) -> None:
    """Ray's start is inside the watch: a head may die before the first worker is there."""
    head = None if starts_inside else start_head()
    monkeypatch.setattr(lost_cluster, "LOOK_S", 0.05)
    monkeypatch.setattr("wattune.forced_exit.asked", lambda: died_by_the_stop)
    ended = pytest.raises(EngineError, match="Ray's gcs_server on this machine ended") if not died_by_the_stop else None
    with ended or contextlib.nullcontext(), contextlib.suppress(KeyboardInterrupt), lost_cluster.watched():
        head = head or start_head()
        time.sleep(0.3)  # while it lives nothing happens
        head.kill()
        time.sleep(0.6 if died_by_the_stop else 30)


@pytest.mark.parametrize("back_s", [3600.0, 61.0])
def test_a_clock_set_back_ends_the_call_and_says_so(monkeypatch: pytest.MonkeyPatch, back_s: float) -> None:
    moved_s, real = [0.0], time.time
    monkeypatch.setattr(lost_cluster, "LOOK_S", 0.05)
    monkeypatch.setattr(lost_cluster.time, "time", lambda: real() + moved_s[0])
    said = rf"cut short: the clock of this machine was set back by {back_s:.0f} s, .*; run the same command to continue"
    with pytest.raises(EngineError, match=said), contextlib.suppress(KeyboardInterrupt), lost_cluster.watched():
        time.sleep(0.2)
        assert not lost_cluster.found(), "of the block before"
        moved_s[0] = -back_s
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            assert "the clock of this machine was set back" in lost_cluster.found(), (
                "whoever is interrupted can ask why"
            )
            raise


@pytest.mark.parametrize("moved_by_s", [-59.0, 3600.0, 1e6])
def test_a_small_step_back_and_any_forward_end_nothing(monkeypatch: pytest.MonkeyPatch, moved_by_s: float) -> None:
    moved_s, real = [0.0], time.time
    monkeypatch.setattr(lost_cluster, "LOOK_S", 0.05)
    monkeypatch.setattr(lost_cluster.time, "time", lambda: real() + moved_s[0])
    with lost_cluster.watched():
        moved_s[0] = moved_by_s
        time.sleep(0.4)


def test_a_joined_cluster_whose_head_stays_away_is_lost_and_one_that_comes_back_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lost_cluster, "LOOK_S", 0.05)
    monkeypatch.setattr(lost_cluster, "SILENT_S", 1.0)
    answers = [True]
    said = "cut short: the cluster's head is dead: no answer for 1 s; .*; run the same command to continue"
    with pytest.raises(EngineError, match=said), contextlib.suppress(KeyboardInterrupt):  # noqa: SIM117
        with lost_cluster.watched(lambda: answers[0]):
            answers[0] = False
            time.sleep(0.5)
            answers[0] = True  # it was started again
            time.sleep(0.8)
            assert not lost_cluster.found()
            answers[0] = False
            time.sleep(30)


def test_a_folder_that_vanishes_ends_the_call_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_cluster, "LOOK_S", 0.05)
    job = tmp_path / "job"
    job.mkdir()
    monkeypatch.chdir(job)
    said = rf"the folder that it was started in, {job}, is gone; finished trials are kept; run the same command"
    with pytest.raises(EngineError, match=said), contextlib.suppress(KeyboardInterrupt), lost_cluster.watched():
        job.rmdir()
        time.sleep(30)
    with pytest.raises(PlanError, match="change to one that exists"), connect("127.0.0.1:1"):
        pytest.fail("it connected")

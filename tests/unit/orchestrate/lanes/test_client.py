"""The lanes of a study from outside, if the actor that holds them is busy, slow or gone. No Ray is started."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RaySystemError

from wattune.errors import TelemetryError
from wattune.orchestrate.events import TrialProgress
from wattune.orchestrate.lanes import client
from wattune.orchestrate.lanes.client import Lanes


class Keeper:
    """The actor: answers or fails as the test wants, and notes its calls."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.calls = answers, []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Callable[[], Any]:
            self.calls.append((name, *arguments))
            return lambda: self.answers[name]

        method = SimpleNamespace(remote=remote)
        method.options = lambda **_: method
        return method


@pytest.fixture
def lanes_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Lanes]:
    """Lanes over an actor with these answers; an exception among them is raised when it is fetched."""

    def get(pending: Callable[[], Any], timeout: float | None = None) -> Any:
        answer = pending()
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(client.ray, "get", get)

    def make(**answers: Any) -> Lanes:
        lanes = Lanes.__new__(Lanes)
        lanes._keeper = Keeper(**answers)
        lanes._scratch = str(tmp_path)
        return lanes

    return make


@pytest.mark.parametrize(
    "error", [RayActorError(), GetTimeoutError(), RaySystemError("not started"), ConnectionError()]
)
def test_lanes_that_are_busy_or_gone_have_no_progress(error: Exception) -> None:
    def refuse() -> None:
        raise error

    lanes = Lanes.__new__(Lanes)
    lanes._keeper = SimpleNamespace(progress=SimpleNamespace(remote=refuse))
    assert lanes.progress() == {}


def closing(monkeypatch: pytest.MonkeyPatch, scratch: Path, *, alive: list[bool]) -> tuple[Lanes, list[Any], list[Any]]:
    """Lanes whose actor never answers on a cluster that answers as listed, and calls of `close` and `kill`."""
    asked: list[Any] = []
    killed: list[Any] = []
    monkeypatch.setattr(client, "is_answering", lambda _: alive.pop(0) if len(alive) > 1 else alive[0])
    monkeypatch.setattr(client.ray, "wait", lambda pending, timeout: (time.sleep(timeout), ([], pending))[1])
    monkeypatch.setattr(client.ray, "kill", lambda actor, **_: killed.append(actor))
    lanes = Lanes.__new__(Lanes)
    lanes._keeper = SimpleNamespace(close=SimpleNamespace(remote=lambda: asked.append(1)))
    lanes._scratch, lanes._addresses, lanes._closed = str(scratch), (), False
    (scratch / "lane-1").mkdir(parents=True)
    return lanes, asked, killed


def test_lanes_that_do_not_end_in_time_leave_no_folder_and_no_actor(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, asked, killed = closing(monkeypatch, tmp_path / "scratch", alive=[True])
    lanes.close(0.1)
    lanes.close(0.1)  # a second time, as at the end of a `with`
    assert asked == [1]
    assert not (tmp_path / "scratch").exists() and killed == [lanes._keeper]


@pytest.mark.parametrize("answers", [[False], [True, False]], ids=["before", "meanwhile"])
def test_nobody_waits_for_a_cluster_that_is_dead(tmp_path, monkeypatch: pytest.MonkeyPatch, answers) -> None:
    lanes, asked, killed = closing(monkeypatch, tmp_path / "scratch", alive=list(answers))
    start_s = time.monotonic()
    lanes.close(60)
    assert time.monotonic() - start_s < 20
    assert asked == [1] * (len(answers) - 1) and not killed and not (tmp_path / "scratch").exists()


def test_progress_is_that_of_every_trial(lanes_of: Callable[..., Lanes]) -> None:
    known = {"a-0": TrialProgress(part="measure", done=3, total=20), "b-0": TrialProgress(part="build")}
    assert lanes_of(progress=known).progress() == known


def test_a_trial_without_telemetry_actors_does_not_begin(lanes_of: Callable[..., Lanes]) -> None:
    assert lanes_of(telemetry=["actor"]).telemetry_actors(["n0"], ["host"]) == ["actor"]  # type: ignore[comparison-overlap, list-item]
    with pytest.raises(TelemetryError, match="the process that holds the lanes ended "):
        lanes_of(telemetry=RayActorError()).telemetry_actors([], ["host"])


def test_a_trial_waits_for_an_actor_that_is_being_restarted(lanes_of: Callable[..., Lanes]) -> None:
    lanes = lanes_of(ready=None, drive={"done_trials": 0}, concluded=None)
    attempt: Any = SimpleNamespace(name="a-0", nodes=("n1",))
    cluster: Any = SimpleNamespace(only=lambda nodes: f"the part of {nodes}")
    lanes.drive(attempt, cluster)
    lanes.concluded(attempt)
    asked, driven, concluded = lanes._keeper.calls
    assert asked == ("ready",) and driven[:3] == ("drive", attempt, "the part of ('n1',)") and driven[3]() is None
    assert concluded == ("concluded", "a-0")

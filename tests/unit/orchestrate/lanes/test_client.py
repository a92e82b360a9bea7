"""The lanes of a study from outside, if the actor that holds them is busy, slow or gone. No Ray is started."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RaySystemError

from wattune.errors import TelemetryError
from wattune.orchestrate.events import TrialProgress
from wattune.orchestrate.lanes import client
from wattune.orchestrate.lanes.client import Lanes
from wattune.orchestrate.lanes.messages import Answer

ASSIGNMENT: Any = SimpleNamespace(
    attempt=SimpleNamespace(name="a-0"), node_names={"id0": "n0"}, spec=SimpleNamespace(engine="torch"), window="a-0#1"
)


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


class Waits:
    """`ray.wait` of a trial that runs for some looks."""

    def __init__(self, num_looks: int) -> None:
        self.left = num_looks

    def __call__(self, pending: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        self.left -= 1
        return ([], pending) if self.left >= 0 else (pending, [])


def test_a_trial_is_checked_at_every_look_until_its_limit_is_broken(
    lanes_of: Callable[..., Lanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.ray, "wait", Waits(10))
    reasons = iter([None, None, "3000 W"])
    answer = Answer(number=7)
    lanes = lanes_of(run=answer, stop_trial=True)
    assert lanes.run(ASSIGNMENT, lambda: next(reasons)) is answer
    opened = ("open_window", ("id0",), "a-0#1")
    assert lanes._keeper.calls == [("run", ASSIGNMENT), opened, ("stop_trial", "a-0", "3000 W")]


def test_a_stop_that_does_not_arrive_is_tried_again(
    lanes_of: Callable[..., Lanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.ray, "wait", Waits(3))
    lanes = lanes_of(run=Answer(), stop_trial=GetTimeoutError())
    lanes.run(ASSIGNMENT, lambda: "3000 W")
    assert [name for name, *_ in lanes._keeper.calls] == ["run", "open_window"] + ["stop_trial"] * 3


def test_an_actor_that_dies_is_a_failure_and_not_an_error(
    lanes_of: Callable[..., Lanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.ray, "wait", Waits(0))
    answer = lanes_of(run=RayActorError()).run(ASSIGNMENT)
    assert answer.outcomes == () and not answer.interrupted
    assert answer.failure.startswith("the process that holds the lanes ended (The actor ")
    assert answer.failure.endswith("such as a lack of memory (`dmesg`)")
    said = lanes_of(settle=GetTimeoutError()).settle(ASSIGNMENT)
    assert said.startswith("the process that holds the lanes did not answer within 120 s")
    assert lanes_of(spans=RayActorError()).spans("a-0") == {}
    assert lanes_of(stop_trial=RayActorError()).stop_trial("a-0", "3000 W") is False


def test_a_trial_without_telemetry_actors_does_not_begin(lanes_of: Callable[..., Lanes]) -> None:
    assert lanes_of(telemetry=["actor"]).telemetry_actors(["n0"], ["host"]) == ["actor"]  # type: ignore[comparison-overlap, list-item]
    with pytest.raises(TelemetryError, match="the process that holds the lanes ended "):
        lanes_of(telemetry=RayActorError()).telemetry_actors([], ["host"])


def test_calls_name_the_trial_and_its_nodes(lanes_of: Callable[..., Lanes]) -> None:
    spans = {0: pa.table({"step": [1]})}
    lanes = lanes_of(settle="it leaked", spans=spans, stop_trial=True, forget_nodes=None)
    assert lanes.settle(ASSIGNMENT) == "it leaked" and lanes.spans("a-0") == spans
    assert lanes.stop_trial("a-0", "3000 W") is True
    lanes.forget_nodes(["id0", "id1"])
    assert lanes._keeper.calls == [
        ("settle", ("id0",)),
        ("spans", "a-0"),
        ("stop_trial", "a-0", "3000 W"),
        ("forget_nodes", ("id0", "id1")),
    ]


HOLDS = """
import sys, time
from wattune.orchestrate.lanes.client import Lanes
lanes = Lanes.__new__(Lanes)
lanes._scratch = sys.argv[1]
with lanes.concluding("b-0"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_window_opens_when_the_conclusions_have_ended_that_ran_when_it_was_asked_for(
    lanes_of: Callable[..., Lanes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also of a driver that was killed: a lock ends with its process."""
    lanes = lanes_of(run=Answer())
    monkeypatch.setattr(client.ray, "wait", lambda pending, timeout: (pending, []))
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == "held\n"
        done = threading.Thread(target=lanes.run, args=(ASSIGNMENT,), daemon=True)
        done.start()
        end_s = time.monotonic() + 30
        while not lanes._keeper.calls and time.monotonic() < end_s:
            time.sleep(0.01)
        done.join(0.3)
        assert done.is_alive() and [name for name, *_ in lanes._keeper.calls] == ["run"]
        driver.kill()
    done.join(30)
    assert not done.is_alive() and lanes._keeper.calls[1] == ("open_window", ("id0",), "a-0#1")


def test_sensors_that_do_not_open_end_the_trial_and_are_its_error(
    lanes_of: Callable[..., Lanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.ray, "wait", Waits(2))
    lanes = lanes_of(run=Answer(), stop_trial=True)

    def fails() -> None:
        assert [name for name, *_ in lanes._keeper.calls] == ["run"], "the workers have begun"
        raise TelemetryError("no sensor")

    with pytest.raises(TelemetryError, match="no sensor"):
        lanes.run(ASSIGNMENT, await_sensors=fails)
    assert lanes._keeper.calls[1:] == [("stop_trial", "a-0", "no sensor")] * 2


def test_a_command_begins_when_its_window_may(lanes_of: Callable[..., Lanes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.ray, "wait", Waits(0))
    monkeypatch.setattr(client, "is_command", lambda _spec: True)
    lanes, begun = lanes_of(run=Answer()), []
    lanes.run(ASSIGNMENT, await_sensors=lambda: begun.append([name for name, *_ in lanes._keeper.calls]))
    assert begun[0] == []


def test_a_conclusion_that_hangs_keeps_no_trial_for_ever(
    lanes_of: Callable[..., Lanes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "_CONCLUDED_S", 0.05)
    monkeypatch.setattr(client.ray, "wait", lambda pending, timeout: (pending, []))
    lanes = lanes_of(run=Answer(number=3))
    with lanes.concluding("b-0"):
        assert lanes.run(ASSIGNMENT).number == 3
    assert "b-0 takes longer than 0 s" in caplog.text and not list(Path(lanes._scratch).iterdir())

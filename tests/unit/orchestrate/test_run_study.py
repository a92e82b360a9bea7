"""Tune's view of a study's controller, and the trainable of one trial. No Ray is started."""

import copy
import pickle
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray.exceptions import RayError
from ray.tune import TuneError

from wattune.errors import EngineError
from wattune.orchestrate import lost_cluster, run_study
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Cluster
from wattune.orchestrate.events import TrialProgress
from wattune.orchestrate.run_study import _cause, _Progress, _StudySearcher, _trainable, require_libraries
from wattune.run import RunStatus
from wattune.trial import Measure


def test_of_a_trials_own_failure_the_last_line_is_the_cause() -> None:
    stack = 'Traceback (most recent call last):\n  File "files.py", line 1\n' + "    write()\n" * 100
    assert _cause(TuneError(stack + "OSError: [Errno 28] No space left on device\n")).startswith("OSError: [Errno 28]")
    assert _cause(RayError("the node\nhas died")) == "the node has died"
    assert _cause(ConnectionError()) == "ConnectionError"


@pytest.mark.parametrize(
    ("error", "found", "reason"),
    [
        (KeyboardInterrupt(), "", "stopped by the user; the same command runs it again"),
        (
            KeyboardInterrupt(),
            "the clock of this machine was set back by 90 s",
            "the study was cut short: the clock of this machine was set back by 90 s; the same command runs it again",
        ),
        (
            TuneError("the raylet is dead"),
            "",
            "the study was cut short: the raylet is dead; the same command runs it again",
        ),
    ],
)
def test_a_trial_that_was_cut_short_names_what_ended_the_call(
    world, specs, monkeypatch, error: BaseException, found: str, reason: str
) -> None:
    controller = world.controller(specs)
    monkeypatch.setattr(lost_cluster, "found", lambda: found)

    def fit() -> None:
        controller.next("t0")
        raise error

    monkeypatch.setattr(run_study, "tune", MagicMock(Tuner=lambda *_, **__: SimpleNamespace(fit=fit)))
    monkeypatch.setattr(run_study, "Lanes", MagicMock())
    monkeypatch.setattr(run_study, "_quiet_ray", lambda: None)
    monkeypatch.setattr(run_study, "StudyNodes", lambda *_: world)
    cluster = Cluster(nodes=tuple(world.nodes), driver_node_id="n0")
    with pytest.raises(EngineError) if isinstance(error, TuneError) else nullcontext():
        assert run_study.run_study(world.study, controller, cluster) == "interrupted"
    (result,) = [event.result for event in world.heard if getattr(event, "kind", "") == "finished"]
    assert (result.status, result.reason) == (RunStatus.INTERRUPTED, reason)
    assert world.result(specs[0]).reason == reason
    ran = [one.spec for one in world.drain(world.controller(specs))]
    assert ran.index(specs[0]) == (0 if "user" in reason else len(specs) - 1), (
        "it may have ended the call: it runs last"
    )


def test_a_library_that_is_missing_here_is_said_before_a_trial_fails_for_good(
    specs, new_node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    here, other = new_node("n0"), new_node("n1")
    alone = Cluster(nodes=(here,), driver_node_id="n0")
    require_libraries(specs, alone)  # torch's are there, or nothing would have started
    wanting = [*specs, replace(specs[0], engine="deepspeed")]
    with pytest.raises(EngineError, match='engine "deepspeed" needs deepspeed, which is not installed; install it'):
        require_libraries(wanting, alone)
    with pytest.raises(EngineError, match="dtype: fp8 needs torchao"):  # of the same engine and cluster
        require_libraries([*specs, replace(specs[0], plan=replace(specs[0].plan, dtype="fp8"))], alone)
    for nodes in ((here, other), (other,)):  # another node may have it
        require_libraries(wanting, Cluster(nodes=nodes, driver_node_id="n0"))


class FakeLanes:
    """Lanes that only have progress."""

    def __init__(self) -> None:
        self.known: dict[str, TrialProgress] = {}
        self.num_asked = 0

    def progress(self) -> dict[str, TrialProgress]:
        self.num_asked += 1
        return self.known


def cluster_of(world) -> Cluster:
    return Cluster(nodes=tuple(world.nodes), driver_node_id="n0", tags={"ray.cluster": "own"})


@pytest.fixture
def searcher(world, specs) -> _StudySearcher:
    return make_searcher(world, specs[:1])


def make_searcher(
    world, specs, measure: Measure | None = None, lanes: Any = None, isolation: str = "fresh"
) -> _StudySearcher:
    limits = {"node_device_power_w": 9.0}
    controller = world.controller(specs, measure=measure, seed=7, isolation=isolation, limits=limits)
    return _StudySearcher(controller, _Progress(lanes or FakeLanes()))


def test_the_searcher_speaks_tunes_language_and_survives_its_pickling(world, specs, searcher) -> None:
    config = searcher.suggest("t0")
    attempt = copy.deepcopy(config)["attempt"]
    assert attempt is config["attempt"] and str(attempt) == f"{specs[0].trial_id}-0"
    assert (attempt.spec, attempt.seed, attempt.isolation) == (specs[0], 7, "fresh")
    assert attempt.limits == {"node_device_power_w": 9.0} and attempt.tags["nodes"] == "n0"
    assert attempt.folder == world.study.trial(attempt.trial_id, 0).path
    assert pickle.loads(pickle.dumps(attempt)) == attempt
    assert attempt.nodes == tuple(world.nodes)
    assert searcher.suggest("t2") is None and world.study.trial(attempt.trial_id, 0).result() is None
    world.write(specs[0])
    searcher.on_trial_complete("t0", {"done_trials": 1})
    assert searcher.suggest("t1") == "FINISHED"
    pickle.loads(pickle.dumps(searcher))


def test_one_answer_of_the_lanes_tells_of_every_trial(world, specs, new_node) -> None:
    world.nodes.append(new_node("n1"))
    lanes = FakeLanes()
    searcher = make_searcher(world, specs, lanes=lanes)
    searcher.suggest("t0")
    searcher.suggest("t1")
    asks = [event.progress for event in world.heard if getattr(event, "kind", "") == "started"]
    lanes.known = {f"{specs[0].trial_id}-0": TrialProgress(part="measure", done=3, total=20)}
    assert [ask() for ask in asks] == [TrialProgress(part="measure", done=3, total=20), None]
    assert lanes.num_asked == 1


def test_a_studys_end_waits_for_an_answer_under_way_and_asks_no_more(world, specs) -> None:
    """Ray ends a driver with 1 where a thread frees an answer's reference while it disconnects."""
    asked, answered, order = threading.Event(), threading.Event(), []

    class SlowLanes(FakeLanes):
        def progress(self) -> dict[str, TrialProgress]:
            asked.set()
            assert answered.wait(30)
            order.append("answer")
            return super().progress()

    lanes = SlowLanes()
    searcher = make_searcher(world, specs[:1], lanes=lanes)
    searcher.suggest("t0")
    (ask,) = [event.progress for event in world.heard if getattr(event, "kind", "") == "started"]
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert asked.wait(30)
    threading.Timer(0.1, answered.set).start()
    searcher._progress.close()
    order.append("closed")
    assert order == ["answer", "closed"]
    searcher._progress._asked_s = -run_study._ASK_S  # what is known is old
    assert ask() is None and lanes.num_asked == 1


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    reports: list[dict[str, int]] = []
    monkeypatch.setattr(run_study.tune, "report", reports.append)
    return reports


def test_an_error_of_this_program_is_the_trials_result_with_its_stack(
    world, specs, searcher, reported, monkeypatch
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("not\n thought of")

    monkeypatch.setattr(run_study, "run_trial", broken)
    _trainable(searcher.suggest("t0"), cluster=cluster_of(world), lanes=FakeLanes())
    result = world.result(specs[0])
    assert result.status is RunStatus.CRASHED
    assert result.reason == "wattune failed: ValueError: not thought of; see error.txt"
    stack = (world.study.trial(specs[0].trial_id, 0).path / "error.txt").read_text()
    assert "in broken" in stack
    assert reported == [{"done_trials": 1}]


def test_the_next_trial_starts_while_the_result_of_a_measured_one_is_made(world, specs, reported, monkeypatch) -> None:
    searcher, seen = make_searcher(world, specs, isolation="warm"), []

    def measured(attempt: Attempt, _cluster: Any, _lanes: Any, free: Any) -> None:
        free()
        seen.extend((list(reported), world.study.trial(attempt.trial_id, 0).result(), searcher.suggest("t1")))
        searcher.on_trial_result("t0", reported[0])
        seen.append(searcher.suggest("t2")["attempt"].spec)

    monkeypatch.setattr(run_study, "run_trial", measured)
    _trainable(searcher.suggest("t0"), cluster=cluster_of(world), lanes=FakeLanes())
    assert seen == [[{"done_trials": 0}], None, {"attempt": None}, specs[1]]
    searcher.on_trial_complete("t1", {"done_trials": 1})  # a process that takes over, and no trial of the study
    _trainable({"attempt": None}, cluster=cluster_of(world), lanes=FakeLanes())
    assert [one["done_trials"] for one in reported] == [0, 1, 1]


@pytest.mark.parametrize(("num", "isolation"), [(1, "warm"), (3, "fresh")])
def test_no_process_starts_that_no_trial_would_take_over(world, specs, num: int, isolation: str) -> None:
    searcher = make_searcher(world, specs[:num], isolation=isolation)
    assert searcher.suggest("t0")["attempt"] is not None and searcher.suggest("t1") is None


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(5, "I/O error"), MemoryError()])
def test_a_full_disk_of_the_head_is_no_bad_configuration(
    world, specs, searcher, reported, monkeypatch, error: Exception
) -> None:
    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(run_study, "run_trial", broken)
    _trainable(searcher.suggest("t0"), cluster=cluster_of(world), lanes=FakeLanes())
    result = world.result(specs[0])
    assert result.status is RunStatus.INFRA_FAILED and result.tags["infra_cause"] == "head"
    assert type(error).__name__ in result.reason and reported == [{"done_trials": 1}]


def test_an_error_of_the_cluster_is_left_to_the_controller(world, specs, searcher, reported, monkeypatch) -> None:
    def gone(*_: Any) -> None:
        raise RayError("no answer")

    monkeypatch.setattr(run_study, "run_trial", gone)
    with pytest.raises(RayError):
        _trainable(searcher.suggest("t0"), cluster=cluster_of(world), lanes=FakeLanes())
    assert world.study.trial(specs[0].trial_id, 0).result() is None and not reported


def test_a_trial_begins_when_its_devices_are_cool_and_says_how_warm_they_were(
    world, specs, reported, monkeypatch
) -> None:
    seen: list[Attempt] = []
    monkeypatch.setattr(run_study, "run_trial", lambda attempt, *_: seen.append(attempt))
    monkeypatch.setattr(run_study, "_temperatures_c", lambda _attempt, _lanes: {"n0/gpu0": 41.0, "n0/gpu1": 39.5})
    searcher = make_searcher(world, specs[:1], Measure(cooldown_temp_c=45))
    _trainable(searcher.suggest("t0"), cluster=cluster_of(world), lanes=FakeLanes())
    assert seen[0].numbers.start_temp_max_c == 41.0 and seen[0].tags["nodes"] == "n0"
    assert seen[0].tags["ray.cluster"] == "own"

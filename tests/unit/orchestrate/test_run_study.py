"""Tune's view of a study's controller, and of its trials. No Ray is started."""

import copy
import pickle
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray.air.execution._internal import event_manager
from ray.exceptions import RayActorError, RayError
from ray.tune import TuneError

from wattune.errors import EngineError
from wattune.orchestrate import lost_cluster, run_study
from wattune.orchestrate.cluster import Cluster
from wattune.orchestrate.events import TrialProgress
from wattune.orchestrate.run_study import _cause, _OneDriver, _Progress, _StudySearcher, require_libraries
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


def test_the_next_trial_starts_while_the_result_of_a_measured_one_is_made(world, specs) -> None:
    searcher = make_searcher(world, specs, isolation="warm")
    attempt = searcher.suggest("t0")["attempt"]
    assert searcher.suggest("t1") is None
    searcher.on_trial_result("t0", {"done_trials": 0})
    assert world.study.trial(attempt.trial_id, 0).result() is None
    assert searcher.suggest("t1")["attempt"].spec == specs[1]


def test_tune_runs_many_trials_at_a_time_without_an_actor_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own manager starts them, hears twice of each, and of one whose driver died.

    The class in which Tune puts the driver's AWS keys, for Ray to write into its logs, is not touched.
    """
    refs: dict[int, Any] = {}

    def put(value: Any) -> int:
        refs[len(refs)] = value
        return len(refs) - 1

    def get(ref: int) -> Any:
        if isinstance(refs[ref], Exception):
            raise refs[ref]
        return refs[ref]

    for module in (run_study.ray, event_manager.ray):
        monkeypatch.setattr(module, "put", put)
        monkeypatch.setattr(module, "get", get)
        monkeypatch.setattr(module, "wait", lambda pending, **_: (pending[:1], pending[1:]))
    lanes: Any = SimpleNamespace(
        drive=lambda attempt, cluster: put({"done_trials": 0} if attempt else RayActorError()),
        concluded=lambda _: put({"done_trials": 1, "done": True}),
    )
    manager, heard = _OneDriver(lanes, Cluster(nodes=(), driver_node_id="")), []
    for number in range(40):
        given = {"config": {"attempt": number % 2}}
        heard_of = {
            f"on_{name}": lambda actor, *_, name=name: heard.append(name) for name in ("start", "stop", "error")
        }
        actor = manager.add_actor(cls=None, kwargs=given, resource_request=None, **heard_of)
        for _ in range(2 if number % 2 else 1):
            manager.schedule_actor_task(actor, "train", on_result=lambda _, told: heard.append(told["done_trials"]))
    assert manager.num_live_actors == 40 and manager.num_pending_actors == 0
    while manager.next(timeout=0):
        if not manager.num_actor_tasks and heard.count("start") == 40:
            break
    assert [heard.count(one) for one in ("start", "error", 0, 1)] == [40, 20, 20, 20]
    late = manager.add_actor(cls=None, kwargs=given, resource_request=None)
    assert not manager.remove_actor(late, kill=True), "Tune kills what it comes late to forget, as on a busy machine"
    assert manager.next(timeout=0)
    manager.cleanup()

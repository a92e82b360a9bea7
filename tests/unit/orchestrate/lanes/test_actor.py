"""The actor that holds lanes: calls of workers nobody knows, room on shared nodes, the cause of an error.

No Ray is started.
"""

import asyncio
import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.train import FailureConfig, ScalingConfig
from ray.train.v2._internal.execution.controller.state import InitializingState, RunningState
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError
from specs import trial_spec

from wattune.engines import ahead
from wattune.errors import TelemetryError
from wattune.orchestrate.cluster import Node
from wattune.orchestrate.lanes import actor, train_runs
from wattune.orchestrate.lanes.actor import LaneKeeper
from wattune.orchestrate.lanes.messages import Answer, GroupKey
from wattune.orchestrate.lanes.post import LED
from wattune.orchestrate.lanes.ray_errors import cause, death
from wattune.orchestrate.ray_settings import JOB_SETTINGS
from wattune.plans.placement import Slot
from wattune.workers.outcome import RankOutcome


def test_a_cause_is_one_line_of_the_innermost_error() -> None:
    inner = TelemetryError("the sampler ended\n  it said this")
    assert cause(RayTaskError("start", "Traceback\n  long", inner)) == "the sampler ended it said this"
    outer = RuntimeError("outer")
    outer.__cause__ = ValueError("inner\ntwo")
    assert cause(outer) == "ValueError: inner two"


def test_of_an_error_of_wattunes_own_its_words_are_the_cause() -> None:
    said = TelemetryError("telemetry of node n0 did not answer within 90 s; check that the node is alive")
    said.__cause__ = GetTimeoutError("Get timed out")
    assert cause(said) == str(said)
    assert cause(RayTaskError("start", "Traceback\n long", said).as_instanceof_cause()) == str(said)


def test_the_cause_of_a_lost_group_names_its_first_worker() -> None:
    lost = RuntimeError("2 workers failed")
    lost.worker_failures = {3: ValueError("later"), 1: MemoryError("no memory")}  # type: ignore[attr-defined]
    assert cause(lost) == "worker 1 of the group: MemoryError: no memory"
    assert cause(RuntimeError()) == "RuntimeError: no message"


HEAD = "0f" * 28
"""The node of the study, by its id."""


class FakeLane:
    """A lane that notes its calls."""

    def __init__(self, nodes: tuple[str, ...]) -> None:
        self.nodes, self.calls, self.windows = nodes, [], []
        self.ends, self.ends_with_window = asyncio.Event(), True

    async def run(self, assignment: Any) -> Answer:
        self.calls.append("run")
        await asyncio.wait_for(self.ends.wait(), 30)
        return Answer(number=1)

    def open_window(self, window: str) -> None:
        self.windows.append(window)
        if self.ends_with_window:
            self.ends.set()

    async def make_room(self) -> None:
        self.calls.append("make_room")

    async def close(self, reason: str, *, interrupts: bool = False) -> None:
        self.calls.append(("close", reason, interrupts))

    async def settle(self) -> str:
        return "+".join(self.nodes)

    def stop_trial(self, name: str, reason: str) -> bool:
        mine = name == "+".join(self.nodes)
        if mine:
            self.calls.append(("stop_trial", reason))
            self.ends.set()
        return mine

    def progress(self) -> Any:
        return {"+".join(self.nodes): "progress"} if len(self.nodes) == 1 else {}

    def spans(self, name: str) -> dict[int, Any]:
        return {0: "spans"} if name == "+".join(self.nodes) else {}


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> LaneKeeper:
    """An actor's instance in this process, whose lanes are fakes."""
    monkeypatch.setattr(
        actor.ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=None, get_node_id=lambda: HEAD)
    )
    monkeypatch.setattr(actor, "remove_orphans", lambda: 0)
    monkeypatch.setattr(actor, "Lane", lambda nodes, _launch, _kill, _probe: FakeLane(nodes))
    unused: Any = None
    return LaneKeeper(str(tmp_path), None, unused)


def assignment(*nodes: str) -> Any:
    attempt = SimpleNamespace(name="+".join(nodes), nodes=[SimpleNamespace(node_id=node) for node in nodes])
    spec = SimpleNamespace(engine="torch")
    return SimpleNamespace(node_names={node: node for node in nodes}, attempt=attempt, spec=spec, window="w")


def test_the_posts_that_ask_many_nodes_are_there_before_their_ranks(
    keeper: LaneKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "open_post", lambda _keeper, _born, node_id, _head: f"post of {node_id}")
    ids = (HEAD, *map(str, range(2 * LED)))
    nodes = [Node(node_id=node_id, name=node_id, num_cpus=1, num_gpus=0) for node_id in ids]
    assert keeper.top(nodes[:LED]) == (None, {})
    top, names = keeper.top(nodes)
    assert top == "post of 0" and [*keeper._posts] == ["0", str(LED - 1), str(2 * LED - 1)]
    assert names[nodes[0]] == names[nodes[1]], "the study's node has none"
    assert [names[node].rpartition("-")[2] for node in nodes[1:]] == [node.node_id for node in nodes[1:]]


def lane_of(keeper: LaneKeeper, *nodes: str) -> Any:
    return next(lane for lane in keeper._lanes.values() if lane.nodes == nodes)


def test_lanes_on_the_same_nodes_make_room_and_others_go_on(keeper: LaneKeeper) -> None:
    async def scenario() -> None:
        for nodes in (("a",), ("b",), ("c",), ("a", "b"), ("a",)):
            assert (await keeper.run(assignment(*nodes))).number == 1

    asyncio.run(scenario())
    assert len(keeper._lanes) == 4, "one for each set of nodes"
    assert lane_of(keeper, "a").calls == ["run", "make_room", "run"]
    assert lane_of(keeper, "b").calls == ["run", "make_room"]
    assert lane_of(keeper, "c").calls == ["run"]
    assert lane_of(keeper, "a", "b").calls == ["run", "make_room"]


def held(keeper: LaneKeeper, *nodes: str) -> Any:
    """The lane of these nodes, whose trial ends only when it is stopped."""
    lane: Any = keeper._lane(nodes)
    lane.ends_with_window = False
    return lane


def test_a_trial_is_looked_at_again_and_again_until_it_is_above_its_limit(
    keeper: LaneKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "LOOK_S", 0.01)
    reasons = iter([None, None, "3000 W"])

    async def scenario() -> None:
        lane = held(keeper, "a")
        assert (await keeper.run(assignment("a"), lambda: next(reasons))).number == 1
        assert lane.calls == ["run", ("stop_trial", "3000 W")] and lane.windows == ["w"]

    asyncio.run(scenario())


def test_sensors_that_do_not_open_end_the_trial_and_are_its_error(
    keeper: LaneKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "LOOK_S", 0.01)

    def fails() -> None:
        raise TelemetryError("no sensor")

    async def scenario() -> None:
        lane = held(keeper, "a")
        with pytest.raises(TelemetryError, match="no sensor"):
            await keeper.run(assignment("a"), await_sensors=fails)
        assert lane.calls == ["run", ("stop_trial", "no sensor")] and not lane.windows

    asyncio.run(scenario())


def test_a_command_begins_when_its_window_may(keeper: LaneKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "is_command", lambda _spec: True)
    begun: list[list[Any]] = []

    async def scenario() -> None:
        lane: Any = keeper._lane(("a",))
        await keeper.run(assignment("a"), await_sensors=lambda: begun.append(list(lane.calls)))

    asyncio.run(scenario())
    assert begun == [[]]


@pytest.mark.parametrize(("concluded", "nodes", "waits"), [("a", "a", True), ("b", HEAD, True), ("b", "a", False)])
def test_a_window_opens_when_nothing_is_concluded_on_its_nodes_that_was_when_it_was_asked_for(
    keeper: LaneKeeper, concluded: str, nodes: str, waits: bool
) -> None:
    """A result is made on the trial's own nodes and on the study's."""

    async def scenario() -> None:
        lane: Any = keeper._lane((nodes,))
        with keeper.concluding(assignment(concluded).attempt):
            running = asyncio.create_task(keeper.run(assignment(nodes)))
            await asyncio.wait([running], timeout=0.3)
            assert (lane.windows == []) is waits
        await asyncio.wait_for(running, 30)
        assert lane.windows == ["w"]

    asyncio.run(scenario())


def test_a_conclusion_that_hangs_keeps_no_trial_for_ever(
    keeper: LaneKeeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(actor, "CONCLUDED_S", 0.05)

    async def scenario() -> None:
        with keeper.concluding(assignment("a").attempt):
            assert (await keeper.run(assignment("a"))).number == 1

    asyncio.run(scenario())
    assert "a takes longer than 0 s" in caplog.text


def test_a_trial_frees_its_nodes_before_it_is_concluded_and_its_error_is_told_then(keeper: LaneKeeper) -> None:
    async def drives(_keeper: Any, attempt: Any, _cluster: Any, free: Any) -> None:
        free()
        await asyncio.sleep(0.01)
        if attempt.name == "b":
            raise RayActorError

    async def scenario() -> None:
        keeper._drive = drives
        for name in ("a", "b"):
            assert await keeper.drive(assignment(name).attempt, None) == {"done_trials": 0}  # type: ignore[arg-type]
        assert await keeper.concluded("a") == {"done_trials": 1, "done": True}
        with pytest.raises(RayActorError):
            await keeper.concluded("b")
        assert not keeper._driven

    asyncio.run(scenario())


def test_nodes_of_a_trial_that_frees_none_early_are_free_when_its_end_is_told(keeper: LaneKeeper) -> None:
    """Its result counts in the choice of what runs there next."""

    async def drives(_keeper: Any, attempt: Any, _cluster: Any, _free: Any) -> None:
        if attempt.name == "b":
            raise RayActorError

    async def scenario() -> None:
        keeper._drive = drives
        told = await keeper.drive(assignment("a").attempt, None)  # type: ignore[arg-type]
        assert told == {"done_trials": 1, "done": True}
        with pytest.raises(RayActorError):
            await keeper.drive(assignment("b").attempt, None)  # type: ignore[arg-type]
        assert not keeper._driven

    asyncio.run(scenario())


def test_results_are_made_aside_at_low_priority_by_a_few_processes(
    keeper: LaneKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Made:
        def __init__(self) -> None:
            self.running: list[Any] = []
            self.do = SimpleNamespace(remote=lambda work: asyncio.ensure_future(self._do(work)))
            made.append(self)

        async def _do(self, work: Any) -> Any:
            self.running.append(work)
            await asyncio.sleep(0.01)
            return work()

    monkeypatch.setattr(actor.os, "cpu_count", lambda: 6)
    monkeypatch.setattr(
        actor.ray, "remote", lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=Made))
    )

    async def scenario() -> None:
        assert await asyncio.gather(*(keeper.aside(lambda n=n: n) for n in range(9))) == list(range(9))

    asyncio.run(scenario())
    assert [len(one.running) for one in made] == [4, 4, 4], "each begins with what loads what makes results"
    levels: list[int] = []
    monkeypatch.setattr(actor.os, "nice", levels.append)
    actor.Aside()
    assert levels == [10]


def test_calls_find_the_lane_of_their_trial(keeper: LaneKeeper) -> None:
    async def scenario() -> None:
        for nodes in (("a",), ("b", "c")):
            assert await keeper.settle(assignment(*nodes)) == "+".join(nodes)
        assert await keeper.progress() == {"a": "progress"}
        assert keeper.spans("b+c") == {0: "spans"} and keeper.spans("other") == {}

    asyncio.run(scenario())


def test_lanes_on_a_dead_node_close_and_their_telemetry_is_forgotten(keeper: LaneKeeper) -> None:
    keeper._telemetry = {("a", ("host",)): "of a", ("b", ("host",)): "of b"}  # type: ignore[dict-item]

    async def scenario() -> list[Any]:
        for nodes in (("a",), ("b",), ("a", "b")):
            await keeper.settle(assignment(*nodes))
        lanes = [lane_of(keeper, *nodes) for nodes in (("a",), ("b",), ("a", "b"))]
        await keeper.forget_nodes(("a",))
        return [lane.calls for lane in lanes]

    closed = ("close", "a node of the lane is gone", False)
    assert asyncio.run(scenario()) == [[closed], [], [closed]]
    assert [lane.nodes for lane in keeper._lanes.values()] == [("b",)]
    assert list(keeper._telemetry.values()) == ["of b"]


def test_closing_interrupts_every_lane_and_releases_every_sampler_also_past_one_that_is_gone(
    keeper: LaneKeeper,
) -> None:
    released: list[str] = []

    def sampler(name: str, error: Exception | None = None) -> Any:
        async def release() -> None:
            released.append(name)
            if error is not None:
                raise error

        return SimpleNamespace(release=SimpleNamespace(remote=release))

    keeper._telemetry = {("a", ()): sampler("a", RayActorError()), ("b", ()): sampler("b")}

    async def scenario() -> Any:
        await keeper.settle(assignment("a"))
        await keeper.close()
        return lane_of(keeper, "a").calls

    assert asyncio.run(scenario()) == [("close", "the study was stopped", True)]
    assert sorted(released) == ["a", "b"]


def test_telemetry_actors_are_started_once_for_each_node_and_kind(
    keeper: LaneKeeper, monkeypatch: pytest.MonkeyPatch, new_node: Any
) -> None:
    started: list[tuple[str, list[str]]] = []

    def start(node: Any, backends: list[str]) -> str:
        started.append((node.name, backends))
        return f"{node.name}/{'+'.join(backends)}"

    monkeypatch.setattr(actor, "telemetry_actor", start)
    nodes = [new_node("n0"), new_node("n1")]
    assert asyncio.run(keeper.telemetry(nodes, ["host"])) == ["n0/host", "n1/host"]
    assert asyncio.run(keeper.telemetry(nodes[1:], ["host"])) == ["n1/host"]
    assert asyncio.run(keeper.telemetry(nodes[:1], ["host", "nvml"])) == ["n0/host+nvml"]
    assert started == [("n0", ["host"]), ("n1", ["host"]), ("n0", ["host", "nvml"])]


def test_workers_of_a_lane_that_is_gone_are_told_to_end(keeper: LaneKeeper) -> None:
    place: Any = SimpleNamespace(number=0)
    outcome: Any = RankOutcome(rank=0, status="completed")  # type: ignore[arg-type]

    async def scenario() -> list[Any]:
        await keeper.call("gone", "failing", 1, 1, outcome, keeps_group=True)
        await keeper.call("gone", "deliver", 1, 1, outcome, None)
        await keeper.call("gone", "hung", 1, 1, outcome, "stacks")
        await keeper.call("gone", "report_stacks", 1, 1, 0, "stacks")
        await keeper.call("gone", "report", 1, 1, "build", 0, None)
        await keeper.call("gone", "show", 1, 1, 0, "spans")
        return [
            await keeper.call("gone", "join", 1, place),
            await keeper.call("gone", "next_trial", 1, 0, None),
            await keeper.call("gone", "stop_order", 1, 1),
            await keeper.call("gone", "lost", 1, "killed"),
        ]

    assert asyncio.run(scenario()) == [None] * 4


@pytest.mark.parametrize("wanted", [True, False])
def test_a_train_run_starts_other_workers_only_where_its_lane_wants_them(wanted: bool) -> None:
    told: list[tuple[Any, ...]] = []
    lane: Any = SimpleNamespace(lost=lambda *said: (told.append(said), wanted)[1])
    policy = train_runs._Policy(lane, 4, FailureConfig(max_failures=-1, controller_failure_limit=1))
    failures = {2: ValueError("later"), 0: RayTaskError("f", "", OSError("disk full"))}
    decision = policy.make_decision(WorkerGroupError("2 workers failed", failures))
    assert told == [(4, "worker 0 of the group: OSError: disk full", {})]
    assert decision is (FailureDecision.RETRY if wanted else FailureDecision.RAISE)
    assert policy.make_decision(ControllerError(ValueError("a hook"))) is FailureDecision.RAISE and len(told) == 1


def test_a_controller_of_train_blocks_no_other_and_asks_many_workers_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own loop starts, polls and ends workers; only what waits leaves the loop of the lanes."""
    threads: list[str] = []

    async def in_thread(work: Any) -> Any:
        threads.append("step" if getattr(work, "func", None) is None else "poll")
        return await asyncio.get_running_loop().run_in_executor(None, work)

    def made(self: Any, **_: Any) -> None:
        self._health_check_interval_s, self._latest_poll_time, self._state = 2.0, 0.0, InitializingState()

    async def step(self: Any) -> Any:
        if isinstance(self._state, RunningState):
            return await self._poll_workers()
        return "stepped"

    monkeypatch.setattr(train_runs.TrainController, "__init__", made)
    monkeypatch.setattr(train_runs.TrainController, "_step", step)
    few, many = (train_runs._Controller(in_thread, lambda **_: True, number) for number in (2, 4096))
    assert (few._health_check_interval_s, many._health_check_interval_s) == (2.0, 16.0)
    few._worker_group = SimpleNamespace(poll_status=lambda timeout: timeout)
    assert asyncio.run(few._step()) == "stepped"
    few._state = RunningState()
    assert asyncio.run(few._step()) == 2.0 and threads == ["step", "poll"]


def test_only_a_process_that_ended_has_died() -> None:
    polled = RuntimeError("A worker health check failed.")
    polled.health_check_failure = WorkerCrashedError()  # type: ignore[attr-defined]
    assert "died" in death(ActorDiedError()) and death(polled)
    assert death(ActorUnavailableError("no answer", b"\0" * 16)) == "", "it may come back"
    assert death(RayTaskError("serve", "", ValueError("a broken engine"))) == ""
    assert death(ValueError("a broken engine")) == ""


def test_a_probe_tells_a_dead_worker_from_one_that_lives() -> None:
    async def ended() -> None:
        raise ActorDiedError

    async def lives() -> None:
        return None

    def place(answer: Any) -> Any:
        return SimpleNamespace(actor=cloudpickle.dumps(SimpleNamespace(__ray_ready__=SimpleNamespace(remote=answer))))

    assert asyncio.run(actor._probe(place(lives))) == ""
    assert "died" in asyncio.run(actor._probe(place(ended)))


def of_ranks(*coming: Any) -> Any:
    key = replace(GroupKey.of(trial_spec(on="1x2 h200_sxm"), {"GPU": 1.0}), coming=coming)
    return train_runs._of_ranks(key, None, ("n0",))


@pytest.mark.parametrize("trainer", [train_runs._of_commands, of_ranks])
def test_no_process_for_datasets_or_places_is_started_beside_workers(trainer: Any) -> None:
    """Everything else that Train does about a group of workers stays."""
    run = trainer()(train_loop_config={}, scaling_config=ScalingConfig(num_workers=2))
    kept = [type(each).__name__ for each in run._create_default_callbacks()]
    rays = [type(each).__name__ for each in DataParallelTrainer._create_default_callbacks(run)]
    assert set(rays) - set(kept) == {"DatasetsCallback", "PlacementGroupCleanerCallback"}
    assert len(kept) == len(rays) - 2


@pytest.mark.parametrize("trainer", [train_runs._of_commands, of_ranks])
def test_no_process_is_started_for_a_controller_to_ask_an_autoscaler_or_to_report(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller decides on workers as Train's own does, and needs no answer before they start."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(train_runs, "_Controller", lambda _, __, num, **settings: given.update(settings, num=num))
    monkeypatch.setattr(ScalingPolicy, "_send_resource_request", lambda _: pytest.fail("an actor was asked"))
    for module, name in (
        (train_runs.group_of_workers, "SynchronizationActor"),
        (train_runs.group_state, "_shutdown_sync_actor"),
    ):
        monkeypatch.setattr(module, name, None)
    monkeypatch.setattr(train_runs, "ObjectRefWrapper", lambda function: function)
    run = trainer()(train_loop_config={}, scaling_config=ScalingConfig(num_workers=2))
    run.controller(None, None, "policy")
    assert (given["num"], given["failure_policy"], given["train_run_context"]) == (2, "policy", run.train_run_context)
    policy = given["scaling_policy"]
    policy.after_controller_start(SimpleNamespace(run_id="a"))
    assert policy.make_decision_for_non_running_worker_group().num_workers == 2
    assert isinstance(policy.make_decision_for_running_worker_group(None, None), NoopDecision)
    asyncio.run(policy.before_controller_shutdown())
    policy.before_controller_abort()
    nobody = train_runs.group_of_workers.SynchronizationActor.options(label_selector={}).remote(timeout_s=1)
    train_runs.group_state._shutdown_sync_actor(nobody)
    assert isinstance(cloudpickle.loads(cloudpickle.dumps(nobody)), train_runs._Nobody), "every worker gets it"


def test_workers_without_variables_of_their_own_are_processes_that_ray_has_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Train hands workers each variable of its own that is set: with any of these Ray starts new processes."""
    for name, value in JOB_SETTINGS.items():
        monkeypatch.setenv(name, value)
    trains = train_runs.group_of_workers.WorkerGroup._get_worker_runtime_env(custom_runtime_env={})
    assert trains == {"env_vars": {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}}
    own = {"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    for given in ({}, own):
        assert train_runs._Workers._get_worker_runtime_env(custom_runtime_env=given) == given


@pytest.mark.parametrize(("ready", "wanted"), [([True], 0), ([False, False, True], 2), ([False] * 9, 2)])
def test_a_place_is_waited_for_as_long_as_the_lane_wants_its_workers(
    monkeypatch: pytest.MonkeyPatch, ready: list[bool], wanted: int
) -> None:
    told: list[bool] = []

    def gone(*_: Any) -> None:
        told.append(None)  # type: ignore[arg-type]

    its_own = SimpleNamespace(bundle_specs=[{"GPU": 1.0}] * 2)
    handle = SimpleNamespace(wait=lambda _s: ready.pop(0), shutdown=gone, placement_group=its_own)
    monkeypatch.setattr(train_runs.group_of_workers.WorkerGroup, "_create_placement_group", lambda *_: handle)
    monkeypatch.setattr(train_runs.DefaultPlacementGroupHandle, "shutdown", gone)

    def place(_asked_s: float, placed_s: float) -> bool:
        told.append(placed_s < math.inf)
        return len(told) <= wanted

    shared = {"place": staticmethod(place), "places": []}

    def group(num_workers: int) -> Any:
        workers: Any = object.__new__(type("Workers", (train_runs._Workers,), shared))
        needs = {"num_workers": num_workers, "resources_per_worker": {"GPU": 1.0}, "label_selector": None}
        workers._worker_group_context = SimpleNamespace(**needs)
        return workers

    if sum(ready):
        held = group(2)._create_placement_group(None, None)
        assert held.placement_group is its_own and told == [False] * wanted + [True]
        assert group(2)._create_placement_group(None, None) is held, "the next workers start in it"
        held.shutdown()
        assert None not in told, "these are there yet"
        for num_workers in (1, 2):
            ready.append(True)
            assert group(num_workers)._create_placement_group(None, None) is not held, "it does not fit, or is gone"
            shared["places"][:] = [held]
            held.num_groups -= 1
    else:
        with pytest.raises(RuntimeError, match="not waited for"):
            group(2)._create_placement_group(None, None)
        assert told == [False] * (wanted + 1) + [None], "its place is given back"


@pytest.mark.parametrize(("engine", "wanted"), [("torch", True), ("not_there:Engine", True), ("torch", False)])
def test_a_worker_loads_its_engine_and_claims_its_device_at_its_turn(
    monkeypatch: pytest.MonkeyPatch, engine: str, wanted: bool
) -> None:
    from wattune.orchestrate.lanes import worker

    done: list[Any] = []

    def called(*told: Any) -> Any:
        done.append(told)
        return told[0]

    @contextlib.contextmanager
    def claimed() -> Iterator[None]:
        done.append("claimed")
        yield

    keeper = SimpleNamespace(call=SimpleNamespace(remote=called))
    monkeypatch.setattr(worker, "nearest", lambda _: keeper)
    monkeypatch.setattr(worker, "ray", SimpleNamespace(get=lambda _: wanted))
    monkeypatch.setattr(worker, "serve", lambda config: done.append(config["run"]))
    monkeypatch.setattr("ray.train.torch.config.TorchConfigContextManager", claimed)
    monkeypatch.delitem(sys.modules, "wattune.engines.torch.engine", raising=False)
    train_runs._serve_ranks({"engine": engine, "lane": "a", "run": 7})
    assert done == [("a", "turn", 7), *(["claimed", 7] if wanted else [])]
    assert ("wattune.engines.torch.engine" in sys.modules) is (engine == "torch")


def test_ranks_meet_before_they_serve_and_commands_do_not() -> None:
    asked: list[tuple[Any, ...]] = []

    class Workers:
        def __len__(self) -> int:
            return 2

        def execute(self, function: Any, *arguments: Any) -> None:
            asked.append(("every worker", function.__name__, *arguments))

        execute_async = execute

        def execute_single(self, number: int, function: Any) -> tuple[str, int]:
            assert (number, function.__name__) == (0, "get_address_and_port")
            return "10.0.0.1", 4711

        def execute_single_async(self, number: int, function: Any, *arguments: Any) -> str:
            asked.append((number, function.__name__, *arguments))
            return f"answer of {number}"

    def start(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        waited: list[str] = []
        monkeypatch.setattr(train_runs.ray, "get", waited.extend)
        run = trainer()(train_loop_config={}, scaling_config=ScalingConfig(num_workers=2))
        run.backend_config.backend_cls().on_start(Workers(), run.backend_config)
        return waited

    with pytest.MonkeyPatch.context() as patch:
        assert start(train_runs._of_commands, patch) == [] and asked == []
        assert start(of_ranks, patch) == start(lambda: of_ranks("plan"), patch) == ["answer of 0", "answer of 1"]
    # Their environment is prepared before they load torch, which meeting does.
    met = [(0, "_meet", "10.0.0.1", 4711, 0, 2), (1, "_meet", "10.0.0.1", 4711, 1, 2)]
    first = ("every worker", "prepare_environment", "h200_sxm", None)
    assert asked == [first, *met, first, ("every worker", "_compile_ahead", ("plan",), ("n0",)), *met]


def test_a_worker_compiles_for_the_rank_of_its_own_device_and_a_failure_of_it_stops_no_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[Any] = []
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["7"]}, get_node_id=lambda: "n1")
    monkeypatch.setattr(train_runs.ray, "get_runtime_context", lambda: context)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(ahead, "start", lambda *given: started.append(given))
    train_runs._compile_ahead(("plan",), ("n0", "n1"))
    assert started == [(("plan",), Slot(node=1, device=1))]
    train_runs._compile_ahead(("plan",), ("n0",))
    assert len(started) == 1 and "no graphs are compiled ahead" in caplog.text

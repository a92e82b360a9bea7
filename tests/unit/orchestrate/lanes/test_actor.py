"""The actor that holds lanes: calls of workers nobody knows, room on shared nodes, the cause of an error.

No Ray is started.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy, NoopDecision, ScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from wattune.errors import TelemetryError
from wattune.orchestrate.lanes import actor
from wattune.orchestrate.lanes.actor import LaneKeeper, cause, death
from wattune.orchestrate.lanes.messages import Answer
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


class FakeLane:
    """A lane that notes its calls."""

    def __init__(self, nodes: tuple[str, ...]) -> None:
        self.nodes, self.calls = nodes, []

    async def run(self, assignment: Any) -> Answer:
        self.calls.append("run")
        return Answer(number=1)

    async def make_room(self) -> None:
        self.calls.append("make_room")

    async def close(self, reason: str, *, interrupts: bool = False) -> None:
        self.calls.append(("close", reason, interrupts))

    async def settle(self) -> str:
        return "+".join(self.nodes)

    def stop_trial(self, name: str, reason: str) -> bool:
        return name == "+".join(self.nodes)

    def progress(self) -> Any:
        return {"+".join(self.nodes): "progress"} if len(self.nodes) == 1 else {}

    def spans(self, name: str) -> dict[int, Any]:
        return {0: "spans"} if name == "+".join(self.nodes) else {}


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> LaneKeeper:
    """An actor's instance in this process, whose lanes are fakes."""
    monkeypatch.setattr(actor.ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=None))
    monkeypatch.setattr(actor, "Lane", lambda nodes, _launch, _kill, _probe, _share: FakeLane(nodes))
    return LaneKeeper(str(tmp_path))


def assignment(*nodes: str) -> Any:
    return SimpleNamespace(node_names={node: node for node in nodes})


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


def test_calls_find_the_lane_of_their_trial(keeper: LaneKeeper) -> None:
    async def scenario() -> None:
        for nodes in (("a",), ("b", "c")):
            assert await keeper.settle(nodes) == "+".join(nodes)
        assert await keeper.stop_trial("b+c", "3000 W") and not await keeper.stop_trial("other", "3000 W")
        assert await keeper.progress() == {"a": "progress"}
        assert await keeper.spans("b+c") == {0: "spans"} and await keeper.spans("other") == {}

    asyncio.run(scenario())


def test_lanes_on_a_dead_node_close_and_their_telemetry_is_forgotten(keeper: LaneKeeper) -> None:
    keeper._telemetry = {("a", ("host",)): "of a", ("b", ("host",)): "of b"}  # type: ignore[dict-item]

    async def scenario() -> list[Any]:
        for nodes in (("a",), ("b",), ("a", "b")):
            await keeper.settle(nodes)
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
        await keeper.settle(("a",))
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


@pytest.mark.parametrize(("answer", "ends"), [(True, False), (False, True), (GetTimeoutError(), True)])
def test_a_train_run_nobody_wants_ends_before_it_starts_other_workers(
    monkeypatch: pytest.MonkeyPatch, answer: Any, ends: bool
) -> None:
    told: list[tuple[Any, ...]] = []
    exits: list[int] = []

    def get(_pending: Any, timeout: float) -> bool:
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    monkeypatch.setattr(actor.ray, "get", get)
    monkeypatch.setattr(actor.os, "_exit", exits.append)
    holder: Any = SimpleNamespace(call=SimpleNamespace(remote=lambda *said: told.append(said)))
    losses = actor._Losses(holder, "lane", 4)
    losses.after_exception(None, {2: ValueError("later"), 0: RayTaskError("f", "", OSError("disk full"))})
    assert told == [("lane", "lost", 4, "worker 0 of the group: OSError: disk full", {})]
    assert exits == ([1] if ends else [])


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
        return SimpleNamespace(actor=SimpleNamespace(__ray_ready__=SimpleNamespace(remote=answer)))

    assert asyncio.run(actor._probe(place(lives))) == ""
    assert "died" in asyncio.run(actor._probe(place(ended)))


def of_ranks() -> Any:
    return actor._of_ranks("h200_sxm", None)


@pytest.mark.parametrize("trainer", [actor._of_commands, of_ranks])
def test_no_process_for_datasets_or_places_is_started_beside_workers(trainer: Any) -> None:
    """Everything else that Train does about a group of workers stays."""
    run = trainer()(train_loop_config={}, scaling_config=ScalingConfig(num_workers=2))
    kept = [type(each).__name__ for each in run._create_default_callbacks()]
    rays = [type(each).__name__ for each in DataParallelTrainer._create_default_callbacks(run)]
    assert set(rays) - set(kept) == {"DatasetsCallback", "PlacementGroupCleanerCallback"}
    assert len(kept) == len(rays) - 2


@pytest.mark.parametrize("trainer", [actor._of_commands, of_ranks])
def test_no_process_is_started_to_ask_an_autoscaler(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller decides on workers as Train's own does, and needs no answer before they start."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        DataParallelTrainer, "_initialize_and_run_controller", lambda _, **settings: given.update(settings)
    )
    monkeypatch.setattr(ScalingPolicy, "_send_resource_request", lambda _: pytest.fail("an actor was asked"))
    run = trainer()(train_loop_config={}, scaling_config=ScalingConfig(num_workers=2))
    run._initialize_and_run_controller(scaling_policy=FixedScalingPolicy(run.scaling_config), callbacks=["theirs"])
    policy = given.pop("scaling_policy")
    assert isinstance(policy, FixedScalingPolicy) and given == {"callbacks": ["theirs"]}
    policy.after_controller_start(SimpleNamespace(run_id="a"))
    assert policy.make_decision_for_non_running_worker_group().num_workers == 2
    assert isinstance(policy.make_decision_for_running_worker_group(None, None), NoopDecision)
    asyncio.run(policy.before_controller_shutdown())
    policy.before_controller_abort()


def test_ranks_meet_before_they_serve_and_commands_do_not() -> None:
    asked: list[tuple[Any, ...]] = []

    class Workers:
        def __len__(self) -> int:
            return 2

        def execute(self, function: Any, *arguments: Any) -> None:
            asked.append(("every worker", function.__name__, *arguments))

        def execute_single(self, number: int, function: Any) -> tuple[str, int]:
            assert (number, function.__name__) == (0, "get_address_and_port")
            return "10.0.0.1", 4711

        def execute_single_async(self, number: int, function: Any, *arguments: Any) -> str:
            asked.append((number, function.__name__, *arguments))
            return f"answer of {number}"

    def start(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        waited: list[str] = []
        monkeypatch.setattr(actor.ray, "get", waited.extend)
        run = trainer()(train_loop_config={}, scaling_config=ScalingConfig(num_workers=2))
        run.backend_config.backend_cls().on_start(Workers(), run.backend_config)
        return waited

    with pytest.MonkeyPatch.context() as patch:
        assert start(actor._of_commands, patch) == [] and asked == []
        assert start(of_ranks, patch) == ["answer of 0", "answer of 1"]
    # Their environment is prepared before they load torch, which meeting does.
    met = [(0, "_meet", "10.0.0.1", 4711, 0, 2), (1, "_meet", "10.0.0.1", 4711, 1, 2)]
    assert asked == [("every worker", "prepare_environment", "h200_sxm", None), *met]

"""A trial and its nodes' samplers, also if one of them fails. No Ray is started."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from wattune.catalog.hardware import DEVICES, ClusterSpec
from wattune.clock import ClockAnchor
from wattune.errors import TelemetryError
from wattune.orchestrate import trial_telemetry
from wattune.orchestrate.cluster import Cluster
from wattune.orchestrate.lanes.messages import Death, Place
from wattune.orchestrate.telemetry_actor import NodeClocks, NodeTelemetry, Sensed
from wattune.orchestrate.trial_telemetry import TrialTelemetry, sampling, sensor_backends
from wattune.storage.files import write_whole
from wattune.telemetry.registry import BACKENDS


@dataclass
class FakeActor:
    """A node's actor that notes its calls; the answer or error comes when it is fetched."""

    node: str
    fails: dict[str, Exception] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    num_oom_kills: int = 0
    sees: dict[str, str] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    unsent: str = ""

    def __getattr__(self, name: str) -> Any:
        answers = {
            "start": Sensed(device_names={}, cpus=(), clock=ClockAnchor.now()),
            "ready": self.sees,
            "stop": None,
            "recording": NodeTelemetry(
                node=self.node, manifest=self.manifest, losses=(), files=self.files, unsent=self.unsent
            ),
            "mono_ns": 10**18,
            "node_power_w": 500.0,
        }

        def remote(*arguments: object) -> Callable[[], Any]:
            self.asked.append(name)
            said = "Fatal Python error: Aborted" if arguments == (7,) else ""
            return lambda: (said, self.num_oom_kills) if name == "fate" else answers[name]

        def fail(*_: object) -> Callable[[], Any]:
            def raises() -> None:
                raise self.fails[name]

            self.asked.append(name)
            return raises

        return SimpleNamespace(remote=fail if name in self.fails else remote)


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch, make_specs: Any, new_node: Any) -> Callable[..., Any]:
    """Samples two nodes, the second of which is not the driver's."""
    monkeypatch.setattr(ray, "get", lambda pending, timeout=None: pending())
    monkeypatch.setattr(ray, "wait", lambda pending, num_returns, timeout: (pending, []))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01"))

    def begin(first: FakeActor, second: FakeActor) -> Any:
        cluster = Cluster(nodes=(new_node("n0"), new_node("n1")), driver_node_id="n0")
        lanes: Any = SimpleNamespace(
            telemetry_actors=lambda _nodes, _backends: [first, second], top=lambda _: (None, {}), clocks=NodeClocks()
        )
        return sampling("key", make_specs(1)[0], cluster, lanes)

    return begin


def test_where_one_node_cannot_be_sampled_no_other_goes_on(sampled: Any) -> None:
    first, second = FakeActor("n0"), FakeActor("n1", {"start": RayTaskError("start", "", OSError("disk full"))})
    with pytest.raises(TelemetryError), sampled(first, second):
        pytest.fail("it did not begin")
    assert first.asked == ["start", "stop"] and second.asked[-1] == "stop"


def test_clocks_are_asked_once_the_steps_are_over_and_one_that_is_not_told_is_a_loss(sampled: Any) -> None:
    sound, gone = FakeActor("n1"), FakeActor("n1", {"mono_ns": RayActorError(None, "it died")})
    with sampled(FakeActor("n0"), sound) as telemetry:
        assert "mono_ns" not in sound.asked
    assert telemetry.offsets.keys() == {"n1"} and not telemetry.lost
    with sampled(FakeActor("n0"), gone) as telemetry:
        pass
    assert not telemetry.offsets
    assert telemetry.lost == ["telemetry of node n1 ended (it died); check that the node is alive and has memory"]


def test_an_actors_own_error_is_one_line_that_names_the_node(sampled: Any) -> None:
    broken = FakeActor("n1", {"start": RayTaskError("start", "Traceback\n long", OSError("disk\nfull"))})
    with pytest.raises(TelemetryError, match=r"^telemetry of node n1: OSError: disk full$"):
        sampled(FakeActor("n0"), broken).__enter__()


@pytest.mark.parametrize(
    ("why", "said"),
    [
        (
            "The actor died unexpectedly.\n\tpid: 7\nThe actor is dead because its owner has died.",
            "the process that holds the lanes ended, and telemetry of node n1 with it; Ray starts it again",
        ),
        ("The actor died unexpectedly.\n\tpid: 7", "telemetry of node n1 ended (The actor died unexpectedly. pid: 7)"),
    ],
)
def test_an_actor_that_died_is_not_told_as_slow(sampled: Any, why: str, said: str) -> None:
    broken = FakeActor("n1", {"start": RayActorError(None, why)})
    with pytest.raises(TelemetryError) as found:
        sampled(FakeActor("n0"), broken).__enter__()
    assert str(found.value).startswith(said) and "did not answer" not in str(found.value)


def test_sensors_are_awaited_beside_the_workers_and_must_see_the_devices_they_saw_before(sampled: Any) -> None:
    first, second = FakeActor("n0"), FakeActor("n1")
    with sampled(first, second) as telemetry:
        assert "ready" not in first.asked
        telemetry.await_sensors()
        assert first.asked[-1] == second.asked[-1] == "ready"
        second.sees = {"GPU-1": "gpu0"}
        with pytest.raises(TelemetryError, match="node n1 see other devices than before"):
            telemetry.await_sensors()


@pytest.mark.parametrize("fails", [("stop", "recording"), ("recording",)])
def test_what_one_node_cannot_bring_home_does_not_cost_the_others_theirs(
    sampled: Any, tmp_path: Path, fails: tuple[str, ...]
) -> None:
    broken = FakeActor("n0", {call: RayTaskError(call, "Traceback", OSError("disk full")) for call in fails})
    with sampled(broken, FakeActor("n1", files={"fast.parquet": b"rows"})) as telemetry:
        pass
    digests = telemetry.keep(tmp_path)
    assert digests == {"telemetry/n1/fast.parquet": sha256(b"rows").hexdigest()}
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "telemetry/n1/fast.parquet"]
    assert [part.node for part in telemetry.recorded] == ["n1"]
    assert telemetry.lost == ["telemetry of node n0: OSError: disk full"]


@pytest.mark.parametrize(("warm", "strangers"), [(True, []), (False, [{"pid": 99}])])
def test_a_stranger_is_named_where_the_trials_processes_came_later(
    sampled: Any, tmp_path: Path, warm: bool, strangers: list[dict[str, int]]
) -> None:
    """Warm workers whose container hides their ids are on their devices all the time, under other ids."""
    always = {"other_processes": [{"pid": 99}]}
    manifest = {"devices": {"gpu0": {"at_start": always, "at_end": always}}}
    with sampled(FakeActor("n0", manifest=manifest), FakeActor("n1")) as telemetry:
        place = Place(rank=0, node="n0", slot=0, device="gpu0", device_uuid=None, pid=7, other_pids=(8,))
        telemetry.places, telemetry.warm = [place], warm
    telemetry.keep(tmp_path)
    device = telemetry.recorded[0].manifest["devices"]["gpu0"]
    assert [device[when]["other_processes"] for when in ("at_start", "at_end")] == [strangers, strangers]


def test_a_look_leaves_out_a_node_that_does_not_answer(sampled: Any, caplog: pytest.LogCaptureFixture) -> None:
    silent = FakeActor("n1", {"node_power_w": GetTimeoutError("not ready")})
    with sampled(FakeActor("n0"), silent) as telemetry:
        assert telemetry.node_power_w() == {"n0": 500.0}
    assert "telemetry of node n1 did not answer within 5 s; check" in caplog.text


def test_a_death_is_explained_by_its_own_node(sampled: Any) -> None:
    gone = FakeActor("n1", {"fate": RayActorError()})
    deaths = [
        Death(rank=0, node_id="n0", pid=7, why="it died"),
        Death(rank=1, node_id="n0", pid=8, why="it died"),
        Death(rank=2, node_id="n1", pid=7, why="its node was running low on memory"),
        Death(rank=3, node_id="n9", pid=7, why="it died"),
    ]
    with sampled(FakeActor("n0"), gone) as telemetry:
        found = telemetry.explained(deaths)
    assert [one.words for one in found] == ["Fatal Python error: Aborted", "", "", ""]
    assert [one.out_of_memory for one in found] == [False, False, True, False]
    with sampled(FakeActor("n0", num_oom_kills=1), gone) as telemetry:
        assert telemetry.explained(deaths[1:2])[0].out_of_memory


@pytest.mark.parametrize("name", DEVICES)
def test_every_kind_of_device_has_backends_that_are_built(name: str, make_specs: Any) -> None:
    backends = sensor_backends(make_specs(1, ClusterSpec(device=name, devices_per_node=2))[0])
    assert backends[0] == "host" and set(backends) <= BACKENDS.keys()
    assert ("nvml" in backends) == (DEVICES[name].vendor == "nvidia")


def test_silent_nodes_are_named_together_and_asked_once(sampled: Any, tmp_path: Path) -> None:
    silent = {call: GetTimeoutError("not ready") for call in ("stop", "recording", "forget")}
    first, second = FakeActor("n0", silent), FakeActor("n1", silent)
    with sampled(first, second) as telemetry:
        pass
    telemetry.keep(tmp_path)
    telemetry.forget()
    assert telemetry.lost == ["telemetry of nodes n0, n1 did not answer within 60 s; check that they are alive"]
    assert all(one.asked[-1] == "stop" for one in (first, second)), "who is silent is not waited for again"


@pytest.mark.parametrize(("num_nodes", "fails"), [(8, False), (9, False), (9, True)])
def test_work_on_files_of_many_nodes_is_done_on_one_that_sees_them(
    new_node: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_nodes: int, fails: bool
) -> None:
    nodes = [replace(new_node(f"n{number}"), node_id=f"{number:056x}") for number in range(num_nodes)]
    pinned: list[Any] = []

    def get(task: Callable[[], Any], timeout: float) -> Any:
        if fails:
            raise RayActorError
        return task()

    def options(**given: Any) -> Any:
        pinned.append(given["scheduling_strategy"].node_id)
        return SimpleNamespace(remote=lambda work: work)

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "remote", lambda _: SimpleNamespace(options=options))
    told = [
        NodeTelemetry(one.name, {}, (), {"telemetry/fast.parquet": "0"} if one != nodes[-1] else {}) for one in nodes
    ]
    telemetry = TrialTelemetry(key="", sensed={}, node_power_w=dict, actors=dict.fromkeys(nodes), recorded=told)
    assert telemetry.beside(lambda _: "done", Path()) == "done"
    assert pinned == ([nodes[-2].node_id] if num_nodes > 8 else [])
    assert ("n7 was to do is done here" in caplog.text) == fails


def test_nodes_of_a_silent_post_are_asked_themselves_and_what_a_node_raised_is_not_asked_again(
    new_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "get", lambda pending, timeout=None: pending())
    monkeypatch.setattr(ray, "wait", lambda refs, **_: ([one for one in refs if one() is not None], []))
    nodes = [replace(new_node(f"n{number}"), node_id=f"{number:056x}") for number in range(4)]
    actors = {node: FakeActor(node.name) for node in nodes}
    raised = RayTaskError("stop", "Traceback", OSError("disk full"))

    asked: list[Any] = []

    def top(answer: Any) -> Any:
        ask = SimpleNamespace(remote=lambda *given: asked.append(given) or (lambda: answer))
        return SimpleNamespace(ask=ask), {node: (f"post-{node.name}", node.name) for node in nodes}

    left = {node: actor for node, actor in actors.items() if node is not nodes[3]}
    names = [(f"post-n{number}", f"n{number}") for number in range(3)]
    found, failed = trial_telemetry._ask(left, top(["told", raised, TimeoutError()]), 60.0, "node_power_w", "key")
    assert found == {nodes[0]: "told", nodes[2]: 500.0} and failed == {nodes[1]: raised}
    assert [actor.asked for actor in actors.values()] == [[], [], ["node_power_w"], []]
    found, failed = trial_telemetry._ask(left, top(None), 60.0, "node_power_w", "key")
    assert found == dict.fromkeys(nodes[:3], 500.0) and not failed
    assert asked == [(names, 24.0, "node_power_w", "key")] * 2


class Store:
    """Storage at a URL that two nodes and the study's reach."""

    held: ClassVar[dict[str, bytes]] = {"study/trials/id-0/telemetry/n1/fast.parquet": b"rows"}

    def __init__(self, url: str) -> None:
        assert url == "s3://studies"

    def fetch_folder(self, inside: str, folder: Path, sizes: dict[str, int]) -> None:
        for name in sizes:
            write_whole(folder / name, self.held[f"{inside}/{name}"])


def test_rows_that_nodes_sent_to_the_storage_are_read_there_and_not_by_the_studys_node(
    new_node: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "study" / "trials" / "id-0"
    write_whole(folder / "telemetry/n0/fast.parquet", b"own rows")
    nodes = [new_node("n0"), new_node("n1")]
    sent = {"telemetry/n1/fast.parquet": 4}
    told = [
        NodeTelemetry("n0", {}, (), {"telemetry/n0/fast.parquet": "0"}),
        NodeTelemetry("n1", {}, (), dict.fromkeys(sent, "1"), sent=sent),
    ]
    assert [pickle.loads(pickle.dumps(one)) for one in told] == told
    ran_on: list[str] = []

    def on_node(_work: Any, node_id: str, **_: Any) -> Any:
        ran_on.append(node_id)
        return SimpleNamespace(remote=lambda work: work)

    monkeypatch.setattr(trial_telemetry, "RemoteStorage", Store)
    monkeypatch.setattr(trial_telemetry, "on_node", on_node)
    monkeypatch.setattr(ray, "get", lambda task, timeout: task())
    telemetry = TrialTelemetry(
        key="", sensed={}, node_power_w=dict, actors=dict.fromkeys(nodes), recorded=told, url="s3://studies"
    )

    def rows(path: Path) -> list[bytes]:
        assert path != folder
        return [one.read_bytes() for one in sorted(path.rglob("*.parquet"))]

    assert telemetry.beside(rows, folder) == [b"own rows", b"rows"] and ran_on == [nodes[1].node_id]
    assert [one.name for one in folder.rglob("*.parquet")] == ["fast.parquet"], "nothing came here"


def test_where_the_storage_does_not_take_them_rows_come_here_and_the_result_says_why(
    sampled: Any, tmp_path: Path
) -> None:
    own = FakeActor("n1", files={"fast.parquet": b"rows"}, unsent="s3://studies: 403")
    with sampled(FakeActor("n0"), own) as telemetry:
        pass
    assert telemetry.keep(tmp_path).keys() == {"telemetry/n1/fast.parquet"}
    told = "4e-06 MB of telemetry of 1 node(s) came through the study's node: s3://studies: 403"
    assert telemetry.passed_on == told

"""One trial's request, limit and last write. No Ray is started."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import RayError
from specs import trial_spec

from wattune.errors import TelemetryError
from wattune.orchestrate import run_trial as run_trial_module
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Cluster, Node
from wattune.orchestrate.lanes.messages import Answer, Assignment, Place
from wattune.orchestrate.run_trial import _limit, conclude, drive
from wattune.orchestrate.telemetry_actor import NodeTelemetry
from wattune.orchestrate.trial_telemetry import TrialTelemetry
from wattune.run import Numbers, Run, RunStatus
from wattune.storage.study import TrialFolder
from wattune.trial import Measure
from wattune.workers.outcome import RankOutcome

SPEC = trial_spec(on="1x2 cpu", seq_len=8, batch=8)


def request(tmp_path: Path) -> Attempt:
    folder = tmp_path / "study" / "trials" / f"{SPEC.trial_id}-0"
    return Attempt(spec=SPEC, repeat=0, measure=Measure(), seed=0, folder=folder, limits={}, tags={"a": "b"})


def test_a_hard_limit_looks_at_the_sensors_or_at_what_the_ranks_did(tmp_path: Path) -> None:
    telemetry = TrialTelemetry(key="", sensed={}, node_power_w=lambda: {"n0": 2950.0})
    limited = replace(request(tmp_path), limits={"node_device_power_w": 2900.0})
    asked: list[str] = []

    class Lanes:
        def spans(self, name: str) -> dict[int, Any]:
            asked.append(name)
            return {}

    assert _limit(request(tmp_path), telemetry, Lanes())() is None  # type: ignore[arg-type]
    reason = _limit(limited, telemetry, Lanes())()  # type: ignore[arg-type]
    assert reason is not None and "2950 W" in reason and not asked
    simulated = replace(limited, spec=replace(SPEC, cluster=replace(SPEC.cluster, simulate_sensors_of="h200_sxm")))
    assert _limit(simulated, telemetry, Lanes())() is None  # type: ignore[arg-type]
    assert asked == [simulated.name]


def test_a_failure_after_the_study_was_stopped_does_not_make_the_trial_final(tmp_path: Path) -> None:
    """The controller marks a trial, then its workers and sensors are taken away: what fails then is to be run again."""
    folder = TrialFolder(request(tmp_path).folder)
    folder.write_spec(SPEC)
    ended = Run(trial_id=SPEC.trial_id, repeat=0, status=RunStatus.INTERRUPTED, start_wall_ns=1, end_wall_ns=2)
    folder.write_result(ended)
    conclude(folder, replace(ended, status=RunStatus.CRASHED, reason="the sampler is gone"))
    assert folder.result() == ended
    completed = replace(ended, status=RunStatus.COMPLETED)
    conclude(folder, completed)
    assert folder.result() == completed


def test_what_a_process_without_its_driver_makes_late_does_not_count(tmp_path: Path) -> None:
    folder = TrialFolder(request(tmp_path).folder)
    failed = Run(trial_id="0" * 12, repeat=0, status=RunStatus.INFRA_FAILED, reason="its driver ended")
    late, own = (replace(failed, status=RunStatus.COMPLETED, numbers=Numbers(attempt=one)) for one in (None, 2))
    folder.write_result(failed)
    conclude(folder, late)
    assert folder.result() == failed, "the controller has queued it again"
    folder.set_aside()
    conclude(folder, late)
    assert folder.result() is None, "the next attempt runs"
    conclude(folder, own)
    assert folder.result() == own and folder.attempts() == [failed]


def test_the_same_trial_of_two_storages_has_two_keys(tmp_path: Path) -> None:
    assert request(tmp_path).key != request(tmp_path / "other").key


@dataclass
class FakeLanes:
    """Lanes whose trials end with one answer."""

    answer: Answer = field(default_factory=Answer)
    error: Exception | None = None
    lost: str = ""
    assigned: list[Assignment] = field(default_factory=list)
    concluded: list[str] = field(default_factory=list)

    async def run(
        self, assignment: Assignment, over_limit: Callable[[], str | None] | None, await_sensors: Callable[[], None]
    ) -> Answer:
        self.assigned.append(assignment)
        await_sensors()
        if over_limit is not None:
            over_limit()
        if self.error is not None:
            raise self.error
        return self.answer

    async def settle(self, assignment: Assignment) -> str:
        assert assignment is self.assigned[-1]
        return self.lost

    @contextmanager
    def concluding(self, attempt: Attempt) -> Iterator[None]:
        self.concluded.append(attempt.name)
        yield

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        return work()

    async def aside(self, work: Callable[[], Any]) -> Any:
        """As in another process, where only what can be sent there arrives."""
        return cloudpickle.loads(cloudpickle.dumps(work))()


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch) -> TrialTelemetry:
    """Telemetry of every trial that runs, without actors."""
    found = TrialTelemetry(key="", sensed={}, node_power_w=lambda: {"n0": 100.0})

    @contextmanager
    def sampled(*_: object) -> Iterator[TrialTelemetry]:
        yield found

    monkeypatch.setattr(run_trial_module, "sampling", sampled)
    return found


@pytest.fixture
def cluster(new_node: Callable[..., Node]) -> Cluster:
    return Cluster(nodes=(new_node("n0"), new_node("n1")), driver_node_id="n1")


def ran(tmp_path: Path, cluster: Cluster, lanes: FakeLanes, **changes: Any) -> Run:
    asked = replace(request(tmp_path), **changes)
    asyncio.run(drive(lanes, asked, cluster, lambda: None))  # type: ignore[arg-type]
    stored = TrialFolder(asked.folder).result()
    assert stored is not None
    return stored


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_wall_clock_that_is_set_meanwhile_makes_no_trial_longer_or_shorter(
    tmp_path: Path, cluster: Cluster, telemetry: TrialTelemetry, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    true_ns, ahead_ns = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: true_ns() + ahead_ns[0])

    class Jumps(FakeLanes):
        async def run(self, assignment: Assignment, *given: Any) -> Answer:
            ahead_ns[0] = jump_s * 10**9
            return await super().run(assignment, *given)

    result = ran(tmp_path, cluster, Jumps())
    assert abs(result.start_wall_ns - true_ns()) < 600 * 10**9
    assert 0 <= result.end_wall_ns - result.start_wall_ns < 600 * 10**9


@pytest.mark.usefixtures("telemetry")
def test_a_trial_runs_on_the_first_nodes_that_fit_and_its_tags_say_so(tmp_path: Path, cluster: Cluster) -> None:
    answer = Answer(failure="a worker died", number=3, group_start_s=1.5, restart_s=2.0)
    lanes = FakeLanes(answer, lost="it leaked")
    result = ran(tmp_path, cluster, lanes, limits={"node_device_power_w": 900.0})
    assert (result.status, result.reason) == (RunStatus.INFRA_FAILED, "a worker died")
    assert lanes.assigned[0].node_names == {"n0": "n0"} and not lanes.assigned[0].fresh
    expected = {"a": "b", "isolation": "warm", "lane": "n0", "group_lost": "it leaked"}
    assert {name: result.tags.get(name) for name in expected} == expected
    numbers = {"lane_trial": 3, "group_start_s": 1.5, "group_restart_s": 2.0, "limit_looks": 1, "limit_looks_seeing": 1}
    assert result.numbers.known.items() >= numbers.items()


@pytest.mark.usefixtures("telemetry")
def test_what_a_trial_waited_for_nodes_that_another_job_took_is_its_own_column(
    tmp_path: Path, cluster: Cluster
) -> None:
    now_ns, lanes = time.time_ns(), FakeLanes(Answer(failure="a worker died", number=1, node_wait_s=20.0))
    result = ran(tmp_path, cluster, lanes, numbers=Numbers(node_wait_s=5.0))
    assert result.numbers.node_wait_s == 25.0 and (result.numbers.start_time_s or 0.0) < 10
    assert result.start_wall_ns >= now_ns + 20 * 10**9, "its own time begins once it had them"


@pytest.mark.parametrize(("warm", "is_command"), [(True, False), (False, False), (True, True)])
def test_only_warm_ranks_were_on_their_devices_before_the_sensors_were_read(
    tmp_path: Path,
    cluster: Cluster,
    telemetry: TrialTelemetry,
    monkeypatch: pytest.MonkeyPatch,
    warm: bool,
    is_command: bool,
) -> None:
    monkeypatch.setattr(run_trial_module, "is_command", lambda _spec: is_command)
    ran(tmp_path, cluster, FakeLanes(Answer(failure="a worker died", warm=warm)))
    assert telemetry.warm is (warm and not is_command)


def test_steps_of_a_command_are_copied_by_the_clocks_that_its_nodes_were_found_to_have(
    tmp_path: Path, cluster: Cluster, telemetry: TrialTelemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(run_trial_module, "is_command", lambda _spec: True)
    monkeypatch.setattr(run_trial_module, "command_spans", lambda *given: seen.append(given[2]))
    telemetry.offsets = {"n0": {"clock_offset_ns": 5}}
    places = tuple(
        Place(rank=rank, node=node, slot=0, device="gpu0", device_uuid=None, pid=7)
        for rank, node in enumerate(("n0", "n1"))
    )
    ran(tmp_path, cluster, FakeLanes(Answer(failure="a worker died", places=places)))
    assert seen == [{"n0": 5, "n1": 0}]


@pytest.mark.parametrize(
    ("answered", "isolation", "is_early"),
    [("completed", "warm", True), ("completed", "fresh", False), ("crashed", "warm", False)],
)
@pytest.mark.usefixtures("telemetry")
def test_the_nodes_of_a_trial_that_was_measured_are_free_before_its_result_is_there(
    tmp_path: Path, cluster: Cluster, answered: str, isolation: str, is_early: bool
) -> None:
    outcomes = tuple(RankOutcome(rank=rank, status=RunStatus(answered)) for rank in range(2))
    cause = None if answered == "completed" else outcomes[0]
    lanes, asked = FakeLanes(Answer(outcomes=outcomes, cause=cause), lost="it leaked"), request(tmp_path)
    freed: list[int] = []

    def free() -> None:
        assert TrialFolder(asked.folder).result() is None and lanes.concluded == [asked.name]
        freed.append(time.time_ns())
        time.sleep(0.01)

    asked = replace(asked, isolation=isolation)
    asyncio.run(drive(lanes, asked, cluster, free))  # type: ignore[arg-type]
    result = TrialFolder(asked.folder).result()
    assert result is not None and bool(freed) is is_early
    assert result.tags["group_lost"] == "it leaked"
    assert not freed or result.end_wall_ns <= freed[0], "the next trial's time begins where this one's ends"


@pytest.mark.parametrize("isolation", ["warm", "fresh"])
@pytest.mark.usefixtures("telemetry")
def test_isolation_decides_whether_workers_are_new(tmp_path: Path, cluster: Cluster, isolation: str) -> None:
    lanes = FakeLanes()
    ran(tmp_path, cluster, lanes, isolation=isolation)
    assert lanes.assigned[0].fresh is (isolation == "fresh")


@pytest.mark.usefixtures("telemetry")
def test_an_error_of_workers_is_the_trials_failure(tmp_path: Path, cluster: Cluster) -> None:
    result = ran(tmp_path, cluster, FakeLanes(error=TelemetryError("the lanes\nare gone")))
    assert (result.status, result.reason) == (RunStatus.INFRA_FAILED, "the lanes are gone")
    assert result.tags["infra_cause"] == "telemetry"
    assert result.tags["lane"] == "n0" and result.numbers.lane_trial is None


def test_telemetry_that_is_lost_fails_a_trial_that_trained(
    tmp_path: Path, cluster: Cluster, telemetry: TrialTelemetry
) -> None:
    telemetry.lost = ["telemetry of node n0: OSError: disk full"]
    outcomes = tuple(RankOutcome(rank=rank, status=RunStatus.COMPLETED) for rank in range(2))
    result = ran(tmp_path, cluster, FakeLanes(Answer(outcomes=outcomes)))
    assert (result.status, result.reason) == (RunStatus.INFRA_FAILED, telemetry.lost[0])
    assert result.tags["infra_cause"] == "telemetry"


def test_a_sampler_that_died_says_how_and_its_trial_is_no_verdict_on_the_plan(
    tmp_path: Path, cluster: Cluster, telemetry: TrialTelemetry
) -> None:
    facts = {"node": "n0", "closed": False, "devices": {}, "died": "  ended with exit status 137"}
    telemetry.recorded = [NodeTelemetry(node="n0", manifest=facts, losses=())]
    outcomes = tuple(RankOutcome(rank=rank, status=RunStatus.COMPLETED) for rank in range(2))
    result = ran(tmp_path, cluster, FakeLanes(Answer(outcomes=outcomes)))
    assert result.status is RunStatus.INFRA_FAILED and result.tags["infra_cause"] == "telemetry"
    assert result.reason == "the sampler of node n0 died: ended with exit status 137"


@pytest.mark.usefixtures("telemetry")
def test_a_cluster_that_is_too_small_fails_the_trial_before_any_worker_starts(tmp_path: Path, cluster: Cluster) -> None:
    lanes = FakeLanes()
    large = replace(SPEC, cluster=replace(SPEC.cluster, num_nodes=3))
    result = ran(tmp_path, cluster, lanes, spec=large)
    assert result.status is RunStatus.INFRA_FAILED and "needs 3 node(s)" in result.reason
    assert result.tags["infra_cause"] == "placement"
    assert not lanes.assigned and result.tags["lane"] == "n0,n1"


@pytest.mark.usefixtures("telemetry")
def test_the_parts_of_a_trials_time_sum_to_it(tmp_path: Path, cluster: Cluster) -> None:
    """Ranks tell their own parts; what lies before them is its start, and what lies behind them its close."""
    parts_s = {"start": 0.25, "build": 0.5, "compile": 0.125, "warmup": 0.0625, "measure": 0.0, "close": 0.0}
    told = RankOutcome(rank=0, status=RunStatus.COMPLETED, build_time_s=0.5, parts_s=parts_s)

    class Takes(FakeLanes):
        async def run(self, assignment: Assignment, *given: Any) -> Answer:
            await asyncio.sleep(1.0)
            return await super().run(assignment, *given)

    outcomes = (told, RankOutcome(rank=1, status=RunStatus.COMPLETED, build_time_s=0.25))
    lanes = Takes(Answer(outcomes=outcomes, failure="a worker died", number=1))
    since_ns = time.monotonic_ns() - 3 * 10**9
    result = ran(tmp_path, cluster, lanes, free_since_ns=since_ns)
    times_s = result.times_s
    assert 3.0 <= times_s.pop("wait") < 60.0
    length_s = (result.end_wall_ns - result.start_wall_ns) / 1e9
    assert 0 <= times_s["start"] - parts_s["start"] <= length_s - 0.99, "what its workers took is not its start"
    assert times_s["first step"] == 0.125 and times_s["build"] == 0.5
    assert times_s["close"] > 0 and times_s["other"] == pytest.approx(0.0, abs=0.002)
    assert sum(times_s.values()) == pytest.approx(length_s, abs=0.01)
    silent = ran(tmp_path / "silent", cluster, Takes(Answer(failure="a worker died", number=1))).times_s
    assert silent.keys() == {"start", "other"} and silent["other"] >= 1.0, "its length is nobody's"


def breaks(error: Exception) -> Any:
    async def broken(*_: Any) -> None:
        raise error

    return broken


def test_an_error_of_this_program_is_the_trials_result_with_its_stack(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_trial_module, "_run", breaks(ValueError("not\n thought of")))
    result = ran(tmp_path, cluster, FakeLanes())
    assert result.status is RunStatus.CRASHED
    assert result.reason == "wattune failed: ValueError: not thought of; see error.txt"
    assert "in broken" in (request(tmp_path).folder / "error.txt").read_text()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(5, "I/O error"), MemoryError()])
def test_a_full_disk_of_the_head_is_no_bad_configuration(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(run_trial_module, "_run", breaks(error))
    result = ran(tmp_path, cluster, FakeLanes())
    assert result.status is RunStatus.INFRA_FAILED and result.tags["infra_cause"] == "head"
    assert type(error).__name__ in result.reason


def test_an_error_of_the_cluster_is_left_to_the_controller(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_trial_module, "_run", breaks(RayError("no answer")))
    with pytest.raises(RayError):
        asyncio.run(drive(FakeLanes(), request(tmp_path), cluster, lambda: None))  # type: ignore[arg-type]
    assert TrialFolder(request(tmp_path).folder).result() is None


def test_a_trial_begins_when_its_devices_are_cool_and_says_how_warm_they_were(
    tmp_path: Path, cluster: Cluster, telemetry: TrialTelemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert telemetry
    monkeypatch.setattr(run_trial_module, "_temperatures_c", lambda *_: {"n0/gpu0": 41.0, "n0/gpu1": 39.5})
    tagged = replace(cluster, tags={"ray.cluster": "own"})
    result = ran(tmp_path, tagged, FakeLanes(), measure=Measure(cooldown_temp_c=45))
    assert result.numbers.start_temp_max_c == 41.0 and result.tags["ray.cluster"] == "own"

"""What becomes of a trial's pieces: causes, names, statuses. No Ray is started."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.exceptions import RayTaskError

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.errors import TelemetryError
from wattune.orchestrate.assignment import Answer
from wattune.orchestrate.judge import against_limits, judge
from wattune.orchestrate.lane_keeper import cause
from wattune.orchestrate.lane_worker import device_name, failed
from wattune.orchestrate.run_trial import TrialRequest, _over_limit
from wattune.orchestrate.trial_telemetry import TrialTelemetry
from wattune.plan.axes import Plan
from wattune.study import TrialFolder
from wattune.trial import Measure, TrialSpec, TrialStatus, Workload
from wattune.workers.loop import RankOutcome

SPEC = TrialSpec(
    model=model("llama3_8b"),
    cluster=ClusterSpec(device="cpu", devices_per_node=2),
    engine="torch",
    workload=Workload(seq_len=8, global_batch_size=8),
    plan=Plan(),
)


def request(tmp_path: Path) -> TrialRequest:
    folder = tmp_path / "study" / "trials" / f"{SPEC.trial_id}-0"
    return TrialRequest(spec=SPEC, repeat=0, measure=Measure(), seed=0, folder=folder, limits={}, tags={"a": "b"})


def outcome(rank: int, status: TrialStatus = TrialStatus.COMPLETED, **fields: Any) -> RankOutcome:
    return RankOutcome(rank=rank, status=status, **fields)


def judged(tmp_path: Path, *outcomes: RankOutcome, cause: RankOutcome | None = None, failure: str = "") -> Any:
    asked = request(tmp_path)
    answer = Answer(outcomes=outcomes, cause=cause, failure=failure)
    result = judge(SPEC, 0, TrialFolder(asked.folder), answer, None, limits={}, tags=asked.tags, start_wall_ns=0)
    assert result.trial_id == SPEC.trial_id and result.tags["a"] == "b"
    return result.status, result.reason


def test_the_first_failure_names_the_status(tmp_path: Path) -> None:
    other = outcome(0, TrialStatus.CRASHED, reason="rank 0: closed by peer")
    first = outcome(1, TrialStatus.OUT_OF_MEMORY, reason="rank 1: can't allocate")
    found = judged(tmp_path, other, first, cause=first, failure="group failed")
    assert found == (TrialStatus.OUT_OF_MEMORY, "rank 1: can't allocate")


def test_ranks_that_are_ended_with_another_one_are_not_blamed(tmp_path: Path) -> None:
    hung = outcome(0, TrialStatus.TIMED_OUT, reason="rank 0: no step")
    assert judged(tmp_path, hung, cause=hung, failure="ended") == (TrialStatus.TIMED_OUT, "rank 0: no step")


def test_a_rank_that_said_nothing_is_named(tmp_path: Path) -> None:
    other = outcome(1, TrialStatus.CRASHED, reason="rank 1: closed by peer")
    status, reason = judged(tmp_path, other, cause=other, failure="group failed")
    assert (status, reason) == (TrialStatus.CRASHED, "rank 0 ended without a word; rank 1: closed by peer")


def test_a_group_that_never_ran_says_why(tmp_path: Path) -> None:
    assert judged(tmp_path, failure="no resources") == (TrialStatus.CRASHED, "no resources")


def test_a_trial_of_a_study_that_is_stopped_is_run_again(tmp_path: Path) -> None:
    asked = request(tmp_path)
    answer = Answer(outcomes=(outcome(0),), failure="the study was stopped", interrupted=True)
    found = judge(SPEC, 0, TrialFolder(asked.folder), answer, None, limits={}, tags={}, start_wall_ns=0)
    assert (found.status, found.reason) == (TrialStatus.INTERRUPTED, "the study was stopped")


def test_telemetry_that_was_lost_is_no_completed_trial(tmp_path: Path) -> None:
    status, reason = judged(tmp_path, outcome(0), outcome(1), failure="telemetry of node n0 did not answer")
    assert status is TrialStatus.CRASHED and "n0" in reason


def test_completed_without_any_measurement_is_invalid(tmp_path: Path) -> None:
    status, reason = judged(tmp_path, outcome(0), outcome(1))
    assert status is TrialStatus.INVALID and "no_window" in reason


def test_a_hard_limit_aborts() -> None:
    over = {"node_device_power_peak_1s_w": 2950.0}
    status, reason = against_limits(over, {"node_device_power_w": 2900.0}, "publishable", ())
    assert status is TrialStatus.ABORTED and "2950 W" in reason and "2900 W" in reason
    assert against_limits(over, {}, "publishable", ())[0] is TrialStatus.COMPLETED


def test_a_hard_limit_is_looked_at_while_a_trial_runs(tmp_path: Path) -> None:
    power_w: dict[str, float] = {}
    telemetry = TrialTelemetry(sensed={}, node_power_w=lambda: power_w)
    without, limited = request(tmp_path), replace(request(tmp_path), limits={"node_device_power_w": 2900.0})
    simulated = replace(limited, spec=replace(SPEC, cluster=replace(SPEC.cluster, simulate_sensors_of="h200_sxm")))
    assert _over_limit(limited, telemetry)() is None
    power_w |= {"n0": 2899.0, "n1": 2950.0}
    assert _over_limit(without, telemetry)() is None and _over_limit(simulated, telemetry)() is None
    reason = _over_limit(limited, telemetry)()
    assert reason is not None and "node n1 was 2950 W over 1 s, the hard limit is 2900 W" in reason


def test_a_cause_is_one_line_of_the_innermost_error() -> None:
    inner = TelemetryError("the sampler ended\n  it said this")
    assert cause(RayTaskError("start", "Traceback\n  long", inner)) == "the sampler ended it said this"
    outer = RuntimeError("outer")
    outer.__cause__ = ValueError("inner\ntwo")
    assert cause(outer) == "ValueError: inner two"


def test_failures_are_classified_and_stamped() -> None:
    before_ns = time.monotonic_ns()
    memory = failed(3, RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nmore"))
    assert memory.status is TrialStatus.OUT_OF_MEMORY and memory.end_mono_ns >= before_ns
    assert failed(3, ValueError("x")).reason == "rank 3: ValueError: x"


def test_device_names_and_keys(tmp_path: Path) -> None:
    assert device_name(SPEC, 1) == "cpu1"
    on_gpu = replace(SPEC, cluster=ClusterSpec(device="h200_sxm", devices_per_node=2))
    assert device_name(on_gpu, 1) == "gpu1"
    assert request(tmp_path).key != request(tmp_path / "other").key

"""What becomes of a trial's pieces: causes, names, statuses. No Ray is started."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.exceptions import RayTaskError

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.errors import TelemetryError
from wattune.orchestrate.lanes.actor import cause
from wattune.orchestrate.lanes.messages import Answer
from wattune.orchestrate.lanes.worker import device_name, failed
from wattune.orchestrate.run_trial import TrialRequest, _limit, conclude
from wattune.orchestrate.trial_result import against_limits, trial_result
from wattune.orchestrate.trial_telemetry import TrialTelemetry
from wattune.plan.axes import Plan
from wattune.storage.study import TrialFolder
from wattune.trial import Measure, TrialResult, TrialSpec, TrialStatus, Workload
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
    result = trial_result(SPEC, 0, TrialFolder(asked.folder), answer, None, limits={}, tags=asked.tags, start_wall_ns=0)
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


def test_a_profile_that_failed_is_a_tag_of_a_trial_that_was_measured(tmp_path: Path) -> None:
    first = outcome(1, facts={"profile": "missing, since rank 1"}, end_mono_ns=5)
    freed = outcome(0, facts={"profile": "missing, since rank 0 was freed", "compiler": "eager"}, end_mono_ns=9)
    elsewhere = replace(first, end_mono_ns=10**15)  # of a node that has been up for longer
    asked = request(tmp_path)
    for answer in (Answer(outcomes=(freed, elsewhere), cause=elsewhere), Answer(outcomes=(freed, first))):
        found = trial_result(SPEC, 0, TrialFolder(asked.folder), answer, None, limits={}, tags={}, start_wall_ns=0)
        assert found.status is TrialStatus.INVALID and "no_window" in found.reason  # there are no spans here
        assert found.tags["profile"] == "missing, since rank 1" and found.tags["compiler"] == "eager"
    assert judged(tmp_path, first, cause=first) == (TrialStatus.CRASHED, "rank 0 ended without a word")


def test_a_group_that_never_ran_says_why(tmp_path: Path) -> None:
    assert judged(tmp_path, failure="no resources") == (TrialStatus.CRASHED, "no resources")


def test_a_trial_of_a_study_that_is_stopped_is_run_again(tmp_path: Path) -> None:
    asked = request(tmp_path)
    answer = Answer(outcomes=(outcome(0),), failure="the study was stopped", interrupted=True)
    found = trial_result(SPEC, 0, TrialFolder(asked.folder), answer, None, limits={}, tags={}, start_wall_ns=0)
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


def test_a_hard_limit_looks_at_the_sensors_or_at_what_the_ranks_did(tmp_path: Path) -> None:
    telemetry = TrialTelemetry(sensed={}, node_power_w=lambda: {"n0": 2950.0})
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
    assert asked == [limited.folder.name]


def test_a_cause_is_one_line_of_the_innermost_error() -> None:
    inner = TelemetryError("the sampler ended\n  it said this")
    assert cause(RayTaskError("start", "Traceback\n  long", inner)) == "the sampler ended it said this"
    outer = RuntimeError("outer")
    outer.__cause__ = ValueError("inner\ntwo")
    assert cause(outer) == "ValueError: inner two"


def test_a_failure_after_the_study_was_stopped_does_not_make_the_trial_final(tmp_path: Path) -> None:
    """The ledger spans a trial, then its workers and sensors are taken away: what fails then is to be run again."""
    folder = TrialFolder(request(tmp_path).folder)
    folder.write_spec(SPEC)
    ended = TrialResult(
        trial_id=SPEC.trial_id, repeat=0, status=TrialStatus.INTERRUPTED, start_wall_ns=1, end_wall_ns=2
    )
    folder.write_result(ended)
    conclude(folder, replace(ended, status=TrialStatus.CRASHED, reason="the sampler is gone"))
    assert folder.result() == ended
    conclude(folder, replace(ended, status=TrialStatus.COMPLETED))
    assert folder.result() == replace(ended, status=TrialStatus.COMPLETED)


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

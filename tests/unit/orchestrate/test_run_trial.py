"""What becomes of a trial's pieces: causes, names, statuses. No Ray is started."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.exceptions import RayTaskError

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.errors import TelemetryError
from wattune.orchestrate.run_trial import TrialRequest, _against_limits, _cause, _judge, device_name, failed
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


def judge(tmp_path: Path, outcomes: list[RankOutcome], failure: str = "") -> tuple[TrialStatus, str]:
    asked = request(tmp_path)
    result = _judge(asked, TrialFolder(asked.folder), outcomes, None, failure, 0)
    assert result.trial_id == SPEC.trial_id and result.tags["a"] == "b"
    return result.status, result.reason


def test_the_first_failure_names_the_status(tmp_path: Path) -> None:
    late = outcome(0, TrialStatus.CRASHED, reason="rank 0: closed by peer", end_mono_ns=20)
    first = outcome(1, TrialStatus.OUT_OF_MEMORY, reason="rank 1: can't allocate", end_mono_ns=10)
    assert judge(tmp_path, [late, first], "group failed") == (TrialStatus.OUT_OF_MEMORY, "rank 1: can't allocate")


def test_a_rank_that_said_nothing_is_named(tmp_path: Path) -> None:
    other = outcome(1, TrialStatus.CRASHED, reason="rank 1: closed by peer")
    status, reason = judge(tmp_path, [other], "group failed")
    assert (status, reason) == (TrialStatus.CRASHED, "rank 0 ended without a word; rank 1: closed by peer")


def test_a_group_that_never_ran_says_why(tmp_path: Path) -> None:
    assert judge(tmp_path, [], "no resources") == (TrialStatus.CRASHED, "no resources")


def test_completed_without_any_measurement_is_invalid(tmp_path: Path) -> None:
    status, reason = judge(tmp_path, [outcome(0), outcome(1)])
    assert status is TrialStatus.INVALID and "no_window" in reason


def test_a_hard_limit_aborts() -> None:
    over = {"node_device_power_peak_1s_w": 2950.0}
    status, reason = _against_limits(over, {"node_device_power_w": 2900.0}, "publishable", ())
    assert status is TrialStatus.ABORTED and "2950 W" in reason and "2900 W" in reason
    assert _against_limits(over, {}, "publishable", ())[0] is TrialStatus.COMPLETED


def test_a_cause_is_one_line_of_the_innermost_error() -> None:
    inner = TelemetryError("the sampler ended\n  it said this")
    assert _cause(RayTaskError("start", "Traceback\n  long", inner)) == "the sampler ended it said this"
    outer = RuntimeError("outer")
    outer.__cause__ = ValueError("inner\ntwo")
    assert _cause(outer) == "ValueError: inner two"


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

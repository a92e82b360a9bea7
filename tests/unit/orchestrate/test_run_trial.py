"""One trial's request, limit and last write. No Ray is started."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.orchestrate.run_trial import TrialRequest, _limit, conclude
from wattune.orchestrate.trial_telemetry import TrialTelemetry
from wattune.plan.axes import Plan
from wattune.storage.study import TrialFolder
from wattune.trial import Measure, TrialResult, TrialSpec, TrialStatus, Workload

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


def test_a_failure_after_the_study_was_stopped_does_not_make_the_trial_final(tmp_path: Path) -> None:
    """The controller marks a trial, then its workers and sensors are taken away: what fails then is to be run again."""
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


def test_the_same_trial_of_two_storages_has_two_keys(tmp_path: Path) -> None:
    assert request(tmp_path).key != request(tmp_path / "other").key

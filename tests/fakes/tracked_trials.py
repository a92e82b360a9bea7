"""Trials to send to a tracking store, and the runs that came of them."""

from pathlib import Path

from specs import trial_spec
from study_files import write_trial

from wattune.run import Run, RunStatus
from wattune.storage.study import TrialFolder
from wattune.tracking.tracker import Tracker
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S

START_NS = 1_790_000_000 * NS_PER_S


def spec_of(micro_batch_size: int = 2, rank_order: str | tuple[int, ...] = "topology") -> TrialSpec:
    return trial_spec(
        "mixtral_8x7b", tp=2, micro_batch_size=micro_batch_size, sharding="zero1", layout=(3, 1), rank_order=rank_order
    )


def result_of(spec: TrialSpec, status: RunStatus = RunStatus.COMPLETED, repeat: int = 0) -> Run:
    return Run(
        trial_id=spec.trial_id,
        repeat=repeat,
        status=status,
        reason="" if status is RunStatus.COMPLETED else "why",
        metrics={"tokens_per_s": 48_123.4567890123, "node_device_power_peak_1s_w": 2788.25},
        quality="indicative",
        quality_reasons=("simulated", "short"),
        tags={"simulated": "true", "torch": "2.13.0", "git_commit": "0517fb8"},
        start_wall_ns=START_NS,
        end_wall_ns=START_NS + 31 * NS_PER_S + 5_000_000,
    )


def folder_of(path: Path, spec: TrialSpec, result: Run) -> Path:
    return write_trial(TrialFolder(path / f"{result.trial_id}-{result.repeat}"), spec, result).path


def runs_of(client, tracker: Tracker, *, trials: bool = True) -> list:
    experiment = client.get_experiment_by_name(tracker.study_name)
    runs = client.search_runs([experiment.experiment_id])
    return [run for run in runs if ("wattune.trial" in run.data.tags) is trials]


DOCUMENT = {
    "study": "x",
    "model": [{"name": "a"}, {"name": "b"}],
    "engine": ["torch"],
    "space": {"tp": [1, 2], "pp": [1], "sharding": ["none", "zero1"]},
    "objective": "maximize tokens_per_s",
    "constraints": ["node_device_power_peak_1s_w <= 2750", "device_power_peak_1s_w <= 1.0 * device_power_limit_w"],
}

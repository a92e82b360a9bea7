import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tracked_trials import START_NS, folder_of, result_of, runs_of, spec_of

from wattune.errors import TrackingError
from wattune.objective import Question, parse_constraint, parse_objective
from wattune.ranking.order import rank
from wattune.run import Numbers, RunStatus
from wattune.tracking.reader import read_study
from wattune.tracking.tracker import Tracker
from wattune.units import NS_PER_S


def test_a_trial_is_a_child_run_with_its_parameters_metrics_tags_and_files(tracker, client, tmp_path, capsys):
    spec, result = spec_of(), result_of(spec_of())
    folder = folder_of(tmp_path, spec, result)
    assert tracker.log_trial(spec, result, folder) is True
    (run,) = runs_of(client, tracker)
    (parent,) = runs_of(client, tracker, trials=False)
    assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert (run.info.status, run.info.run_name) == ("FINISHED", f"{spec.label} #0")
    assert (run.info.start_time, run.info.end_time) == (1_790_000_000_000, 1_790_000_031_005)
    expected = {"tp": "2", "dp": "2", "layout": "3-1", "sharding": "zero1", "model": "mixtral_8x7b"}
    expected |= {"model.num_experts": "8", "cluster": "1x4 h200_sxm", "seq_len": "4096", "engine": "torch"}
    assert expected.items() <= run.data.params.items()
    assert run.data.metrics == result.metrics
    tags = {"status": "completed", "quality": "indicative", "quality_reasons": "simulated, short", "repeat": "0"}
    tags |= {"simulated": "true", "torch": "2.13.0", "device": "h200_sxm", "mlflow.source.git.commit": "0517fb8"}
    assert tags.items() <= run.data.tags.items()
    assert "reason" not in run.data.tags
    files = {entry.path for entry in client.list_artifacts(run.info.run_id)}
    assert files == {"spec.json", "run.json", "spans.parquet", "telemetry"}
    files = {entry.path for entry in client.list_artifacts(run.info.run_id, "telemetry/node0")}
    assert files == {"telemetry/node0/slow.parquet", "telemetry/node0/manifest.json"}
    assert (
        Path(client.download_artifacts(run.info.run_id, "spec.json")).read_text() == (folder / "spec.json").read_text()
    )
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        (RunStatus.OUT_OF_MEMORY, "FAILED"),
        (RunStatus.CRASHED, "FAILED"),
        (RunStatus.INVALID, "FAILED"),
        (RunStatus.ABORTED, "KILLED"),
    ],
)
def test_a_failed_trial_is_sent_once_with_its_reason(tracker, client, tmp_path, status, shown):
    spec, result = spec_of(), result_of(spec_of(), status)
    assert [tracker.log_trial(spec, result, tmp_path / "none") for _ in range(2)] == [True, False]
    (run,) = runs_of(client, tracker)
    assert (run.info.status, run.data.tags["status"], run.data.tags["reason"]) == (shown, status, "why")


def test_another_tracker_sends_nothing_twice_and_finds_the_same_parent(tracker, client, tmp_path):
    spec = spec_of()
    for repeat in range(2):
        assert tracker.log_trial(spec, result_of(spec, repeat=repeat), tmp_path / "none")
    again = Tracker(tracker.uri, tracker.study_name)
    assert not again.log_trial(spec, result_of(spec, repeat=1), tmp_path / "none")
    assert len(runs_of(client, tracker)) == 2
    assert len(runs_of(client, tracker, trials=False)) == 1


def test_an_interrupted_trial_is_replaced_by_what_came_of_it(tracker, client, tmp_path):
    spec, stopped = spec_of(), result_of(spec_of(), RunStatus.INTERRUPTED)
    assert [tracker.log_trial(spec, stopped, tmp_path / "none") for _ in range(2)] == [True, False]
    assert runs_of(client, tracker)[0].info.status == "KILLED"
    assert tracker.log_trial(spec, result_of(spec), tmp_path / "none")
    assert [run.info.status for run in runs_of(client, tracker)] == ["FINISHED"]


def test_a_part_that_was_sent_is_replaced_and_a_refusal_delays_nobody(tracker, client, tmp_path):
    spec, result = spec_of(), result_of(spec_of())
    times, values = np.array([START_NS]), np.array([1.0])
    with pytest.raises(TrackingError, match="refuses it"):
        tracker.log_trial(spec, result, tmp_path / "none", {"no (such) name": (times, values)})
    assert [run.info.status for run in runs_of(client, tracker)] == ["RUNNING"]
    assert read_study(tracker.uri, tracker.study_name)[0] == []
    assert tracker.log_trial(spec, result, tmp_path / "none")
    assert [run.info.status for run in runs_of(client, tracker)] == ["FINISHED"]


def test_curves_keep_their_times_and_come_once_a_second(tracker, client, tmp_path):
    spec, result = spec_of(), result_of(spec_of())
    times = START_NS + np.arange(0, 1200 * NS_PER_S, NS_PER_S // 2)  # more seconds than fit in one batch
    tracker.log_trial(spec, result, tmp_path / "none", {"node0/device_power_w": (times, np.arange(2400.0))})
    run_id = runs_of(client, tracker)[0].info.run_id
    points = client.get_metric_history(run_id, "trace/node0/device_power_w")
    assert len(points) == 1200
    assert [(p.timestamp, p.step, p.value) for p in points[:2]] == [
        (1_790_000_000_000, 0, 0.5),
        (1_790_000_001_000, 1, 2.5),
    ]


def test_the_study_itself_is_sent_as_often_as_it_changes(tracker, client, tmp_path):
    spec, result = spec_of(), result_of(spec_of())
    report = tmp_path / "report.html"
    report.write_text("<!doctype html>")
    objective = parse_objective("maximize tokens_per_s")
    for bound, best in ((1000, "none"), (9000, f"dp2 tp2 mbs2 zero1 layout=3-1 ({spec.trial_id})")):
        constraint = parse_constraint(f"node_device_power_peak_1s_w <= {bound}")
        ranking = rank([(spec, result)], Question(objective=objective, constraints=(constraint,)))
        document = {
            "study": "x",
            "space": {"tp": [1, 2]},
            "objective": str(objective),
            "constraints": [str(constraint)],
        }
        tracker.log_study(document, ranking.to_json(), report)
        (run,) = runs_of(client, tracker, trials=False)
        assert (run.info.status, run.data.tags["best"]) == ("FINISHED", best)
    assert (run.data.tags["num_feasible"], run.data.tags["num_infeasible"]) == ("1", "0")
    files = {entry.path for entry in client.list_artifacts(run.info.run_id)}
    assert files == {"study.json", "ranking.json", "report.html"}


def test_the_module_is_imported_without_mlflow():
    code = "import sys, wattune.tracking.tracker, wattune.tracking.reader; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "platform"}, timeout=60).returncode == 0


def test_a_trial_that_was_tried_again_takes_the_place_of_what_it_was(tracker, tmp_path):
    spec = spec_of()
    crashed = result_of(spec, RunStatus.CRASHED)
    again = replace(result_of(spec), numbers=Numbers(attempt=2), end_wall_ns=crashed.end_wall_ns + 1)
    assert tracker.log_trial(spec, crashed, tmp_path / "none")
    assert tracker.log_trial(spec, again, tmp_path / "none")
    assert not tracker.log_trial(spec, again, tmp_path / "none")
    assert not tracker.log_trial(spec, crashed, tmp_path / "none"), "an older copy of the study"
    assert [result.status for _, result in read_study(tracker.uri, tracker.study_name)[0]] == [RunStatus.COMPLETED]


def test_a_trial_that_was_measured_anew_takes_the_place_of_the_run_that_was_sent(tracker, client, tmp_path):
    """Its folder was moved out of the study, as the message about a damaged one advises: attempts begin anew."""
    spec = spec_of()
    retried = replace(result_of(spec), numbers=Numbers(attempt=2))
    anew = replace(result_of(spec), metrics={"tokens_per_s": 40_000.0}, end_wall_ns=retried.end_wall_ns + NS_PER_S)
    assert tracker.log_trial(spec, retried, tmp_path / "none")
    assert [tracker.log_trial(spec, anew, tmp_path / "none") for _ in range(2)] == [True, False]
    (run,) = runs_of(client, tracker)
    assert run.data.metrics == anew.metrics
    assert tracker.delivered()[spec.trial_id, 0].holds(anew)


def test_a_result_that_was_accepted_as_edited_says_so_in_the_store(tracker, client, tmp_path):
    spec, result = spec_of(), replace(result_of(spec_of()), quality="publishable", quality_reasons=())
    accepted = replace(result, quality="indicative", quality_reasons=("edited",))
    assert tracker.log_trial(spec, result, tmp_path / "none")
    assert not tracker.delivered()[spec.trial_id, 0].holds(accepted)
    assert [tracker.log_trial(spec, accepted, tmp_path / "none") for _ in range(2)] == [True, False]
    (run,) = runs_of(client, tracker)
    assert (run.data.tags["quality"], run.data.tags["quality_reasons"]) == ("indicative", "edited")

import base64
import json
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.errors import TrackingError
from wattune.objective import parse_constraint, parse_objective
from wattune.plan.axes import Plan
from wattune.ranking.order import rank
from wattune.schema import SPANS
from wattune.storage.study import TrialFolder
from wattune.tracking.reader import read_study
from wattune.tracking.run import mean_per_second
from wattune.tracking.store import RETRY_AFTER_S, default_uri, ui_command, ui_url
from wattune.tracking.tracker import Tracker
from wattune.trial import TrialResult, TrialSpec, TrialStatus, Workload
from wattune.units import NS_PER_S

START_NS = 1_790_000_000 * NS_PER_S


def spec_of(micro_batch_size: int = 2, rank_order: str | tuple[int, ...] = "topology") -> TrialSpec:
    return TrialSpec(
        model=model("mixtral_8x7b"),
        cluster=ClusterSpec(device="h200_sxm", devices_per_node=4),
        engine="torch",
        workload=Workload(seq_len=4096, global_batch_size=16),
        plan=Plan(
            tp=2, etp=2, micro_batch_size=micro_batch_size, sharding="zero1", layout=(3, 1), rank_order=rank_order
        ),
    )


def result_of(spec: TrialSpec, status: TrialStatus = TrialStatus.COMPLETED, repeat: int = 0) -> TrialResult:
    return TrialResult(
        trial_id=spec.trial_id,
        repeat=repeat,
        status=status,
        reason="" if status is TrialStatus.COMPLETED else "why",
        metrics={"tokens_per_s": 48_123.4567890123, "node_device_power_peak_1s_w": 2788.25},
        quality="indicative",
        quality_reasons=("simulated", "short"),
        tags={"simulated": "true", "torch": "2.13.0", "git_commit": "0517fb8"},
        start_wall_ns=START_NS,
        end_wall_ns=START_NS + 31 * NS_PER_S + 5_000_000,
    )


def folder_of(path: Path, spec: TrialSpec, result: TrialResult) -> Path:
    folder = TrialFolder(path / f"{result.trial_id}-{result.repeat}")
    folder.write_spec(spec)
    folder.write_spans(SPANS.empty_table())
    folder.write_telemetry("node0", {"slow": pa.table({"device": ["gpu0"], "energy_j": [1.0]})}, {"closed": True})
    folder.write_result(result)
    (folder.path / ".spec.json.17").write_text("left by a crash")
    return folder.path


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all tests: its tables take seconds to make."""
    return default_uri(tmp_path_factory.mktemp("a storage"))


@pytest.fixture
def client(uri: str):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


@pytest.fixture
def tracker(uri: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    """A tracker of a study of its own, in a current directory that has to stay empty."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    yield Tracker(uri, name)
    assert list(elsewhere.iterdir()) == []


def runs_of(client, tracker: Tracker, *, trials: bool = True) -> list:
    experiment = client.get_experiment_by_name(tracker.study_name)
    runs = client.search_runs([experiment.experiment_id])
    return [run for run in runs if ("wattune.trial" in run.data.tags) is trials]


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
    assert files == {"spec.json", "result.json", "spans.parquet", "telemetry"}
    files = {entry.path for entry in client.list_artifacts(run.info.run_id, "telemetry/node0")}
    assert files == {"telemetry/node0/slow.parquet", "telemetry/node0/manifest.json"}
    assert (
        Path(client.download_artifacts(run.info.run_id, "spec.json")).read_text() == (folder / "spec.json").read_text()
    )
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        (TrialStatus.OUT_OF_MEMORY, "FAILED"),
        (TrialStatus.CRASHED, "FAILED"),
        (TrialStatus.INVALID, "FAILED"),
        (TrialStatus.ABORTED, "KILLED"),
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
    spec = spec_of()
    tracker.log_trial(spec, result_of(spec, TrialStatus.INTERRUPTED), tmp_path / "none")
    assert runs_of(client, tracker)[0].info.status == "KILLED"
    assert tracker.log_trial(spec, result_of(spec), tmp_path / "none")
    assert [run.info.status for run in runs_of(client, tracker)] == ["FINISHED"]


def test_a_part_that_was_sent_is_replaced_and_a_refusal_delays_nobody(tracker, client, tmp_path):
    spec, result = spec_of(), result_of(spec_of())
    times, values = np.array([START_NS]), np.array([1.0])
    with pytest.raises(TrackingError, match="refuses it"):
        tracker.log_trial(spec, result, tmp_path / "none", {"no (such) name": (times, values)})
    assert [run.info.status for run in runs_of(client, tracker)] == ["RUNNING"]
    assert read_study(tracker.uri, tracker.study_name).results == []
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


def test_results_are_read_back_as_they_were_sent(tracker, tmp_path):
    long = spec_of(rank_order=tuple(range(3000)))  # too long for a tag: read from the artifact
    sent = [(spec_of(), result_of(spec_of(), repeat=repeat)) for repeat in range(2)]
    sent += [(spec_of(4), result_of(spec_of(4), TrialStatus.CRASHED)), (long, result_of(long))]
    for spec, result in sent:
        tracker.log_trial(spec, result, folder_of(tmp_path, spec, result))
    found = read_study(tracker.uri, tracker.study_name).results
    key = lambda pair: (pair[1].trial_id, pair[1].repeat)  # noqa: E731
    assert sorted(found, key=key) == sorted(sent, key=key)


def test_the_study_itself_is_sent_as_often_as_it_changes(tracker, client, tmp_path):
    spec, result = spec_of(), result_of(spec_of())
    report = tmp_path / "report.html"
    report.write_text("<!doctype html>")
    objective = parse_objective("maximize tokens_per_s")
    for bound, best in ((1000, "none"), (2800, f"dp2 tp2 mbs2 zero1 layout=3-1 ({spec.trial_id})")):
        constraint = parse_constraint(f"node_device_power_peak_1s_w <= {bound}")
        ranking = rank([(spec, result)], objective, [constraint])
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


DOCUMENT = {
    "study": "x",
    "model": [{"name": "a"}, {"name": "b"}],
    "engine": ["torch"],
    "space": {"tp": [1, 2], "pp": [1], "sharding": ["none", "zero1"]},
    "objective": "maximize tokens_per_s",
    "constraints": ["node_device_power_peak_1s_w <= 2750", "device_power_peak_1s_w <= 1.0 * device_power_limit_w"],
}


def test_a_study_says_from_its_first_trial_on_what_it_is_after(tracker, tmp_path):
    tracker = Tracker(tracker.uri, tracker.study_name, document=DOCUMENT)
    tracker.log_trial(spec_of(), result_of(spec_of()), tmp_path / "none")
    found = read_study(tracker.uri, tracker.study_name)
    assert found.objective == "maximize tokens_per_s"
    assert [parse_constraint(text) for text in found.constraints] == [*map(parse_constraint, DOCUMENT["constraints"])]
    assert len(found.results) == 1


def test_the_page_is_arranged_for_comparison(tracker, client, tmp_path):
    tracker = Tracker(tracker.uri, tracker.study_name, document=DOCUMENT)
    page = tracker.page()
    experiment = client.get_experiment_by_name(tracker.study_name)
    assert page == f"#/experiments/{experiment.experiment_id}/runs?compareRunsMode=CHART&viewStateShareKey=wattune"
    packed = experiment.tags["mlflow.sharedViewState.wattune"]
    state = json.loads(zlib.decompress(base64.b64decode(packed.removeprefix("deflate;"))))
    assert "params.`tp`" in state["selectedColumns"]
    assert "params.`pp`" not in state["selectedColumns"]  # it has one value
    charts = {chart["type"]: chart for chart in state["compareRunCharts"]}
    assert charts["PARALLEL"]["selectedParams"] == ["model", "tp", "sharding"]
    assert charts["SCATTER"]["xaxis"]["key"] == "node_device_power_peak_1s_w"
    assert "maximize tokens_per_s" in experiment.tags["mlflow.note.content"]


def test_the_ledger_holds_all_results_and_later_runs_are_read_beside_it(tracker, tmp_path):
    ranking = rank([], parse_objective("maximize tokens_per_s"), []).to_json()
    before = [(spec_of(n), result_of(spec_of(n))) for n in (1, 2, 4)]
    tracker.log_study(DOCUMENT, ranking, None, before)  # nothing was sent as a run: all comes from the ledger
    assert read_study(tracker.uri, tracker.study_name).results == before
    late = replace(result_of(spec_of(8)), end_wall_ns=START_NS + 7200 * NS_PER_S)
    again = replace(before[0][1], metrics={"tokens_per_s": 1.0}, end_wall_ns=START_NS + 60 * NS_PER_S)
    tracker.log_trial(spec_of(8), late, tmp_path / "none")
    tracker.log_trial(before[0][0], again, tmp_path / "none")
    found = {result.trial_id: result for _, result in read_study(tracker.uri, tracker.study_name).results}
    assert found == {late.trial_id: late, again.trial_id: again} | {r.trial_id: r for _, r in before[1:]}
    # Another folder of the same study adds to the ledger; it takes nothing out.
    tracker.log_study(DOCUMENT, ranking, None, [(spec_of(8), late)])
    assert len(read_study(tracker.uri, tracker.study_name).results) == 4


def test_an_unknown_study_is_an_error_that_names_the_known_ones(tracker, tmp_path):
    tracker.log_trial(spec_of(), result_of(spec_of()), tmp_path / "none")
    with pytest.raises(TrackingError, match=f'no study "nobody" in .*{tracker.study_name}'):
        read_study(tracker.uri, "nobody")


def test_a_deleted_study_says_how_to_get_it_back(tracker, client, tmp_path):
    experiment_id = client.create_experiment(tracker.study_name)
    client.delete_experiment(experiment_id)
    with pytest.raises(TrackingError, match=f"experiments restore --experiment-id {experiment_id}"):
        tracker.log_trial(spec_of(), result_of(spec_of()), tmp_path / "none")


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def dead_server() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_dead_server_costs_seconds_once_and_nothing_after_that(dead_server, tmp_path):
    tracker, spec = Tracker(dead_server, "study", clock=lambda: 1000.0), spec_of()
    with pytest.raises(TrackingError, match=r"cannot be reached \(.*refused\); .* `wattune sync`"):
        tracker.log_trial(spec, result_of(spec), tmp_path)
    with socket.create_server(("127.0.0.1", urlsplit(dead_server).port)) as server:
        server.setblocking(False)
        with pytest.raises(TrackingError, match="not tried again for 60 s"):
            tracker.log_trial(spec, result_of(spec, repeat=1), tmp_path)
        with pytest.raises(BlockingIOError):  # nobody has called
            server.accept()


def test_a_silent_server_is_given_up_and_tried_again_later(silent_server, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    now_s = 1000.0
    tracker, spec = Tracker(silent_server, "study", clock=lambda: now_s), spec_of()
    for wait_s, tried in ((0.0, True), (RETRY_AFTER_S - 1, False), (1.0, True)):
        now_s += wait_s
        with pytest.raises(TrackingError) as caught:
            tracker.log_trial(spec, result_of(spec), tmp_path)
        assert ("not tried again" not in str(caught.value)) is tried


def test_the_module_is_imported_without_mlflow():
    code = "import sys, wattune.tracking.tracker, wattune.tracking.reader; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "platform"}, timeout=60).returncode == 0


def test_the_default_store_is_one_file_in_the_storage(tmp_path):
    assert default_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"


KILLED_IN_THE_MIDDLE = """
import os, signal, sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
from wattune.tracking.tracker import Tracker

def kill(connection, cursor, statement, *rest):
    if statement.startswith("CREATE INDEX index_params_run_uuid"):
        os.kill(os.getpid(), signal.SIGKILL)

event.listen(Engine, "after_cursor_execute", kill)
Tracker(sys.argv[1], "mine").page()
"""
"""Dies among MLflow's migrations, where the file it leaves cannot be opened again: they are no transaction."""


def test_a_store_whose_making_was_killed_is_made_by_the_next_call(tmp_path):
    uri = default_uri(tmp_path / "storage")
    killed = subprocess.run([sys.executable, "-c", KILLED_IN_THE_MIDDLE, uri], timeout=100, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "storage" / "mlflow.db").exists()
    assert Tracker(uri, "mine").page() == Tracker(uri, "mine").page()
    assert {path.name for path in (tmp_path / "storage").iterdir()} == {"mlflow.db", ".mlflow.db.lock"}


def test_processes_that_need_a_new_store_at_once_share_it(tmp_path):
    code = "import sys; from wattune.tracking.tracker import Tracker; print(Tracker(sys.argv[1], sys.argv[2]).page())"
    uri = default_uri(tmp_path)
    command = [sys.executable, "-c", code, uri]
    started = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in ("a", "b")]
    pages = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert len(set(pages)) == 2 and [Tracker(uri, name).page() for name in "ab"] == [page.strip() for page in pages]


def test_the_ui_command_can_be_pasted_and_the_page_opened():
    file, server, page = "sqlite:////a b/mlflow.db", "https://mlflow.example:5000/", "#/experiments/3"
    assert ui_command(file).endswith("mlflow ui --backend-store-uri 'sqlite:////a b/mlflow.db'")
    assert ui_url(file, page) == "http://127.0.0.1:5000/#/experiments/3", "where that command serves"
    assert (ui_command(server), ui_url(server, page)) == ("", "https://mlflow.example:5000/#/experiments/3")


samples = st.lists(st.tuples(st.integers(0, 20 * NS_PER_S), st.floats(-1e6, 1e6)), max_size=50)


@given(samples)
def test_means_by_second_keep_order_range_and_total(pairs):
    times = np.array([t for t, _ in pairs], dtype=np.int64)
    values = np.array([v for _, v in pairs], dtype=np.float64)
    points = mean_per_second(times, values)
    seconds = [t // NS_PER_S for t, _ in points]
    assert seconds == sorted(set((times // NS_PER_S).tolist()))
    counts = [np.count_nonzero(times // NS_PER_S == second) for second in seconds]
    total = sum(mean * count for (_, mean), count in zip(points, counts, strict=True))
    assert total == pytest.approx(values.sum(), abs=1e-3)


@given(hnp.arrays(np.float32, st.integers(0, 5), elements=st.sampled_from([np.nan, np.inf, 2.0])))
def test_what_is_no_number_is_left_out_of_a_mean(values):
    points = mean_per_second(np.full(len(values), START_NS), values)
    assert points == ([(START_NS, 2.0)] if (values == 2.0).any() else [])

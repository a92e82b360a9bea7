"""The view of a study on MLflow's own pages."""

import base64
import json
import re
import zlib
from urllib.parse import unquote

import pytest
from tracked_trials import DOCUMENT, result_of, runs_of, spec_of

from wattune.objective import Question, parse_constraint, parse_objective
from wattune.ranking.order import rank
from wattune.tracking.tracker import Tracker
from wattune.tracking.view import NOTE_TAG, VIEW_TAG, dimensions, view_path, view_tags


def test_the_page_is_arranged_for_comparison(tracker, client, tmp_path):
    tracker = Tracker(tracker.uri, tracker.study_name, document=DOCUMENT)
    assert not tracker.page  # nobody has asked the store yet, and its end asks nobody
    tracker.delivered()
    experiment = client.get_experiment_by_name(tracker.study_name)
    assert (
        tracker.page == f"#/experiments/{experiment.experiment_id}/runs?compareRunsMode=CHART&viewStateShareKey=wattune"
    )
    packed = experiment.tags["mlflow.sharedViewState.wattune"]
    state = json.loads(zlib.decompress(base64.b64decode(packed.removeprefix("deflate;"))))
    assert "params.`tp`" in state["selectedColumns"]
    assert "params.`pp`" not in state["selectedColumns"]  # it has one value
    charts = {chart["type"]: chart for chart in state["compareRunCharts"]}
    assert charts["PARALLEL"]["selectedParams"] == ["model", "tp", "sharding"]
    assert charts["SCATTER"]["xaxis"]["key"] == "node_device_power_peak_1s_w"
    assert "maximize tokens_per_s" in experiment.tags["mlflow.note.content"]


@pytest.mark.parametrize(
    ("document", "names"),
    [
        ({}, []),
        ({"space": None}, []),
        ({"space": {"tp": [1, 2], "pp": [1], "micro_batch_size": 4}}, ["tp"]),
        ({"space": {"pp": [1, 2], "tp": [1, 2]}}, ["tp", "pp"]),
        (
            {"engine": ["torch", "megatron"], "model": ["a"], "space": {"sharding": ["none", "zero1"]}},
            ["engine", "sharding"],
        ),
        ({"workload": {"seq_len": [1024, 4096], "global_batch_size": 16}, "space": {"tp": [1, 2]}}, ["seq_len", "tp"]),
        ({"flags": {"lr": [0.1, 0.2], "flash": [True]}, "constraints": ["a", "b"]}, ["flags.lr"]),
    ],
)
def test_what_varies_is_a_list_of_more_than_one(document, names):
    assert dimensions(document) == names


def state_of(objective: str, *constraints: str) -> dict:
    tags = view_tags(DOCUMENT, parse_objective(objective), [parse_constraint(text) for text in constraints])
    return json.loads(zlib.decompress(base64.b64decode(tags[VIEW_TAG].removeprefix("deflate;"))))


def test_trials_are_ordered_by_the_objective_and_charted_over_the_first_bound():
    state = state_of("minimize energy_per_token_j", "device_power_peak_1s_w <= 1.0 * device_power_limit_w")
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`energy_per_token_j`", True)
    metrics = [name for name in state["selectedColumns"] if name.startswith("metrics.")]
    first = [f"metrics.`{name}`" for name in ("energy_per_token_j", "device_power_peak_1s_w", "device_power_limit_w")]
    assert metrics[:3] == first and len(set(metrics)) == len(metrics)
    charts = {chart["type"]: chart for chart in state["compareRunCharts"]}
    assert (charts["SCATTER"]["xaxis"]["key"], charts["SCATTER"]["yaxis"]["key"]) == (
        "device_power_peak_1s_w",
        "energy_per_token_j",
    )
    bars = [chart["displayName"] for chart in state["compareRunCharts"] if chart["type"] == "BAR"]
    assert bars == ["energy_per_token_j [J]", "device_power_peak_1s_w [W]"]
    assert len({chart["uuid"] for chart in state["compareRunCharts"]}) == len(state["compareRunCharts"])
    assert state_of("maximize tokens_per_s")["orderByAsc"] is False


def test_the_note_names_every_bound_and_the_state_fits_in_a_tag():
    bounds = ["node_device_power_peak_1s_w <= 2750", "device_temp_max_c < 85"]
    tags = view_tags(DOCUMENT, parse_objective("maximize mfu_frac"), [parse_constraint(text) for text in bounds])
    first = tags[NOTE_TAG].splitlines()[0]
    assert first == f"**maximize mfu_frac** under `{bounds[0]}`, `{bounds[1]}`", (
        "what is shown of a note before it is opened"
    )
    assert "no constraints" in view_tags(DOCUMENT, parse_objective("maximize mfu_frac"), [])[NOTE_TAG]
    assert max(map(len, tags.values())) <= 5000, "what a tag of an experiment holds"
    assert view_path("7") == "#/experiments/7/runs?compareRunsMode=CHART&viewStateShareKey=wattune"


def test_the_page_links_to_the_best_runs_side_by_side(tracker, client, tmp_path):
    tracker = Tracker(tracker.uri, tracker.study_name, document=DOCUMENT)
    specs = [spec_of(number) for number in (1, 2, 4)]
    for spec in specs:
        tracker.log_trial(spec, result_of(spec), tmp_path / "none", picture="<svg/>")
    best = rank([(spec, result_of(spec)) for spec in specs], Question.of("maximize tokens_per_s")).to_json()
    tracker.log_study(DOCUMENT, best, None)
    tracker.log_study(DOCUMENT, best, None)
    note = client.get_experiment_by_name(tracker.study_name).tags[NOTE_TAG]
    ((number, runs, experiments),) = re.findall(
        r"\[Compare the best (\d)\]\(#/compare-runs\?runs=(.*)&experiments=(.*)\)", note
    )
    wanted = {run.info.run_id: run.info.run_name for run in runs_of(client, tracker)}
    assert number == "3" and set(json.loads(unquote(runs))) == set(wanted)
    assert set(wanted.values()) == {f"{spec.label} #0" for spec in specs}, "each column has a name"
    assert json.loads(unquote(experiments)) == [client.get_experiment_by_name(tracker.study_name).experiment_id]
    for run_id in wanted:
        assert "picture.svg" in {entry.path for entry in client.list_artifacts(run_id)}

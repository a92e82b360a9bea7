"""The view of a study on MLflow's own pages."""

import base64
import json
import zlib

from tracked_trials import DOCUMENT

from wattune.tracking.tracker import Tracker


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

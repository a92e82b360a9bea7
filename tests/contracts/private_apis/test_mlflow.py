"""Uses of MLflow that MLflow does not promise. Each is a row of docs/dependencies.md."""

from pathlib import Path

import pytest
from installed import load


@pytest.mark.private_api("mlflow mlflow.sharedViewState")
def test_sharedviewstate() -> None:
    scripts = list((Path(load("mlflow").__file__).parent / "server/js/build/static/js").glob("*.js"))
    if not scripts:  # mlflow-skinny has no UI
        pytest.skip("mlflow's UI is not installed")
    text = "".join(path.read_text() for path in scripts)
    wanted = ("mlflow.sharedViewState.", "viewStateShareKey", "compareRunsMode", "deflate;", "compareRunCharts")
    wanted += ("mlflow.experimentKind", "custom_model_development", "mlflow.note.content", "runsCountToCompare")
    assert [name for name in wanted if name not in text] == []


@pytest.mark.private_api("mlflow _MAX_TAG_CHARS")
def test_max_tag_val_length() -> None:
    from wattune.tracking import run, store

    limits = load("mlflow.utils.validation")
    assert run._MAX_TAG_CHARS == limits.MAX_TAG_VAL_LENGTH
    assert store._MAX_METRICS == limits.MAX_METRICS_PER_BATCH
    assert store._MAX_PARAMS_AND_TAGS == limits.MAX_PARAMS_TAGS_PER_BATCH


@pytest.mark.private_api("mlflow MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT")
def test_mlflow_suppress_printing_url_to_stdout() -> None:
    from wattune.tracking.store import _ENVIRONMENT

    variables = load("mlflow.environment_variables")
    assert [name for name in _ENVIRONMENT if getattr(variables, name).name != name] == []

"""The notebook: its script runs, and the notebook is the script, executed."""

import importlib.util
import os
from pathlib import Path

import nbformat
import pytest
from small_study import make_study

import wattune
from wattune.metrics import METRICS

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"


@pytest.mark.slow
def test_the_script_runs_without_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(FOLDER)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile((FOLDER / "first_study.py").read_text(), "first_study.py", "exec"), names)
    said = capsys.readouterr().out
    assert "feasible    tp2 pp2 mbs1" in said and "more tokens a second" in said
    assert names["figure"].data


def test_the_notebook_is_the_script_and_is_executed() -> None:
    spec = importlib.util.spec_from_file_location("make_notebook", FOLDER / "make.py")
    assert spec is not None and spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    converted, kept = make.notebook(), nbformat.read(FOLDER / "first_study.ipynb", as_version=4)
    nbformat.validate(kept)
    form = [(cell.cell_type, cell.id, cell.source) for cell in converted.cells]
    assert [(cell.cell_type, cell.id, cell.source) for cell in kept.cells] == form, "run `make notebook`"
    code = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(cell.outputs for cell in code)
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert sum("application/vnd.plotly.v1+json" in output.get("data", {}) for output in outputs) == 3
    assert os.fspath(FOLDER.parents[1]) not in (FOLDER / "first_study.ipynb").read_text()


def test_its_study_is_small_and_holds_what_the_recordings_give(tmp_path: Path) -> None:
    files = [path for path in (FOLDER / "data").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    shipped, made = wattune.load_study(FOLDER / "data" / "dense_h200x4"), wattune.load_study(make_study(tmp_path).path)
    assert [trial.spec.trial_id for trial in shipped.trials()] == [trial.spec.trial_id for trial in made.trials()]
    for ours, theirs in zip(shipped.metrics().to_pylist(), made.metrics().to_pylist(), strict=True):
        assert {name for name in METRICS if ours[name] is None} == {name for name in METRICS if theirs[name] is None}
        for name in METRICS:
            close = pytest.approx(theirs[name], rel=1e-9) if theirs[name] is not None else None
            assert ours[name] == close, f"{name}: run `make notebook`"
    for tier in ("ring", "fast", "counter", "slow", "spans"):
        assert shipped.telemetry(tier).equals(made.telemetry(tier)), tier

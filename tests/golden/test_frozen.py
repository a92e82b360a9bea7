"""Folders that 0.1.0 wrote, read by every later version with equal figures.

`frozen/format_4.tar.xz` holds a study, `frozen`: a trial with simulated sensors, one that ran out of memory, one of
a command with the sensors of the first, and combinations that a rule rejects; and a recording, `sleeping`. Its
figures are in `frozen/format_4.json`. Neither is ever written again.
"""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from wattune import api
from wattune.recording.recording import measured_run, run_of
from wattune.storage.study import StudyFolder

HERE = Path(__file__).parent / "frozen"


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("storage")
    with tarfile.open(HERE / "format_4.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def figures(storage: Path) -> dict[str, Any]:
    """Figures of every reader: ranks of both kinds, metrics analysed again from the tables, a comparison."""
    study, ranking = StudyFolder(storage / "frozen"), api.rank("frozen", storage=str(storage))
    measured = [folder for folder in study.trials() if folder.spans() is not None]
    pair = api.compare(*(f"frozen:{folder.path.name.partition('-')[0]}" for folder in measured), storage=str(storage))
    recordings = api.rank("sleeping", storage=str(storage))
    return {
        "rows": [[row.trial_id, str(row.verdict), row.label, row.spec.trial_id, row.reason] for row in ranking.trials],
        "objective": {row.trial_id: row.objective.value for row in ranking.trials if row.objective},
        "candidates": sorted(row["status"] for row in study.candidates()),
        "analyzed": {folder.path.name: dict(api.analyze(folder.path).summary.metrics) for folder in measured},
        "compared": {one.metric: one.change for one in pair.tested},
        "recordings": [[row.trial_id, str(row.verdict), row.label] for row in recordings.trials],
        "recorded": dict(run_of(storage / "recordings" / "sleeping").metrics),
    }


def test_every_reader_gives_the_figures_of_then(storage: Path) -> None:
    then, now = json.loads((HERE / "format_4.json").read_text()), figures(storage)
    assert now.keys() == then.keys()
    for name in ("rows", "candidates", "recordings"):
        assert now[name] == then[name], name
    for name in ("objective", "compared", "recorded"):
        assert now[name] == pytest.approx(then[name], rel=1e-9), name
    for trial, metrics in then["analyzed"].items():
        found = now["analyzed"][trial]  # a later version may compute more
        assert {name: found[name] for name in metrics} == pytest.approx(metrics, rel=1e-9), trial


def test_every_file_agrees_with_its_digest_and_the_stored_figures_with_the_tables(storage: Path) -> None:
    for folder in StudyFolder(storage / "frozen").trials():
        found = folder.check()
        assert found.digested and not found.missing
    recording = storage / "recordings" / "sleeping"
    stored, found = run_of(recording).metrics, measured_run(recording).metrics
    assert stored == pytest.approx({name: found[name] for name in stored}, rel=1e-9)

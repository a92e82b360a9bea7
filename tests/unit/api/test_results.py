"""Decisions from Python: a study may be given as an object, a name or a path, and several at once."""

from pathlib import Path

import pytest
from small_study import make_study

import wattune
from wattune.api import report


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("storage")
    make_study(path)
    make_study(path, "strict", bound_w=2000.0)
    return path


def test_a_study_is_ranked_however_it_is_named(storage: Path) -> None:
    study = wattune.load_study("dense_h200x4", storage=str(storage))
    ranking = wattune.rank(study)
    assert ranking.best is not None and ranking.best.label == "tp2 pp2 mbs1"
    for other in (study.folder, study.path, str(study.path), [study]):
        assert wattune.rank(other).to_json() == ranking.to_json()
    assert wattune.rank("dense_h200x4", storage=str(storage)).to_json() == ranking.to_json()


def test_several_studies_are_ranked_together_under_one_question(storage: Path) -> None:
    studies = ["dense_h200x4", wattune.load_study("strict", storage=str(storage))]
    with pytest.raises(wattune.WattuneError, match="constraints differ"):
        wattune.rank(studies, storage=str(storage))
    ranking = wattune.rank(studies, storage=str(storage), constraints=["mfu_frac > 0.1"], where=["tokens_per_s > 1"])
    assert ranking.studies == ("dense_h200x4", "strict") and len(ranking.feasible) == 4
    assert wattune.rank(studies[1], least_quality="publishable").least_quality == "publishable"


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"objective": "maximise tokens_per_s"}, "is not an objective"),
        ({"constraints": ["mfu_frac >"]}, "is not a constraint"),
        ({"where": ["old_frac > 0.1"]}, "neither a metric nor a field"),
        ({"least_quality": "great"}, 'unknown quality "great"'),
    ],
)
def test_a_question_that_is_none_is_one_message(storage: Path, question: dict[str, object], said: str) -> None:
    with pytest.raises(wattune.WattuneError, match=said):
        wattune.rank("dense_h200x4", storage=str(storage), **question)


def test_two_trials_are_compared_and_a_report_is_written(storage: Path) -> None:
    study = wattune.load_study("dense_h200x4", storage=str(storage))
    ranking = wattune.rank(study)
    names = [f"dense_h200x4:{row.trial_id[:6]}" for row in (ranking.feasible[0], ranking.infeasible[0])]
    comparison = wattune.compare(*names, storage=str(storage))
    assert comparison.time is not None
    assert sum(comparison.time.changes.values()) == pytest.approx(comparison.time.b - comparison.time.a)
    with pytest.raises(wattune.WattuneError, match="names neither a trial nor a recording"):
        wattune.compare("nothing", names[0], storage=str(storage))
    assert report(study, ranking) == study.path / "report.html" and (study.path / "report.html").is_file()

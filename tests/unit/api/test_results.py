"""Decisions from Python: a study may be given as an object, a name or a path, and several at once."""

from pathlib import Path

import pytest
from small_study import make_study

import wattune


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
    with pytest.raises(wattune.WattuneError, match='unknown quality "great"'):
        wattune.rank(studies[1], least_quality="great")

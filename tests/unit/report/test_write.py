"""The report, also of a study of which some telemetry is broken, and the page of a comparison."""

import shutil
from pathlib import Path

import pytest
from small_study import make_study, ranking_of

import wattune
from wattune.errors import PlanError
from wattune.report.write import write_comparison, write_report
from wattune.storage.study import StudyFolder


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyFolder:
    return make_study(tmp_path_factory.mktemp("storage"))


def test_the_report_stands_without_what_cannot_be_read(study, tmp_path):
    broken = StudyFolder(shutil.copytree(study.path, tmp_path / "broken"))
    ranking = ranking_of(broken)
    whole = write_report(broken, ranking).read_text()
    for shown in ("chart-power-against-the-step-timeline", "chart-temperature-by-slot", "rank 3 at 140.2 GiB"):
        assert shown in whole
    (broken.path / "trials" / f"{ranking.best.trial_id}-0" / "telemetry" / "node0" / "ring.parquet").write_text("no")
    html = write_report(broken, ranking).read_text()
    assert f"files of trial {ranking.best.trial_id} cannot be read, so it is not drawn" in html
    assert "chart-throughput-against-power" in html
    assert "chart-temperature-by-slot" in html  # of the other trial


def test_a_page_that_cannot_be_written_is_an_error(study, tmp_path):
    ids = [row.trial_id for row in (*ranking_of(study).feasible, *ranking_of(study).infeasible)]
    found = wattune.compare(*(f"{study.path}:{each}" for each in ids[:2]))
    assert write_comparison(found, tmp_path / "c.html").read_text().startswith("<!doctype html>")
    with pytest.raises(PlanError, match="cannot be written"):
        write_comparison(found, Path(tmp_path / "none" / "c.html"))

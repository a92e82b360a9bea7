"""A report has the price of its bound on power, and is written where that has none."""

import pyarrow.parquet as pq
from decided_study import POWER, write_study

from wattune import api
from wattune.storage.study import StudyFolder

FIGURE = 'id="chart-price-of-the-bound"'


def test_a_study_with_a_bound_on_power_draws_its_price(tmp_path) -> None:
    study = write_study(tmp_path, lambda spec: spec.plan.micro_batch_size < 8)
    assert FIGURE in api.report(study).read_text()


def test_results_are_read_once_for_the_ranking_and_the_price(tmp_path, monkeypatch) -> None:
    study, reads = write_study(tmp_path, lambda spec: spec.plan.micro_batch_size < 8), []
    finished = StudyFolder.finished
    monkeypatch.setattr(StudyFolder, "finished", lambda self: reads.append(self.path) or finished(self))
    assert FIGURE in api.report(study).read_text()
    assert reads == [study.path]


def test_a_study_without_one_does_not(tmp_path) -> None:
    study = write_study(tmp_path, lambda _: True, constraints=["step_time_s <= 10"])
    assert FIGURE not in api.report(study).read_text()


def test_a_study_with_nothing_measured_has_a_report_all_the_same(tmp_path) -> None:
    study = write_study(tmp_path, lambda _: False, constraints=[f"{POWER} <= 1000"])
    assert FIGURE not in api.report(study).read_text()


def test_the_table_that_a_report_names_is_that_of_the_report(tmp_path) -> None:
    """The process that measured the trials was killed before it could rank them."""
    study = write_study(tmp_path, lambda _: True)
    (study.path / "ranking.parquet").unlink(missing_ok=True)
    api.report(study)
    assert pq.read_table(study.path / "ranking.parquet").num_rows == len(api.rank(study).trials) > 0

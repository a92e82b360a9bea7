"""A report has the price of its bound on power, and is written where that has none."""

from decided_study import POWER, write_study

from wattune import api

FIGURE = 'id="chart-price-of-the-bound"'


def test_a_study_with_a_bound_on_power_draws_its_price(tmp_path) -> None:
    study = write_study(tmp_path, lambda spec: spec.plan.micro_batch_size < 8)
    assert FIGURE in api.report(study).read_text()


def test_a_study_without_one_does_not(tmp_path) -> None:
    study = write_study(tmp_path, lambda _: True, constraints=["step_time_s <= 10"])
    assert FIGURE not in api.report(study).read_text()


def test_a_study_with_nothing_measured_has_a_report_all_the_same(tmp_path) -> None:
    study = write_study(tmp_path, lambda _: False, constraints=[f"{POWER} <= 1000"])
    assert FIGURE not in api.report(study).read_text()

"""The chart of a bound's price: measured and predicted plans are marks of their own."""

from decided_study import POWER, write_study
from made_report import figure_of

from wattune import api
from wattune.report.frontier import frontier_chart


def test_measured_plans_are_steps_and_predicted_ones_diamonds(tmp_path) -> None:
    study = write_study(tmp_path, lambda spec: spec.plan.micro_batch_size in (1, 8))
    chart = frontier_chart(api.frontier(study, vary=f"{POWER} <= 900..1300 step 100"))
    data, layout = figure_of(chart)
    traces = {one["name"]: one for one in data}
    measured, predicted = traces["measured, holds every bound"], traces["predicted, never measured"]
    assert measured["line"]["shape"] == "hv" and predicted["marker"]["symbol"] == "diamond-open"
    assert all("never measured" in text for text in predicted["hovertext"])
    assert all("P(holds)" in text and "predicted" not in text for text in measured["hovertext"])
    assert list(measured["y"]) == sorted(measured["y"]), "a looser bound never costs"
    assert chart is not None and chart.stamp == "SIMULATED" and POWER in layout["xaxis"]["title"]["text"]


def test_without_a_plan_that_measured_anything_there_is_none(tmp_path) -> None:
    study = write_study(tmp_path, lambda spec: spec.plan.micro_batch_size == 1)
    assert frontier_chart(api.frontier(study, vary=f"{POWER} <= 1..3 step 1")) is None

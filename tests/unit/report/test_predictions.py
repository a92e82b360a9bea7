"""The chart of predictions: each against its own measurement, and the share inside the intervals."""

from dataclasses import replace

from made_report import figure_of
from made_trials import FASTEST, POWER, asked, speed

from wattune.fidelity import BURST, FIDELITY, FIRST_BURST_REPEAT
from wattune.ranking.order import rank
from wattune.report.predictions import predictions
from wattune.run import Prediction, RunStatus


def predicted(number: int, value: float, measured: float, **changed):
    spec, result = speed(number, measured)
    made = Prediction(metric="tokens_per_s", value=value, low=0.9 * value, high=1.1 * value, feasible_probability=0.8)
    return spec, replace(result, prediction=made, tags={"simulated": "true"}, **changed)


def test_each_prediction_stands_against_its_measurement_and_the_share_inside_is_said() -> None:
    runs = [predicted(1, 1000.0, 1050.0), predicted(2, 1000.0, 1200.0), predicted(3, 800.0, 790.0), speed(4, 500.0)]
    chart = predictions(rank(runs, asked(FASTEST, POWER)))
    data, _ = figure_of(chart)
    traces = {one["name"]: one for one in data}
    assert sorted(traces["inside the interval"]["x"]) == [790.0, 1050.0]
    assert list(traces["outside"]["x"]) == [1200.0] and list(traces["outside"]["y"]) == [1000.0]
    assert chart is not None and "2 of 3 measurements" in chart.caption and "(67%)" in chart.caption and chart.stamp


def test_a_failed_trial_and_another_objective_have_no_point() -> None:
    failed = predicted(1, 1000.0, 1000.0, status=RunStatus.CRASHED)
    assert predictions(rank([failed, speed(2, 900.0)], asked(FASTEST, POWER))) is None
    other = Prediction(metric="mfu_frac", value=0.5, low=0.4, high=0.6, feasible_probability=1.0)
    spec, result = speed(3, 900.0)
    runs = [(spec, replace(result, prediction=other))]
    assert predictions(rank(runs, asked(FASTEST, POWER))) is None


def test_a_burst_is_no_outcome_of_a_prediction() -> None:
    (spec, burst), full = predicted(1, 1000.0, 600.0), predicted(2, 1000.0, 1050.0)
    burst = replace(burst, repeat=FIRST_BURST_REPEAT, tags={**burst.tags, FIDELITY: BURST}, quality_reasons=(BURST,))
    assert predictions(rank([(spec, burst)], asked(FASTEST, POWER))) is None
    promoted = [(spec, burst), (spec, replace(burst, repeat=0, prediction=None, tags={"simulated": "true"})), full]
    chart = predictions(rank(promoted, asked(FASTEST, POWER)))
    data, _ = figure_of(chart)
    assert [one["name"] for one in data] == ["equal", "inside the interval"], "a burst of 600 would be outside"
    assert chart is not None and "1 of 1 measurements" in chart.caption

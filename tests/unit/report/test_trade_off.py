"""The chart of the objective over power."""

import pytest
from made_report import POWER, figure_of, ranked, trial, whole

from wattune.report.trade_off import trade_off


def test_the_trade_off_shows_verdicts_by_symbol_intervals_by_bars_and_the_bound():
    data, layout = figure_of(trade_off(whole()[0]))
    front, infeasible, feasible = data
    assert (infeasible["name"], infeasible["marker"]["symbol"]) == ("infeasible", "x")
    assert (feasible["name"], feasible["marker"]["symbol"]) == ("feasible", "circle")
    assert (feasible["x"], feasible["y"]) == ([2665.0], [40_500.0])  # the middle of two repeats, with their interval
    assert feasible["error_y"]["array"] == pytest.approx([12.7062 * 500], rel=1e-4)
    assert feasible["customdata"] == [whole()[0].feasible[0].trial_id]
    assert (front["name"], front["x"]) == ("Pareto front", [2665.0, 2788.0])
    assert [shape["x0"] for shape in layout["shapes"]] == [2750.0]


def test_a_bound_that_differs_by_trial_has_no_line():
    pairs = [trial(n, 1000.0 * n, 2000.0) for n in (1, 2)]
    for number, (_, result) in enumerate(pairs):
        result.metrics["device_power_limit_w"] = 600.0 + number
    assert "shapes" not in figure_of(trade_off(ranked(pairs, f"{POWER} <= 4 * device_power_limit_w")))[1]

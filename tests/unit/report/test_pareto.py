"""The chart of the objective over power."""

import pytest
from made_report import POWER, figure_of, ranked, trial, whole

from wattune.objective import Question, parse_constraint, parse_objective
from wattune.ranking.order import rank
from wattune.report.pareto import LABELLED, pareto


def test_the_trade_off_shows_verdicts_by_symbol_intervals_by_bars_and_the_bound():
    data, layout = figure_of(pareto(whole()[0]))
    front, infeasible, feasible = data
    assert (infeasible["name"], infeasible["marker"]["symbol"]) == ("infeasible", "x")
    assert (feasible["name"], feasible["marker"]["symbol"]) == ("feasible", "circle")
    assert (feasible["x"], feasible["y"]) == ([2365.0], [40_500.0])  # the middle of two repeats, with their interval
    interval = whole()[0].feasible[0].objective
    assert feasible["error_y"]["array"] == [pytest.approx(interval.high - 40_500.0)]
    assert 200.0 < interval.high - 40_500.0 < 1500.0
    assert feasible["customdata"] == [whole()[0].feasible[0].trial_id]
    assert (front["name"], front["x"]) == ("Pareto front", [2365.0, 3188.0])
    assert [shape["x0"] for shape in layout["shapes"]] == [2750.0]


def test_a_bound_that_differs_by_trial_has_no_line():
    pairs = [trial(n, 1000.0 * n, 2000.0) for n in (1, 2)]
    for number, (_, result) in enumerate(pairs):
        result.metrics["device_power_limit_w"] = 600.0 + number
    assert "shapes" not in figure_of(pareto(ranked(pairs, f"{POWER} <= 4 * device_power_limit_w")))[1]


def test_of_many_trials_only_the_front_and_the_best_have_a_label():
    # Slower and thirstier with every number: only the first is on the front. Beyond the bound the same again.
    pairs = [trial(n, 50_000.0 - n, 2000.0 + n) for n in range(1, 10)]
    pairs += [trial(n, 40_000.0 - n, 3200.0 + n) for n in range(10, 15)]
    _, layout = figure_of(pareto(ranked(pairs)))
    data, _ = figure_of(pareto(ranked(pairs)))
    infeasible, feasible = data
    assert [text for text in feasible["text"] if text] == ["<b>dp4 mbs1</b>"]
    assert [text for text in infeasible["text"] if text] == ["dp4 mbs10"]
    few, _ = figure_of(pareto(ranked(pairs[:3])))
    assert few[0]["text"] == ["<b>dp4 mbs1</b>", "dp4 mbs2", "dp4 mbs3"]
    low, high = layout["xaxis"]["range"]
    assert low < 2001.0 < 3214.0 < high and low < 2750.0 < high


def test_of_very_many_trials_the_best_of_each_kind_and_the_front_are_drawn(monkeypatch):
    # A tenth of the speed at the least power ends the front, behind all others.
    pairs = [trial(n, 50_000.0 - n, 2000.0 + n) for n in range(1, 8)] + [trial(8, 5_000.0, 1500.0)]
    every, _ = figure_of(pareto(ranked(pairs)))
    monkeypatch.setattr("wattune.report.pareto.MOST_DRAWN", 3)
    front, feasible = figure_of(pareto(ranked(pairs)))[0]
    assert front == every[0] and front["x"] == [1500.0, 2001.0]
    assert ([*every[1]["x"][:3], 1500.0], len(every[1]["x"])) == (feasible["x"], 8)
    assert "The best 3 of each kind and the front" in pareto(ranked(pairs)).caption


@pytest.mark.parametrize(
    ("bounds", "metrics", "across"),
    [
        ([f"{POWER} <= 2750", "device_temp_max_c <= 85"], {"device_temp_max_c": 60.0}, POWER),
        (["device_temp_max_c <= 85"], {"device_temp_max_c": 60.0}, "device_temp_max_c"),
        (["device_temp_max_c <= 85"], {}, POWER),
        ([], {}, POWER),
    ],
)
def test_the_axis_is_a_bounded_power_else_what_is_bounded_else_power(bounds, metrics, across):
    pairs = [trial(n, 1000.0 * n) for n in (1, 2)]
    for _, result in pairs:
        result.metrics.update(metrics)
    ranking = rank(
        pairs,
        Question(
            objective=parse_objective("maximize tokens_per_s"),
            constraints=tuple(parse_constraint(text) for text in bounds),
        ),
    )
    chart = pareto(ranking)
    if "device_temp_max_c" in str(bounds) and not metrics:
        assert chart is None, "a bound that was not measured leaves every trial unknown"
    else:
        assert figure_of(chart)[1]["xaxis"]["title"]["text"].startswith(across)


@pytest.mark.parametrize(("bound", "shape"), [(f"{POWER} <= 9000", "hv"), ("mfu_frac >= 0.1", "vh")])
def test_the_front_passes_nothing_that_no_trial_reached(bound, shape):
    """More power buys speed: up to the next trial's power the speed is the one before. With more MFU it is the next."""
    pairs = [trial(n, 1000.0 * n, 2000.0 + 100 * n) for n in (1, 2, 3)]
    for number, (_, result) in enumerate(pairs):
        result.metrics["mfu_frac"] = 0.5 - 0.1 * number
    front = figure_of(pareto(ranked(pairs, bound)))[0][0]
    assert (front["name"], front["line"]["shape"], len(front["x"])) == ("Pareto front", shape, 3)


def test_without_a_trial_that_measured_both_there_is_no_chart():
    assert pareto(ranked([])) is None
    assert pareto(ranked([trial(1, 1.0, None)], "")) is None


def test_a_long_front_has_names_at_even_distances_and_intervals_stay_in_view():
    pairs = [trial(n, 40_000.0 + 500 * n, 2000.0 + 50 * n) for n in range(1, 31)]
    ranking = ranked(pairs)
    data, layout = figure_of(pareto(ranking))
    named = [text for trace in data for text in trace.get("text", ()) if text]
    assert 3 <= len(named) <= LABELLED and any(text.startswith("<b>") for text in named)
    for axis in "xy":
        low, high = layout[f"{axis}axis"]["range"]
        for trace in data[1:]:
            bars = trace[f"error_{axis}"]
            ends = zip(trace[axis], bars["arrayminus"], bars["array"], strict=True)
            assert all(low <= value - below and value + above <= high for value, below, above in ends)


def test_the_text_of_a_bound_stands_beside_its_line_where_there_is_more_room():
    for bound_w, anchor in ((2050, "left"), (2250, "right")):
        pairs = [trial(n, 1000.0 * n, 2000.0 + 100 * n) for n in range(4)]
        _, layout = figure_of(pareto(ranked(pairs, f"{POWER} <= {bound_w}")))
        assert [note["xanchor"] for note in layout["annotations"]] == [anchor]

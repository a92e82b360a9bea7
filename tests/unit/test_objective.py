"""Objectives and constraints: a grammar that is parsed and never evaluated."""

import re

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from wattune.errors import SpaceError
from wattune.metrics import METRICS
from wattune.objective import Constraint, Objective, Question, parse_constraint, parse_objective, parse_varied
from wattune.run import LARGEST_METRIC

METRIC = st.sampled_from(sorted(METRICS))
NUMBER = st.floats(allow_nan=False, allow_infinity=False)


def test_a_bound_may_ask_for_true_figures_and_says_so_in_its_text() -> None:
    text = "device_power_peak_1s_w <= 1 * device_power_limit_w sensor_gain_frac=0.05"
    assert parse_constraint(text).sensor_gain_frac == 0.05 and str(parse_constraint(text)) == text
    assert parse_constraint("energy_per_token_j < 2 sensor_gain_frac = 0") == parse_constraint("energy_per_token_j < 2")
    with pytest.raises(SpaceError, match=r"sensor_gain_frac is 0.2; write 0 for a bound on readings, or 0.05"):
        parse_constraint("energy_per_token_j < 2 sensor_gain_frac=0.2")
    with pytest.raises(SpaceError, match="tokens_per_s does not come from a power sensor, so leave sensor_gain_frac"):
        parse_constraint("tokens_per_s > 2 sensor_gain_frac=0.05")


@given(metric=METRIC, operator=st.sampled_from(["<=", ">=", "<", ">"]), factor=NUMBER, limit=st.none() | METRIC)
@example(metric="device_temp_max_c", operator="<=", factor=85.1234567890123, limit=None)
def test_a_constraint_is_what_its_text_says(metric, operator, factor, limit):
    assume(limit or factor <= 1 or not metric.endswith("_frac"))
    constraint = Constraint(metric=metric, operator=operator, factor=factor, limit_metric=limit)
    assert parse_constraint(str(constraint)) == constraint


@given(metric=METRIC, maximize=st.booleans())
def test_an_objective_is_what_its_text_says(metric, maximize):
    objective = Objective(metric=metric, maximize=maximize)
    assert parse_objective(str(objective)) == objective


def test_the_examples_of_the_design():
    assert parse_constraint("device_power_peak_1s_w <= 1.0 * device_power_limit_w") == Constraint(
        metric="device_power_peak_1s_w", operator="<=", factor=1.0, limit_metric="device_power_limit_w"
    )
    assert parse_constraint("node_device_power_peak_1s_w<=2750").factor == 2750.0
    assert str(parse_constraint(" throttle_thermal_frac  <=  1e-2 ")) == "throttle_thermal_frac <= 0.01"


@pytest.mark.parametrize("text", ["throttle_thermal_frac <= 5", "mfu_frac > 30", "bubble_frac < 1.5"])
def test_a_percentage_is_no_fraction(text):
    with pytest.raises(SpaceError, match=r"at most 1, a fraction; write 0\.\d+ for"):
        parse_constraint(text)


def test_what_is_compared_with_something_smaller_may_exceed_it():
    assert parse_constraint("device_outlier_frac <= 1.5").factor == 1.5
    assert parse_constraint("throttle_frac <= 2 * bubble_frac").factor == 2.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("device_temp_max_c <= 2 * device_limit", 'unknown metric "device_limit"'),
        ("device_temp_max_c", 'is not a constraint; write "METRIC OP NUMBER"'),
        ("memory_peak_bytes <= 80 GiB", 'write "memory_peak_bytes <= 85899345920"'),
        ("device_temp_max_c <= 85 C", 'write "device_temp_max_c <= 85"'),
        ("device_temp_max_c <= 185 F", 'are in degC, so drop the unit "F"'),
        ("device_temp_max_c <= 1e999", "is not a finite number"),
        ("device_temp_max_c <= 8٣", "is not a constraint"),
        ("device_temp_max_c <= 8" + " " * 200 + "and more", "is not a constraint"),
    ],
)
def test_a_constraint_that_cannot_be_used(text, words):
    with pytest.raises(SpaceError, match=words):
        parse_constraint(text)


def test_slack_is_in_the_metrics_unit_and_negative_where_violated():
    below = parse_constraint("device_temp_max_c <= 85")
    assert below.slack({"device_temp_max_c": 80.0}) == 5.0
    assert below.holds({"device_temp_max_c": 85.0}) is True
    assert parse_constraint("device_temp_max_c < 85").holds({"device_temp_max_c": 85.0}) is False
    above = parse_constraint("memory_headroom_frac >= 0.1")
    assert above.slack({"memory_headroom_frac": 0.05}) == pytest.approx(-0.05)


def test_an_absent_metric_leaves_a_constraint_unknown():
    constraint = parse_constraint("device_power_peak_1s_w <= 1.1 * device_power_limit_w")
    assert constraint.holds({"device_power_peak_1s_w": 1.0}) is None
    assert constraint.missing({"device_power_peak_1s_w": 1.0}) == ["device_power_limit_w"]
    assert constraint.bound({"device_power_limit_w": 700.0}) == pytest.approx(770.0)
    assert constraint.holds({"device_power_peak_1s_w": 771.0, "device_power_limit_w": 700.0}) is False


def both_ways(value: float, bound: float) -> tuple[bool | None, bool | None]:
    at_most, more = (Constraint(metric="tokens_per_s", operator=op, factor=bound) for op in ("<=", ">"))
    return at_most.holds({"tokens_per_s": value}), more.holds({"tokens_per_s": value})


@given(value=st.floats(-LARGEST_METRIC, LARGEST_METRIC), bound=NUMBER)
def test_a_bound_and_its_opposite_never_hold_together(value, bound):
    assert sorted(both_ways(value, bound)) == [False, True]


def test_a_distance_that_no_float_holds_leaves_both_unknown():
    """No run has such a metric: it is refused where it is read."""
    assert both_ways(1.7976931348623157e308, -1e292) == (None, None)


def test_a_range_has_its_tightest_value_first_and_both_ends() -> None:
    varied = parse_varied("node_device_power_peak_1s_w <= 2000..2800 step 100")
    assert varied.values == (2000, 2100, 2200, 2300, 2400, 2500, 2600, 2700, 2800)
    assert str(varied.at(2600)) == "node_device_power_peak_1s_w <= 2600"
    assert parse_varied("mfu_frac >= 0.1..0.5 step 0.1").values == (0.5, 0.4, 0.3, 0.2, 0.1)
    assert parse_varied("device_temp_max_c<60 ..64.9 step 2").values == (60, 62, 64)
    share = parse_varied("device_power_peak_1s_w <= 0.8..1 step 0.1 * device_power_limit_w")
    assert str(share.at(0.9)) == "device_power_peak_1s_w <= 0.9 * device_power_limit_w"


def test_a_range_stands_for_bounds_on_its_side_of_its_metric_only() -> None:
    varied = parse_varied("node_device_power_peak_1s_w <= 2000..2800 step 100")
    assert varied.replaces(parse_constraint("node_device_power_peak_1s_w < 2750"))
    assert not varied.replaces(parse_constraint("node_device_power_peak_1s_w >= 1000"))
    assert not varied.replaces(parse_constraint("device_temp_max_c <= 80"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node_device_power_peak_1s_w <= 2000", "LOW..HIGH step STEP"),
        ("node_device_power_peak_1s_w <= 2000..2800", "LOW..HIGH step STEP"),
        ("node_device_power_peak_1s_w == 1..2 step 1", "LOW..HIGH step STEP"),
        ("node_device_power_peak_1s_w <= 2800..2000 step 100", "LOW <= HIGH"),
        ("node_device_power_peak_1s_w <= 1..2 step 0", "a step above 0"),
        ("node_device_power_peak_1s_w <= 1..2 step 1e999", "a step above 0"),
        ("node_device_power_peak_1s_w <= 0..1e9 step 1", "more than 100 values"),
        ("watts <= 1..2 step 1", 'unknown metric "watts"'),
        ("mfu_frac <= 10..50 step 10", "write 0.5 for 50 %"),
        ("x" * 300, "is not a range"),
    ],
)
def test_a_range_that_is_none_is_refused_in_one_line(text, said) -> None:
    with pytest.raises(SpaceError, match=re.escape(said)) as raised:
        parse_varied(text)
    assert len(str(raised.value)) < 450


@pytest.mark.parametrize(
    ("metrics", "kept"),
    [
        ({"device_temp_max_c": 70.0, "throttle_frac": 0.05}, True),
        ({"device_temp_max_c": 90.0, "throttle_frac": 0.05}, False),
        ({"device_temp_max_c": 70.0}, None),
        ({"device_temp_max_c": 90.0}, False),
        ({"device_temp_max_c": float("nan"), "throttle_frac": 0.05}, None),
        ({}, None),
    ],
)
def test_a_bound_on_what_was_not_measured_is_unknown_unless_another_one_is_broken(metrics, kept):
    asked = Question.of("maximize tokens_per_s", "device_temp_max_c <= 80", "throttle_frac < 0.1")
    assert asked.kept(metrics) is kept
    assert asked.needed == ("tokens_per_s", "device_temp_max_c", "throttle_frac")
    assert Question.of("maximize tokens_per_s").kept(metrics) is True


@pytest.mark.parametrize("risk", [0.0, 0.5, -1.0, float("nan")])
def test_a_risk_is_between_nothing_and_a_coin(risk):
    with pytest.raises(SpaceError, match=r"above 0 and below 0\.5"):
        Question.of("maximize tokens_per_s", risk=risk)

"""Bounds on temperatures: judged on the settled value, undecided where a short run does not tell it."""

import pytest
from made_trials import FASTEST, asked, trial

from wattune.objective import parse_constraint
from wattune.ranking.assessment import Verdict
from wattune.ranking.bounds import Holds
from wattune.ranking.heat import NO_HEAT, heat_left, stays_cool_probability, unsettled_text
from wattune.ranking.order import rank

BOUND = parse_constraint("device_temp_max_c <= 70")


def judged(bound=BOUND, *, window_s=4.5, more=(), **metrics):
    pairs = [trial(1, {"tokens_per_s": 1.0, **metrics}, window_s=window_s), *more]
    (row,) = rank(pairs, asked(FASTEST, bound)).trials
    return row


def settled(value_c, uncertainty_k, **more):
    return {
        "device_temp_settled_c": value_c,
        "device_temp_settled_uncertainty_c": uncertainty_k,
        "device_temp_max_c": 62.0,
        **more,
    }


@pytest.mark.parametrize(
    ("settled_c", "uncertainty_k", "verdict"),
    [(62.0, 4.0, Holds.HOLDS), (68.0, 4.0, Holds.UNDECIDED), (69.0, 0.8, Holds.UNDECIDED), (77.0, 4.0, Holds.BREAKS)],
)
def test_the_settled_value_decides_and_not_the_reading(settled_c, uncertainty_k, verdict):
    (margin,) = judged(**settled(settled_c, uncertainty_k)).margins
    assert (margin.got, margin.verdict) == (62.0, verdict)
    assert bool(margin.unsettled) is (verdict is Holds.UNDECIDED)


def test_an_undecided_bound_says_what_settles_it():
    row = judged(**settled(68.0, 4.9))
    assert row.verdict is Verdict.UNDECIDED
    assert "not settled after 4 s of load, settles at 68.0 °C ± 4.9 K" in row.reason
    assert "measure 300 s (measure.min_seconds), or a soak of the finalists (measure.soak_finalists)" in row.reason
    assert row.margins[0].to_json()["unsettled"] in row.reason


def test_a_reading_of_seconds_proves_nothing_near_the_bound():
    """A run without its curve, as of older tables: far away it decides, near it does not, and a minute decides."""
    short = {temp_c: judged(device_temp_max_c=temp_c).margins[0].verdict for temp_c in (50.0, 64.0, 72.0, 84.0)}
    assert list(short.values()) == [Holds.HOLDS, Holds.UNDECIDED, Holds.UNDECIDED, Holds.BREAKS]
    assert judged(device_temp_max_c=64.0, window_s=75.0).margins[0].verdict is Holds.HOLDS
    row = judged(device_temp_max_c=64.0)
    assert "not settled after 4 s of load: measure 60 s (measure.min_seconds)" in row.reason
    assert "a run of unknown length" in judged(device_temp_max_c=64.0, window_s=None).reason


def test_more_short_repeats_do_not_settle_it():
    more = [trial(1, {"tokens_per_s": 1.0, **settled(67.5, 5.0)}, repeat=n, window_s=4.0) for n in range(1, 9)]
    assert judged(more=more, **settled(67.5, 5.0)).margins[0].verdict is Holds.UNDECIDED


def test_a_soak_settles_it():
    tags = {"soak": "true"}
    long = trial(1, {"tokens_per_s": 1.0, **settled(66.0, 0.9)}, repeat=3000, tags=tags, window_s=300.0)
    assert judged(**settled(67.5, 5.0)).margins[0].verdict is Holds.UNDECIDED
    assert judged(more=[long], **settled(67.5, 5.0)).margins[0].verdict is Holds.HOLDS


@pytest.mark.parametrize(
    ("bound", "metric", "value"),
    [
        ("memory_temp_max_c <= 80", "memory_temp_max_c", 79.0),
        ("device_temp_mean_c <= 60", "device_temp_mean_c", 59.0),
        ("thermal_margin_min_c >= 10", "thermal_margin_min_c", 11.0),
    ],
)
def test_other_temperatures_move_with_the_hottest_device(bound, metric, value):
    warms = judged(parse_constraint(bound), window_s=4.0, **settled(68.0, 2.0), **{metric: value}).margins[0]
    assert warms.verdict is not Holds.HOLDS
    assert warms.holds_probability < 0.05


def test_a_share_of_throttling_waits_for_heat():
    bound = parse_constraint("throttle_thermal_frac <= 0.01")
    share = {"throttle_thermal_frac": 0.0}
    cool = judged(bound, **settled(66.0, 4.0, thermal_margin_min_c=25.0, **share))
    warm = judged(bound, **settled(86.0, 4.0, thermal_margin_min_c=25.0, **share))
    unread = judged(bound, **share)
    assert cool.verdict is unread.verdict is Verdict.FEASIBLE
    assert warm.verdict is Verdict.UNDECIDED and "not settled" in warm.reason
    throttles = judged(bound, **settled(99.0, 2.0, thermal_margin_min_c=25.0, **share))
    assert throttles.verdict is Verdict.UNDECIDED  # heat that is to come is no proof
    broken = judged(bound, **settled(66.0, 4.0, thermal_margin_min_c=25.0, throttle_thermal_frac=0.3))
    assert broken.verdict is Verdict.INFEASIBLE


def test_what_is_no_temperature_has_no_heat():
    _, run = trial(1, {"node_device_power_peak_1s_w": 1.0, **settled(70.0, 4.0)})
    assert heat_left("node_device_power_peak_1s_w", [run]) is NO_HEAT
    assert heat_left("device_temp_max_c", []) is NO_HEAT
    assert stays_cool_probability("throttle_power_frac", [run]) == 1.0
    assert unsettled_text("tokens_per_s", 1.0, [run]) == ""

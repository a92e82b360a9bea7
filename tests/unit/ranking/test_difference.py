"""Differences of two trials, on studies whose truth is known."""

import math
from dataclasses import replace

import numpy as np
import pytest
from made_trials import Pair, on_n0, trial

from wattune.ranking.difference import Counted, Difference, difference, tell_apart
from wattune.ranking.spreads import Spreads
from wattune.units import format_change
from wattune.view.comparison import DIFFERENCE

SPEED = "tokens_per_s"
HEAT = "device_temp_max_c"
THROTTLE = "throttle_frac"


def run(number: int, repeat: int, at_s: float, **metrics: float) -> Pair:
    spec, result = trial(number, metrics, repeat=repeat)
    return on_n0((spec, result), at_s)


def side(pairs: list[Pair], spreads: Spreads, number: int) -> Counted:
    return Counted([result for spec, result in pairs if spec.plan.micro_batch_size == number], spreads)


def difference_in(pairs: list[Pair], metric: str = SPEED, a: int = 1, b: int = 2) -> Difference:
    spreads = Spreads(pairs)
    found = difference(metric, side(pairs, spreads, a), side(pairs, spreads, b))
    assert found is not None
    return found


def test_two_single_runs_differ_by_what_the_prior_of_1_percent_says() -> None:
    found = difference_in([run(1, 0, 0.0, tokens_per_s=100.0), run(2, 0, 0.0, tokens_per_s=103.0)])
    assert found.change == pytest.approx(3.0) and found.change_frac == pytest.approx(0.03)
    reach = 2.447 * math.sqrt(2) * 0.01  # Student's t with the prior's 6 degrees of freedom
    assert math.log1p(found.low_frac) == pytest.approx(math.log(1.03) - reach, rel=1e-3)
    assert math.log1p(found.high_frac) == pytest.approx(math.log(1.03) + reach, rel=1e-3)
    assert (found.low, found.high) == (pytest.approx(100 * found.low_frac), pytest.approx(100 * found.high_frac))
    (one,) = tell_apart([found], SPEED)
    assert not one.told_apart and one.verdict == "not told apart"


def test_overlapping_intervals_may_still_be_told_apart() -> None:
    """Nobody knows the drift between the first run and the last; both trials ran at both times, so it cancels."""
    pairs = [run(n, k, 60.0 * k, tokens_per_s=100.0 * 1.026 ** (n - 1)) for n in (1, 2) for k in (0, 9)]
    found = difference_in(pairs)
    assert found.a.high > found.b.low
    assert found.low is not None and found.low > 0


def test_a_temperature_differs_in_kelvin_and_never_in_percent() -> None:
    found = difference_in([run(1, 0, 0.0, device_temp_max_c=70.0), run(2, 0, 0.0, device_temp_max_c=74.0)], HEAT)
    assert found.change == pytest.approx(4.0)
    assert (found.change_frac, found.low_frac, found.high_frac) == (None, None, None)
    assert found.low == pytest.approx(4.0 - 2.447 * math.sqrt(2), rel=1e-3), "1 K from run to run"
    change, share, interval = (column.cell(found) for column in DIFFERENCE[3:6])
    assert (change.text, share.value, interval.text) == ("+4.0 K", None, "+0.5 K to +7.5 K")
    assert format_change(HEAT, -1.0) == "-1.0 K"


def test_a_metric_that_can_be_0_is_tested_by_repeats_alone() -> None:
    once = [run(1, 0, 0.0, throttle_frac=0.0), run(2, 0, 60.0, throttle_frac=0.001)]
    found = difference_in(once, THROTTLE)
    assert (found.p_value, found.low) == (None, None)
    assert found.verdict == "not tested: no repeat shows its scatter"
    repeated = [run(3, k, 120.0 + k, throttle_frac=0.001 * k) for k in range(8)]
    again = difference_in([*once, *repeated], THROTTLE)
    assert again.p_value is not None and again.p_value > 0.5
    far = difference_in([run(1, 0, 0.0, throttle_frac=0.0), run(2, 0, 60.0, throttle_frac=0.1), *repeated], THROTTLE)
    assert far.p_value is not None and far.p_value < 0.01
    zeros = difference_in([run(1, 0, 0.0, throttle_frac=0.0), run(2, 0, 0.0, throttle_frac=0.0), *repeated], THROTTLE)
    assert zeros.verdict == "both are 0"


def test_repeats_of_one_trial_are_compared_without_counting_a_run_twice() -> None:
    pairs = [run(1, k, 60.0 * k, tokens_per_s=value) for k, value in enumerate((100.0, 101.0, 99.0, 100.0))]
    spreads = Spreads(pairs)
    runs = [result for _, result in pairs]
    found = difference(SPEED, Counted(runs[:1], spreads), Counted(runs[1:2], spreads))
    assert found is not None and found.change == pytest.approx(1.0)
    one_of_four = difference(SPEED, Counted(runs[:1], spreads), Counted(runs, spreads))
    assert one_of_four is not None and found.high - found.low > one_of_four.high - one_of_four.low > 0
    same = difference(SPEED, Counted(runs, spreads), Counted(runs, spreads))
    assert same is not None and same.verdict == "the same runs"
    assert difference("mfu_frac", Counted(runs, spreads), Counted(runs, spreads)) is None


def test_trials_of_two_studies_have_the_errors_of_both() -> None:
    a, b = [run(1, 0, 0.0, tokens_per_s=100.0)], [run(2, 0, 0.0, tokens_per_s=110.0)]
    found = difference(SPEED, side(a, Spreads(a), 1), side(b, Spreads(b), 2))
    assert found is not None and found.p_value is not None and found.p_value < 0.001


def test_holm_keeps_the_error_over_all_metrics_and_counts_a_metric_in_two_units_once() -> None:
    def one(metric: str, p_value: float, statistic: float) -> Difference:
        base = difference_in([run(1, 0, 0.0, tokens_per_s=100.0), run(2, 0, 0.0, tokens_per_s=103.0)])
        return replace(base, metric=metric, p_value=p_value, statistic=statistic)

    names = ["tokens_per_s", "step_time_s", "mfu_frac", "energy_per_step_j", "device_power_mean_w"]
    found = tell_apart(map(one, names, [0.04, 0.012, 0.012, 0.03, 0.02], [2.2, 2.6, 2.6, 2.3, 2.4]), "tokens_per_s")
    # Three different tests: 0.012 is below 5 % / 3, 0.02 below 5 % / 2, 0.03 below 5 %.
    assert [each.told_apart for each in found] == [True, True, True, True, True]
    found = tell_apart(map(one, names, [0.06, 0.012, 0.012, 0.03, 0.04], [2.2, 2.6, 2.6, 2.3, 2.4]), "tokens_per_s")
    assert [each.told_apart for each in found] == [False, True, True, False, False]


def simulated(rng: np.random.Generator, effect: float, *, wander: float, alternate: bool) -> list[Pair]:
    """Two trials, six runs each that scatter by 0.5 %, on a machine that wanders slowly in a wave."""
    pairs = []
    phase = rng.uniform(0, 2 * math.pi)
    for n, logarithm in ((1, 0.0), (2, effect)):
        for k in range(6):
            place = 2 * k + n - 1 if alternate else 6 * (n - 1) + k
            slow = wander * math.sin(phase + 2 * math.pi * place / 16)
            value = 100.0 * math.exp(logarithm + slow + 0.005 * rng.normal())
            pairs.append(run(n, k, 60.0 * place, tokens_per_s=value))
    return pairs


@pytest.mark.parametrize(
    ("wander", "alternate", "width"), [(0.0, False, 0.033), (0.0, True, 0.017), (0.02, True, 0.022)]
)
def test_the_interval_has_its_coverage_whatever_the_machine_does(wander: float, alternate: bool, width: float) -> None:
    """Of trials that ran one after the other, the drift between them adds to the width."""
    rng, inside, widths = np.random.default_rng(11), 0, []
    for _ in range(200):
        found = difference_in(simulated(rng, 0.02, wander=wander, alternate=alternate))
        inside += found.low_frac <= math.expm1(0.02) <= found.high_frac
        widths.append(found.high_frac - found.low_frac)
        assert found.num_pairs == (6 if alternate else 0)
    assert inside / 200 >= 0.95
    assert np.median(widths) < width


def test_equal_trials_are_told_apart_in_less_than_5_percent_of_studies() -> None:
    rng = np.random.default_rng(13)
    studies = [simulated(rng, 0.0, wander=0.02, alternate=True) for _ in range(200)]
    assert np.mean([tell_apart([difference_in(pairs)], SPEED)[0].told_apart for pairs in studies]) < 0.05


def test_neighbouring_runs_cancel_what_the_machine_does_slowly() -> None:
    rng, ratios = np.random.default_rng(12), []
    for _ in range(20):
        pairs = simulated(rng, 0.02, wander=0.03, alternate=True)
        paired = difference_in(pairs)
        alone = difference_in([(spec, replace(result, start_wall_ns=0)) for spec, result in pairs])
        assert (paired.num_pairs, alone.num_pairs) == (6, 0), "without times nobody knows neighbours"
        ratios.append((paired.high_frac - paired.low_frac) / (alone.high_frac - alone.low_frac))
    assert np.median(ratios) < 0.7

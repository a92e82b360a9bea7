"""The beginning of steady state, on transients that were planted."""

import numpy as np
import pytest

from wattune.analysis.signals.series import series
from wattune.analysis.signals.steady_state import drift_frac, settled_from_s, steady_from


def noisy(count, frac=0.005, seed=0):
    return 1.0 + frac * np.random.default_rng(seed).normal(size=count)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_too_few_steps_tell_nothing(count):
    assert steady_from(np.linspace(2, 1, count)) == 0


@pytest.mark.parametrize(("slow", "count"), [(1, 20), (5, 40), (30, 200), (400, 1000)])
def test_slow_steps_in_front_are_left_out_to_the_step(slow, count):
    times_s = noisy(count)
    times_s[:slow] *= 1.3
    assert steady_from(times_s) == pytest.approx(slow, abs=1)


@pytest.mark.parametrize(("slow", "factor"), [(1, 20.0), (3, 3.0)])
def test_a_quiet_end_does_not_hide_slow_steps_in_front(slow, factor):
    """The minimum lies where the quiet part begins, and most steps before that are no slower than it."""
    for seed in range(20):
        times_s = np.concatenate([noisy(10, frac=0.004, seed=seed), noisy(10, frac=0.0005, seed=seed)])
        times_s[:slow] *= factor
        assert slow <= steady_from(times_s) <= 2 * slow, seed


def test_a_change_late_in_the_run_is_no_steady_state():
    times_s = noisy(100)
    times_s[70:] *= 1.2
    assert steady_from(times_s) is None


def along(count):
    return np.arange(count) / (count - 1)


UNSTEADY = {
    "ramp up": lambda t: 1 + 0.25 * t,
    "ramp down": lambda t: 1.25 - 0.25 * t,
    "slow drift": lambda t: 1 + 0.06 * t,
    "one sawtooth": lambda t: 1 + 0.25 * np.mod(t, 1),
    "step in the middle": lambda t: 1 + 0.05 * (t > 0.5),
    "late step": lambda t: 1 + 0.2 * (t > 0.7),
    "slow growth": lambda t: np.exp(0.1 * t),
}


@pytest.mark.parametrize("shape", UNSTEADY)
@pytest.mark.parametrize("count", [20, 40, 100, 1500])
def test_what_changes_through_the_run_is_no_steady_state(shape, count):
    change = np.ptp(UNSTEADY[shape](along(count)))
    for seed in range(5):
        times_s = UNSTEADY[shape](along(count)) * noisy(count, 0.003, seed)
        assert drift_frac(times_s) > 0.02, seed
        if "step" not in shape:
            assert drift_frac(times_s) == pytest.approx(change / 2 / np.median(times_s), rel=0.3), seed
            assert steady_from(times_s) is None, seed


def test_a_sawtooth_of_many_periods_and_a_small_drift_are_steady():
    count = 100
    for seed in range(5):
        for shape in (1 + 0.25 * np.mod(10 * along(count), 1), 1 + 0.01 * along(count)):
            times_s = shape * noisy(count, 0.003, seed)
            assert drift_frac(times_s) < 0.02 and steady_from(times_s) == 0, seed


def correlated(count, correlation, rng):
    """An autoregressive series of first order, of unit variance."""
    shocks, found = np.sqrt(1 - correlation**2) * rng.normal(size=count + 60), [0.0]
    for shock in shocks[1:].tolist():  # plain numbers: an array's own take ten times as long
        found.append(correlation * found[-1] + shock)
    return np.array(found[60:])


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.5, 0.7, 0.8])
@pytest.mark.parametrize("count", [8, 12, 20, 40, 100, 200])
def test_honest_noise_is_called_a_drift_in_less_than_5_percent_of_runs(count, correlation):
    rng = np.random.default_rng(count)
    times_s = [1 + 0.05 * correlated(count, correlation, rng) for _ in range(400)]
    assert np.mean([drift_frac(each) > 0.02 for each in times_s]) < 0.05


@pytest.mark.parametrize(
    ("count", "noise", "correlation", "least"),
    [(12, 0.003, 0.0, 0.9), (20, 0.003, 0.8, 0.7), (20, 0.005, 0.0, 0.9), (40, 0.005, 0.5, 0.9), (100, 0.01, 0.5, 0.9)],
)
def test_halves_that_differ_by_2_percent_are_found(count, noise, correlation, least):
    rng = np.random.default_rng(count)
    line = 1 + 0.04 * along(count)
    found = [drift_frac(line * (1 + noise * correlated(count, correlation, rng))) > 0.01 for _ in range(100)]
    assert np.mean(found) >= least


def test_single_slow_steps_do_not_hide_a_trend():
    times_s = (1 + 0.06 * along(100)) * noisy(100, 0.005)
    times_s[[20, 61, 80]] *= 3.0
    assert drift_frac(times_s) == pytest.approx(0.03, abs=0.005)


def test_equal_steps_do_not_drift_and_few_say_nothing():
    assert drift_frac(np.full(40, 0.1)) == 0.0
    assert drift_frac(np.linspace(1, 2, 7)) is None


def whole_degrees(celsius, end_s=600.0):
    time_s = np.arange(0.0, end_s, 0.05)
    return series(time_s, np.round(celsius(time_s)))


def test_an_exponential_rise_settles_when_its_slope_does():
    # Neighbouring minutes' means differ by 30 (1 - 1/e)^2 exp(-t / 60 s), which is a degree at 149 s.
    settled_s = settled_from_s(whole_degrees(lambda t: 70 - 30 * np.exp(-t / 60)))
    assert settled_s == pytest.approx(149, abs=15)


def test_a_steady_climb_never_settles_and_a_level_one_always_has():
    assert settled_from_s(whole_degrees(lambda t: 40 + t / 30)) is None
    assert settled_from_s(whole_degrees(lambda t: 55.0 + 0 * t)) == 0.0
    # Whole degrees that flicker between two values are level.
    assert settled_from_s(whole_degrees(lambda t: 55.5 + 0.3 * np.sin(t))) == 0.0


def test_less_than_a_minute_settles_nothing():
    assert settled_from_s(whole_degrees(lambda t: 55.0 + 0 * t, end_s=50.0)) is None

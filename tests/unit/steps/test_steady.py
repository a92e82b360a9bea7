"""The end of the warm-up by rounds of steps."""

import numpy as np

from wattune.steps.steady import STABLE_FRAC, is_stable, steady_from


def test_rounds_until_one_is_stable() -> None:
    warm = [9.0, 4.0, 2.0, 1.5, 1.2, 1.04, 1.0, 1.0, 1.0, 1.0]
    assert steady_from(warm + [1.0] * 20) == 10
    assert steady_from([1.0] * 20) == 5
    assert steady_from([1.0] * 20, round_steps=8) == 8


def test_no_round_yet_or_never_a_stable_one() -> None:
    assert steady_from([1.0] * 4) is None
    assert steady_from([]) is None
    assert steady_from([2.0**-at for at in range(50)]) is None


def test_the_bound_is_of_the_halves_medians() -> None:
    within, beyond = 1 + 0.9 * STABLE_FRAC, 1 + 1.1 * STABLE_FRAC
    assert is_stable([within, within, 1.0, 1.0]) and not is_stable([beyond, beyond, 1.0, 1.0])
    assert not is_stable([1.0, 1.0, 1.0])


def test_scatter_of_two_percent_is_steady_at_once() -> None:
    times_s = np.random.default_rng(0).normal(1.0, 0.02, 40).tolist()
    assert steady_from(times_s, round_steps=10) == 10

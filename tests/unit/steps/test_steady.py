"""The end of the warm-up by rounds of steps."""

import numpy as np

from wattune.steps.steady import MOST_WARMUP_ROUNDS, STABLE_FRAC, is_stable, warmup


def test_warm_up_is_whole_rounds_until_one_is_stable() -> None:
    slow_first = [5.0, 1.0, 0.5, 0.1, *[0.1] * 40]
    assert warmup(slow_first[:7], 4) == (None, False)
    assert warmup(slow_first, 4) == (8, True)
    restless = [0.1, 0.1, 0.3, 0.3] * 20
    assert warmup(restless, 4) == (4 * MOST_WARMUP_ROUNDS, False)
    assert warmup([0.1] * 4, 0) == (4, False)


def test_a_recordings_rounds_go_on_until_one_is_stable() -> None:
    def warm_up(times_s: list[float]) -> int | None:
        return warmup(times_s, most_rounds=None)[0]

    warm = [9.0, 4.0, 2.0, 1.5, 1.2, 1.04, 1.0, 1.0, 1.0, 1.0]
    assert warm_up(warm + [1.0] * 20) == 10 and warm_up([1.0] * 20) == 5
    assert warm_up([5.0, 1.0] * 20 + [1.0] * 20) == 45
    assert warm_up([1.0] * 4) is None and warm_up([]) is None and warm_up([2.0**-at for at in range(50)]) is None


def test_the_bound_is_of_the_halves_medians() -> None:
    within, beyond = 1 + 0.9 * STABLE_FRAC, 1 + 1.1 * STABLE_FRAC
    assert is_stable([within, within, 1.0, 1.0]) and not is_stable([beyond, beyond, 1.0, 1.0])
    assert not is_stable([1.0, 1.0, 1.0])


def test_scatter_of_two_percent_is_steady_at_once() -> None:
    times_s = np.random.default_rng(0).normal(1.0, 0.02, 40).tolist()
    assert warmup(times_s, 10) == (10, True)

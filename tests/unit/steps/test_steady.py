"""The end of the warm-up: the steps after it are stable, the first step is never judged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.steps.steady import STABLE_FRAC, is_stable, least_warmup, most_warmup, num_profiled, warmup


@pytest.mark.parametrize(("asked", "steps"), [(0, 1), (1, 1), (2, 2), (3, 3), (5, 5), (20, 20)])
def test_stable_steps_end_warm_up_as_soon_as_was_asked(asked: int, steps: int) -> None:
    assert warmup([9.0, *[0.1] * 40], asked) == (steps, True)  # the first step compiles, and is not judged


def test_a_window_slides_until_its_steps_are_stable() -> None:
    slow_first = [5.0, 1.0, 0.5, 0.1, *[0.1] * 40]
    assert warmup(slow_first[:6], 1) == (None, False)
    assert warmup(slow_first, 1) == (3, True) and warmup(slow_first, 5) == (5, True)
    falling = [0.1 * 1.2**step for step in range(40)]
    assert warmup(falling, 4) == (most_warmup(4), False)
    assert warmup([0.1] * 4, 0) == (None, False)


def test_a_recordings_warm_up_goes_on_until_steps_are_stable() -> None:
    def warm_up(times_s: list[float]) -> int | None:
        return warmup(times_s, endless=True)[0]

    warm = [9.0, 4.0, 2.0, 1.5, 1.2, 1.04, 1.0, 1.0, 1.0, 1.0]
    assert warm_up(warm + [1.0] * 20) == 5 and warm_up([1.0] * 20) == 1
    assert warm_up([5.0, 1.0] * 20 + [1.0] * 20) == 39  # steps that alternate are not stable
    assert warm_up([1.0] * 4) is None and warm_up([]) is None and warm_up([2.0**-at for at in range(50)]) is None


def test_the_bound_is_of_the_medians() -> None:
    within, beyond = 1 + 0.9 * STABLE_FRAC, 1 + 1.1 * STABLE_FRAC
    assert is_stable([within, within, 1.0, 1.0]) and not is_stable([beyond, beyond, 1.0, 1.0])
    assert is_stable([within, 1.0, within, 1.0]) and not is_stable([beyond, 1.0, beyond, 1.0])
    assert not is_stable([1.0, 1.0, 1.0])


@given(asked=st.integers(0, 30), times_s=st.lists(st.floats(1e-3, 10), max_size=200))
def test_warm_up_is_never_shorter_than_asked_nor_endless(asked: int, times_s: list[float]) -> None:
    number, steady = warmup(times_s, asked)
    if number is None:
        assert not steady and len(times_s) < most_warmup(asked)
        return
    assert max(asked, 1) == least_warmup(asked) <= number <= most_warmup(asked)
    assert warmup(times_s[: number + 4 * steady], asked) == (number, steady)  # the same while the steps come
    assert steady or number == most_warmup(asked)


def test_scatter_of_two_percent_is_steady_at_once() -> None:
    worlds = [np.random.default_rng(seed).normal(1.0, 0.02, 60).tolist() for seed in range(200)]
    lengths = [warmup(times_s, 5)[0] for times_s in worlds]
    assert None not in lengths and np.mean([length == 5 for length in lengths]) > 0.8


def test_a_long_step_is_profiled_once() -> None:
    assert [num_profiled(step_s) for step_s in (0.01, 0.19, 0.2, 2.0)] == [2, 2, 1, 1]

"""A measurement ends early only where its own steps prove that it loses."""

import numpy as np
import pytest

from wattune.workers.early_stop import LEAST_STEPS, loses, steps_to_look

DICE = np.random.default_rng(7)


def starts(step_time_s: float, num_steps: int, scatter: float = 0.02) -> list[float]:
    times_s = step_time_s * (1 + scatter * DICE.standard_normal(num_steps - 1))
    return [0.0, *np.cumsum(times_s)]


def test_steps_that_are_clearly_slower_prove_it_and_say_how_slow():
    proof = loses(starts(0.5, 20), 0.4)
    assert proof is not None and "above 0.4 s it loses" in proof
    assert 0.48 < float(proof.split()[3]) < 0.5


@pytest.mark.parametrize(("step_time_s", "num_steps"), [(0.4, 40), (0.3, 40), (5.0, 8)])
def test_a_tie_a_winner_and_too_few_steps_prove_nothing(step_time_s, num_steps):
    assert loses(starts(step_time_s, num_steps), 0.4) is None


def test_at_the_bar_the_looks_of_a_whole_measurement_rarely_stop_it():
    """A trial exactly at the bar is stopped by chance: one side of a 95 % interval, at four looks."""
    stopped = 0
    for _ in range(300):
        whole, done = starts(0.4, 160, 0.05), 0
        while (done := done + steps_to_look(done, 20)) < 160:
            stopped += loses(whole[:done], 0.4) is not None
    assert stopped <= 0.12 * 300


def test_ranks_look_after_the_least_steps_and_then_at_every_doubling():
    done, looks = 0, []
    while done < 200:
        done += steps_to_look(done, 20)
        looks.append(done)
    assert looks == [20, 40, 80, 160, 320]
    assert steps_to_look(0, 3) == LEAST_STEPS and steps_to_look(10, 3) == LEAST_STEPS - 10

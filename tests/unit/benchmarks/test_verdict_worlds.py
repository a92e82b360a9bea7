"""Simulated studies of `benchmarks/verdict_worlds.py`: their truth is what their readings say in the long run."""

import numpy as np
import pytest
import verdict_worlds
from verdict_worlds import BOUND_W, WORLDS, Score, Truth, World, knowing, study

from wattune.run import NO_NUMBERS


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_the_truth_of_a_world_is_what_its_readings_say(world: World) -> None:
    truth = Truth(world, np.random.default_rng(7))
    _, power = truth.read(np.zeros(4000, int), np.random.default_rng(1).random(4000))
    assert truth.breaks[0] == pytest.approx((power > np.log(BOUND_W)).mean(), abs=0.05)
    if truth.best is not None:
        able = truth.breaks <= 0.05
        assert truth.speed[truth.best] == truth.speed[able].max()


def test_a_study_without_noise_names_the_truly_best_plan() -> None:
    score = Score(list)
    for seed in range(3):
        world = World(name="quiet", num_plans=6, spread=1e-5)
        study(world, seed, NO_NUMBERS, score)
        knowing(world, seed, score)
    assert score["answered"] == score["knowing"] == [True] * 3
    assert max(score["broken"] + score["knowing_broken"], default=0.0) == 0.0


def test_each_world_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict_worlds, "WORLDS", WORLDS[-1:])
    ((world, score),) = verdict_worlds.scores(2, num_earlier=1)
    assert world is WORLDS[-1] and len(score["answered"]) == len(score["knowing"]) == 2 and len(WORLDS) >= 14

"""Predictions of candidates: their units, intervals, probabilities of bounds, and the tag they are kept in."""

import math
from functools import cache

import numpy as np
import pytest
from known_space import BEST, POWER, SPECS, metrics, problem, result

from wattune.objective import parse_constraint
from wattune.run import Prediction
from wattune.search.strategies.model_guided import NUM_DRAWN, ModelGuided
from wattune.search.strategies.prediction import log_joint, prediction_of
from wattune.search.strategies.surrogate import Belief
from wattune.search.strategy import Random


@cache
def searched(num_trials: int) -> tuple[ModelGuided, list[tuple[Prediction, float]]]:
    """A search after some trials, and each prediction with the measurement that followed it; not to be told more."""
    strategy, pairs = ModelGuided(problem(), stops=False), []
    for _ in range(num_trials):
        (spec,) = strategy.ask(1)
        predicted, done = strategy.prediction(spec), result(spec)
        strategy.tell(spec, done)
        if predicted is not None and "tokens_per_s" in done.metrics:
            pairs.append((predicted, done.metrics["tokens_per_s"]))
    return strategy, pairs


@pytest.mark.parametrize(("operator", "bound", "expected"), [("<=", 110.0, 0.977), (">=", 110.0, 0.023), ("<", 0, 0.0)])
def test_the_probability_of_a_bound_is_that_of_the_next_measurement(operator, bound, expected) -> None:
    one = Belief(mean=np.array([100.0]), std=np.array([3.0]), noise=4.0, is_log=False)
    assert np.exp(one.log_within(operator, bound))[0] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("operator", "expected"), [("<=", 0.0), (">=", 1.0)])
def test_what_is_above_zero_is_surely_past_a_bound_of_zero(operator, expected) -> None:
    one = Belief(mean=np.log([100.0]), std=np.array([0.03]), noise=0.04, is_log=True)
    assert np.exp(one.log_within(operator, 0.0))[0] == expected


def test_bounds_together_are_between_independent_ones_and_the_tightest() -> None:
    half = np.log([0.5])
    assert 0.25 < float(np.exp(log_joint([half, half]))[0]) < 0.5
    assert np.exp(log_joint([half, np.zeros(1)]))[0] == pytest.approx(0.5)


def test_nothing_is_predicted_while_trials_are_drawn_then_most_measurements_are_inside() -> None:
    _, pairs = searched(30)
    assert len(pairs) <= 30 - NUM_DRAWN
    inside = np.mean([found.low <= measured <= found.high for found, measured in pairs])
    assert inside >= 0.7, "a surrogate that is sure of what it does not know is of no use"
    errors = [abs(math.log(found.value / measured)) for found, measured in pairs]
    assert np.median(errors[-10:]) < np.median(errors[:10]), "it learns"


def test_a_looser_bound_is_never_less_likely_and_gains_are_of_better_plans() -> None:
    strategy, _ = searched(30)
    found = strategy.predict(SPECS)
    tight, loose = (found.log_feasible([parse_constraint(f"{POWER.metric} <= {watts}")]) for watts in (3000, 4000))
    assert (tight <= loose + 1e-12).all() and (tight < loose).any()
    gain = found.gain([POWER])
    assert gain is not None and (gain >= 0).all()
    assert found.log_beats(metrics(BEST)["tokens_per_s"] * 10).max() < math.log(0.05)


def test_only_a_strategy_that_predicts_gives_a_prediction() -> None:
    strategy, _ = searched(8)
    found = prediction_of(strategy, BEST)
    assert found is not None and found.low < found.value < found.high
    assert prediction_of(Random(SPECS, seed=0), BEST) is None


def test_predicting_changes_no_proposal() -> None:
    asked = []
    for looks in (False, True):
        strategy = ModelGuided(problem())
        for _ in range(9):
            (spec,) = strategy.ask(1)
            if looks:
                strategy.prediction(spec)
                strategy.joint_gain(SPECS[:20])
            strategy.tell(spec, result(spec))
            asked.append(spec)
    assert asked[:9] == asked[9:]

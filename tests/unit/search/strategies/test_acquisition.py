"""Scores: the closed form, sampled, and finite where nothing is expected."""

import numpy as np
import pytest

from wattune.search.strategies.surrogate import log_expected_improvement, log_probability


@pytest.mark.parametrize(("mean", "std", "best"), [(0.0, 1.0, 0.5), (1.0, 0.2, 0.9), (-1.0, 0.7, 0.3)])
def test_the_expected_improvement_is_that_of_draws(mean, std, best):
    draws = mean + std * np.random.default_rng(0).standard_normal(2_000_000)
    sampled = np.maximum(draws - best, 0).mean()
    assert np.exp(log_expected_improvement(np.array([mean]), np.array([std]), best))[0] == pytest.approx(
        sampled, rel=0.02
    )


def test_probabilities_stay_finite_in_their_logarithm():
    assert log_probability(np.array([0.0, 8.0, -40.0])) == pytest.approx([np.log(0.5), 0.0, -804.6], abs=0.1)

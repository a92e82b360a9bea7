"""The Gaussian process against direct formulas, finite differences and functions that it was not fitted to."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from specs import trial_spec

from wattune.search.strategies.features import make_features
from wattune.search.strategies.gaussian_process import (
    NOISE,
    OWN,
    GaussianProcess,
    Hyperprior,
    _negative_log_posterior,
    fit,
)

BASE = trial_spec(on="1x8 h200_sxm", batch=64)
PLANS = [
    replace(BASE.plan, tp=tp, etp=tp, micro_batch_size=size, sharding=sharding, recompute=recompute)
    for tp, size, sharding, recompute in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8), ("none", "zero1", "zero3"), ("none", "selective", "full")
    )
]
FEATURES = make_features([replace(BASE, plan=plan) for plan in PLANS])
ONES = np.ones(len(PLANS))
PRIOR = Hyperprior.of(FEATURES.num_columns, 40, 0.1, 0.02, 0.3)
TRUTH = np.array(
    [
        -0.4 * abs(np.log2(plan.tp) - 1) + 0.2 * np.log2(plan.micro_batch_size) - 0.3 * (plan.recompute == "full")
        for plan in PLANS
    ]
)


def drawn(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(len(PLANS))[:count]


def test_the_gradient_is_that_of_finite_differences():
    rows = drawn(70)  # so many that a factor is inverted by halves
    similar, distances2 = FEATURES.by_column(rows)
    counts = np.arange(1.0, 71.0)

    def cost(theta):
        return _negative_log_posterior(theta, similar, distances2, TRUTH[rows], counts, 0.5, PRIOR)

    theta = PRIOR.log_mean + np.random.default_rng(5).uniform(-0.4, 0.4, len(PRIOR.log_mean))
    _, gradient = cost(theta)
    for index in range(len(theta)):
        step = np.zeros(len(theta))
        step[index] = 1e-5
        slope = (cost(theta + step)[0] - cost(theta - step)[0]) / 2e-5
        assert gradient[index] == pytest.approx(slope, rel=1e-4, abs=1e-5)


def test_the_posterior_is_that_of_the_textbook():
    """Mean and variance from the joint prior covariance, inverted directly."""
    rows, others = drawn(12), drawn(40)[12:]
    process = GaussianProcess(FEATURES, rows, TRUTH[rows], np.ones(12), ONES, 0.5, PRIOR.log_mean)
    prior = GaussianProcess(
        FEATURES, np.zeros(0, dtype=np.intp), np.zeros(0), np.zeros(0), ONES, 0.5, PRIOR.log_mean
    ).covariance(np.concatenate([rows, others]))
    noise = np.exp(PRIOR.log_mean[NOISE])
    inner = np.linalg.inv(prior[:12, :12] + (noise**2 + 1e-6) * np.eye(12))
    mean, std = process.predict(others)
    assert mean == pytest.approx(prior[12:, :12] @ inner @ TRUTH[rows], abs=1e-3)
    variance = np.diag(prior)[12:] - np.einsum("ij,jk,ik->i", prior[12:, :12], inner, prior[12:, :12])
    assert std**2 == pytest.approx(variance, abs=1e-3)
    assert np.diag(process.covariance(others)) == pytest.approx(std**2, abs=1e-3)


def test_what_was_fitted_to_the_same_data_is_not_fitted_again():
    rows, fits = drawn(20, seed=3), {}
    first = fit(FEATURES, rows, TRUTH[rows], np.ones(20), ONES, 0.5, PRIOR, fits=fits)
    (key,) = fits
    assert fits[key].tolist() == first.log_hyper.tolist()
    marked = {key: 1.0 + fits[key]}  # what is kept is taken
    again = fit(FEATURES, rows, TRUTH[rows], np.ones(20), ONES, 0.5, PRIOR, fits=marked)
    assert again.log_hyper.tolist() == marked[key].tolist()
    others = replace(PRIOR, log_std=2 * PRIOR.log_std)
    for data, prior in ((TRUTH[rows] + 1e-9, PRIOR), (TRUTH[rows], others)):  # and nothing that follows from other data
        fit(FEATURES, rows, data, np.ones(20), ONES, 0.5, prior, fits=marked)
    assert len(marked) == 3


def test_columns_that_explain_nothing_lose_their_weight_and_others_are_predicted_better():
    """Two settings act together, two do nothing. One weight for all leaves more than twice the error."""
    truth = np.array([0.3 * abs(np.log2(one.tp) - 1) * (1 + np.log2(one.micro_batch_size)) for one in PLANS])
    own = Hyperprior.of(FEATURES.num_columns, 60, 0.1, 0.02, 0.3)
    alike = Hyperprior(own.log_mean, np.where(np.arange(len(own.log_std)) < 5, own.log_std, 1e-3))
    errors = []
    for seed in range(4):
        rows = drawn(60, seed)
        outputs = truth[rows] + 0.02 * np.random.default_rng(seed).standard_normal(60)
        others = np.setdiff1d(np.arange(len(PLANS)), rows)
        found = [fit(FEATURES, rows, outputs, np.ones(60), ONES, 0.5, prior) for prior in (own, alike)]
        errors.append([np.sqrt(((one.predict(others)[0] - truth[others]) ** 2).mean()) for one in found])
        assert np.exp(found[0].log_hyper[5:]).min() < 0.5
    with_own, without = np.mean(errors, 0)
    assert with_own < 0.5 * without


def test_noise_and_own_deviation_are_told_apart_by_repeats():
    """Many repeats leave no noise, so what no column explains is the row's own."""
    dice = np.random.default_rng(1)
    rows = drawn(60, seed=1)
    own = 0.1 * dice.standard_normal(60)
    process = fit(FEATURES, rows, TRUTH[rows] + own, np.full(60, 100.0), ONES, 0.5, PRIOR)
    assert 0.05 < np.exp(process.log_hyper[OWN]) < 0.2
    mean, _ = process.predict(rows)
    assert mean - TRUTH[rows] == pytest.approx(own, abs=0.03)


def test_a_belief_in_a_row_that_was_observed_is_one_more_observation_of_it():
    """`wattune suggest` proposes plans that have a burst: the row must not count as two plans that agree."""
    rows = drawn(10)
    prior = PRIOR.log_mean.copy()
    prior[OWN] = np.log(0.3)  # so that a plan differs from its like
    process = GaussianProcess(FEATURES, rows, TRUTH[rows], np.ones(10), ONES, 0.5, prior)
    believed = replace(process, believed=rows[:3])
    before, after = process.predict(slice(0, len(PLANS))), believed.predict(slice(0, len(PLANS)))
    assert after[0] == pytest.approx(before[0], abs=2e-3)
    others = np.setdiff1d(np.arange(len(PLANS)), rows)
    assert after[1][others] == pytest.approx(before[1][others], abs=2e-3)


def test_kernels_of_32_bits_that_leave_no_factor_are_conditioned_all_the_same():
    rows, loud = np.arange(len(PLANS)), PRIOR.log_mean.copy()
    loud[:3] += 3.0  # amplitudes and length, beside a noise of nothing
    loud[OWN], loud[NOISE] = -20.0, -20.0
    found = GaussianProcess(FEATURES, rows, TRUTH, ONES, ONES, 0.5, loud)
    assert np.allclose(found.predict(rows)[0], TRUTH, atol=0.3)

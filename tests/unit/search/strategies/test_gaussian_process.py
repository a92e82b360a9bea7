"""The Gaussian process against direct formulas, finite differences and functions that it was not fitted to."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import MODELS
from wattune.plan.axes import Plan
from wattune.search.strategies.features import make_features
from wattune.search.strategies.gaussian_process import (
    NOISE,
    OWN,
    Hyperprior,
    _negative_log_posterior,
    condition,
    fit,
)
from wattune.trial import TrialSpec, Workload

BASE = TrialSpec(
    model=MODELS["llama3_8b"],
    cluster=ClusterSpec(device="h200_sxm", devices_per_node=8),
    engine="torch",
    workload=Workload(seq_len=4096, global_batch_size=64),
    plan=Plan(),
)
PLANS = [
    replace(BASE.plan, tp=tp, etp=tp, micro_batch_size=size, sharding=sharding, recompute=recompute)
    for tp, size, sharding, recompute in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8), ("none", "zero1", "zero3"), ("none", "selective", "full")
    )
]
FEATURES = make_features([replace(BASE, plan=plan) for plan in PLANS])
ONES = np.ones(len(PLANS))
PRIOR = Hyperprior.of(FEATURES.num_columns, 0.1, 0.02, 0.3)
TRUTH = np.array(
    [
        -0.4 * abs(np.log2(plan.tp) - 1) + 0.2 * np.log2(plan.micro_batch_size) - 0.3 * (plan.recompute == "full")
        for plan in PLANS
    ]
)


def drawn(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(len(PLANS))[:count]


def test_the_gradient_is_that_of_finite_differences():
    rows = drawn(20)
    similar = FEATURES.similar(rows, rows).astype(float)
    distances = np.sqrt(FEATURES.distances2(rows, rows).astype(float))
    counts = np.arange(1.0, 21.0)

    def cost(theta):
        return _negative_log_posterior(theta, similar, distances, TRUTH[rows], counts, 0.5, PRIOR)

    theta = PRIOR.log_mean + np.array([0.3, -0.2, 0.1, 0.4, -0.1])
    _, gradient = cost(theta)
    for index in range(len(theta)):
        step = np.zeros(len(theta))
        step[index] = 1e-5
        slope = (cost(theta + step)[0] - cost(theta - step)[0]) / 2e-5
        assert gradient[index] == pytest.approx(slope, rel=1e-4, abs=1e-5)


def test_the_posterior_is_that_of_the_textbook():
    """Mean and variance from the joint prior covariance, inverted directly."""
    rows, others = drawn(12), drawn(40)[12:]
    process = condition(FEATURES, rows, TRUTH[rows], np.ones(12), ONES, 0.5, PRIOR.log_mean)
    prior = condition(
        FEATURES, np.zeros(0, dtype=np.intp), np.zeros(0), np.zeros(0), ONES, 0.5, PRIOR.log_mean
    ).covariance(np.concatenate([rows, others]))
    noise = np.exp(PRIOR.log_mean[NOISE])
    inner = np.linalg.inv(prior[:12, :12] + (noise**2 + 1e-6) * np.eye(12))
    mean, std = process.predict(others)
    assert mean == pytest.approx(prior[12:, :12] @ inner @ TRUTH[rows], abs=1e-3)
    variance = np.diag(prior)[12:] - np.einsum("ij,jk,ik->i", prior[12:, :12], inner, prior[12:, :12])
    assert std**2 == pytest.approx(variance, abs=1e-3)
    assert np.diag(process.covariance(others)) == pytest.approx(std**2, abs=1e-3)


def test_twenty_observations_predict_the_other_plans():
    rows = drawn(20, seed=3)
    process = fit(FEATURES, rows, TRUTH[rows], np.ones(20), ONES, 0.5, PRIOR)
    others = np.setdiff1d(np.arange(len(PLANS)), rows)
    mean, std = process.predict(others)
    error = mean - TRUTH[others]
    assert np.sqrt((error**2).mean()) < 0.35 * TRUTH.std()
    assert (np.abs(error) < 2 * std).mean() > 0.85


def test_noise_and_own_deviation_are_told_apart_by_repeats():
    """Many repeats leave no noise, so what no column explains is the row's own."""
    dice = np.random.default_rng(1)
    rows = drawn(60, seed=1)
    own = 0.1 * dice.standard_normal(60)
    process = fit(FEATURES, rows, TRUTH[rows] + own, np.full(60, 100.0), ONES, 0.5, PRIOR)
    assert 0.05 < np.exp(process.log_hyper[OWN]) < 0.2
    mean, _ = process.predict(rows)
    assert mean - TRUTH[rows] == pytest.approx(own, abs=0.03)


def test_a_belief_shrinks_variances_and_keeps_means():
    rows = drawn(10)
    process = condition(FEATURES, rows, TRUTH[rows], np.ones(10), ONES, 0.5, PRIOR.log_mean)
    pending = np.setdiff1d(np.arange(len(PLANS)), rows)[:2]
    believed = process.with_beliefs(pending)
    before, after = process.predict(slice(0, len(PLANS))), believed.predict(slice(0, len(PLANS)))
    assert after[0] == pytest.approx(before[0], abs=2e-3)
    assert (after[1] <= before[1] + 1e-3).all() and (after[1][pending] < 0.5 * before[1][pending]).all()

"""The model of run-to-run scatter: what it finds where truth is known, and the corners where little is known."""

import time

import numpy as np
import pytest

from wattune.ranking.scatter import Prior, Runs, fit


def runs(values, trial, node_set=None, time_s=None, **more) -> Runs:
    num = len(values)
    return Runs(
        value=np.asarray(values, np.float64),
        trial=np.asarray(trial, np.intp),
        node_set=np.zeros(num, np.intp) if node_set is None else np.asarray(node_set, np.intp),
        time_s=np.zeros(num) if time_s is None else np.asarray(time_s, np.float64),
        within=np.zeros(num),
        **more,
    )


def test_without_a_repeat_the_prior_is_all_there_is():
    found = fit(runs([100.0, 200.0], [0, 1]), Prior())
    assert (found.steady.num_repeats, found.spread_frac) == (0, pytest.approx(0.01))
    assert list(found.degrees_of_freedom) == [6.0, 6.0]
    assert found.standard_error == pytest.approx([0.01, 0.01])
    apart = fit(runs([100.0, 200.0, 300.0], [0, 1, 2], time_s=[0.0, 50.0, 100.0]), Prior())
    assert (apart.drift, apart.drift_error) == (0.0, pytest.approx(Prior().drift))
    assert list(np.exp(apart.mean)) == pytest.approx([100.0, 200.0, 300.0]), "nothing tells a drift, so none is removed"
    assert apart.standard_error[0] == pytest.approx(np.hypot(0.01, Prior().drift / 2))


def test_one_run_is_not_counted_as_many():
    assert fit(runs([5.0], [0]), Prior()).standard_error == pytest.approx([0.01])


def test_equal_values_do_not_mean_that_nothing_scatters():
    found = fit(runs([100.0] * 12, [0] * 6 + [1] * 6, time_s=range(12)), Prior())
    assert 0.003 < found.spread_frac < 0.01
    assert (found.standard_error > 0.001).all()


def test_a_trial_without_any_residual_leaves_the_others_their_interval():
    rng = np.random.default_rng(3)
    values = [*(100.0 * np.exp(0.01 * rng.normal(size=20))), 50.0, 50.0, 50.0, 70.0]
    found = fit(runs(values, [*np.repeat(np.arange(5), 4), 5, 5, 5, 6]), Prior())
    assert found.degrees_of_freedom[6] >= 3.0
    assert 0.006 < found.standard_error[6] < 0.015


def test_repeats_take_over_from_a_prior_that_is_wrong():
    rng = np.random.default_rng(4)
    found = fit(runs(100.0 * np.exp(0.03 * rng.normal(size=200)), np.repeat(np.arange(50), 4)), Prior())
    assert found.spread_frac == pytest.approx(0.03, rel=0.15)


def test_trials_that_scatter_unlike_keep_their_own_variance():
    rng = np.random.default_rng(5)
    spread = np.where(np.arange(40) % 2 == 0, 0.002, 0.03)
    values = 100.0 * np.exp(np.repeat(spread, 6) * rng.normal(size=240))
    found = fit(runs(values, np.repeat(np.arange(40), 6)), Prior())
    assert np.median(found.variance[1::2]) > 3 * np.median(found.variance[::2])


def test_drift_and_node_offsets_are_found_by_the_trials_that_ran_several_times():
    rng = np.random.default_rng(6)
    trial = np.array([0, 0] * 10 + [1, 2])
    node_set = np.array([0, 1] * 10 + [0, 1])
    time_s = np.array([each for n in range(10) for each in (100.0 * n, 100.0 * n)] + [0.0, 900.0])
    logs = np.array([5.0, 6.0, 6.0])[trial] - 0.06 * node_set + 0.04 * time_s / 900.0 + 0.001 * rng.normal(size=22)
    found = fit(runs(np.exp(logs), trial, node_set, time_s), Prior())
    assert found.drift == pytest.approx(0.04, abs=0.004)
    offsets = found.node_offset - found.node_offset[0]
    assert offsets[1] == pytest.approx(-0.06, abs=0.004)
    assert found.mean[1] == pytest.approx(found.mean[2], abs=0.004), "equal but for place and time"
    assert found.tied.all()


def test_a_chain_of_trials_ties_sets_that_no_trial_shares_with_the_base():
    found = fit(runs([1.0] * 6, [0, 0, 0, 1, 1, 2], node_set=[0, 0, 1, 1, 2, 3]), Prior())
    assert list(found.tied) == [True, True, True, False]


def test_temperatures_have_their_own_scale_and_the_step_of_their_sensor():
    found = fit(runs([70.0, 70.0, 70.0, 0.0], [0, 0, 0, 1], typical=100.0, resolution=1.0), Prior())
    assert list(found.mean) == [70.0, 0.0]
    assert found.standard_error[0] >= 12**-0.5 / 3**0.5
    assert found.variance[0] >= 1 / 12


@pytest.mark.slow
def test_ten_thousand_trials_take_well_below_a_second():
    rng = np.random.default_rng(0)
    values, trial = rng.uniform(1.0, 2.0, 20_000), np.repeat(np.arange(10_000), 2)
    large = runs(values, trial, node_set=trial % 3, time_s=rng.uniform(0.0, 1e4, 20_000))
    start_s = time.thread_time()
    fit(large, Prior())
    assert time.thread_time() - start_s < 1.0

"""Optuna's samplers over candidates: they learn the objective, the bounds and failures."""

import pytest
from known_space import BEST, POWER, SPECS, is_feasible, metrics, problem, regrets, result, sought

from wattune.objective import parse_constraint, parse_objective
from wattune.run import Run, RunStatus
from wattune.search.strategies.optuna_samplers import gp, tpe


@pytest.mark.parametrize(("make", "num_trials"), [(tpe, 90), pytest.param(gp, 30, marks=pytest.mark.slow)])
def test_a_good_feasible_plan_is_found(make, num_trials):
    assert min(regrets(make(problem()), num_trials)) <= 0.1


def test_bounds_steer_it():
    """With the bound, fewer proposals break it than without."""

    def broken(constraints) -> int:
        asked = sought(tpe(problem(constraints=constraints)), 75)
        return sum(not POWER.holds(metrics(spec)) for spec in asked[25:])

    assert broken((POWER,)) < 0.8 * broken(())


def test_a_failure_is_worse_than_any_excess():
    """Optuna prefers, of trials that hold no bound, those whose violations are least together."""
    at_a_thousandth = (parse_constraint("node_device_power_peak_1s_w <= 3.7"), POWER)
    strategy = tpe(problem(constraints=at_a_thousandth))
    good = next(filter(is_feasible, SPECS))
    for spec, changed in ((good, {}), (BEST, {POWER.metric: 1e9})):
        strategy.tell(spec, result(spec, **changed))
    fails = next(one for one in SPECS if result(one).status is RunStatus.OUT_OF_MEMORY)
    strategy.tell(fails, result(fails))
    near, far, failed = (
        sum(max(one, 0.0) for one in trial.constraints.values()) for trial in strategy._study.get_trials()
    )
    assert near < far < failed


def test_a_bound_that_nothing_holds_does_not_steer_to_failures():
    """Every plan that runs is far above this bound."""
    unreachable = parse_constraint("node_device_power_peak_1s_w <= 100")
    asked = sought(tpe(problem(constraints=(unreachable,))), 75)
    fails = [result(one).status is RunStatus.OUT_OF_MEMORY for one in asked]
    assert sum(fails) < 5, "8 of the 10 that there are, where an excess counts as it is"


def test_a_failure_before_any_value_is_no_best_value():
    """0 would be the best of all where less is better."""
    strategy = tpe(problem(objective=parse_objective("minimize step_time_s"), constraints=()))
    fails = [one for one in SPECS if result(one).status is RunStatus.OUT_OF_MEMORY][:2]
    good = next(filter(is_feasible, SPECS))
    for spec in fails:
        strategy.tell(spec, result(spec))
    assert strategy._study.get_trials() == []
    strategy.tell(good, result(good, step_time_s=2.0))
    assert [one.value for one in strategy._study.get_trials()] == [2.0, 2.0, 2.0]
    assert [one.constraints["runs"] for one in strategy._study.get_trials()] == [0.0, 1.0, 1.0]


def test_what_the_cluster_failed_is_not_told():
    strategy = tpe(problem())
    (spec,) = strategy.ask(1)
    strategy.tell(spec, Run(trial_id=spec.trial_id, repeat=0, status=RunStatus.INFRA_FAILED))
    assert [trial.state.name for trial in strategy._study.get_trials()] == ["FAIL"]
    assert spec not in strategy.ask(20)


@pytest.mark.parametrize("power", [{}, {POWER.metric: float("nan")}])
def test_a_bound_whose_metric_is_absent_is_neither_kept_nor_broken(power):
    """A sampler knows those two alone: the trial teaches it nothing, and another run of it may."""
    strategy = tpe(problem())
    done = Run(trial_id=SPECS[0].trial_id, repeat=0, status=RunStatus.COMPLETED, metrics={"tokens_per_s": 1.0, **power})
    strategy.tell(SPECS[0], done)
    assert strategy._study.get_trials() == []
    strategy.tell(SPECS[0], result(SPECS[0]))
    assert len(strategy._study.get_trials()) == 1

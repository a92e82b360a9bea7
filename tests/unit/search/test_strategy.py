"""The trial that a strategy proposes next."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specs import trial_spec

from wattune.errors import SpaceError
from wattune.objective import Question
from wattune.run import Run, RunStatus
from wattune.search.strategy import STRATEGIES, Problem, check_strategy, make_strategy

SPECS = [trial_spec(on="1x1 cpu", seq_len=128, batch=64, micro_batch_size=size) for size in range(1, 21)]


QUESTION = Question.of("maximize tokens_per_s")


def made(name, seed=0):
    return make_strategy(name, Problem(specs=SPECS, seed=seed, question=QUESTION))


def done(spec):
    return Run(trial_id=spec.trial_id, repeat=0, status=RunStatus.COMPLETED)


@settings(deadline=None)  # a strategy that learns loads its library first
@given(name=st.sampled_from(sorted(STRATEGIES)), sizes=st.lists(st.integers(0, 7)), seed=st.integers(0, 9))
def test_nothing_is_proposed_twice_and_all_is_proposed_in_the_end(name, sizes, seed):
    strategy = made(name, seed)
    asked = []
    for size in sizes:
        batch = strategy.ask(size)
        assert len(batch) == min(size, len(SPECS) - len(asked))
        asked += batch
    asked += strategy.ask(len(SPECS))
    assert sorted(spec.trial_id for spec in asked) == sorted(spec.trial_id for spec in SPECS)
    assert strategy.ask(1) == []


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_was_told_is_not_proposed_again(name):
    """A resumed study tells its finished trials first."""
    strategy = made(name)
    told = SPECS[3:9]
    for spec in told + told:
        strategy.tell(spec, done(spec))
    assert set(strategy.ask(100)) == set(SPECS) - set(told)


def test_grid_goes_in_listed_order():
    assert make_strategy("grid", Problem(specs=SPECS, seed=5)).ask(3) == SPECS[:3]


def test_random_is_seeded():
    orders = {seed: make_strategy("random", Problem(specs=SPECS, seed=seed)).ask(20) for seed in (0, 1)}
    assert orders[0] == make_strategy("random", Problem(specs=list(reversed(SPECS)), seed=0)).ask(20)
    assert orders[0] != orders[1] and orders[0] != SPECS


def test_random_keeps_its_order_when_candidates_are_added():
    extra = [replace(spec, engine="megatron") for spec in SPECS]
    with_extra = make_strategy("random", Problem(specs=SPECS + extra, seed=0)).ask(40)
    assert [spec for spec in with_extra if spec in SPECS] == make_strategy("random", Problem(specs=SPECS, seed=0)).ask(
        20
    )


def test_a_strategy_that_is_not_there_says_which_are():
    with pytest.raises(SpaceError, match='unknown strategy "bayes"; use one of: gp, grid, model_guided, random, tpe'):
        check_strategy("bayes")
    with pytest.raises(SpaceError, match='unknown strategy "gridd"; did you mean "grid"'):
        make_strategy("gridd", Problem(specs=SPECS, seed=0))


def test_a_searcher_of_rays_is_a_name_that_can_be_used():
    assert check_strategy("ray.tune.search.optuna:OptunaSearch") == "ray.tune.search.optuna:OptunaSearch"
    for name in ("ray.tune:", ":OptunaSearch", "a b:C", "a:b:c"):
        with pytest.raises(SpaceError, match="unknown strategy"):
            check_strategy(name)


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {"grid", "random"}))
def test_a_strategy_that_learns_needs_an_objective(name):
    with pytest.raises(SpaceError, match=f"strategy {name} learns and has no objective"):
        make_strategy(name, Problem(specs=SPECS, seed=0))
    assert made(name).learns and made(name).stopped_because is None

"""Ray Tune's own searchers as strategies: they propose candidates, learn, and are refused with a reason."""

import pytest
from known_space import BEST, SPECS, problem, result, sought

from wattune.errors import SpaceError
from wattune.orchestrate.ray_searcher import RaySearcher
from wattune.run import Run, RunStatus

OPTUNA = "ray.tune.search.optuna:OptunaSearch"


def test_a_searcher_of_rays_runs_a_study_to_its_end():
    strategy, asked = RaySearcher(OPTUNA, problem(specs=SPECS[:30])), []
    while batch := strategy.ask(4):
        asked += batch
        for spec in batch:
            strategy.tell(spec, result(spec))
    assert sorted(spec.trial_id for spec in asked) == sorted(spec.trial_id for spec in SPECS[:30])
    assert strategy.learns


def test_it_learns_from_what_it_is_told():
    asked = sought(RaySearcher(OPTUNA, problem(constraints=())), 60)

    def typical(specs):
        return sum(result(spec).metrics.get("tokens_per_s", 0.0) for spec in specs) / len(specs)

    assert typical(asked[40:]) > 1.1 * typical(SPECS)


def test_results_of_an_earlier_call_are_not_proposed_again():
    strategy = RaySearcher(OPTUNA, problem(specs=SPECS[:20]))
    for spec in SPECS[:12]:
        strategy.tell(spec, result(spec))
    assert set(strategy.ask(20)) == set(SPECS[12:20])


@pytest.mark.parametrize("value", [1e9, 1.0])
def test_a_bound_that_was_not_measured_is_neither_kept_nor_broken(value):
    """Such a trial is told as one without a figure: it moves neither the best nor the worst value."""
    strategy = RaySearcher(OPTUNA, problem())
    first, second, third = strategy.ask(3)
    blind = Run(trial_id=first.trial_id, repeat=0, status=RunStatus.COMPLETED, metrics={"tokens_per_s": value})
    strategy.tell(first, blind)
    strategy.tell(second, result(BEST, tokens_per_s=5e4))
    strategy.tell(third, Run(trial_id=third.trial_id, repeat=0, status=RunStatus.OUT_OF_MEMORY))
    told = [trial.value for trial in strategy._searcher._ot_study.get_trials()]
    assert told == [None, 5e4, 5e4]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere:Search", "cannot be loaded"),
        ("ray.tune.search:Nothing", "cannot be loaded"),
        ("ray.tune.search:ConcurrencyLimiter", "is not a searcher"),
        ("pathlib:Path", "is not a searcher"),
        ("ray.tune.search.hyperopt:HyperOptSearch", "cannot be made"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(name, reason):
    with pytest.raises(SpaceError, match=reason):
        RaySearcher(name, problem())

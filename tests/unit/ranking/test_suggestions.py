"""Suggestions of what to measure next: new plans, repeats that decide, or nothing."""

from dataclasses import replace

import pytest
from known_space import BEST, OBJECTIVE, POWER, SPECS, is_feasible, metrics, problem, result

from wattune.objective import Question
from wattune.ranking.order import Ranking, rank
from wattune.ranking.suggestions import suggest
from wattune.search.strategies.model_guided import ModelGuided
from wattune.units import format_probability

SIMULATED = {"simulated": "true"}


def told(specs, repeats: int = 2) -> tuple[ModelGuided, Ranking, list]:
    """A model and a ranking of simulated runs of some plans, and the plans that are left."""
    runs = [
        (
            spec,
            replace(
                result(spec, repeat, tokens_per_s=metrics(spec)["tokens_per_s"] * (1 + 0.002 * repeat)), tags=SIMULATED
            ),
        )
        for spec in specs
        for repeat in range(repeats)
    ]
    model = ModelGuided(problem(), stops=False)
    for spec, one in runs:
        model.tell(spec, one)
    return (
        model,
        rank(runs, Question(objective=OBJECTIVE, constraints=(POWER,))),
        [spec for spec in SPECS if spec not in specs],
    )


def test_new_plans_fill_the_budget_and_what_gains_most_for_its_time_comes_first() -> None:
    model, ranking, left = told(SPECS[10:290:24])
    found = suggest(model, ranking, left, lambda _: 30.0, budget_s=100.0)
    new = [one for one in found.listed if one.kind == "new"]
    assert 1 <= len(found.listed) <= 3 and found.expected_s <= 100.0 and new
    rates = [one.gain_frac / one.expected_s for one in found.listed if one.gain_frac is not None]
    assert rates == sorted(rates, reverse=True)
    for one in new:
        assert one.spec in left and one.predicted is not None
        assert 0.0 <= one.feasible_probability <= 1.0 and "best plan" in one.changes
    assert found.gain_frac > found.noise_frac and not found.nothing


def test_a_long_budget_is_not_filled_with_plans_that_gain_nothing() -> None:
    model, ranking, left = told(SPECS[10:290:8])
    found = suggest(model, ranking, left, lambda _: 1.0, budget_s=1000.0)
    new = [one for one in found.listed if one.kind == "new"]
    assert new and all(one.gain_frac >= 0.1 * found.noise_frac for one in new[1:])


def test_what_is_suggested_is_better_than_what_was_measured() -> None:
    """The truth of the suggestions is known here: half of their gain is real."""
    model, ranking, left = told(SPECS[10:290:12])
    found = suggest(model, ranking, left, lambda _: 30.0, budget_s=150.0)
    best = max(metrics(row.spec)["tokens_per_s"] for row in ranking.feasible)
    reached = [metrics(one.spec)["tokens_per_s"] for one in found.listed if one.kind == "new"]
    assert max(reached) > best and found.better_probability > 0.9


def test_nothing_is_worth_measuring_once_the_best_is_known_and_the_rest_is_worse() -> None:
    model, ranking, left = told([spec for spec in SPECS if spec is BEST or SPECS.index(spec) % 2])
    worse = [spec for spec in left if metrics(spec)["tokens_per_s"] < 0.5 * metrics(BEST)["tokens_per_s"]]
    alone = replace(ranking, undecided=(), feasible=(replace(ranking.feasible[0], best_probability=0.99),))
    found = suggest(model, alone, worse, lambda _: 30.0, budget_s=600.0)
    assert found.listed == () and found.nothing.startswith("nothing is worth measuring: the expected gain of the")
    assert found.gain_frac < found.noise_frac and found.better_probability < 0.1
    assert f"(P {format_probability(found.better_probability)} that one is better)" in found.nothing


def test_a_budget_that_no_trial_fits_into_says_how_long_one_takes() -> None:
    model, ranking, left = told(SPECS[10:290:24])
    found = suggest(model, ranking, left, lambda _: 30.0, budget_s=10.0)
    assert found.listed == () and "the shortest trial takes about 30 s" in found.nothing


def test_where_the_best_plan_takes_longer_than_the_budget_those_that_fit_are_suggested() -> None:
    model, ranking, left = told(SPECS[10:290:24])
    fast = sorted(left, key=lambda spec: -metrics(spec)["tokens_per_s"])[:120]
    found = suggest(model, ranking, left, lambda spec: 100.0 if spec in fast else 20.0, budget_s=60.0)
    assert len(found.listed) == 3 and all(one.spec not in fast for one in found.listed)
    none = suggest(model, ranking, left, lambda spec: 100.0 if spec in fast else 80.0, budget_s=60.0)
    assert none.listed == () and "the shortest trial takes about 80 s" in none.nothing


def test_an_undecided_plan_that_leads_is_repeated_and_one_that_repeats_cannot_decide_is_not() -> None:
    """The gain of measured sensors alone leaves a plan close below a bound on true watts open."""
    close = replace(POWER, factor=metrics(BEST)[POWER.metric] * 1.004, sensor_gain_frac=0.05)
    runs = [
        (spec, replace(result(spec, repeat, **{POWER.metric: metrics(spec)[POWER.metric] * (1 + off)}), tags=SIMULATED))
        for spec in (BEST, SPECS[10], SPECS[40])
        for repeat, off in enumerate((-0.004, 0.003))
    ]
    for simulated in (True, False):
        own = [(spec, one if simulated else replace(one, tags={})) for spec, one in runs]
        ranking = rank(own, Question(objective=OBJECTIVE, constraints=(close,)))
        assert any(row.spec == BEST for row in ranking.undecided)
        model = ModelGuided(problem(constraints=(close,)), stops=False)
        for spec, one in own:
            model.tell(spec, one)
        found = suggest(model, ranking, [], lambda _: 30.0, budget_s=600.0)
        repeated = [one for one in found.listed if one.spec == BEST and "whether it holds" in one.changes]
        assert bool(repeated) is simulated
        assert all(one.predicted is None for one in repeated), "a measured plan has no prediction beside it"


def test_gains_are_over_the_best_feasible_plan_and_not_over_an_undecided_one_that_leads() -> None:
    model, ranking, left = told(SPECS[10:290:24])
    first, *others = ranking.feasible
    leads = replace(ranking, feasible=tuple(others), undecided=(first, *ranking.undecided))
    over_first = suggest(model, ranking, left, lambda _: 30.0, budget_s=30.0)
    over_second = suggest(model, leads, left, lambda _: 30.0, budget_s=30.0)
    assert over_first.best == first and over_second.best == others[0]
    assert over_second.gain_frac > over_first.gain_frac


def test_a_plan_leads_only_plans_of_the_same_work() -> None:
    """A short sequence has more tokens a second: that is no lead over longer ones."""
    close = replace(POWER, factor=metrics(BEST)[POWER.metric] * 1.004)
    long = replace(BEST, workload=replace(BEST.workload, seq_len=8192))
    runs = [
        (
            spec,
            replace(
                result(spec, repeat, **{POWER.metric: metrics(spec)[POWER.metric] * (1 + off)}),
                tags=SIMULATED,
                trial_id=spec.trial_id,
            ),
        )
        for spec in (long, SPECS[10], SPECS[40])
        for repeat, off in enumerate((-0.004, 0.003))
    ]
    mixed = rank(runs, Question(objective=OBJECTIVE, constraints=(close,)))
    assert long in [row.spec for row in mixed.undecided] and mixed.feasible
    model = ModelGuided(problem(specs=[*SPECS, long], constraints=(close,)), stops=False)
    for spec, one in runs:
        model.tell(spec, one)
    found = suggest(model, mixed, [], lambda _: 30.0, budget_s=600.0)
    (repeat,) = (one for one in found.listed if one.spec == long and "whether it holds" in one.changes)
    assert repeat.gain_frac is None and "leads" not in repeat.changes
    assert any("different work" in one for one in found.warnings)
    assert found.to_json()["warnings"] == list(found.warnings)


def test_two_plans_that_are_not_told_apart_are_repeated() -> None:
    model, ranking, _ = told([BEST, *[spec for spec in SPECS if is_feasible(spec)][:2]])
    first, second, *_ = ranking.feasible
    tied = (replace(first, best_probability=0.55), replace(second, best_probability=0.45))
    near = replace(ranking, feasible=tied, undecided=(), near_probability=0.96)
    assert not suggest(model, near, [], lambda _: 30.0, budget_s=600.0).listed, "either will do"
    tie = replace(near, near_probability=0.55)
    found = suggest(model, tie, [], lambda _: 30.0, budget_s=600.0)
    assert {one.spec for one in found.listed} == {first.spec, second.spec}
    assert all("0.55 against 0.45" in one.changes and one.gain_frac is None for one in found.listed)
    assert found.to_json()["suggestions"][0]["kind"] == "repeat"


def test_without_a_feasible_plan_no_gain_is_claimed() -> None:
    model, ranking, left = told(SPECS[10:290:24])
    none = replace(POWER, factor=1.0)
    model = ModelGuided(problem(constraints=(none,)), stops=False)
    for row in ranking.trials:
        for one in row.repeats:
            model.tell(row.spec, one)
    runs = [(row.spec, one) for row in ranking.trials for one in row.repeats]
    found = suggest(
        model, rank(runs, Question(objective=OBJECTIVE, constraints=(none,))), left, lambda _: 30.0, budget_s=60.0
    )
    assert found.listed and all(one.gain_frac is None for one in found.listed)
    assert "the first plan known to hold every bound" in found.listed[0].changes
    assert found.gain_frac is None and found.best is None
    with pytest.raises(AttributeError):
        found.budget_s = 1.0  # type: ignore[misc]


def test_plans_of_other_sizes_have_other_names() -> None:
    model, ranking, left = told(SPECS[10:290:24])
    same = suggest(model, ranking, left, lambda _: 30.0, budget_s=100.0)
    assert all(one.label == one.spec.label for one in same.listed)
    long = replace(SPECS[0], workload=replace(SPECS[0].workload, seq_len=8192))
    wider = ModelGuided(problem(specs=[*SPECS, long]), stops=False)
    for row in ranking.trials:
        for one in row.repeats:
            wider.tell(row.spec, one)
    found = suggest(wider, ranking, [*left, long], lambda _: 30.0, budget_s=100.0)
    assert found.listed
    for one in found.listed:
        assert one.label == one.to_json()["label"] == f"{one.spec.label} seq{one.spec.workload.seq_len}"

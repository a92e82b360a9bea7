"""Plans with an open bound that another plan is better than in any case: they are told apart, and asked for no more."""

from dataclasses import replace

import pytest
from made_trials import COOL, FASTEST, LEAST_ENERGY, POWER, Pair, asked, numbers, speed, trial

from wattune.catalog.models import model
from wattune.fidelity import BURST, FIDELITY
from wattune.ranking.answer import answer_of
from wattune.ranking.assessment import Verdict
from wattune.ranking.order import Ranking, finalists, rank
from wattune.ranking.posterior import Posterior
from wattune.view.answer import answer_lines
from wattune.view.ranking import ranking_view

OPEN_W = 2745.0
"""A reading just below the bound of 2,750 W: one run does not decide it."""


def waiting(pair: Pair, frac: float) -> Pair:
    spec, run = pair
    return spec, replace(run, metrics={**run.metrics, "host_bound_frac": frac})


def ranked(*pairs: Pair) -> Ranking:
    return rank(list(pairs), asked(FASTEST, POWER))


def test_an_open_plan_that_is_slower_in_any_case_is_no_open_question() -> None:
    ranking = ranked(speed(1, 100.0), speed(2, 70.0, power_w=OPEN_W))
    (row,) = ranking.behind
    assert (row.verdict, row.behind) == (Verdict.BEHIND, f"slower than {ranking.best.label} in any case")
    assert row.reason == f"{row.behind}; node_device_power_peak_1s_w <= 2750 undecided at 2745, P 0.55"
    assert ranking.undecided == () and ranking.to_json()["behind"][0]["behind"] == row.behind
    assert answer_of(ranking).state == "sure" and answer_of(ranking).to_json()["num_behind"] == 1
    assert "1 plan with an open bound is slower in any case." in answer_lines(ranking)
    assert finalists(ranking) == [ranking.best.spec]
    table = next(part for part in ranking_view(ranking) if hasattr(part, "columns"))
    verdicts = next(column for column in table.columns if column.name == "verdict")
    assert [verdicts.of(one) for one in table.rows] == ["feasible", row.behind]


def test_an_open_plan_that_may_be_faster_stays_open() -> None:
    ranking = ranked(speed(1, 100.0), speed(2, 99.5, power_w=OPEN_W), speed(3, 120.0, power_w=OPEN_W))
    assert numbers(ranking.undecided) == [3, 2] and not ranking.behind
    assert answer_of(ranking).state == "unsure"


def test_without_a_plan_that_surely_holds_none_is_behind() -> None:
    ranking = ranked(speed(1, 100.0, power_w=OPEN_W), speed(2, 50.0, power_w=OPEN_W))
    assert numbers(ranking.undecided) == [1, 2]  # if the first does not hold, the second is the best


@pytest.mark.parametrize(("frac", "is_behind"), [(0.0, True), (0.05, True), (0.5, False)])
def test_a_plan_is_not_behind_by_the_pace_of_its_host(frac: float, is_behind: bool) -> None:
    """At 60 tokens/s with half of the step spent waiting it could run at up to 120."""
    ranking = ranked(speed(1, 100.0), waiting(speed(2, 60.0, power_w=OPEN_W), frac))
    assert bool(ranking.behind) is is_behind and bool(ranking.undecided) is not is_behind


def test_a_burst_says_nothing_of_who_is_behind() -> None:
    spec, run = speed(2, 60.0, power_w=OPEN_W)
    ranking = ranked(speed(1, 100.0), (spec, replace(run, tags={FIDELITY: BURST})))
    assert (len(ranking.behind), len(ranking.burst)) == (0, 1)


def test_plans_of_other_work_are_not_behind() -> None:
    spec, run = speed(2, 60.0, power_w=OPEN_W)
    larger = replace(spec, model=model("llama3_70b"))
    other = (larger, replace(run, trial_id=larger.trial_id))
    assert numbers(ranked(speed(1, 100.0), other).undecided) == [2]


def test_a_plan_that_uses_more_energy_in_any_case_is_worse() -> None:
    pairs = [
        trial(number, {"energy_per_token_j": energy, "device_temp_max_c": celsius}, window_s=90.0)
        for number, energy, celsius in ((1, 1.0, 60.0), (2, 2.0, 84.0))
    ]
    (row,) = rank(pairs, asked(LEAST_ENERGY, COOL)).behind
    assert row.behind.startswith("worse than ")


def test_a_feasible_plan_far_behind_is_the_answer_where_the_first_may_not_hold() -> None:
    """The first holds with P 0.96, so endless repeats may yet show that it does not; the second then is the best."""
    question = asked(FASTEST, POWER)
    ranking = rank(pairs := [speed(1, 100.0, power_w=2672.0), speed(2, 50.0)], question)
    assert 0.95 < ranking.best.margins[0].holds_probability < 0.98
    found = Posterior(pairs, question).standings
    assert found.none_probability < 0.01
    assert [one.spec.plan.micro_batch_size for one in found.finalists] == [1, 2]

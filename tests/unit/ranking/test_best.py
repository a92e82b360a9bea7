"""P(best) and ranks: critical values of the literature, and trials whose order is known."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from made_trials import FASTEST, POWER, asked, speed

from wattune.ranking import best
from wattune.ranking.best import Drawn, Leads, Standing, critical_value, ranks
from wattune.ranking.dice import NUM_DRAWS
from wattune.ranking.order import rank
from wattune.ranking.posterior import Posterior

MANY = 100_000
"""Degrees of freedom that are as good as infinitely many."""


def made(means: list[float], error: float) -> Standing:
    """Trials that share nothing, each with the same error."""
    num = len(means)
    return Standing(
        mean=np.array(means),
        own=np.full(num, error**2),
        freedom=np.full(num, float(MANY)),
        common=np.zeros((num, 1)),
        shared_freedom=float(MANY),
    )


# Dunnett 1955, table 1a: one-sided, 95 %, equal sizes (correlation 0.5).
@pytest.mark.parametrize(
    ("num_others", "degrees_of_freedom", "value"),
    [(1, 20, 1.72), (2, 20, 2.03), (5, 20, 2.39), (2, MANY, 1.92), (5, MANY, 2.23), (9, MANY, 2.42)],
)
def test_critical_values_are_dunnetts(num_others: int, degrees_of_freedom: int, value: float) -> None:
    assert critical_value(num_others, 10, degrees_of_freedom) == pytest.approx(value, abs=0.05)


def best_of(one: Standing) -> tuple[list[float], float]:
    """P(best) of each, and the expected error of whichever leads."""
    num, leads = len(one.mean), Leads()
    drawn = Drawn(one, np.zeros(num), np.zeros(num, np.intp), lambda place: ("", str(place)))
    for place in range(num):
        leads.add(place, drawn.figure(place))
    shares = np.bincount(leads.place, minlength=num) / NUM_DRAWS
    return list(shares), float((leads.top - one.mean[leads.place]).mean())


def test_equal_trials_are_equally_likely_the_best_and_share_a_rank() -> None:
    equal = made([0.0, 0.0, 0.0, 0.0], 1.0)
    likely, regression = best_of(equal)
    assert likely == pytest.approx([0.25] * 4, abs=0.03)
    assert list(ranks(equal)) == [1, 1, 1, 1]
    # The largest of four normal errors is 1.03 standard deviations above their mean.
    assert regression == pytest.approx(1.03, abs=0.05)


def test_two_trials_one_error_of_their_difference_apart() -> None:
    likely, _ = best_of(made([np.sqrt(2.0), 0.0], 1.0))
    assert likely[0] == pytest.approx(0.841, abs=0.02)  # the normal distribution at 1


def test_trials_far_apart_are_told_apart() -> None:
    apart = made([0.0, -10.0, -20.0], 1.0)
    likely, regression = best_of(apart)
    assert list(ranks(apart)) == [1, 2, 3]
    assert likely[0] == 1.0
    assert regression == pytest.approx(0.0, abs=0.05)


def test_an_effect_that_trials_share_does_not_blur_their_difference() -> None:
    apart, shared = made([1.0, 0.0], 0.1), np.full((2, 1), 50.0)
    same = replace(apart, common=shared)
    assert best_of(same)[0][0] > 0.999
    assert list(ranks(same)) == [1, 2]


def test_the_first_and_the_second_of_each_draw_are_known_in_any_order_of_trials() -> None:
    figures = np.random.default_rng(1).normal(size=(9, NUM_DRAWS))
    figures[figures < -0.5] = -np.inf
    figures[:, :10] = -np.inf
    leads = Leads()
    for number in (5, 0, 8, 3, 1, 7, 2, 6, 4):
        leads.add(number, figures[number])
    ordered = np.sort(figures, axis=0)
    assert (leads.top == ordered[-1]).all() and (leads.second == ordered[-2]).all()
    assert (leads.place == np.where(np.isneginf(ordered[-1]), -1, figures.argmax(axis=0))).all()


def test_an_undecided_trial_that_is_faster_takes_from_the_best_feasible_one() -> None:
    """The one that surely keeps the bound is not surely the best that does."""
    sure, near = speed(1, 1000.0, 2000.0), speed(2, 1100.0, 2700.0)
    pairs = [(spec, replace(result, tags={**result.tags, "simulated": "true"})) for spec, result in (sure, near)]
    ranking = rank(pairs, asked(FASTEST, POWER))
    (first,), (second,) = ranking.feasible, ranking.undecided
    assert 0.05 < first.best_probability < 0.95
    assert first.best_probability + second.best_probability == pytest.approx(1.0)
    alone = rank(pairs, asked(FASTEST))
    assert [row.best_probability for row in alone.feasible] == pytest.approx([1.0, 0.0], abs=0.001)


def test_the_standings_are_those_of_the_ranking() -> None:
    pairs = [speed(1, 1000.0, 2400.0), speed(2, 1005.0, 2600.0), speed(3, 990.0, 2500.0), speed(4, 500.0)]
    question = asked(FASTEST, POWER)
    likely = Posterior(pairs, question).standings.likely
    told = {row.trial_id: row.best_probability for row in rank(pairs, question).trials if row.best_probability}
    assert {trial_id: one for (_, trial_id), one in likely.items()} == told


@pytest.mark.parametrize("bound_w", [2000.0, 2600.0, 2750.0, 3200.0])
def test_bounds_of_trials_that_lead_in_no_draw_are_not_drawn_and_change_nothing(bound_w: float) -> None:
    rng = np.random.default_rng(1)
    pairs = [
        speed(number, *figures)
        for number, figures in enumerate(zip(rng.uniform(950, 1050, 60), rng.uniform(2500, 2900, 60), strict=True), 1)
    ]
    question = asked(FASTEST, replace(POWER, factor=bound_w))
    with patch.object(best, "kept_in_draws", wraps=best.kept_in_draws) as few:
        found = Posterior(pairs, question).standings
    with patch.object(Leads, "leads_in", return_value=True):
        assert Posterior(pairs, question).standings == found
    assert few.call_count < 60

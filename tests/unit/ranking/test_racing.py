"""The race of finalists: who is in it, which trial is repeated next, when it is over, and how often it is right."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_trials import FASTEST, POWER, Pair, asked, reference_runs, speed, trial

from wattune.ranking.best import NEAR_FRAC, Standings
from wattune.ranking.posterior import history, race_standings


def simulated(pairs: list[Pair]) -> list[Pair]:
    """The same with simulated sensors, which have no gain error: only scatter decides a bound."""
    return [(spec, replace(result, tags={**result.tags, "simulated": "true"})) for spec, result in pairs]


def found(pairs: list[Pair]) -> Standings:
    return race_standings(simulated(pairs), asked(FASTEST, POWER))


def probabilities(one: Standings) -> dict[int, float]:
    return {each.spec.plan.micro_batch_size: each.best_probability for each in one.finalists}


def test_a_clear_winner_needs_no_race_but_a_second_run_of_its_own_where_it_promises_to_keep_a_bound() -> None:
    pairs = [speed(1, 1200.0), speed(2, 1000.0), speed(3, 990.0)]
    free = race_standings(simulated(pairs), asked(FASTEST))
    assert free.told_apart(0.95) and free.unproven is None and free.best_probability > 0.99
    one = found(pairs)
    row = one.next({}, 0.95)
    assert one.best_probability > 0.99 and not one.told_apart(0.95)
    assert row is one.leader is one.unproven and row is not None and row.spec.plan.micro_batch_size == 1
    twice = found([*pairs, speed(1, 1200.0, repeat=1)])
    assert twice.told_apart(0.95) and twice.unproven is None


def test_the_second_run_of_a_winner_is_started_once_and_only_where_it_leads_surely() -> None:
    one = found([speed(1, 1200.0), speed(2, 1190.0, 2700.0), speed(3, 990.0)])
    assert one.unproven is one.leader is not None
    assert one.next({}, 1.0) == one.next({}), "the leader is not sure yet"
    near = found(
        [speed(1, 1000.0), speed(2, 998.0), speed(2, 998.0, repeat=1), *(speed(3, 700.0, repeat=n) for n in range(9))]
    )
    first = near.next({}, 0.95)
    assert near.near_probability > 0.95 > near.best_probability and first is near.unproven is not None
    assert near.next({first.trial_id: 1}, 0.95) is None, "its second run is on its way, and most likely the last"
    other = near.next({first.trial_id: 1}, 0.999)
    assert other is not None and other.spec.plan.micro_batch_size == 2, "more than its second run is wanted"


def test_two_equal_trials_share_it_and_are_repeated_in_turn() -> None:
    pairs, order = [speed(1, 1000.0), speed(2, 1000.0), speed(3, 700.0)], []
    for _ in range(6):
        one = found(pairs)
        assert one.best_probability < 0.95
        row = one.next({})
        assert row is not None
        number = row.spec.plan.micro_batch_size
        order.append(number)
        pairs.append(speed(number, 1000.0, repeat=order.count(number)))
    assert Counter(order) == {1: 3, 2: 3}


def test_a_trial_that_may_keep_its_bound_holds_the_decision_up_and_is_repeated() -> None:
    # The faster one is 1 % within the bound: one run does not tell that the next one keeps it.
    pairs = [speed(1, 1000.0, 2000.0), speed(2, 1100.0, 2720.0)]
    before = found(pairs)
    assert 0.05 < probabilities(before)[2] < 0.9
    row = before.next({})
    assert row is not None and row.spec.plan.micro_batch_size == 2
    better = found([*pairs, *(speed(2, 1100.0, 2660.0, repeat=repeat) for repeat in range(1, 7))])
    worse = found([*pairs, *(speed(2, 1100.0, 2790.0, repeat=repeat) for repeat in range(1, 7))])
    assert probabilities(better)[2] > 0.95 and probabilities(worse)[1] > 0.95


def test_a_bound_that_is_narrowly_broken_keeps_a_trial_in_the_race_and_a_wide_break_does_not() -> None:
    narrow = found([speed(1, 1000.0, 2000.0), speed(2, 1100.0, 2752.0)])
    assert probabilities(narrow)[2] > 0.0
    wide = found([speed(1, 1000.0, 2000.0), speed(2, 1100.0, 3200.0)])
    assert set(probabilities(wide)) == {1} and wide.best_probability == 1.0


def test_none_keeps_every_bound() -> None:
    one = found([speed(1, 1000.0, 3200.0), speed(2, 1100.0, 3200.0)])
    assert one.leader is None and one.none_probability == 1.0
    assert one.told_apart(0.95) and one.next({}) is None


def test_a_count_that_was_always_zero_keeps_its_bound_in_every_draw() -> None:
    bound = replace(POWER, metric="excursion_count", factor=0.0)
    pairs = [trial(number, {"tokens_per_s": 1000.0 * number, "excursion_count": 0.0}) for number in (1, 2)]
    one = race_standings(pairs, asked(FASTEST, bound))
    assert one.none_probability == 0.0 and one.best_probability > 0.99


def test_a_share_of_zero_is_surer_with_each_run() -> None:
    """One run at 0 cannot exclude a level just above it."""
    bound = replace(POWER, metric="throttle_thermal_frac", factor=0.01)
    likely = [
        race_standings(
            [
                trial(number, {"tokens_per_s": 1000.0 * number, bound.metric: 0.0}, repeat=repeat)
                for number in (1, 2)
                for repeat in range(num_runs)
            ],
            asked(FASTEST, bound),
        ).best_probability
        for num_runs in (1, 2, 4)
    ]
    assert 0.8 < likely[0] < likely[1] < 0.95 < likely[2]


def test_the_gain_of_a_real_sensor_is_no_matter_of_repeats() -> None:
    near = [speed(1, 1000.0, 2690.0, repeat=repeat) for repeat in range(8)]
    assert race_standings(simulated(near), asked(FASTEST, POWER)).best_probability > 0.95
    assert race_standings(near, asked(FASTEST, POWER)).best_probability > 0.95
    true_power = replace(POWER, sensor_gain_frac=0.05)
    assert race_standings(near, asked(FASTEST, true_power)).best_probability < 0.05


def test_long_runs_do_not_open_the_race_again() -> None:
    pairs = [speed(1, 1000.0), speed(2, 900.0)]
    spec, result = speed(1, 500.0, 3000.0, repeat=1)
    soaked = [*pairs, (spec, replace(result, tags={"soak": "true"}))]
    assert probabilities(found(soaked)) == probabilities(found(pairs))


def test_runs_on_their_way_make_another_one_worth_less() -> None:
    one = found([speed(1, 1000.0), speed(2, 1000.0), speed(3, 700.0)])
    first = one.next({})
    assert first is not None
    second = one.next({first.trial_id: 1})
    assert second is not None and second.trial_id != first.trial_id


def test_the_order_in_which_results_are_read_changes_nothing() -> None:
    pairs = [speed(number, 1000.0 + number, 2700.0 + number) for number in range(1, 9)]
    assert found(pairs) == found(pairs[::-1])


@settings(max_examples=25)
@given(st.lists(st.tuples(st.floats(900, 1100), st.floats(2400, 3000)), min_size=1, max_size=6), st.integers(0, 5))
def test_every_draw_has_one_answer_and_the_next_run_is_of_a_finalist(
    trials: list[tuple[float, float]], repeated: int
) -> None:
    pairs = [speed(number, *figures) for number, figures in enumerate(trials, start=1)]
    again = repeated % len(trials)
    pairs.append(speed(again + 1, *trials[again], repeat=1))
    one = found(pairs)
    shares = [each.best_probability for each in one.finalists]
    assert math.fsum([*shares, one.none_probability]) == pytest.approx(1.0)
    assert shares == sorted(shares, reverse=True)
    assert all(0.0 <= each <= 1.0 for each in one.effects)
    row = one.next({})
    assert (row is None) == (not one.finalists)
    assert row is None or row.trial_id in {each.trial_id for each in one.finalists[:2]}


def raced(pairs: list[Pair]) -> list[Pair]:
    """The pairs with ascending ends; those with a repeat of 1 and more are of a race."""
    made = []
    for index, (spec, result) in enumerate(pairs):
        until = 0.95 if 1 <= result.repeat < 1000 else None
        numbers = replace(result.numbers, race_until_probability=until)
        made.append((spec, replace(result, tags={}, numbers=numbers, end_wall_ns=index + 1)))
    return made


def test_history_is_what_the_race_saw_at_each_repeat() -> None:
    first = [speed(1, 1000.0), speed(2, 1004.0), speed(3, 700.0)]
    pairs = raced([*first, speed(2, 1010.0, repeat=1), speed(1, 985.0, repeat=1)])
    moments = history(pairs[::-1], asked(FASTEST, POWER))
    assert [number for number, _ in moments] == [0, 1, 2]
    for number, then in moments:
        now = race_standings(pairs[: 3 + number], asked(FASTEST, POWER))
        assert then.likely == now.likely and then.none_probability == now.none_probability
    assert history(raced(first), asked(FASTEST, POWER)) == []


def test_a_long_race_has_a_short_history_with_both_ends() -> None:
    pairs = [speed(1, 1000.0), *(speed(1, 1000.0, repeat=repeat) for repeat in range(1, 61))]
    repeats = [number for number, _ in history(raced(pairs), asked(FASTEST))]
    assert len(repeats) == 25 and (repeats[0], repeats[-1]) == (0, 60)


def race_of(seed: int, most_repeats: int = 6) -> tuple[bool, bool, int]:
    """Races twelve made-up trials: whether it was decided, whether that is true within 2 %, and the repeats."""
    rng = np.random.default_rng([31, seed])
    truth, power = rng.normal(0.0, 0.04, 12), rng.normal(-0.06, 0.04, 12)
    keeps = np.flatnonzero(power + 1.645 * 0.01 <= 0.0)
    best = keeps[truth[keeps].argmax()]
    runs: Counter[int] = Counter()

    def run(number: int) -> Pair:  # on the reference's nodes: on others that nothing ties to them it stays open
        noise = 0.01 * rng.normal(size=2)
        repeat, runs[number] = runs[number], runs[number] + 1
        figures = 1000.0 * math.exp(truth[number] + noise[0]), 2750.0 * math.exp(power[number] + noise[1])
        spec, result = speed(number + 1, *figures, repeat=repeat)
        return spec, replace(result, tags={"nodes": "n0"})

    pairs = [*reference_runs(800.0 * np.exp(0.01 * rng.normal(size=4))), *map(run, range(12))]
    for num_repeats in range(most_repeats + 1):
        one = found(pairs)
        row = one.next({})
        if one.told_apart(0.95) or row is None or num_repeats == most_repeats:
            break
        pairs.append(run(row.spec.plan.micro_batch_size - 1))
    leader = one.leader.spec.plan.micro_batch_size - 1 if one.leader is not None else None
    right = leader in keeps and truth[leader] >= truth[best] + math.log1p(-NEAR_FRAC)
    return one.told_apart(0.95), right, num_repeats


@pytest.mark.slow
def test_where_it_stops_it_names_the_truly_best_feasible_trial_or_one_near_it() -> None:
    """`benchmarks/results/racing.md` says the same of more kinds of studies."""
    ends = [race_of(seed) for seed in range(200)]
    told = [right for stopped, right, _ in ends if stopped]
    assert len(told) >= 90  # else the race decides nothing
    assert sum(told) / len(told) >= 0.93

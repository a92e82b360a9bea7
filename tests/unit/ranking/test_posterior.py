"""A posterior that is told results one by one says what one of all of them says, and looks at few of them for it."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_trials import FASTEST, POWER, Pair, asked, trial

from wattune.ranking import posterior
from wattune.ranking.order import rank
from wattune.ranking.posterior import Posterior
from wattune.run import RunStatus

QUESTION = asked(FASTEST, POWER)
STATUSES = [RunStatus.COMPLETED] * 6 + [RunStatus.OUT_OF_MEMORY, RunStatus.INVALID]


@st.composite
def studies(draw: st.DrawFn) -> list[Pair]:
    """Results in the order in which they came: repeats, failures, nodes, hosts that wait, some measured anew."""
    found = []
    for place in range(draw(st.integers(1, 16))):
        number, repeat = draw(st.integers(1, 12)), draw(st.integers(0, 3))
        status = draw(st.sampled_from(STATUSES))
        figures = {
            "tokens_per_s": draw(st.floats(900, 1100)),
            "node_device_power_peak_1s_w": draw(st.floats(2500, 2900)),
            "host_bound_frac": draw(st.sampled_from([0.0, 0.02, 0.3])),
        }
        spec, run = trial(
            number,
            figures if status is RunStatus.COMPLETED else None,
            repeat=repeat,
            status=status,
            tags={"nodes": draw(st.sampled_from(["n0", "n1"]))},
        )
        found.append((spec, replace(run, start_wall_ns=(1_790_000_000 + 60 * place) * 10**9)))
    return found


def last_of_each(pairs: list[Pair]) -> list[Pair]:
    return [*{(run.trial_id, run.repeat): (spec, run) for spec, run in pairs}.values()]


@settings(max_examples=20, deadline=None)
@given(studies())
def test_results_told_one_by_one_say_what_all_of_them_say_at_once(pairs: list[Pair]) -> None:
    told = Posterior(pairs[:1], QUESTION)
    for number, (spec, run) in enumerate(pairs[1:]):
        if number % 4 == 0:
            told.front  # noqa: B018  # what follows is not from nothing
        told.tell(spec, run)
    whole = Posterior(last_of_each(pairs), QUESTION).standings
    assert told.front.likely == pytest.approx(whole.likely, abs=0.02)  # sums are in another order
    assert told.front.none_probability == pytest.approx(whole.none_probability, abs=0.02)
    feasible = [row.trial_id for row in rank(last_of_each(pairs), QUESTION).feasible]
    first = [row.trial_id for row in told.best_first() if row.verdict == "feasible"]
    assert sorted(first) == sorted(feasible) and first[:1] == feasible[:1]


@settings(max_examples=10, deadline=None)
@given(pairs=studies(), bounds_w=st.lists(st.sampled_from([2550, 2650, 2750, 2850]), min_size=2, max_size=3))
def test_what_is_known_of_one_question_changes_no_answer_to_another(pairs: list[Pair], bounds_w: list[int]) -> None:
    every = last_of_each(pairs)
    one = Posterior(every, QUESTION)
    for bound_w in bounds_w:
        question = asked(FASTEST, POWER, replace(POWER, factor=float(bound_w)))
        one = one.asking(question)
        assert one.rows == Posterior(every, question).rows
    spec, run = every[0]
    one.tell(spec, replace(run, repeat=7))  # moves the scatter that all margins rest on
    anew = Posterior([*every, (spec, replace(run, repeat=7))], one.question).rows
    likely = [[margin.holds_probability for margin in row.margins] for row in anew]
    assert [[margin.holds_probability for margin in row.margins] for row in one.rows] == [
        pytest.approx(each, abs=1e-6) for each in likely
    ]


def test_a_result_more_costs_no_look_at_trials_far_behind() -> None:
    slow = [trial(number, {"tokens_per_s": 100.0 + number, POWER.metric: 2000.0}) for number in range(10, 200)]
    hot = [trial(number, {"tokens_per_s": 2000.0, POWER.metric: 4000.0}) for number in range(200, 300)]
    told = Posterior([*slow, *hot, trial(1, {"tokens_per_s": 1000.0, POWER.metric: 2000.0})], QUESTION)
    assert told.front.best_probability == 1.0
    with patch.object(posterior, "assess_trials", wraps=posterior.assess_trials) as assessed:
        told.tell(*trial(2, {"tokens_per_s": 1001.0, POWER.metric: 2000.0}))
        assert len(told.front.finalists) == 2
    assert sum(len(call.args[1]) for call in assessed.call_args_list) < 10

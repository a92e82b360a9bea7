"""The answer of a ranking: in each state, and the same on terminal, page and as JSON."""

from dataclasses import replace

import pytest
from made_report import DOCUMENT, POWER, Page, trial
from screen import shown

from wattune.objective import Question
from wattune.ranking.answer import UNTIL_DECIDED, answer_of
from wattune.ranking.order import Ranking, SpaceShare, rank
from wattune.report.page import render_report
from wattune.run import Numbers, RunStatus
from wattune.view.answer import answer_lines
from wattune.view.ranking import ranking_view

QUESTION = Question.of("maximize tokens_per_s", f"{POWER} <= 2750")


def ranked(*trials, question: Question = QUESTION) -> Ranking:
    return rank(list(trials), question)


def failed(pair):
    spec, run = pair
    return spec, replace(run, status=RunStatus.CRASHED, reason="broken", metrics={})


def in_seconds(pair, taken_s: int):
    spec, run = pair
    return spec, replace(run, start_wall_ns=0, end_wall_ns=taken_s * 10**9)


def test_nothing_measured_all_failed_and_none_that_holds_are_three_answers() -> None:
    assert answer_of(ranked()).state == "unmeasured"
    assert answer_of(ranked(failed(trial(1, 40_000.0)))).state == "failed"
    broken = answer_of(ranked(trial(1, 40_000.0, 3500.0)))
    assert broken.state == "none" and broken.plan is None and not broken.command


def test_a_sure_answer_has_its_lead_and_its_closest_bound_and_asks_for_nothing() -> None:
    found = answer_of(ranked(trial(1, 44_000.0, 2000.0), trial(2, 40_000.0, 2000.0)))
    assert found.state == "sure" and found.best_probability == pytest.approx(1.0, abs=0.01)
    assert found.lead_frac == pytest.approx(0.1, abs=0.002)
    assert found.closest is not None and found.closest.metric == POWER
    assert not (found.repeats or found.command or found.rivals)


def test_plans_that_were_not_measured_are_told_and_not_taken_for_bad_ones() -> None:
    space = (SpaceShare(study="moe", num_candidates=10, num_measured=1, num_failed=1),)
    broken = replace(ranked(trial(1, 40_000.0, 3500.0)), space=space)
    first, second = answer_lines(broken)
    assert first == "No plan that was measured keeps every bound." and second.startswith("8 of 10 plans")
    kept = replace(ranked(trial(1, 40_000.0, 2000.0)), space=space)
    assert answer_lines(kept)[0].startswith("The best measured plan that keeps every bound is")
    assert answer_of(kept).to_json()["num_unmeasured"] == 8
    whole = replace(broken, space=(replace(space[0], num_measured=9),))
    assert answer_lines(whole) == ["No plan keeps every bound; loosen a bound or widen the space."]


def test_a_tie_asks_for_a_repeat_of_both_with_its_time_and_the_command() -> None:
    tied = trial(1, 40_000.0, 2000.0, simulated=True), trial(2, 40_010.0, 2000.0, simulated=True)
    ranking = ranked(in_seconds(tied[0], 15), in_seconds(tied[1], 25))
    found = answer_of(ranking)
    assert found.state == "unsure" and found.best_probability is not None and found.best_probability < 0.95
    assert set(found.repeats) == {row.label for row in ranking.feasible}
    assert found.repeats_s == pytest.approx(40.0) and found.command == f"wattune run SPACE {UNTIL_DECIDED}"
    assert "2 repeats" in answer_lines(ranking)[-1] and "about 40 s" in answer_lines(ranking)[-1]
    pairs = [in_seconds(tied[0], 45), in_seconds(tied[1], 25)]
    (spec, first), other = pairs
    started = [(spec, replace(first, numbers=Numbers(group_start_s=30.0))), other]
    assert answer_of(ranked(*started)).repeats_s == pytest.approx(15 + 25 + 30), "workers start once in a call"
    known = replace(ranking, run_command="wattune run 'a b/study.yaml'")
    assert answer_lines(known)[-1].endswith("wattune run 'a b/study.yaml' --until-decided")


def test_one_that_holds_is_not_called_sure_while_a_faster_one_is_undecided() -> None:
    ranking = ranked(trial(1, 40_000.0, 2000.0), trial(2, 44_000.0, 2745.0))
    found = answer_of(ranking)
    assert [len(ranking.feasible), len(ranking.undecided)] == [1, 1]
    assert found.state == "unsure" and found.name == ranking.feasible[0].label
    (name, lead_frac, _), *_ = found.rivals
    assert name == ranking.undecided[0].label and lead_frac == pytest.approx(0.1, abs=0.002)
    first, *others = answer_lines(ranking)
    assert first.startswith("Not decided") and any("10.0 % faster" in line for line in others)


def test_plans_that_differ_by_less_than_anybody_cares_for_are_an_answer() -> None:
    ranking = ranked(trial(1, 40_000.0, 2000.0), trial(2, 40_010.0, 2000.0))
    found, (first, *others) = answer_of(ranking), answer_lines(ranking)
    assert found.best_probability is not None and found.best_probability < 0.95
    assert found.state == "sure" and not found.repeats and found.near_probability is not None
    assert 0.95 <= found.near_probability == found.to_json()["near_probability"] <= 1.0
    assert first.startswith("The best that keeps every bound is") and "P(within 2 % of the best) 0.9" in first
    assert any(line.startswith("Not told apart from") for line in others)
    unknown = answer_of(replace(ranking, better_probability=0.5))
    assert unknown.near_probability == pytest.approx(0.5 * found.near_probability), "others are not measured yet"


def test_an_undecided_one_that_is_hardly_faster_leaves_an_answer_and_is_told() -> None:
    ranking = ranked(trial(1, 40_000.0, 2000.0), trial(2, 40_010.0, 2745.0))
    found = answer_of(ranking)
    assert found.state == "sure" and [name for name, *_ in found.rivals] == [ranking.undecided[0].label]
    assert any(line.startswith("Undecided, and hardly likely to be better:") for line in answer_lines(ranking))


def test_a_slower_undecided_one_is_no_rival() -> None:
    found = answer_of(ranked(trial(1, 44_000.0, 2000.0), trial(2, 30_000.0, 2745.0)))
    assert found.state == "sure" and not found.rivals


def test_where_only_undecided_ones_are_left_the_likeliest_is_named_as_not_known() -> None:
    ranking = ranked(trial(1, 40_000.0, 2745.0))
    found = answer_of(ranking)
    assert found.state == "undecided" and found.plan is ranking.undecided[0]
    assert answer_lines(ranking)[0].startswith("No plan is known to keep every bound")


@pytest.mark.parametrize(
    "trials",
    [
        [trial(1, 44_000.0, 2000.0), trial(2, 40_000.0, 2000.0)],
        [trial(1, 40_000.0, 2000.0, simulated=True), trial(2, 40_010.0, 2000.0, simulated=True)],
        [trial(1, 40_000.0, 2000.0), trial(2, 40_010.0, 2000.0)],
        [trial(1, 40_000.0, 2000.0), trial(2, 44_000.0, 2745.0)],
        [trial(1, 40_000.0, 2745.0)],
        [trial(1, 40_000.0, 3500.0)],
    ],
    ids=["sure", "tie", "near", "rival", "undecided", "none"],
)
def test_terminal_page_and_json_say_the_same(trials) -> None:
    ranking = ranked(*trials)
    text, page = shown(*ranking_view(ranking), width=400), Page(render_report("moe", DOCUMENT, ranking, [])).text
    lines, found = answer_lines(ranking), answer_of(ranking).to_json()
    assert text.startswith(lines[0])
    for line in lines:
        assert line in text and line in page
    assert found["plan"] in lines[0] and found["command"] in lines[-1]
    if found["lead_frac"] is not None:
        assert f"{100 * abs(found['lead_frac']):.1f} %" in lines[0]


def test_a_page_says_what_a_tied_leader_is_expected_to_measure_again() -> None:
    ranking = ranked(trial(1, 40_000.0, 2000.0), trial(2, 40_010.0, 2000.0))
    assert ranking.expected is not None and ranking.expected < 40_000.0
    assert "Expected when run again: 39.9 k/s" in Page(render_report("moe", DOCUMENT, ranking, [])).text
    sure = ranked(trial(1, 44_000.0, 2000.0), trial(2, 40_000.0, 2000.0))
    assert "Expected when run again" not in Page(render_report("moe", DOCUMENT, sure, [])).text


def test_ties_and_the_reference_trial_are_named() -> None:
    reference = [trial(8, speed, 2000.0, repeat=1000 + n) for n, speed in enumerate((30_000.0, 30_050.0))]
    ranking = ranked(*(trial(n, 40_000.0 + n, 2000.0) for n in (1, 2, 4, 5, 6)), *reference)
    found = answer_of(ranking)
    assert found.reference is not None and found.reference.label == "dp4 mbs8"
    assert set(found.ties) == {row.label for row in ranking.feasible[1:5]}
    assert f"Not told apart from {', '.join(found.ties[:3])} and 1 more." in answer_lines(ranking)
    assert found.to_json()["ties"] == list(found.ties)
    assert answer_of(ranked(*reference)).reference is None, "the plan itself"

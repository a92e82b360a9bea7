"""The page says right after the answer of how many trials nothing was measured, and why."""

from dataclasses import replace

import pytest
from made_report import DOCUMENT, Page, ranked, trial

from wattune.fidelity import BURST, FIDELITY, FIRST_BURST_REPEAT
from wattune.report.page import render_report
from wattune.report.spaces import coverage_of, coverage_section
from wattune.run import RunStatus

PAIRS = [
    trial(1, 100.0),
    trial(1, 101.0, repeat=1),
    trial(2, 90.0, 3000.0),
    trial(4, 80.0, None),
    trial(8, 0.0, status=RunStatus.CRASHED, reason="died"),
    trial(16, 0.0, status=RunStatus.INTERRUPTED),
]


def candidates(*numbers: int, rejected: int = 0, equivalent: int = 0) -> list[dict[str, str]]:
    kept = [
        {"trial_id": trial(number, 1.0)[0].trial_id, "status": "kept", "rule": "", "reason": ""} for number in numbers
    ]
    others = [{"trial_id": "", "status": "rejected", "rule": "layers", "reason": "x"}] * rejected
    return [*kept, *others, *([{"trial_id": "", "status": "equivalent", "rule": "", "reason": "x"}] * equivalent)]


def test_every_trial_of_the_space_is_counted_once():
    ranking = ranked(PAIRS)
    lost = {f"{trial(32, 1.0)[0].trial_id}-0": "gone"}
    found = coverage_of(replace(ranking, unreadable=lost), candidates(1, 2, 4, 8, 16, 32, 64, 128, rejected=7))
    assert (found["measured"], found["failed"], found["interrupted"], found["unreadable"], found["not_reached"]) == (
        3,
        1,
        1,
        1,
        2,
    )
    assert (found["kept"], found["rejected"], found["elsewhere"]) == (8, 7, 0)


def test_a_repeat_that_cannot_be_read_is_no_lost_trial_if_another_can():
    lost = {f"{trial(1, 1.0)[0].trial_id}-5": "gone"}
    found = coverage_of(replace(ranked(PAIRS), unreadable=lost), candidates(1, 2, 4, 8, 16))
    assert (found["unreadable"], found["measured"], found["kept"]) == (0, 3, 5)


def test_trials_that_the_space_does_not_have_are_not_of_it():
    found = coverage_of(ranked(PAIRS), candidates(1, 64))
    assert (found["measured"], found["kept"], found["elsewhere"]) == (1, 2, 2)


def test_a_burst_is_no_measurement():
    bursts = [trial(number, 70.0, repeat=FIRST_BURST_REPEAT, tags={FIDELITY: BURST}) for number in (1, 32, 64)]
    ranking, listed = ranked([*PAIRS, *bursts]), candidates(1, 2, 4, 8, 16, 32, 64, 128)
    found = coverage_of(ranking, listed)
    assert (found["measured"], found["burst"], found["not_reached"], found["kept"]) == (3, 2, 1, 8)
    page = Page(render_report("moe", DOCUMENT, ranking, listed))
    assert "Measured 3 of 8 trials of the space (37.5 %)" in page.text
    assert "Not measured: 1 not reached, 2 only in a burst, 1 failed, 1 interrupted." in page.text


def test_it_is_said_before_any_table():
    listed = candidates(1, 2, 4, 8, 16, *(2**n for n in range(5, 12)), rejected=1204, equivalent=96)
    page = Page(render_report("moe", DOCUMENT, ranked(PAIRS), listed))
    before = page.text[: page.text.index("P(best) is the probability")]
    assert "Measured 3 of 12 trials of the space (25.0 %)" in before
    assert "Not measured: 7 not reached, 1 failed, 1 interrupted." in before
    assert "1,204 combinations are rejected by rules and 96 do the same work" in before


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (candidates(1, 2, 4), "Not measured: none."),
        (candidates(rejected=3), "Measured 0 of 0 trials of the space\n"),
        (candidates(1, 2, 4, rejected=1), "1 combination is rejected by rules: it does not run."),
        (candidates(1, 2, 64), "1 more was measured outside this space."),
        (candidates(1, 64), "2 more were measured outside this space."),
    ],
)
def test_the_ends_read_well(listed, said):
    assert said in Page(coverage_section(ranked(PAIRS[:4]), listed)).text


def test_trials_are_counted_by_verdict_where_there_are_any():
    assert Page(coverage_section(ranked(PAIRS), [])).text.split() == [
        *("1", "feasible", "1", "infeasible", "1", "unknown", "1", "interrupted", "1", "failed")
    ]
    assert coverage_section(ranked([]), []) == ""

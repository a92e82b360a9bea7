"""Tables by verdict, saturation, rejections and method of a report."""

from dataclasses import replace

import pytest
from made_report import DOCUMENT, POWER, Page, ranked, render, trial, whole

from wattune.report.page import render_report
from wattune.report.sections import MAX_ROWS
from wattune.run import RunStatus


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render())


def test_every_trial_is_in_the_table_of_its_verdict(page):
    feasible, infeasible, unknown, failed, _, _ = page.tables
    assert [row[0] for row in feasible[1:]] == ["1.00"]
    assert "✕ 3.188 kW" in infeasible[1][2]
    assert "−438 W (−15.9 %), breaks" in infeasible[1][2]
    assert unknown[1] == ["dp4 mbs4", "43 k/s ±2.8 %", POWER]
    assert failed[1] == ["out of memory", "1", "dp4 mbs8", "rank 3 at 140 GiB"]


def test_what_the_same_command_runs_again_is_not_listed_as_failed():
    stopped = trial(4, 0.0, status=RunStatus.INTERRUPTED, reason="stopped by the user")
    broken = trial(8, 0.0, status=RunStatus.CRASHED, reason="died")
    page = Page(render_report("moe", DOCUMENT, ranked([stopped, broken]), [], {}, None, []))
    interrupted, failed = page.tables
    assert interrupted[1:] == [["dp4 mbs4", "interrupted: stopped by the user"]]
    assert failed[1:] == [["crashed", "1", "dp4 mbs8", "died"]]
    assert "Run again by the same command" in page.text and "1\n interrupted" in page.text


def test_a_failure_is_shown_by_the_repeat_that_failed_and_not_by_one_that_was_stopped():
    stopped = trial(8, 0.0, status=RunStatus.INTERRUPTED, reason="stopped by the user")
    broken = trial(8, 0.0, repeat=1, status=RunStatus.CRASHED, reason="died")
    page = Page(render_report("moe", DOCUMENT, ranked([stopped, broken]), [], {}, None, []))
    assert page.tables[-1][1:] == [["crashed", "1", "dp4 mbs8", "died"]]


def test_rejected_combinations_are_counted_by_rule_with_the_first_reason(page):
    assert page.tables[-1][1:] == [["3", "kv_heads", "rank 3 at 140 GiB 0"], ["1", "layers", "rank 3 at 140 GiB"]]
    assert "1 more do the same work" in page.text


def test_figures_come_with_their_method(page):
    method = page.text[page.text.index("Method and quality") :]
    for shown in (
        "min_steps 20",
        "4 of 3 trials",
        "or better, by its repeats and all others (1), the repeats of other trials (2)",
        "run-to-run scatter: 1 % pooled from 1 repeats, their node_device_power_peak_1s_w too, and a prior of 0.37 %",
        "period up to 20.0 ms",
        "true watts hold too if the sensor is within ±5 %",
    ):
        assert shown in method
    assert "torch 2.13.0 / rank 3 at 140 GiB" in method
    assert "2026-09-21 14:13 UTC to 2026-09-21 14:14 UTC" in method


def test_the_word_saturated_is_printed_only_where_it_holds(page):
    (rows,) = [rows for rows in page.tables if rows[0][1] == "what"]
    assert [row[6] for row in rows[1:]] == ["saturated", "saturated"]
    ranking, _, evidence = whole()
    below = {
        trial_id: replace(one, saturation=(replace(one.saturation[0], above_frac=0.4),))
        for trial_id, one in evidence.items()
    }
    (rows,) = [t for t in Page(render_report("s", DOCUMENT, ranking, [], below)).tables if t[0][1] == "what"]
    assert [row[6] for row in rows[1:]] == ["no", "no"]


def test_a_long_table_says_that_it_was_cut():
    page = Page(render_report("s", DOCUMENT, ranked([trial(n, 100.0 + n) for n in range(1, 121)]), []))
    assert len(page.tables[0]) == 1 + MAX_ROWS
    assert f"The first {MAX_ROWS} of 120; ranking.parquet has all." in page.text

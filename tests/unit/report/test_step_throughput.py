"""Throughput by step of the leaders."""

from dataclasses import replace

import pytest
from made_report import DOCUMENT, Page, evidence_of, figure_of, ranked, trial, values

from wattune.ranking.common_steps import COMPARED
from wattune.report.page import render_report
from wattune.report.step_throughput import MOST_LEADERS, not_drawn, step_throughput
from wattune.workload import UNKNOWN_WORKLOAD


def test_each_step_has_its_tokens_over_the_time_to_the_next_one_at_its_place_in_the_data():
    ranking = ranked([trial(1, 40_000.0), trial(2, 30_000.0, 3188.0)])
    best, over = ranking.feasible[0], ranking.infeasible[0]
    data, layout = figure_of(step_throughput(ranking, {row.trial_id: evidence_of() for row in (best, over)}))
    (line,) = data
    assert values(line["x"]) == list(range(5, 44))
    assert values(line["y"]) == pytest.approx([best.spec.workload.tokens_per_step / 0.5] * 39)
    assert "shapes" not in layout


def test_the_most_likely_best_come_first_and_the_compared_steps_are_shaded():
    tags = {COMPARED: "9-30"}
    ranking = ranked([trial(n, 40_000.0 + 10 * n, tags=tags) for n in (1, 2, 4, 8, 16)])
    evidence = {row.trial_id: evidence_of() for row in ranking.feasible}
    chart = step_throughput(ranking, evidence)
    data, layout = figure_of(chart)
    assert len(data) == MOST_LEADERS == len({(line["line"]["color"], line["line"]["dash"]) for line in data})
    assert data[0]["name"].endswith(max(ranking.feasible, key=lambda row: row.best_probability).label)
    assert [(shape["x0"], shape["x1"]) for shape in layout["shapes"]] == [(8.5, 30.5)]
    assert "shaded" in chart.caption


def test_without_a_leader_of_two_steps_there_is_no_chart():
    ranking = ranked([trial(1, 40_000.0)])
    (row,) = ranking.feasible
    short = replace(found := evidence_of(), steps=found.steps.slice(0, 1))
    assert step_throughput(ranking, {row.trial_id: short}) is None
    assert step_throughput(ranking, {}) is None


def test_where_nobody_said_the_tokens_of_a_step_no_chart_is_drawn_and_the_page_says_so():
    def unsaid(number: int, tokens_per_s: float):
        spec, result = trial(number, tokens_per_s)
        spec = replace(spec, workload=UNKNOWN_WORKLOAD)
        return spec, replace(result, trial_id=spec.trial_id)

    ranking = ranked([unsaid(1, 40_000.0), unsaid(2, 39_000.0)])
    evidence = {row.trial_id: evidence_of() for row in ranking.feasible}
    assert len(evidence) == 2 and step_throughput(ranking, evidence) is None
    assert "nobody said how many tokens a step has" in not_drawn(ranking, evidence)
    page = Page(render_report("own", DOCUMENT, ranking, [], evidence))
    assert "Throughput by step" in page.text and "nobody said how many tokens a step has" in page.text
    assert not_drawn(ranking, {}) == "" and not_drawn(ranked([trial(1, 40_000.0)]), {}) == ""


def test_leaders_without_tokens_take_no_place_of_those_that_have_some():
    spec, result = trial(1, 50_000.0)
    spec = replace(spec, workload=UNKNOWN_WORKLOAD)
    unsaid = [
        (one, replace(result, trial_id=one.trial_id))
        for n in range(MOST_LEADERS)
        for one in [replace(spec, plan=replace(spec.plan, micro_batch_size=100 + n))]
    ]
    ranking = ranked([*unsaid, trial(2, 40_000.0)])
    evidence = {row.trial_id: evidence_of() for row in ranking.feasible}
    data, _ = figure_of(step_throughput(ranking, evidence))
    assert len(data) == 1 and not_drawn(ranking, evidence) == ""

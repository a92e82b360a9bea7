"""Throughput by step of the leaders."""

from dataclasses import replace

import numpy as np
import pytest
from made_report import evidence_of, figure_of, ranked, trial, values

from wattune.ranking.common_steps import COMPARED
from wattune.report.step_throughput import MOST_LEADERS, step_throughput


def test_each_step_has_its_tokens_over_the_time_to_the_next_one_at_its_place_in_the_data():
    ranking = ranked([trial(1, 40_000.0), trial(2, 30_000.0, 3188.0)])
    best, over = ranking.feasible[0], ranking.infeasible[0]
    data, layout = figure_of(step_throughput(ranking, {row.trial_id: evidence_of(row) for row in (best, over)}))
    (line,) = data
    assert values(line["x"]) == list(range(5, 44))
    assert values(line["y"]) == pytest.approx([best.spec.workload.tokens_per_step / 0.5] * 39)
    assert "shapes" not in layout


def test_the_most_likely_best_come_first_and_the_compared_steps_are_shaded():
    tags = {COMPARED: "9-30"}
    ranking = ranked([trial(n, 40_000.0 + 10 * n, tags=tags) for n in (1, 2, 4, 8, 16)])
    evidence = {row.trial_id: evidence_of(row) for row in ranking.feasible}
    chart = step_throughput(ranking, evidence)
    data, layout = figure_of(chart)
    assert len(data) == MOST_LEADERS == len({(line["line"]["color"], line["line"]["dash"]) for line in data})
    assert data[0]["name"].endswith(max(ranking.feasible, key=lambda row: row.best_probability).label)
    assert [(shape["x0"], shape["x1"]) for shape in layout["shapes"]] == [(8.5, 30.5)]
    assert "shaded" in chart.caption


def test_without_a_leader_of_two_steps_there_is_no_chart():
    ranking = ranked([trial(1, 40_000.0)])
    (row,) = ranking.feasible
    short = replace(evidence_of(row), step_index=np.arange(1), steps=(np.zeros(1), np.ones(1)))
    assert step_throughput(ranking, {row.trial_id: short}) is None
    assert step_throughput(ranking, {}) is None

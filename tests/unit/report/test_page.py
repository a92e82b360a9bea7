from dataclasses import replace
from pathlib import Path

import pytest
from first_screens import recordings
from made_report import (
    DOCUMENT,
    HOSTILE,
    POWER,
    Page,
    all_charts,
    comparison_of,
    evidence_of,
    figure_of,
    ranked,
    render,
    trial,
    whole,
)

from wattune.ranking.comparison import Side, compare
from wattune.ranking.difference import Counted
from wattune.report.page import render_comparison, render_report
from wattune.report.pareto import pareto
from wattune.view.comparison import reason_text


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render())


def test_the_headline_is_the_best_feasible_trial_with_its_slack_and_its_price(page):
    head = page.text[: page.text.index("Before you compare")]
    for shown in (
        "Best feasible configuration\ndp4 mbs1\n",
        "40.5 k/s ±2.1 %",
        "2 repeats, interval by its repeats and all others",
        f"2.39 kW\nClosest bound: {POWER} <= 2750: +360 W (+13.1 %), holds, the next run keeps it with probability 1",
    ):
        assert shown in head
    assert f"dp4 mbs2 is 8.6 % better, with 44 k/s, but fails {POWER} <= 2750 by 438 W. Against it: time of a" in head


def test_the_next_plan_and_the_reference_trial_are_compared_with_the_parts_that_differ():
    pairs = [trial(1, 40_400.0), trial(2, 38_000.0), *(trial(4, 30_000.0 + n, repeat=1000 + n) for n in range(3))]
    ranking = ranked(pairs)
    sides = [
        Side(
            name=row.trial_id,
            spec=row.spec,
            result=row.counted[0],
            breakdown=evidence_of(slow=slow).breakdown,
            counted=Counted(row.counted, row.spreads),
            simulated=False,
        )
        for row, slow in zip(ranking.feasible, (1.0, 1.3, 2.0), strict=True)
    ]
    compared = {role: compare(side, sides[0]) for role, side in zip(("next", "reference"), sides[1:], strict=True)}
    text = Page(render_report("moe", DOCUMENT, ranking, [], comparisons=compared)).text
    assert "\nAgainst the next: it trains 6.3 % more tokens a second (95 % interval " in text
    assert "\nAgainst the reference trial, dp4 mbs4: it trains 34.7 % more tokens a second (95 % interval " in text
    assert ": told apart; time of a step −100.0 ms, of it exposed comm −100.0 ms.\n" in text
    assert reason_text(compared["next"]) == "time of a step −30.0 ms, of it exposed comm −30.0 ms"
    assert reason_text(replace(compared["next"], asked="energy_per_token_j")).startswith("energy of a step −78 J")
    assert reason_text(replace(compared["next"], time=None)) == ""


def test_an_open_bound_is_marked_and_a_recording_has_its_own_name():
    page = render_report("moe", DOCUMENT, ranked([trial(1, 40_000.0, 2745.0)]), [])
    assert "Most likely the best configuration, its bounds open" in page and '<b class="lost"' in page
    text = Page(recordings(Path())).text
    assert "Best feasible recording\nsecond\n1 kJ" in text and "python train.py --lr second" in text


def of_shorter_sequences(pair):
    spec, result = pair
    spec = replace(spec, workload=replace(spec.workload, seq_len=512))
    return spec, replace(result, trial_id=spec.trial_id)


def test_the_price_of_the_bounds_is_of_the_same_work_as_the_best():
    best, worse = trial(1, 40_000.0), trial(2, 39_000.0, 3188.0)
    shorter = of_shorter_sequences(trial(1, 90_000.0, 3188.0))
    head = Page(render_report("moe", DOCUMENT, ranked([best, shorter, worse]), [])).text
    assert "No trial that breaks a bound does better." in head and "% better" not in head
    alone = Page(render_report("moe", DOCUMENT, ranked([best, shorter]), [])).text
    assert "does better" not in alone and "% better" not in alone


def test_the_best_of_each_size_of_work_is_named_by_what_differs():
    pairs = [trial(1, 40_000.0), of_shorter_sequences(trial(1, 30_000.0))]
    head = Page(render_report("moe", DOCUMENT, ranked(pairs), [])).text
    assert (
        "Best of llama3_8b (32 layers, 8.03 G parameters), pretrain at 512 tokens: dp4 mbs1 seq512 with 30 k/s" in head
    )


def test_the_page_asks_nobody_for_anything(page):
    assert {name for _, names in page.elements for name in names}.isdisjoint({"src", "href", "action", "srcset"})
    assert not {"link", "iframe", "img", "object", "base"} & {tag for tag, _ in page.elements}
    assert "default-src 'none'" in render()


def test_text_from_users_stays_text():
    page = Page(render(text=HOSTILE))
    assert page.elements == Page(render()).elements
    assert page.text.count(HOSTILE) >= 6  # title, heading, failure, two rejections, versions


def test_measured_figures_do_not():
    assert "SIMULATED" not in Page(render()).text
    for chart in all_charts():
        assert "SIMULATED" not in str(figure_of(chart)[1])


def test_warnings_and_what_could_not_be_read_stand_right_after_the_answer(page):
    before = page.text[: page.text.index("P(best) is the probability")]
    assert before.index("Throughput against power") < before.index("Before you compare") < before.index("Measured ")
    assert "rank 3 at 140 GiB." in before


def test_two_trials_side_by_side_are_a_page():
    ranking, _, evidence = whole()
    page = Page(render_comparison(comparison_of(ranking, evidence)))
    assert "dp4 mbs1 on 1x4 h200_sxm against dp4 mbs2 on 1x4 h200_sxm" in page.text
    assert ["plan.micro_batch_size", "1", "2"] in page.tables[0]
    (row,) = [row for row in page.tables[1] if row[0] == "tokens_per_s"]
    assert row[1:5] == ["40.5 k/s", "44 k/s", "+3.5 k/s", "+8.6 %"], "A is the mean of two runs"
    assert row[5:] == ["+4.7 to +12.7 %", "told apart"]
    assert ["sensor_period_s", "20.0 ms", "20.0 ms"] in page.tables[2]


def test_nothing_feasible_says_what_came_closest():
    page = Page(render_report("s", DOCUMENT, ranked([trial(2, 44_000.0, 3188.0)]), []))
    assert "Best feasible configuration\nNo plan keeps every bound; loosen a bound or widen the space.\n" in page.text
    assert f"dp4 mbs2, reaches 44 k/s and fails {POWER} <= 2750 by 438 W" in page.text


@pytest.mark.parametrize("bound", ["", f"{POWER} <= 2750"])
def test_an_empty_study_is_a_small_page(bound):
    html = render_report("s", DOCUMENT, ranked([], bound), [])
    assert len(html) < 20_000  # no chart, no plotly.js
    assert "No answer yet: nothing was measured" in html


def test_no_two_plans_of_a_page_share_a_name():
    """Sequence lengths tell them apart; a table with a column of them has the plan alone."""
    pairs = [trial(1, 40_000.0), of_shorter_sequences(trial(1, 30_000.0))]
    ranking = ranked(pairs)
    assert sorted(row.label for row in ranking.trials) == ["dp4 mbs1 seq4096", "dp4 mbs1 seq512"]
    assert {row.to_json()["label"] for row in ranking.trials} == {row.label for row in ranking.trials}
    page = Page(render_report("moe", DOCUMENT, ranking, []))
    (table,) = (rows for rows in page.tables if "seq_len" in rows[0])
    assert sorted(row[table[0].index("seq_len")] for row in table[1:]) == ["4096", "512"]
    assert all("seq" not in row[table[0].index("configuration")] for row in table[1:])
    chart = pareto(ranking)
    assert chart is not None
    hovers = [text for trace in chart.figure.data for text in trace.hovertext or ()]
    assert all(any(row.label in text for text in hovers) for row in ranking.trials)

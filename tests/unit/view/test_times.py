"""The account of a study's time."""

from dataclasses import replace

import pytest
from screen import shown
from study_files import SPEC, result_of

from wattune.objective import Question
from wattune.ranking.order import Ranking, rank
from wattune.report.sections import times_section
from wattune.run import TIME_PARTS, Numbers, Run, RunStatus
from wattune.view.times import times_json, times_view

PARTS_S = dict(zip(TIME_PARTS.values(), (2.0, 1.0, 0.25, 0.75, 3.0, 1.5, 4.0, 0.5, 1.25), strict=True))
"""The time to build has that to import in it."""
LENGTH_S = sum(PARTS_S.values()) - PARTS_S["wait_time_s"] - PARTS_S["import_time_s"]
TOTAL_S = LENGTH_S + PARTS_S["wait_time_s"]


def run(repeat: int, begun_s: float, length_s: float, nodes: str = "n0", **numbers: float) -> Run:
    start_ns = int(begun_s * 1e9)
    return replace(
        result_of(),
        repeat=repeat,
        tags={"nodes": nodes},
        numbers=Numbers(**numbers),  # type: ignore[arg-type]
        start_wall_ns=start_ns,
        end_wall_ns=start_ns + int(length_s * 1e9),
    )


def ranked(*runs: Run) -> Ranking:
    return rank([(SPEC, one) for one in runs], Question.of("maximize tokens_per_s"))


def test_parts_sum_to_the_time_that_nodes_were_the_studys() -> None:
    first = run(0, 1000.0, LENGTH_S, **PARTS_S)
    second = run(1, 1000.0 + LENGTH_S + 2.0, LENGTH_S, **PARTS_S)
    beside = run(2, 1000.0, LENGTH_S, nodes="n1", **PARTS_S)
    later = run(3, 90_000.0, LENGTH_S, **PARTS_S)  # another call, the next day: the pause is nobody's
    found = times_json(ranked(later, second, beside, first))
    assert [one["run"].rpartition("-")[2] for one in found["runs"]] in (["0", "2", "1", "3"], ["2", "0", "1", "3"])
    assert found["total_s"] == pytest.approx(4 * TOTAL_S)
    assert found["measured_frac"] == pytest.approx(4.0 / TOTAL_S)
    assert found["sum"]["import_time_s"] == 1.0 and found["sum"]["build_time_s"] == 2.0
    assert found["sum"]["other_time_s"] == pytest.approx(0.0, abs=1e-6)


def test_a_wait_for_nodes_has_a_column_of_its_own_and_is_in_no_other_time() -> None:
    waited, other = run(0, 1000.0, LENGTH_S, **PARTS_S, node_wait_s=600.0), run(1, 2000.0, LENGTH_S, **PARTS_S)
    found, without = times_json(ranked(waited, other)), times_json(ranked(run(0, 1000.0, LENGTH_S, **PARTS_S), other))
    assert found["sum"].pop("node_wait_s") == 600.0 and without["sum"].pop("node_wait_s") == 0.0
    assert [one["node_wait_s"] for one in found["runs"]] == [600.0, 0.0]
    assert {**found, "runs": 0} == {**without, "runs": 0}, "neither in the sums nor in the measured share"
    text = shown(*times_view(ranked(waited, other)))
    assert "for nodes" in text and "600.0" in text
    assert "for nodes" not in str(times_view(ranked(other)))


def test_what_nobody_told_of_a_runs_time_is_named() -> None:
    lost = replace(run(0, 1000.0, 30.0, start_time_s=8.0), status=RunStatus.CRASHED, reason="a worker died")
    found = times_json(ranked(lost))
    assert found["sum"]["start_time_s"] == 8.0 and found["sum"]["other_time_s"] == pytest.approx(22.0)
    assert found["total_s"] == pytest.approx(30.0) and found["measured_frac"] == 0.0


def test_terminal_and_page_show_each_part_and_the_measured_share() -> None:
    ranking = ranked(run(0, 1000.0, LENGTH_S, **PARTS_S))
    terminal, page = shown(*times_view(ranking)), str(times_section(ranking))
    for part in TIME_PARTS:
        assert part in terminal and part in page
    for text in (terminal, page):
        assert "steps were measured in 28.6 % of 14.0 s" in " ".join(text.split()).replace("Steps", "steps")
        assert "other" not in text.replace("another", ""), "every second was told"
    untold = ranked(run(0, 1000.0, 30.0))
    assert len(times_view(untold)) == 1 and not str(times_section(untold))

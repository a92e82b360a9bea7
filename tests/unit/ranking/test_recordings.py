"""Recordings in a ranking: assessed like trials, each by itself, and what they do not share is said."""

from dataclasses import replace

import pytest

from wattune.errors import PlanError, SpaceError
from wattune.objective import Question, parse_constraint
from wattune.ranking.assessment import Verdict
from wattune.ranking.comparison import Recorded, compare
from wattune.ranking.recordings import LEAST_ENERGY, rank_recordings, recorded_of, side_of_recording

H200 = {"node": "node0", "devices": "4 x NVIDIA H200"}
POWER = "node_device_power_peak_1s_w"


def recording(
    name: str, command: str = "train.py", joules: float = 1000.0, power_w: float | None = 2500.0, **changed: object
) -> Recorded:
    facts = {"command": command.split(), "exit_code": 0, "node": "node0", "recorded": "2026-11-21T06:55:00+00:00"}
    found = recorded_of(
        name=name,
        place=f"/s/{name}",
        facts=facts,
        machine=H200,
        metrics={"total_energy_j": joules, "window_s": 10.0} | ({} if power_w is None else {POWER: power_w}),
        quality="publishable",
        quality_reasons=(),
        tags={"simulated": "false"},
    )
    return replace(found, **changed)


def test_the_least_energy_is_first_and_two_alike_share_a_rank() -> None:
    ranking = rank_recordings([recording("a", joules=1500.0), recording("b"), recording("c", joules=1005.0)])
    assert [row.of.name for row in ranking.rows] == ["b", "c", "a"]
    assert [row.rank for row in ranking.rows] == [1, 1, 3]
    probabilities = [row.best_probability for row in ranking.rows]
    assert probabilities == sorted(probabilities, reverse=True) and sum(probabilities) == pytest.approx(1.0)
    assert all(row.objective.high > row.objective.low for row in ranking.rows), "one run is never certain"


def test_the_same_command_is_never_taken_as_a_repeat() -> None:
    ranking = rank_recordings([recording("before"), recording("after", joules=900.0)])
    assert len(ranking.rows) == 2 and all(row.objective.method == "prior" for row in ranking.rows)
    assert "one command line, recorded several times" in ranking.warnings[0]


def test_bounds_decide_as_they_do_for_trials() -> None:
    bound = parse_constraint(f"{POWER} <= 2600")  # 4 % away from a sensor that may be 5 % off
    powers = {"over": 4000.0, "near": 2500.0, "w": None, "far": 1000.0}
    ranking = rank_recordings(
        [recording(name, power_w=one) for name, one in powers.items()], replace(LEAST_ENERGY, constraints=(bound,))
    )
    assert {row.of.name: row.verdict for row in ranking.rows} == {
        "far": Verdict.FEASIBLE,
        "near": Verdict.UNDECIDED,
        "over": Verdict.INFEASIBLE,
        "w": Verdict.UNKNOWN,
    }
    assert ranking.best is not None and ranking.best.of.name == "far"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (recording("b", "train.py --fast"), "2 different commands"),
        (recording("b", machine={"node": "node1", "devices": "8 x NVIDIA H100"}), "recorded on different machines"),
        (recording("b", exit_code=3), "b: its command ended with exit code 3"),
        (recording("b", exit_code=None), "b: the end of its command was not seen"),
        (recording("b", simulated=True), "simulated sensors in b alone"),
        (replace(recording("b"), result=replace(recording("b").result, quality="indicative")), "different qualities"),
    ],
)
def test_what_two_recordings_do_not_share_is_said(other: Recorded, said: str) -> None:
    assert any(said in warning for warning in rank_recordings([recording("a"), other]).warnings)


def test_a_recording_that_a_killed_recorder_left_open_is_not_taken_as_whole() -> None:
    begun = {"command": ["train.py"], "node": "node0", "closed": False}
    found = recorded_of(
        name="cut",
        place="/s/cut",
        facts=begun,
        machine=H200,
        metrics={"total_energy_j": 10.0, "window_s": 0.1, POWER: 2500.0},
        quality="indicative",
        quality_reasons=(),
        tags={},
    )
    ranking = rank_recordings([recording("whole"), found])
    assert [row.of.name for row in ranking.feasible] == ["whole"], "not the least energy, but the least work"
    assert "cut: the end of its command was not seen" in ranking.warnings


def test_what_cannot_be_ranked_is_refused() -> None:
    with pytest.raises(PlanError, match="named twice"):
        rank_recordings([recording("a"), recording("a")])
    with pytest.raises(SpaceError, match="risk 2"):
        rank_recordings([recording("a")], replace(LEAST_ENERGY, risk=2.0))
    with pytest.raises(SpaceError, match="unknown quality"):
        rank_recordings([recording("a")], least_quality="best")


def test_quality_and_where_leave_out_and_count() -> None:
    poor = replace(recording("b"), result=replace(recording("b").result, quality="indicative"))
    ranking = rank_recordings([recording("a"), poor], least_quality="publishable")
    assert [row.of.name for row in ranking.rows] == ["a"] and ranking.num_filtered == 1
    assert not rank_recordings([recording("a")], where=[parse_constraint("window_s > 60")]).rows


def test_a_comparison_of_recordings_asks_for_energy_and_says_that_work_may_differ() -> None:
    found = compare(side_of_recording(recording("a")), side_of_recording(recording("b", "other.py", 1300.0)))
    assert found.asked == "total_energy_j" and found.conclusion.startswith("B has 30.0 % more total_energy_j")
    assert found.differences == {"work": ("command: train.py", "command: other.py")}
    assert found.time is None and any("only where both do the same work" in one for one in found.warnings)
    hot = Question.of("minimize device_temp_max_c")
    assert rank_recordings([recording("a")], hot).rows[0].verdict is Verdict.UNKNOWN

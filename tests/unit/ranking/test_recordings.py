"""Recordings in a ranking: assessed like trials, each by itself, and what they do not share is said."""

from dataclasses import replace
from typing import Unpack

import pytest

from wattune.errors import PlanError, SpaceError
from wattune.ranking.assessment import RankedTrial, Verdict
from wattune.ranking.comparison import compare
from wattune.ranking.evidence import recorded_side
from wattune.ranking.order import Ranking
from wattune.ranking.sources import Asked, Source, rank_sources
from wattune.run import Recorded, Run, RunStatus

H200 = {"node": "node0", "devices": "4 x NVIDIA H200"}
POWER = "node_device_power_peak_1s_w"


def recording(
    name: str,
    command: str = "train.py",
    joules: float = 1000.0,
    power_w: float | None = 2500.0,
    *,
    quality: str = "publishable",
    simulated: bool = False,
    **changed: object,
) -> Run:
    known = {"place": f"/s/{name}", "command": tuple(command.split()), "exit_code": 0, "machine": H200, **changed}
    return Run(
        trial_id=name,
        repeat=0,
        status=RunStatus.COMPLETED,
        metrics={"total_energy_j": joules, "window_s": 10.0} | ({} if power_w is None else {POWER: power_w}),
        quality=quality,
        tags={"simulated": str(simulated).lower()},
        recorded=Recorded(**known),
    )


def ranked(*runs: Run, **asked: Unpack[Asked]) -> Ranking:
    return rank_sources([Source.of_recordings(runs)], **asked)


def names(rows: tuple[RankedTrial, ...]) -> list[str]:
    return [row.trial_id for row in rows]


def test_the_least_energy_is_first_and_two_alike_share_a_rank() -> None:
    ranking = ranked(recording("a", joules=1500.0), recording("b"), recording("c", joules=1005.0))
    assert names(ranking.feasible) == ["b", "c", "a"] and str(ranking.objective) == "minimize total_energy_j"
    assert [row.rank for row in ranking.feasible] == [1, 1, 3]
    probabilities = [row.best_probability or 0.0 for row in ranking.feasible]
    assert probabilities == sorted(probabilities, reverse=True) and sum(probabilities) == pytest.approx(1.0)
    assert all(row.objective and row.objective.high > row.objective.low for row in ranking.feasible), "never certain"


def test_energy_of_a_token_is_asked_for_where_every_recording_has_it() -> None:
    with_steps = [replace(one, metrics={**one.metrics, "energy_per_token_j": 0.01}) for one in map(recording, "ab")]
    assert str(ranked(*with_steps).objective) == "minimize energy_per_token_j"
    assert str(ranked(with_steps[0], recording("c")).objective) == "minimize total_energy_j"


def test_the_same_command_is_never_taken_as_a_repeat() -> None:
    ranking = ranked(recording("before"), recording("after", joules=900.0))
    assert len(ranking.trials) == 2
    assert all(row.objective and row.objective.method == "prior" for row in ranking.trials)
    assert any("one command line, recorded several times" in one for one in ranking.warnings)


def test_imported_logs_have_no_command_that_could_be_the_same() -> None:
    logs = [recording("a", ""), recording("b", "", joules=900.0)]
    warnings = " ".join([*ranked(*logs).warnings, *compare(*map(recorded_side, logs)).warnings])
    assert warnings.count("no command is known") == 2 and "command line" not in warnings


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (recording("b", "train.py --fast"), "2 different commands"),
        (recording("b", machine={"node": "node1", "devices": "8 x NVIDIA H100"}), "recorded on different machines"),
        (recording("b", exit_code=3), "b: its command ended with exit code 3"),
        (recording("b", exit_code=None, ended=False), "b: the end of its command was not seen"),
        (recording("b", simulated=True), "simulated and measured telemetry in one table"),
        (recording("b", quality="indicative"), "different qualities"),
    ],
)
def test_what_two_recordings_do_not_share_is_said(other: Run, said: str) -> None:
    ranking = ranked(recording("a"), other, objective=f"minimize {POWER}")
    assert any(said in warning for warning in ranking.warnings), ranking.warnings


def test_a_row_says_what_was_recorded() -> None:
    (row,) = ranked(recording("a", exit_code=0)).feasible
    assert row.label == "train.py" and row.spec.cluster.label == "1x4 NVIDIA H200"
    assert row.to_json()["recording"] == {"command": ["train.py"], "exit_code": 0, "machine": H200}


def test_a_recording_that_a_killed_recorder_left_open_is_not_taken_as_whole() -> None:
    ranking = ranked(recording("whole"), recording("cut", joules=10.0, exit_code=None, ended=False))
    assert names(ranking.feasible) == ["whole"], "not the least energy, but the least work"
    assert "cut: the end of its command was not seen" in ranking.warnings
    assert "may not have done its work" in ranking.failed[0].reason


def test_what_cannot_be_ranked_is_refused() -> None:
    with pytest.raises(PlanError, match="named twice"):
        ranked(recording("a"), recording("a"))
    with pytest.raises(SpaceError, match="risk 2"):
        ranked(recording("a"), risk=2.0)
    with pytest.raises(SpaceError, match="unknown quality"):
        ranked(recording("a"), least_quality="best")


def test_two_of_one_name_in_two_storages_are_named_by_their_folders() -> None:
    ranking = ranked(recording("a"), recording("a", place="/t/a"))
    assert sorted(names(ranking.feasible)) == ["/s/a", "/t/a"]


def test_quality_and_where_leave_out_and_count() -> None:
    ranking = ranked(recording("a"), recording("b", quality="indicative"), least_quality="publishable")
    assert names(ranking.trials) == ["a"] and ranking.num_filtered == 1
    assert not ranked(recording("a"), where=["window_s > 60"]).trials


def test_a_comparison_of_recordings_asks_for_energy_and_says_that_work_may_differ() -> None:
    found = compare(recorded_side(recording("a")), recorded_side(recording("b", "other.py", 1300.0)))
    assert found.asked == "total_energy_j" and found.conclusion.startswith("B has 30.0 % more total_energy_j")
    assert found.differences == {"work": ("command: train.py", "command: other.py")}
    assert found.time is None and any("only where both do the same work" in one for one in found.warnings)
    assert ranked(recording("a"), objective="minimize device_temp_max_c").trials[0].verdict is Verdict.UNKNOWN

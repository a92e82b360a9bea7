import csv
import io
from dataclasses import replace

import pytest
from made_report import trial

from wattune.errors import PlanError, SpaceError
from wattune.fidelity import BURST, FIDELITY, FIRST_BURST_REPEAT
from wattune.ranking.order import MOST_NAMED
from wattune.ranking.sources import Source, rank_sources
from wattune.report.spaces import coverage_of
from wattune.run import RunStatus
from wattune.view.files import ranking_csv, ranking_table


def source(name: str, objective: str | None = "maximize tokens_per_s", *constraints: str) -> Source:
    return Source(name=name, results=[], objective=objective, constraints=constraints, place=f"/there/{name}")


def test_studies_that_agree_are_ranked_by_what_they_agree_on():
    ranking = rank_sources([source(name, "minimize energy_per_token_j", "mfu_frac > 0.3") for name in ("a", "b")])
    assert (str(ranking.objective), [*map(str, ranking.constraints)]) == (
        "minimize energy_per_token_j",
        ["mfu_frac > 0.3"],
    )
    assert ranking.studies == ("a", "b")


def test_studies_that_differ_want_to_be_told():
    up, out = source("up", "maximize tokens_per_s", "mfu_frac > 0.3"), source("out", "maximize mfu_frac")
    with pytest.raises(SpaceError, match=r"(?s)objectives differ.*up: maximize tokens_per_s.*--objective"):
        rank_sources([up, out])
    with pytest.raises(SpaceError, match=r"(?s)constraints differ.*out: none.*--constraint"):
        rank_sources([up, out], objective="maximize mfu_frac")
    ranking = rank_sources([up, out], objective="maximize mfu_frac", constraints=[])
    assert (str(ranking.objective), ranking.constraints) == ("maximize mfu_frac", ())


def test_a_study_nobody_knows_the_objective_of_wants_one():
    with pytest.raises(PlanError, match=r"/there/a has no objective; pass --objective"):
        rank_sources([source("a", None)])
    assert rank_sources([source("a", None)], objective="maximize mfu_frac").trials == ()


def test_what_cannot_be_read_is_named_with_its_study_and_counted():
    lost = {f"{number:012x}-0": f"/there/{number}: gone" for number in range(12)}
    ranking = rank_sources([source("a"), replace(source("b"), unreadable=lost)])
    assert [one["name"] for one in ranking.to_json()["unreadable"]] == [f"b:{number:012x}-0" for number in range(12)]
    assert ranking.warnings[0] == "left out: /there/0: gone"
    assert ranking.warnings[MOST_NAMED] == "2 more cannot be read; --json and --csv list them all"
    assert "12 unreadable left out" in ranking.note
    rows = list(csv.DictReader(io.StringIO(ranking_csv(ranking))))
    assert [(row["verdict"], row["trial_id"]) for row in rows] == [("unreadable", f"b:{n:012x}-0") for n in range(12)]
    assert ranking_table(ranking).schema.metadata[b"wattune.unreadable"].decode().count("gone") == 12


def test_one_study_twice_is_an_error():
    with pytest.raises(PlanError, match="name each study once"):
        rank_sources([source("a"), source("a")])


def test_a_burst_counts_as_no_measurement_of_the_space():
    bursts = [trial(number, 70.0, repeat=FIRST_BURST_REPEAT, tags={FIDELITY: BURST}) for number in (1, 2, 4)]
    broken = trial(4, 0.0, status=RunStatus.CRASHED)
    results = [trial(1, 100.0), *bursts, broken]
    listed = frozenset(trial(number, 1.0)[0].trial_id for number in (1, 2, 4, 8))
    (share,) = rank_sources([replace(source("a"), results=results, candidates=listed)]).space
    assert (share.num_measured, share.num_burst, share.num_failed) == (1, 1, 1)
    assert str(share) == "measured 1 of 4 trials of the space (25.0 %), 1 more only in a burst, 1 more failed"


def test_the_share_of_a_space_counts_failures_as_the_ranking_and_the_report_do():
    """Of one trial a repeat crashed, of another one only its measurement was invalid."""
    results = [trial(number, 100.0) for number in (1, 2, 4)]
    results.append(trial(1, 0.0, repeat=1, status=RunStatus.CRASHED))
    results.append(trial(2, 0.0, repeat=1, status=RunStatus.INVALID))
    listed = frozenset(spec.trial_id for spec, _ in results)
    ranking = rank_sources([replace(source("a"), results=results, candidates=listed)])
    found = coverage_of(ranking, [{"status": "kept", "trial_id": one} for one in listed])
    (share,) = ranking.space
    assert (share.num_measured, share.num_failed) == (found["measured"], found["failed"]) == (2, 1)
    assert len(ranking.failed) == 1

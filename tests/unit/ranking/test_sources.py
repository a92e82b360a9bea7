import pytest

from wattune.errors import PlanError, SpaceError
from wattune.ranking.sources import Source, rank_sources


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
    with pytest.raises(PlanError, match=r"/there/a does not say what it is after; give --objective"):
        rank_sources([source("a", None)])
    assert rank_sources([source("a", None)], objective="maximize mfu_frac").trials == ()


def test_one_study_twice_is_an_error():
    with pytest.raises(PlanError, match="name each once"):
        rank_sources([source("a"), source("a")])

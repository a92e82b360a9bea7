"""Tables of a frontier and of suggestions: readable on a narrow terminal, and no figure of one kind among the other."""

import io
from dataclasses import replace

import pytest
from decided_study import POWER, write_study
from rich.console import Console

from wattune import api
from wattune.view.console import show
from wattune.view.decisions import frontier_view, names_apart, suggestions_view


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("storage")
    return write_study(path, lambda s: s.plan.micro_batch_size in (1, 8), constraints=[f"{POWER} <= 1200"])


def printed(view, found, width: int) -> list[str]:
    out = io.StringIO()
    show(Console(file=out, width=width, markup=False), *view(found))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 160])
def test_no_line_is_wider_than_the_terminal(study, width) -> None:
    lines = printed(frontier_view, api.frontier(study), width)
    lines += printed(suggestions_view, api.suggest(study, budget="1m"), width)
    assert max(map(len, lines)) <= width


def test_a_value_that_no_plan_holds_and_a_tie_are_said(study) -> None:
    text = "\n".join(printed(frontier_view, api.frontier(study, vary=f"{POWER} <= 100..1300 step 600"), 160))
    assert "none holds every bound" in text and "none is likely feasible" in text and "100 W" in text


def test_a_small_probability_reads_as_in_the_ranking(study) -> None:
    """P = 0.007 was `<0.01` in `rank` and 0.01 in `frontier`."""
    found = api.frontier(study)
    points = [replace(one, best=one.best and replace(one.best, best_probability=0.007)) for one in found.points]
    lines = printed(frontier_view, replace(found, points=tuple(points)), 160)
    assert any(one.best for one in points) and any("<0.01" in line for line in lines)


def test_warnings_are_printed(study) -> None:
    found = replace(api.frontier(study), warnings=("tokens_per_s of different work in one table",))
    assert "note: tokens_per_s of different work in one table" in printed(frontier_view, found, 160)


def test_a_reason_for_nothing_stands_alone(study) -> None:
    (line,) = printed(suggestions_view, api.suggest(study, budget="1s"), 160)
    assert line == "nothing fits in 1 s: the shortest trial takes about 20 s"


def test_plans_of_several_engines_are_told_apart(study) -> None:
    """Megatron's and torch's `mbs4 fp8` had one name in both tables."""
    found = api.suggest(study, budget="1m")
    listed = [replace(one, spec=replace(one.spec, engine="deepspeed")) for one in found.listed[:1]]
    assert listed and found.listed[0].spec.engine == "torch"
    both = replace(found, listed=(*listed, *found.listed))
    lines = printed(suggestions_view, both, 200)
    assert any("deepspeed" in line for line in lines) and any(" torch " in line for line in lines)
    assert not any(" torch " in line.partition("may change")[0] for line in printed(suggestions_view, found, 200))
    one = found.listed[0].spec
    assert names_apart([one, replace(one, engine="megatron")])(one, "mbs4") == "torch mbs4"
    assert names_apart([one])(one, "mbs4") == "mbs4"

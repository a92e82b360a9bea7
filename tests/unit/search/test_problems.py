"""Problems of a file in words: the place, the value that was written, the allowed values, the remedy."""

import math
from typing import Annotated, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from wattune.search.problems import got, problems_of, refuse


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    count: Annotated[int, Field(ge=1, le=9)] = 1
    word: str = ""


def _even(values: list[int]) -> list[int]:
    if odd := [((index,), "is odd; use an even one") for index, value in enumerate(values) if value % 2]:
        raise refuse(odd)
    return values


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    inner: Inner = Inner()
    many: list[Inner] = []
    numbers: Annotated[list[int], AfterValidator(_even)] = []
    ratio: float = 1.0


def problems(document: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(document)
    return problems_of(caught.value, document, Outer)


@pytest.mark.parametrize(
    ("document", "lines"),
    [
        ({}, ["name: missing; add it"]),
        ({"name": "a", "nmae": 1}, ['nmae: unknown key; did you mean "name"?']),
        ({"name": "a", "inner": {"cuont": 1}}, ['inner.cuont: unknown key; did you mean "count"?']),
        ({"name": "a", "many": [{}, {"cuont": 1}]}, ['many[1].cuont: unknown key; did you mean "count"?']),
        ({"name": "a", "inner": {"count": 10}}, ["inner.count: got 10, allowed: at most 9"]),
        ({"name": "a", "many": [{"count": 0}]}, ["many[0].count: got 0, allowed: at least 1"]),
        ({"name": "a", "numbers": [2, 3, 5]}, [f"numbers[{index}]: is odd; use an even one" for index in (1, 2)]),
        ({"name": "a", "inner": None}, ["inner: got nothing, allowed: a mapping"]),
        ({"name": "a", 3: 1}, ["file: the key 3 is not a text; quote it if it is meant"]),
        (
            {"name": 1, "ratio": "2"},
            ["name: got 1, allowed: text", 'ratio: got the text "2", allowed: a number; this is text to YAML, write 2'],
        ),
    ],
)
def test_every_problem_is_a_line_with_its_path(document: Any, lines: list[str]) -> None:
    assert problems(document) == lines


def test_a_value_that_is_long_is_cut_and_one_that_is_huge_is_measured() -> None:
    assert len(got("x" * 5000, "an integer")) < 120
    assert got(2**70, "at most 9") == "got an integer of 71 bits, allowed: at most 9"
    assert got([], "text") == "got an empty list, allowed: text" and got([1], "text") == "got a list, allowed: text"
    assert got({}, "text") == "got a mapping, allowed: text" and got(None, "text") == "got nothing, allowed: text"


def test_a_word_that_yaml_reads_as_a_boolean_is_explained() -> None:
    assert got(True, "text").endswith("YAML reads yes, no, on and off as true and false, so quote a text")
    assert got(True, "an integer") == "got the boolean true, allowed: an integer"


@given(st.floats(1e-8, 1e14).map(lambda value: f"{value:.5e}") | st.integers(-(10**14), 10**14).map(str))
def test_the_number_a_text_means_is_given_as_yaml_reads_it(text: str) -> None:
    said = got(text, "a number")
    start, found, written = said.partition("; this is text to YAML, write ")
    if float(text) and not found:
        pytest.fail(said)
    read = yaml.safe_load(written)
    assert isinstance(read, int | float) and not isinstance(read, bool)
    assert math.isclose(read, float(text), rel_tol=1e-12)
    assert start == f'got the text "{text}", allowed: a number'


@given(st.sampled_from(["nan", "inf", "-inf", "1e999", "1e-30", "1e40", "soon", "", "_", "0x1F", "1,000"]))
def test_a_text_that_means_no_plain_number_gets_no_remedy(text: str) -> None:
    assert "write" not in got(text, "a number")


@given(st.integers(-(10**6), 10**6))
def test_a_whole_number_with_a_point_is_given_without(value: int) -> None:
    assert got(float(value), "an integer").endswith(f"; write {value}")
    assert "write" not in got(value + 0.5, "an integer")

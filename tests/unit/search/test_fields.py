"""Reading everything at once: what is left of a mapping without its wrong keys, and places in shortened lists."""

from typing import Annotated, Any

import pytest
from pydantic import ValidationError

from wattune.field_types import Count
from wattune.search.fields import ALONE, Entry, Path, in_file, one_of, repaired, repetitions
from wattune.search.problems import problems_of


class Inner(Entry):
    """A mapping inside."""

    low: Count = 1
    """Lower."""
    high: Count = 9
    """Higher."""

    def problems_as_a_whole(self, context: Any) -> list[tuple[Path, str]]:
        """Finds bounds in the wrong order."""
        return [(("high",), f"got {self.high}, below low={self.low}")] if self.high < self.low else []


class Outer(Entry):
    """A mapping with lists of others."""

    stand_ins = {"word": "a"}  # noqa: RUF012 - a class of a test

    word: Annotated[str, one_of(("a", "b"))]
    """A word."""
    inner: Annotated[list[Inner], *ALONE] = []  # noqa: RUF012
    """Mappings."""

    def problems_as_a_whole(self, context: Any) -> list[tuple[Path, str]]:
        """Finds entries of the same lower bound."""
        lows = [str(one.low) for one in self.inner]
        return [(("inner", *path), text) for path, text in repetitions(lows)]


def problems(document: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(document)
    return problems_of(caught.value, document, Outer)


@pytest.mark.parametrize(
    ("document", "lines"),
    [
        ({"word": "c", "inner": {"low": 5, "high": 3}}, ["word: unknown value", "inner.high: got 3, below low=5"]),
        ({"word": "a", "inner": {"low": 5, "high": 3, "hig": 1}}, ["inner.hig: unknown key", "inner.high: got 3"]),
        ({"inner": [{"low": 2}, {"low": 2}]}, ["word: missing", "inner[1]: the same as entry 0"]),
        ({"word": "a", "inner": [{"lw": 1}, {"low": 2}, {"low": 2}]}, ["inner[0].lw", "inner[2]: the same as entry 1"]),
        ({"word": "a", "inner": [3, {"low": 2}, {"low": 2}]}, ["inner[0]: got 3", "inner[2]: the same as entry 0"]),
        ({"word": 1, "inner": 2}, ["word: got 1", "inner: got 2"]),
        ({"word": "a", "inner": {"low": 0, "high": 0}}, ["inner.low: got 0", "inner.high: got 0"]),
    ],
    ids=range(7),
)
def test_every_problem_is_found_in_one_reading(document: Any, lines: list[str]) -> None:
    found = problems(document)
    assert len(found) == len(lines)
    for line in lines:
        assert any(one.startswith(line) for one in found), (line, found)


def test_what_follows_from_a_wrong_key_is_not_a_problem() -> None:
    """`high` may be right once `low` is."""
    assert problems({"word": "a", "inner": {"low": "5", "high": 3}}) == [
        'inner.low: got the text "5", allowed: an integer; this is text to YAML, write 5'
    ]


def test_a_repair_leaves_what_is_right_in_its_place() -> None:
    value = {"word": "c", "inner": [{"low": 1}, {"low": "2"}, {"low": 3}]}
    wrong: list[Path] = [("word",), ("inner", 1, "low")]
    document, places = repaired(value, wrong, {"word": "a"}, inside=False) or ({}, {})
    assert document == {"word": "a", "inner": [{"low": 1}, {"low": 3}]} and places == {"inner": [0, 2]}
    assert in_file(("inner", 1, "low"), places) == ("inner", 2, "low")
    document, _ = repaired(value, wrong, {"word": "a"}, inside=True) or ({}, {})
    assert document == {"word": "a", "inner": [{"low": 1}, {}, {"low": 3}]}


def test_what_is_no_mapping_is_not_repaired() -> None:
    assert repaired(3, [("a",)], {}, inside=True) is None
    assert repaired({"a": 1}, [()], {}, inside=True) is None

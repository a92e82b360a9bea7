"""JSON and YAML read with bounds."""

import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.storage.documents import MOST_DEPTH, json_text, parse_json, parse_yaml, yaml_tree

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_what_is_written_is_json_of_finite_numbers(data: object) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    json.loads(json_text(data), parse_constant=refuse)


def test_a_number_that_json_does_not_have_is_null_and_the_rest_stays() -> None:
    assert json.loads(json_text({"a": [math.nan, 1.5], "b": (math.inf, "x")})) == {"a": [None, 1.5], "b": [None, "x"]}


@pytest.mark.parametrize("text", ["{", b"\xff", "[" * 100_000, "[" * (MOST_DEPTH + 2) + "]" * (MOST_DEPTH + 2)])
def test_what_is_no_json_or_too_deep_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)


def test_levels_up_to_the_bound_are_read() -> None:
    assert parse_json("[" * MOST_DEPTH + "]" * MOST_DEPTH)


def bomb(entry: str) -> str:
    lines = (f"x{level}: &x{level}\n  {entry} [{', '.join([f'*x{level - 1}'] * 12)}]" for level in range(1, 12))
    return "\n".join(["x0: &x0 {a: 1}", *lines])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (bomb("<<:"), "with all aliases written out"),
        (bomb("y:"), "with all aliases written out"),
        ("a: &a [*a]", "holds itself"),
        ("x: " + "1:" * 50_000 + "1", "a number of 100,001 characters"),
        ("[" * 50_000, "levels"),
        ("x" * 300_000, "300,000 characters, allowed"),
        ("x: !!timestamp 2001-99-99", r".+"),
        ("x: !!binary é", r".+"),
        ("x: !!python/object:os.system {}", "could not determine a constructor"),
        ("? {a: 1}\n: 1", "unhashable key"),
        ("{", r".+"),
    ],
)
def test_hostile_yaml_is_refused_at_once(text: str, words: str) -> None:
    start_s = time.process_time()
    with pytest.raises(ValueError, match=words):
        parse_yaml(text)
    assert time.process_time() - start_s < 10


def test_merges_and_aliases_of_a_person_are_read() -> None:
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: *a") == {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 1}}
    assert yaml_tree("") == (None, None)

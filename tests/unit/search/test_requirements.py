"""Requirements of a space: products of numbers and fields on both sides, names, and alternatives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.pace import least_cpu_s

from wattune.errors import SpaceError
from wattune.objective import Field
from wattune.search.requirements import parse_requirement

FIELDS = {
    "tp": Field(kind=int),
    "pp": Field(kind=int),
    "world_size": Field(kind=int),
    "dtype": Field(kind=str, choices=("bf16", "fp32")),
}


def test_one_of_the_alternatives_is_enough_and_what_fails_is_said_with_its_numbers() -> None:
    wanted = parse_requirement("2 * tp * pp <= world_size or dtype  == fp32", FIELDS)
    assert str(wanted) == "2 * tp * pp <= world_size or dtype == fp32"
    assert wanted.fields == ("tp", "pp", "world_size", "dtype")
    values = {"tp": 2, "pp": 2, "world_size": 4, "dtype": "bf16"}
    assert wanted.problem({**values, "world_size": 8}) is None
    assert wanted.problem({**values, "dtype": "fp32"}) is None
    assert wanted.problem(values) == (
        '"2 * tp * pp <= world_size or dtype == fp32" does not hold at tp=2, pp=2, world_size=4, dtype=bf16; change '
        "these values, or the requirement"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp", "is not a requirement"),
        ("1 <= 2", "names no field"),
        ("tp <= 2 * dp", '"dp" in "tp <= 2 * dp" is no field'),
        ("tp <= dtype", "is a name, which is no number"),
        ("dtype == fp8", 'dtype is never "fp8"'),
        ("tp <= 2 * (pp)", 'it has "(" at character 11, allowed: a field or a number'),
        ("tp <= " + "2 * " * 999 + "2", "is longer than"),
        ("tp == 8 and", "it ends too early, allowed: a field or a number"),
        ("tp == 8 pp == 1", 'it has "pp" at character 9, allowed: and, or, ->, or the end'),
        ("tp = 8", 'it has "=" at character 4'),
        ("(tp == 8 or pp == 1", "it ends too early, allowed: )"),
        ("tp in 8", 'it has "8" at character 7, allowed: a list, such as [2, 4]'),
        ("tp in [8, 4", "allowed: a comma or ]"),
        ("dtype in [bf16, fp9]", 'dtype is never "fp9"'),
        ("dtype < bf16", "dtype is a name, which has no order; use ==, != or in"),
        ("dtype * 2 == 4", 'it has "*" at character 7, allowed: ==, != or in, as dtype is a name'),
        ("dtype == or tp == 1", 'it has "or" at character 10, allowed: a name'),
        ("1 <= tp <= 8", 'it has "<=" at character 9'),
        ("__import__('os')", '"__import__" in'),
        ("(" * 30 + "tp == 1" + ")" * 30, "at most 20 parentheses"),
        ('"tp" == 8', 'it has "tp" at character 2'),
    ],
)
def test_what_cannot_be_used_is_refused(text: str, said: str) -> None:
    with pytest.raises(SpaceError) as refused:
        parse_requirement(text, FIELDS)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("tp == 8 and pp == 1 or tp == 4 and pp == 2", {(8, 1), (4, 2)}),
        ("tp == 8 -> pp == 1", {(8, 1), (4, 1), (4, 2), (2, 1), (2, 2)}),
        ("tp in [2, 4] and not_there != 1", None),
        ("tp in [2, 4]", {(2, 1), (2, 2), (4, 1), (4, 2)}),
        ("(tp == 8 or tp == 4) and pp in [2]", {(8, 2), (4, 2)}),
        ("tp == 8 -> pp == 2 -> tp == 2", {(8, 1), (4, 1), (4, 2), (2, 1), (2, 2)}),
        ("tp * pp in [8, 2 * pp]", {(8, 1), (4, 2), (2, 1), (2, 2)}),
        ('dtype in [bf16, "fp32"] -> (tp <= 2)', {(2, 1), (2, 2)}),
        ("tp==8->pp==1", {(8, 1), (4, 1), (4, 2), (2, 1), (2, 2)}),
    ],
)
def test_the_grammar_means_what_logic_does(text: str, kept: set[tuple[int, int]] | None) -> None:
    if kept is None:
        with pytest.raises(SpaceError, match="not_there"):
            parse_requirement(text, FIELDS)
        return
    wanted = parse_requirement(text, FIELDS)
    values = [{"tp": tp, "pp": pp, "world_size": 8, "dtype": "bf16"} for tp in (2, 4, 8) for pp in (1, 2)]
    assert {(one["tp"], one["pp"]) for one in values if wanted.holds(one)} == kept


def test_thousands_are_read_and_asked_in_seconds() -> None:
    texts = [f"tp == {n} -> (pp in [1, 2] or world_size * pp <= {n})" for n in range(5_000)]
    values = {"tp": 4_999, "pp": 2, "world_size": 8, "dtype": "bf16"}
    read = [parse_requirement(text, FIELDS) for text in texts]
    assert all(one.problem(values) is None for one in read)
    assert least_cpu_s(lambda: [parse_requirement(text, FIELDS) for text in texts], tries=1) < 2
    assert least_cpu_s(lambda: [one.holds(values) for _ in range(10) for one in read], tries=1) < 1


LEAVES = ["tp == 2", "pp <= 1", "dtype == bf16", "tp in [1, 4]"]
AS_PYTHON = {"and": "({} and {})", "or": "({} or {})", "->": "(not {} or {})"}


def joined(inner: st.SearchStrategy[tuple[str, str]]) -> st.SearchStrategy[tuple[str, str]]:
    def one(left: tuple[str, str], sign: str, right: tuple[str, str]) -> tuple[str, str]:
        return f"({left[0]} {sign} {right[0]})", AS_PYTHON[sign].format(left[1], right[1])

    return st.builds(one, inner, st.sampled_from([*AS_PYTHON]), inner)


@given(st.recursive(st.sampled_from([(one, f"({one})".replace("bf16", "'bf16'")) for one in LEAVES]), joined))
def test_it_agrees_with_pythons_own_logic(texts: tuple[str, str]) -> None:
    wanted = parse_requirement(texts[0], FIELDS)
    for tp in (1, 2):
        for pp in (1, 2):
            for dtype in ("bf16", "fp32"):
                values = {"tp": tp, "pp": pp, "world_size": 8, "dtype": dtype}
                assert wanted.holds(values) is eval(texts[1], {"__builtins__": {}}, values)

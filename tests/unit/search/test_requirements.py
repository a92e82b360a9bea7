"""Requirements of a space: products of numbers and fields on both sides, names, and alternatives."""

import pytest

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
    assert wanted.fields == {"tp", "pp", "world_size", "dtype"}
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
        ("tp <= 2 * (pp)", 'has "(pp)" where a field or a number stands'),
        ("tp <= " + "2 * " * 99 + "2", "is longer than"),
    ],
)
def test_what_cannot_be_used_is_refused(text: str, said: str) -> None:
    with pytest.raises(SpaceError) as refused:
        parse_requirement(text, FIELDS)
    assert said in str(refused.value)

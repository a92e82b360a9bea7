"""Fields of dataclasses that were read from files: what is refused."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from wattune.field_types import LARGEST_COUNT, Bounds, default_of, require_kinds


@dataclass(frozen=True)
class Part:
    count: int = 1
    share: float = 0.5
    name: str | None = None
    names: tuple[str, ...] = ()
    heat: Annotated[float, Bounds(gt=0)] | None = None


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Part(count=True), "count: got True, allowed: int"),
        (Part(count=LARGEST_COUNT + 1), "count: got 1000000001, allowed: up to"),
        (Part(count=0), "count: got 0"),
        (Part(share=float("inf")), "share: got inf, allowed: a finite number"),
        (Part(share=-1.0), "share: got -1.0"),
        (Part(name=3), "name: got 3, allowed: str or NoneType"),  # type: ignore[arg-type]
        (Part(heat=True), "heat: got True, allowed: float or int or NoneType"),
        (Part(names=(-1,)), "names: got"),  # type: ignore[arg-type]
    ],
)
def test_a_field_holds_what_its_annotation_says(part, words):
    with pytest.raises((TypeError, ValueError)) as caught:
        require_kinds(part)
    assert words in str(caught.value)


def test_sound_fields_pass_and_defaults_are_known():
    require_kinds(Part(count=3, share=1, name="a", names=("b",)))
    assert [default_of(one) for one in Part.__dataclass_fields__.values()] == [1, 0.5, None, (), None]

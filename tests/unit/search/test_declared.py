"""Entries take types, bounds, defaults and meanings from a dataclass, and keep what they declare themselves."""

from dataclasses import dataclass, field
from typing import Annotated

import pytest
from pydantic import ValidationError

from wattune.field_types import Bounds, Count, OneOf
from wattune.search.declared import keys_of
from wattune.search.fields import Entry
from wattune.search.problems import problems_of


@dataclass(frozen=True)
class Oven:
    name: str
    """Its name."""
    trays: Count
    """Trays
    that it has."""
    heat: Annotated[float, Bounds(gt=0, lt=300)] | None = None
    modes: tuple[Annotated[str, OneOf(("top", "bottom"))], ...] = ("top",)
    """Its heaters."""
    labels: tuple[str, ...] = ()
    source: str = field(default="", compare=False)


@keys_of(Oven, optional=("trays",), examples={"trays": 3})
class OvenEntry(Entry):
    """An oven."""

    name: str = "mine"
    """Another meaning."""


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"trays": 0}, "trays: got 0, allowed: at least 1"),
        ({"trays": True}, "trays: got the boolean true, allowed: an integer"),
        ({"heat": 300.0}, "heat: got 300.0, allowed: less than 300"),
        ({"modes": ["top", "top"]}, "modes[1]: the same as entry 0; remove one"),
        ({"modes": ["topp"]}, 'modes[0]: unknown value "topp"; did you mean "top"?'),
        ({"modes": []}, "modes: got an empty list, allowed: at least 1 entry"),
        ({"labels": [""]}, "labels[0]: "),
        ({"source": "x"}, "source: unknown key"),
    ],
)
def test_what_a_field_cannot_be_is_said(document: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        OvenEntry.model_validate(document)
    (line,) = problems_of(caught.value, document, OvenEntry)
    assert line.startswith(words)

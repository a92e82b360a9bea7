"""Fields of dataclasses that were read from files: they hold what their annotations say."""

import math
from dataclasses import MISSING, Field, fields
from functools import lru_cache
from typing import Any, Final, get_args


def default_of(of: "Field[Any]") -> Any:
    """Returns the default of a dataclass field, made by its factory where it has one; `MISSING` where it has none."""
    return of.default if of.default_factory is MISSING else of.default_factory()


LARGEST_COUNT: Final = 10**9
"""Largest integer of a specification: above any real one, and small enough for all arithmetic on it."""

_FROM_ZERO: Final = ("num_experts", "num_experts_per_token", "max_positions")
"""Counts that may be 0."""

_OF_KIND: Final[dict[str, tuple[type, ...]]] = {
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
    "tuple[int, ...]": (tuple,),
    "tuple[str, ...]": (tuple,),
    "None": (type(None),),
}


@lru_cache(maxsize=16)
def _kinds(kind: type[Any]) -> dict[str, tuple[type, ...]]:
    """Returns the types that the plain fields of a dataclass may hold, by their annotations."""
    text = {each.name: each.type if isinstance(each.type, str) else _annotation(each.type) for each in fields(kind)}
    parts = {name: said.split(" | ") for name, said in text.items()}
    return {
        name: tuple(one for part in said for one in _OF_KIND[part])
        for name, said in parts.items()
        if all(part in _OF_KIND for part in said)
    }


def _annotation(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def require_kinds(part: Any) -> None:
    """Makes sure that every plain field of a dataclass that was read from a file holds what its annotation says.

    Raises:
        TypeError: A field holds another type.
        ValueError: A number is not finite, negative, or larger than any real one.
    """
    for name, kinds in _kinds(type(part)).items():  # type: ignore[arg-type]  # a class is hashable
        value = getattr(part, name)
        if type(value) not in kinds:
            raise TypeError(f"{name}: got {str(value)[:60]}, allowed: {' or '.join(kind.__name__ for kind in kinds)}")
        if type(value) is int and not (name not in _FROM_ZERO) <= value <= LARGEST_COUNT:
            raise ValueError(f"{name}: got {str(value)[:60]}, allowed: up to {LARGEST_COUNT:,}")
        if type(value) is float and not 0 <= value < math.inf:
            raise ValueError(f"{name}: got {value}, allowed: a finite number of at least 0")
        if type(value) is tuple and not all(type(one) is str or 0 <= one <= LARGEST_COUNT for one in value):
            raise ValueError(f"{name}: got {str(value)[:60]}, allowed: names, or integers of at least 0")

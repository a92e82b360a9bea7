"""Fields of dataclasses that were read from files: they hold what their annotations say."""

import math
from dataclasses import MISSING, Field, dataclass, fields
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval


def default_of(of: "Field[Any]") -> Any:
    """Returns the default of a dataclass field, made by its factory where it has one; `MISSING` where it has none."""
    return of.default if of.default_factory is MISSING else of.default_factory()


LARGEST_COUNT: Final = 10**9
"""Largest integer of a specification: above any real one, and small enough for all arithmetic on it."""

LARGEST_WORLD: Final = 10**6
"""Most ranks of a cluster, layers of a model, and any degree. Planning lists ranks, stages and layers one by one."""


Bounds = Interval
"""Bounds of a number (`ge gt le lt`), checked and described where a file gives it (`wattune.search.declared`)."""


@dataclass(frozen=True, slots=True)
class OneOf:
    """Names that a text may be."""

    names: tuple[str, ...]


_NO_BOUNDS: Final = Bounds()

Count = Annotated[int, Bounds(ge=1, le=LARGEST_COUNT)]
CountOrZero = Annotated[int, Bounds(ge=0, le=LARGEST_COUNT)]
Size = Annotated[int, Bounds(ge=1, le=LARGEST_WORLD)]
Positive = Annotated[float, Bounds(gt=0)]
NotNegative = Annotated[float, Bounds(ge=0)]


@lru_cache(maxsize=16)
def _bounds(kind: type[Any]) -> dict[str, Bounds]:
    """Returns the bounds that the annotations of a dataclass give its numbers."""
    hints = {
        name: getattr(hint, "__metadata__", ()) for name, hint in get_type_hints(kind, include_extras=True).items()
    }
    return {name: one for name, found in hints.items() for one in found if isinstance(one, Bounds)}


@lru_cache(maxsize=16)
def _kinds(kind: type[Any]) -> dict[str, tuple[type, ...]]:
    """Returns the types that the plain fields of a dataclass may hold, by their annotations."""
    found = {name: _types(hint) for name, hint in get_type_hints(kind).items()}
    return {each.name: found[each.name] for each in fields(kind) if found[each.name]}


def _types(hint: Any) -> tuple[type, ...]:
    """Returns the types of a plain annotation; none where it is not plain."""
    if get_origin(hint) in (Union, UnionType):
        parts = [_types(one) for one in get_args(hint)]
        return tuple(one for part in parts for one in part) if all(parts) else ()
    if get_origin(hint) is tuple:
        return (tuple,) if get_args(hint)[0] in (int, str) else ()
    return {int: (int,), float: (float, int), bool: (bool,), str: (str,), NoneType: (NoneType,)}.get(hint, ())


def require_kinds(part: Any) -> None:
    """Makes sure that every plain field of a dataclass that was read from a file holds what its annotation says.

    Raises `TypeError`: a field holds another type, `ValueError`: a number is not finite, negative, 0 where it may not
    be, or larger than any real one.
    """
    bounds = _bounds(type(part))  # type: ignore[arg-type]  # a class is hashable
    for name, kinds in _kinds(type(part)).items():  # type: ignore[arg-type]
        value, own = getattr(part, name), bounds.get(name, _NO_BOUNDS)
        if type(value) not in kinds:
            raise TypeError(f"{name}: got {str(value)[:60]}, allowed: {' or '.join(kind.__name__ for kind in kinds)}")
        if type(value) is int and not (own.ge != 0) <= value <= LARGEST_COUNT:
            raise ValueError(f"{name}: got {str(value)[:60]}, allowed: up to {LARGEST_COUNT:,}")
        if type(value) is float and (value == own.gt or not 0 <= value < math.inf):
            least = "of at least" if own.gt is None else "above"
            raise ValueError(f"{name}: got {value}, allowed: a finite number {least} 0")
        if type(value) is tuple and not all(type(one) is str or 0 <= one <= LARGEST_COUNT for one in value):
            raise ValueError(f"{name}: got {str(value)[:60]}, allowed: names, or integers of at least 0")

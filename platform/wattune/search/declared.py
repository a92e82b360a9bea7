"""Entries of a file whose keys a frozen dataclass declares: types, bounds, defaults and meanings stand there alone."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, Field, create_model

from wattune.field_types import OneOf, default_of
from wattune.search.fields import Entry, distinct, one_of

_Entry = TypeVar("_Entry", bound=Entry)


def keys_of(
    kind: type[Any], *, optional: Collection[str] = (), examples: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[type[_Entry]], type[_Entry]]:
    """Gives an entry the keys of a dataclass that it does not declare itself.

    Its `source`, the origin of its figures, is no key; `optional` ones are None where they are not given, since another
    object has their values. `examples` show what is meant.
    """

    def made(entry: type[_Entry]) -> type[_Entry]:
        hints = get_type_hints(kind, include_extras=True)
        keys: dict[str, Any] = {}
        for each in fields(kind):
            if each.name in entry.model_fields or each.name == "source":
                continue
            hint, default = _in_file(hints[each.name]), default_of(each)
            if isinstance(default, tuple):
                hint, default = Annotated[hint, Field(min_length=1)] if default else hint, list(default)
            if each.name in optional:
                hint, default = hint | None, None
            if each.name in examples:
                hint = Annotated[hint, Field(examples=[examples[each.name]])]
            keys[each.name] = hint, Field(... if default is MISSING else default)
        full = create_model(entry.__name__, __base__=entry, __doc__=entry.__doc__, __module__=entry.__module__, **keys)
        full.declared_by = kind
        return full

    return made


def _in_file(hint: Any) -> Any:
    """Returns the type of a file's value for that of a field: a list for a tuple, checked names, examples shown."""
    if get_origin(hint) is Annotated:
        own, *about = get_args(hint)
        return Annotated[(_in_file(own), *(one_of(one.names) if isinstance(one, OneOf) else one for one in about))]
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        item = Annotated[str, Field(min_length=1)] if item is str else _in_file(item)
        return Annotated[list[item], AfterValidator(distinct)]  # type: ignore[valid-type]
    if type(None) in get_args(hint):
        (own,) = (one for one in get_args(hint) if one is not type(None))
        return _in_file(own) | None
    return hint

"""Types of a search space's values: each refuses what it cannot be in words, and describes itself in JSON Schema.

One annotation says both, so that an editor's completion and wattune's messages cannot differ.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path as FilePath
from typing import Any, ClassVar, Final, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function, no_info_before_validator_function

from wattune.errors import WattuneError, closest
from wattune.search.problems import Path, refuse

FOLDER: Final = "folder"
"""Key of pydantic's validation context: the folder that relative paths of a file start in."""

JsonSchema = dict[str, Any]


class Entry(BaseModel):
    """One mapping of the file. The docstring of a field is its description in editors and on the reference page."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    declared_by: ClassVar[type[Any] | None] = None
    """The dataclass that has keys of it (`wattune.search.declared`)."""
    stand_ins: ClassVar[Mapping[str, Any]] = {}
    """Values of required keys that break no rule: they stand in for wrong ones while the rest is checked."""

    decisive: ClassVar[frozenset[str]] = frozenset()
    """Keys without which the rest means nothing. Where one is wrong, the rest is not checked as a whole."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        """Adds the docstrings of fields. They are read here, from the source: no other command waits for that."""
        found = handler(core)
        keys = handler.resolve_ref_schema(found)["properties"]
        for kind in (*cls.__mro__[: cls.__mro__.index(Entry)], *filter(None, [cls.declared_by])):
            for name, text in _meanings(kind).items():
                if name in keys and text != handler.resolve_ref_schema(keys[name]).get("description"):
                    keys[name].setdefault("description", text)
        return found

    @model_validator(mode="wrap")
    @classmethod
    def _everything_at_once(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Checks keys against each other even if some are wrong, so that one reading finds every problem.

        pydantic checks an entry as a whole only where each of its keys is valid. So the wrong ones are left out, or
        replaced, and the entry is checked again.
        """

        def whole(document: Any) -> Any:
            entry = handler(document)
            if found := entry.problems_as_a_whole(info.context):
                raise refuse(found)
            return entry

        try:
            return cast(Self, whole(value))
        except ValidationError as error:
            first = error.errors(include_url=False)
        again = [_again(one) for one in first]
        paths = [path for one in first for path in _paths(one)]
        wrong = {path[0] for path in paths if path}
        for inside in (True, False):
            repair = repaired(value, paths, cls.stand_ins, inside=inside) if not wrong & cls.decisive else None
            if repair is None:
                break
            document, places = repair
            try:
                whole(document)
            except ValidationError:  # what is left of an entry is wrong too; the next repair leaves all of it out
                continue
            except PydanticCustomError as more:
                found = [
                    (in_file(tuple(path), places), text)
                    for path, text in (more.context or {})["found"]
                    # What follows from a key that was left out may be right once that key is.
                    if path[0] not in wrong - places.keys() and not any(_named(key, text) for key in wrong)
                ]
                again += [InitErrorDetails(type=refuse(found), loc=(), input=value)] if found else []
            break
        raise ValidationError.from_exception_data(cls.__name__, again)

    def problems_as_a_whole(self, context: Any) -> list[tuple[Path, str]]:
        """Finds problems of keys that are valid one by one, each with its path below this entry."""
        del context
        return []


def _meanings(kind: type[Any]) -> dict[str, str]:
    """Returns the docstring of each field of a class."""
    (own,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(own, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(text.value.value.split())
        for field, text in pairwise(own.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def _named(key: str | int, text: str) -> bool:
    return re.search(rf"\b{re.escape(str(key))}(\.\w+)*=", text) is not None


@dataclass(frozen=True, eq=False)
class Text:
    """A text that is accepted, or replaced, by a function; `schema` is what JSON Schema says of it."""

    check: Callable[[str], Any]
    schema: JsonSchema
    is_short: bool = False
    """True where the text stands for a mapping, which may be given too: `check` makes one of it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def expanded(value: Any) -> Any:
            return self.check(value) if isinstance(value, str) else value

        if self.is_short:
            return no_info_before_validator_function(expanded, handler(source))
        return no_info_after_validator_function(self.check, handler(str))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        if self.is_short:
            return {"anyOf": [{"type": "string", **self.schema}, handler(core)]}
        return {**handler(core), **self.schema}


def named_by(
    parse: Callable[[str], object], *, names: Collection[str] = (), pattern: str = "", examples: Sequence[str] = ()
) -> Text:
    """Accepts a text that one of wattune's own functions accepts, else passes on its message.

    `names` complete it, `pattern` is what other texts look like, empty where only names are accepted.
    """

    def check(text: str) -> str:
        _pass_on(parse, text)
        return text

    return Text(check, _described(names, pattern, examples))


def parsed_by(
    parse: Callable[[str], object], *, names: Collection[str] = (), pattern: str = "", examples: Sequence[str] = ()
) -> Text:
    """Takes a text and keeps what one of wattune's own functions makes of it; passes on its message otherwise."""
    return Text(lambda text: _pass_on(parse, text), _described(names, pattern, examples))


def one_of(names: Collection[str]) -> Text:
    """Accepts a few names."""

    def check(text: str) -> str:
        if text not in names:
            raise refuse([((), f'unknown value "{text[:60]}"; {closest(text, names)}')])
        return text

    return Text(check, {"enum": list(names)})


def _pass_on(parse: Callable[[str], object], text: str) -> object:
    try:
        return parse(text)
    except WattuneError as error:
        raise refuse([((), str(error))]) from None


def _described(names: Collection[str], pattern: str, examples: Sequence[str]) -> JsonSchema:
    schema: JsonSchema = {"examples": list(examples)} if examples else {}
    if names and pattern:
        return schema | {"anyOf": [{"enum": list(names)}, {"pattern": pattern}]}
    return schema | ({"enum": list(names)} if names else {"pattern": pattern} if pattern else {})


class Alone:
    """Lets one entry of a list stand without a list around it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        del self
        return handler(source)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        listed = handler(core)
        items = listed.get("items", {})
        return {"anyOf": [items, listed]}


def listed(value: Any) -> Any:
    """Returns a list: a single value may stand without one."""
    return value if isinstance(value, list) else [value]


ALONE: Final = (BeforeValidator(listed), Alone())


EntryPlaces = Mapping[str, Sequence[int]]
"""Indices in the file of the entries of each list that lost some."""


def repaired(
    value: Any, wrong: Sequence[Path], stand_ins: Mapping[str, Any], *, inside: bool
) -> tuple[dict[str, Any], EntryPlaces] | None:
    """Returns a mapping without what is wrong in it, and where the rest of shortened lists was.

    `wrong` are the paths of what is wrong, which `inside` takes out of an entry, else the entry goes; required keys get
    `stand_ins`. None where nothing can be repaired: the value is no mapping, or is wrong as a whole.
    """
    if not isinstance(value, dict) or () in wrong:
        return None
    document: dict[str, Any] = dict(value)
    places: dict[str, list[int]] = {}
    for key in {str(path[0]) for path in wrong}:
        own = [path[1:] for path in wrong if str(path[0]) == key]
        if inside and (rest := _without(value.get(key), own)) is not None:
            document[key] = rest
            places[key] = list(range(len(rest)))
            continue
        entries, bad = value.get(key), {path[0] for path in own if path and isinstance(path[0], int)}
        if isinstance(entries, list) and () not in own and len(bad) < len(entries):
            places[key] = [index for index in range(len(entries)) if index not in bad]
            document[key] = [entries[index] for index in places[key]]
            continue
        document.pop(key, None)
        if key in stand_ins:
            document[key] = stand_ins[key]
    return document, places


def _without(entry: Any, wrong: Sequence[Path]) -> Any:
    """Returns an entry, or a list of them, without wrong keys; None where more is wrong than keys of it."""
    if isinstance(entry, list):
        by_index = {i: [path[1:] for path in wrong if path and path[0] == i] for i in range(len(entry))}
        rest = [_without(one, by_index[i]) if by_index[i] else one for i, one in enumerate(entry)]
        return None if () in wrong or None in rest else rest
    below = [path[1:] if path and isinstance(path[0], int) else path for path in wrong]  # it stands without a list
    if not isinstance(entry, dict) or not all(path and isinstance(path[0], str) for path in below):
        return None
    return {key: one for key, one in entry.items() if key not in {path[0] for path in below}}


def _paths(error: ErrorDetails) -> list[Path]:
    """Returns the paths of what an error names, from the mapping that is validated down."""
    at = tuple(error["loc"])
    if error["type"] != "refused":
        return [at]
    return [(*at, *path) for path, _ in error["ctx"]["found"]]


def in_file(path: Path, places: EntryPlaces) -> Path:
    """Returns the path in the file of a problem of a repaired mapping."""
    if len(path) > 1 and path[0] in places and isinstance(path[1], int):
        return (path[0], places[str(path[0])][path[1]], *path[2:])
    return path


def _again(error: ErrorDetails) -> InitErrorDetails:
    """Returns a problem in the form that pydantic takes it in."""
    context, kind = error.get("ctx", {}), error["type"]
    again: str | PydanticCustomError = (
        PydanticCustomError("refused", "see context", context) if kind == "refused" else kind
    )
    return InitErrorDetails(type=again, loc=tuple(error["loc"]), input=error["input"], ctx=context)


def repetitions(texts: Sequence[str]) -> list[tuple[Path, str]]:
    """Finds every entry that an earlier one equals. A repetition is always a slip."""
    first = {text: index for index, text in reversed(list(enumerate(texts)))}
    return [((i,), f"the same as entry {first[text]}; remove one") for i, text in enumerate(texts) if first[text] < i]


def distinct(values: list[Any]) -> list[Any]:
    """Accepts a list whose entries mean different things."""
    meant = [value.resolve() if hasattr(value, "resolve") else value for value in values]
    repeated = repetitions([repr(value) for value in meant])
    if repeated:
        raise refuse(repeated)
    return values


def folder_of(context: Any) -> FilePath:
    """Returns the folder that relative paths of a file start in: the file's own, else this process's."""
    return FilePath((context or {}).get(FOLDER, "."))

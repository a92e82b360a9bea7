"""Requirements of a space: conditions that every trial keeps, in a small grammar of their own.

Such as `tp * pp <= 8 or dtype == fp32`, `tp in [2, 4] and pp == 1` or `(tp == 8 or ep > 1) -> recompute == full`. From
the loosest to the tightest: `->` (where the left side holds, the right one does too), `or`, `and`, comparisons, `*`.
They are read by this module alone, and nothing of them is evaluated as code.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from wattune.errors import SpaceError, closest
from wattune.objective import COMPARE, NUMBER, Field

LONGEST_TEXT: Final = 2000
"""Most characters of one requirement."""

DEEPEST: Final = 20
"""Most parentheses inside one another."""

_TOKEN: Final = re.compile(
    r"\s*(?:(?P<sign>->|<=|>=|==|!=|<|>|[()\[\],*])|\"(?P<quoted>[^\"]*)\"|(?P<word>(?:[\w./+]|-(?!>))+)|(?P<other>\S))",
    re.ASCII,
)
_RESERVED: Final = ("and", "or", "in", "->")
_EXAMPLES: Final = 'write such as "tp * pp <= world_size", "algo in [Ring, Tree]" or "tp == 8 -> (pp == 1 or ep > 1)"'

_Item = TypeVar("_Item")
Value = int | float | str
Test = Callable[[Mapping[str, Value]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A condition that every trial of a space keeps."""

    text: str
    fields: tuple[str, ...]
    """The fields it names, in the order of the text."""
    holds: Test
    """Tells whether a configuration with these values keeps it."""

    def __str__(self) -> str:
        return self.text

    def problem(self, values: Mapping[str, Value]) -> str | None:
        """Says why a configuration does not keep it, with its numbers; None where it does."""
        if self.holds(values):
            return None
        shown = ", ".join(f"{name}={values[name]}" for name in self.fields)
        return f'"{self.text}" does not hold at {shown}; change these values, or the requirement'


def parse_requirement(text: str, fields: Mapping[str, Field]) -> Requirement:
    """Reads a requirement of a space.

    Raises `SpaceError` where the text has another form, names no field, or compares what cannot be compared. The
    message names the place.
    """
    if len(text) > LONGEST_TEXT:
        raise SpaceError(f'"{text[:60]}..." is longer than {LONGEST_TEXT} characters; write several requirements')
    reader = _Reader(" ".join(text.split()), fields)
    holds = reader.implication()
    if reader.sign:
        raise reader.refused("and, or, ->, or the end")
    if not reader.named:
        raise SpaceError(f'"{text}" names no field; {closest(text.split()[0], fields)}')
    return Requirement(text=reader.text, fields=tuple(reader.named), holds=holds)


def _either(left: Test, right: Test) -> Test:
    return lambda values: left(values) or right(values)


def _both(left: Test, right: Test) -> Test:
    return lambda values: left(values) and right(values)


class _Reader:
    """Reads a text from left to right; each method reads what its name says, and stops behind it."""

    def __init__(self, text: str, fields: Mapping[str, Field]) -> None:
        self.text, self.fields = text, fields
        self.named: dict[str, None] = {}
        self._tokens = [(found[found.lastgroup or 0], found.lastgroup, found) for found in _TOKEN.finditer(text)]
        self._at = self._depth = 0

    @property
    def sign(self) -> str:
        """The next token, if it is no quoted text; empty at the end."""
        token, kind, _ = self._tokens[self._at] if self._at < len(self._tokens) else ("", "", None)
        return "a text" if kind == "quoted" else token

    def refused(self, allowed: str) -> SpaceError:
        """Makes the error of a token that cannot stand where it does."""
        if self._at >= len(self._tokens):
            place = "ends too early"
        else:
            token, kind, found = self._tokens[self._at]
            place = f'has "{token}" at character {found.start(kind or 0) + 1}'
        return SpaceError(f'"{self.text}" is not a requirement: it {place}, allowed: {allowed}; {_EXAMPLES}')

    def _take(self, *signs: str) -> str:
        """Goes on behind the next token if it is one of some; returns it, or nothing."""
        found = self.sign
        self._at += found in signs
        return found if found in signs else ""

    def implication(self) -> Test:
        """Reads alternatives, and what follows from them."""
        left = self._joined("or")
        if not self._take("->"):
            return left
        right = self.implication()
        return lambda values: not left(values) or right(values)

    def _joined(self, word: str) -> Test:
        """Reads parts between `or`, and inside them parts between `and`."""
        found = self._part(word)
        while self._take(word):
            found = _either(found, self._part(word)) if word == "or" else _both(found, self._part(word))
        return found

    def _part(self, word: str) -> Test:
        if word == "or":
            return self._joined("and")
        if not self._take("("):
            return self._comparison()
        self._depth += 1
        if self._depth > DEEPEST:
            raise self.refused(f"at most {DEEPEST} parentheses inside one another")
        inner = self.implication()
        self._depth -= 1
        if not self._take(")"):
            raise self.refused("), and, or, ->")
        return inner

    def _comparison(self) -> Test:
        name = self.sign
        if name in self.fields and self.fields[name].kind is str:
            return self._of_name(name)
        left = self._product()
        if self._take("in"):
            several = self._listed(self._product)
            return lambda values: left(values) in [one(values) for one in several]
        if not (sign := self._take(*COMPARE)):
            raise self.refused(f"*, {' '.join(COMPARE)}, or in")
        right, compare = self._product(), COMPARE[sign]
        return lambda values: compare(left(values), right(values))

    def _of_name(self, name: str) -> Test:
        """Reads a field that is a name, and the names that it is compared with."""
        self.named[name] = None
        self._at += 1
        sign = self._take(*COMPARE, "in")
        if sign not in ("==", "!=", "in"):
            if sign:
                raise SpaceError(f'"{self.text}": {name} is a name, which has no order; use ==, != or in')
            raise self.refused(f"==, != or in, as {name} is a name")
        wanted = self._listed(lambda: self._name(name)) if sign == "in" else [self._name(name)]
        return lambda values: (str(values[name]) in wanted) is (sign != "!=")

    def _name(self, field: str) -> str:
        token, kind, _ = self._tokens[self._at] if self._at < len(self._tokens) else ("", "", None)
        if kind not in ("word", "quoted") or (kind == "word" and token in _RESERVED):
            raise self.refused("a name, in double quotes where it has other signs than letters, digits and . _ - + /")
        choices = self.fields[field].choices
        if choices and token not in choices:
            raise SpaceError(f'"{self.text}": {field} is never "{token}"; {closest(token, choices)}')
        self._at += 1
        return token

    def _listed(self, read: Callable[[], _Item]) -> list[_Item]:
        """Reads a list in brackets."""
        if not self._take("["):
            raise self.refused("a list, such as [2, 4]")
        found = [read()]
        while self._take(","):
            found.append(read())
        if not self._take("]"):
            raise self.refused("a comma or ]")
        return found

    def _product(self) -> Callable[[Mapping[str, Value]], float]:
        """Reads numbers and fields with `*` between them."""
        factors = [self._factor()]
        while self._take("*"):
            factors.append(self._factor())
        number = math.prod(one for one in factors if not isinstance(one, str))
        names: Sequence[str] = [one for one in factors if isinstance(one, str)]
        if not names:
            return lambda _values: number
        if len(factors) == 1:
            return lambda values: float(values[names[0]])
        return lambda values: math.prod((float(values[one]) for one in names), start=number)

    def _factor(self) -> float | str:
        word = self.sign
        if re.fullmatch(NUMBER, word, re.ASCII):
            self._at += 1
            return float(word)
        if word in _RESERVED or not re.fullmatch(r"[\w.\-+/]+", word, re.ASCII):
            raise self.refused("a field or a number")
        if word not in self.fields:
            raise SpaceError(f'"{word}" in "{self.text}" is no field of a configuration; {closest(word, self.fields)}')
        if self.fields[word].kind is str:
            raise SpaceError(f'"{self.text}": {word} is a name, which is no number; write such as "{word} == NAME"')
        self.named[word] = None
        self._at += 1
        return word

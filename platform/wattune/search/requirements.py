"""Requirements of a space: conditions that every trial keeps, with products on both sides, and alternatives.

Such as `tp * pp <= 8 or dtype == fp32`. They are parsed and never evaluated as code.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from wattune.errors import SpaceError, closest
from wattune.objective import COMPARE, LONGEST_TEXT, NUMBER, Condition, Field, parse_condition

_SIDES: Final = re.compile(r"(.+?)(<=|>=|==|!=|<|>)(.+)", re.ASCII)
_FACTOR: Final = re.compile(r"[\w.\-+/]+", re.ASCII)

Value = int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """Two products that are compared, or a field and a name."""

    left: tuple[Value, ...]
    """Factors: numbers, and names of fields."""
    operator: str
    right: tuple[Value, ...]
    name: str | None = None
    """The name that the field on the left is compared with; None where both sides are products."""

    def holds(self, values: Mapping[str, Value]) -> bool:
        """Tells whether a configuration with these values keeps it."""
        if self.name is not None:
            return COMPARE[self.operator](str(values[str(self.left[0])]), self.name)
        return COMPARE[self.operator](_product(self.left, values), _product(self.right, values))

    def shown(self, values: Mapping[str, Value]) -> list[str]:
        """Lists the fields it names with their values, such as `tp=2`."""
        return [f"{factor}={values[factor]}" for factor in (*self.left, *self.right) if isinstance(factor, str)]


def _product(factors: Sequence[Value], values: Mapping[str, Value]) -> float:
    return math.prod(float(values[one]) if isinstance(one, str) else one for one in factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A condition that every trial of a space keeps: one of several comparisons holds."""

    text: str
    either: tuple[Clause, ...]

    def __str__(self) -> str:
        return self.text

    @property
    def fields(self) -> frozenset[str]:
        """The fields it names."""
        return frozenset(factor for one in self.either for factor in (*one.left, *one.right) if isinstance(factor, str))

    def problem(self, values: Mapping[str, Value]) -> str | None:
        """Says why a configuration does not keep it, with its numbers; None where it does."""
        if any(one.holds(values) for one in self.either):
            return None
        shown = dict.fromkeys(text for one in self.either for text in one.shown(values))
        return f'"{self.text}" does not hold at {", ".join(shown)}; change these values, or the requirement'


def parse_requirement(text: str, fields: Mapping[str, Field]) -> Requirement:
    """Reads a requirement of a space.

    Such as `micro_batch_size <= 8`, `tp * pp <= world_size` or `nccl_algo == Ring or tp == 1`.

    Raises:
        SpaceError: The text has another form, names no field, or compares what cannot be compared.
    """
    if len(text) > LONGEST_TEXT:
        raise SpaceError(f'"{text[:60]}..." is longer than {LONGEST_TEXT} characters; write several requirements')
    parts = re.split(r"\sor\s", text)
    return Requirement(text=" ".join(text.split()), either=tuple(_clause(part, text, fields) for part in parts))


def _clause(part: str, text: str, fields: Mapping[str, Field]) -> Clause:
    found = _SIDES.fullmatch(part)
    if found is None:
        raise SpaceError(
            f'"{text}" is not a requirement; write "FIELD OP VALUE" such as "micro_batch_size <= 8", '
            '"tp * pp <= world_size" or "nccl_algo == Ring or tp == 1"'
        )
    left, sign, right = found.groups()
    name, wanted = left.strip(), right.strip()
    if name in fields and fields[name].kind is str:
        condition = parse_condition(f"{name} {sign} {wanted}", {name: fields[name]})
        assert isinstance(condition, Condition)
        return Clause(left=(name,), operator=sign, right=(), name=str(condition.value))
    sides = [_factors(side, text, fields) for side in (left, right)]
    if not any(isinstance(factor, str) for side in sides for factor in side):
        raise SpaceError(f'"{text}" names no field; {closest(name, fields)}')
    return Clause(left=sides[0], operator=sign, right=sides[1])


def _factors(side: str, text: str, fields: Mapping[str, Field]) -> tuple[Value, ...]:
    """Reads a product of numbers and fields that are numbers."""
    factors: list[Value] = []
    for word in (one.strip() for one in side.split("*")):
        if re.fullmatch(NUMBER, word, re.ASCII):
            factors.append(float(word) if any(sign in word for sign in ".eE") else int(word))
        elif not _FACTOR.fullmatch(word):
            raise SpaceError(f'"{text}" has "{word}" where a field or a number stands; write such as "tp * pp <= 8"')
        elif word not in fields:
            raise SpaceError(f'"{word}" in "{text}" is no field of a configuration; {closest(word, fields)}')
        elif fields[word].kind is str:
            raise SpaceError(f'"{text}": {word} is a name, which is no number; write such as "{word} == NAME"')
        else:
            factors.append(word)
    return tuple(factors)

"""Mutations of bytes and of plain data."""

import copy
import math
import random
from typing import Any

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 1.0, -1.5, 0.1, 2**31, 2**63, 2**64, 10**9, 10**18, 10**30, 10**400, 1e308, 1e-308,
    math.inf, -math.inf, math.nan, "", "x", "1", "none", "\x00", "\ud7ff", "é" * 40, "../../..", "x" * 5000, "1e999",
    [], {}, [[]], [None], {"x": 1}, [1, 2, 3], {"": {}}, [[[[[[[[]]]]]]]],
)  # fmt: skip

NESTED_LEVELS = 3000


def bytes_of(dice: random.Random, content: bytes) -> bytes:
    """Changes some bytes: flips, cuts, repeats, moves or overwrites them."""
    made = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 5, 20))):
        if not made:
            return bytes(dice.randbytes(dice.randrange(20)))
        at, kind = dice.randrange(len(made)), dice.randrange(8)
        if kind <= 2:
            made[at] ^= 1 << dice.randrange(8)
        elif kind == 3:
            made[at] = dice.randrange(256)
        elif kind == 4:
            del made[at : at + dice.choice((1, 3, 100, len(made)))]
        elif kind == 5:
            made[at:at] = dice.randbytes(dice.choice((1, 4, 64)))
        elif kind == 6:
            made[at:at] = made[at : at + dice.choice((4, 64, 4096))]
        else:
            made[at : at + 8] = dice.choice((b"\x00" * 8, b"\xff" * 8, b"[" * 8, b"-1e99999", b"99999999"))
    return bytes(made)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Lists the paths of all values of plain data."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(below for key, value in inside for below in places(value, (*path, key)))]


def data_of(dice: random.Random, data: Any) -> tuple[Any, str]:
    """Changes some values of plain data. Returns the data and a description of the changes."""
    made, said = copy.deepcopy(data), []
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        path = dice.choice(places(made))
        value = dice.choice(HOSTILE)
        kind = dice.randrange(10)
        if not path:
            if kind == 0:
                return value, f"all: {value!r:.40}"
            continue
        holder = made
        for key in path[:-1]:
            holder = holder[key]
        key = path[-1]
        if kind == 0:
            del holder[key]
            said.append(f"{path}: removed")
        elif kind == 1 and isinstance(holder, dict):
            holder[dice.choice(("x", "", "tp", "digest", "files", "é"))] = copy.deepcopy(value)
            said.append(f"{path}: {value!r:.40} beside it")
        elif kind == 2 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            factor = dice.choice((-1, 1000, 10**12))
            holder[key] = holder[key] * factor
            said.append(f"{path}: times {factor}")
        elif kind == 3:
            holder[key] = copy.deepcopy(dice.choice([leaf(made, other) for other in places(made)]))
            said.append(f"{path}: another value of it")
        else:
            holder[key] = copy.deepcopy(value)
            said.append(f"{path}: {value!r:.40}")
    return made, "; ".join(said)


def leaf(data: Any, path: tuple[Any, ...]) -> Any:
    """Returns the value at a path; a deep one is replaced, so that data does not hold itself many times."""
    for key in path:
        data = data[key]
    return data if len(places(data)) < 50 else None

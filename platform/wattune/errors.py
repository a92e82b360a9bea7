"""Errors of wattune. Every message says what was asked, what was found, what is allowed and what to do.

Each class takes its message alone, so that Ray can pickle it.
"""

import difflib
import heapq
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

_LEAST_START: Final = 3
"""Fewest characters of a name that the beginning of another is told by."""

MOST_PROBLEMS: Final = 100
"""Most problems of a file that are listed; the others are counted."""

LONGEST_LIST: Final = 20
"""Most names that a message lists. Of more it names the nearest ones only."""


class WattuneError(Exception):
    """A failure that wattune can explain in one message. `exit_code` is that of the command line."""

    exit_code = 1


class SpaceError(WattuneError):
    """A search space, objective, constraint or study name that cannot be used as written."""

    exit_code = 2
    problems: Sequence[str] = ()
    """Those of a file, each with its path inside it."""

    @classmethod
    def from_problems(cls, source: str, problems: Iterable[str]) -> "SpaceError":
        """Makes one error of all problems of a file; each problem begins with the path inside it."""
        listed = list(problems)
        more = [f"and {len(listed) - MOST_PROBLEMS:,} more"] if len(listed) > MOST_PROBLEMS else []
        lines = [f"{source}: {len(listed):,} problems", *(f"  {one}" for one in [*listed[:MOST_PROBLEMS], *more])]
        error = cls("\n".join(lines) if len(listed) > 1 else f"{source}: {listed[0]}")
        error.problems = listed
        return error


class PlanError(WattuneError):
    """A plan, catalog name or study that does not exist, or cannot be used as asked."""

    exit_code = 2


class NothingToTryError(PlanError):
    """A space whose every combination is rejected."""

    exit_code = 3


class EngineError(WattuneError):
    """A training engine that cannot build or run a specification."""


class NodeError(EngineError):
    """A node that cannot run what others may: it lacks a library, or its sensors do not see a device."""


class TelemetryError(WattuneError):
    """A sensor backend, sampler or recording that cannot be used."""


class ImpossibleValueError(TelemetryError):
    """A table with a value that cannot be: beyond the bounds of `wattune.schema`, or time that runs back."""


class SensorChoiceError(TelemetryError):
    """A backend, rate or simulated device that does not exist as written."""

    exit_code = 2


class TrackingError(WattuneError):
    """A tracking server or store that cannot be reached, or refuses what is sent."""


class StoreNotWritableError(TrackingError):
    """A tracking store whose file may not be written."""

    exit_code = 2


def closest(name: str, allowed: Iterable[str]) -> str:
    """Returns the remedy for an unknown name: the closest allowed one, all of them, or the nearest few of many.

    Such as ``'did you mean "tp"?'`` or ``"use one of: grid, random"``.
    """
    names = sorted(allowed)
    starting = [one for one in names if len(name) >= _LEAST_START and one.lower().startswith(name.lower())]
    if len(starting) == 1:
        return f'did you mean "{starting[0]}"?'
    likely = _alike(name, names)
    matches = difflib.get_close_matches(name, likely, n=1, cutoff=0.7)
    if matches:
        return f'did you mean "{matches[0]}"?'
    if len(names) <= LONGEST_LIST:
        return f"use one of: {', '.join(names)}"
    nearest = difflib.get_close_matches(name, likely, n=5, cutoff=0)
    return f"use one of the {len(names)} that are known, such as {', '.join(nearest)}"


def _alike(name: str, names: list[str]) -> list[str]:
    """Returns the names that share most pairs of letters with one: difflib is slow, and a file may be full of them."""
    return heapq.nlargest(10, names, key=lambda other: len(_pairs(name) & _pairs(other)) / (len(name) + len(other) + 1))


@lru_cache(maxsize=2**12)
def _pairs(name: str) -> frozenset[str]:
    return frozenset(map("".join, pairwise(f"^{name}$")))

"""The error family. Every message says what was asked, what was got, what is allowed and what to do.

Each class takes exactly its message, so an exception survives pickling on its way through Ray.
"""

import difflib
from collections.abc import Iterable
from typing import Final

LONGEST_LIST: Final = 20
"""Names a message lists before it names only the nearest ones."""


class WattuneError(Exception):
    """Any failure wattune can explain in one message; `exit_code` is what the command line ends with."""

    exit_code = 1


class SpaceError(WattuneError):
    """A search space, objective, constraint or study name that cannot be used as written."""

    exit_code = 2

    @classmethod
    def from_problems(cls, source: str, problems: Iterable[str]) -> "SpaceError":
        """One error that reports every problem of a file at once.

        Args:
            source: The file, or another name for where the input came from.
            problems: One line per problem, each beginning with the path inside the file.
        """
        listed = list(problems)
        count = "1 problem" if len(listed) == 1 else f"{len(listed)} problems"
        return cls("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in listed)]))


class PlanError(WattuneError):
    """A plan, catalog name or study that does not exist or cannot be what was asked."""

    exit_code = 2


class NothingToTryError(PlanError):
    """A space in which every combination is rejected."""

    exit_code = 3


class EngineError(WattuneError):
    """A training engine that cannot build or run a specification."""


class TelemetryError(WattuneError):
    """A sensor backend, sampler or recording that cannot be used."""


class SensorChoiceError(TelemetryError):
    """A backend, rate or simulated device that was asked for and does not exist as written."""

    exit_code = 2


class TrackingError(WattuneError):
    """A tracking server or store that cannot be reached or refuses what it is sent."""


def closest(name: str, allowed: Iterable[str]) -> str:
    """The remedy for an unknown name: the closest allowed one, or all of them, or the nearest few of many.

    Args:
        name: What was written.
        allowed: Every name that would have been accepted.

    Returns:
        Text such as ``'did you mean "tp"?'`` or ``"use one of: grid, random"``.
    """
    names = sorted(allowed)
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if matches:
        return f'did you mean "{matches[0]}"?'
    if len(names) <= LONGEST_LIST:
        return f"use one of: {', '.join(names)}"
    nearest = difflib.get_close_matches(name, names, n=5, cutoff=0)
    return f"use one of the {len(names)} that are known, such as {', '.join(nearest)}"

"""Strategies: they choose the kept candidate that is measured next."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from wattune.errors import SpaceError, closest
from wattune.trial import TrialResult, TrialSpec


def draw(seed: int, trial_id: str) -> bytes:
    """Draws a trial's place in an order: the same on every machine and version, whatever else is drawn."""
    return hashlib.sha256(f"{seed} {trial_id}".encode()).digest()


class Strategy(Protocol):
    """Proposes trials, and learns from their results, failures included."""

    learns: bool
    """True where results change later proposals. Where they do not, a study may ask for everything at once."""

    def __init__(self, specs: Sequence[TrialSpec], *, seed: int) -> None:
        """Takes every candidate that it may propose. The same seed gives the same proposals."""
        ...

    def ask(self, n: int) -> list[TrialSpec]:
        """Returns up to `n` specifications never proposed or told before: fewer, at last none, when they run out."""
        ...

    def tell(self, spec: TrialSpec, result: TrialResult) -> None:
        """Takes the result of a specification, from this run of the study or an earlier one."""
        ...


class Grid:
    """Every candidate, in the order of the space."""

    learns = False

    def __init__(self, specs: Sequence[TrialSpec], *, seed: int = 0) -> None:
        """Takes every candidate. The seed decides nothing here."""
        del seed
        self._waiting = dict.fromkeys(specs)

    def ask(self, n: int) -> list[TrialSpec]:
        """Returns the next `n` in order."""
        asked = [spec for spec, _ in zip(self._waiting, range(n), strict=False)]
        self._forget(asked)
        return asked

    def tell(self, spec: TrialSpec, result: TrialResult) -> None:
        """Leaves the specification out from now on, whatever its result."""
        del result
        self._forget([spec])

    def _forget(self, specs: Iterable[TrialSpec]) -> None:
        for spec in specs:
            self._waiting.pop(spec, None)


class Random:
    """Every candidate once, in an order drawn by the seed.

    Candidates are sorted by a hash of seed and trial id. The order is the same on every machine and version, and
    candidates that are added to a space do not change the order of the others.
    """

    learns = False

    def __init__(self, specs: Sequence[TrialSpec], *, seed: int) -> None:
        """Draws the order."""
        places = {spec: draw(seed, spec.trial_id) for spec in specs}
        self._grid = Grid(sorted(places, key=places.__getitem__))

    def ask(self, n: int) -> list[TrialSpec]:
        """Returns the next `n` that are drawn."""
        return self._grid.ask(n)

    def tell(self, spec: TrialSpec, result: TrialResult) -> None:
        """Leaves the specification out from now on, whatever its result."""
        self._grid.tell(spec, result)


STRATEGIES: Final[dict[str, type[Strategy]]] = {"grid": Grid, "random": Random}
"""Every strategy by name."""

_NOT_BUILT: Final = ("tpe", "model_guided")


def check_strategy(name: str) -> str:
    """Returns the name of a strategy that can be used.

    Raises:
        SpaceError: No strategy has that name, or it is not built yet.
    """
    if name in _NOT_BUILT:
        raise SpaceError(f"strategy {name} is not built yet; built: {', '.join(STRATEGIES)}")
    if name not in STRATEGIES:
        raise SpaceError(f'unknown strategy "{name}"; {closest(name, STRATEGIES)}')
    return name


def make_strategy(name: str, specs: Sequence[TrialSpec], *, seed: int) -> Strategy:
    """Makes a strategy over every kept candidate.

    Raises:
        SpaceError: No strategy has that name, or it is not built yet.
    """
    return STRATEGIES[check_strategy(name)](specs, seed=seed)

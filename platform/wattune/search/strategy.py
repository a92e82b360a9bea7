"""The strategies by name: they choose the kept candidate that is measured next."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from wattune.errors import SpaceError, closest
from wattune.run import Run
from wattune.search.strategies.model_guided import ModelGuided
from wattune.search.strategies.optuna_samplers import gp, tpe
from wattune.search.strategies.protocol import Observation, Problem, Strategy, draw
from wattune.trial import TrialSpec


class Grid:
    """Every candidate, in the order of the space."""

    learns = False
    stopped_because: str | None = None

    def __init__(self, specs: Sequence[TrialSpec]) -> None:
        self._waiting = dict.fromkeys(specs)

    def ask(self, n: int, expected_s: object = None) -> list[TrialSpec]:
        """Returns the next `n` in order."""
        del expected_s
        asked = [spec for spec, _ in zip(self._waiting, range(n), strict=False)]
        self._forget(asked)
        return asked

    def tell(self, spec: TrialSpec, result: Run) -> None:
        """Leaves the specification out from now on, whatever its result."""
        del result
        self._forget([spec])

    def _forget(self, specs: Iterable[TrialSpec]) -> None:
        for spec in specs:
            self._waiting.pop(spec, None)


class Random(Grid):
    """Every candidate once, in an order drawn by the seed.

    Candidates are sorted by a hash of seed and trial id. The order is the same on every machine and version, and
    candidates that are added to a space do not change the order of the others.
    """

    def __init__(self, specs: Sequence[TrialSpec], *, seed: int) -> None:
        places = {spec: draw(seed, spec.trial_id) for spec in specs}
        super().__init__(sorted(places, key=places.__getitem__))


__all__ = [
    "STRATEGIES",
    "Observation",
    "Problem",
    "Strategy",
    "check_strategy",
    "draw",
    "is_searcher",
    "make_strategy",
]

STRATEGIES: Final[dict[str, Callable[[Problem], Strategy]]] = {
    "grid": lambda problem: Grid(problem.specs),
    "random": lambda problem: Random(problem.specs, seed=problem.seed),
    "tpe": tpe,
    "gp": gp,
    "model_guided": ModelGuided,
}
"""Every strategy by name."""

_LISTED: Final = frozenset({"grid", "random"})
"""Strategies that need no objective."""

_SEARCHER: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)


def is_searcher(name: str) -> bool:
    """Returns whether a strategy is named as a class of Ray Tune's searchers, `package:Class`."""
    return _SEARCHER.fullmatch(name) is not None


def check_strategy(name: str) -> str:
    """Returns the name of a strategy that can be used.

    A searcher's class is looked for when it is made. Raises `SpaceError` where no strategy has that name.
    """
    if name not in STRATEGIES and not is_searcher(name):
        raise SpaceError(f'unknown strategy "{name}"; {closest(name, STRATEGIES)}')
    return name


def make_strategy(name: str, problem: Problem) -> Strategy:
    """Makes a strategy over every kept candidate.

    It is a key of `STRATEGIES`; a searcher of Ray's is made by `wattune.orchestrate.ray_searcher`. `grid` and `random`
    need no question; estimates and `warm` results are used by `model_guided`. Raises `SpaceError` where no
    strategy has that name, or it needs an objective and there is none.
    """
    if name not in STRATEGIES:
        raise SpaceError(f'unknown strategy "{name}"; {closest(name, STRATEGIES)}')
    if problem.question is None and name not in _LISTED:
        raise SpaceError(f"strategy {name} learns and has no objective; pass one")
    return STRATEGIES[name](problem)

"""Strategies that do not learn: candidates in the order of the space, or in a drawn order."""

from collections.abc import Iterable, Sequence

from wattune.run import Run
from wattune.search.strategies.protocol import draw
from wattune.trial import TrialSpec


class Grid:
    """Every candidate, in the order of the space."""

    learns = False
    stopped_because: str | None = None

    def __init__(self, specs: Sequence[TrialSpec]) -> None:
        self._waiting = dict.fromkeys(specs)

    def ask(self, n: int) -> list[TrialSpec]:
        """Returns the next `n` in order."""
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

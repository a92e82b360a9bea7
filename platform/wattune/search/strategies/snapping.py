"""Candidates as axes, for samplers that propose values axis by axis and know nothing of what was rejected."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from wattune.search.strategies.features import columns_of
from wattune.search.strategies.protocol import draw
from wattune.trial import TrialSpec

_DERIVED: Final = frozenset({"micro_batches"})
"""Numbers that follow from others. A sampler would vary twice what is one choice."""


class Axes:
    """Candidates by the axes that vary: numbers by their rank among the values that occur, and choices."""

    def __init__(self, specs: Sequence[TrialSpec], *, seed: int) -> None:
        """Takes the candidates; the seed decides between equally near ones."""
        self.specs = sorted(specs, key=lambda spec: draw(seed, spec.trial_id))
        self.values: dict[str, list[Any]] = {}
        """Values of each axis: ranks of numbers, or names."""
        self.params: list[dict[str, Any]] = [{} for _ in self.specs]
        """Values of each candidate."""
        self._index = {spec: row for row, spec in enumerate(self.specs)}
        self._free = np.ones(len(self.specs), dtype=bool)
        self._columns: dict[str, Any] = {}
        numbers, choices = columns_of(self.specs)
        for name, numeric in numbers.items():
            known, ranks = np.unique(numeric, return_inverse=True)
            if name not in _DERIVED and len(known) > 1:
                self._add(name, list(range(len(known))), [int(rank) for rank in ranks])
        for name, column in choices.items():
            if name not in self.values and len(set(column)) > 1:
                self._add(name, sorted(set(column)), column)

    @property
    def num_free(self) -> int:
        """Candidates that were neither taken nor told."""
        return int(self._free.sum())

    def is_number(self, name: str) -> bool:
        """Returns whether an axis is one of numbers, whose ranks have an order."""
        return isinstance(self.values[name][0], int)

    def take(self, spec: TrialSpec) -> int | None:
        """Leaves a candidate out from now on; returns its row, None where it is not a candidate."""
        row = self._index.get(spec)
        if row is not None:
            self._free[row] = False
        return row

    def take_nearest(self, params: Mapping[str, Any]) -> int:
        """Takes the free candidate that differs least from proposed values; the draw breaks ties."""
        distance = np.zeros(len(self.specs))
        for name, column in self._columns.items():
            if self.is_number(name):
                distance += np.abs(column - params[name]) / (len(self.values[name]) - 1)
            else:
                distance += column != params[name]
        distance[~self._free] = math.inf
        row = int(distance.argmin())
        self._free[row] = False
        return row

    def _add(self, name: str, values: list[Any], column: list[Any]) -> None:
        self.values[name] = values
        self._columns[name] = np.array(column)
        for params, value in zip(self.params, column, strict=True):
            params[name] = value

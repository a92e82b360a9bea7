"""Rows of `at_scale.py`, a module for each part of the platform, and what they are made of.

A module declares functions that give rows. Each runs in a process of its own, with a time-out:

    @measures(timeout_s=300)
    def memory() -> Iterator[Row]:
        yield Row("head's memory a running trial", "MB", bar=20, value=measured_mb, spread=scatter_mb)

A row may be given at once or one after another: what came before a time-out is kept.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Growth as a power of size, fitted to logarithms of figures at several sizes."""

    exponent: float
    spread: float
    """Standard error of the exponent."""
    smallest: float
    largest: float

    @classmethod
    def of(cls, sizes: Sequence[float], figures: Sequence[float]) -> "Fit":
        """Fits y = a x^b by least squares over three or more sizes."""
        x, y = np.log(np.asarray(sizes, float)), np.log(np.asarray(figures, float))
        (b, a), left = np.polyfit(x, y, 1), x - x.mean()
        error = np.sqrt(np.sum((y - b * x - a) ** 2) / (len(x) - 2) / np.sum(left**2))
        return cls(exponent=float(b), spread=float(error), smallest=min(sizes), largest=max(sizes))

    def row(self, figure: str, bar: float) -> "Row":
        """Makes a row of the exponent, with the range of sizes it was fitted to."""
        return Row(
            f"{figure}: exponent from {self.smallest:,g} to {self.largest:,g}",
            "",
            bar=bar,
            value=self.exponent,
            spread=self.spread,
        )


@dataclass(frozen=True)
class Row:
    """One figure beside its bar; without a bar it is told only."""

    figure: str
    unit: str
    bar: float | None = None
    value: float = float("nan")
    spread: float | None = None
    """Scatter of the value, in its unit: a standard deviation or standard error; None where it was measured once."""
    at_least: bool = False
    """The bar is the least that will do, not the most."""

    @property
    def is_met(self) -> bool:
        """True where the value keeps its bar."""
        if self.bar is None:
            return True
        return self.value >= self.bar if self.at_least else self.value <= self.bar


Measure = Callable[[], Iterable[Row]]

TIMEOUTS_S: Final[dict[Measure, float]] = {}
"""Functions that give rows, in the order of their modules, and the seconds that each may take."""


def measures(timeout_s: float) -> Callable[[Measure], Measure]:
    """Declares a function that gives rows, and the longest it may take."""

    def declare(function: Measure) -> Measure:
        TIMEOUTS_S[function] = timeout_s
        return function

    return declare

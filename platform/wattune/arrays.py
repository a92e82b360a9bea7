"""Arrays by what they hold, and linear algebra by one thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
"""Integers; times are nanoseconds."""
Indices: TypeAlias = NDArray[np.intp]
Bools: TypeAlias = NDArray[np.bool_]
AnyFloats: TypeAlias = NDArray[np.floating[Any]]
"""Floats of any width."""


def envelope(x: AnyFloats, y: AnyFloats, most_parts: int) -> tuple[AnyFloats, AnyFloats]:
    """Returns a trace, or the least and the greatest sample of each of so many parts of a long one: peaks stay."""
    if len(x) <= 2 * most_parts:
        return x, y
    parts = list(pairwise(np.linspace(0, len(x), most_parts + 1, dtype=int)))
    kept = np.unique([begin + pick(y[begin:end]) for begin, end in parts for pick in (np.argmin, np.argmax)])
    return x[kept], y[kept]


@contextmanager
def one_thread() -> Iterator[None]:
    """Does linear algebra without threads, which wait for one another longer than some hundred rows take.

    On two busy processors most of the time of suggestions was their waiting.
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        yield

"""Arrays by what they hold."""

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
